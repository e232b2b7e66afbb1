"""Tasks are answered by the artifact as it is judged."""

from pathlib import Path

import pytest

from quantflow.planning.recipe import Resources, Validate
from quantflow.progress import Silent
from quantflow.validating import task_scores

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-llama"


class Opened(Exception):
    """The artifact was opened; nothing else is asked of it here."""


@pytest.mark.parametrize("exact", [True, False])
def test_inputs_are_left_alone_in_tasks_where_that_is_asked_for(monkeypatch, tmp_path, exact):
    pytest.importorskip("lm_eval")
    from quantflow.validating import task_answers

    def opened(folder, **options):
        assert folder == EXAMPLE and options["exact"] is exact
        raise Opened

    monkeypatch.setattr(task_answers, "load", opened)
    told = {"resources": Resources(), "kept": tmp_path, "key": "0", "progress": Silent()}
    with pytest.raises(Opened):
        task_scores.score_tasks(
            EXAMPLE, EXAMPLE, options=Validate(tasks=("small_piqa",), exact=exact), **told
        )

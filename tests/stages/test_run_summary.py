"""The end of a run: a table of seconds, and a text of each artifact that is made once."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantflow.errors import UnsupportedError
from quantflow.planning.recipe import recipe_from
from quantflow.stages import run_summary
from quantflow.stages.run_summary import StageTimes, texts, write_texts
from quantflow.validating import sample_text as samples


class Said:
    """A progress that keeps its lines."""

    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)


@pytest.fixture
def finished(tmp_path):
    """A recipe of two artifacts, and the folder of its run with what write_texts reads."""
    text = tmp_path / "heldout.jsonl"
    text.write_text('{"text": "hello"}\n')
    folder = tmp_path / "run"
    for name in ("a", "b"):
        (folder / "4-export" / name).mkdir(parents=True)
        digest(folder, name, "1")
    (folder / "5-validate").mkdir()
    entries = [{"name": "a", "scheme": "FP8"}, {"name": "b", "scheme": "W8A8"}]
    return recipe_from({"model": "m", "quantize": entries, "validate": {"text": str(text)}}), folder


def digest(folder, name, value):
    """Leave what `read_manifest` is replaced by: the digest of an artifact."""
    (folder / "4-export" / name / "digest").write_text(value)


@pytest.fixture
def asked(monkeypatch):
    """The artifacts that were asked for a text, in order.

    Each says its own name and how it was asked.
    """
    names = []

    def sample_text(artifact, *, disk_offload, **_):
        names.append((Path(artifact).name, disk_offload))
        return "prompt", f"{Path(artifact).name} says\n{len(names)}"

    monkeypatch.setattr(samples, "sample_text", sample_text)
    monkeypatch.setattr(
        run_summary, "read_manifest", lambda path: {"digest": (path / "digest").read_text()}
    )
    return names


def test_seconds_stand_by_stage_and_artifact_with_their_sums(monkeypatch):
    moments = iter([0.0, 2.0, 10.0, 11.5, 20.0, 20.5, 30.0, 34.0])
    monkeypatch.setattr(run_summary, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    times = StageTimes()
    for stage, of in (
        ("measure", ()),
        ("quantize", ("int4",)),
        ("export", ("int4",)),
        ("quantize", ("fp8-long",)),
    ):
        with times.timing(stage, *of):
            pass
    assert times.table().splitlines() == [
        "seconds   measure  quantize  export  sum",
        "all           2.0                    2.0",
        "int4                    1.5     0.5  2.0",
        "fp8-long                4.0          4.0",
        "sum           2.0       5.5     0.5  8.0",
    ]


def test_seconds_of_a_stage_that_fails_count(monkeypatch):
    moments = iter([0.0, 3.0])
    monkeypatch.setattr(run_summary, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    times = StageTimes()
    with pytest.raises(UnsupportedError), times.timing("measure"):
        raise UnsupportedError("a", "b")
    assert times.table().splitlines()[1] == "all          3.0  3.0"


def test_a_text_is_made_once_and_again_when_its_artifact_is_another(finished, asked):
    recipe, folder = finished
    write_texts(recipe, folder, StageTimes(), Said())
    assert asked == [("a", False), ("b", False)]
    write_texts(recipe, folder, StageTimes(), Said())
    assert len(asked) == 2
    digest(folder, "b", "2")
    write_texts(recipe, folder, StageTimes(), Said())
    assert asked[2:] == [("b", False)]
    Path(recipe.validate.text).write_text('{"text": "another"}\n')
    write_texts(recipe, folder, StageTimes(), Said())
    assert len(asked) == 5


def test_texts_are_lines_after_the_end_of_the_prompt(finished, asked):
    recipe, folder = finished
    assert texts(folder, ["a", "b"]) == ""
    write_texts(recipe, folder, StageTimes(), Said())
    assert (
        texts(folder, ["a", "b"])
        == '\nprompt  "prompt"\na       "a says\\n1"\nb       "b says\\n2"'
    )
    path = folder / "5-validate" / "texts.json"
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({"a": {**kept["a"], "prompt": "x" * 100}}))
    assert texts(folder, ["a", "b"]).splitlines()[1] == f'prompt  "...{"x" * 72}"'


def test_an_artifact_that_cannot_be_run_here_is_said_and_asked_again(finished, asked, monkeypatch):
    recipe, folder = finished

    def refuse(artifact, **_):
        raise UnsupportedError("device: needs a card", "use another")

    made = samples.sample_text
    monkeypatch.setattr(samples, "sample_text", refuse)
    said = Said()
    write_texts(recipe, folder, StageTimes(), said)
    assert said.lines == [f"generate {name}: no text: device: needs a card" for name in ("a", "b")]
    assert texts(folder, ["a", "b"]) == ""
    monkeypatch.setattr(samples, "sample_text", made)
    write_texts(recipe, folder, StageTimes(), said)
    assert len(asked) == 2


@pytest.mark.parametrize("bound", [{"max_memory": "4GiB"}, {"disk_offload": True}])
def test_a_recipe_that_bounds_the_memory_bounds_that_of_the_texts(finished, asked, bound):
    recipe, folder = finished
    write_texts(
        recipe_from(
            {
                "model": "m",
                "quantize": [{"name": "a", "scheme": "FP8"}],
                "resources": bound,
                "validate": {"text": recipe.validate.text},
            }
        ),
        folder,
        StageTimes(),
        Said(),
    )
    assert asked == [("a", True)]

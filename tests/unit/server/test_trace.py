"""A server that traces some of its steps."""

import json

import pytest

from quantflow.errors import InputError
from quantflow.runtime import step_trace
from quantflow.runtime.step_trace import StepTrace, TracedSteps


@pytest.mark.parametrize("shapes", [False, True])
def test_the_steps_after_those_that_are_left_alone_are_traced_into_a_file_of_the_models_name(
    serve, tmp_path, shapes
):
    options = {
        "profile": tmp_path / "new",
        "profile_steps": 3,
        "profile_wait": 2,
        "profile_warmup": 2,
        "profile_shapes": shapes,
    }
    path = tmp_path / "new" / "org-code.json"
    with serve(name="org/code", **options) as server:
        # Six steps: its prompt, and five tokens. Without the four that are left alone the trace
        # ends before the last.
        assert server.generate("def", max_new_tokens=6).status == 200
        assert not path.exists()
        assert server.generate("import", max_new_tokens=6).status == 200
    events = json.loads(path.read_text())["traceEvents"]
    assert [event.get("name") for event in events if event.get("cat") == "user_annotation"].count(
        "step"
    ) == 3
    assert any("Input Dims" in event.get("args", {}) for event in events) == shapes


def test_without_a_number_of_steps_nothing_is_written(serve, tmp_path):
    with serve(profile=tmp_path / "new") as server:
        assert server.generate("def", max_new_tokens=2).status == 200
    assert not (tmp_path / "new").exists()


def test_a_trace_that_cannot_be_written_is_told_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file"):
        StepTrace(TracedSteps(path=tmp_path / "file" / "a.json", skip=0, count=1))


def test_a_trace_that_fails_later_stops_no_request(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(step_trace.profile, "export_chrome_trace", full)
    steps = StepTrace(TracedSteps(path=tmp_path / "a.json", skip=0, count=1))
    with pytest.warns(UserWarning, match="no trace: .*No space left"):
        assert steps.step(lambda: 1) == 1
    assert steps.done and steps.step(lambda: 2) == 2

"""SIGTERM, SIGINT and a second signal during each stage.

They end it with the promised code, and a state that continues to the same bytes.
"""

import itertools
import re

import pytest

pytestmark = pytest.mark.slow

# Outside a step the first of two signals stops the run, before the second is sent.
CODES = {"TERM": {143}, "INT": {130}, "INT+TERM": {130, 143}}
WORDS = {130: "interrupted", 143: "terminated"}
STAGES = ("measure", "quantize", "file-to-file", "export", "validate", "run")
FEW, MANY = 3, 12  # moments per stage, with the signals in turn


def interrupt(command, case: tuple[str, int, str]) -> bool:
    """Send a signal before one call; return whether the running step was finished first."""
    kind, at, do = case
    with command.folder() as folder:
        outcome = command.run(folder, kind=kind, at=at, do=do)
        assert outcome.code in CODES[do], (case, outcome)
        assert outcome.error == [
            f"error: {WORDS[outcome.code]}",
            "  fix: the same command continues where this one stopped",
        ]
        command.check_state(folder)
        command.check_continues(folder)
        return "finishing" in outcome.stderr


@pytest.mark.parametrize("moments", [FEW, pytest.param(MANY, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("stage", STAGES)
def test_a_signal_ends_a_stage_with_its_code_and_the_same_command_continues(
    commands, stage, moments
):
    command = commands(stage)
    writes = command.outcome.counts["fsync"]
    places = sorted({1 + writes * place // moments for place in range(moments)})
    cases = [("fsync", at, do) for at, do in zip(places, itertools.cycle(CODES), strict=False)]
    found = command.at_once(lambda case: interrupt(command, case), cases)
    print(f"{stage}: {len(found)} signals, {sum(found)} during a step")
    # of several stages: three moments may all lie between steps
    few = stage == "run" and moments == FEW
    assert sum(found) > 0 or stage == "export" or few


def test_the_step_that_runs_is_on_disk_when_a_terminated_run_ends(commands):
    command = commands("file-to-file")
    with command.folder() as folder:
        outcome = command.run(
            folder, kind="write", at=command.outcome.counts["write"] // 2, do="TERM"
        )
        assert outcome.code == 143
        told = re.search(
            r"^finishing quantize fp8_dynamic: layer (\d); send it again to stop at once$",
            outcome.stderr,
            re.M,
        )
        assert told is not None, outcome.stderr
        assert (folder / "out" / "layers" / f"0000{int(told[1]) - 1}.json").exists()
        assert not (folder / "out" / "layers" / f"0000{told[1]}.json").exists()

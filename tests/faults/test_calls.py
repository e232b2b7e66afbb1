"""A fault at the k-th open, write, fsync, rename and unlink of a small run of each stage.

Each ends with the promised exit code and two lines that name a file, leaves nothing partial under a
final name, and the same command then makes the same bytes. `slow` is every tenth k with the
faults in turn, and every k with every fault of one stage; `sweep` is that of every stage.
"""

from collections import Counter
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.slow

KINDS = ("open", "write", "fsync", "rename", "unlink")
PROMISED = {"EIO": 3, "ENOSPC": 5, "KILL": -9}
STAGES = (
    "measure",
    "measure-gradients",
    "quantize",
    "file-to-file",
    "unify",
    "unify-shards",
    "export",
    "export-shards",
    "export-replace",
    "validate",
)
# the others are of the sweep
QUICK = ("measure", "quantize", "file-to-file", "unify", "export", "export-gguf")
STEP = 10


def cases(counts: dict[str, int], *, every: int) -> Iterator[tuple[str, int, str]]:
    """Yield (kind, k, fault).

    With `every` 1 there is each fault at each k, else the faults in turn at every so many k.
    """
    turn = 0
    for kind in KINDS:
        for at in range(1, counts[kind] + 1):
            if every == 1:
                yield from ((kind, at, do) for do in PROMISED)
            elif at % every == 1:
                yield kind, at, list(PROMISED)[turn % len(PROMISED)]
                turn += 1


def strike(command, case: tuple[str, int, str]) -> str:
    """Run one case and return how it ended."""
    kind, at, do = case
    with command.folder() as folder:
        outcome = command.run(folder, kind=kind, at=at, do=do)
        if outcome.code == 0:  # the fault hit a tidying-up, which happens again
            command.check_made(folder)
        else:
            assert outcome.code == PROMISED[do], (case, outcome)
            command.check_state(folder)
        if outcome.code > 0:
            cause, remedy = outcome.error
            assert cause.startswith(f"error: {folder}"), (case, outcome.stderr)
            assert remedy.startswith("  fix: ") and "Traceback" not in outcome.stderr, (
                case,
                outcome.stderr,
            )
        command.check_continues(folder)
    return do if outcome.code else "survived"


def sweep(command, *, every: int) -> Counter[str]:
    planned = list(cases(command.outcome.counts, every=every))
    ended = Counter(command.at_once(lambda case: strike(command, case), planned))
    calls = ", ".join(f"{command.outcome.counts[kind]} {kind}" for kind in KINDS)
    print(f"{command.name}: {calls}; {len(planned)} faults, ended {dict(sorted(ended.items()))}")
    return ended


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_written_past_the_calls_that_fail_here(commands, stage):
    assert commands(stage).outcome.alien == []


@pytest.mark.parametrize(
    "stage",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.sweep) for name in STAGES],
)
def test_a_fault_at_every_tenth_call_ends_as_promised_and_continues(commands, stage):
    ended = sweep(commands(stage), every=STEP)
    assert ended.total() > 3 and ended["survived"] <= ended.total() // 3


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "unify" else pytest.mark.sweep)
        for name in STAGES
    ],
)
def test_every_fault_at_every_call_ends_as_promised_and_continues(commands, stage):
    ended = sweep(commands(stage), every=1)
    assert ended.total() > 3 and ended["survived"] <= ended.total() // 3

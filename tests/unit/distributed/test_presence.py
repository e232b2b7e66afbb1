"""A rank that is missing or silent is named within minutes, and nobody else is."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from torch import distributed

from quantflow.distributed.launch import launched_environment
from quantflow.distributed.presence import SILENCE, Presence, await_all
from quantflow.errors import ResourceError

WAIT = 240  # seconds; a test that waits longer is stuck


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Broken(distributed.HashStore):
    """A store whose machine does not answer."""

    def set(self, *_: object) -> None:
        raise distributed.DistNetworkError("no answer")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def ranks(world: int, clock: Clock) -> list[Presence]:
    store = distributed.HashStore()
    return [Presence(store, rank=rank, world=world, clock=clock) for rank in range(world)]


def test_ranks_that_look_are_heard_for_any_time(clock):
    three = ranks(3, clock)
    for _ in range(10):
        clock.now += SILENCE - 1
        assert [rank.look() for rank in three] == [None] * 3


def test_a_silent_rank_is_named_after_the_time_and_not_before(clock):
    first, second, third = ranks(3, clock)
    for rank in (first, second, third):
        rank.look()
    assert first.look() is None  # it has now seen the others' last signs
    clock.now += SILENCE
    second.look()
    assert first.look() is None
    clock.now += 1
    assert first.look() == "rank 2 of 3"


def test_ranks_that_never_gave_a_sign_are_named_together(clock):
    first, *_ = ranks(3, clock)
    clock.now += SILENCE + 1
    assert first.look() == "ranks 1, 2 of 3"


def test_a_rank_that_has_ended_well_may_be_silent(clock):
    first, second = ranks(2, clock)
    second.look()
    second.leave()
    for _ in range(3):
        clock.now += SILENCE + 1
        assert first.look() is None


def test_a_process_that_was_stopped_itself_listens_anew(clock):
    first, second = ranks(2, clock)
    clock.now += SILENCE + 1
    first.listen_anew()
    assert first.look() is None
    clock.now += SILENCE + 1
    assert first.look() == "rank 1 of 2"


def test_a_store_that_does_not_answer_is_named_after_the_time(clock):
    rank = Presence(Broken(), rank=1, world=2, clock=clock)
    clock.now += SILENCE
    assert rank.look() is None
    clock.now += 1
    assert rank.look() == "the store of the ranks, on the first machine,"


def test_ranks_that_do_not_come_are_named():
    with pytest.raises(ResourceError, match=r"^ranks 1, 3 of 4 did not come within 0\.1 s"):
        store = distributed.HashStore()
        store.set("quantflow/came/2", b"")
        await_all(store, rank=0, world=4, timeout=timedelta(seconds=0.1))


# A rank that meets the others, says so, and waits for what they send.
RANK = """
import sys, datetime, torch
from torch import distributed
from quantflow.distributed import presence, team
presence.INTERVAL, presence.SILENCE = 0.2, 3.0
from quantflow.reporting.failures import end_at_once, exit_code_of

def work():
    with team.meet(datetime.timedelta(seconds=float(sys.argv[1]))):
        print("met", flush=True)
        sys.stdin.readline()
        distributed.all_reduce(torch.ones(1))
        distributed.destroy_process_group()

end_at_once(exit_code_of(work))
"""


@contextmanager
def processes(variables: list[dict[str, str]], seconds: float) -> Iterator[list[subprocess.Popen]]:
    started = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", RANK, str(seconds)],
            env=each,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in variables
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def launched(folder: Path, world: int) -> list[dict[str, str]]:
    return [launched_environment(str(folder), rank=rank, world=world) for rank in range(world)]


def by_address(folder: Path, world: int) -> list[dict[str, str]]:
    """The variables of ranks that somebody else starts, as Slurm does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = []
    for each in launched(folder, world):
        del each["QUANTFLOW_LAUNCHED"]
        variables.append(each | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    return variables


@pytest.mark.parametrize("environment", [launched, by_address])
def test_a_rank_that_is_stopped_ends_the_others_by_its_name(tmp_path, environment):
    with processes(environment(tmp_path, 3), WAIT) as three:
        assert [rank.stdout.readline() for rank in three] == ["met\n"] * 3
        os.kill(three[2].pid, signal.SIGSTOP)
        for rank in three[:2]:
            rank.stdin.write("\n")
            rank.stdin.flush()
        said = [rank.communicate(timeout=WAIT)[1] for rank in three[:2]]
        assert [rank.returncode for rank in three[:2]] == [5, 5]
        # The store may end with the first rank, before the second one has named anybody.
        assert "error: rank 2 of 3 has not been heard for 3 s\n" in "".join(said)


@pytest.mark.parametrize("environment", [launched, by_address])
def test_ranks_that_take_their_time_end_well(tmp_path, environment):
    with processes(environment(tmp_path, 2), WAIT) as two:
        assert [rank.stdout.readline() for rank in two] == ["met\n"] * 2
        two[0].stdin.write("\n")
        two[0].stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):  # the first waits longer than a silence
            two[0].wait(timeout=5)
        _, said = two[1].communicate("\n", timeout=WAIT)
        assert (two[1].returncode, two[0].wait(timeout=WAIT)) == (0, 0), said


def test_a_rank_that_was_not_started_is_named(tmp_path):
    with processes(by_address(tmp_path, 2)[:1], 3) as (rank,):
        _, said = rank.communicate(timeout=WAIT)
        assert rank.returncode == 5
        assert "error: rank 1 of 2 did not come within 3 s\n" in said


def test_without_the_first_rank_its_address_is_named(tmp_path):
    with processes(by_address(tmp_path, 2)[1:], 3) as (rank,):
        _, said = rank.communicate(timeout=WAIT)
        assert rank.returncode == 5
        assert "error: rank 1 of 2: no store at 127.0.0.1:" in said

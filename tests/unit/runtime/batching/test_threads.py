"""Threads of loops: engines share one team, and hold none of torch's while they wait.

libgomp lets all of its threads sleep between two loops where they exceed the cores.
"""

import os
import time

import pytest
import torch

from quantflow.runtime.batching import BatchRequest, Engine
from quantflow.runtime.load import load
from quantflow.runtime.operations import release_threads


def tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    release_threads()
    torch.set_num_threads(before)


def answered(engine: Engine) -> None:
    request = BatchRequest(input_ids=tuple(range(1, 40)), max_new_tokens=4, ends=())
    assert len(list(engine.submit(request))) == 4 and engine.counters().steps >= 4


def few(before: set[str], most: int) -> set[str]:
    """Threads that are new, once they are `most` or have had the time to end."""
    patience = time.monotonic() + 20
    while len(tasks() - before) > most and time.monotonic() < patience:
        time.sleep(0.01)
    return tasks() - before


def test_engines_share_a_team_and_hold_no_threads_of_torch_while_they_wait(two_threads, folders):
    loaded = load(folders("W8A8"), decoder="auto")
    with Engine(loaded.decoder) as engine:
        answered(engine)  # the team is there from now on
    release_threads()
    before = tasks()
    torch.ones(1 << 24).mul_(2)
    of_this_thread = tasks() - before
    assert of_this_thread
    with Engine(loaded.decoder) as first, Engine(loaded.decoder) as second:
        answered(first)
        answered(second)
        assert len(few(before, 2)) == 2  # the engines themselves
        assert not tasks() & of_this_thread

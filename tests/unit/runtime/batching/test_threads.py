"""Threads of loops: libgomp lets all sleep between two loops where they exceed the cores."""

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


def test_whoever_made_an_engine_and_an_engine_that_waits_hold_no_threads_of_loops(
    two_threads, folders
):
    loaded = load(folders("W8A8"), decoder="auto")
    release_threads()
    before = tasks()
    torch.ones(1 << 24).mul_(2)
    of_this_thread = tasks() - before
    assert of_this_thread
    with Engine(loaded.decoder) as engine:
        events = list(
            engine.submit(BatchRequest(input_ids=tuple(range(1, 40)), max_new_tokens=4, ends=()))
        )
        assert len(events) == 4 and engine.counters().steps >= 4
        patience = time.monotonic() + 20
        while len(tasks() - before) > 1 and time.monotonic() < patience:
            time.sleep(0.01)
        assert not tasks() & of_this_thread
        assert len(tasks() - before) == 1  # the engine itself

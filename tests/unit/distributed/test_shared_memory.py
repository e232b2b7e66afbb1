"""Ranks that map the same memory get all parts in order, of any size; here they are threads."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from quantflow.distributed import shared_memory, team
from quantflow.distributed.shared_memory import SharedMemory, nearest
from quantflow.errors import ResourceError

pytestmark = pytest.mark.skipif(
    not Path("/dev/shm").is_dir() or shared_memory.platform.machine() not in ("x86_64", "AMD64"),
    reason="there is no such memory",
)


def left_behind():
    return sorted(Path("/dev/shm").glob("quantflow-*"))


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_gets_every_part_in_order_and_no_file_is_left(world, among):
    sizes = [1, 7, 64, 4096, 250_000, 262_144, 262_145, 3]  # floats; a room holds 262,144

    def work(sockets):
        wire = nearest("generate", sockets)
        assert isinstance(wire, SharedMemory) and (wire.rank, wire.world) == (sockets.rank, world)
        before, found = sockets.parts, []
        for turn in range(60):
            if (turn + wire.rank) % 11 == 0:
                time.sleep(0.002)  # ranks come late in turns
            size = sizes[turn % len(sizes)]
            part = torch.arange(size, dtype=torch.float32) + 1000 * turn + 0.25 * wire.rank
            found.append(wire.gather(part[None]))
        numbers = (
            torch.tensor([5, 6, -(2**60)]) if wire.rank == 0 else torch.zeros(3, dtype=torch.int64)
        )
        wire.broadcast(numbers)
        return found, numbers.tolist(), sockets.parts - before

    for found, numbers, over_sockets in among(world, work):
        for turn, parts in enumerate(found):
            size = sizes[turn % len(sizes)]
            expected = [
                torch.arange(size, dtype=torch.float32) + 1000 * turn + 0.25 * rank
                for rank in range(world)
            ]
            assert torch.equal(parts, torch.stack(expected)[:, None])
        assert numbers == [5, 6, -(2**60)]
        assert over_sockets == 7  # the size that exceeds a room by one float comes seven times
    assert left_behind() == []


@pytest.mark.parametrize("why", ["another processor", "no room"])
def test_where_there_is_no_such_memory_the_sockets_stay(why, monkeypatch, among):
    if why == "another processor":
        monkeypatch.setattr(shared_memory.platform, "machine", lambda: "aarch64")
    else:

        def full(*_arguments):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    assert among(2, lambda sockets: nearest("generate", sockets) is sockets) == [True, True]
    assert left_behind() == []


def test_a_rank_that_waits_sleeps_until_the_other_is_there(among):
    def work(sockets):
        wire = nearest("generate", sockets)
        if wire.rank == 1:
            time.sleep(0.5)
        begin = time.thread_time()
        parts = wire.gather(torch.tensor([wire.rank]))
        return parts.flatten().tolist(), time.thread_time() - begin

    for parts, computed in among(2, work):
        assert parts == [0, 1]
        assert computed < 0.05  # of the half second that the other one let it wait


def test_a_rank_whose_process_ended_is_not_waited_for(monkeypatch, meeting):
    monkeypatch.setattr(team, "GRACE", 0.0)
    monkeypatch.setattr(team.signal, "signal", lambda *_: None)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    memory = shared_memory.mmap.mmap(-1, shared_memory.size_of(2))
    wire = SharedMemory("generate", meeting(0, 2), memory, processes=[os.getpid(), ended.pid])
    with pytest.raises(
        ResourceError,
        match="generate: another rank ended, or cannot be reached: rank 1 has no process",
    ):
        wire.gather(torch.zeros(1))

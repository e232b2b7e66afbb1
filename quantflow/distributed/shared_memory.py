"""Exchange between ranks of one machine through memory that all map: faster than sockets.

    counters     a counter of each rank, 64 bytes apart: the number of parts it has put there
    two rooms    a part of every rank in each; parts go to the rooms in turn

A rank writes its part, then counts it, and reads when all ranks have counted as many. A rank that
writes into a room again has seen all ranks count the part in between, so all have read the room.
Other processors see stores in the order in which they were made on x86; elsewhere, between
machines, and for parts that are larger than a room, sockets do it.
"""

import mmap
import os
import platform
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from quantflow.distributed.team import connected
from quantflow.distributed.wire import Wire

# The folder of files that are memory; ours are removed when all ranks have opened them.
_FOLDER = Path("/dev/shm")
_ORDERED = ("x86_64", "AMD64")
_LINE, _ROOM = 64, 1 << 20  # bytes between two counters, and of a rank's part
_NAME = 64  # bytes of a file's name, padded
# Number of looks before the first pause, seconds of a pause, and number of looks after which it is
# checked that the other rank still lives.
_SPINS, _PAUSE, _LOOK = 2000, 5e-5, 4000


class SharedMemory:
    """A `Wire` between processes of one machine.

    Attributes:
        rank, world: see `Wire`.
    """

    def __init__(self, verb: str, wire: Wire, memory: mmap.mmap, *, processes: list[int]) -> None:
        """Take the memory; all ranks have to.

        Args:
            verb: verb of the command line, for messages.
            wire: sockets between the same ranks, for parts that are too large.
            memory: `size_of(world)` bytes, zeros.
            processes: process ids of the ranks.
        """
        self.rank, self.world = wire.rank, wire.world
        self._verb, self._wire, self._processes, self._count = verb, wire, processes, 0
        self._counters = memoryview(memory)[: self.world * _LINE].cast("q")
        rooms = torch.frombuffer(memory, dtype=torch.uint8, offset=self.world * _LINE)
        self._rooms = rooms.view(2, self.world, _ROOM)  # [2, ranks, bytes]

    def gather(self, part: Tensor) -> Tensor:
        """See `Wire.gather`."""
        if part.nbytes > _ROOM:
            return self._wire.gather(part)
        self._count += 1
        room = self._rooms[self._count % 2, :, : part.nbytes]  # [ranks, bytes]
        room[self.rank] = part.reshape(-1).view(torch.uint8)  # [bytes]
        # The part is in the room before it is counted; nobody reads a part that is not counted.
        self._counters[self.rank * _LINE // 8] = self._count
        for other in range(self.world):
            self._wait(other)
        return (
            room.clone(memory_format=torch.contiguous_format)
            .view(part.dtype)
            .view(self.world, *part.shape)
        )

    def broadcast(self, numbers: Tensor) -> None:
        """See `Wire.broadcast`."""
        numbers.copy_(self.gather(numbers)[0])

    def _wait(self, other: int) -> None:
        """Wait until a rank has counted as many parts as this one.

        Raises:
            ResourceError: it ended.
        """
        at = other * _LINE // 8
        looks = 0
        while self._counters[at] < self._count:
            looks += 1
            if looks < _SPINS:
                os.sched_yield()
            else:
                time.sleep(_PAUSE)
            if looks % _LOOK == 0 and not _alive(self._processes[other]):
                with connected(self._verb):
                    raise RuntimeError(f"rank {other} has no process")


def size_of(world: int) -> int:
    """The bytes of memory that so many ranks need."""
    return world * (_LINE + 2 * _ROOM)


def nearest(verb: str, wire: Wire) -> Wire:
    """A wire through memory where all ranks can have it, else `wire`; all ranks have to call this.

    Args:
        verb: verb of the command line, for messages.
        wire: sockets between the same ranks.
    """
    memory, name = None, b""
    if wire.rank == 0 and platform.machine() in _ORDERED and _FOLDER.is_dir():
        with suppress(OSError):
            descriptor, made = tempfile.mkstemp(prefix="quantflow-", dir=_FOLDER)
            name = Path(made).name.encode()
            memory = _mapped(descriptor, size_of(wire.world))
    told = torch.tensor(list(name.ljust(_NAME, b"\0")))
    wire.broadcast(told)
    path = _FOLDER / bytes(told.tolist()).rstrip(b"\0").decode()
    if wire.rank and path != _FOLDER:
        with suppress(OSError):  # another machine, or another container of this one
            memory = _mapped(os.open(path, os.O_RDWR), size_of(wire.world))
    processes = wire.gather(torch.tensor([os.getpid()])).flatten().tolist()
    near = memory is not None and all(map(_alive, processes))
    everywhere = bool(wire.gather(torch.tensor([near])).all())
    if wire.rank == 0 and name:
        # what is mapped stays; nothing is left behind, however this ends
        path.unlink(missing_ok=True)
    if memory is None or not everywhere:
        return wire
    return SharedMemory(verb, wire, memory, processes=processes)


def _mapped(descriptor: int, size: int) -> mmap.mmap:
    """Map a file of memory whose pages all exist: writing one that does not kills the process."""
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

"""Exchange between ranks of one machine through memory that all map: faster than sockets.

    counters     a counter of each rank, 64 bytes apart: the number of parts it has put there
    two rooms    a part of every rank in each; parts go to the rooms in turn

A rank writes its part, then counts it, and reads when all ranks have counted as many. A rank that
writes into a room again has seen all ranks count the part in between, so all have read the room.

A rank that waits looks at a counter for `_LOOK` seconds, and sleeps then until the counter's owner
wakes it. On an idle machine parts follow each other more closely, so nobody sleeps. On a busy one
whoever looked longer would take the time of the rank that it looks for. A sleeper runs soon after
it is woken; one that gave up its turn (`sched_yield`) would wait for the turns of all programs.

Other processors see stores in the order in which they were made on x86; elsewhere, between
machines, and for parts that are larger than a room, sockets do it.
"""

import ctypes
import mmap
import os
import platform
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from quantflow.distributed.communicator import Communicator
from quantflow.distributed.team import connected

# The folder of files that are memory; ours are removed when all ranks have opened them.
_FOLDER = Path("/dev/shm")
_ORDERED = ("x86_64", "AMD64")
_LINE, _ROOM = 64, 1 << 20  # bytes between two counters, and of a rank's part
_NAME = 64  # bytes of a file's name, padded
_LOOK = 2e-4  # seconds, as the threads of quantflow/backends/team.c
_LOOKS = 16  # between two looks at the clock
_SLEEP = 0.2  # seconds after which a sleeper checks that the other rank still lives
# <sys/syscall.h> of x86-64, <linux/futex.h>
_FUTEX, _WAIT, _WAKE, _ALL = 202, 0, 1, 2**31 - 1


class _Time(ctypes.Structure):
    """`struct timespec` of <time.h>."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_SYSTEM = ctypes.CDLL(None)


def _futex(word: ctypes.c_uint32, operation: int, value: int, seconds: float | None = None) -> None:
    """Sleep while a word in memory has a value, or wake those who do (futex(2) of Linux)."""
    most = None if seconds is None else ctypes.byref(_Time(0, int(seconds * 1e9)))
    _SYSTEM.syscall(
        ctypes.c_long(_FUTEX), ctypes.byref(word), operation, ctypes.c_uint32(value), most, None, 0
    )


class SharedMemory:
    """A `Communicator` between processes of one machine.

    Attributes:
        rank, world: see `Communicator`.
    """

    def __init__(
        self, verb: str, communicator: Communicator, memory: mmap.mmap, *, processes: list[int]
    ) -> None:
        """Take the memory; all ranks have to.

        Args:
            verb: verb of the command line, for messages.
            communicator: sockets between the same ranks, for parts that are too large.
            memory: `size_of(world)` bytes, zeros.
            processes: process ids of the ranks.
        """
        self.rank, self.world = communicator.rank, communicator.world
        self._verb, self._communicator, self._processes, self._count = (
            verb,
            communicator,
            processes,
            0,
        )
        self._counters = memoryview(memory)[: self.world * _LINE].cast("q")
        # the lower half of each counter, on which its readers sleep
        self._words = [
            ctypes.c_uint32.from_buffer(memory, rank * _LINE) for rank in range(self.world)
        ]
        rooms = torch.frombuffer(memory, dtype=torch.uint8, offset=self.world * _LINE)
        self._rooms = rooms.view(2, self.world, _ROOM)  # [2, ranks, bytes]

    def gather(self, part: Tensor) -> Tensor:
        """See `Communicator.gather`."""
        if part.nbytes > _ROOM:
            return self._communicator.gather(part)
        self._count += 1
        room = self._rooms[self._count % 2, :, : part.nbytes]  # [ranks, bytes]
        room[self.rank] = part.reshape(-1).view(torch.uint8)  # [bytes]
        # The part is in the room before it is counted; nobody reads a part that is not counted.
        self._counters[self.rank * _LINE // 8] = self._count
        _futex(self._words[self.rank], _WAKE, _ALL)
        for other in range(self.world):
            self._wait(other)
        return (
            room.clone(memory_format=torch.contiguous_format)
            .view(part.dtype)
            .view(self.world, *part.shape)
        )

    def broadcast(self, numbers: Tensor) -> None:
        """See `Communicator.broadcast`."""
        numbers.copy_(self.gather(numbers)[0])

    def _wait(self, other: int) -> None:
        """Wait until a rank has counted as many parts as this one.

        Raises:
            ResourceError: it ended.
        """
        at = other * _LINE // 8
        end = time.perf_counter() + _LOOK
        while time.perf_counter() < end:
            for _ in range(_LOOKS):
                if self._counters[at] >= self._count:
                    return
        while (counted := self._counters[at]) < self._count:
            # returns at once where the counter is another one by now
            _futex(self._words[other], _WAIT, counted % 2**32, _SLEEP)
            if self._counters[at] < self._count and not _alive(self._processes[other]):
                with connected(self._verb):
                    raise RuntimeError(f"rank {other} has no process")


def size_of(world: int) -> int:
    """The bytes of memory that so many ranks need."""
    return world * (_LINE + 2 * _ROOM)


def nearest(verb: str, communicator: Communicator) -> Communicator:
    """A communicator through memory where all ranks can have it, else `communicator`.

    All ranks have to call this.

    Args:
        verb: verb of the command line, for messages.
        communicator: sockets between the same ranks.
    """
    memory, name = None, b""
    if communicator.rank == 0 and platform.machine() in _ORDERED and _FOLDER.is_dir():
        with suppress(OSError):
            descriptor, memory_file = tempfile.mkstemp(prefix="quantflow-", dir=_FOLDER)
            name = Path(memory_file).name.encode()
            memory = _mapped(descriptor, size_of(communicator.world))
    message = torch.tensor(list(name.ljust(_NAME, b"\0")))
    communicator.broadcast(message)
    path = _FOLDER / bytes(message.tolist()).rstrip(b"\0").decode()
    if communicator.rank and path != _FOLDER:
        with suppress(OSError):  # another machine, or another container of this one
            memory = _mapped(os.open(path, os.O_RDWR), size_of(communicator.world))
    processes = communicator.gather(torch.tensor([os.getpid()])).flatten().tolist()
    near = memory is not None and all(map(_alive, processes))
    everywhere = bool(communicator.gather(torch.tensor([near])).all())
    if communicator.rank == 0 and name:
        # what is mapped stays; nothing is left behind, however this ends
        path.unlink(missing_ok=True)
    if memory is None or not everywhere:
        return communicator
    return SharedMemory(verb, communicator, memory, processes=processes)


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

"""Memory that this process and this machine use and have, in bytes; nothing is decided here."""

import ctypes
import gc
import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quantflow import control_group

MAPPED = 8 << 20  # bytes from which a block is a mapping of its own
# bytes at the end of the heap that stay free for the next unit; twice as many at most
KEPT = 24 << 20
CREATED = 100_000  # new objects between two searches for cycles while a process imports
# parameters of mallopt(3)
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD, _ARENA_MAX = -3, -1, -2, -8
_USUAL = gc.get_threshold()[0]
_PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The memory of this process.

    Attributes:
        resident: bytes in memory now.
        peak: largest number since the start, or since `reset_peak`.
        anonymous, file: parts of `resident` that were allocated, and that are pages of files; 0
            where the system does not report them.
    """

    resident: int
    peak: int
    anonymous: int = 0
    file: int = 0


def usage() -> Usage:
    """Memory of this process; without /proc, the peak stands for what is resident."""
    with suppress(OSError):
        fields = _fields(_PROC / "self" / "status")
        return Usage(
            resident=fields["VmRSS"],
            peak=fields["VmHWM"],
            anonymous=fields.get("RssAnon", 0),
            file=fields.get("RssFile", 0),
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    return Usage(resident=peak, peak=peak)


def reset_peak() -> bool:
    """Start a new peak, so that a stage's own is visible; return whether the system did."""
    with suppress(OSError):
        descriptor = os.open(_PROC / "self" / "clear_refs", os.O_WRONLY)
        try:
            return os.write(descriptor, b"5") == 1
        finally:
            os.close(descriptor)
    return False


def largest_peak() -> int:
    """The larger peak of this process and of the processes that it waited for."""
    return max(usage().peak, peak_of_children())


def give_back_freed() -> None:
    """Make glibc return large blocks to the system when they are freed.

    By default glibc raises the size from which blocks are mappings of their own with each one that
    is freed, up to 32 MiB. It keeps smaller blocks for itself, in a heap per thread, so the process
    stays larger than what it uses, by a tenth of a layer and more. After this call one heap serves
    all threads, and keeps a little of what is freed: if all of it went back after every unit of
    work, a third of the time would go into fresh pages.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, MAPPED)
        library.mallopt(_TRIM_THRESHOLD, 2 * KEPT)
        library.mallopt(_TOP_PAD, KEPT)
        library.mallopt(_ARENA_MAX, 1)


def ran_out(error: Exception) -> bool:
    """Whether an error means that memory ran out; for a host tensor torch raises RuntimeError."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def take_huge_pages() -> None:
    """Make torch ask for huge pages for tensors of 2 MiB or more, where the system has `madvise`.

    A decoded layer is fresh memory each time. In pages of 4 KiB the kernel needs a third of the
    seconds that the proof of an artifact takes. torch reads the variable with the first tensor. A
    value that is already set stays.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def search_seldom() -> None:
    """Search for cycles seldom, while torch and transformers create their many objects at import.

    The searches cost a fifth of a second per process, and the one at its end, through all that was
    imported, another third. Only a process of our own calls this: in a user's process the threshold
    is the user's.
    """
    gc.set_threshold(CREATED, *gc.get_threshold()[1:])


def search_as_usual() -> None:
    """Search for cycles as often as before `search_seldom`: layers may hang on them.

    Without an earlier `search_seldom` nothing changes.
    """
    if gc.get_threshold()[0] == CREATED:
        gc.freeze()  # the objects so far are modules and classes, which never become garbage
        gc.set_threshold(_USUAL, *gc.get_threshold()[1:])


def end_quickly() -> None:
    """Let this process end without a last search for cycles through all that it imported."""
    gc.freeze()


def give_back_holes() -> None:
    """Make glibc return free memory between blocks in use to the system; a few milliseconds.

    It is called between two layers: the holes that one layer leaves would be added to the next
    one's peak.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def peak_of_children() -> int:
    """The largest peak of the processes that this one started and waited for."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def total_bytes() -> int:
    """Memory of the machine, or of this process's control group where that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = control_group.memory_limit()
    return machine if limit is None else min(machine, limit)


def available_bytes() -> int:
    """Bytes that can be allocated without swapping, the file cache counted as free."""
    free = total_bytes()
    with suppress(OSError):
        free = _fields(_PROC / "meminfo")["MemAvailable"]
    left = control_group.memory_left()
    return free if left is None else min(free, left)


def _fields(path: Path) -> dict[str, int]:
    """Values of the `Name:  123 kB` lines in a file of /proc, in bytes."""
    sizes = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        parts = value.split()
        if len(parts) == 2 and parts[1] == "kB":
            sizes[name] = int(parts[0]) * 1024
    return sizes

"""What this process and this machine use and have, in bytes. Nothing here decides anything."""

import ctypes
import gc
import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAPPED = 8 << 20  # bytes from which a block is a mapping of its own
# bytes that lie free at the end of the heap, for the next unit, at least; twice as many at most
KEPT = 24 << 20
CREATED = 100_000  # objects, after which cycles are searched for while a process imports
# of mallopt, see mallopt(3)
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD, _ARENA_MAX = -3, -1, -2, -8
_USUAL = gc.get_threshold()[0]
_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The memory of this process.

    Attributes:
        resident: bytes in memory now.
        peak: the most since the start, or since `reset_peak`.
        anonymous, file: of `resident`, what was allocated and what are pages of files; 0 where the
            system does not say.
    """

    resident: int
    peak: int
    anonymous: int = 0
    file: int = 0


def usage() -> Usage:
    """Return what this process uses; where there is no /proc, the peak stands for what is resident."""
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
    """Let the peak begin anew, so that a stage's own is seen; return whether the system did."""
    with suppress(OSError):
        descriptor = os.open(_PROC / "self" / "clear_refs", os.O_WRONLY)
        try:
            return os.write(descriptor, b"5") == 1
        finally:
            os.close(descriptor)
    return False


def largest_peak() -> int:
    """Return the peak of this process or of the largest that it waited for, whichever is more."""
    return max(usage().peak, peak_of_children())


def give_back_freed() -> None:
    """Let large blocks go back to the system when they are freed, where the C library can be told (glibc).

    Left alone it raises the size from which blocks are mappings of their own with each that is
    freed, up to 32 MiB, and keeps smaller ones for itself, in a heap per thread: the process stays
    larger than what it uses, by a tenth of a layer and more. One heap serves all threads here, and
    keeps a little of what is freed: given back after every unit of work, a third of the time would
    go into fresh pages.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, MAPPED)
        library.mallopt(_TRIM_THRESHOLD, 2 * KEPT)
        library.mallopt(_TOP_PAD, KEPT)
        library.mallopt(_ARENA_MAX, 1)


def ran_out(error: Exception) -> bool:
    """Return whether an error says that there was no memory: of a tensor in host memory torch raises RuntimeError."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def take_huge_pages() -> None:
    """Let torch ask for huge pages where a tensor is 2 MiB or more, and the system gives them to who asks (`madvise`).

    A decoded layer is fresh memory each time. In pages of 4 KiB the kernel needs a third of the
    seconds that the proof of an artifact takes. torch reads the variable with the first tensor.
    What is set already stays.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def search_seldom() -> None:
    """Search for cycles seldom: what torch and transformers create while they are imported is searched again and again.

    That costs a fifth of a second per process, and the search at its end, through all that was
    imported, another third. For a process of our own; in somebody else's it is theirs to say.
    """
    gc.set_threshold(CREATED, *gc.get_threshold()[1:])


def search_as_usual() -> None:
    """Search for cycles as often as before `search_seldom`, where that was called: layers may hang on them."""
    if gc.get_threshold()[0] == CREATED:
        gc.freeze()  # what is there now are modules and classes
        gc.set_threshold(_USUAL, *gc.get_threshold()[1:])


def end_quickly() -> None:
    """Let this process end without a last search for cycles through all that it imported."""
    gc.freeze()


def give_back_holes() -> None:
    """Give the system what lies free between blocks in use, where the C library can (glibc); a few milliseconds.

    Between two layers: what one layer leaves in pieces would otherwise be added to the next one's
    peak.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def peak_of_children() -> int:
    """Return the largest peak of the processes that this one started and waited for."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def total_bytes() -> int:
    """Return the memory of the machine, or of the control group that this process lives in where that is less."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_group("memory.max")])


def available_bytes() -> int:
    """Return what can be allocated without swapping, the file cache counted as free."""
    free = total_bytes()
    with suppress(OSError):
        free = _fields(_PROC / "meminfo")["MemAvailable"]
    for limit, current in zip(_group("memory.max"), _group("memory.current"), strict=False):
        cache = 0
        with suppress(OSError, ValueError, StopIteration):
            lines = (_CGROUP / "memory.stat").read_text().splitlines()
            cache = next(
                int(line.split()[1]) for line in lines if line.startswith("inactive_file ")
            )
        free = min(free, max(0, limit - current + cache))
    return free


def usable_cores() -> int:
    """Return how many processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fields(path: Path) -> dict[str, int]:
    """Return the `Name:  123 kB` lines of a file of /proc, in bytes."""
    found = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


def _group(name: str) -> list[int]:
    """Return the number in a file of the control group, or nothing where there is no group or no limit."""
    with suppress(OSError, ValueError):
        return [int((_CGROUP / name).read_text())]
    return []

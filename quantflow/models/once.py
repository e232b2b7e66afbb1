"""Bytes of large files that are read once: taken past the system's cache.

Filling the cache costs the processor several times the disk's own transfer, and drives out other
programs' files. Bytes that the cache holds already are taken from it; the rest comes from the disk
without entering it, where the system and the file system can do that.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import sys

# bytes; a read past the cache begins and ends at multiples of it, in the file and in memory
BLOCK = max(4096, mmap.ALLOCATIONGRANULARITY)


def fill(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill memory from a file; the number of bytes that the file had for it.

    Args:
        descriptor: descriptor of the file.
        view: memory of whole blocks, at a multiple of a block.
        offset: offset in the file, a multiple of a block.
    """
    direct = not _cached(descriptor, offset, len(view)) and _past_cache(descriptor)
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        done += count
        if count == 0 or (direct and count % BLOCK):  # the end of the file
            break
    return done


def _cached(descriptor: int, offset: int, nbytes: int) -> bool:
    """Whether the system's cache holds these bytes of the file, as far as the file goes.

    mincore is asked about a map of them, through which nothing is read. A read that must not wait
    would not do: it begins to fill the cache.
    """
    nbytes = min(nbytes, os.fstat(descriptor).st_size - offset)
    if nbytes <= 0 or sys.platform != "linux":
        return True
    with mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY, offset=offset) as memory:
        resident = bytearray(-(-nbytes // mmap.PAGESIZE))
        first = ctypes.c_char.from_buffer(memory)
        answer = (ctypes.c_char * len(resident)).from_buffer(resident)
        failed = ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(nbytes), answer)
        del first  # the map can be closed
    return not failed and all(page & 1 for page in resident)


def _past_cache(descriptor: int) -> bool:
    """Let reads of this descriptor go past the system's cache; whether the file system can."""
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True

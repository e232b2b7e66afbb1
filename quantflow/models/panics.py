"""Rust below Python: a panic of a library is no `Exception`, and prints a page of its own before Python hears of it."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from quantflow.errors import InputError

_CONTROLS = re.compile(
    rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]"
)  # what would move a terminal's cursor; names hold what they like


def _kept() -> BinaryIO:
    """Return a file of memory, which no full disk ends; of the disk where the system has none."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("said"), "w+b")
    return tempfile.TemporaryFile()


def _spelled(found: re.Match[bytes]) -> bytes:
    return repr(found[0].decode())[1:-1].encode()


def is_panic(error: BaseException) -> bool:
    """Return whether an error is what pyo3 makes of a panic, a class that cannot be imported."""
    return type(error).__name__ == "PanicException"


@contextmanager
def panics_refused(cause: str, remedy: str) -> Iterator[None]:
    """Make a panic of the block an InputError, and drop what it printed.

    Whatever else the block writes to stdout and stderr goes to stderr, with controls spelled out:
    it names what files hold.

    Raises:
        InputError: a panic.
    """
    # None: closed
    streams = {
        number: stream
        for number, stream in ((1, sys.stdout), (2, sys.stderr))
        if stream is not None
    }
    for stream in streams.values():
        stream.flush()
    with _kept() as said:
        kept, panicked = {number: os.dup(number) for number in streams}, False
        for number in streams:
            os.dup2(said.fileno(), number)
        try:
            yield
        except BaseException as error:
            panicked = is_panic(error)
            if panicked:
                raise InputError(
                    f"{cause} ({' '.join(str(error).split())[:200]})", remedy
                ) from error
            raise
        finally:
            for number, stream in streams.items():
                # a limit on files; it goes where it would have gone without this
                with suppress(OSError):
                    stream.flush()
                os.dup2(kept[number], number)
                os.close(kept[number])
            if not panicked and 2 in streams and said.seek(0, os.SEEK_END):
                said.seek(0)
                # nobody reads stderr, or a disk is full: it was said beside the work
                with suppress(OSError):
                    os.write(2, _CONTROLS.sub(_spelled, said.read()))

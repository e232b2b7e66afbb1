"""Panics of Rust libraries: no `Exception`, and printed before Python can catch them."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from quantflow.errors import InputError

# characters that would move a terminal's cursor; names in files may hold any
_CONTROLS = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")


def _kept() -> BinaryIO:
    """A file in memory, which no full disk ends; on disk where the system has none."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("said"), "w+b")
    return tempfile.TemporaryFile()


def _spelled(match: re.Match[bytes]) -> bytes:
    return repr(match[0].decode())[1:-1].encode()


def is_panic(error: BaseException) -> bool:
    """Whether an error is pyo3's form of a panic, a class that cannot be imported."""
    return type(error).__name__ == "PanicException"


@contextmanager
def panics_refused(cause: str, remedy: str) -> Iterator[None]:
    """Turn a panic of the block into an InputError, and drop its output.

    Any other output of the block to stdout and stderr goes to stderr, with controls spelled out,
    since it may quote names from files.

    Raises:
        InputError: the block panicked.
    """
    # a closed stream is None
    streams = {
        number: stream
        for number, stream in ((1, sys.stdout), (2, sys.stderr))
        if stream is not None
    }
    for stream in streams.values():
        stream.flush()
    with _kept() as said:
        kept = {number: os.dup(number) for number in streams}
        panicked = False
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
                # A limit on file sizes may refuse it; the text then stays buffered, and goes to the
                # stream's own file.
                with suppress(OSError):
                    stream.flush()
                os.dup2(kept[number], number)
                os.close(kept[number])
            if not panicked and 2 in streams and said.seek(0, os.SEEK_END):
                said.seek(0)
                # stderr may be closed or its disk full; the output is not part of the result
                with suppress(OSError):
                    os.write(2, _CONTROLS.sub(_spelled, said.read()))

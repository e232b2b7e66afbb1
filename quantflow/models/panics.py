"""Rust below Python: a panic of a library is no `Exception`, and prints a page of its own before Python hears of it."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from quantflow.errors import InputError


def is_panic(error: BaseException) -> bool:
    """Return whether an error is what pyo3 makes of a panic, a class that cannot be imported."""
    return type(error).__name__ == "PanicException"


@contextmanager
def panics_refused(cause: str, remedy: str) -> Iterator[None]:
    """Make a panic of the block an InputError; what it printed is dropped, anything else that the block wrote to stderr is not.

    Raises:
        InputError: a panic.
    """
    sys.stderr.flush()
    kept, panicked = os.dup(2), False
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException as error:
            panicked = is_panic(error)
            if panicked:
                raise InputError(f"{cause} ({' '.join(str(error).split())[:200]})", remedy) from error
            raise
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            if not panicked and said.seek(0, os.SEEK_END):
                said.seek(0)
                os.write(2, said.read())

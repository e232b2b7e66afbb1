"""stdout and stderr of a process, which may be closed, an unread pipe, or a file on a full disk.

stdout carries a result, so a failed write there ends the command with a sentence and its code.
stderr carries remarks beside the work, and no work ends because they cannot be written. Python
itself would try once more at its own end, and exit with 120.
"""

import io
import os
import sys
from typing import Any, TextIO

_NAMES = {1: "standard output", 2: "standard error"}


class NobodyReads(BaseException):
    """The reader of stdout has closed it, as `head` does: it had what it wanted.

    No library takes it for an error.
    """


class _Descriptor(io.FileIO):
    """A descriptor that fails once at most; after that, buffered data is dropped."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self._lost = False

    def write(self, data: Any, /) -> int:
        """Write some of the data; the result is the number of bytes.

        Raises:
            NobodyReads: the reader of stdout has gone.
            OSError: the system takes no more on stdout; it is named.
        """
        try:
            if not self._lost:
                return super().write(data) or 0
        except OSError as error:
            self._lost = True
            if self.fileno() == 1:
                if isinstance(error, BrokenPipeError):
                    raise NobodyReads from error
                error.filename = _NAMES[1]
                raise
        return len(data)


class _Direct(io.BufferedWriter):
    """A writer that keeps nothing, as PYTHONUNBUFFERED asks for."""

    def write(self, data: Any, /) -> int:
        """Write all of the data; the result is the number of bytes."""
        written = super().write(data)
        self.flush()
        return written


def guard() -> None:
    """Replace sys.stdout and sys.stderr by such streams; a closed one gets /dev/null.

    A descriptor that is free would be the number of the next file that is opened, and messages
    would go into it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    sys.stdout, sys.stderr = _guarded(1, sys.stdout), _guarded(2, sys.stderr)


def _guarded(number: int, stream: TextIO | None) -> TextIO:
    """A stream that writes to a descriptor as another does."""
    encoding, live, direct = "utf-8", number == 2, False
    if isinstance(stream, io.TextIOWrapper):
        encoding, live, direct = stream.encoding, stream.line_buffering, stream.write_through
    writer = _Direct if direct else io.BufferedWriter
    return io.TextIOWrapper(
        writer(_Descriptor(number)),
        encoding=encoding,
        errors="backslashreplace",  # what a terminal cannot show is spelled out
        line_buffering=live,
        write_through=direct,
    )

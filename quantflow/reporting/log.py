"""The log of a run, in a file beside the output: its lines with time stamps, and resource peaks.

It is a convenience: a log that cannot be written is reported once on stderr and never ends a run.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from quantflow.files import disk
from quantflow.plain_text import plain
from quantflow.process_memory import usage
from quantflow.units import duration, size


class Log:
    """A file that lines are appended to, made with the first of them.

    Several processes may append to the same one.

    Attributes:
        begun: a line was written; a command that is refused before leaves no file.
    """

    def __init__(self, path: Path, title: str) -> None:
        """Touch nothing yet.

        Args:
            path: beside the output folder, never inside it; made with its parent folders.
            title: the command, the first line.
        """
        self.begun = False
        self._path, self._title = path, title
        self._descriptor: int | None = None

    def write(self, text: str) -> None:
        """Append the lines of a text, each with the local time and its offset.

        A full disk ends the log, not the run.
        """
        try:
            if not self.begun:
                self.begun = True
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = disk.open_own(self._path, os.O_WRONLY | os.O_APPEND)
                self._append(f"begin: {self._title}")
            self._append(text)
        except OSError as error:
            self.close()
            told = f"log: {self._path}: {error.strerror or error}; the run goes on without it"
            print(plain(told), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close the file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):  # some file systems tell only now that a write failed
                os.close(descriptor)

    def _append(self, text: str) -> None:
        if self._descriptor is not None:
            stamp = datetime.now().astimezone().isoformat(timespec="seconds")
            content = "".join(f"{stamp} {line}\n" for line in plain(text).splitlines()).encode()
            while content:
                content = content[os.write(self._descriptor, content) :]


@contextmanager
def logged(path: Path, title: str) -> Iterator[Log]:
    """Yield a log that begins with a title and ends with the block's outcome and its peaks.

    Args:
        path: path of the log.
        title: the command, in one line.
    """
    log = Log(path, title)
    begin = time.monotonic()
    end = "done"
    try:
        yield log
    except BaseException as error:
        end = f"stopped: {type(error).__name__}: {error}"
        raise
    finally:
        if log.begun:
            log.write(f"{end}, after {duration(time.monotonic() - begin)}, {peaks()}")
        log.close()


def peaks() -> str:
    """The peak of resident memory, and the present anonymous and file pages."""
    found = usage()
    text = f"peak RSS {size(found.peak)}"
    if found.anonymous:
        text += f", now {size(found.anonymous)} anonymous and {size(found.file)} of files"
    return text

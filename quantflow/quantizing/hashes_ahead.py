"""Hashes of files that are read anyway: each is taken while its file or the one before is read."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from quantflow.files.digests import Digests


class HashesAhead:
    """Hashes of the files of a folder, one file ahead of the step that is under way."""

    def __init__(self, steps: Iterable[Sequence[str]], *, folder: Path, digests: Digests) -> None:
        """Begin nothing yet.

        Args:
            steps: names of each step's files, in the order in which the steps will ask for them.
            folder: the folder of the files.
            digests: stored hashes of the files; a file whose hash is not stored is read.
        """
        self._order = list(dict.fromkeys(file for files in steps for file in files))
        self._folder, self._digests = folder, digests
        self._known: dict[str, Future[str]] = {}
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        """The hashes."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Drop what has not begun."""
        self._pool.shutdown(cancel_futures=True)

    def begin(self, files: Sequence[str]) -> None:
        """Hash files, and the one after them, while the caller goes on."""
        last = max((self._order.index(file) for file in files), default=-1)
        for file in self._order[: last + 2]:
            if file not in self._known:
                self._known[file] = self._pool.submit(self._digests.of, self._folder / file)

    def of(self, files: Sequence[str]) -> dict[str, str]:
        """The sha256 of each file, 64 hexadecimal digits; waits until all are there.

        Raises:
            InputError: a file cannot be read.
        """
        self.begin(files)
        return {file: self._known[file].result() for file in files}

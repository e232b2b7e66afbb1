"""A cache of the sha256 of files that are read more than once.

With it a checkpoint is hashed when it is first seen, not at every stage. A hash belongs to a file's
name, size, time stamps and inode. A cache that is damaged, foreign or missing is made again. Where
the integrity of a result depends on a hash, the hash never comes from here; only the identity of a
source does.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from quantflow.errors import InputError
from quantflow.files import disk
from quantflow.files.canonical import canonical_json, file_digest, read_json

VERSION = 1
NAME = ".hashes.json"
_KEYS = {"bytes", "mtime_ns", "ctime_ns", "inode", "sha256"}
# A file younger than this could change again without a change of its time stamps: its hash is not
# kept.
_SETTLED_NS = 100_000_000


class Digests:
    """Known hashes of files; safe to use from several threads.

    Attributes:
        path: file in which new hashes are kept; None forgets them with this object.
    """

    def __init__(self, path: Path | None = None, *, also: Sequence[Path] = ()) -> None:
        """Read the kept hashes.

        Args:
            path: JSON file, which need not exist.
            also: further such files, which are read and never written.
        """
        self.path = path
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, Any]] = {}
        for file in (*also, *(() if path is None else (path,))):
            self._known |= _remembered(file)

    def of(self, path: Path) -> str:
        """The sha256 of a file, 64 hexadecimal digits.

        Raises:
            InputError: the file cannot be read.
            OSError: a new hash could not be written.
        """
        key = os.path.realpath(path)
        before = _identity(path)
        with self._lock:
            cached = self._known.get(key)
        if cached is not None and all(cached[name] == value for name, value in before.items()):
            return str(cached["sha256"])
        began = time.time_ns()
        digest = file_digest(path)
        settled = max(before["mtime_ns"], before["ctime_ns"]) + _SETTLED_NS < began
        if settled and _identity(path) == before:
            with self._lock:
                self._known[key] = {**before, "sha256": digest}
            self.save()
        return digest

    def save(self) -> None:
        """Write the known hashes, unless the folder for them is missing.

        `of` calls it for every new hash.

        Raises:
            OSError: the file system failed.
        """
        with self._lock:
            if self.path is not None and self._known and self.path.parent.is_dir():
                disk.write_shared(
                    self.path, canonical_json({"version": VERSION, "files": self._known})
                )

    def of_all(
        self,
        paths: Iterable[Path],
        *,
        map_all: Callable[[Callable[[Path], str], Sequence[Path]], Iterable[str]] = map,
    ) -> dict[Path, str]:
        """The sha256 of several files.

        Args:
            paths: paths of the files.
            map_all: function that applies another to every item, in order, such as `Workers.map`.

        Raises:
            InputError: a file cannot be read.
            OSError: a new hash could not be written.
        """
        files = list(dict.fromkeys(paths))
        return dict(zip(files, map_all(self.of, files), strict=True))


def _identity(path: Path) -> dict[str, int]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}", "check that the file exists and can be read"
        ) from error
    return {
        "bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "inode": status.st_ino,
    }


def _remembered(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of a cache file; none where it is not one of ours."""
    if not path.is_file():
        return {}
    try:
        content = read_json(path)
    except InputError:  # a cache that cannot be read is made again
        return {}
    if (
        not isinstance(content, dict)
        or content.get("version") != VERSION
        or not isinstance(content.get("files"), dict)
    ):
        return {}
    return {
        name: row
        for name, row in content["files"].items()
        if isinstance(row, dict) and set(row) == _KEYS
    }

"""One way to open a file and one way to list a folder, for sources and artifacts alike."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from quantflow.errors import InputError

# Bookkeeping of `git clone` and `hf download --local-dir`. No loader reads it: it is neither hashed
# nor an extra file.
IGNORED_FOLDERS = frozenset({".git", ".cache"})
POINTER_START = b"version https://git-lfs"
POINTER_MAX_BYTES = 1024
# errors of the process or the system, whatever the file
LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Content of a folder, as names relative to it with `/` between folders, sorted.

    Attributes:
        files: regular files.
        others: entries that are no regular file or folder: links, FIFOs, devices, names that are
            not UTF-8.
    """

    files: tuple[str, ...]
    others: tuple[str, ...]


@contextmanager
def reading(path: Path) -> Iterator[BufferedReader]:
    """Open a regular file for reading.

    Raises:
        InputError: the file is missing, unreadable, or not a regular file (a FIFO is refused
            without a wait).
        OSError: this process has no descriptor or memory left, which is not the file's fault.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise InputError(f"{path}: not a regular file", "give a regular file")
        with os.fdopen(descriptor, "rb") as file:
            yield file
    except OSError as error:
        if error.errno in LIMITS:
            raise
        raise InputError(
            f"{path}: {error.strerror}", "check that the file exists and can be read"
        ) from error


def refuse_pointer(head: bytes, path: Path) -> None:
    """Refuse a file that git-LFS left in place of the real one.

    Args:
        head: first bytes of the file, at least 23 where it has that many.
        path: path of the file, for the message.

    Raises:
        InputError: `head` is the first line of a git-LFS pointer.
    """
    if head.startswith(POINTER_START):
        raise InputError(
            f"{path}: a git-LFS pointer instead of the file's content",
            f"run `git lfs pull` in {path.parent} and start again",
        )


def refuse_small_pointer(path: Path) -> None:
    """Refuse a git-LFS pointer, reading only files that are small enough to be one.

    Raises:
        InputError: the file cannot be read or is a pointer.
    """
    with reading(path) as file:
        if os.fstat(file.fileno()).st_size <= POINTER_MAX_BYTES:
            refuse_pointer(file.read(len(POINTER_START)), path)


def list_files(folder: Path, *, follow_links: bool) -> Listing:
    """List a folder and its sub-folders, without those of git and the hub's download cache.

    Args:
        folder: folder to list.
        follow_links: whether a link to a regular file counts as that file (a hub snapshot consists
            of links). A link to a folder is never followed.

    Raises:
        InputError: the folder is missing or cannot be read.
        OSError: see `reading`.
    """
    files: list[str] = []
    others: list[str] = []
    pending = [""]
    while pending:
        prefix = pending.pop()
        try:
            with os.scandir(folder / prefix) as entries:
                listing = list(entries)
        except OSError as error:
            if error.errno in LIMITS:
                raise
            cause = f"{folder / prefix}: {error.strerror}"
            raise InputError(cause, "give a folder that exists and can be read") from error
        for entry in listing:
            name = prefix + entry.name
            if not _is_utf8(name):
                others.append(name.encode("utf-8", "backslashreplace").decode())
            elif entry.is_dir(follow_symlinks=False):
                if name not in IGNORED_FOLDERS:
                    pending.append(name + "/")
            elif os.path.isfile(entry.path) and (follow_links or not entry.is_symlink()):
                files.append(name)
            else:
                others.append(name)
    return Listing(files=tuple(sorted(files)), others=tuple(sorted(others)))


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True

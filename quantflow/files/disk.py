"""Every durable write of the project: a file is absent, old or complete under its name.

When a call returns, the file is on the disk. Only calls of `os` are used, so that a test can make
any one of them fail.
"""

import errno
import fcntl
import grp
import os
import pwd
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

COPY_BLOCK = 8 * 1024 * 1024
_MAX_LINKS = 40  # links that the kernel follows in one name
# Errors of a file system without hard links, or with none to there; any other is a fault.
_NO_LINKS = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES}
)
_NO_FOLDER_SYNC = frozenset(
    {errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.EACCES, errno.EISDIR}
)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an error of a call on a descriptor, which has no name."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_file(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Create or replace the content of a file that nobody reads yet, and wait until it is on disk.

    Raises:
        OSError: the file system failed; a part of the content may be left under the name.
    """
    write_parts(path, (data,))


def write_parts(path: Path, parts: Iterable[bytes | bytearray | memoryview]) -> None:
    """Write a file from parts, like `write_file`; only one part is in memory at a time.

    Raises:
        OSError: the file system failed; a part of the content may be left under the name.
    """
    descriptor = create(path)
    try:
        with naming(path):
            for part in parts:
                write_all(descriptor, part)
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Write a file so that it is absent, old or complete under its name, whatever happens.

    Raises:
        OSError: the file system failed; the name is as it was.
    """
    temporary = temporary_for(path)
    try:
        write_file(temporary, data)
        replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # most likely the fault that is being reported
            remove(temporary)
        raise


def write_shared(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Write a file like `write_atomic` that other processes write too: one after the other.

    Raises:
        OSError: the file system failed; the name is as it was.
    """
    temporary = temporary_for(path)
    descriptor = _create_alone(temporary)
    try:
        with naming(temporary):
            os.ftruncate(descriptor, 0)  # a killed process left a part
            write_all(descriptor, data)
            os.fsync(descriptor)
        replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # most likely the fault that is being reported
            remove(temporary)
        raise
    finally:
        os.close(descriptor)  # releases the lock


def _create_alone(path: Path) -> int:
    """Open a file like `create` once no process holds it, and hold it until it is closed."""
    while True:
        descriptor = open_own(path, os.O_RDWR)
        try:
            with naming(path):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # its holder may have given it another name, or removed it
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def temporary_for(path: Path) -> Path:
    """The name beside `path` under which a file is written before it is complete."""
    return path.with_name(f".{path.name}.tmp")


def replace(temporary: Path, path: Path) -> None:
    """Give a synced file its final name, in place of another, and wait for the folder's sync."""
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync(path: Path) -> None:
    """Wait until a file that something else wrote is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file; a missing one is no error."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def remove_tree(path: Path) -> None:
    """Remove a folder and all in it; a missing one is no error.

    Raises:
        OSError: the file system failed; the error has the file's whole path.
    """
    if not path.is_dir() or path.is_symlink():
        remove(path)
        return
    for inside in sorted(path.iterdir()):
        remove_tree(inside)
    os.rmdir(path)


def make_folder(path: Path) -> None:
    """Make a folder and those above it; an existing one is no error."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not path.is_dir():
            raise


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy where the file system has no such links.

    The content must never be changed in place afterwards, only replaced: both names share it.

    Raises:
        OSError: the file system failed, or `target` exists; no part of a copy is left.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        copy(source, target)


def copy(source: Path, target: Path) -> None:
    """Copy a file's content, 8 MiB at a time, and wait until it is on the disk.

    Raises:
        OSError: the file system failed; no part of a copy is left.
    """
    reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        writer = create(target)
        try:
            while True:
                with naming(source):
                    block = os.read(reader, COPY_BLOCK)
                if not block:
                    break
                with naming(target):
                    write_all(writer, block)
            with naming(target):
                os.fsync(writer)
        finally:
            os.close(writer)
    except BaseException:
        with suppress(OSError):
            remove(target)
        raise
    finally:
        os.close(reader)


def create(path: Path) -> int:
    """Create or truncate a file and return its descriptor, for reading and writing.

    Raises:
        OSError: the file system failed, or the name belongs to no file of ours; see `open_own`.
    """
    descriptor = open_own(path, os.O_RDWR)
    try:
        if os.fstat(descriptor).st_size:
            with naming(path):
                os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_own(path: Path, mode: int) -> int:
    """Open a file for writing, create it where it is missing, and return its descriptor.

    Anybody who may write beside an output could put a link there, and have another file truncated
    or appended to.

    Args:
        path: path of the file.
        mode: O_WRONLY or O_RDWR, and O_APPEND.

    Raises:
        OSError: the file system failed; or the name belongs to a link, to no regular file, to a
            file with another name too, or to somebody else's. It is left as it is.
    """
    try:
        descriptor = os.open(
            path, mode | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
        )
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a FIFO that nobody reads
            raise _not_ours(path) from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise _not_ours(path)
    return descriptor


def _not_ours(path: Path) -> OSError:
    return OSError(
        errno.EPERM, "a link, no regular file, or somebody else's; it is not written to", str(path)
    )


def write_all(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data` at the descriptor's position; one system call may write less."""
    view = flat(data)
    while view:
        view = view[os.write(descriptor, view) :]


def pwrite_all(descriptor: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of `data` at `offset` bytes of the file; safe beside writers of other bytes."""
    view = flat(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def flat(data: bytes | bytearray | memoryview) -> memoryview:
    """A view of the bytes of contiguous data."""
    view = memoryview(data)
    # a view of no elements cannot be cast
    return view.cast("B") if view.nbytes else memoryview(b"")


def free_bytes(folder: Path) -> int:
    """Bytes that this user can still write on a folder's file system; it need not exist yet."""
    while not folder.exists() and folder.parent != folder:
        folder = folder.parent
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def writable_by_others(path: Path) -> bool:
    """Whether somebody beside this user and root can change a file or folder.

    Raises:
        OSError: its status cannot be read.
    """
    status = path.stat()
    return status.st_uid not in (os.getuid(), 0) or bool(status.st_mode & 0o022)


def replaceable(path: Path) -> Path | None:
    """The folder above `path` in which somebody beside this user and root can exchange it.

    Whoever may write to a folder may rename what is in it and put something else there, unless the
    folder is sticky, as /tmp is: there names belong to the owners of their files. A link on the way
    is followed, and the folders that its name goes through count too.

    Returns:
        None where there is no such folder.

    Raises:
        OSError: the status of a folder cannot be read.
    """
    here, *parts = path.absolute().parts
    pending, links = parts[::-1], 0
    place = Path(here)
    while pending:
        part = pending.pop()
        if part == "..":
            place = place.parent
            continue
        if not place.exists():  # nor is anything below it
            return None
        if _lets_others_rename(place.stat()):
            return place
        if (place / part).is_symlink() and (links := links + 1) <= _MAX_LINKS:
            target = (place / part).readlink()
            pending += [name for name in target.parts[::-1] if name != target.anchor]
            place = Path(target.anchor) if target.is_absolute() else place
        else:
            place /= part
    return None


def _lets_others_rename(status: os.stat_result) -> bool:
    """Whether somebody beside this user and root can rename what is in a folder."""
    if status.st_uid not in (os.getuid(), 0) and not _is_unmapped(status.st_uid):
        return True
    if status.st_mode & stat.S_ISVTX:
        return False
    in_group = bool(status.st_mode & 0o020) and not _is_own_group(status.st_gid)
    return in_group or bool(status.st_mode & 0o002)


def _is_own_group(gid: int) -> bool:
    """Whether a group is the one that a user has alone, as umask 002 is meant for.

    Such a group has the user's name, and no member beside the user.
    """
    try:
        group, name = grp.getgrgid(gid), pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def _is_unmapped(uid: int) -> bool:
    """Whether a number stands for users outside of this process's namespace.

    In a sandbox the folders of the system, / among them, belong to it. Nobody inside has it.
    """
    try:
        whole = Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]
        return not whole and uid == int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return False

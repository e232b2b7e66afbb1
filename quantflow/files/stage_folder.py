"""A stage's folder on disk: locked while it is written, complete once DONE.json is there.

    <folder>/DONE.json      {"stage", "inputs", "files": {name: {"sha256", "bytes"}}}, written last
    .<folder>.tmp           folder into which `publish` writes before it renames
    .<folder>.lock          held with flock by the one process that writes; a dead process leaves no
                            lock

A half-written folder never has the final name. A folder is up to date when DONE.json names the same
inputs and every file still has its recorded hash.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypedDict

from quantflow.errors import InputError, IntegrityError, ResourceError, UsageError
from quantflow.files import disk
from quantflow.files.canonical import file_digest, read_json
from quantflow.files.schema import check

DONE = "DONE.json"


class _File(TypedDict):
    sha256: str
    bytes: int


class _Done(TypedDict):
    stage: str
    inputs: dict[str, Any]
    files: dict[str, _File]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; restore a result that a crash left half renamed.

    Raises:
        ResourceError: another process holds the folder; the message has its id.
    """
    disk.make_folder(folder.parent)
    path = folder.parent / f".{folder.name}.lock"
    descriptor = disk.open_own(path, os.O_RDWR)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
            raise ResourceError(
                f"{folder}: process {holder} is writing it", "wait for it, or choose another folder"
            ) from error
        os.ftruncate(descriptor, 0)
        with disk.naming(path):
            disk.pwrite_all(descriptor, str(os.getpid()).encode(), 0)
        _put_back(folder)
        yield
    finally:
        os.close(descriptor)  # releases the lock


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that it is either absent, old or complete under its name."""
    disk.write_atomic(path, content)


def commit_file(temporary: Path, path: Path) -> None:
    """Give a file that a library wrote its final name, synced."""
    disk.sync(temporary)
    disk.replace(temporary, path)


def done(folder: Path) -> dict[str, Any] | None:
    """Content of DONE.json; None where the folder is missing or unfinished."""
    path = folder / DONE
    if not path.is_file():
        return None
    record: dict[str, Any] = read_json(path)
    if not isinstance(record, dict) or not {"stage", "inputs", "files"} <= record.keys():
        raise InputError(
            f"{path}: not the record of a finished stage",
            f"remove {folder} and run the stage again",
        )
    check(record, _Done, where=str(path), remedy=f"remove {folder} and run the stage again")
    return record


def is_up_to_date(folder: Path, inputs: Mapping[str, Any]) -> bool:
    """Whether the folder was finished from exactly these inputs and its files are unchanged."""
    record = done(folder)
    return (
        record is not None
        and record["inputs"] == json.loads(json.dumps(inputs))
        and not _changed(folder, record)
    )


def require_done(folder: Path, *, stage: str, unread: str | None = None) -> dict[str, Any]:
    """The DONE.json of an earlier stage's folder.

    Args:
        folder: folder that the earlier stage wrote.
        stage: name of that stage.
        unread: pattern of files whose sizes alone are compared here, such as
            `layers/*.safetensors`: the caller hashes them as they are read.

    Raises:
        InputError: the folder is missing, unfinished, or of another stage.
        IntegrityError: a file differs from its recorded hash.
    """
    record = done(folder)
    if record is None:
        state = "is unfinished (no DONE.json)" if folder.is_dir() else "does not exist"
        raise InputError(
            f"{folder}: {state}", f"run `quantflow {stage}` first; the same command continues it"
        )
    if record.get("stage") != stage:
        raise InputError(
            f"{folder}: was written by {record.get('stage')!r}, {stage!r} is needed",
            "give the other folder",
        )
    changed = _changed(folder, record, unread=unread)
    if changed:
        raise IntegrityError(
            f"{folder / changed}: differs from the hash in {DONE}", f"run `quantflow {stage}` again"
        )
    return record


def finish(
    folder: Path, *, stage: str, inputs: Mapping[str, Any], hashes: Mapping[str, str] | None = None
) -> None:
    """Record every file of the folder and write DONE.json, last.

    Args:
        folder: folder that is complete but for DONE.json.
        stage: name of the stage that wrote it.
        inputs: inputs of the result.
        hashes: sha256 of files that this process wrote and hashed already, by their name in the
            folder.
    """
    known_hashes = hashes or {}
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and path.name != DONE and not path.name.startswith("."):
            files[name] = {
                "sha256": known_hashes.get(name) or file_digest(path),
                "bytes": path.stat().st_size,
            }
    record = {"stage": stage, "inputs": inputs, "files": files}
    write_atomic(folder / DONE, json.dumps(record, indent=1, sort_keys=True).encode())


def refuse_other_result(
    folder: Path, inputs: Mapping[str, Any], *, force: bool, parts: Sequence[str] = ()
) -> None:
    """Refuse to replace a result of other inputs, unless forced, and anything that is no result.

    Args:
        folder: folder that the stage writes.
        inputs: inputs of the result that is to be written.
        force: whether a finished result is replaced.
        parts: names that an unfinished folder of this stage may hold.

    Raises:
        UsageError: an input differs, or the stage did not write a file; the message names the
            first.
    """
    record = done(folder)
    if record is None:
        for path in sorted(folder.iterdir()) if folder.exists() else ():
            if path.name not in parts and not (parts and path.name.startswith(".")):
                raise UsageError(
                    f"{folder}: holds {path.name!r} and no {DONE}",
                    "choose another -o, or an empty folder",
                )
        return
    changed = None if force else difference(record["inputs"], json.loads(json.dumps(inputs)))
    if changed is not None:
        key, old, new = changed
        raise UsageError(
            f"{folder}: holds a finished result with {key} = {short(old)}, now {short(new)}",
            "choose another -o, or pass --force to replace it",
        )


@contextmanager
def publish(
    folder: Path,
    *,
    stage: str | None,
    inputs: Mapping[str, Any],
    hashes: Mapping[str, str] | None = None,
) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` when the block ends without an error.

    With a `stage`, DONE.json is written into it first. An artifact has none: the block writes its
    manifest. After an interrupted block, or a fault of any call, the name has the old folder, none,
    or the whole new one. `hashes` are those of `finish`; the block may add to them.
    """
    temporary, old = _beside(folder)
    _put_back(folder)
    for leftover in (temporary, old):
        disk.remove_tree(leftover)
    disk.make_folder(temporary.parent)
    os.mkdir(temporary)  # made by us, never a link to somewhere else
    try:
        yield temporary
        if stage is not None:
            finish(temporary, stage=stage, inputs=inputs, hashes=hashes)
        _sync_tree(temporary)
        if folder.exists():
            os.replace(folder, old)
        disk.replace(temporary, folder)
    finally:
        with suppress(OSError):  # a fault that is being reported; `locked` tries again
            _put_back(folder)
        shutil.rmtree(temporary, ignore_errors=True)


def _beside(folder: Path) -> tuple[Path, Path]:
    """Paths of `publish`'s new folder before its rename, and of the old one between renames."""
    return folder.parent / f".{folder.name}.tmp", folder.parent / f".{folder.name}.old"


def _put_back(folder: Path) -> None:
    """Undo the first of `publish`'s renames if the second failed; else remove the old folder."""
    _, old = _beside(folder)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
    elif old.exists():
        os.replace(old, folder)


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            disk.sync_folder(path)
        else:
            disk.sync(path)
    disk.sync_folder(folder)


def difference(old: Any, new: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """The path of the first value that differs, and both values."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return None if old == new else (path, old, new)
    for key in sorted({*old, *new}):
        inner = difference(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        if inner is not None:
            return inner
    return None


def _changed(folder: Path, record: Mapping[str, Any], *, unread: str | None = None) -> str | None:
    """The first recorded file that is missing or differs.

    Files that `unread` matches are compared by size alone.
    """
    for name, expected in record["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != expected["bytes"]:
            return str(name)
        if (unread is None or not fnmatchcase(name, unread)) and file_digest(path) != expected[
            "sha256"
        ]:
            return str(name)
    return None


def short(value: object) -> str:
    """A value as JSON, cut to 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

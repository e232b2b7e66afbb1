"""A stage's folder on disk: locked while it is written, complete once DONE.json is there, never half under its final name.

    <folder>/DONE.json      {"stage", "inputs", "files": {name: {"sha256", "bytes"}}}, written last
    .<folder>.tmp           what `publish` writes into before it renames
    .<folder>.lock          held with flock by the one process that writes; a dead process leaves no lock

A folder is up to date when DONE.json names the same inputs and every file still has its recorded hash.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from quantflow.artifact.canonical import file_digest, read_json
from quantflow.errors import InputError, IntegrityError, ResourceError, UsageError

DONE = "DONE.json"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; a live process that has it is named.

    Raises:
        ResourceError: another process holds the folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.parent / f".{folder.name}.lock"
    with path.open("a+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            stream.seek(0)
            holder = stream.read().strip() or "unknown"
            raise ResourceError(f"{folder}: process {holder} is writing it", "wait for it, or choose another folder") from error
        stream.truncate(0)
        stream.write(str(os.getpid()))
        stream.flush()
        yield


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that it is either absent, old or complete under its name."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    _sync(path.parent)


def commit_file(temporary: Path, path: Path) -> None:
    """Give a file that a library wrote its final name, synced."""
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


def done(folder: Path) -> dict[str, Any] | None:
    """Return DONE.json, or None when the folder is missing or unfinished."""
    path = folder / DONE
    if not path.is_file():
        return None
    record = read_json(path)
    if not isinstance(record, dict) or not {"stage", "inputs", "files"} <= record.keys():
        raise InputError(f"{path}: not the record of a finished stage", f"remove {folder} and run the stage again")
    return record


def is_up_to_date(folder: Path, inputs: Mapping[str, Any]) -> bool:
    """Return whether the folder was finished from exactly these inputs and its files are as they were written."""
    record = done(folder)
    return record is not None and record["inputs"] == json.loads(json.dumps(inputs)) and not _changed(folder, record)


def require_done(folder: Path, *, stage: str) -> dict[str, Any]:
    """Return the DONE.json of an earlier stage's folder.

    Raises:
        InputError: the folder is missing, unfinished, or of another stage.
        IntegrityError: a file differs from its recorded hash.
    """
    record = done(folder)
    if record is None:
        state = "is unfinished (no DONE.json)" if folder.is_dir() else "does not exist"
        raise InputError(f"{folder}: {state}", f"run `quantflow {stage}` first; the same command continues it")
    if record.get("stage") != stage:
        raise InputError(f"{folder}: was written by {record.get('stage')!r}, {stage!r} is needed", "give the other folder")
    changed = _changed(folder, record)
    if changed:
        raise IntegrityError(f"{folder / changed}: differs from the hash in {DONE}", f"run `quantflow {stage}` again")
    return record


def finish(folder: Path, *, stage: str, inputs: Mapping[str, Any]) -> None:
    """Record every file of the folder and write DONE.json, last."""
    files = {
        path.relative_to(folder).as_posix(): {"sha256": file_digest(path), "bytes": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != DONE and not path.name.startswith(".")
    }
    record = {"stage": stage, "inputs": inputs, "files": files}
    write_atomic(folder / DONE, json.dumps(record, indent=1, sort_keys=True).encode())


def refuse_other_result(folder: Path, inputs: Mapping[str, Any], *, force: bool, parts: Sequence[str] = ()) -> None:
    """Refuse to replace a finished result that was made from other inputs, unless forced, and anything that is not a result.

    Args:
        folder: where the stage writes.
        inputs: of the result that is to be written.
        force: replace a finished result.
        parts: what an unfinished folder of this stage may hold.

    Raises:
        UsageError: naming the first input that differs, or a file that the stage did not write.
    """
    record = done(folder)
    if record is None:
        for path in sorted(folder.iterdir()) if folder.exists() else ():
            if path.name not in parts and not (parts and path.name.startswith(".")):
                raise UsageError(f"{folder}: holds {path.name!r} and no {DONE}", "choose another -o, or an empty folder")
        return
    difference = None if force else _difference(record["inputs"], json.loads(json.dumps(inputs)))
    if difference is not None:
        key, old, new = difference
        raise UsageError(
            f"{folder}: holds a finished result with {key} = {_short(old)}, now {_short(new)}",
            "choose another -o, or pass --force to replace it",
        )


@contextmanager
def publish(folder: Path, *, stage: str | None, inputs: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` when the block ends without an error.

    With a `stage`, DONE.json is written into it first; an artifact has none, its manifest is written by the block.
    An interrupted block leaves the old folder, or none.
    """
    temporary, old = folder.parent / f".{folder.name}.tmp", folder.parent / f".{folder.name}.old"
    if old.exists() and not folder.exists():
        old.replace(folder)  # the last run stopped between the two renames below
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if stage is not None:
            finish(temporary, stage=stage, inputs=inputs)
        for path in temporary.rglob("*"):
            _sync(path)
        _sync(temporary)
        if folder.exists():
            folder.replace(old)
        temporary.replace(folder)
        _sync(folder.parent)
    finally:
        for leftover in (temporary, old):
            shutil.rmtree(leftover, ignore_errors=True)


def _difference(old: Any, new: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Return the path of the first value that differs, and both values."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return None if old == new else (path, old, new)
    for key in sorted({*old, *new}):
        found = _difference(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        if found is not None:
            return found
    return None


def _changed(folder: Path, record: Mapping[str, Any]) -> str | None:
    """Return the first recorded file that is missing or differs."""
    for name, expected in record["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != expected["bytes"] or file_digest(path) != expected["sha256"]:
            return str(name)
    return None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems cannot sync a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

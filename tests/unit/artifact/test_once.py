"""The hash of a large file, whether the system's cache holds it, part of it, or cannot be asked."""

import errno
import fcntl
import hashlib
import os
import random
import sys
from pathlib import Path

import pytest

from quantflow.artifact import once
from quantflow.errors import InputError


@pytest.fixture(params=[0, 1, 4096, 4097, 3 * 4096, 50_001, 8 << 20, (8 << 20) + 1, (16 << 20) + 4096])
def file(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(random.Random(0).randbytes(request.param))
    return path


def forget(path: Path) -> None:
    """Have the system write the file out and drop it from its cache, where it can."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@pytest.mark.parametrize("cached", ["all", "some", "none"])
def test_the_digest_is_that_of_the_bytes(file: Path, cached: str) -> None:
    content = file.read_bytes()
    if cached != "all":
        forget(file)
    if cached == "some":
        with file.open("rb") as opened:
            opened.read(1)
    assert once.digest(file) == hashlib.sha256(content).hexdigest()


def test_a_file_system_without_reads_past_the_cache_is_read_through_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "Invalid argument")
        return 0

    content = file.read_bytes()
    forget(file)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert once.digest(file) == hashlib.sha256(content).hexdigest()


def test_a_system_without_reads_past_the_cache_reads_through_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    assert once.digest(file) == hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_disk_that_fails_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").write_bytes(b"a" * 5000)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(InputError, match="weights: Input/output error"):
        once.digest(tmp_path / "weights")


@pytest.mark.skipif(sys.platform != "linux", reason="the cache cannot be asked elsewhere")
def test_what_is_read_past_the_cache_does_not_enter_it(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(random.Random(0).randbytes(4 << 20))
    descriptor = os.open(path, os.O_RDONLY)
    assert once._cached(descriptor, 0, 4 << 20)
    forget(path)
    if once._cached(descriptor, 0, 4 << 20) or not once._past_cache(os.dup(descriptor)):
        pytest.skip("a file system in memory, or one that always reads through the cache")
    once.digest(path)
    assert not once._cached(descriptor, 0, 4096)
    os.close(descriptor)

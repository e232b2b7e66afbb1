"""Bytes read past the system's cache do not enter it; bytes that are there come from there."""

import os
import random
import sys
from pathlib import Path

import pytest
import torch

from quantflow.models import once
from quantflow.models.reading import read_once

SIZE = 4 << 20


@pytest.fixture
def descriptor(tmp_path: Path) -> int:
    (tmp_path / "weights").write_bytes(random.Random(0).randbytes(SIZE))
    return os.open(tmp_path / "weights", os.O_RDONLY)


@pytest.mark.skipif(sys.platform != "linux", reason="the cache cannot be asked elsewhere")
def test_what_is_read_past_the_cache_does_not_enter_it(tmp_path: Path, descriptor: int) -> None:
    assert once._cached(descriptor, 0, SIZE)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    if once._cached(descriptor, 0, SIZE) or not once._past_cache(os.dup(descriptor)):
        pytest.skip("a file system in memory, or one that always reads through the cache")
    read_once(tmp_path / "weights", (SIZE,), torch.uint8, 0, name="w")
    assert not once._cached(descriptor, 0, 4096)


def test_beyond_the_end_of_a_file_nothing_is_missing_in_the_cache(descriptor: int) -> None:
    assert once._cached(descriptor, SIZE, 4096)
    assert once._cached(descriptor, SIZE - 4096, 8192)

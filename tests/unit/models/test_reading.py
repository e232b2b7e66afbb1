"""Positioned reads: from the cache or past it, the same bytes, wherever the tensor lies."""

import errno
import fcntl
import math
import os
from pathlib import Path

import pytest
import torch

from quantflow.errors import InputError
from quantflow.files.safetensors_header import TensorInfo
from quantflow.models import reading
from quantflow.models.reading import bytes_of, check_finite, read_once, read_tensor

SIZE = 50_001  # more than twelve blocks, and no multiple of one


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    generator = torch.Generator().manual_seed(0)
    path.write_bytes(bytes_of(torch.randint(256, (SIZE,), dtype=torch.uint8, generator=generator)))
    return path


def forget(path: Path) -> None:
    """Have the system write the file out and drop it from its cache, where it can."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    ("offset", "count"),
    [
        (0, 1),
        (0, SIZE),
        (4096, 4096),
        (4095, 2),
        (8, 12_000),
        (4097, 20_000),
        (SIZE - 1, 1),
        (SIZE - 5000, 5000),
        (7, 0),
    ],
)
def test_the_bytes_are_those_of_the_file(file: Path, offset: int, count: int, cached: bool) -> None:
    expected = file.read_bytes()[offset : offset + count]
    if not cached:
        forget(file)
    found = read_once(file, (count,), torch.uint8, offset, name="w")
    assert bytes(bytes_of(found)) == expected


@pytest.mark.parametrize("offset", [0, 8, 4094, 4095, 4099])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_elements_need_not_be_aligned_in_the_file(
    file: Path, offset: int, dtype: torch.dtype
) -> None:
    found = read_once(file, (3, 100), dtype, offset, name="w")
    assert (found.shape, found.dtype) == ((3, 100), dtype)
    assert bytes(bytes_of(found)) == file.read_bytes()[offset : offset + 300 * dtype.itemsize]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    ("offset", "count", "missing"),
    [(0, SIZE + 1, 1), (SIZE - 10, 4096, 4086), (SIZE + 9000, 5, 9005)],
)
def test_a_file_that_ends_early_is_named(
    file: Path, offset: int, count: int, missing: int, cached: bool
) -> None:
    if not cached:
        forget(file)
    with pytest.raises(InputError, match=f"w: weights ends {min(missing, count)} bytes early"):
        read_once(file, (count,), torch.uint8, offset, name="w")


def test_a_file_system_without_reads_past_the_cache_is_read_through_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "Invalid argument")
        return 0

    expected = file.read_bytes()
    forget(file)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    found = read_once(file, (30_000,), torch.uint8, 5, name="w")
    assert bytes(bytes_of(found)) == expected[5:30_005]


def test_a_system_without_reads_past_the_cache_reads_through_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    found = read_once(file, (30_000,), torch.uint8, 5, name="w")
    assert bytes(bytes_of(found)) == file.read_bytes()[5:30_005]


def finite(tensor):
    try:
        check_finite(tensor, name="x", path=Path("model.safetensors"))
    except InputError:
        return False
    return True


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.float16,
        torch.bfloat16,
    ],
)
def test_every_code_of_a_small_float_is_finite_where_torch_says_so(dtype):
    integer = torch.uint8 if dtype.itemsize == 1 else torch.int16
    codes = torch.arange(2 ** (8 * dtype.itemsize)).to(integer).view(dtype)
    expected = torch.isfinite(codes.float())
    assert finite(codes[expected])
    assert not any(finite(code) for code in codes[~expected][:, None][:300])
    with pytest.raises(
        InputError, match=f"^x: {int((~expected).sum())} values of model.safetensors are NaN or Inf"
    ):
        check_finite(codes, name="x", path=Path("model.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ends_of_a_large_float_are_finite_and_what_lies_beyond_is_not(dtype):
    info = torch.finfo(dtype)
    assert finite(
        torch.tensor([info.max, info.min, info.tiny, -info.tiny * info.eps, 0.0, -0.0], dtype=dtype)
    )
    for value in (math.inf, -math.inf, math.nan, -math.nan):
        assert not finite(torch.tensor([1.0, value], dtype=dtype))


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((100, 16), (32, 1), 3),  # every other row of 16
        ((100, 16), (32, 1), 19),
        ((7, 5, 16), (160, 32, 1), 0),
        ((100,), (2,), 1),
        ((30, 40), (1, 30), 8),  # a transpose
        ((1, 300), (900, 3), 0),
        ((0, 16), (32, 1), 0),
    ],
)
@pytest.mark.parametrize("most", [1, 100, 1 << 20])
def test_a_tensor_with_strides_is_read_in_pieces(
    file: Path, monkeypatch: pytest.MonkeyPatch, shape, strides, offset, most: int
) -> None:
    monkeypatch.setattr(reading, "_STRIDED", most)
    sizes, preadv = [], os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda *words: sizes.append(preadv(*words)) or sizes[-1], raising=True
    )
    info = TensorInfo(
        name="t",
        dtype="U8",
        shape=shape,
        offset=offset,
        nbytes=math.prod(shape),
        strides=strides,
    )
    found = read_tensor(file, info)
    whole = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    assert found.is_contiguous() and torch.equal(found, whole.as_strided(shape, strides, offset))
    row = 1 + sum((n - 1) * step for n, step in zip(shape[1:], strides[1:], strict=True))
    if strides[0] >= row:  # a transpose is one piece
        assert max(sizes, default=0) <= max(most, row)

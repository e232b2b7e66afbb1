"""Tensors by positioned reads: pread into memory of our own, never a map.

The pages of a mapped checkpoint count as this process's memory, and a file that shrinks under a map
kills the process.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quantflow.core.dtypes import DTYPES
from quantflow.errors import InputError, UnsupportedError
from quantflow.files.checkpoint import Checkpoint
from quantflow.files.folder import reading
from quantflow.files.safetensors_header import TensorInfo, read_header
from quantflow.models.once import BLOCK, fill

# elements that are checked together: the copy of their exponents stays in the cache
_CHECK_ELEMENTS = 1 << 20
_PIECE = 8 << 20  # bytes at once of a tensor that is only checked
_STRIDED = 1 << 20  # bytes at once of a tensor with strides
# the integer of the dtype's size, and the bits that are all set in a value that is not finite
NOT_FINITE: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float64: (torch.int64, 0x7FF << 52),
    torch.float32: (torch.int32, 0xFF << 23),
    torch.float16: (torch.int16, 0x1F << 10),
    torch.bfloat16: (torch.int16, 0xFF << 7),
    torch.float8_e5m2: (torch.uint8, 0x1F << 2),
    torch.float8_e4m3fn: (torch.uint8, 0x7F),  # it has no Inf, and one NaN
    torch.float8_e8m0fnu: (torch.uint8, 0xFF),  # the same
}


def read_tensors(
    checkpoint: Checkpoint, names: Iterable[str], *, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Read tensors into memory of their own, in the order of `names`.

    Args:
        checkpoint: opened folder.
        names: source names.
        dtype: dtype of the floating tensors; None keeps every tensor as stored.

    Raises:
        InputError: a name is not there, a file ends early, or a tensor holds NaN or Inf.
        UnsupportedError: torch has no name for a dtype.
    """
    tensors = {}
    for name in names:
        if name not in checkpoint.tensors:
            raise InputError(
                f"{name}: not in {checkpoint.folder}", "name a tensor of the checkpoint"
            )
        file, info = checkpoint.tensors[name]
        tensor = read_tensor(checkpoint.folder / file, info)
        tensors[name] = (
            tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        )
    return tensors


def read_tensor(
    path: Path, info: TensorInfo, *, empty: Callable[..., Tensor] = torch.empty
) -> Tensor:
    """Read one tensor of a safetensors file whose header has been checked, as stored.

    Args:
        path: file of the tensor.
        info: tensor's header entry.
        empty: function from a shape and a `dtype` to the memory that is filled; not used for a
            tensor with strides.

    Raises:
        InputError: the file ends early, or the tensor holds NaN or Inf.
        UnsupportedError: torch has no name for the dtype.
    """
    tensor = (
        empty(info.shape, dtype=_dtype(path, info))
        if info.strides is None
        else _strided(path, info)
    )
    if info.strides is None:
        _read(path, info, tensor, info.offset)
    if tensor.is_floating_point():
        check_finite(tensor, name=info.name, path=path)
    return tensor


def _strided(path: Path, info: TensorInfo) -> Tensor:
    """Read a tensor with strides; the bytes between its elements are read too.

    They are read in pieces, which stay in the cache until the elements are taken from them.
    """
    assert info.strides is not None
    tensor = torch.empty(info.shape, dtype=_dtype(path, info))
    if not tensor.numel():
        return tensor
    row = _span(info.shape[1:], info.strides[1:])  # elements from a row's first to its last
    stride, count = info.strides[0], info.shape[0]  # rows of a piece
    if stride >= row:  # rows of a transpose lie within each other: it is one piece
        count = min(count, max(1, _STRIDED // (stride * tensor.itemsize)))
    around = torch.empty((count - 1) * stride + row, dtype=tensor.dtype)
    for first in range(0, info.shape[0], count):
        rows = tensor[first : first + count]
        piece = around[: (len(rows) - 1) * stride + row]
        _read(path, info, piece, info.offset + first * stride * tensor.itemsize)
        rows.copy_(piece.as_strided(rows.shape, info.strides))
    return tensor


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a part with strides, both counted."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def read_file(path: Path) -> dict[str, Tensor]:
    """Read every tensor of a safetensors file, as stored.

    Raises:
        InputError: there is no such file, its header is damaged, or a tensor holds NaN or Inf.
        UnsupportedError: torch has no name for a dtype.
    """
    infos, _ = read_header(path)
    return {name: read_tensor(path, info) for name, info in infos.items()}


def read_rows(path: Path, info: TensorInfo, rows: Tensor) -> Tensor:
    """Read rows of a two-dimensional tensor.

    Args:
        path: file of the tensor.
        info: tensor's header entry, [R, C].
        rows: int64 [n], each from 0 to R - 1; consecutive rows are read in one go.

    Returns:
        [n, C], as stored.

    Raises:
        InputError: the file ends early, or a row holds NaN or Inf.
        UnsupportedError: torch has no name for the dtype.
    """
    if info.strides is not None:
        return read_tensor(path, info)[rows]
    tensor = torch.empty(len(rows), info.shape[1], dtype=_dtype(path, info))
    width = info.shape[1] * tensor.itemsize
    wanted = rows.tolist()
    start = 0
    for stop in range(1, len(wanted) + 1):
        if stop == len(wanted) or wanted[stop] != wanted[stop - 1] + 1:
            _read(path, info, tensor[start:stop], info.offset + wanted[start] * width)
            start = stop
    if tensor.is_floating_point():
        check_finite(tensor, name=info.name, path=path)
    return tensor


def read_columns(path: Path, info: TensorInfo, columns: slice) -> Tensor:
    """Read some columns of a two-dimensional tensor, row by row; no other byte is read.

    Args:
        path: file of the tensor.
        info: tensor's header entry, [R, C].
        columns: start and stop, within 0..C.

    Returns:
        [R, stop - start], as stored.

    Raises:
        InputError: the file ends early, or a column holds NaN or Inf.
        UnsupportedError: torch has no name for the dtype.
    """
    if info.strides is not None:
        return read_tensor(path, info)[:, columns].contiguous()
    tensor = torch.empty(info.shape[0], columns.stop - columns.start, dtype=_dtype(path, info))
    view = bytes_of(tensor)
    width, share = info.shape[1] * tensor.itemsize, tensor.shape[1] * tensor.itemsize
    places = [
        (view[row * share :][:share], info.offset + row * width + columns.start * tensor.itemsize)
        for row in range(info.shape[0])
    ]
    if info.sealed is not None:
        for part, offset in places:
            info.sealed.read_into(part, offset)
    else:
        with reading(path) as file:
            for part, offset in places:
                _fill(file.fileno(), part, offset, name=info.name, file=path.name)
    if tensor.is_floating_point():
        check_finite(tensor, name=info.name, path=path)
    return tensor


def _read(path: Path, info: TensorInfo, tensor: Tensor, offset: int) -> None:
    """Fill a contiguous tensor with bytes of `info`, from `offset` of its file.

    Raises:
        InputError: the file ends early.
        IntegrityError: the file is sealed, and was changed.
    """
    if info.sealed is None:
        read_into(path, tensor, offset, name=info.name)
    else:
        info.sealed.read_into(bytes_of(tensor), offset)


def read_into(path: Path, tensor: Tensor, offset: int, *, name: str) -> None:
    """Fill a contiguous tensor from `offset` of the file.

    Raises:
        InputError: the file ends early.
    """
    with reading(path) as file:
        _fill(file.fileno(), bytes_of(tensor), offset, name=name, file=path.name)


def _fill(descriptor: int, view: memoryview, offset: int, *, name: str, file: str) -> None:
    done = 0
    while done < len(view):  # one call to the system returns 2 GiB at most
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise InputError(
                f"{name}: {file} ends {len(view) - done} bytes early", "download the file again"
            )
        done += count


def read_once(
    path: Path, shape: Sequence[int], dtype: torch.dtype, offset: int, *, name: str
) -> Tensor:
    """Read a tensor, or some of its rows, past the system's cache (`quantflow.models.once`).

    Args:
        path: file of the tensor.
        shape: shape of the result.
        dtype: dtype as stored.
        offset: bytes from the beginning of the file.
        name: tensor's name, for the message.

    Raises:
        InputError: the file ends early.
    """
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    lead = offset % BLOCK
    memory = torch.empty(nbytes + 3 * BLOCK, dtype=torch.uint8)
    begin = -memory.data_ptr() % BLOCK
    # whole blocks around the tensor
    span = memory[begin : begin + -(-(lead + nbytes) // BLOCK) * BLOCK]
    with reading(path) as file:
        done = fill(file.fileno(), bytes_of(span), offset - lead)
    if done < lead + nbytes:
        missing = min(nbytes, lead + nbytes - done)
        raise InputError(
            f"{name}: {path.name} ends {missing} bytes early", "download the file again"
        )
    wanted = span[lead : lead + nbytes]
    # a file may place a tensor where its elements are not aligned; memory may not
    if offset % dtype.itemsize:
        wanted = wanted.clone()
    return wanted.view(dtype).view(*shape)


def check_stored(path: Path, info: TensorInfo) -> None:
    """Refuse NaN and Inf in a tensor of a file, holding 8 MiB of it at a time.

    Raises:
        InputError: the file ends early, or a value is not finite.
        UnsupportedError: torch has no name for the dtype.
    """
    dtype = _dtype(path, info)
    if dtype not in NOT_FINITE:
        return
    piece = torch.empty(min(info.nbytes, _PIECE) // dtype.itemsize, dtype=dtype)
    for start in range(0, info.nbytes, _PIECE):
        part = piece[: (info.nbytes - start) // dtype.itemsize]
        _read(path, info, part, info.offset + start)
        check_finite(part, name=info.name, path=path)


def check_finite(tensor: Tensor, *, name: str, path: Path) -> None:
    """Refuse NaN and Inf.

    Raises:
        InputError: naming the tensor, and the number of its values that are not finite.
    """
    if count := not_finite(tensor):
        raise InputError(
            f"{name}: {count} values of {path.name} are NaN or Inf, all must be finite",
            "download the file again, or repair the checkpoint",
        )


def not_finite(tensor: Tensor) -> int:
    """The number of NaN and Inf in the first part of a tensor that has any; 0 without any.

    The exponent's bits of a value that is not finite are all set. Integers are compared at the
    speed of the memory, where isfinite is not vectorised for bfloat16.
    """
    integer, mask = NOT_FINITE[tensor.dtype]
    flat = tensor.flatten().view(integer)
    for start in range(0, len(flat), _CHECK_ELEMENTS):
        bits = flat[start : start + _CHECK_ELEMENTS] & mask
        if bits.amax() == mask:
            return int((bits == mask).sum())
    return 0


def _dtype(path: Path, info: TensorInfo) -> torch.dtype:
    if info.dtype not in DTYPES:
        raise UnsupportedError(
            f"{info.name}: dtype {info.dtype} in {path.name} is not known",
            f"use one of {', '.join(DTYPES)}",
        )
    return DTYPES[info.dtype]


def bytes_of(tensor: Tensor) -> memoryview:
    """A view of a tensor's bytes, as a file holds them.

    It is a view of a copy when the tensor is not contiguous.
    """
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)  # [nbytes]

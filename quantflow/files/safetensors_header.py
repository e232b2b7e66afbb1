"""The header of a safetensors file, read and checked without reading a single weight.

    bytes 0..7       N, little-endian unsigned 64 bit, at most 100,000,000
    bytes 8..8+N-1   one JSON object, padded with spaces:
                     {name: {"dtype", "shape", "data_offsets": [begin, end]}, ...,
                      "__metadata__": {string: string}}
    the rest         the tensors' bytes; offsets count from here, leave no hole, do not overlap, and
                     end with the file

The checks are those of the format's reference implementation, and stricter: a duplicate or unknown
key is refused.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantflow.errors import InputError
from quantflow.files.canonical import parse_json
from quantflow.files.folder import POINTER_START, reading, refuse_pointer
from quantflow.files.sealed import SealedFile

MAX_HEADER_BYTES = 100_000_000
MAX_INTEGER = 2**63 - 1
MAX_DIMENSIONS = 64  # torch has no tensor of more
MAX_NAME = 4096  # characters
METADATA = "__metadata__"
DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
_DAMAGED = "download or write the file again"


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """The place of a tensor in its file.

    Attributes:
        name: name of the tensor.
        dtype: name of the dtype in the format, such as BF16 or F8_E4M3.
        shape: shape of the tensor; () for a scalar.
        offset: bytes from the beginning of the FILE.
        nbytes: bytes of the tensor.
        strides: elements from one to the next along each axis; None where they lie one after the
            other. Others are a part of a tensor of the file, or its transpose.
        sealed: the file, where its bytes are compared with a hash when they are read.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    strides: tuple[int, ...] | None = None
    sealed: SealedFile | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """A part of a tensor under its own name, or the whole of it with its axes in another order.

    Attributes:
        name: name of the part.
        shape: shape of the part.
        strides: elements of the tensor from one of the part to the next, along each axis.
        start: elements of the tensor before the first one of the part.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    def of(self, whole: TensorInfo) -> TensorInfo:
        """The place of the part in the file that holds the tensor."""
        itemsize = DTYPE_BITS[whole.dtype] // 8
        elements = 1
        dense = []
        for size in reversed(self.shape):
            dense.append(elements)
            elements *= size
        return TensorInfo(
            name=self.name,
            dtype=whole.dtype,
            shape=self.shape,
            offset=whole.offset + self.start * itemsize,
            nbytes=elements * itemsize,
            strides=None if self.strides == tuple(reversed(dense)) else self.strides,
            sealed=whole.sealed,
        )


@dataclass(frozen=True, kw_only=True)
class SplitTensor:
    """A tensor of a file that is read in parts, or with its axes in another order.

    Attributes:
        shape: shape of the tensor.
        parts: parts as which it is read; together they have each of its elements once.
        exchanged: the split in files that hold the last two axes in the other order; None where no
            file does.
    """

    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]
    exchanged: "SplitTensor | None" = None

    def of(self, shape: tuple[int, ...]) -> "SplitTensor | None":
        """The split of a tensor of this shape; None for any other shape."""
        return next(
            (one for one in (self, self.exchanged) if one is not None and one.shape == shape), None
        )


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Read and check the header of a safetensors file.

    Returns:
        The tensors by name, in the order of their bytes, and the file's metadata.

    Raises:
        InputError: the file is unreadable, a git-LFS pointer, truncated, longer than its tensors,
            or violates the format; the message names the file, and the tensor where there is one.
    """
    with reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(len(POINTER_START))
        refuse_pointer(head, path)
        if size < 8:
            raise InputError(f"{path}: {size} bytes, a safetensors file has at least 8", _DAMAGED)
        length = int.from_bytes(head[:8], "little")
        if length > MAX_HEADER_BYTES:
            raise InputError(
                f"{path}: header of {length} bytes, the format allows {MAX_HEADER_BYTES}", _DAMAGED
            )
        if length > size - 8:
            raise InputError(
                f"{path}: truncated, header of {length} bytes in a file of {size}", _DAMAGED
            )
        file.seek(8)
        data = file.read(length)
    if not data.startswith(b"{"):
        raise InputError(
            f"{path}: the header begins with {data[:1]!r}, the format demands '{{'", _DAMAGED
        )
    header = parse_json(data, str(path))
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(
        isinstance(text, str) for text in metadata.values()
    ):
        raise InputError(f"{path}: {METADATA} is not a table of strings", _DAMAGED)
    tensors = [_tensor(path, name, entry, begin=8 + length) for name, entry in header.items()]
    tensors.sort(key=lambda info: (info.offset, info.nbytes))
    _check_coverage(path, tensors, begin=8 + length, size=size)
    return {info.name: info for info in tensors}, metadata


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of a tensor, or None where the format cannot hold it.

    None stands for an unknown dtype, a dimension or a product beyond 63 bits, or a fraction of a
    byte.
    """
    if dtype not in DTYPE_BITS:
        return None
    elements = 1
    for dimension in shape:
        elements *= dimension
        if not 0 <= dimension <= MAX_INTEGER or elements > MAX_INTEGER:
            return None
    bits = elements * DTYPE_BITS[dtype]
    return None if bits % 8 else bits // 8


def _tensor(path: Path, name: str, entry: Any, *, begin: int) -> TensorInfo:
    """Check one entry of the header on its own.

    Args:
        path: path of the file, for the message.
        name: name of the tensor.
        entry: entry of the header.
        begin: offset in the file where its data begins.
    """
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise InputError(
            f"{path}: tensor {name!r} needs exactly dtype, shape and data_offsets", _DAMAGED
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise InputError(f"{path}: tensor {name!r} has unknown dtype {str(dtype)[:40]!r}", _DAMAGED)
    if len(name) > MAX_NAME or (isinstance(shape, list) and len(shape) > MAX_DIMENSIONS):
        raise InputError(
            f"{path}: tensor {name[:80]!r} has {len(name)} characters of name and {len(shape)} "
            "dimensions",
            f"at most {MAX_NAME} and {MAX_DIMENSIONS} are read; write the file again",
        )
    if not _are_counts(shape):
        raise InputError(
            f"{path}: tensor {name!r} has a shape that is not a list of integers >= 0", _DAMAGED
        )
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise InputError(
            f"{path}: tensor {name!r} has data_offsets that are not [begin, end]", _DAMAGED
        )
    nbytes = offsets[1] - offsets[0]
    needed = tensor_bytes(dtype, tuple(shape))
    if needed != nbytes:
        raise InputError(
            f"{path}: tensor {name!r}, {dtype} {_abbreviated(shape)} needs {needed} bytes, "
            f"data_offsets give {nbytes}",
            _DAMAGED,
        )
    return TensorInfo(
        name=name, dtype=dtype, shape=tuple(shape), offset=begin + offsets[0], nbytes=nbytes
    )


def _check_coverage(path: Path, tensors: list[TensorInfo], *, begin: int, size: int) -> None:
    """Check that tensors, sorted by offset, cover the file without hole or overlap.

    Args:
        path: path of the file, for the message.
        tensors: tensors, sorted by offset.
        begin: offset where the file's data begins.
        size: bytes of the file.
    """
    position = begin
    for info in tensors:
        if info.offset != position:
            overlaps = info.offset < position
            what = "overlaps the tensor before it" if overlaps else "leaves a hole before it"
            raise InputError(
                f"{path}: tensor {info.name!r} {what}: at {info.offset}, expected {position}",
                _DAMAGED,
            )
        position += info.nbytes
    if position != size:
        what = "truncated" if size < position else "longer than its tensors"
        raise InputError(
            f"{path}: {what}, {size} bytes where the header describes {position}", _DAMAGED
        )


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= MAX_INTEGER for value in values
    )


def _abbreviated(shape: list[int]) -> str:
    return str(shape) if len(shape) <= 8 else f"[{len(shape)} dimensions]"

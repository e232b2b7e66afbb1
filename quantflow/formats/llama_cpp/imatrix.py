"""llama.cpp's importance matrices: the mean square of what each linear reads, as a file.

`llama-imatrix` writes one, and `llama-quantize --imatrix FILE` weighs the rounding errors of each
column by it. There are two forms, both little-endian.

GGUF, of today's llama.cpp:

| part | content |
|---|---|
| general.type | `imatrix` |
| imatrix.datasets | names of the texts |
| imatrix.chunk_count, imatrix.chunk_size | u32: number of sequences, and tokens of each |
| tensor NAME.in_sum2 | float32 [M, I], the sum of squares of each input |
| tensor NAME.counts | float32 [M, 1], tokens that were added up |
| tensor NAME.in_sum | float32 [M, I], the sum of each input; not read and not written here |

NAME is a weight's in llama.cpp's files, `blk.0.attn_q.weight`. M is 1, or the experts of a layer.
Dimensions of 1 may be left out.

The older form, often named `.dat` or `.imatrix`:

    bytes        content
    4            int32 number of entries
    each entry   int32 length of the name, the name, int32 n, int32 number V of values,
                 V float32: n times the mean square of each input, matrix after matrix
    4            int32 chunks; this and the name of the text may be missing
    4 + length   int32 length of the text's name, the name

An expert that saw no token has 1 everywhere. Source: tools/imatrix/imatrix.cpp and
common/imatrix-loader.cpp of llama.cpp.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quantflow.errors import InputError
from quantflow.files import disk
from quantflow.files.folder import reading
from quantflow.formats.llama_cpp import gguf
from quantflow.formats.llama_cpp.experts import FileTensor
from quantflow.formats.llama_cpp.gguf import MAX_NAME_BYTES, Header
from quantflow.models.reading import bytes_of, read_tensor

TYPE = "imatrix"
_DATASETS, _CHUNKS, _CHUNK_SIZE = (
    "imatrix.datasets",
    "imatrix.chunk_count",
    "imatrix.chunk_size",
)
_SQUARES, _COUNTS, _SUMS = ".in_sum2", ".counts", ".in_sum"
_AGAIN = "write it again with llama-imatrix or `quantflow export --format imatrix`"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What was seen of a weight's inputs.

    Attributes:
        sums: [M * I] float32, finite and at least zero, sums of squares, matrix after matrix.
        counts: [M] or [1] float32, tokens behind each of them; [1] of the older form is a number
            that the sums were multiplied by.
    """

    sums: Tensor
    counts: Tensor

    def mean_squares(self) -> Tensor:
        """The mean square of each input, [M * I] float32; 1 where there was no token."""
        means = self.sums.view(len(self.counts), -1) / self.counts[:, None].clamp_min(1)
        means[self.counts == 0] = 1.0
        return means.flatten()


@dataclass(frozen=True, kw_only=True)
class ImportanceMatrix:
    """An importance matrix.

    Attributes:
        entries: name of a weight in llama.cpp's files -> what was seen.
        datasets: names of the texts.
        chunks: number of sequences.
        chunk_size: tokens of each; 0 where the file does not say it.
    """

    entries: Mapping[str, Entry]
    datasets: tuple[str, ...] = ()
    chunks: int = 0
    chunk_size: int = 0


@dataclass(frozen=True, kw_only=True)
class InputsPlace:
    """The place of a linear's inputs in an importance matrix.

    Attributes:
        entry: name of the entry.
        index: number of its matrix there: an expert's, else 0.
        matrices: matrices of the entry.
        features: inputs of the linear.
    """

    entry: str
    index: int
    matrices: int
    features: int


def rows_of(tensors: Iterable[FileTensor]) -> dict[str, InputsPlace]:
    """Linear of the layers -> its place.

    Left out are routers, which are not quantized, and the linear of compressed keys and values,
    whose two tensors in a file read other inputs than the linear.

    Args:
        tensors: those of the model's GGUF file.
    """
    return {
        part.source.removesuffix(".weight"): InputsPlace(
            entry=tensor.name,
            index=index,
            matrices=len(tensor.parts),
            features=part.shape[1],
        )
        for tensor in tensors
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1
        for index, part in enumerate(tensor.parts)
        if not tensor.float32 and part.order not in ("keys", "values")
    }


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Read an importance matrix of either form.

    Raises:
        InputError: there is no such file, it is cut, it is something else, or a value is negative,
            NaN or Inf.
    """
    with reading(path) as file:
        is_gguf = file.read(4) == b"GGUF"
    return _read_gguf(path) if is_gguf else _read_older(path)


def write_gguf(path: Path, matrix: ImportanceMatrix) -> None:
    """Write an importance matrix as GGUF.

    Raises:
        InputError: a name that is too long.
        OSError: the file system failed.
    """
    tensors = {}
    for name, entry in sorted(matrix.entries.items()):
        tensors[f"{name}{_SQUARES}"] = entry.sums.view(len(entry.counts), -1)
        tensors[f"{name}{_COUNTS}"] = entry.counts[:, None]
    metadata = {
        "general.type": ("string", TYPE),
        _DATASETS: ("[string]", list(matrix.datasets)),
        _CHUNKS: ("u32", matrix.chunks),
        _CHUNK_SIZE: ("u32", matrix.chunk_size),
    }
    specs = {name: ("F32", tuple(tensor.shape)) for name, tensor in tensors.items()}
    gguf.write(
        path, gguf.layout(metadata, specs), lambda info: [bytes_of(tensors[info.name].float())]
    )


def write_older(path: Path, matrix: ImportanceMatrix) -> None:
    """Write an importance matrix in the older form, each n its number of chunks.

    Weights none of whose experts saw a token are left out, as llama.cpp does.

    Raises:
        OSError: the file system failed.
    """
    n = max(matrix.chunks, 1)
    entries = [
        _named(name) + struct.pack("<ii", n, entry.sums.numel()) + _floats(entry.mean_squares() * n)
        for name, entry in sorted(matrix.entries.items())
        if entry.counts.any()
    ]
    last = matrix.datasets[-1] if matrix.datasets else ""
    end = struct.pack("<i", matrix.chunks) + _named(last)
    disk.write_file(path, b"".join([struct.pack("<i", len(entries)), *entries, end]))


def _named(text: str) -> bytes:
    return struct.pack("<i", len(text.encode())) + text.encode()


def _floats(values: Tensor) -> bytes:
    return values.numpy().astype("<f4").tobytes()


def _read_gguf(path: Path) -> ImportanceMatrix:
    header = gguf.read_header(path)
    kind = header.metadata.get("general.type", ("string", None))[1]
    if kind != TYPE:
        raise InputError(f"{path}: general.type is {kind!r}, {TYPE!r} is needed", _AGAIN)
    entries = {}
    for name in header.tensors:
        weight, end = _parts(name)
        if end is None:
            raise InputError(f"{path}: tensor {name!r} is none of an importance matrix", _AGAIN)
        if end == _SQUARES:
            entries[weight] = _checked(
                path,
                weight,
                sums=_tensor(path, header, f"{weight}{_SQUARES}"),
                counts=_tensor(path, header, f"{weight}{_COUNTS}"),
            )
    if not entries:
        raise InputError(f"{path}: an importance matrix without entries", _AGAIN)
    return ImportanceMatrix(
        entries=entries,
        datasets=tuple(header.metadata.get(_DATASETS, ("[string]", []))[1]),
        chunks=header.metadata.get(_CHUNKS, ("u32", 0))[1],
        chunk_size=header.metadata.get(_CHUNK_SIZE, ("u32", 0))[1],
    )


def _parts(name: str) -> tuple[str, str | None]:
    """The weight and the ending of a tensor's name; the ending is None where it is unknown."""
    for end in (_SQUARES, _SUMS, _COUNTS):
        if name.endswith(end):
            return name.removesuffix(end), end
    return name, None


def _tensor(path: Path, header: Header, name: str) -> Tensor:
    """A tensor of the file, flat."""
    info = header.tensors.get(name)
    if info is None or info.dtype != "F32":
        found = "is missing" if info is None else f"is {info.dtype}, F32 is needed"
        raise InputError(f"{path}: tensor {name!r} {found}", _AGAIN)
    return read_tensor(path, info).flatten()


def _read_older(path: Path) -> ImportanceMatrix:
    cursor = _Cursor(path=path, data=path.read_bytes())
    (count,) = cursor.integers(1)
    if count < 1:
        raise InputError(f"{path}: begins with {count} entries, no importance matrix", _AGAIN)
    entries = {}
    for _ in range(count):
        name = cursor.name(MAX_NAME_BYTES)
        n, values = cursor.integers(2)
        if values < 1 or n < 0 or name in entries:
            raise InputError(f"{path}: {name}: {values} values of {n} chunks, or twice", _AGAIN)
        entries[name] = _checked(
            path, name, sums=cursor.floats(values), counts=torch.tensor([float(max(n, 1))])
        )
    chunks, datasets = 0, list[str]()
    if cursor.rest:
        (chunks,) = cursor.integers(1)
    if cursor.rest:
        datasets.append(cursor.name(cursor.rest))
    if cursor.rest:
        raise InputError(f"{path}: {cursor.rest} bytes behind its end", _AGAIN)
    return ImportanceMatrix(entries=entries, datasets=tuple(datasets), chunks=max(chunks, 0))


@dataclass(kw_only=True)
class _Cursor:
    """Takes values of the older form in order, and never more than the file has."""

    path: Path
    data: bytes
    at: int = 0

    @property
    def rest(self) -> int:
        """Bytes that are left."""
        return len(self.data) - self.at

    def take(self, nbytes: int) -> bytes:
        if not 0 <= nbytes <= self.rest:
            raise InputError(
                f"{self.path}: no importance matrix, or one that is cut: {nbytes} bytes at "
                f"{self.at} of {len(self.data)}",
                _AGAIN,
            )
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def integers(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}i", self.take(4 * count))

    def name(self, longest: int) -> str:
        (length,) = self.integers(1)
        if length > longest:
            raise InputError(f"{self.path}: a name of {length} bytes, no importance matrix", _AGAIN)
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{self.path}: a name that is not UTF-8, no importance matrix", _AGAIN
            ) from error

    def floats(self, count: int) -> Tensor:
        values = np.frombuffer(self.take(4 * count), dtype="<f4").astype(np.float32)
        return torch.from_numpy(values)


def _checked(path: Path, name: str, *, sums: Tensor, counts: Tensor) -> Entry:
    """An entry whose values are such as squares and counts have."""
    for what, values in (("sums of squares", sums), ("counts", counts)):
        if not torch.isfinite(values).all() or (values < 0).any():
            raise InputError(f"{path}: {name}: {what} with NaN, Inf or below 0", _AGAIN)
    if sums.numel() % counts.numel():
        raise InputError(
            f"{path}: {name}: {sums.numel()} sums of squares of {counts.numel()} matrices", _AGAIN
        )
    return Entry(sums=sums, counts=counts.float())

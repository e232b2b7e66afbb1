"""The tensors of statistics files, each read when it is asked for: those of many ranks do not fit into memory together."""

import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from quantflow.artifact.safetensors_header import MAX_HEADER_BYTES, TensorInfo, read_header
from quantflow.errors import InputError

_DTYPES = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64}
_BLOCK = 1 << 17  # bytes; of each rank, a few are in memory at once
_AGAIN = "measure again, or copy the file again from where it was measured"


class Headers:
    """Headers of statistics files; ranks that measured the same have the same, which is read and kept once."""

    def __init__(self) -> None:
        """None is known."""
        self._known: dict[tuple[int, bytes], Mapping[str, TensorInfo]] = {}

    def read(self, path: Path) -> Mapping[str, TensorInfo]:
        """Return key -> where the tensor lies in the file.

        Raises:
            InputError: the header is damaged, or a tensor has a dtype that no statistic has.
        """
        with path.open("rb") as file:
            start = file.read(8)
            text = file.read(min(int.from_bytes(start, "little"), MAX_HEADER_BYTES))
            size = os.fstat(file.fileno()).st_size
        if (size, text) not in self._known:
            infos, _ = read_header(path)
            for info in infos.values():
                if info.dtype not in _DTYPES:
                    raise InputError(f"{path}: {info.name} is {info.dtype}, expected one of {', '.join(_DTYPES)}", _AGAIN)
            self._known[size, text] = infos
        return self._known[size, text]


class StoredStatistics(Mapping[str, Tensor]):
    """Key -> tensor, from positioned reads of blocks: keys in their order are neighbours in the file. Values are not checked.

    Args:
        path: a safetensors file whose hash was checked; it stays open.
        headers: of the files of other ranks.

    Raises:
        InputError: as `Headers.read`.
    """

    def __init__(self, path: Path, headers: Headers) -> None:
        """Read the header."""
        self._infos = headers.read(path)
        self._path = path
        self._blocks: dict[str, tuple[int, bytearray]] = {}  # dtype -> where it begins in the file, bytes; files sort by dtype
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def __getitem__(self, key: str) -> Tensor:
        """Read a tensor; what is not there is a KeyError."""
        info = self._infos[key]
        dtype = _DTYPES[info.dtype]
        if not info.nbytes:
            return torch.empty(info.shape, dtype=dtype)
        begin, block = self._blocks.get(info.dtype, (0, b""))
        if not begin <= info.offset <= info.offset + info.nbytes <= begin + len(block):
            begin, block = info.offset, self._read(key, info)
            self._blocks[info.dtype] = begin, block
        count = info.nbytes // dtype.itemsize
        tensor = torch.frombuffer(block, dtype=dtype, count=count, offset=info.offset - begin)
        return tensor if len(info.shape) == 1 else tensor.view(info.shape)

    def _read(self, key: str, info: TensorInfo) -> bytearray:
        """Return the bytes of a tensor and of what follows it."""
        block = bytearray(max(info.nbytes, _BLOCK))
        count = os.preadv(self._descriptor, [block], info.offset)
        if count < info.nbytes:
            raise InputError(f"{self._path}: {key} has {count} bytes, {info.nbytes} when it was opened", _AGAIN)
        del block[count:]
        return block

    def __iter__(self) -> Iterator[str]:
        """Yield the keys."""
        return iter(self._infos)

    def __len__(self) -> int:
        """Return how many tensors there are."""
        return len(self._infos)

    def __contains__(self, key: object) -> bool:
        """Return whether a tensor is there, without reading it."""
        return key in self._infos

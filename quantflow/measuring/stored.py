"""The tensors of statistics files, each read when it is asked for.

Those of many ranks do not fit into memory together. Nor do the matrices of one rank: `Deferred` has
small statistics at hand, and makes or reads a matrix whenever it is asked for.

Files are written here too, block by block, as the format's own writer makes them: tensors sorted by
dtype, then by key.
"""

import hashlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quantflow.errors import InputError
from quantflow.files import disk
from quantflow.files.safetensors_header import MAX_HEADER_BYTES, TensorInfo, read_header
from quantflow.files.safetensors_writer import Spec, layout
from quantflow.observers.keys import is_matrix

_DTYPES = {"I64": torch.int64, "F64": torch.float64, "F32": torch.float32}  # in the order of a file
_BLOCK = 1 << 17  # bytes; of each rank, a few are in memory at once
# bytes: so many that threads seldom wait for the interpreter between them
_WRITTEN_AT_ONCE = 1 << 22
_AGAIN = "measure again, or copy the file again from where it was measured"


class Headers:
    """Headers of statistics files.

    Ranks that measured the same have equal headers, which are kept once.
    """

    def __init__(self) -> None:
        """None is known."""
        self._known: dict[tuple[int, bytes], Mapping[str, TensorInfo]] = {}

    def read(self, path: Path) -> Mapping[str, TensorInfo]:
        """Key -> the tensor's place in the file.

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
                    raise InputError(
                        f"{path}: {info.name} is {info.dtype}, expected one of "
                        f"{', '.join(sorted(_DTYPES))}",
                        _AGAIN,
                    )
            self._known[size, text] = infos
        return self._known[size, text]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors into a file and return its sha256; they may share memory.

    It is the hash of what was to be written: what the disk makes of that can be compared with it.

    Args:
        path: the file; nobody reads it yet.
        tensors: name -> tensor, float32, float64 or int64.

    Raises:
        OSError: the file system failed.
    """
    digest = hashlib.sha256()

    def hashed() -> Iterator[bytes | memoryview]:
        for part in _parts(tensors):
            digest.update(part)
            yield part

    disk.write_parts(path, hashed())
    return digest.hexdigest()


def hash_of(tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of the file that `write_tensors` would write."""
    digest = hashlib.sha256()
    for part in _parts(tensors):
        digest.update(part)
    return digest.hexdigest()


def as_tensors(sequences: Sequence[Tensor]) -> dict[str, Tensor]:
    """The tensors of a .safetensors file of token ids: `tokens` [T] and `lengths` [n], int64."""
    return {
        "tokens": torch.cat([torch.empty(0, dtype=torch.int64), *sequences]),
        "lengths": torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64),
    }


def spec_of(tensors: Mapping[str, Tensor], name: str) -> Spec:
    """The dtype, as safetensors names it, and the shape of a statistic, which is not read."""
    return (
        tensors.spec(name)
        if isinstance(tensors, Deferred | StoredStatistics)
        else _spec(tensors[name])
    )


def _spec(tensor: Tensor) -> Spec:
    return next(name for name, dtype in _DTYPES.items() if dtype == tensor.dtype), tuple(
        tensor.shape
    )


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file: small tensors together, large ones without a copy."""
    order = list(_DTYPES)
    specs = {name: spec_of(tensors, name) for name in tensors}
    names = sorted(specs, key=lambda name: (order.index(specs[name][0]), name))
    yield layout({name: specs[name] for name in names}, metadata={}, keep_order=True).header
    block: list[memoryview] = []
    size = 0
    for name in names:
        part = disk.flat(tensors[name].numpy(force=True).ravel().data)
        if size + len(part) > _WRITTEN_AT_ONCE:
            yield b"".join(block)
            block, size = [], 0
        if len(part) > _WRITTEN_AT_ONCE:
            yield part
        else:
            block.append(part)
            size += len(part)
    yield b"".join(block)


class Later(NamedTuple):
    """A tensor that is made when it is asked for.

    Attributes:
        spec: dtype as safetensors names it, and shape.
        make: returns it; nobody keeps it.
    """

    spec: Spec
    make: Callable[[], Tensor]


class Deferred(Mapping[str, Tensor]):
    """Key -> tensor; small ones are in memory, each of the others is made whenever it is asked for.

    Args:
        held: key -> tensor.
        later: key -> maker of the tensor.
    """

    def __init__(self, held: Mapping[str, Tensor], later: Mapping[str, Later]) -> None:
        """Make nothing yet."""
        self._held = held
        self._later = later

    def __getitem__(self, key: str) -> Tensor:
        """A tensor; what is not there is a KeyError."""
        return self._held[key] if key in self._held else self._later[key].make()

    def spec(self, key: str) -> Spec:
        """The dtype and the shape of a tensor, which is not made."""
        return self._later[key].spec if key in self._later else _spec(self._held[key])

    def __iter__(self) -> Iterator[str]:
        """Yield the keys."""
        yield from self._held
        yield from self._later

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self._held) + len(self._later)

    def __contains__(self, key: object) -> bool:
        """Whether a tensor is there, without making it."""
        return key in self._held or key in self._later


class StoredStatistics(Mapping[str, Tensor]):
    """Key -> tensor, read from the file in blocks; values are not checked.

    Keys in their order are neighbours in the file.

    Args:
        path: a safetensors file whose hash was checked; it stays open.
        headers: headers of other ranks' files.

    Raises:
        InputError: see `Headers.read`.
    """

    def __init__(self, path: Path, headers: Headers) -> None:
        """Read the header."""
        self._infos = headers.read(path)
        self._path = path
        # dtype -> where it begins in the file, bytes; files sort by dtype
        self._blocks: dict[str, tuple[int, bytearray]] = {}
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def __getitem__(self, key: str) -> Tensor:
        """Read a tensor; what is not there is a KeyError."""
        info = self._infos[key]
        dtype = _DTYPES[info.dtype]
        if info.nbytes > _BLOCK or not info.nbytes:
            return self._read_alone(key, info)
        begin, block = self._blocks.get(info.dtype, (0, b""))
        if not begin <= info.offset <= info.offset + info.nbytes <= begin + len(block):
            begin = info.offset
            block = self._read(key, info)
            self._blocks[info.dtype] = begin, block
        count = info.nbytes // dtype.itemsize
        tensor = torch.frombuffer(block, dtype=dtype, count=count, offset=info.offset - begin)
        return tensor if len(info.shape) == 1 else tensor.view(info.shape)

    def spec(self, key: str) -> Spec:
        """The dtype and the shape of a tensor, which is not read."""
        return self._infos[key].dtype, self._infos[key].shape

    def _read_alone(self, key: str, info: TensorInfo) -> Tensor:
        """A tensor that nobody keeps beside who asked for it."""
        tensor = torch.empty(info.shape, dtype=_DTYPES[info.dtype])
        view = disk.flat(tensor.numpy().ravel().data)
        done = 0
        while done < info.nbytes:
            count = os.preadv(self._descriptor, [view[done:]], info.offset + done)
            if not count:
                raise InputError(
                    f"{self._path}: {key} has {done} bytes, {info.nbytes} when it was opened",
                    _AGAIN,
                )
            done += count
        return tensor

    def _read(self, key: str, info: TensorInfo) -> bytearray:
        """The bytes of a small tensor and of what follows it."""
        block = bytearray(_BLOCK)
        count = os.preadv(self._descriptor, [block], info.offset)
        if count < info.nbytes:
            raise InputError(
                f"{self._path}: {key} has {count} bytes, {info.nbytes} when it was opened", _AGAIN
            )
        del block[count:]
        return block

    def __iter__(self) -> Iterator[str]:
        """Yield the keys."""
        return iter(self._infos)

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self._infos)

    def __contains__(self, key: object) -> bool:
        """Whether a tensor is there, without reading it."""
        return key in self._infos


def read_small(path: Path) -> Deferred:
    """The statistics of a file; matrices are read whenever they are asked for.

    Raises:
        InputError: see `Headers.read`; or the file ends early.
    """
    stored = StoredStatistics(path, Headers())
    matrices = {
        key: Later(stored.spec(key), partial(stored.__getitem__, key))
        for key in stored
        if is_matrix(key)
    }
    return Deferred({key: stored[key].clone() for key in stored if key not in matrices}, matrices)

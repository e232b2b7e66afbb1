"""The units of file to file: some rows of a weight, or some elements of a copied tensor, that are read and written at once.

Units are cut by the code's constants from what is written, be it a whole layer or one card's part of it. Their order is
that of the bytes in the source's files.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quantflow.artifact.safetensors_header import TensorInfo
from quantflow.artifact.safetensors_writer import Spec
from quantflow.core.scheme import LinearScheme
from quantflow.errors import UnsupportedError
from quantflow.formats import FORMATS
from quantflow.models.graph import Layer
from quantflow.models.reading import DTYPES, read_columns, read_once
from quantflow.models.source import ModelFiles
from stages._plan import Plan
from stages._share import WHOLE, Share

FORMAT = FORMATS["compressed-tensors"]
UNIT = 1 << 20  # weights of a unit: its float32 copies stay near the core, and Python's share of the time is small


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Some rows of one source tensor, or some elements of a copied one.

    Attributes:
        path, info: the file that holds the source's tensor, and where.
        shape: of what is written of it, by all units together.
        scheme: of the linear; None copies.
        first, count: rows of the source's tensor; elements where whole rows are copied.
        at: where they are written, in rows or elements of `shape`.
        columns: of the source's tensor, where only these are read; None reads whole rows.
    """

    path: Path
    info: TensorInfo
    shape: tuple[int, ...]
    scheme: LinearScheme | None
    first: int
    count: int
    at: int
    columns: slice | None = None

    @property
    def linear(self) -> str:
        """The linear that the tensor belongs to, or what its name has before the last dot."""
        return self.info.name.rpartition(".")[0]

    @property
    def dtype(self) -> torch.dtype:
        """In which the source stores it."""
        return DTYPES[self.info.dtype]

    @property
    def by_rows(self) -> bool:
        """Whether the unit is counted in rows, not in elements."""
        return self.scheme is not None or self.columns is not None

    @property
    def row_bytes(self) -> int:
        """Bytes, as stored, of a row that is written, or of an element."""
        return (self.shape[1] if self.by_rows else 1) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return self.count * self.row_bytes

    @property
    def offset(self) -> int:
        """Where the first row or element begins in the file."""
        width = self.info.shape[1] if self.by_rows else 1
        return self.info.offset + self.first * width * self.dtype.itemsize

    def read(self) -> Tensor:
        """Read the unit, [rows, columns] or [elements] as stored.

        Raises:
            InputError: the file ends early, or columns hold NaN or Inf.
        """
        if self.columns is not None:
            rows = replace(self.info, shape=(self.count, self.info.shape[1]), offset=self.offset)
            return read_columns(self.path, rows, self.columns)
        shape = (self.count, self.shape[1]) if self.by_rows else (self.count,)
        return read_once(self.path, shape, self.dtype, self.offset, name=self.info.name)


def layer_specs(layer: Layer, plan: Plan, source: ModelFiles, share: Share = WHOLE) -> dict[str, Spec]:
    """Return every tensor of a layer's file: name -> (dtype as safetensors names it, shape)."""
    specs: dict[str, Spec] = {}
    for name, info in _tensors(layer, source):
        linear, scheme = _linear(name, plan)
        shape = share.info(info).shape
        if scheme is None:
            specs[name] = (info.dtype, shape)
        else:
            specs |= FORMAT.tensor_specs(linear, scheme, shape, DTYPES[info.dtype])
    return specs


def units_of(layer: Layer, plan: Plan, source: ModelFiles, share: Share = WHOLE) -> Iterator[Unit]:
    """Yield the units of a layer in the order of their bytes in the source's files.

    Raises:
        UnsupportedError: a dtype that torch has no name for.
    """
    for name, info in _tensors(layer, source):
        file, _ = source.checkpoint.tensors[name]
        if info.dtype not in DTYPES:
            raise UnsupportedError(f"{name}: dtype {info.dtype} in {file} is not known", f"use one of {', '.join(DTYPES)}")
        _, scheme = _linear(name, plan)
        part, shape = share.part(info), share.info(info).shape
        first, total, step = part.rows.start, torch.Size(shape).numel(), UNIT
        if scheme is not None or part.columns is not None:
            total, step = shape[0], row_step(shape[1], scheme)
        else:
            first *= torch.Size(info.shape[1:]).numel()
        for at in range(0, total, step):
            yield Unit(
                path=source.checkpoint.folder / file,
                info=info,
                shape=shape,
                scheme=scheme,
                first=first + at,
                count=min(step, total - at),
                at=at,
                columns=part.columns,
            )


def row_step(in_features: int, scheme: LinearScheme | None) -> int:
    """Return how many rows of a weight make a unit; scheme: None copies them."""
    multiple: int = 1 if scheme is None else FORMAT.row_multiple(scheme)
    return max(1, UNIT // max(1, in_features) // multiple) * multiple


def files_of(layer: Layer, source: ModelFiles) -> list[str]:
    """Return the source's files that a layer lies in."""
    return list(dict.fromkeys(source.checkpoint.tensors[name][0] for name, _ in _tensors(layer, source)))


def _tensors(layer: Layer, source: ModelFiles) -> list[tuple[str, TensorInfo]]:
    """Return the source's tensors of a layer, in the order of their bytes."""
    found = [
        (file, info.offset, name, info)
        for name, (file, info) in source.checkpoint.tensors.items()
        if name.startswith(f"{layer.prefix}.")
    ]
    return [(name, info) for _, _, name, info in sorted(found, key=lambda item: item[:3])]


def _linear(name: str, plan: Plan) -> tuple[str, LinearScheme | None]:
    """Return the linear that a source tensor is the weight of, and its scheme, None where the tensor is copied."""
    linear, _, leaf = name.rpartition(".")
    return linear, plan.schemes.get(linear) if leaf == "weight" else None

"""Weights some rows at a time: cut into units, decoded from a result's files, and hashed.

Units are what file to file reads and writes at once: some rows of a weight, or some elements of a
copied tensor. They are cut by the code's constants from what is written, be it a whole layer, one
card's part of it, or the head. Their order is that of the bytes in the source's files. The hash of
a weight's values is the same before and after its layout packed them, and wherever its rows are
cut.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quantflow.core.dtypes import DTYPES
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme
from quantflow.errors import UnsupportedError
from quantflow.files.canonical import digest_of
from quantflow.files.checkpoint import Checkpoint
from quantflow.files.safetensors_header import TensorInfo
from quantflow.files.safetensors_writer import Spec
from quantflow.formats import DEFAULT, FORMATS
from quantflow.models.graph import Layer
from quantflow.models.open import ModelFiles
from quantflow.models.reading import bytes_of, read_columns, read_into, read_once, read_tensor
from quantflow.planning.cost import UNIT
from quantflow.planning.head import FILE, HeadPlan
from quantflow.planning.mtp import FILE as MTP_FILE
from quantflow.planning.mtp import MtpPlan
from quantflow.planning.plan import Plan
from quantflow.quantizing.shards.share import WHOLE, CardShare

FORMAT = FORMATS[DEFAULT]
# full name of a tensor -> the file that holds it, and where
StoredTensors = Mapping[str, tuple[Path, TensorInfo]]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Some rows of one source tensor, or some elements of a copied one.

    Attributes:
        path, info: the file of the source's tensor, and its place there.
        shape: shape of the tensor that all units together write.
        scheme: scheme of the linear; None copies.
        first, count: rows of the source's tensor; elements where whole rows are copied.
        at: first row or element of `shape` that is written.
        columns: columns of the source's tensor, where only these are read; None reads whole rows.
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
        """The dtype in which the source stores it."""
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
        """The offset of the first row or element in the file."""
        width = self.info.shape[1] if self.by_rows else 1
        return self.info.offset + self.first * width * self.dtype.itemsize

    def read(self) -> Tensor:
        """Read the unit, [rows, columns] or [elements] as stored.

        Raises:
            InputError: the file ends early, or columns hold NaN or Inf.
        """
        if self.info.strides is not None:
            whole = read_tensor(self.path, self.info)
            if not self.by_rows:
                return whole.flatten()[self.first : self.first + self.count]
            part = whole[self.first : self.first + self.count]
            return part if self.columns is None else part[:, self.columns].contiguous()
        if self.columns is not None:
            rows = replace(self.info, shape=(self.count, self.info.shape[1]), offset=self.offset)
            return read_columns(self.path, rows, self.columns)
        shape = (self.count, self.shape[1]) if self.by_rows else (self.count,)
        return read_once(self.path, shape, self.dtype, self.offset, name=self.info.name)


@dataclass(frozen=True, kw_only=True)
class FileBlock:
    """The source of one file of the result: a decoder layer, the head, or MTP layers.

    Attributes:
        path: path of the file in the stage's folder.
        key: its word in a state key: a layer's index, or a name.
        folder: folder of the source's files.
        tensors: its files, and each tensor's place there, in the order of their bytes; a head that
            is tied has the place of the embedding's and a name of its own.
        schemes: linear -> its scheme; a tensor without an entry is copied.
        groups: linears that share an input.
        algorithm: a key of ALGORITHMS.
        layer: the decoder layer; None of what lies outside the layers.
    """

    path: str
    key: int | str
    folder: Path
    tensors: tuple[tuple[str, TensorInfo], ...]
    schemes: Mapping[str, LinearScheme | None]
    groups: tuple[tuple[str, ...], ...]
    algorithm: str
    layer: Layer | None = None

    @property
    def files(self) -> list[str]:
        """The source's files that it lies in."""
        return list(dict.fromkeys(file for file, _ in self.tensors))

    def linear(self, info: TensorInfo) -> tuple[str, LinearScheme | None]:
        """The linear whose weight a tensor is, and its scheme; None where the tensor is copied."""
        linear, _, leaf = info.name.rpartition(".")
        return linear, self.schemes.get(linear) if leaf == "weight" else None


def layer_block(layer: Layer, plan: Plan, source: ModelFiles) -> FileBlock:
    """The block of a decoder layer."""
    inside = f"{layer.prefix}."
    tensors = [
        (file, info)
        for name, (file, info) in source.checkpoint.tensors.items()
        if name.startswith(inside)
    ]
    return FileBlock(
        path=f"layers/{layer.index:05d}.safetensors",
        key=layer.index,
        folder=source.checkpoint.folder,
        tensors=tuple(sorted(tensors, key=lambda item: (item[0], item[1].offset, item[1].name))),
        schemes={name: plan.schemes[name] for name in layer.linears},
        groups=tuple(group.linears for group in layer.groups),
        algorithm=plan.algorithm,
        layer=layer,
    )


def head_block(head: HeadPlan, path: Path, info: TensorInfo) -> FileBlock:
    """The block of the head, whose weight stands at `info` in the file `path`."""
    return FileBlock(
        path=FILE,
        key="head",
        folder=path.parent,
        tensors=((path.name, replace(info, name=f"{head.linear}.weight")),),
        schemes={head.linear: head.scheme},
        groups=((head.linear,),),
        algorithm=head.algorithm,
    )


def mtp_block(mtp: MtpPlan, checkpoint: Checkpoint) -> FileBlock:
    """The block of the linears of layers that predict further tokens."""
    unused = [checkpoint.unused[f"{name}.weight"] for name in mtp.schemes]
    tensors = [(one.file, one.info) for one in unused]
    return FileBlock(
        path=MTP_FILE,
        key="mtp",
        folder=checkpoint.folder,
        tensors=tuple(sorted(tensors, key=lambda item: (item[0], item[1].offset, item[1].name))),
        schemes=mtp.schemes,
        groups=tuple((name,) for name in mtp.schemes),
        algorithm=mtp.algorithm,
    )


def block_specs(block: FileBlock, share: CardShare = WHOLE) -> dict[str, Spec]:
    """Every tensor of a block's file: name -> (dtype as safetensors names it, shape)."""
    specs: dict[str, Spec] = {}
    for _, info in block.tensors:
        linear, scheme = block.linear(info)
        shape = share.info(info).shape
        if scheme is None:
            specs[info.name] = (info.dtype, shape)
        else:
            specs |= FORMAT.tensor_specs(linear, scheme, shape, DTYPES[info.dtype])
    return specs


def units_of(block: FileBlock, share: CardShare = WHOLE) -> Iterator[Unit]:
    """Yield the units of a block in the order of their bytes in the source's files.

    Raises:
        UnsupportedError: a dtype that torch has no name for.
    """
    for file, info in block.tensors:
        if info.dtype not in DTYPES:
            raise UnsupportedError(
                f"{info.name}: dtype {info.dtype} in {file} is not known",
                f"use one of {', '.join(DTYPES)}",
            )
        _, scheme = block.linear(info)
        part = share.part(info)
        shape = share.info(info).shape
        first = part.rows.start
        total = torch.Size(shape).numel()
        step = UNIT
        if scheme is not None or part.columns is not None:
            total = shape[0]
            step = row_step(shape[1], scheme)
        else:
            first *= torch.Size(info.shape[1:]).numel()
        if info.strides is not None:  # its rows lie across the whole tensor: it is read once
            step = max(1, total)
        for at in range(0, total, step):
            yield Unit(
                path=block.folder / file,
                info=info,
                shape=shape,
                scheme=scheme,
                first=first + at,
                count=min(step, total - at),
                at=at,
                columns=part.columns,
            )


def row_step(in_features: int, scheme: LinearScheme | None) -> int:
    """The number of rows in a unit of a weight; `scheme` None copies them."""
    multiple: int = 1 if scheme is None else FORMAT.row_multiple(scheme)
    return max(1, UNIT // max(1, in_features) // multiple) * multiple


class ValuesDigest:
    """The sha256 of a quantized linear's values, added in rows; the cuts make no difference."""

    def __init__(self) -> None:
        """Begin with no rows."""
        self._parts = {name: hashlib.sha256() for name in ("qvalue", "scale", "zero_point")}
        self._begun = False

    def update(self, linear: QuantizedLinear) -> None:
        """Add the rows that follow; what they have in common with the first ones counts once."""
        shared = linear.scheme.weights.granularity == "per_tensor"
        for name in ("qvalue", "scale", "zero_point"):
            tensor: Tensor | None = getattr(linear.weight, name)
            if tensor is not None and (name == "qvalue" or not (shared and self._begun)):
                self._parts[name].update(bytes_of(tensor))
        if not self._begun:
            inputs = {
                "input_scale": linear.input_scale,
                "input_zero_point": linear.input_zero_point,
            }
            self._parts |= {
                name: hashlib.sha256(bytes_of(value))
                for name, value in inputs.items()
                if value is not None
            }
        self._begun = True

    def hexdigest(self) -> str:
        """The hash, 64 hexadecimal digits."""
        return digest_of({name: digest.hexdigest() for name, digest in self._parts.items()})


def decoded_rows(
    name: str, scheme: LinearScheme, stored: StoredTensors, *, first: int, count: int, columns: int
) -> QuantizedLinear:
    """Some rows of a quantized linear, with the tensors that all rows share.

    Args:
        name: name of the linear.
        scheme: its scheme.
        stored: its tensors.
        first: first row, a multiple of the layout's ROW_MULTIPLE.
        count: number of rows, a multiple of it too unless they are the last.
        columns: number of the weight's columns.

    Raises:
        InputError: a file ends early, or holds values that the scheme does not.
    """
    spans = FORMAT.row_spans(name, scheme, first=first, count=count)
    parts = {key: _rows(*stored[key], *span) for key, span in spans.items()}
    for key in FORMAT.tensor_names(name, scheme):
        if key not in spans:
            parts[key] = read_tensor(*stored[key])
    if f"{name}.weight_shape" in stored:
        parts[f"{name}.weight_shape"] = torch.tensor([count, columns])
    linear: QuantizedLinear = FORMAT.decode(name, parts, scheme)
    return linear


def _rows(path: Path, info: TensorInfo, first: int, count: int) -> Tensor:
    """Read rows of a tensor as stored."""
    part = torch.empty(count, *info.shape[1:], dtype=DTYPES[info.dtype])
    read_into(path, part, info.offset + first * part[0].nbytes, name=info.name)
    return part

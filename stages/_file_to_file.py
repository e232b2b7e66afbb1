"""Quantize without a model: rows of weights are read, rounded and written, from file to file.

It serves plans whose numbers follow from the weights alone and row by row: round to nearest, no transforms, no static
inputs, scales per channel or per group. Memory holds a few units, each of UNIT weights, whatever the size of a tensor or a
layer. Units are cut by the code's constants, and everything that is added up is added in their order, so neither
workers nor memory change a bit of what is written.

    layers/00012.safetensors    the layer as the artifact holds it
    layers/00012.json           {"key", "sha256", "errors", "decisions", "changed", "values"}

`values` is, per linear, the sha256 of what the algorithm chose, before its layout packed it: export's proof decodes the
artifact and compares. A layer is written under another name, synced and hashed while the next one is quantized.

The source is read from the disk once: the file that holds the next layers is hashed while those of this one are quantized,
and what the system's cache still holds of it then is taken from there, the rest past it (`read_once`). So a layer's key has
the hashes of the files that it lies in, and the model's fingerprint is known at the end.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quantflow.algorithms import ALGORITHMS
from quantflow.artifact import disk
from quantflow.artifact.canonical import canonical_json, digest_of, file_digest
from quantflow.artifact.digests import Digests
from quantflow.artifact.safetensors_header import TensorInfo
from quantflow.artifact.safetensors_writer import Spec, Writer
from quantflow.core.parallel import Workers
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import LinearScheme
from quantflow.errors import UnsupportedError
from quantflow.evaluation.layer_error import error_from, weight_sums
from quantflow.formats import FORMATS
from quantflow.models.graph import Graph, Layer
from quantflow.models.reading import DTYPES, bytes_of, check_finite, read_once
from quantflow.models.source import ModelFiles
from stages._hashes_ahead import HashesAhead
from stages._needs import READERS
from stages._plan import Plan
from stages._progress import Progress
from stages._state import finished, layer_path
from stages._values import ValuesDigest

FORMAT = FORMATS["compressed-tensors"]
UNIT = 1 << 20  # weights of a unit: its float32 copies stay near the core, and Python's share of the time is small
AHEAD = 2  # units per worker that are begun or finished but not yet written down: none waits for the one who adds up


class Allowed(Protocol):
    """What is read of an allowance: how many units run at once."""

    @property
    def workers(self) -> int:
        """At least 1."""
        ...


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Some rows of one source tensor, or some elements of a copied one.

    Attributes:
        path, info: the file that holds the tensor, and where.
        scheme: of the linear; None copies.
        first, count: rows of a linear's weight; elements of a copied tensor.
    """

    path: Path
    info: TensorInfo
    scheme: LinearScheme | None
    first: int
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        width = self.info.shape[1] if self.scheme is not None else 1
        return self.count * width * DTYPES[self.info.dtype].itemsize

    @property
    def offset(self) -> int:
        """Where the bytes begin in the file."""
        width = self.info.shape[1] if self.scheme is not None else 1
        return self.info.offset + self.first * width * DTYPES[self.info.dtype].itemsize


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """What a unit of a linear contributes to the layer's record; its bytes are in the file already."""

    name: str
    weight: QTensor
    decisions: dict[str, Any]
    difference: float
    power: float


@dataclass(kw_only=True)
class Account:
    """The layer's record while its units come in, in order."""

    difference: dict[str, float] = field(default_factory=dict)
    power: dict[str, float] = field(default_factory=dict)
    decisions: dict[str, dict[str, Any]] = field(default_factory=dict)
    values: dict[str, ValuesDigest] = field(default_factory=dict)

    def add(self, rounded: Rounded) -> None:
        """Add the next rows of a linear; counts are added up."""
        name = rounded.name
        self.difference[name] = self.difference.get(name, 0.0) + rounded.difference
        self.power[name] = self.power.get(name, 0.0) + rounded.power
        known = self.decisions.setdefault(name, {})
        for key, count in rounded.decisions.items():
            known[key] = known.get(key, 0) + count
        self.values.setdefault(name, ValuesDigest()).update(rounded.weight)

    def as_json(self, key: str) -> dict[str, Any]:
        """Return the record without the file's hash."""
        errors = {name: {"weight": error_from(self.difference[name], self.power[name], name=name)} for name in self.power}
        values = {name: digest.hexdigest() for name, digest in self.values.items()}
        return {"key": key, "errors": errors, "decisions": self.decisions, "changed": [], "values": values}


def quantize_files(
    output: Path,
    plan: Plan,
    *,
    source: ModelFiles,
    graph: Graph,
    key: str,
    digests: Digests,
    allowance: Allowed,
    progress: Progress,
) -> None:
    """Bring every layer's file in `output` up to date.

    Args:
        output: the stage's folder, locked by the caller; `layers` is there.
        plan: one whose `file_to_file` is true.
        source: the checkpoint.
        graph: its linears.
        key: digest of everything that the result depends on but the weights.
        digests: of the source's files; what is not known is read.
        allowance: how many units run at once.
        progress: is told after each layer.

    Raises:
        InputError: a tensor holds NaN or Inf, or a file of the source ends early or is gone.
        OSError: the file system failed; finished layers stay.
    """
    with ExitStack() as stack:
        workers = stack.enter_context(Workers(allowance.workers + READERS))
        committer = stack.enter_context(ThreadPoolExecutor(1))
        files = {layer.index: _files(layer, source) for layer in graph.layers}
        hashes = stack.enter_context(HashesAhead(files.values(), folder=source.checkpoint.folder, digests=digests))
        pending: list[Future[None]] = []
        # Whatever ends the loop, a layer whose bytes are complete is committed before this returns.
        stack.callback(lambda: [future.result() for future in pending])
        sizes = {layer.index: sum(unit.nbytes for unit in units_of(layer, plan, source)) for layer in graph.layers}
        steps = progress.steps(
            graph.layers, stage=f"quantize {plan.name}", unit="layer", nbytes=lambda layer: sizes[layer.index]
        )
        for layer in steps:
            path, layer_key = layer_path(output, layer.index), digest_of([key, layer.index, hashes.of(files[layer.index])])
            if finished(path, layer_key) is not None:
                continue
            writer = Writer(disk.temporary_for(path), layer_specs(layer, plan, source))
            try:
                record = _fill(writer, units_of(layer, plan, source), plan, workers=workers).as_json(layer_key)
            except BaseException:
                writer.abandon()
                raise
            while pending:  # one layer at a time waits for the disk
                pending.pop().result()
            pending.append(committer.submit(_commit, writer, path, record))


def layer_specs(layer: Layer, plan: Plan, source: ModelFiles) -> dict[str, Spec]:
    """Return every tensor of a layer's file: name -> (dtype as safetensors names it, shape)."""
    specs: dict[str, Spec] = {}
    for name, info in _tensors(layer, source):
        linear, scheme = _linear(name, plan)
        if scheme is None:
            specs[name] = (info.dtype, info.shape)
        else:
            specs |= FORMAT.tensor_specs(linear, scheme, info.shape, DTYPES[info.dtype])
    return specs


def units_of(layer: Layer, plan: Plan, source: ModelFiles) -> Iterator[Unit]:
    """Yield the units of a layer in the order of their bytes in the source's files."""
    for name, info in _tensors(layer, source):
        file, _ = source.checkpoint.tensors[name]
        if info.dtype not in DTYPES:
            raise UnsupportedError(f"{name}: dtype {info.dtype} in {file} is not known", f"use one of {', '.join(DTYPES)}")
        _, scheme = _linear(name, plan)
        total, step = torch.Size(info.shape).numel(), UNIT
        if scheme is not None:
            total, step = info.shape[0], row_step(info.shape[1])
        for first in range(0, total, step):
            count = min(step, total - first)
            yield Unit(path=source.checkpoint.folder / file, info=info, scheme=scheme, first=first, count=count)


def row_step(in_features: int) -> int:
    """Return how many rows of a weight make a unit."""
    multiple: int = FORMAT.ROW_MULTIPLE
    return max(1, UNIT // max(1, in_features) // multiple) * multiple


def _tensors(layer: Layer, source: ModelFiles) -> list[tuple[str, TensorInfo]]:
    """Return the source's tensors of a layer, in the order of their bytes."""
    found = [
        (file, info.offset, name, info)
        for name, (file, info) in source.checkpoint.tensors.items()
        if name.startswith(f"{layer.prefix}.")
    ]
    return [(name, info) for _, _, name, info in sorted(found, key=lambda item: item[:3])]


def _files(layer: Layer, source: ModelFiles) -> list[str]:
    """Return the source's files that a layer lies in."""
    return list(dict.fromkeys(source.checkpoint.tensors[name][0] for name, _ in _tensors(layer, source)))


def _linear(name: str, plan: Plan) -> tuple[str, LinearScheme | None]:
    """Return the linear that a source tensor is the weight of, and its scheme, None where the tensor is copied."""
    linear, _, leaf = name.rpartition(".")
    return linear, plan.schemes.get(linear) if leaf == "weight" else None


def _fill(writer: Writer, units: Iterator[Unit], plan: Plan, *, workers: Workers) -> Account:
    """Write every unit's bytes and return what there is to record about them."""
    account = Account()

    def work(unit: Unit) -> Rounded | None:
        tensor = _read(unit)
        if unit.scheme is not None:
            return _round(writer, unit, tensor, unit.scheme, plan.algorithm)
        _copy(writer, unit, tensor)
        return None

    for rounded in workers.stream(work, units, ahead=AHEAD * workers.count):
        if rounded is not None:
            account.add(rounded)
    return account


def _read(unit: Unit) -> Tensor:
    """Read a unit, [rows, I] or [elements] as stored."""
    shape = (unit.count,) if unit.scheme is None else (unit.count, unit.info.shape[1])
    return read_once(unit.path, shape, DTYPES[unit.info.dtype], unit.offset, name=unit.info.name)


def _copy(writer: Writer, unit: Unit, tensor: Tensor) -> None:
    """Copy a unit as it is stored."""
    if tensor.is_floating_point():
        check_finite(tensor, name=unit.info.name, path=unit.path)
    writer.write(unit.info.name, bytes_of(tensor), offset_bytes=unit.first * tensor.itemsize)


def _round(writer: Writer, unit: Unit, rows: Tensor, scheme: LinearScheme, algorithm: str) -> Rounded:
    """Quantize a unit and write what its layout makes of it."""
    name, shape = unit.info.name.removesuffix(".weight"), unit.info.shape
    scale_dtype = FORMAT.scale_dtype(scheme, rows.dtype)
    result = ALGORITHMS[algorithm].quantize_group({name: rows}, scheme, statistics={}, scale_dtype=scale_dtype)[name]
    tensors = FORMAT.encode(name, QuantizedLinear(weight=result.weight, scheme=scheme), scale_dtype=scale_dtype)
    spans = FORMAT.row_spans(name, scheme, first=unit.first, count=unit.count)
    for key, tensor in tensors.items():
        if key in spans:
            writer.write(key, bytes_of(tensor), offset_bytes=spans[key][0] * tensor[0].nbytes)
        elif unit.first == 0:  # weight_shape, which is the whole weight's
            writer.write(key, bytes_of(torch.tensor(shape, dtype=torch.int64)))
    difference, power = weight_sums(rows, result.weight)
    return Rounded(name=name, weight=result.weight, decisions=dict(result.decisions), difference=difference, power=power)


def _commit(writer: Writer, path: Path, record: dict[str, Any]) -> None:
    """Give a complete layer its name, then its record."""
    writer.close()
    disk.replace(writer.path, path)
    disk.write_atomic(path.with_suffix(".json"), canonical_json({**record, "sha256": file_digest(path)}))

"""Quantizing without running the model: weights are read, rounded and written, some rows at a time.

    layers/00012.safetensors    the layer as the artifact holds it
    layers/00012.json           {"key", "sha256", "errors", "decisions", "changed", "values"};
                                a rank's part has "placements" too
    head.safetensors, .json     the head, where it is quantized

It serves plans whose weights follow from the source's alone: round to nearest, no transforms.
Scales are per channel or per group. Where a whole weight shares one scale, with all weights that
have its input, a layer is read twice. The scale of a static input is written beside the weight. One
card of several writes its part of each tensor (quantflow/quantizing/shards/share.py). `values` is,
per linear, the sha256 of the qvalues and scales before their layout packed them: export's proof
decodes the artifact and compares.

Memory holds a few units (quantflow/quantizing/weight_rows.py), whatever the size of a tensor or a
layer. Units are cut by the code's constants, and sums are taken in their order, so neither workers
nor memory change a bit of the result. On a device a unit crosses as it is stored, is rounded and
packed there, and its bytes come back.

The disk is busy with three layers at once. A layer's file is written under another name, then
synced and hashed while the next layer is quantized. The source's file that holds the next layers is
hashed meanwhile too; the pages that the system's cache still holds of it are taken from there, the
rest is read past the cache (`read_once`), so the source is read from the disk once. A layer's key
therefore has the hashes of the files that it lies in, and the model's fingerprint is known at the
end.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from quantflow.algorithms import ALGORITHMS, rtn_mse
from quantflow.core import affine
from quantflow.core.device import HOST, Device, fetched
from quantflow.core.parallel import Workers
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import LinearScheme
from quantflow.files import disk
from quantflow.files.canonical import canonical_json, digest_of, file_digest
from quantflow.files.digests import Digests
from quantflow.files.safetensors_writer import Writer
from quantflow.formats import DEFAULT, FORMATS
from quantflow.models.graph import Graph
from quantflow.models.layer_store import finished
from quantflow.models.open import ModelFiles
from quantflow.models.reading import bytes_of, check_finite
from quantflow.numerics.grid import Grid, TensorRange, bounds_of, shared_grid
from quantflow.planning.cost import READERS
from quantflow.planning.plan import Plan
from quantflow.progress import Progress
from quantflow.quantizing.hashes_ahead import HashesAhead
from quantflow.quantizing.layer_error import error_from, weight_sums
from quantflow.quantizing.shards.share import WHOLE, CardShare
from quantflow.quantizing.static_inputs import UNKNOWN_INPUT, LinearInput
from quantflow.quantizing.weight_rows import (
    FileBlock,
    Unit,
    ValuesDigest,
    block_specs,
    head_block,
    layer_block,
    mtp_block,
    units_of,
)

FORMAT = FORMATS[DEFAULT]
# Units per worker that are begun, or finished and not yet added to the record, so that no worker
# waits for the thread that adds up.
AHEAD = 2

# A unit of a linear, its scheme and its rows of the source, [rows, columns] -> the quantized rows,
# and decisions whose counts are added up.
Choose = Callable[[Unit, LinearScheme, Tensor], tuple[QTensor, Mapping[str, Any]]]


class Allowed(Protocol):
    """The number of units that run at once, of an allowance."""

    @property
    def workers(self) -> int:
        """At least 1."""
        ...


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
    share: CardShare = WHOLE,
    inputs: Mapping[str, LinearInput] = MappingProxyType({}),
    choose: Choose | None = None,
    device: Device = HOST,
) -> None:
    """Bring the file of every layer, and of a head or MTP layers that are quantized, up to date.

    Args:
        output: the stage's folder, locked by the caller; `layers` is there.
        plan: a plan whose `file_to_file` is true.
        source: the checkpoint.
        graph: names of its linears.
        key: digest of everything that the result depends on but the weights.
        digests: sha256 of the source's files; a file whose hash is not stored is read.
        allowance: number of units that run at once.
        progress: listener, called after each layer.
        share: the part of each tensor that is written.
        inputs: static scales, importance and notes of each linear's input.
        choose: rounding of a linear's rows; None rounds by the algorithm of each block.
        device: the device on which rows are rounded.

    Raises:
        InputError: a tensor holds NaN or Inf, or a file of the source ends early or is gone.
        OSError: the file system failed; finished layers stay.
    """
    with ExitStack() as stack:
        workers = stack.enter_context(Workers(allowance.workers + READERS))
        committer = stack.enter_context(ThreadPoolExecutor(1))
        blocks_by_unit = _blocks(plan, source, graph)
        files = [block.files for blocks in blocks_by_unit.values() for block in blocks]
        hashes = stack.enter_context(
            HashesAhead(files, folder=source.checkpoint.folder, digests=digests)
        )
        pending: list[Future[None]] = []
        # Whatever ends the loop, a layer whose bytes are complete is committed before this returns.
        stack.callback(lambda: [future.result() for future in pending])
        stage = f"{'quantize' if choose is None else 'unify'} {plan.name}"
        nbytes = partial(_nbytes, share)
        for unit, blocks in blocks_by_unit.items():
            for block in progress.steps(blocks, stage=stage, unit=unit, nbytes=nbytes):
                written = _written(
                    output,
                    block,
                    key=key,
                    hashes=hashes,
                    workers=workers,
                    share=share,
                    inputs=inputs,
                    choose=choose,
                    device=device,
                )
                if written is not None:
                    while pending:  # one layer at a time waits for the disk
                        pending.pop().result()
                    pending.append(committer.submit(commit, *written))


def _written(
    output: Path,
    block: FileBlock,
    *,
    key: str,
    hashes: HashesAhead,
    workers: Workers,
    share: CardShare,
    inputs: Mapping[str, LinearInput],
    choose: Choose | None,
    device: Device,
) -> tuple[Writer, Path, dict[str, Any]] | None:
    """Write a block with `write_block`; the result is None where its file is finished."""
    hashes.begin(block.files)

    def block_key() -> str:
        return digest_of([key, block.key, hashes.of(block.files)])

    path = output / block.path
    # nothing waits for hashes where nothing is there
    if path.exists() and finished(path, block_key()) is not None:
        return None
    return write_block(
        output,
        block,
        key=block_key,
        workers=workers,
        share=share,
        inputs=inputs,
        choose=choose,
        device=device,
    )


def _blocks(plan: Plan, source: ModelFiles, graph: Graph) -> dict[str, list[FileBlock]]:
    """The layers, then the head and MTP layers where they are quantized, by what they are."""
    checkpoint = source.checkpoint
    blocks = {"layer": [layer_block(layer, plan, source) for layer in graph.layers]}
    if plan.head is not None:
        file, info = checkpoint.tensors[plan.head.tensor]
        blocks["head"] = [head_block(plan.head, checkpoint.folder / file, info)]
    if plan.mtp is not None:
        blocks["MTP file"] = [mtp_block(plan.mtp, checkpoint)]
    return blocks


def _nbytes(share: CardShare, block: FileBlock) -> int:
    """The bytes that are read of a block."""
    return sum(unit.nbytes for unit in units_of(block, share))


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """A unit's contribution to the layer's record; its bytes are in the file already."""

    name: str
    linear: QuantizedLinear
    decisions: dict[str, Any]
    difference: float
    power: float


@dataclass(kw_only=True)
class BlockAccount:
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
        counted = self.decisions.setdefault(name, {})
        for key, count in rounded.decisions.items():
            counted[key] = counted.get(key, 0) + count
        self.values.setdefault(name, ValuesDigest()).update(rounded.linear)

    def as_json(self, key: str, inputs: Mapping[str, LinearInput]) -> dict[str, Any]:
        """The record without the file's hash."""
        for name, decisions in self.decisions.items():
            decisions.update(inputs.get(name, UNKNOWN_INPUT).decisions)
        errors = {
            name: {"weight": error_from(self.difference[name], self.power[name], name=name)}
            for name in self.power
        }
        values = {name: digest.hexdigest() for name, digest in self.values.items()}
        return {
            "key": key,
            "errors": errors,
            "decisions": self.decisions,
            "changed": [],
            "values": values,
        }


def write_block(
    folder: Path,
    block: FileBlock,
    *,
    key: Callable[[], str],
    workers: Workers,
    share: CardShare = WHOLE,
    inputs: Mapping[str, LinearInput] = MappingProxyType({}),
    choose: Choose | None = None,
    device: Device = HOST,
) -> tuple[Writer, Path, dict[str, Any]]:
    """Write every unit of a block's file, under a temporary name.

    Args:
        folder: the stage's folder.
        block: the layer or head.
        key: its state key, asked for when the bytes are written.
        workers: threads that run units.
        share: the part of each tensor that is written.
        inputs: static scales, importance and notes of each linear's input.
        choose: rounding of a linear's rows; None rounds by the block's algorithm.
        device: the device on which rows are rounded.

    Returns:
        The arguments of `commit`, which gives the file its name.

    Raises:
        InputError: a tensor holds NaN or Inf, or a file of the source ends early or is gone.
        OSError: the file system failed; the file is removed.
    """
    path = folder / block.path
    units = partial(units_of, block, share)
    rounded = choose or _by(block.algorithm, _shared_grids(block, units(), workers, device), inputs)
    writer = Writer(disk.temporary_for(path), block_specs(block, share))
    record = _fill(writer, units(), rounded, inputs, workers, key, device)
    return writer, path, record if block.layer is None else record | share.record(block.layer)


def commit(writer: Writer, path: Path, record: dict[str, Any]) -> None:
    """Give a complete layer its name, then its record."""
    writer.close()
    disk.replace(writer.path, path)
    disk.write_atomic(
        path.with_suffix(".json"), canonical_json({**record, "sha256": file_digest(path)})
    )


def _shared_grids(
    block: FileBlock, units: Iterable[Unit], workers: Workers, device: Device
) -> dict[str, Grid]:
    """The grid of each linear with one scale, common to all linears of its input and its scheme."""
    shared = [
        (unit, unit.scheme)
        for unit in units
        if unit.scheme and unit.scheme.weights.granularity == "per_tensor"
    ]

    def bounds(part: tuple[Unit, LinearScheme]) -> tuple[str, TensorRange]:
        unit, scheme = part
        return unit.linear, bounds_of(unit.linear, device.put(unit.read()), scheme=scheme.weights)

    ranges_of: dict[str, list[TensorRange]] = {}
    for name, ends in workers.stream(bounds, shared, ahead=AHEAD * workers.count):
        ranges_of.setdefault(name, []).append(ends)
    schemes = {
        unit.linear: (scheme, FORMAT.scale_dtype(scheme, unit.dtype)) for unit, scheme in shared
    }
    grids = {}
    for group in block.groups:
        for name in ranges_of.keys() & set(group):
            scheme, scale_dtype = schemes[name]
            ranges = [
                pair
                for other in group
                if schemes.get(other) == schemes[name]
                for pair in ranges_of[other]
            ]
            grids[name] = shared_grid(ranges, scheme=scheme.weights, scale_dtype=scale_dtype)
    return grids


def _by(algorithm: str, grids: Mapping[str, Grid], inputs: Mapping[str, LinearInput]) -> Choose:
    """Rounding by an algorithm that reads weights alone, or to a linear's one shared grid.

    Of a linear's input the algorithm is shown its importance, where that is known.
    """

    def quantized(
        unit: Unit, scheme: LinearScheme, rows: Tensor
    ) -> tuple[QTensor, Mapping[str, Any]]:
        scale_dtype = FORMAT.scale_dtype(scheme, rows.dtype)
        name = unit.linear
        if name in grids:
            grid = grids[name]
            qvalue = affine.quantize(rows.float(), grid.scale, grid.zero_point, scheme.weights)
            weight = QTensor(
                qvalue=qvalue, scale=grid.scale, zero_point=grid.zero_point, scheme=scheme.weights
            )
            return weight, {"zero_groups": grid.zero_groups if unit.at == 0 else 0}
        importance = inputs.get(name, UNKNOWN_INPUT).importance
        columns = slice(None) if unit.columns is None else unit.columns
        result = ALGORITHMS[algorithm].quantize_group(
            {name: rows},
            scheme,
            statistics={} if importance is None else {rtn_mse.IMPORTANCE: importance[columns]},
            scale_dtype=scale_dtype,
        )[name]
        return result.weight, result.decisions

    return quantized


def _fill(
    writer: Writer,
    units: Iterator[Unit],
    choose: Choose,
    inputs: Mapping[str, LinearInput],
    workers: Workers,
    key: Callable[[], str],
    device: Device,
) -> dict[str, Any]:
    """Write every unit's bytes; the result is the layer's record. A failure removes the file."""
    account = BlockAccount()

    def work(unit: Unit) -> Rounded | None:
        tensor = unit.read()
        if unit.scheme is not None:
            seen = inputs.get(unit.linear, UNKNOWN_INPUT)
            return _round(writer, unit, device.put(tensor), unit.scheme, choose, seen, device)
        _copy(writer, unit, tensor)
        return None

    try:
        for rounded in workers.stream(work, units, ahead=AHEAD * workers.count):
            if rounded is not None:
                account.add(rounded)
        return account.as_json(key(), inputs)
    except BaseException:
        writer.abandon()
        raise


def _copy(writer: Writer, unit: Unit, tensor: Tensor) -> None:
    """Copy a unit as it is stored."""
    if tensor.is_floating_point():
        check_finite(tensor, name=unit.info.name, path=unit.path)
    writer.write(unit.info.name, bytes_of(tensor), offset_bytes=unit.at * unit.row_bytes)


def _round(
    writer: Writer,
    unit: Unit,
    rows: Tensor,
    scheme: LinearScheme,
    choose: Choose,
    seen: LinearInput,
    device: Device,
) -> Rounded:
    """Quantize a unit and write its bytes; the first unit writes what all rows share."""
    name = unit.linear
    weight, decisions = choose(unit, scheme, rows)
    linear = QuantizedLinear(
        weight=weight, scheme=scheme, input_scale=seen.scale, input_zero_point=seen.zero_point
    )
    scale_dtype = FORMAT.scale_dtype(scheme, rows.dtype)
    tensors = fetched(FORMAT.encode(name, linear, scale_dtype=scale_dtype), device)
    spans = FORMAT.row_spans(name, scheme, first=unit.at, count=unit.count)
    for key, tensor in tensors.items():
        if key in spans:
            writer.write(key, bytes_of(tensor), offset_bytes=spans[key][0] * tensor[0].nbytes)
        elif unit.at == 0:
            whole = (
                torch.tensor(unit.shape, dtype=torch.int64)
                if key == f"{name}.weight_shape"
                else tensor
            )
            writer.write(key, bytes_of(whole))
    difference, power = weight_sums(rows, weight)
    linear = linear.to(HOST.kind)  # its values are hashed
    return Rounded(
        name=name, linear=linear, decisions=dict(decisions), difference=difference, power=power
    )

"""The shards of `quantize --ranks` joined into one result, or into those of a smaller world.

The result is what `quantize` (or `quantize --ranks G`) writes from the same source, byte for byte.
It has one file more:

    joined.json    per linear: the rule that joined its parts, the number of cards, their channels
                   together, and the number of channels where the card's scale was not the largest,
                   so that they were rounded again from the source

File to file each unit of the source is read once more beside the cards' values: the figures of
error are sums in one order, values that need another scale are rounded from the original ones, and
tensors that are copied are copied from there. Where the model ran, every card saw whole layers
(quantflow/quantizing/shards/share.py): the parts are put together, and nothing else is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from quantflow.core.determinism import single_threaded, tools
from quantflow.core.qtensor import QTensor
from quantflow.core.scheme import LinearScheme
from quantflow.distributed.joining import (
    Joined,
    join_columns,
    join_rows,
    requantize_,
    shared_scale,
    zero_groups,
)
from quantflow.distributed.placement import Placement, check_cover, is_elsewhere, joined, share
from quantflow.errors import InputError, QuantflowError, UsageError
from quantflow.files import disk, stage_folder
from quantflow.files.canonical import canonical_json, digest_of, read_json
from quantflow.files.digests import NAME as HASHES
from quantflow.files.digests import Digests
from quantflow.files.rank_folders import rank_folder
from quantflow.files.safetensors_header import TensorInfo, read_header
from quantflow.files.schema import check
from quantflow.formats import DEFAULT, FORMATS
from quantflow.measuring.merging.grouping import some
from quantflow.models import layer_store
from quantflow.models.identity import identify
from quantflow.models.open import ModelFiles, graph_for, open_files
from quantflow.models.reading import read_tensor
from quantflow.planning.finished_plan import SUMMARY, plan_from, read_summary
from quantflow.planning.plan import Plan
from quantflow.planning.recipe import Resources
from quantflow.planning.resources import allow_quantize
from quantflow.planning.sizes import model_size
from quantflow.progress import Progress
from quantflow.quantizing.file_to_file import quantize_files
from quantflow.quantizing.shards.share import (
    STAGE,
    CardShare,
    CardTensors,
    RankOf,
    Schemes,
    put_together,
    shard_folders,
)
from quantflow.quantizing.static_inputs import LinearInput
from quantflow.quantizing.weight_rows import StoredTensors, Unit, decoded_rows

REPORT = "joined.json"
COLUMNS = ("linear", "joined", "cards", "channels", "requantized")
# by the axis that is cut
HOW = {None: "one part", 0: "rows side by side", 1: "columns side by side"}
_ROW_MULTIPLE: int = FORMATS[DEFAULT].ROW_MULTIPLE


@dataclass(frozen=True, kw_only=True)
class OpenedShard:
    """One card's finished result.

    Attributes:
        inputs: its inputs, from its DONE.json.
        share: its part of every tensor.
        stored: tensors of every linear.
        decisions: notes of its records on every linear.
    """

    folder: Path
    inputs: Mapping[str, Any]
    share: CardShare
    stored: StoredTensors
    decisions: Mapping[str, Mapping[str, Any]]

    @property
    def made_from(self) -> dict[str, Any]:
        """The inputs that all shards of one model have in common."""
        return {key: value for key, value in self.inputs.items() if key != "share"}


class ShardParts:
    """The joined values of a unit of a linear: the cards' values, side by side.

    Attributes:
        report: linear -> how it was joined; units that run at once add to it.
    """

    def __init__(self, shards: Sequence[OpenedShard]) -> None:
        """Begin with an empty report.

        Args:
            shards: shards of neighbouring cards, in order.
        """
        self._shards = shards
        self._lock = Lock()
        self.report: dict[str, dict[str, Any]] = {}

    def __call__(
        self, unit: Unit, scheme: LinearScheme, rows: Tensor
    ) -> tuple[QTensor, Mapping[str, Any]]:
        """The rows of the joined weight, and its decisions as the algorithm counts them."""
        name = unit.linear
        scale = None
        zeros = None
        if scheme.weights.granularity == "per_tensor":
            scale, zeros = self._shared(name)
        # Reversed, so that of cards with copies of one span the first one holds it.
        holders = {_span(shard, name): shard for shard in reversed(self._shards)}
        axis = self._shards[0].share.placements[name]["axis"]
        join_parts = _from_columns if axis == 1 else _from_rows
        whole = join_parts(holders, unit, scheme=scheme, scale=scale)
        for stale, columns in whole.stale:
            requantize_(whole.weight, rows, rows=stale, columns=columns)
        with self._lock:
            how = HOW[axis] if len(holders) > 1 else "one part"
            row = self.report.setdefault(
                name, dict(zip(COLUMNS, (name, how, len(holders), 0, 0), strict=True))
            )
            # Cut by columns, every card has a scale of each row; cut by rows, one card has it.
            row["channels"] += unit.count * (len(holders) if axis == 1 else 1)
            row["requantized"] += sum(int(stale.sum()) for stale, _ in whole.stale)
        if zeros is None:
            return whole.weight, {"zero_groups": zero_groups(rows, whole.weight.scale)}
        return whole.weight, {"zero_groups": int(zeros and unit.at == 0)}

    def inputs(self, plan: Plan) -> dict[str, LinearInput]:
        """Each linear's input by the shards' records, which were made with one measurement."""
        first = self._shards[0]
        by_linear = {}
        for name, scheme in plan.schemes.items():
            if scheme is not None:
                decisions = {
                    key: value
                    for key, value in first.decisions[name].items()
                    if key != "zero_groups"
                }
                scale, zero_point = (
                    read_tensor(*first.stored[key]) if key in first.stored else None
                    for key in (f"{name}.input_scale", f"{name}.input_zero_point")
                )
                by_linear[name] = LinearInput(
                    scale=scale, zero_point=zero_point, decisions=decisions
                )
        return by_linear

    def _shared(self, name: str) -> tuple[Tensor, bool]:
        """The one scale of a weight, [1, 1], and whether it stands for zeros alone.

        All cards count: a copy's scale is also that of what the card holds of the linears that
        share the input.
        """
        scales = [
            read_tensor(*shard.stored[f"{name}.weight_scale"]).float().reshape(1, 1)
            for shard in self._shards
        ]
        zeros = [shard.decisions[name]["zero_groups"] > 0 for shard in self._shards]
        return shared_scale(scales, zeros=zeros), all(zeros)


def open_shards(folder: Path) -> list[OpenedShard]:
    """The shards of a quantized model, in order of their ranks; every file's hash is compared.

    Raises:
        InputError: one is missing, unfinished, there twice, or was made from something else than
            the first.
        IntegrityError: a file differs from its hash.
    """
    by_rank: dict[int, OpenedShard] = {}
    for path in shard_folders(folder):
        inputs = stage_folder.require_done(path, stage=STAGE)["inputs"]
        placements, decisions = _recorded(path)
        share: Any = inputs.get("share") if isinstance(inputs, dict) else None
        check(
            share,
            RankOf,
            where=f"{path / stage_folder.DONE}: inputs.share",
            remedy="quantize that shard again",
        )
        held = CardShare(rank=share["rank"], world=share["world"], placements=placements)
        shard = OpenedShard(
            folder=path, inputs=inputs, share=held, stored=_stored(path), decisions=decisions
        )
        first = next(iter(by_rank.values()), shard)
        other = stage_folder.difference(first.made_from, shard.made_from)
        if other is not None:
            key, old, new = other
            raise InputError(
                f"{path}: {key} = {stage_folder.short(new)}, in {first.folder.name} "
                f"{stage_folder.short(old)}",
                "quantize all shards with one command",
            )
        if shard.share.rank in by_rank or shard.share.world != first.share.world:
            raise InputError(
                f"{path}: is rank {shard.share.rank} of {shard.share.world}, so is another "
                "folder, or that is of "
                f"{first.share.world}",
                "remove the folder that does not belong here",
            )
        by_rank[shard.share.rank] = shard
    world = next(iter(by_rank.values())).share.world
    missing = [rank for rank in range(world) if rank not in by_rank]
    if missing:
        raise InputError(
            f"{folder}: shards {some(missing)} of {world} are missing",
            "run the same `quantflow quantize` again",
        )
    return [by_rank[rank] for rank in range(world)]


def join(
    shards: Sequence[OpenedShard],
    output: Path,
    *,
    groups: Sequence[Sequence[int]],
    model: Path | None,
    force: bool,
    progress: Progress,
) -> Path:
    """Write one result per group into `output`; a result that is up to date is left alone.

    Args:
        shards: the shards, see `open_shards`.
        output: one group's result itself; of several, the folder of rank-GGG-of-GGG. It appears at
            once.
        groups: ranks of each group, each in one of them.
        model: the source; None reads where quantize had it. Not read where the model ran.
        force: redo a finished result that was made from other inputs, instead of refusing.
        progress: listener for each layer.

    Raises:
        UsageError: a group is not made of neighbouring ranks, or the groups differ in size.
        InputError: the source is not there or another one, or the shards were made by other library
            versions.
    """
    _check_groups(groups, world=len(shards))
    ran = read_summary(shards[0].folder)["proof"] == "canary"
    source = None if ran else _source(shards, model)
    targets = [_target(shards, rank=rank, world=len(groups)) for rank in range(len(groups))]
    inputs: dict[str, Any] = {**shards[0].made_from}
    stage = "quantize"
    if len(groups) > 1:
        inputs, stage = {"shards": [{**inputs, **target.inputs()} for target in targets]}, "unify"
    with stage_folder.locked(output), single_threaded(), torch.no_grad():
        if stage_folder.is_up_to_date(output, inputs):
            progress.say("unify: up to date")
            return output
        stage_folder.refuse_other_result(output, inputs, force=force)
        with stage_folder.publish(output, stage=stage, inputs=inputs) as temporary:
            for target, group in zip(targets, groups, strict=True):
                folder = (
                    temporary
                    if len(groups) == 1
                    else rank_folder(temporary, target.rank, target.world)
                )
                _write(
                    folder,
                    [shards[rank] for rank in group],
                    target,
                    source=source,
                    progress=progress,
                )
    return output


def _write(
    folder: Path,
    shards: Sequence[OpenedShard],
    target: CardShare,
    *,
    source: ModelFiles | None,
    progress: Progress,
) -> None:
    """Write what the shards of one group are together."""
    disk.make_folder(folder / "layers")
    summary = read_summary(shards[0].folder)
    inputs = {**shards[0].made_from, **target.inputs()}
    plan = plan_from(summary)
    if source is None:
        linears = _put_together(
            folder, shards, target, plan=plan, key=digest_of(inputs), progress=progress
        )
    else:
        linears = _round_together(
            folder, shards, target, plan=plan, source=source, inputs=inputs, progress=progress
        )
    disk.write_atomic(folder / SUMMARY, canonical_json(summary))
    disk.write_atomic(
        folder / REPORT,
        canonical_json({"shards": [shard.share.rank for shard in shards], "linears": linears}),
    )
    if target.world > 1:
        stage_folder.finish(folder, stage=STAGE, inputs=inputs)


def _round_together(
    folder: Path,
    shards: Sequence[OpenedShard],
    target: CardShare,
    *,
    plan: Plan,
    source: ModelFiles,
    inputs: Mapping[str, Any],
    progress: Progress,
) -> list[dict[str, Any]]:
    """Write the layers; parts that need another scale are rounded again from the source.

    Returns:
        The report's rows, in the order of the model's linears.
    """
    graph = graph_for(source.config)
    parts = ShardParts(shards)
    infos = {name: target.info(info) for name, info in source.checkpoint.infos.items()}
    quantize_files(
        folder,
        plan,
        source=source,
        graph=graph,
        key=digest_of({key: value for key, value in inputs.items() if key != "model"}),
        digests=_digests(shards),
        allowance=allow_quantize(
            Resources(), model_size(infos, source.config, graph), plan, lengths=[], folder=folder
        ),
        progress=progress,
        share=target,
        inputs=parts.inputs(plan),
        choose=parts,
    )
    return [parts.report[name] for name in graph.linears if name in parts.report]


def _put_together(
    folder: Path,
    shards: Sequence[OpenedShard],
    target: CardShare,
    *,
    plan: Plan,
    key: str,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Write the layers from the parts of all cards, and the canary that each of them ran.

    Returns:
        The report's rows, in the order of the model's linears.

    Raises:
        InputError: the canary was another one on a card: it did not compute what the first did.
    """
    rows: list[dict[str, Any]] = []
    paths = sorted((shards[0].folder / "layers").glob("*.safetensors"))
    for path in progress.steps(paths, stage=f"unify {plan.name}", unit="layer"):
        records = [
            read_json(shard.folder / "layers" / path.with_suffix(".json").name) for shard in shards
        ]
        for shard, other in zip(shards, records, strict=True):
            if other["canary"] != records[0]["canary"]:
                raise InputError(
                    f"{shard.folder / 'layers' / path.name}: its card computed "
                    f"{other['canary'][:16]} on the canary, the "
                    f"first one {records[0]['canary'][:16]}",
                    "quantize all shards with one command, on machines of one kind",
                )
        record = records[0]
        linears = list(records[0].pop("placements"))
        parts: list[CardTensors] = [
            (shard.share, _tensors(shard.folder / "layers" / path.name)) for shard in shards
        ]
        tensors, counts = put_together(parts, linears, plan.schemes)
        record["key"] = digest_of([key, int(path.stem)])
        if target.world > 1:
            record["placements"] = {name: dict(target.placements[name]) for name in linears}
        layer_store.write_layer(folder / "layers" / path.name, tensors, record)
        rows += [
            _row(name, counts[name], shards[0].share, tensors, plan.schemes)
            for name in linears
            if plan.schemes[name] and counts[name]
        ]
    for name in ("canary.safetensors", "canary.json"):
        disk.copy(shards[0].folder / name, folder / name)
    return rows


def _tensors(path: Path) -> dict[str, Tensor]:
    return {name: read_tensor(path, info) for name, info in read_header(path)[0].items()}


def _row(
    name: str, cards: int, share: CardShare, tensors: Mapping[str, Tensor], schemes: Schemes
) -> dict[str, Any]:
    """The report's entry on a linear."""
    how = HOW[share.placements[name]["axis"]] if cards > 1 else "one part"
    return dict(
        zip(COLUMNS, (name, how, cards, len(tensors[f"{name}.weight_scale"]), 0), strict=True)
    )


def summary(folder: Path) -> dict[str, Any]:
    """The record of a finished folder of `join`, all groups together."""
    reports = [
        path / REPORT for path in (folder, *shard_folders(folder)) if (path / REPORT).is_file()
    ]
    rows = [row for report in reports for row in read_json(report)["linears"]]
    return {"folder": str(folder), "joined": rows}


def _source(shards: Sequence[OpenedShard], model: Path | None) -> ModelFiles:
    """Open the checkpoint that the shards were made from.

    Raises:
        InputError: it is not there, it is another one, or this machine would round in another way.
    """
    folder = model or Path(read_summary(shards[0].folder)["source"]["folder"])
    try:
        source = open_files(folder)
    except QuantflowError as error:
        raise InputError(
            f"{error.cause}; rows that several cards hold parts of are rounded again from the "
            "source",
            "give the model that was quantized with --model",
        ) from error
    expected = shards[0].inputs["model"]
    actual = identify(source.checkpoint, _digests(shards))
    if actual != expected:
        raise InputError(
            f"{folder}: is model {actual[:16]}, {shards[0].folder} was made from {expected[:16]}",
            "give the model that was quantized with --model",
        )
    other = stage_folder.difference(shards[0].inputs["tools"], tools())
    if other is not None:
        key, old, new = other
        raise InputError(
            f"{shards[0].folder}: was made with {key} {old}, here is {new}, which may round in "
            "another way",
            "unify where the shards were quantized, or quantize here",
        )
    return source


def _digests(shards: Sequence[OpenedShard]) -> Digests:
    """The hashes of the source's files, as far as quantize left them."""
    return Digests(also=[shards[0].folder.parent / HASHES, shards[0].folder / HASHES])


def _check_groups(groups: Sequence[Sequence[int]], *, world: int) -> None:
    size = world // len(groups)
    if [list(group) for group in groups] != [
        list(range(first, first + size)) for first in range(0, world, size)
    ]:
        raise UsageError(
            f"unify: groups {[list(group) for group in groups]} of {world} shards",
            "a card of the smaller world holds what neighbours hold: give groups of one size, in "
            "order, such as 01 23",
        )


def _target(shards: Sequence[OpenedShard], *, rank: int, world: int) -> CardShare:
    """The share of one group's result: that of the same card of the smaller world."""
    placements = {}
    for name in shards[0].share.placements:
        parts = [shard.share.placements[name] for shard in shards]
        check_cover(name, parts)
        _check_expert(name, parts)
        placements[name] = share(name, joined(parts), cards=world, card=rank)
    return CardShare(rank=rank, world=world, placements=placements)


def _check_expert(name: str, parts: Sequence[Placement]) -> None:
    """Refuse shards of which not exactly one holds an expert.

    Raises:
        InputError: naming it and their number.
    """
    holders = [rank for rank, part in enumerate(parts) if not is_elsewhere(part)]
    if parts[0]["kind"] == "expert" and len(holders) != 1:
        raise InputError(
            f"{name}: an expert that {len(holders)} of {len(parts)} shards hold ({some(holders)})",
            "quantize all shards with one command",
        )


def _from_rows(
    holders: Mapping[tuple[int, int], OpenedShard],
    unit: Unit,
    *,
    scheme: LinearScheme,
    scale: Tensor | None,
) -> Joined:
    """A unit's rows, each from the card that holds it.

    Args:
        holders: first and last row -> the card that holds them.
        unit: unit of the joined weight.
        scheme: scheme of the linear.
        scale: scale of the whole weight, where it has one.
    """
    stop = unit.first + unit.count
    pieces = []
    for (begin, end), shard in sorted(holders.items(), key=lambda item: item[0]):
        if max(begin, unit.first) < min(end, stop):
            pieces.append(
                _rows(shard, unit, scheme=scheme, first=max(begin, unit.first), stop=min(end, stop))
            )
    return join_rows(pieces, scale=scale)


def _from_columns(
    holders: Mapping[tuple[int, int], OpenedShard],
    unit: Unit,
    *,
    scheme: LinearScheme,
    scale: Tensor | None,
) -> Joined:
    """A unit's rows, each from all cards; as `_from_rows`, with columns."""
    stop = unit.first + unit.count
    return join_columns(
        [
            _rows(holders[span], unit, scheme=scheme, first=unit.first, stop=stop)
            for span in sorted(holders)
        ],
        scale=scale,
    )


def _recorded(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries of a shard's records on each linear: its placement, and its notes."""
    placements: dict[str, Any] = {}
    decisions: dict[str, Any] = {}
    for path in sorted((folder / "layers").glob("*.json")):
        record = read_json(path)
        placements |= record["placements"]
        decisions |= record["decisions"]
    return placements, decisions


def _stored(folder: Path) -> StoredTensors:
    stored: dict[str, tuple[Path, TensorInfo]] = {}
    for path in sorted((folder / "layers").glob("*.safetensors")):
        stored |= {name: (path, info) for name, info in read_header(path)[0].items()}
    return stored


def _span(shard: OpenedShard, name: str) -> tuple[int, int]:
    """The rows or columns of a linear that a card holds, start and stop."""
    placement = shard.share.placements[name]
    length = placement["full_shape"][0] if placement["axis"] is None else placement["length"]
    return placement["offset"], placement["offset"] + length


def _rows(
    shard: OpenedShard, unit: Unit, *, scheme: LinearScheme, first: int, stop: int
) -> QTensor:
    """A card's values of some rows of the source's tensor, of all columns that it holds."""
    held = shard.share.part(unit.info).rows
    rows, columns = shard.share.info(unit.info).shape
    begin, end = first - held.start, stop - held.start
    # where packed zero points begin with a whole word
    aligned = begin // _ROW_MULTIPLE * _ROW_MULTIPLE
    count = min(rows, -(-end // _ROW_MULTIPLE) * _ROW_MULTIPLE) - aligned
    weight = decoded_rows(
        unit.linear, scheme, shard.stored, first=aligned, count=count, columns=columns
    ).weight
    wanted = slice(begin - aligned, end - aligned)
    if weight.scheme.granularity == "per_tensor":
        return replace(weight, qvalue=weight.qvalue[wanted])
    zero_point = None if weight.zero_point is None else weight.zero_point[wanted]
    return replace(
        weight, qvalue=weight.qvalue[wanted], scale=weight.scale[wanted], zero_point=zero_point
    )

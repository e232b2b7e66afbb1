"""The shards of a quantized model, opened, and what the cards made of some rows of a linear put side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from torch import Tensor

from quantflow.artifact import stage_folder
from quantflow.artifact.canonical import read_json
from quantflow.artifact.safetensors_header import TensorInfo, read_header
from quantflow.core.joining import Joined, join_columns, join_rows, requantize_, shared_scale, zero_groups
from quantflow.core.qtensor import QTensor
from quantflow.errors import InputError
from quantflow.formats import FORMATS
from quantflow.models.reading import read_tensor
from quantflow.planning.plan import Plan
from quantflow.quantization.decoded_values import Stored, decoded_rows
from quantflow.quantization.file_units import Unit
from quantflow.quantization.shards.share import STAGE, CardShare, shard_folders
from quantflow.quantization.static_inputs import LinearInput

COLUMNS = ("linear", "joined", "cards", "channels", "requantized")
HOW = {None: "one part", 0: "rows side by side", 1: "columns side by side"}  # by the axis that is cut
_ROW_MULTIPLE: int = FORMATS["compressed-tensors"].ROW_MULTIPLE


@dataclass(frozen=True, kw_only=True)
class OpenedShard:
    """One card's finished result.

    Attributes:
        inputs: what it was made from, as its DONE.json says.
        share: which part it is.
        stored: every linear's tensors.
        decisions: what its records say of every linear.
    """

    folder: Path
    inputs: Mapping[str, Any]
    share: CardShare
    stored: Stored
    decisions: Mapping[str, Mapping[str, Any]]

    @property
    def made_from(self) -> dict[str, Any]:
        """What all shards of one model have in common."""
        return {key: value for key, value in self.inputs.items() if key != "share"}


class Parts:
    """What a unit of a linear becomes: what the cards made of it, side by side.

    Attributes:
        report: linear -> how it was joined; units that run at once add to it.
    """

    def __init__(self, shards: Sequence[OpenedShard]) -> None:
        """Begin with an empty report.

        Args:
            shards: of neighbouring cards, in order.
        """
        self._shards = shards
        self._lock = Lock()
        self.report: dict[str, dict[str, Any]] = {}

    def __call__(self, unit: Unit, rows: Tensor) -> tuple[QTensor, Mapping[str, Any]]:
        """Return the rows of the joined weight, and its decisions as the algorithm counts them."""
        assert unit.scheme is not None  # only linears are joined
        name, scale, zeros = unit.linear, None, None
        if unit.scheme.weights.granularity == "per_tensor":
            scale, zeros = self._shared(name)
        holders = {_span(shard, name): shard for shard in reversed(self._shards)}  # of copies the first card's
        axis = self._shards[0].share.placements[name]["axis"]
        made = _from_columns(holders, unit, scale) if axis == 1 else _from_rows(holders, unit, scale)
        for stale, columns in made.stale:
            requantize_(made.weight, rows, rows=stale, columns=columns)
        with self._lock:
            how = HOW[axis] if len(holders) > 1 else "one part"
            told = self.report.setdefault(name, dict(zip(COLUMNS, (name, how, len(holders), 0, 0), strict=True)))
            told["channels"] += unit.count * (len(holders) if axis == 1 else 1)  # every card has each row, or has it alone
            told["requantized"] += sum(int(stale.sum()) for stale, _ in made.stale)
        if zeros is None:
            return made.weight, {"zero_groups": zero_groups(rows, made.weight.scale)}
        return made.weight, {"zero_groups": int(zeros and unit.at == 0)}

    def inputs(self, plan: Plan) -> dict[str, LinearInput]:
        """Return what the shards, made with one measurement, say of each linear's input."""
        first, found = self._shards[0], {}
        for name, scheme in plan.schemes.items():
            if scheme is not None:
                decisions = {key: value for key, value in first.decisions[name].items() if key != "zero_groups"}
                scale, zero_point = (
                    read_tensor(*first.stored[key]) if key in first.stored else None
                    for key in (f"{name}.input_scale", f"{name}.input_zero_point")
                )
                found[name] = LinearInput(scale=scale, zero_point=zero_point, decisions=decisions)
        return found

    def _shared(self, name: str) -> tuple[Tensor, bool]:
        """Return the one scale of a weight, [1, 1], and whether it stands for zeros alone.

        All cards count: a copy's scale is also that of what the card holds of the linears that share the input.
        """
        scales = [read_tensor(*shard.stored[f"{name}.weight_scale"]).float().reshape(1, 1) for shard in self._shards]
        zeros = [shard.decisions[name]["zero_groups"] > 0 for shard in self._shards]
        return shared_scale(scales, zeros=zeros), all(zeros)


def open_shards(folder: Path) -> list[OpenedShard]:
    """Return the shards of a quantized model, in order of their ranks, after every file was compared with its hash.

    Raises:
        InputError: one is missing, unfinished, there twice, or was made from something else than the first.
        IntegrityError: a file differs from its hash.
    """
    found: dict[int, OpenedShard] = {}
    for path in shard_folders(folder):
        inputs = stage_folder.require_done(path, stage=STAGE)["inputs"]
        placements, decisions = _recorded(path)
        held = CardShare(**inputs["share"], placements=placements)
        shard = OpenedShard(folder=path, inputs=inputs, share=held, stored=_stored(path), decisions=decisions)
        first = next(iter(found.values()), shard)
        other = stage_folder.difference(first.made_from, shard.made_from)
        if other is not None:
            key, old, new = other
            raise InputError(
                f"{path}: {key} = {stage_folder.short(new)}, in {first.folder.name} {stage_folder.short(old)}",
                "quantize all shards with one command",
            )
        if shard.share.rank in found or shard.share.world != first.share.world:
            raise InputError(
                f"{path}: is rank {shard.share.rank} of {shard.share.world}, so is another folder, or that is of "
                f"{first.share.world}",
                "remove the folder that does not belong here",
            )
        found[shard.share.rank] = shard
    world = next(iter(found.values())).share.world
    missing = [rank for rank in range(world) if rank not in found]
    if missing:
        raise InputError(
            f"{folder}: shards {', '.join(map(str, missing))} of {world} are missing", "run the same `quantflow quantize` again"
        )
    return [found[rank] for rank in range(world)]


def _from_rows(holders: Mapping[tuple[int, int], OpenedShard], unit: Unit, scale: Tensor | None) -> Joined:
    """Return a unit's rows, each from the card that holds it.

    Args:
        holders: first and last row -> who holds them.
        unit: of the joined weight.
        scale: of the whole weight, where it has one.
    """
    stop, found = unit.first + unit.count, []
    for (begin, end), shard in sorted(holders.items(), key=lambda item: item[0]):
        if max(begin, unit.first) < min(end, stop):
            found.append(_rows(shard, unit, max(begin, unit.first), min(end, stop)))
    return join_rows(found, scale=scale)


def _from_columns(holders: Mapping[tuple[int, int], OpenedShard], unit: Unit, scale: Tensor | None) -> Joined:
    """Return a unit's rows, each from all cards; as `_from_rows`, with columns."""
    stop = unit.first + unit.count
    return join_columns([_rows(holders[span], unit, unit.first, stop) for span in sorted(holders)], scale=scale)


def _recorded(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a shard's records say of each linear: its placement, and what was decided."""
    placements: dict[str, Any] = {}
    decisions: dict[str, Any] = {}
    for path in sorted((folder / "layers").glob("*.json")):
        record = read_json(path)
        placements |= record["placements"]
        decisions |= record["decisions"]
    return placements, decisions


def _stored(folder: Path) -> Stored:
    stored: dict[str, tuple[Path, TensorInfo]] = {}
    for path in sorted((folder / "layers").glob("*.safetensors")):
        stored |= {name: (path, info) for name, info in read_header(path)[0].items()}
    return stored


def _span(shard: OpenedShard, name: str) -> tuple[int, int]:
    """Return which rows or columns of a linear a card holds, start and stop."""
    placement = shard.share.placements[name]
    length = placement["full_shape"][0] if placement["axis"] is None else placement["length"]
    return placement["offset"], placement["offset"] + length


def _rows(shard: OpenedShard, unit: Unit, first: int, stop: int) -> QTensor:
    """Return what a card made of some rows of the source's tensor, which it holds, of all columns that it holds."""
    assert unit.scheme is not None  # only linears are joined
    held = shard.share.part(unit.info).rows
    rows, columns = shard.share.info(unit.info).shape
    begin, end = first - held.start, stop - held.start
    aligned = begin // _ROW_MULTIPLE * _ROW_MULTIPLE  # where packed zero points begin with a whole word
    count = min(rows, -(-end // _ROW_MULTIPLE) * _ROW_MULTIPLE) - aligned
    weight = decoded_rows(unit.linear, unit.scheme, shard.stored, first=aligned, count=count, columns=columns).weight
    wanted = slice(begin - aligned, end - aligned)
    if weight.scheme.granularity == "per_tensor":
        return replace(weight, qvalue=weight.qvalue[wanted])
    zero_point = None if weight.zero_point is None else weight.zero_point[wanted]
    return replace(weight, qvalue=weight.qvalue[wanted], scale=weight.scale[wanted], zero_point=zero_point)

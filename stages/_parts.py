"""The shards of a quantized model, opened, and what the cards made of some rows of a linear put side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from torch import Tensor

from quantflow.artifact.canonical import read_json
from quantflow.artifact.safetensors_header import TensorInfo, read_header
from quantflow.core.joining import join_columns, join_rows, requantize_, zero_groups
from quantflow.core.qtensor import QTensor
from quantflow.errors import InputError
from quantflow.formats import FORMATS
from stages import _workspace
from stages._share import STAGE, Share, shard_folders
from stages._units import Unit
from stages._values import Stored, decoded_rows

COLUMNS = ("linear", "joined", "cards", "channels", "requantized")
HOW = {None: "one part", 0: "rows side by side", 1: "columns side by side"}  # by the axis that is cut
_ROW_MULTIPLE: int = FORMATS["compressed-tensors"].ROW_MULTIPLE


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One card's finished result.

    Attributes:
        inputs: what it was made from, as its DONE.json says.
        share: which part it is.
        stored: every linear's tensors.
    """

    folder: Path
    inputs: Mapping[str, Any]
    share: Share
    stored: Stored

    @property
    def made_from(self) -> dict[str, Any]:
        """What all shards of one model have in common."""
        return {key: value for key, value in self.inputs.items() if key != "share"}


class Parts:
    """What a unit of a linear becomes: what the cards made of it, side by side.

    Attributes:
        report: linear -> how it was joined; units that run at once add to it.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        """Begin with an empty report.

        Args:
            shards: of neighbouring cards, in order.
        """
        self._shards = shards
        self._lock = Lock()
        self.report: dict[str, dict[str, Any]] = {}

    def __call__(self, unit: Unit, rows: Tensor) -> tuple[QTensor, Mapping[str, Any]]:
        """Return the rows of the joined weight, and its decisions as the algorithm counts them."""
        name = unit.info.name.removesuffix(".weight")
        holders = {_span(shard, name): shard for shard in reversed(self._shards)}  # of copies the first card's
        axis = self._shards[0].share.placements[name]["axis"]
        if axis == 1:
            weight, requantized = _from_columns(holders, unit, rows)
        else:
            weight, requantized = _from_rows(holders, unit), 0
        with self._lock:
            how = HOW[axis] if len(holders) > 1 else "one part"
            told = self.report.setdefault(name, dict(zip(COLUMNS, (name, how, len(holders), 0, 0), strict=True)))
            told["channels"] += unit.count * (len(holders) if axis == 1 else 1)  # every card has a scale for each row
            told["requantized"] += requantized
        return weight, {"zero_groups": zero_groups(rows, weight.scale)}


def open_shards(folder: Path) -> list[Shard]:
    """Return the shards of a quantized model, in order of their ranks, after every file was compared with its hash.

    Raises:
        InputError: one is missing, unfinished, there twice, or was made from something else than the first.
        IntegrityError: a file differs from its hash.
    """
    found: dict[int, Shard] = {}
    for path in shard_folders(folder):
        inputs = _workspace.require_done(path, stage=STAGE)["inputs"]
        shard = Shard(folder=path, inputs=inputs, share=_share(path, inputs["share"]), stored=_stored(path))
        first = next(iter(found.values()), shard)
        other = _workspace.difference(first.made_from, shard.made_from)
        if other is not None:
            key, old, new = other
            raise InputError(
                f"{path}: {key} = {_workspace.short(new)}, in {first.folder.name} {_workspace.short(old)}",
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


def _from_rows(holders: Mapping[tuple[int, int], Shard], unit: Unit) -> QTensor:
    """Return a unit's rows, each from the card that holds it."""
    stop, found = unit.first + unit.count, []
    for (begin, end), shard in sorted(holders.items(), key=lambda item: item[0]):
        if max(begin, unit.first) < min(end, stop):
            found.append(_rows(shard, unit, max(begin, unit.first), min(end, stop)))
    return join_rows(found)


def _from_columns(holders: Mapping[tuple[int, int], Shard], unit: Unit, original: Tensor) -> tuple[QTensor, int]:
    """Return a unit's rows, each from all cards, and for how many rows of a card the values were rounded again.

    Args:
        holders: first and last column -> who holds them.
        unit: of the joined weight.
        original: the unit in the source, of the same columns.
    """
    spans = sorted(holders)
    made = join_columns([_rows(holders[span], unit, unit.first, unit.first + unit.count) for span in spans])
    for (begin, end), stale in zip(spans, made.stale, strict=True):
        columns = slice(begin - spans[0][0], end - spans[0][0])
        requantize_(made.weight, original, rows=stale, columns=columns)
    return made.weight, sum(int(stale.sum()) for stale in made.stale)


def _share(folder: Path, which: Mapping[str, int]) -> Share:
    placements: dict[str, Any] = {}
    for path in sorted((folder / "layers").glob("*.json")):
        placements |= read_json(path)["placements"]
    return Share(rank=which["rank"], world=which["world"], placements=placements)


def _stored(folder: Path) -> Stored:
    stored: dict[str, tuple[Path, TensorInfo]] = {}
    for path in sorted((folder / "layers").glob("*.safetensors")):
        stored |= {name: (path, info) for name, info in read_header(path)[0].items()}
    return stored


def _span(shard: Shard, name: str) -> tuple[int, int]:
    """Return which rows or columns of a linear a card holds, start and stop."""
    placement = shard.share.placements[name]
    length = placement["full_shape"][0] if placement["axis"] is None else placement["length"]
    return placement["offset"], placement["offset"] + length


def _rows(shard: Shard, unit: Unit, first: int, stop: int) -> QTensor:
    """Return what a card made of some rows of the source's tensor, which it holds, of all columns that it holds."""
    assert unit.scheme is not None  # only linears are joined
    name = unit.info.name.removesuffix(".weight")
    held = shard.share.part(unit.info).rows
    rows, columns = shard.share.info(unit.info).shape
    begin, end = first - held.start, stop - held.start
    aligned = begin // _ROW_MULTIPLE * _ROW_MULTIPLE  # where packed zero points begin with a whole word
    count = min(rows, -(-end // _ROW_MULTIPLE) * _ROW_MULTIPLE) - aligned
    weight = decoded_rows(name, unit.scheme, shard.stored, first=aligned, count=count, columns=columns)
    wanted = slice(begin - aligned, end - aligned)
    zero_point = None if weight.zero_point is None else weight.zero_point[wanted]
    return QTensor(qvalue=weight.qvalue[wanted], scale=weight.scale[wanted], zero_point=zero_point, scheme=weight.scheme)

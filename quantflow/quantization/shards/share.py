"""Which part of each tensor one card of N quantizes, and how a folder of such shards is told from a whole result.

    <o>/rank-002-of-004/layers/00012.safetensors    the card's part of each tensor, in the part's own shape
    <o>/rank-002-of-004/layers/00012.json           and in "placements" which part that is (quantflow.measurements.placement)

A linear that is cut by rows gives its bias the same rows. What is not cut (norms, the bias of a linear that is cut by
columns) is whole in every shard: a shard is all that a card loads.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quantflow.artifact import stage_folder
from quantflow.artifact.safetensors_header import TensorInfo
from quantflow.errors import InputError
from quantflow.measurements.placement import Placement
from quantflow.models.graph import Layer

STAGE = "quantize --ranks"  # what DONE.json of a shard names
_RANK_FOLDER = re.compile(r"rank-[0-9]{3,}-of-[0-9]{3,}")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Where a card's part of a tensor lies in the source's tensor.

    Attributes:
        rows: start and stop along the first axis.
        columns: start and stop along the second; None is the whole of every row.
    """

    rows: slice
    columns: slice | None = None


@dataclass(frozen=True, kw_only=True)
class CardShare:
    """What one card holds.

    Attributes:
        rank, world: which card of how many.
        placements: linear -> which part of its weight; a linear that is not there is held whole.
    """

    rank: int = 0
    world: int = 1
    placements: Mapping[str, Placement] = field(default_factory=dict)

    def part(self, info: TensorInfo) -> Part:
        """Return which part of a source tensor the card holds."""
        linear, _, leaf = info.name.rpartition(".")
        placement = self.placements.get(linear, {"axis": None})
        if placement["axis"] is not None and leaf in ("weight", "bias"):
            held = slice(placement["offset"], placement["offset"] + placement["length"])
            if placement["axis"] == 0:
                return Part(rows=held)
            if leaf == "weight":
                return Part(rows=slice(0, info.shape[0]), columns=held)
        return Part(rows=slice(0, info.shape[0] if info.shape else 1))

    def info(self, info: TensorInfo) -> TensorInfo:
        """Return the card's part of a source tensor with the part's own shape and size; its place in the file is left."""
        part, shape = self.part(info), info.shape
        if shape:
            shape = (part.rows.stop - part.rows.start, *shape[1:])
        if part.columns is not None:
            shape = (shape[0], part.columns.stop - part.columns.start)
        return replace(info, shape=shape, nbytes=info.nbytes * math.prod(shape) // max(1, math.prod(info.shape)))

    def record(self, layer: Layer) -> dict[str, Any]:
        """Return what a layer's record says about the parts in its file; nothing where they are whole."""
        if self.world == 1:
            return {}
        names = [name for group in layer.groups for name in group.linears]
        return {"placements": {name: dict(self.placements[name]) for name in names}}

    def inputs(self) -> dict[str, Any]:
        """Return what a state key and DONE.json say about the share; nothing where it is everything."""
        return {} if self.world == 1 else {"share": {"rank": self.rank, "world": self.world}}


WHOLE = CardShare()


def shard_folders(folder: Path) -> list[Path]:
    """Return the shards of a quantized model in a folder, in order of their names; none where it holds something else."""
    found = sorted(path for path in folder.glob("rank-*") if path.is_dir() and _RANK_FOLDER.fullmatch(path.name))
    return [path for path in found if (path / "layers").is_dir()]


def refuse_shards(folder: Path) -> None:
    """Refuse a folder of shards, or one of them, where a whole result is needed.

    Raises:
        InputError: with the command that joins them.
    """
    record = stage_folder.done(folder)
    where = folder.parent if record is not None and record["stage"] == STAGE else folder
    shards = shard_folders(where)
    if shards:
        raise InputError(
            f"{folder}: {'holds' if where == folder else 'one of'} {len(shards)} shards, the whole is needed",
            f"run `quantflow unify -m {where} -o DIR` and give that folder",
        )

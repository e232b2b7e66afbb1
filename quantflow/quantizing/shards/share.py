"""The part of each tensor that one card of N quantizes; layers cut to parts, and put together.

    <o>/rank-002-of-004/layers/00012.safetensors    the card's part of each tensor, in its own shape
    <o>/rank-002-of-004/layers/00012.json           the part's place, under "placements"
                                                    (quantflow.distributed.placement)

A linear that is cut by rows gives its bias the same rows. Of a mixture whose experts lie on some
cards each, a shard has those of its card, whole, and nothing of the others. Tensors that are not
cut (norms, the bias of a linear that is cut by columns) are whole in every shard: a shard is all
that a card loads.

Where the model runs, every card has the whole layer and writes its part of it. So scales are the
whole weight's, nothing is rounded again when parts are put together, and the source is not needed
for it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any, TypedDict

import torch
from torch import Tensor

from quantflow.core.scheme import LinearScheme
from quantflow.distributed.placement import Placement, holder_of, is_elsewhere
from quantflow.distributed.slicing import cut, side_by_side
from quantflow.errors import InputError
from quantflow.files import stage_folder
from quantflow.files.rank_folders import MOST_RANKS
from quantflow.files.safetensors_header import TensorInfo
from quantflow.files.schema import Between
from quantflow.formats import DEFAULT, FORMATS
from quantflow.models.graph import Layer

FORMAT = FORMATS[DEFAULT]
STAGE = "quantize --ranks"  # what DONE.json of a shard names
_RANK_FOLDER = re.compile(r"rank-[0-9]{3,}-of-[0-9]{3,}")

Schemes = Mapping[str, LinearScheme | None]  # linear -> how it was quantized


@dataclass(frozen=True, kw_only=True)
class Part:
    """The place of a card's part in the source's tensor.

    Attributes:
        rows: start and stop along the first axis.
        columns: start and stop along the second; None is the whole of every row.
    """

    rows: slice
    columns: slice | None = None


class RankOf(TypedDict):
    """The number of a shard's card, and of all cards, from its DONE.json."""

    rank: Annotated[int, Between(0, MOST_RANKS)]
    world: Annotated[int, Between(1, MOST_RANKS)]


@dataclass(frozen=True, kw_only=True)
class CardShare:
    """The part of every tensor that one card holds.

    Attributes:
        rank, world: number of the card, and of all cards.
        placements: linear -> the part of its weight; a linear that is not there is held whole.
    """

    rank: int = 0
    world: int = 1
    placements: Mapping[str, Placement] = field(default_factory=dict)

    def part(self, info: TensorInfo) -> Part:
        """The card's part of a source tensor."""
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
        """The card's part of a source tensor with its own shape and size; its file offset stays."""
        part = self.part(info)
        shape = info.shape
        if shape:
            shape = (part.rows.stop - part.rows.start, *shape[1:])
        if part.columns is not None:
            shape = (shape[0], part.columns.stop - part.columns.start)
        return replace(
            info,
            shape=shape,
            nbytes=info.nbytes * math.prod(shape) // max(1, math.prod(info.shape)),
        )

    def record(self, layer: Layer) -> dict[str, Any]:
        """The record's entry on the parts in a layer's file; empty where they are whole."""
        if self.world == 1:
            return {}
        names = [name for group in layer.groups for name in group.linears]
        return {"placements": {name: dict(self.placements[name]) for name in names}}

    def inputs(self) -> dict[str, Any]:
        """The entry of a state key and DONE.json on the share; empty where it is everything."""
        return {} if self.world == 1 else {"share": {"rank": self.rank, "world": self.world}}


WHOLE = CardShare()
# what a card holds, and the tensors of a layer
CardTensors = tuple[CardShare, Mapping[str, Tensor]]


def owners_of(layer: Layer, *, cards: int) -> tuple[int, ...]:
    """The card that quantizes each group of a layer's linears.

    An expert's is the card that holds the expert, so that all of its groups are on one; the cards
    take turns at the others.
    """
    numbers = {expert: number for number, expert in enumerate(layer.gates)}
    turns = count()
    return tuple(
        next(turns) % cards
        if group.expert is None
        else holder_of(numbers[group.expert], experts=len(numbers), cards=cards)
        for group in layer.groups
    )


def shard_folders(folder: Path) -> list[Path]:
    """The shards of a quantized model in a folder, by name; empty for another folder."""
    found = sorted(
        path
        for path in folder.glob("rank-*")
        if path.is_dir() and _RANK_FOLDER.fullmatch(path.name)
    )
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
            f"{folder}: {'holds' if where == folder else 'one of'} {len(shards)} shards, the "
            "whole is needed",
            f"run `quantflow unify -m {where} -o DIR` and give that folder",
        )


def sliced(
    tensors: Mapping[str, Tensor], linears: Sequence[str], schemes: Schemes, share: CardShare
) -> dict[str, Tensor]:
    """A card's part of a layer's file.

    Args:
        tensors: tensors of the whole layer, by their names in the file.
        linears: names of the layer's linears.
        schemes: linear -> its scheme.
        share: the card's part; a linear that it does not name is whole.
    """
    own = dict(tensors)
    for name in linears:
        placement = share.placements.get(name, {"kind": "replicated", "axis": None})
        axis = placement["axis"]
        bias = f"{name}.bias"
        if is_elsewhere(placement):
            for key in _tensors_of(name, tensors):
                del own[key]
        if axis is None:
            continue
        part = slice(placement["offset"], placement["offset"] + placement["length"])
        if axis == 0 and bias in tensors:
            own[bias] = tensors[bias][part].contiguous()
        scheme = schemes[name]
        if scheme is None:
            weight = f"{name}.weight"
            own[weight] = (
                tensors[weight][part] if axis == 0 else tensors[weight][:, part]
            ).contiguous()
            continue
        linear = FORMAT.decode(name, tensors, scheme)
        held = replace(linear, weight=cut(linear.weight, part, axis=axis))
        own |= FORMAT.encode(name, held, scale_dtype=tensors[f"{name}.weight_scale"].dtype)
    return own


def put_together(
    parts: Sequence[CardTensors], linears: Sequence[str], schemes: Schemes
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """A layer's file from the parts of neighbouring cards, and the number of parts of each linear.

    An expert that none of these cards holds has none.

    Args:
        parts: tensors of each card, in order; uncut and copied tensors are the first card's, and an
            expert's those of the card that holds it.
        linears: names of the layer's linears.
        schemes: linear -> its scheme.
    """
    joined_tensors = dict(parts[0][1])
    counts = {}
    for name in linears:
        holders = {
            _span(share, name): tensors
            for share, tensors in reversed(parts)
            if not is_elsewhere(share.placements[name])
        }
        held = [holders[span] for span in sorted(holders)]
        counts[name], axis = len(held), parts[0][0].placements[name]["axis"]
        if len(held) <= 1:
            joined_tensors |= {
                key: tensors[key] for tensors in held for key in _tensors_of(name, tensors)
            }
            continue
        bias = f"{name}.bias"
        scheme = schemes[name]
        if axis == 0 and bias in joined_tensors:
            joined_tensors[bias] = torch.cat([tensors[bias] for tensors in held])
        if scheme is None:
            joined_tensors[f"{name}.weight"] = torch.cat(
                [tensors[f"{name}.weight"] for tensors in held], dim=axis
            )
            continue
        decoded = [FORMAT.decode(name, tensors, scheme) for tensors in held]
        whole = replace(
            decoded[0], weight=side_by_side([linear.weight for linear in decoded], axis=axis)
        )
        joined_tensors |= FORMAT.encode(
            name, whole, scale_dtype=held[0][f"{name}.weight_scale"].dtype
        )
    return joined_tensors, counts


def _tensors_of(name: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """The names in a layer's file of a linear's tensors."""
    return [key for key in tensors if key.rpartition(".")[0] == name]


def _span(share: CardShare, name: str) -> tuple[int, int]:
    """The start of a card's part of a linear, and its length; 0 where it is whole."""
    placement = share.placements[name]
    return placement["offset"], placement.get("length", 0)

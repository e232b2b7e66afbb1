"""One card's part of a layer that was quantized whole, and the layer from the parts of all cards.

Where the model runs, every card has the whole layer and writes its part. So scales are the whole weight's, nothing is
rounded again when parts are put together, and the source is not needed for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantflow.core.scheme import LinearScheme
from quantflow.core.slicing import cut, side_by_side
from quantflow.formats import DEFAULT, FORMATS
from quantflow.quantization.shards.share import CardShare

FORMAT = FORMATS[DEFAULT]
Schemes = Mapping[str, LinearScheme | None]
Part = tuple[CardShare, Mapping[str, Tensor]]  # what a card holds, and the tensors of a layer


def sliced(tensors: Mapping[str, Tensor], linears: Sequence[str], schemes: Schemes, share: CardShare) -> dict[str, Tensor]:
    """Return a card's part of what a layer's file holds.

    Args:
        tensors: of the whole layer, by their names in the file.
        linears: of the layer.
        schemes: linear -> how it was quantized.
        share: what the card holds; what it does not name is whole.
    """
    found = dict(tensors)
    for name in linears:
        placement = share.placements.get(name, {"axis": None})
        axis, bias = placement["axis"], f"{name}.bias"
        if axis is None:
            continue
        part = slice(placement["offset"], placement["offset"] + placement["length"])
        if axis == 0 and bias in tensors:
            found[bias] = tensors[bias][part].contiguous()
        scheme = schemes[name]
        if scheme is None:
            weight = f"{name}.weight"
            found[weight] = (tensors[weight][part] if axis == 0 else tensors[weight][:, part]).contiguous()
            continue
        linear = FORMAT.decode(name, tensors, scheme)
        held = replace(linear, weight=cut(linear.weight, part, axis=axis))
        found |= FORMAT.encode(name, held, scale_dtype=tensors[f"{name}.weight_scale"].dtype)
    return found


def put_together(parts: Sequence[Part], linears: Sequence[str], schemes: Schemes) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return what a layer's file holds from the parts of neighbouring cards, and of how many of them each linear is.

    Args:
        parts: in the order of the cards. What is not cut is the first card's; of copies too.
        linears: of the layer.
        schemes: linear -> how it was quantized.
    """
    found, counts = dict(parts[0][1]), {}
    for name in linears:
        holders = {_span(share, name): tensors for share, tensors in reversed(parts)}
        held = [holders[span] for span in sorted(holders)]
        counts[name], axis = len(held), parts[0][0].placements[name]["axis"]
        if len(held) == 1:
            continue
        bias, scheme = f"{name}.bias", schemes[name]
        if axis == 0 and bias in found:
            found[bias] = torch.cat([tensors[bias] for tensors in held])
        if scheme is None:
            found[f"{name}.weight"] = torch.cat([tensors[f"{name}.weight"] for tensors in held], dim=axis)
            continue
        decoded = [FORMAT.decode(name, tensors, scheme) for tensors in held]
        whole = replace(decoded[0], weight=side_by_side([linear.weight for linear in decoded], axis=axis))
        found |= FORMAT.encode(name, whole, scale_dtype=held[0][f"{name}.weight_scale"].dtype)
    return found, counts


def _span(share: CardShare, name: str) -> tuple[int, int]:
    """Return where a card's part of a linear begins, and its length; 0 where it is whole."""
    placement = share.placements[name]
    return placement["offset"], placement.get("length", 0)

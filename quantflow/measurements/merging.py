"""One statistic of one site, as every rank of a group has it, made into what one rank would have.

First the cards of each replica, then the replicas. What flows at a site is on the cards as its layout says
(placement.py), and each statistic has one rule per layout; whatever has none is refused:

    statistic                    same    channels              samples          partial
    amax                         once    maximum               maximum          bounded
    channel_amax, max_val        once    concatenated          maximum          bounded
    min_val                      once    concatenated          minimum          bounded
    abs_sum, square_sum          once    concatenated          added            refused
    count                        once    once                  added            refused
    counts (histogram)           once    added                 added            refused
    hessian_sum, gradient_sum    once    refused               added            refused

once: the lowest rank's, after checking that the others have the same: exactly, and for sums of floats within 1e-5 of
the largest, since arithmetic on several cards rounds differently. The same holds for cards that hold copies of a share.
bounded: |a + b| <= |a| + |b|, so the sum of the summands' maxima bounds the maximum of their sum; rounded away from zero.
A sum of products of channels is only known within each card's own; between cards it is not there to be merged.

Replicas see different samples: maxima, minima and sums, folded in rank order. Statistics of a weight are taken once, after
checking that the replicas have the same.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from quantflow.errors import StatisticsError
from quantflow.measurements.keys import MATRICES, Key
from quantflow.measurements.placement import Layout
from quantflow.numerics import output_blocks
from quantflow.observers.histogram import BINS

PER_CHANNEL = ("channel_amax", "min_val", "max_val", "abs_sum", "square_sum")
SUMS = ("abs_sum", "square_sum", "count", "counts", *MATRICES)
TOLERANCE = 1e-5  # of the largest entry, between sums that cards of one replica took of the same values

BOUNDED = "bounded by the sum"
_ONCE, _JOINED = "taken once", "concatenated"
_LARGER, _SMALLER, _ADDED = "maximum", "minimum", "added"
_WHOLE = {
    "hessian_sum": "measure with --stats without hessian; quantize accumulates Hessians itself, on the whole model",
    "gradient_sum": "measure gradients with --tp 1, on any number of ranks",
}
_AGAIN = "measure again; give the ranks of one measurement"
_FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    _LARGER: torch.maximum,
    _SMALLER: torch.minimum,
    _ADDED: torch.add,
}


class Value(NamedTuple):
    """One statistic on one rank.

    Attributes:
        who: what messages call the rank.
        tensor: the statistic.
        channels: how many it must have.
    """

    who: str
    tensor: Tensor
    channels: int


def merge(
    key: Key,
    replicas: Sequence[Sequence[Value]],
    *,
    layout: Layout,
    stacks: Sequence[Sequence[Sequence[int]]],
) -> tuple[Tensor, str]:
    """Merge one statistic and return it with the name of the rule.

    Args:
        key: which.
        replicas: its values, one row per replica, in rank order.
        layout: how the cards of a replica share what flows there.
        stacks: of each row the positions that hold the same share, in the order of the shares.

    Raises:
        StatisticsError: naming the rank and the values: a value cannot be one of this statistic, ranks that must agree
            do not, or the layout has no rule for it.
    """
    _refuse_unusable(key, [value for row in replicas for value in row])
    rules, combined = [], []
    for row, shares in zip(replicas, stacks, strict=True):
        parts = [_agreed(key, [row[position] for position in stack]) for stack in shares]
        within = _within(key, layout) if len(parts) > 1 else None
        rules += [_ONCE] if len(parts) < len(row) else []
        rules += [within] if within else []
        combined.append(_combined(key, parts, within) if within else parts[0])
    if len(combined) > 1:
        across = _ONCE if key.site == "weight" else _fold_of(key.statistic)
        rules.append(across)
        combined = [_combined(key, combined, across)]
    return combined[0].tensor, ", then ".join(dict.fromkeys(rules)) or "kept"


def _within(key: Key, layout: Layout) -> str:
    """Return how the shares of one replica's cards are combined."""
    statistic = key.statistic
    if layout == "samples":
        return _fold_of(statistic)
    if layout == "partial":
        if statistic not in SUMS:
            return BOUNDED
        raise StatisticsError(
            f"{key}: cards hold summands of the output, and no {statistic} of a sum follows from those of its summands",
            "measure amax of such outputs alone, or measure them after the summands were added up",
        )
    if statistic in MATRICES:
        raise StatisticsError(
            f"{key}: each card has the products of its own channels, those between cards were measured by none",
            _WHOLE[statistic],
        )
    if statistic in PER_CHANNEL:
        return _JOINED
    return _ONCE if statistic == "count" else _fold_of(statistic)


def _combined(key: Key, parts: Sequence[Value], rule: str) -> Value:
    tensors = [part.tensor for part in parts]
    if rule == _JOINED:
        tensor = torch.cat(tensors)
    elif rule == _ONCE:
        tensor = _agreed(key, parts).tensor
    elif rule == BOUNDED:
        tensor = _bound(tensors)
    else:
        tensor = reduce(_FOLDS[rule], tensors)
    return Value(who=parts[0].who, tensor=tensor, channels=sum(part.channels for part in parts))


def _fold_of(statistic: str) -> str:
    if statistic in SUMS:
        return _ADDED
    return _SMALLER if statistic == "min_val" else _LARGER


def _bound(summands: Sequence[Tensor]) -> Tensor:
    """Return the sum of extremes in float32, away from zero where it has to be rounded."""
    exact = torch.stack(list(summands)).double().sum(dim=0)
    rounded = exact.float()
    short = rounded.double().abs() < exact.abs()
    return torch.where(short, torch.nextafter(rounded, exact.sign().float() * torch.inf), rounded)


def _agreed(key: Key, values: Sequence[Value]) -> Value:
    """Return the first of values that are statistics of the same numbers, after checking that they say the same."""
    first = values[0]
    for other in values[1:]:
        if torch.equal(first.tensor, other.tensor):
            continue
        if first.tensor.shape != other.tensor.shape:
            ours, theirs, entry = str(list(first.tensor.shape)), str(list(other.tensor.shape)), ""
        else:
            apart = (first.tensor.double() - other.tensor.double()).abs()
            float_sum = key.statistic in SUMS and first.tensor.is_floating_point()
            if float_sum and apart.max() <= TOLERANCE * first.tensor.abs().max():
                continue
            worst = int(apart.argmax())
            ours, theirs = (str(value.tensor.flatten()[worst].item()) for value in (first, other))
            entry = f"[{worst}]" if first.tensor.ndim else ""
        raise StatisticsError(f"{other.who}: {key}{entry} is {theirs}, {ours} on {first.who}, which saw the same", _AGAIN)
    return first


def _refuse_unusable(key: Key, values: Sequence[Value]) -> None:
    """Refuse values of another dtype or shape than they must have, NaN, Inf and the wrong sign."""
    dtype = values[0].tensor.dtype
    shapes = {channels: _shape(key.statistic, channels) for channels in {value.channels for value in values}}
    for value in values:
        shape = shapes[value.channels]
        if value.tensor.shape != shape or value.tensor.dtype != dtype:
            raise StatisticsError(
                f"{value.who}: {key} is {value.tensor.dtype} {list(value.tensor.shape)}, {dtype} {list(shape)} is expected",
                _AGAIN,
            )
    # All at once, because that is faster than one by one; but not matrices, of which a copy may not fit into memory.
    if key.statistic not in MATRICES:
        tensors = [value.tensor for value in values]
        if _fault(key.statistic, torch.cat(tensors) if shape else torch.stack(tensors)) is None:
            return
    for value in values:
        fault = _fault(key.statistic, value.tensor)
        if fault is not None:
            raise StatisticsError(f"{value.who}: {key} holds {fault}", _AGAIN)


def _shape(statistic: str, channels: int) -> tuple[int, ...]:
    if statistic in PER_CHANNEL:
        return (channels,)
    if statistic == "gradient_sum":
        return channels, output_blocks.width(channels)
    if statistic in MATRICES:
        return (channels, channels)
    return (BINS,) if statistic == "counts" else ()


def _fault(statistic: str, tensor: Tensor) -> str | None:
    """Return what this statistic cannot hold and does, if anything."""
    if not tensor.numel():
        return None
    low, high = (end.item() for end in torch.aminmax(tensor))
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"{int(tensor.isnan().sum())} NaN and {int(tensor.isinf().sum())} Inf"
    if statistic in MATRICES:
        low = (output_blocks.diagonal_of(tensor) if statistic == "gradient_sum" else tensor.diagonal()).min().item()
        return f"{low} on its diagonal, which is at least 0" if low < 0 else None
    if statistic == "min_val":
        return f"{high}, it is at most 0" if high > 0 else None
    return f"{low}, it is at least 0" if low < 0 else None

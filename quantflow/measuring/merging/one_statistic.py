"""One statistic of one site, as every rank of a group has it, made into what one rank would have.

First the cards of each replica, then the replicas. What flows at a site is on the cards as its
layout says (placement.py). The observer that owns a statistic says how it folds, joins and is cut
(quantflow/observers); from that follows one rule per layout, and what has none is refused:

    statistic                    same    channels              samples          partial
    amax                         once    maximum               maximum          bounded
    channel_amax, max_val        once    concatenated          maximum          bounded
    min_val                      once    concatenated          minimum          bounded
    abs_sum, square_sum          once    concatenated          added            refused
    count                        once    once                  added            refused
    counts (histogram)           once    added                 added            refused
    hessian_sum, gradient_sum    once    refused               added            refused

once: the lowest rank's, after checking that the others have the same: exactly, and for sums of
floats within 1e-5 of the largest, since arithmetic on several cards rounds differently. The same
holds for cards that hold copies of a share, and for channels that several hold. concatenated: in
the order of the whole, where shares of one linear of queries, keys and values lie apart. bounded:
|a + b| <= |a| + |b|, so the sum of the summands' maxima bounds the maximum of their sum; rounded
away from zero. A sum of products of channels is only known within each card's own; between cards it
is not there to be merged.

Replicas see different samples: maxima, minima and sums, folded in the tree of
quantflow/numerics/fixed_tree.py. Statistics of a weight are taken once, after checking that the
replicas have the same.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quantflow.distributed.placement import Sharing
from quantflow.errors import StatisticsError
from quantflow.numerics.fixed_tree import folded
from quantflow.numerics.statistics import ADDED, FOLDED, JOINED, LARGER, ONCE, SMALLER, Statistic
from quantflow.observers import statistic_named
from quantflow.observers.keys import Key

# of the largest entry, between sums that cards of one replica took of the same values
TOLERANCE = 1e-5

BOUNDED = "bounded by the sum"
_AGAIN = "measure again; give the ranks of one measurement"
_FOLDS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    LARGER: torch.maximum,
    SMALLER: torch.minimum,
    ADDED: torch.add,
}


Runs = Sequence[tuple[int, int]]


class RankValue(NamedTuple):
    """One statistic on one rank.

    Attributes:
        who: the rank's name in messages.
        tensor: the statistic.
        channels: number of its channels.
        runs: where they lie among all, (first, number) in order; empty where neighbouring ranks
            have neighbouring channels.
    """

    who: str
    tensor: Tensor
    channels: int
    runs: Runs = ()


def merge(
    key: Key,
    replicas: Sequence[Sequence[RankValue]],
    *,
    sharing: Sharing,
    stacks: Sequence[Sequence[Sequence[int]]],
) -> tuple[Tensor, str]:
    """Merge one statistic.

    Args:
        key: key of the statistic.
        replicas: its values, one row per replica, in rank order.
        sharing: sharing of the tensor's channels among the cards of a replica.
        stacks: positions of each row that hold the same share, in the order of the shares.

    Returns:
        The statistic, and the name of the rule.

    Raises:
        StatisticsError: naming the rank and the values: a value cannot be one of this statistic,
            ranks that must agree do not, the layout has no rule for it, or no observer has the
            statistic.
    """
    statistic = statistic_named(key.statistic)
    _refuse_unusable(key, [value for row in replicas for value in row])
    rules, combined = [], []
    for row, shares in zip(replicas, stacks, strict=True):
        parts = [_agreed(key, [row[position] for position in stack]) for stack in shares]
        within = _within(key, statistic, sharing) if len(parts) > 1 else None
        rules += [ONCE] if len(parts) < len(row) else []
        rules += [within] if within else []
        combined.append(_combined(key, parts, within) if within else parts[0])
    if len(combined) > 1:
        across = ONCE if key.site == "weight" else statistic.fold
        rules.append(across)
        combined = [_combined(key, combined, across)]
    return combined[0].tensor, ", then ".join(dict.fromkeys(rules)) or "kept"


def _within(key: Key, statistic: Statistic, sharing: Sharing) -> str:
    """The rule that combines the shares of one replica's cards."""
    if sharing == "samples":
        return statistic.fold
    if sharing == "partial":
        if not statistic.is_sum:
            return BOUNDED
        raise StatisticsError(
            f"{key}: cards hold summands of the output, and no {statistic.name} of a sum follows "
            "from those of its summands",
            "measure amax of such outputs alone, or measure them after the summands were added up",
        )
    if statistic.cards is None:
        raise StatisticsError(
            f"{key}: each card has the products of its own channels, those between cards were "
            "measured by none",
            statistic.remedy,
        )
    return statistic.fold if statistic.cards == FOLDED else statistic.cards


def _combined(key: Key, parts: Sequence[RankValue], rule: str) -> RankValue:
    tensors = [part.tensor for part in parts]
    if rule == JOINED and parts[0].runs:
        return _in_place(key, parts)
    if rule == JOINED:
        tensor = torch.cat(tensors)
    elif rule == ONCE:
        tensor = _agreed(key, parts).tensor
    elif rule == BOUNDED:
        tensor = _bound(tensors)
    else:
        tensor = folded(tensors, _FOLDS[rule])
    return RankValue(who=parts[0].who, tensor=tensor, channels=sum(part.channels for part in parts))


def _in_place(key: Key, parts: Sequence[RankValue]) -> RankValue:
    """Channels that lie apart, in their order; those that several ranks have are taken once."""
    places = [
        torch.cat([torch.arange(first, first + count) for first, count in part.runs])
        for part in parts
    ]
    held = torch.tensor(sorted(set(torch.cat(places).tolist())))
    tensor = parts[0].tensor.new_empty(len(held))
    for part, place in zip(reversed(parts), reversed(places), strict=True):
        tensor[torch.searchsorted(held, place)] = part.tensor
    for part, place in zip(parts, places, strict=True):
        first = parts[0]._replace(tensor=tensor[torch.searchsorted(held, place)])
        _agreed(key, [first, part])
    return RankValue(who=parts[0].who, tensor=tensor, channels=len(held))


def _bound(summands: Sequence[Tensor]) -> Tensor:
    """The sum of extremes in float32, away from zero where it has to be rounded."""
    exact = torch.stack(list(summands)).double().sum(dim=0)
    rounded = exact.float()
    short = rounded.double().abs() < exact.abs()
    return torch.where(short, torch.nextafter(rounded, exact.sign().float() * torch.inf), rounded)


def _agreed(key: Key, values: Sequence[RankValue]) -> RankValue:
    """The first of values that have to be equal, since they are statistics of the same numbers."""
    first = values[0]
    for other in values[1:]:
        if torch.equal(first.tensor, other.tensor):
            continue
        if first.tensor.shape != other.tensor.shape:
            ours = str(list(first.tensor.shape))
            theirs = str(list(other.tensor.shape))
            entry = ""
        else:
            apart = (first.tensor.double() - other.tensor.double()).abs()
            float_sum = statistic_named(key.statistic).is_sum and first.tensor.is_floating_point()
            if float_sum and apart.max() <= TOLERANCE * first.tensor.abs().max():
                continue
            worst = int(apart.argmax())
            ours, theirs = (str(value.tensor.flatten()[worst].item()) for value in (first, other))
            entry = f"[{worst}]" if first.tensor.ndim else ""
        raise StatisticsError(
            f"{other.who}: {key}{entry} is {theirs}, {ours} on {first.who}, which saw the same",
            _AGAIN,
        )
    return first


def _refuse_unusable(key: Key, values: Sequence[RankValue]) -> None:
    """Refuse values of another dtype or shape than they must have, NaN, Inf and the wrong sign."""
    dtype = values[0].tensor.dtype
    statistic = statistic_named(key.statistic)
    shapes = {
        channels: statistic.shape(channels) for channels in {value.channels for value in values}
    }
    for value in values:
        shape = shapes[value.channels]
        if value.tensor.shape != shape or value.tensor.dtype != dtype:
            raise StatisticsError(
                f"{value.who}: {key} is {value.tensor.dtype} {list(value.tensor.shape)}, {dtype} "
                f"{list(shape)} is expected",
                _AGAIN,
            )
    # All at once, because that is faster than one by one; but not matrices, of which a copy may not
    # fit into memory.
    if not statistic.is_matrix:
        tensors = [value.tensor for value in values]
        if _fault(statistic, torch.cat(tensors) if shape else torch.stack(tensors)) is None:
            return
    for value in values:
        fault = _fault(statistic, value.tensor)
        if fault is not None:
            raise StatisticsError(f"{value.who}: {key} holds {fault}", _AGAIN)


def _fault(statistic: Statistic, tensor: Tensor) -> str | None:
    """The fault of a value that this statistic cannot have, or None."""
    if not tensor.numel():
        return None
    low, high = (end.item() for end in torch.aminmax(tensor))
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"{int(tensor.isnan().sum())} NaN and {int(tensor.isinf().sum())} Inf"
    if statistic.diagonal is not None:
        low = statistic.diagonal(tensor).min().item()
        return f"{low} on its diagonal, which is at least 0" if low < 0 else None
    if statistic.negative:
        return f"{high}, it is at most 0" if high > 0 else None
    return f"{low}, it is at least 0" if low < 0 else None

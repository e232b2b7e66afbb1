"""Statistics: how one is folded over ranks, joined and cut over cards, and what every observer checks of its own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from quantflow.errors import StatisticsError

# of ranks that saw other samples; written into unified measurements
LARGER, SMALLER, ADDED = "maximum", "minimum", "added"
# of cards that hold other channels of the same samples
JOINED, ONCE, FOLDED = "concatenated", "taken once", "folded"


def _alone(channels: int) -> tuple[int, ...]:
    del channels
    return ()


def per_channel(channels: int) -> tuple[int, ...]:
    """Return the shape of a statistic with one value for each channel."""
    return (channels,)


def part_of(value: Tensor, part: slice) -> Tensor:
    """Return the channels of a statistic that has one value for each.  value: [C]."""
    return value[part]


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """One tensor of an observer's state, and the algebra that others need to know of it.

    Attributes:
        name: in measurement files.
        fold: LARGER, SMALLER or ADDED: how ranks that saw other samples merge theirs.
        cards: JOINED, ONCE or FOLDED: how cards that hold other channels of the same samples merge
            theirs; None where the whole does not follow from the parts, and `remedy` says what to
            do instead.
        dtype: of the tensor.
        shape: of the tensor, from the number of channels C.
        cut: the part of some channels; None where it does not follow from the whole.
        maximum_of: the statistic whose channels this is the maximum of, so that a part has its own
            where that one is there.
        diagonal: of a matrix, the values that cannot be negative; None for any other statistic.
        negative: whether its values are at most 0, others are at least 0.
        remedy: what to do where `cards` is None.
    """

    name: str
    fold: str
    cards: str | None
    dtype: torch.dtype = torch.float32
    shape: Callable[[int], tuple[int, ...]] = _alone
    cut: Callable[[Tensor, slice], Tensor] | None = None
    maximum_of: str | None = None
    diagonal: Callable[[Tensor], Tensor] | None = None
    negative: bool = False
    remedy: str = ""

    @property
    def is_sum(self) -> bool:
        """Whether it adds up over samples; others are extremes, which a bound of theirs can stand for."""
        return self.fold == ADDED

    @property
    def is_matrix(self) -> bool:
        """Whether it is one of products of channels, which may be too large for a copy and is read by itself."""
        return self.diagonal is not None

    def nbytes(self, channels: int) -> int:
        """Return the bytes of the tensor."""
        return self.dtype.itemsize * prod(self.shape(channels))


# of every sum, and of what a router sends
COUNT = Statistic(name="count", fold=ADDED, cards=ONCE, dtype=torch.int64)


def table(*statistics: Statistic) -> Mapping[str, Statistic]:
    """Return statistics by name: what an observer's STATISTICS is."""
    return {statistic.name: statistic for statistic in statistics}


def update_bytes(features: int, samples: int) -> int:
    """Return the memory of an update that looks at magnitudes: those, and for a histogram bins of eight bytes."""
    return 3 * 4 * features * samples


def stored_bytes(statistics: Mapping[str, Statistic], channels: int) -> int:
    """Return the bytes of a state with so many channels."""
    return sum(statistic.nbytes(channels) for statistic in statistics.values())


def finite_rows(x: Tensor, features: int | None, *, observer: str) -> Tensor:
    """Return the samples of `x` one per row.  x: [..., features], any float dtype; returns [N, features] float32.

    Args:
        x: the samples; may have no elements.
        features: how many the observer was made for, or None when it does not matter.
        observer: its name, for the message.

    Raises:
        StatisticsError: x is not float, has another number of features, or holds NaN or Inf.
    """
    shape = list(x.shape)
    if not x.is_floating_point() or x.ndim == 0:
        raise StatisticsError(
            f"{observer}: {x.dtype} {shape}, expected float [..., features]", "observe activations"
        )
    if features is not None and x.shape[-1] != features:
        raise StatisticsError(
            f"{observer}: input {shape} has {x.shape[-1]} features, the observer {features}",
            "use an observer per tensor",
        )
    # [N, features]
    rows = x.detach().float().flatten(0, -2) if x.ndim > 1 else x.detach().float()[None]
    if rows.numel() and not all(torch.isfinite(end) for end in torch.aminmax(rows)):
        raise StatisticsError(
            f"{observer}: input {shape} holds {_describe_non_finite(rows)}",
            "measure in a wider dtype (bfloat16 or float32), or repair the model",
        )
    return rows


def _describe_non_finite(rows: Tensor) -> str:
    return f"{int(rows.isnan().sum())} NaN and {int(rows.isinf().sum())} Inf"


def checked_state(
    state: Mapping[str, Tensor],
    expected: Mapping[str, tuple[torch.dtype, tuple[int | None, ...]]],
    *,
    observer: str,
) -> tuple[Tensor, ...]:
    """Return the tensors of a state in the order of `expected`.

    Args:
        state: statistic name -> tensor.
        expected: statistic name -> (dtype, shape); None is a size that is free but the same
            wherever it is None.
        observer: its name, for the message.

    Raises:
        StatisticsError: a statistic is missing or superfluous, has another dtype or shape, or is
            not finite.
    """
    if set(state) != set(expected):
        raise StatisticsError(
            f"{observer}: state has {sorted(state)}, expected {sorted(expected)}", "measure again"
        )
    free: set[int] = set()
    for name, (dtype, shape) in expected.items():
        value = state[name]
        matches = value.ndim == len(shape) and all(
            want in (None, have) for want, have in zip(shape, value.shape, strict=True)
        )
        if value.dtype != dtype or not matches:
            raise StatisticsError(
                f"{observer}: {name} is {value.dtype} {list(value.shape)}, expected {dtype} "
                f"[{', '.join('n' if want is None else str(want) for want in shape)}]",
                "measure again",
            )
        free.update(have for want, have in zip(shape, value.shape, strict=True) if want is None)
        # no copy of a matrix
        if value.numel() and not all(torch.isfinite(end) for end in torch.aminmax(value)):
            raise StatisticsError(
                f"{observer}: {name} holds {_describe_non_finite(value)}", "measure again"
            )
    if len(free) > 1:
        raise StatisticsError(f"{observer}: the state has {sorted(free)} features", "measure again")
    return tuple(state[name] for name in expected)


def refuse_negative(value: Tensor, name: str, *, observer: str) -> None:
    """Refuse a statistic that cannot be below zero.

    Raises:
        StatisticsError: naming the statistic and its lowest value.
    """
    if value.numel() and value.min() < 0:
        raise StatisticsError(
            f"{observer}: {name} holds {value.min().item()}, it is at least 0", "measure again"
        )


def refuse_overflow(rows: Tensor, squares: Sequence[Tensor], *, what: str, observer: str) -> None:
    """Refuse samples whose products do not fit into a float32 sum beside what it holds.

    |s_ij| <= sqrt(s_ii s_jj): the diagonal overflows first. A sum of squares is the same within rounding as its entry.

    Args:
        rows: [N, C], the samples.
        squares: the diagonal of the sum, in parts.
        what: the samples are, for the message.
        observer: its name, likewise.

    Raises:
        StatisticsError: naming the largest value.
    """
    parts = torch.split(rows, [len(held) for held in squares], dim=1)
    finite = [
        torch.isfinite(held + 1.001 * part.square().sum(dim=0)).all()
        for part, held in zip(parts, squares, strict=True)
    ]
    if not torch.stack(finite).all():  # one answer of a device for all parts
        raise StatisticsError(
            f"{observer}: {what} up to {rows.abs().max().item():.3g}, its square exceeds float32",
            "leave the layer unquantized, or repair the model",
        )


def refuse_other_shape(mine: Sequence[int], other: Sequence[int], *, observer: str) -> None:
    """Refuse to merge statistics of tensors of different widths.

    Raises:
        StatisticsError: naming the two shapes.
    """
    if mine != other:
        raise StatisticsError(
            f"{observer}: shapes {list(mine)} and {list(other)}",
            "concatenate the shards of a sharded tensor, do not merge them",
        )

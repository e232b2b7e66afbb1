"""Statistics: how ranks and devices merge them, and the checks of every observer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import torch
from torch import Tensor

from quantflow.errors import StatisticsError

# how ranks that saw other samples merge; written into unified measurements
LARGER, SMALLER, ADDED = "maximum", "minimum", "added"
# how cards that hold other channels of the same samples merge
JOINED, ONCE, FOLDED = "concatenated", "taken once", "folded"


def _alone(channels: int) -> tuple[int, ...]:
    del channels
    return ()


def per_channel(channels: int) -> tuple[int, ...]:
    """The shape of a statistic with one value for each channel."""
    return (channels,)


def part_of(value: Tensor, part: slice) -> Tensor:
    """Some channels of a statistic [C] that has one value for each."""
    return value[part]


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """One tensor of an observer's state, and the rules to merge and cut it.

    Attributes:
        name: key in measurement files.
        fold: LARGER, SMALLER or ADDED: how ranks that saw other samples merge theirs.
        cards: JOINED, ONCE or FOLDED: how cards that hold other channels of the same samples merge
            theirs. None where the whole does not follow from the parts; `remedy` then says what to
            do instead.
        dtype: dtype of the tensor.
        shape: number of channels C -> shape of the tensor.
        cut: tensor and channels -> their part of it; None where the part does not follow from the
            whole.
        maximum_of: name of the statistic whose maximum over channels this is, so that a part has
            its own where that one is there.
        diagonal: matrix -> its values that cannot be negative; None for a statistic that is no
            matrix.
        negative: whether its values are at most 0; others are at least 0.
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
        """Whether it adds up over samples.

        Others are extremes, which a bound of theirs can stand for.
        """
        return self.fold == ADDED

    @property
    def is_matrix(self) -> bool:
        """Whether it holds products of channels.

        It may be too large for a copy and is read by itself.
        """
        return self.diagonal is not None

    def nbytes(self, channels: int) -> int:
        """The bytes of the tensor."""
        return self.dtype.itemsize * prod(self.shape(channels))


# number of samples beside every sum, and of the tokens that a router sends to an expert
COUNT = Statistic(name="count", fold=ADDED, cards=ONCE, dtype=torch.int64)


def table(*statistics: Statistic) -> Mapping[str, Statistic]:
    """Statistics by name: an observer's STATISTICS."""
    return {statistic.name: statistic for statistic in statistics}


def update_bytes(features: int, samples: int) -> int:
    """The bytes of an update that reads magnitudes, and for a histogram its bins of eight bytes."""
    return 3 * 4 * features * samples


def stored_bytes(statistics: Mapping[str, Statistic], channels: int) -> int:
    """The bytes of a state of this many channels."""
    return sum(statistic.nbytes(channels) for statistic in statistics.values())


def finite_rows(x: Tensor, features: int | None, *, observer: str) -> Tensor:
    """The samples of `x` one per row, [N, features] float32.

    Args:
        x: samples, [..., features], any float dtype; may have no elements.
        features: the observer's number of features; None accepts any.
        observer: observer's name, for the message.

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
    """The tensors of a state in the order of `expected`.

    Args:
        state: statistic name -> tensor.
        expected: statistic name -> (dtype, shape); None is a size that is free but the same
            wherever it is None.
        observer: observer's name, for the message.

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
        # aminmax makes no copy, which a matrix may be too large for
        if value.numel() and not all(torch.isfinite(end) for end in torch.aminmax(value)):
            raise StatisticsError(
                f"{observer}: {name} holds {_describe_non_finite(value)}", "measure again"
            )
    if len(free) > 1:
        raise StatisticsError(f"{observer}: the state has {sorted(free)} features", "measure again")
    return tuple(state[name] for name in expected)


def refuse_negative(value: Tensor, name: str, *, observer: str) -> None:
    """Refuse a statistic that holds a value below zero.

    Raises:
        StatisticsError: naming the statistic and its lowest value.
    """
    if value.numel() and value.min() < 0:
        raise StatisticsError(
            f"{observer}: {name} holds {value.min().item()}, it is at least 0", "measure again"
        )


def refuse_overflow(rows: Tensor, squares: Sequence[Tensor], *, what: str, observer: str) -> None:
    """Refuse samples whose products would overflow a float32 sum.

    |s_ij| <= sqrt(s_ii s_jj), so the diagonal overflows first. A sum of squares equals the diagonal
    within rounding.

    Args:
        rows: [N, C], the samples.
        squares: the diagonal of the sum so far, in parts.
        what: noun for the samples, for the message.
        observer: observer's name, for the message.

    Raises:
        StatisticsError: naming the largest value.
    """
    parts = torch.split(rows, [len(held) for held in squares], dim=1)
    finite = [
        torch.isfinite(held + 1.001 * part.square().sum(dim=0)).all()
        for part, held in zip(parts, squares, strict=True)
    ]
    if not torch.stack(finite).all():  # one synchronisation of a device for all parts
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


def bound_of_sum(maxima: Iterable[float]) -> Tensor:
    """A bound of a sum by the largest magnitudes of its summands, [1, 1], rounded up."""
    # exact, whatever lies between the summands
    total = sum(map(Fraction, maxima), Fraction(0))
    bound = torch.tensor([[float(total)]], dtype=torch.float32)
    return (
        bound
        if Fraction(bound.item()) >= total
        else torch.nextafter(bound, torch.full_like(bound, torch.inf))
    )

"""Smoothing: factors that move from a linear's input into its weight.

    x @ W.T  =  (x / s) @ (W * s).T

The division is folded into the module that x comes from, so the model computes the same function
with no extra step. A norm multiplies by weights of its own, which are divided. A linear that x is a
multiple of, channel by channel, has its rows divided.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantflow.core.result import JSON
from quantflow.core.scheme import LinearScheme
from quantflow.errors import InputError, StatisticsError

# Beyond four decades a channel is damaged rather than large, and float16 norms run out of
# exponents.
SMALLEST, LARGEST = 1e-4, 1e4

_DIVIDED = ("channel_amax", "min_val", "max_val", "abs_sum", "rows", "seen_min", "seen_max")
_DERIVED_OR_DROPPED = ("amax", "counts")


@dataclass(frozen=True, kw_only=True)
class Absorber:
    """The norm or linear that a fold's input is divided in.

    Attributes:
        norm_weight: [I], in its stored dtype; the norm multiplies by it (not by 1 + it). None for a
            linear.
        repeats: number of the input's heads that come from one head of the linear's output; these
            share their factors.
        head_dim: features of a head.
        exact: whether the linear has values stored in fewer bits than they are computed in, such as
            a bias. Factors are then powers of two, which round nothing.
    """

    norm_weight: Tensor | None = None
    repeats: int = 1
    head_dim: int = 1
    exact: bool = False

    def shared(self, values: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Values [I] in which those that share a factor are reduced to one.

        `reduce` works along dimension 1 of [heads, repeats, head_dim].
        """
        split = values.reshape(-1, self.repeats, self.head_dim)  # [heads, repeats, head_dim]
        return reduce(split)[:, None].expand_as(split).reshape(-1)  # [I]

    def divisors(self, factors: Tensor) -> Tensor:
        """The divisor of each of the absorber's outputs, [I / repeats], from shared factors [I]."""
        return factors.reshape(-1, self.repeats, self.head_dim)[:, 0].reshape(-1)  # [I / repeats]


@dataclass(frozen=True, kw_only=True)
class Fold:
    """Linears that share an input, and the absorber of their factors.

    Attributes:
        weights: name -> [O, I], float; not modified.
        schemes: name -> scheme of the quantized weight.
        scale_dtypes: name -> dtype in which its layout stores scales.
        statistics: statistics of the input, by name; `rows` are some of its rows, [R, I], and
            `seen_min` and `seen_max` [I] its range in other text than theirs.
        absorber: the norm or linear before them.
    """

    weights: Mapping[str, Tensor]
    schemes: Mapping[str, LinearScheme]
    scale_dtypes: Mapping[str, torch.dtype]
    statistics: Mapping[str, Tensor]
    absorber: Absorber

    @property
    def features(self) -> int:
        """The number of channels of the input.

        Raises:
            InputError: the fold is empty, or its linears read inputs of different widths.
        """
        if not self.weights:
            raise InputError(
                "transforms: the fold has no linears",
                "fold at least one linear that reads the norm",
            )
        norm = self.absorber.norm_weight
        features = next(iter(self.weights.values())).shape[-1] if norm is None else norm.shape[0]
        for name, weight in self.weights.items():
            if weight.ndim != 2 or weight.shape[1] != features:
                raise InputError(
                    f"{name}: weight is {list(weight.shape)}, its input has {features} features",
                    "fold only linears that read the norm's output",
                )
        return features

    def statistic(self, name: str, shape: tuple[int | None, ...]) -> Tensor:
        """A statistic of the input.

        Args:
            name: statistic's name.
            shape: required shape; None is a size that is free, but not 0.

        Raises:
            StatisticsError: the statistic is missing or has another shape.
        """
        value = self.statistics.get(name)
        linear = next(iter(self.weights))
        if value is None:
            raise StatisticsError(
                f"{linear}|input|{name}: the measurement does not hold it",
                f"measure again with --stats that include {name}",
            )
        expected_shape = tuple(
            size
            for size, wanted in zip(value.shape, shape, strict=False)
            if wanted is not None or size == 0
        )
        if value.ndim != len(shape) or expected_shape != tuple(
            size for size in shape if size is not None
        ):
            raise StatisticsError(
                f"{linear}: {name} is {list(value.shape)}, the fold needs {list(shape)}",
                "measure with this model",
            )
        return value


@dataclass(frozen=True, kw_only=True)
class Smoothing:
    """The factors of a fold and their counterparts in the absorber.

    Attributes:
        factors: [I] float32, positive; the linears' columns are multiplied by them, their input is
            divided by them.
        divisors: [I / repeats], divisors of the absorber's outputs: the factors, or where heads
            share them one of each.
        norm_weight: [I], the norm's new weight in its stored dtype; norm_weight * factors is the
            old weight. None for a linear.
    """

    factors: Tensor
    divisors: Tensor
    norm_weight: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A transform's decision about a fold.

    Attributes:
        smoothing: factors to apply; None leaves the fold as it is.
        decisions: numbers behind the decision, for the record.
    """

    smoothing: Smoothing | None
    decisions: dict[str, JSON]


def fitted(wanted: Tensor, *, absorber: Absorber, carries: Tensor) -> Smoothing:
    """The factors nearest to the wanted ones that the absorber can hold.

    A norm is stored in its own dtype, often bfloat16, so its new weight is rounded first and the
    factors follow from the rounded weight. A channel keeps factor 1 when it carries nothing, when
    its norm weight is zero, and when the new norm weight would leave the normal range of the dtype.

    Args:
        wanted: [I], positive where `carries`; equal where the absorber shares factors.
        absorber: the fold's absorber.
        carries: [I] bool, channels whose values are not all zero.
    """
    wanted = wanted.clamp(SMALLEST, LARGEST).float()
    norm_weight = absorber.norm_weight
    if norm_weight is None:
        if absorber.exact:
            wanted = torch.exp2(torch.log2(wanted).round())
        factors = torch.where(carries, wanted, torch.ones_like(wanted))
        return Smoothing(factors=factors, divisors=absorber.divisors(factors))
    new = (norm_weight.float() / wanted).to(norm_weight.dtype)
    usable = carries & torch.isfinite(new) & (new.abs() >= torch.finfo(new.dtype).tiny)
    new = torch.where(usable, new, norm_weight)
    factors = torch.where(usable, norm_weight.float() / new.float(), torch.ones_like(wanted))
    return Smoothing(factors=factors, divisors=factors, norm_weight=new)


def apply_(absorber: nn.Module, linears: Iterable[nn.Linear], *, smoothing: Smoothing) -> None:
    """Fold `smoothing` into an absorber and the linears that read it, in place.

    Args:
        absorber: a norm with `weight` [I], or a linear with `weight` [C, K]; a `bias` is divided
            too.
        linears: each with weight [O, I]; the product is rounded to the weight's dtype.
        smoothing: a transform's factors for this fold.
    """
    with torch.no_grad():
        weight, bias = absorber.get_parameter("weight"), getattr(absorber, "bias", None)
        if smoothing.norm_weight is not None:
            weight.copy_(smoothing.norm_weight)
        else:
            weight.copy_(weight.float() / smoothing.divisors[:, None])
        if bias is not None:
            bias.copy_(bias.float() / smoothing.divisors)
        for linear in linears:
            linear.weight.copy_(linear.weight.float() * smoothing.factors)


def apply_again_(weight: Tensor, *, columns: Tensor | None, divisors: Tensor | None) -> None:
    """Apply all folds of a linear to its original weight at once, in place.

    The result is (weight / divisors[:, None]) * columns.

    Args:
        weight: [O, I] float32.
        columns: [I], the product of the factors of the linear's input; None where none was folded.
        divisors: [O], the product of the divisors of its output; None where none was folded.
    """
    if divisors is not None:
        weight.div_(divisors[:, None])
    if columns is not None:
        weight.mul_(columns)


def smooth_statistics(stats: Mapping[str, Tensor], factors: Tensor) -> dict[str, Tensor]:
    """The statistics of a fold's input as a measurement after smoothing would have them.

    amax is taken again from the channels. A histogram cannot be divided per channel and is dropped,
    as is an amax without channels. Shapes and dtypes stay.

    Args:
        stats: statistic name -> tensor, all of one input; not modified.
        factors: [I].

    Raises:
        StatisticsError: a statistic has no smoothing rule.
    """
    smoothed: dict[str, Tensor] = {}
    for name, value in stats.items():
        if name in _DIVIDED:
            smoothed[name] = value / factors
        elif name == "hessian_sum":
            smoothed[name] = value / factors[:, None].to(value.dtype) / factors.to(value.dtype)
        elif name == "count":
            smoothed[name] = value
        elif name not in _DERIVED_OR_DROPPED:
            raise StatisticsError(
                f"smoothing: statistic {name} has no rule for it", "measure without it"
            )
    if "amax" in stats and "channel_amax" in smoothed:
        smoothed["amax"] = smoothed["channel_amax"].amax()
    elif "amax" in stats and "min_val" in smoothed and "max_val" in smoothed:
        smoothed["amax"] = torch.maximum(smoothed["max_val"], -smoothed["min_val"]).amax()
    return smoothed


def column_amax(weights: Mapping[str, Tensor], *, features: int) -> Tensor:
    """The largest magnitude of each input channel over all linears, [I] float32.

    Raises:
        InputError: a weight holds NaN or Inf.
    """
    first = next(iter(weights.values()), None)
    amax = torch.zeros(features, device=None if first is None else first.device)
    for name, weight in weights.items():
        of_columns = weight.abs().amax(dim=0).float()
        if not torch.isfinite(of_columns).all():
            raise InputError(
                f"{name}: weight holds NaN or Inf", "the checkpoint is damaged; download it again"
            )
        amax = torch.maximum(amax, of_columns)
    return amax

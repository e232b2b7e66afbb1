"""Factors that move between what a linear reads and its weight: what transforms that smooth have in common.

    x @ W.T  =  (x / s) @ (W * s).T

The division is folded into what x comes from, so the model computes the same function with no extra
step: a norm multiplies by weights of its own, which are divided; a linear that x is a multiple of,
channel by channel, has its rows divided.
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
    """What the factors of a fold are divided out of: a norm, or a linear.

    Attributes:
        norm_weight: [I], in the dtype in which it is stored; the norm multiplies by it (not by 1 +
            it). None for a linear.
        repeats: how many heads of the fold's input come from one head of the linear's output; these
            share their factors.
        head_dim: features of a head.
        exact: the linear has values that are stored in fewer bits than they are computed in, such
            as a bias: factors are powers of two, by which nothing is rounded.
    """

    norm_weight: Tensor | None = None
    repeats: int = 1
    head_dim: int = 1
    exact: bool = False

    def shared(self, values: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Return values [I] of which those that share a factor are reduced to one, along dimension 1 of three."""
        split = values.reshape(-1, self.repeats, self.head_dim)  # [heads, repeats, head_dim]
        return reduce(split)[:, None].expand_as(split).reshape(-1)  # [I]

    def divisors(self, factors: Tensor) -> Tensor:
        """Return what each of the absorber's outputs is divided by, [I / repeats], from factors that are shared."""
        return factors.reshape(-1, self.repeats, self.head_dim)[:, 0].reshape(-1)  # [I / repeats]


@dataclass(frozen=True, kw_only=True)
class Fold:
    """Linears that share an input, and what it comes from.

    Attributes:
        weights: name -> [O, I], float; not modified.
        schemes: name -> how it will be quantized.
        scale_dtypes: name -> the dtype in which its layout stores scales.
        statistics: of the input, by their names; `rows` are some of its rows, [R, I], and
            `seen_min` and `seen_max` [I] its range in other text than theirs.
    """

    weights: Mapping[str, Tensor]
    schemes: Mapping[str, LinearScheme]
    scale_dtypes: Mapping[str, torch.dtype]
    statistics: Mapping[str, Tensor]
    absorber: Absorber

    @property
    def features(self) -> int:
        """How many channels the input has.

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
                    f"{name}: weight is {list(weight.shape)}, what it reads has {features} features",
                    "fold only linears that read the norm's output",
                )
        return features

    def statistic(self, name: str, shape: tuple[int | None, ...]) -> Tensor:
        """Return a statistic of the input.

        Args:
            name: of the statistic.
            shape: that it must have; None is a size that is free, but not 0.

        Raises:
            StatisticsError: it is missing or has another shape.
        """
        value, linear = self.statistics.get(name), next(iter(self.weights))
        if value is None:
            raise StatisticsError(
                f"{linear}|input|{name}: the measurement does not hold it",
                f"measure again with --stats that include {name}",
            )
        known = tuple(
            size
            for size, wanted in zip(value.shape, shape, strict=False)
            if wanted is not None or size == 0
        )
        if value.ndim != len(shape) or known != tuple(size for size in shape if size is not None):
            raise StatisticsError(
                f"{linear}: {name} is {list(value.shape)}, the fold needs {list(shape)}",
                "measure with this model",
            )
        return value


@dataclass(frozen=True, kw_only=True)
class Smoothing:
    """What a fold needs.

    Attributes:
        factors: [I] float32, positive; the linears' columns are multiplied by them, what they read
            is divided by them.
        divisors: what the absorber's outputs are divided by: the factors, or for shared heads one
            of each.
        norm_weight: [I], the norm's new weight in its stored dtype; norm_weight * factors is the
            old weight. None for a linear.
    """

    factors: Tensor
    divisors: Tensor
    norm_weight: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a transform decided about a fold.

    Attributes:
        smoothing: None leaves the fold as it is.
        decisions: for the record.
    """

    smoothing: Smoothing | None
    decisions: dict[str, JSON]


def fitted(wanted: Tensor, *, absorber: Absorber, carries: Tensor) -> Smoothing:
    """Return the factors nearest to those wanted that the absorber can hold.

    A norm is stored in its own dtype, often bfloat16, so its new weight is rounded first and the
    factors are what it was really divided by. A channel keeps factor 1 when it carries nothing,
    when its norm weight is zero, and when the new norm weight would leave the normal range of the
    dtype.

    Args:
        wanted: [I], positive where `carries`; shared as the absorber shares.
        absorber: of the fold.
        carries: [I] bool.
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
    """Fold `smoothing` into an absorber and the linears that read it; modifies their weights in place.

    Args:
        absorber: a norm with `weight` [I], or a linear with `weight` [C, K]; maybe with `bias`,
            which is divided too.
        linears: each weight [O, I]; the product is rounded to the weight's dtype.
        smoothing: what a transform made for them.
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
    """Make of a linear's weight what all folds together made of it: (weight / divisors[:, None]) * columns, in place.

    Args:
        weight: [O, I] float32.
        columns: [I], the product of the factors of what it reads; None where nothing was folded
            there.
        divisors: [O], that of the divisors of what it puts out, likewise.
    """
    if divisors is not None:
        weight.div_(divisors[:, None])
    if columns is not None:
        weight.mul_(columns)


def smooth_statistics(stats: Mapping[str, Tensor], factors: Tensor) -> dict[str, Tensor]:
    """Return the statistics of a fold's input as they would have been measured after smoothing.

    amax is taken again from the channels; a histogram cannot be divided per channel and is dropped,
    as is an amax without channels. Shapes and dtypes stay.

    Args:
        stats: statistic name -> tensor, of one input; not modified.
        factors: [I].

    Raises:
        StatisticsError: a statistic whose smoothing is unknown.
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
    """Return the largest magnitude of each input channel over all linears, [I] float32.

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

"""SmoothQuant: move the size of outlier channels from a linear's input into its weight.

    x @ W.T  =  (x / s) @ (W * s).T        s_j = amax_x_j ** alpha / amax_w_j ** (1 - alpha)

The division is folded into the norm in front of the linears: the model computes the same function with no extra step.
amax_x_j is the largest magnitude of input channel j, amax_w_j that of column j over all linears of the fold.
Source: Xiao et al. 2022, arXiv:2211.10438, section 4, equation 4.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantflow.errors import InputError, StatisticsError, UsageError

NEEDS: tuple[str, ...] = ("channel_amax",)
# Beyond four decades a channel is damaged rather than large, and float16 norms run out of exponents.
SMALLEST, LARGEST = 1e-4, 1e4

_DIVIDED = ("channel_amax", "min_val", "max_val", "abs_sum")
_DERIVED_OR_DROPPED = ("amax", "counts")


@dataclass(frozen=True, kw_only=True)
class Smoothing:
    """What a fold needs: the factors, and the norm that already holds them.

    Attributes:
        factors: [I] float32, positive; the linears' columns are multiplied by them, what they read is divided by them.
        norm_weight: [I], the norm's new weight in its stored dtype; norm_weight * factors is the old weight.
    """

    factors: Tensor
    norm_weight: Tensor


def solve(fold_weights: Mapping[str, Tensor], *, input_amax: Tensor, norm_weight: Tensor, alpha: float) -> Smoothing:
    """Choose the factors of one fold.

    The norm is stored in its own dtype, often bfloat16, so the new norm weight is rounded first and the factors are
    what it was really divided by. A channel keeps factor 1 when its input or its columns are all zero, when its norm
    weight is zero, and when the new norm weight would leave the normal range of the dtype.

    Args:
        fold_weights: name -> [O, I], the linears that read the norm's output; not modified.
        input_amax: [I], the largest magnitude of each channel of that output.
        norm_weight: [I], in the dtype in which it is stored; the norm multiplies by it (not by 1 + it).
        alpha: how much of the difficulty moves, 0 (weights keep theirs) to 1 (all of the input's).

    Raises:
        UsageError: alpha is outside 0..1.
        InputError: the fold is empty, a weight has another number of input features, or is not finite.
        StatisticsError: input_amax has another shape, is negative or not finite.
    """
    if not 0 <= alpha <= 1:
        raise UsageError(f"smoothquant: alpha={alpha} is outside 0..1", "choose alpha between 0 and 1, usually 0.5")
    if not fold_weights:
        raise InputError("smoothquant: the fold has no linears", "fold at least one linear that reads the norm")
    if input_amax.shape != norm_weight.shape:
        raise StatisticsError(
            f"smoothquant: channel_amax is {list(input_amax.shape)}, the norm is {list(norm_weight.shape)}",
            "measure with this model",
        )
    if not (torch.isfinite(input_amax) & (input_amax >= 0)).all():
        raise StatisticsError("smoothquant: channel_amax holds a negative value, NaN or Inf", "measure again")
    amax_x = input_amax.double()
    amax_w = _column_amax(fold_weights, features=norm_weight.shape[0]).double()
    wanted = (amax_x**alpha / amax_w ** (1 - alpha)).clamp(SMALLEST, LARGEST).float()
    new = (norm_weight.float() / wanted).to(norm_weight.dtype)
    usable = (amax_x > 0) & (amax_w > 0) & torch.isfinite(new) & (new.abs() >= torch.finfo(new.dtype).tiny)
    new = torch.where(usable, new, norm_weight)
    factors = torch.where(usable, norm_weight.float() / new.float(), torch.ones_like(wanted))
    return Smoothing(factors=factors, norm_weight=new)


def apply_(norm: nn.Module, linears: Iterable[nn.Linear], *, smoothing: Smoothing) -> None:
    """Fold `smoothing` into a norm and the linears that read it; modifies their weights in place.

    Args:
        norm: has `weight` [I] and maybe `bias` [I], which is divided too and rounded to its dtype.
        linears: each weight [O, I]; the product is rounded to the weight's dtype.
        smoothing: the result of `solve` for them.
    """
    with torch.no_grad():
        norm.get_parameter("weight").copy_(smoothing.norm_weight)
        bias = getattr(norm, "bias", None)
        if bias is not None:
            bias.copy_(bias.float() / smoothing.factors)
        for linear in linears:
            linear.weight.copy_(linear.weight.float() * smoothing.factors)


def smooth_statistics(stats: Mapping[str, Tensor], factors: Tensor) -> dict[str, Tensor]:
    """Return the statistics of a fold's input as they would have been measured after smoothing.

    amax is taken again from the channels; a histogram cannot be divided per channel and is dropped, as is an amax
    without channels. Shapes and dtypes stay.

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
            raise StatisticsError(f"smoothquant: statistic {name} has no rule for smoothing", "measure without it")
    if "amax" in stats and "channel_amax" in smoothed:
        smoothed["amax"] = smoothed["channel_amax"].amax()
    elif "amax" in stats and "min_val" in smoothed and "max_val" in smoothed:
        smoothed["amax"] = torch.maximum(smoothed["max_val"], -smoothed["min_val"]).amax()
    return smoothed


def _column_amax(fold_weights: Mapping[str, Tensor], *, features: int) -> Tensor:
    """Return the largest magnitude of each input channel over all linears, [I] float32."""
    amax = torch.zeros(features)
    for name, weight in fold_weights.items():
        if weight.ndim != 2 or weight.shape[1] != features:
            raise InputError(
                f"{name}: weight is {list(weight.shape)}, the norm has {features} features",
                "fold only linears that read the norm's output",
            )
        column_amax = weight.float().abs().amax(dim=0)
        if not torch.isfinite(column_amax).all():
            raise InputError(f"{name}: weight holds NaN or Inf", "the checkpoint is damaged; download it again")
        amax = torch.maximum(amax, column_amax)
    return amax

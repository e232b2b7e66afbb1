"""The scale of a static input, from its calibration statistics."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quantflow.core import affine
from quantflow.core.scheme import TensorScheme
from quantflow.errors import SchemeError, StatisticsError

# clips that `least_error_reach` tries, as fractions of the largest magnitude: 1 to 1/16
_ENDS = tuple(step / 64 for step in range(64, 3, -1))


def static_input(
    statistics: Mapping[str, Tensor], scheme: TensorScheme
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of a static per-tensor input, or the global scale of an e4m3-scaled one.

    An input that calibration never reached has scale 1 (and a zero point for the range 0..0);
    `unseen` recognises it.

    Args:
        statistics: `amax` [] for a symmetric scheme; `min_val` and `max_val`, [] or [C], for an
            asymmetric one.
        scheme: static, per_tensor; or dynamic with scale_format e4m3.

    Returns:
        input_scale: [1] float32, positive; input_zero_point: [1] int8, None when symmetric.

    Raises:
        SchemeError: the scheme is dynamic or not per_tensor.
        StatisticsError: a statistic is missing, not finite, negative (amax), or min_val is above
            max_val.
    """
    if scheme.scale_format == "e4m3":
        return affine.global_scale_from_amax(_amax(statistics), scheme), None
    if scheme.dynamic or scheme.granularity != "per_tensor":
        raise SchemeError(
            f"input scheme with dynamic={scheme.dynamic}, granularity={scheme.granularity!r}",
            "a stored input scale is static and per_tensor",
        )
    if scheme.symmetric:
        return affine.scale_from_amax(_amax(statistics).reshape(1), scheme), None
    low = _finite(statistics, "min_val").min().reshape(1)
    high = _finite(statistics, "max_val").max().reshape(1)
    if low > high:
        raise StatisticsError(
            f"input: min_val {low.item()} is above max_val {high.item()}", "measure again"
        )
    return affine.scale_and_zero_point_from_range(low, high, scheme)


def _amax(statistics: Mapping[str, Tensor]) -> Tensor:
    amax = _finite(statistics, "amax").max()
    if amax < 0:
        raise StatisticsError(
            f"input: amax is {amax.item()}, a magnitude is not negative", "measure again"
        )
    return amax


def clipped(statistics: Mapping[str, Tensor], reach: float) -> dict[str, Tensor]:
    """Statistics whose ranges are clipped to -reach..reach."""
    limited = dict(statistics)
    if "amax" in limited:
        limited["amax"] = limited["amax"].clamp_max(reach)
    for name in limited.keys() & {"min_val", "max_val"}:
        limited[name] = limited[name].clamp(-reach, reach)
    return limited


def least_error_reach(
    statistics: Mapping[str, Tensor], scheme: TensorScheme, *, magnitudes: Tensor, counts: Tensor
) -> float:
    """The end of a range that rounds the measured values with the least squared error.

    The ends `_ENDS` of the largest magnitude are tried; of equal ones the widest is taken. Of an
    asymmetric range all values are counted on its longer side: the shorter side is not clipped
    before the longer one is as short.

    Args:
        statistics: those that `static_input` reads.
        scheme: static, per_tensor.
        magnitudes: [P], ascending, points that stand for the measured values; those beyond the
            largest magnitude do not count.
        counts: [P], number of values at each point.

    Raises:
        SchemeError: the scheme is dynamic or not per_tensor.
        StatisticsError: `static_input` refuses the statistics.
    """
    sides = [statistics[name].max() for name in ("amax", "max_val") if name in statistics]
    sides += [-statistics["min_val"].min()] if "min_val" in statistics else []
    largest = max(float(side) for side in sides) if sides else 0.0
    negative = not scheme.symmetric and float(-statistics["min_val"].min()) == largest
    inside = magnitudes <= largest
    values = magnitudes[inside] * (-1 if negative else 1)
    weights = counts[inside].double()
    best = largest
    least = None
    for share in _ENDS:
        scale, zero_point = static_input(clipped(statistics, share * largest), scheme)
        error = affine.fake_quantize(values, scale, zero_point, scheme).double() - values.double()
        loss = float((error.square() * weights).sum())
        if least is None or loss < least:
            best, least = share * largest, loss
    return best


def unseen(statistics: Mapping[str, Tensor]) -> bool:
    """Whether calibration saw only zeros of this input, or nothing at all."""
    known = [statistics[name] for name in ("amax", "min_val", "max_val") if name in statistics]
    return bool(known) and not any(value.any() for value in known)


def _finite(statistics: Mapping[str, Tensor], name: str) -> Tensor:
    value = statistics.get(name)
    if value is None:
        raise StatisticsError(f"input: statistic {name} is missing", f"measure with --stats {name}")
    if value.numel() == 0 or not torch.isfinite(value).all():
        raise StatisticsError(
            f"input: {name} {list(value.shape)} is empty or holds NaN or Inf", "measure again"
        )
    return value

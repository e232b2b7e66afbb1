"""The scale of a static input, from what calibration saw of it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quantflow.core import affine
from quantflow.core.scheme import TensorScheme
from quantflow.errors import SchemeError, StatisticsError

# of the largest magnitude that are tried: 1 to 1/16
_ENDS = tuple(step / 64 for step in range(64, 3, -1))


def static_input(
    statistics: Mapping[str, Tensor], scheme: TensorScheme
) -> tuple[Tensor, Tensor | None]:
    """Return (input_scale, input_zero_point) of a static per-tensor input, or the global_scale of one with scales in e4m3.

    An input that calibration never reached has scale 1 (and a zero_point for the range 0..0);
    `unseen` tells.

    Args:
        statistics: `amax` [] for a symmetric scheme; `min_val` and `max_val`, [] or [C], for an
            asymmetric one.
        scheme: static, per_tensor; or dynamic with scale_format e4m3.

    Returns:
        input_scale: [1] float32, positive; input_zero_point: [1] int8, None when symmetric.

    Raises:
        SchemeError: the scheme is dynamic or not per_tensor.
        StatisticsError: a statistic is missing, not finite, negative (amax), or the range is upside
            down.
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
    """Return statistics whose ranges end at `reach` in both directions, where they go beyond."""
    found = dict(statistics)
    if "amax" in found:
        found["amax"] = found["amax"].clamp_max(reach)
    for name in found.keys() & {"min_val", "max_val"}:
        found[name] = found[name].clamp(-reach, reach)
    return found


def least_error_reach(
    statistics: Mapping[str, Tensor], scheme: TensorScheme, *, magnitudes: Tensor, counts: Tensor
) -> float:
    """Return where a range has to end so that what was seen is rounded with the least squared error.

    The ends that are tried are `_ENDS` of the largest magnitude; of equal ones the widest is taken.
    Of an asymmetric range all values are counted on its longer side: the shorter one is not cut
    before that is as short.

    Args:
        statistics: as `static_input` reads them.
        scheme: static, per_tensor.
        magnitudes: [P], ascending, what stands for the values that were seen; those beyond the
            largest do not count.
        counts: [P], how many there were of each.

    Raises:
        SchemeError, StatisticsError: as `static_input`.
    """
    sides = [statistics[name].max() for name in ("amax", "max_val") if name in statistics]
    sides += [-statistics["min_val"].min()] if "min_val" in statistics else []
    largest = max(float(side) for side in sides) if sides else 0.0
    negative = not scheme.symmetric and float(-statistics["min_val"].min()) == largest
    inside = magnitudes <= largest
    values, weights = magnitudes[inside] * (-1 if negative else 1), counts[inside].double()
    best, least = largest, None
    for share in _ENDS:
        scale, zero_point = static_input(clipped(statistics, share * largest), scheme)
        error = affine.fake_quantize(values, scale, zero_point, scheme).double() - values.double()
        loss = float((error.square() * weights).sum())
        if least is None or loss < least:
            best, least = share * largest, loss
    return best


def unseen(statistics: Mapping[str, Tensor]) -> bool:
    """Return whether calibration saw nothing but zeros of this input (or nothing at all)."""
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

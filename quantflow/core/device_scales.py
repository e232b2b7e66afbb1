"""Gaudi's float8: its values on each device, and the scales that Intel's toolkit derives for them.

    raw scale   s = amax / (largest * backoff)
    POW2        2 ** ceil(log2 s)
    HW          the smallest scale that the device applies for free and that is not below POW2(s),
                or its largest

| device | float8            | largest | scales that cost nothing      |
|--------|-------------------|---------|-------------------------------|
| gaudi2 | e4m3fn's codes    | 240     | 2^-8, 2^-4, 1, 2^4            |
| gaudi3 | e4m3fn            | 448     | every power of 2, 2^-55..2^7  |
| cpu    | e4m3fn, emulated  | 448     | none: hardware scales refused |

The toolkit evaluates all of this in its high-precision dtype, bfloat16 by default, and log2 in
bfloat16 can round down: one maximum in seventy gets half the exact scale. So the arithmetic has a
name: `exact`, or the dtype (`BF16`, `FP16`, `FP32`) as the toolkit's `hp_dtype` spells it.
Scales are steps, never their inverse. Source: neural_compressor.torch.algorithms.fp8_quant, release
3.10.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from quantflow.core import float8
from quantflow.core.scale_rules import Rule, ScaleRounding
from quantflow.errors import SchemeError, StatisticsError, UnsupportedError

ARITHMETICS: Mapping[str, torch.dtype] = MappingProxyType(
    {"exact": torch.float64, "BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}
)
# smallest scale of a channel: an all-zero channel divides by it, not by zero
_SMALLEST_NORMAL = torch.finfo(torch.bfloat16).tiny


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device and its float8 format.

    Attributes:
        device: gaudi2, gaudi3 or cpu.
        flavour: a key of quantflow.core.float8.FLAVOURS.
        hw_exponents: ascending; 2 to their power are the scales that the device applies for free.
    """

    device: str
    flavour: str
    hw_exponents: tuple[int, ...] = ()

    @property
    def largest(self) -> float:
        """The largest finite value, 240 for gaudi2 and 448 elsewhere with E4M3."""
        return float8.FLAVOURS[self.flavour].largest


_TARGETS: Mapping[tuple[str, str], Target] = MappingProxyType(
    {
        ("gaudi2", "E4M3"): Target(device="gaudi2", flavour="gaudi2", hw_exponents=(-8, -4, 0, 4)),
        ("gaudi3", "E4M3"): Target(
            device="gaudi3", flavour="e4m3fn", hw_exponents=tuple(range(-55, 8))
        ),
        ("cpu", "E4M3"): Target(device="cpu", flavour="e4m3fn"),
        ("gaudi2", "E5M2"): Target(device="gaudi2", flavour="e5m2"),
        ("gaudi3", "E5M2"): Target(device="gaudi3", flavour="e5m2"),
        ("cpu", "E5M2"): Target(device="cpu", flavour="e5m2"),
    }
)
DEVICES = tuple(dict.fromkeys(device for device, _ in _TARGETS))


def target(device: str, fp8: str = "E4M3") -> Target:
    """The device with that float8 format.

    Raises:
        UnsupportedError: the device or the format is unknown.
    """
    found = _TARGETS.get((device, fp8))
    if found is None:
        raise UnsupportedError(
            f"device {device!r} with {fp8!r}", f"use one of {', '.join(DEVICES)} with E4M3 or E5M2"
        )
    return found


def target_of(flavour: str) -> Target:
    """The device whose hardware scales go with a flavour of float8.

    It is gaudi2 for the flavour of that name and gaudi3 for the others.

    Raises:
        UnsupportedError: no device of DEVICES has the flavour.
    """
    for found in (
        _TARGETS["gaudi2", "E4M3"],
        _TARGETS["gaudi3", "E4M3"],
        _TARGETS["gaudi3", "E5M2"],
    ):
        if found.flavour == flavour:
            return found
    raise UnsupportedError(
        f"float8 {flavour!r} has no scales that are known here", "use e4m3fn or gaudi2"
    )


def scale_from_amax(
    amax: Tensor, rule: Rule, *, target: Target, arithmetic: str = "exact"
) -> Tensor:
    """The scale for a largest magnitude, of its shape, float32, positive.

    A maximum of zero has scale 1 where nothing else decides: any positive scale reproduces it. The
    toolkit divides by zero there. With hardware scales it is the smallest of them, as in the
    toolkit.

    Args:
        amax: any shape, float, finite, not negative.
        rule: MAXABS or FIXED_VALUE.
        target: device of the scale.
        arithmetic: a key of ARITHMETICS.

    Raises:
        StatisticsError: amax is NaN, infinite or negative, or the arithmetic holds no scale for it.
        SchemeError: the rule searches, or is dynamic; another arithmetic.
        UnsupportedError: hardware scales on a device without them.
    """
    if rule.dynamic:
        raise SchemeError(
            "a dynamic scale is computed from each input", "use a static scale method"
        )
    if rule.value in ("FIXED_VALUE", "DUMMY_SCALES"):
        fixed = 1.0 if rule.rounding == "SCALE_UNIT" else 2.0 ** _hw_exponents(target)[-1]
        return torch.full_like(amax, fixed, dtype=torch.float32)
    if rule.value != "MAXABS":
        raise SchemeError(
            f"a scale by {rule.value} needs the weight, only its maximum is given", "give the model"
        )
    if not torch.isfinite(amax).all() or (amax < 0).any():
        raise StatisticsError(
            f"a maximum of {amax[~(torch.isfinite(amax) & (amax >= 0))][0].item()}", "measure again"
        )
    raw = _raw(amax, rule, target=target, arithmetic=arithmetic)
    if rule.granularity == "PCS":
        raw = raw.clamp_min(_SMALLEST_NORMAL)
    lost = ~torch.isfinite(raw) | ((raw == 0) & (amax > 0))
    if lost.any():
        raise StatisticsError(
            f"the scale of a maximum of {amax[lost][0].item():.6g} is {raw[lost][0].item():g} in "
            f"{arithmetic}",
            "take the arithmetic BF16 (hp_dtype of the QUANT_CONFIG)",
        )
    rounded = _round(raw, rule.rounding, target=target)
    return torch.where(rounded > 0, rounded, torch.ones_like(rounded))


def weight_scale(
    weight: Tensor, rule: Rule, *, target: Target, arithmetic: str = "exact"
) -> Tensor:
    """The scale of a weight: [] for PTS, [O] for PCS, float32.

    OPT takes the candidate with the smallest squared error. Of equal ones it takes the later per
    tensor, the earlier per channel, where a candidate multiplies the channel's MAXABS scale.

    Args:
        weight: [O, I], any float dtype.
        rule: rule of the weights.
        target: device of the scale.
        arithmetic: a key of ARITHMETICS, for the scales; errors are float64 sums.

    Raises:
        StatisticsError: the weight holds NaN or Inf.
        UnsupportedError: hardware scales on a device without them.
    """
    magnitude = weight.float().abs()
    per_channel = rule.granularity == "PCS"
    amax = magnitude.amax(dim=1) if per_channel else magnitude.max()
    if rule.value != "OPT":
        return scale_from_amax(amax, rule, target=target, arithmetic=arithmetic)
    if not per_channel:
        return scale_from_errors(candidate_errors(weight, rule, target=target), rule, target=target)
    maxabs = Rule(granularity="PCS", value="MAXABS", rounding=rule.rounding, backoff=rule.backoff)
    reference = scale_from_amax(amax, maxabs, target=target, arithmetic=arithmetic)  # [O]
    best = torch.ones_like(reference)
    least = torch.full_like(reference, torch.inf, dtype=torch.float64)
    for multiple in _candidates(rule, target=target):
        scale = reference * multiple
        error = _squared_errors(weight.float(), scale.reshape(-1, 1), target=target)  # [O]
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return _round(best.double(), rule.rounding, target=target)


def candidate_errors(weight: Tensor, rule: Rule, *, target: Target) -> Tensor:
    """The squared error of some rows of a weight per candidate of a search per tensor, [C] float64.

    The errors of all rows of all weights that share a scale are added up; `scale_from_errors`
    chooses by them.

    Args:
        weight: [O, I], any float dtype.
        rule: PTS, OPT.
        target: device of the scale.

    Raises:
        StatisticsError: the weight holds NaN or Inf.
        UnsupportedError: hardware scales on a device without them.
    """
    weight = weight.float()
    if not torch.isfinite(weight).all():
        raise StatisticsError(f"a maximum of {weight.abs().max().item()}", "repair the model")
    errors = [
        _squared_errors(weight, scale, target=target).sum()
        for scale in _candidates(rule, target=target)
    ]
    return torch.stack(errors)  # [C]


def scale_from_errors(errors: Tensor, rule: Rule, *, target: Target) -> Tensor:
    """The candidate of the smallest error, the last of equal ones; [] float32.

    Args:
        errors: [C] float64, in the order of the candidates in `candidate_errors`.
        rule: PTS, OPT.
        target: device of the scale.
    """
    best = int((errors == errors.min()).nonzero()[-1])
    return _round(
        errors.new_full([], _candidates(rule, target=target)[best]), rule.rounding, target=target
    )


def _candidates(rule: Rule, *, target: Target) -> tuple[float, ...]:
    """The candidates of a search, in its order: scales of a tensor, or multiples of a channel's."""
    exponents = tuple(reversed(_hw_exponents(target))) if rule.exponents is None else rule.exponents
    return tuple(2.0**exponent for exponent in exponents)


def _squared_errors(weight: Tensor, scale: Tensor | float, *, target: Target) -> Tensor:
    """The squared error of each row of a weight [O, I], [O] float64; scale is one or [O, 1]."""
    return (
        (float8.widen(float8.cast_(weight / scale, target.flavour)) * scale - weight)
        .double()
        .square()
        .sum(dim=1)
    )


def _raw(amax: Tensor, rule: Rule, *, target: Target, arithmetic: str) -> Tensor:
    if arithmetic not in ARITHMETICS:
        raise SchemeError(
            f"arithmetic {arithmetic!r} is unknown", f"use one of {', '.join(ARITHMETICS)}"
        )
    return amax.to(ARITHMETICS[arithmetic]) / (target.largest * rule.backoff)


def _round(raw: Tensor, rounding: ScaleRounding, *, target: Target) -> Tensor:
    """The rounded scale, float32; the arithmetic is that of raw's dtype."""
    if rounding == "IDENTITY":
        return raw.float()
    exponent = _ceil_log2(raw)
    if rounding == "HW_ALIGNED":
        exponents = _hw_exponents(target)
        rounded = torch.full_like(exponent, exponents[-1])
        for larger in reversed(exponents):
            rounded = torch.where(exponent <= larger, larger, rounded)
        exponent = rounded
    return torch.exp2(exponent).float()


def _ceil_log2(scale: Tensor) -> Tensor:
    """The exponent of the smallest power of 2 that is not below `scale`, float64; -inf of zero.

    In float64 it is exact, whatever the machine's log2 does. In other dtypes it is the result of
    the toolkit's log2.
    """
    if scale.dtype != torch.float64:
        return torch.ceil(torch.log2(scale)).double()
    mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2^exponent, mantissa in [0.5, 1)
    power = (exponent - (mantissa == 0.5).int()).double()
    return torch.where(scale > 0, power, torch.full_like(power, -torch.inf))


def _hw_exponents(target: Target) -> tuple[int, ...]:
    if not target.hw_exponents:
        raise UnsupportedError(
            f"device {target.device} with {target.flavour} has no hardware scales that are known "
            "here",
            "use maxabs_pow2 or maxabs_arbitrary, or E4M3 on gaudi2 or gaudi3",
        )
    return target.hw_exponents

"""Gaudi's float8: what each device holds, and the scales that Intel Neural Compressor derives for it.

    raw scale   s = amax / (largest * backoff)
    POW2        2 ** ceil(log2 s)
    HW          the smallest scale that the device applies for free and that is not below POW2(s), or its largest

| device | float8            | largest | scales that cost nothing      |
|--------|-------------------|---------|-------------------------------|
| gaudi2 | e4m3fn's codes    | 240     | 2^-8, 2^-4, 1, 2^4            |
| gaudi3 | e4m3fn            | 448     | every power of 2, 2^-55..2^7  |
| cpu    | e4m3fn, emulated  | 448     | none: hardware scales refused |

The toolkit evaluates all of this in its high-precision dtype, bfloat16 unless told otherwise, and log2 in bfloat16 can
round down: one maximum in seventy gets half the exact scale. So the arithmetic has a name: `exact`, or the dtype (`BF16`,
`FP16`, `FP32`) as the toolkit's `hp_dtype` spells it. Scales are steps, never their inverse.
Source: neural_compressor.torch.algorithms.fp8_quant, release 3.10.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from quantflow.core import float8
from quantflow.errors import SchemeError, StatisticsError, UnsupportedError

Granularity = Literal["PTS", "PCS"]
Value = Literal["MAXABS", "FIXED_VALUE", "OPT", "DUMMY_SCALES"]
Rounding = Literal["IDENTITY", "POW2", "HW_ALIGNED", "HW_ALIGNED_FIXED", "SCALE_UNIT"]

ARITHMETICS: Mapping[str, torch.dtype] = MappingProxyType(
    {"exact": torch.float64, "BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}
)
_SMALLEST_NORMAL = torch.finfo(torch.bfloat16).tiny  # of a channel's scale: an all-zero channel divides by it, not by zero


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
        ("gaudi3", "E4M3"): Target(device="gaudi3", flavour="e4m3fn", hw_exponents=tuple(range(-55, 8))),
        ("cpu", "E4M3"): Target(device="cpu", flavour="e4m3fn"),
        ("gaudi2", "E5M2"): Target(device="gaudi2", flavour="e5m2"),
        ("gaudi3", "E5M2"): Target(device="gaudi3", flavour="e5m2"),
        ("cpu", "E5M2"): Target(device="cpu", flavour="e5m2"),
    }
)
DEVICES = tuple(dict.fromkeys(device for device, _ in _TARGETS))


def target(device: str, fp8: str = "E4M3") -> Target:
    """Return the device with that float8 format.

    Raises:
        UnsupportedError: the device or the format is unknown.
    """
    found = _TARGETS.get((device, fp8))
    if found is None:
        raise UnsupportedError(f"device {device!r} with {fp8!r}", f"use one of {', '.join(DEVICES)} with E4M3 or E5M2")
    return found


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How one side of a linear, its activations or its weights, gets a scale.

    Attributes:
        granularity: PTS is one scale per tensor, PCS one per output channel (weights) or per token (activations).
        value: MAXABS from the maximum, FIXED_VALUE from nothing, OPT by search, DUMMY_SCALES is 1 for loading.
        rounding: what happens to the raw scale.
        backoff: part of the range that is used; 1 all of it.
        exponents: of the candidates of OPT, in the order in which they are tried; None takes the hardware's scales.
        dynamic: the scale is computed from each input at run time.
    """

    granularity: Granularity
    value: Value
    rounding: Rounding
    backoff: float = 1.0
    exponents: tuple[int, ...] | None = None
    dynamic: bool = False


def scale_from_amax(amax: Tensor, rule: Rule, *, target: Target, arithmetic: str = "exact") -> Tensor:
    """Return the scale for a largest magnitude, of its shape, float32, positive.

    A maximum of zero has scale 1 where nothing else decides: any positive scale reproduces it. The toolkit divides by zero
    there. With hardware scales it is the smallest of them, as it is in the toolkit.

    Args:
        amax: any shape, float, finite, not negative.
        rule: MAXABS or FIXED_VALUE.
        target: the device.
        arithmetic: a key of ARITHMETICS.

    Raises:
        StatisticsError: amax is NaN, infinite or negative.
        SchemeError: the rule searches, or is dynamic; another arithmetic.
        UnsupportedError: hardware scales on a device without them.
    """
    if rule.dynamic:
        raise SchemeError("a dynamic scale is computed from each input", "use a static scale method")
    if rule.value in ("FIXED_VALUE", "DUMMY_SCALES"):
        fixed = 1.0 if rule.rounding == "SCALE_UNIT" else 2.0 ** _hw_exponents(target)[-1]
        return torch.full_like(amax, fixed, dtype=torch.float32)
    if rule.value != "MAXABS":
        raise SchemeError(f"a scale by {rule.value} needs the weight, only its maximum is given", "give the model")
    if not torch.isfinite(amax).all() or (amax < 0).any():
        raise StatisticsError(f"a maximum of {amax[~(torch.isfinite(amax) & (amax >= 0))][0].item()}", "measure again")
    raw = _raw(amax, rule, target=target, arithmetic=arithmetic)
    if rule.granularity == "PCS":
        raw = raw.clamp_min(_SMALLEST_NORMAL)
    rounded = _round(raw, rule.rounding, target=target)
    return torch.where(rounded > 0, rounded, torch.ones_like(rounded))


def weight_scale(weight: Tensor, rule: Rule, *, target: Target, arithmetic: str = "exact") -> Tensor:
    """Return the scale of a weight: [] for PTS, [O] for PCS, float32.

    OPT takes the candidate with the smallest squared error; of equal ones the later per tensor, the earlier per channel, where
    a candidate multiplies the channel's MAXABS scale.

    Args:
        weight: [O, I], any float dtype.
        rule: of the weights.
        target: the device.
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
    exponents = tuple(reversed(_hw_exponents(target))) if rule.exponents is None else rule.exponents
    candidates: Iterable[Tensor] = (torch.tensor(2.0**exponent) for exponent in exponents)
    if per_channel:
        maxabs = Rule(granularity="PCS", value="MAXABS", rounding=rule.rounding, backoff=rule.backoff)
        reference = scale_from_amax(amax, maxabs, target=target, arithmetic=arithmetic)  # [O]
        candidates = (reference * candidate for candidate in list(candidates))
    elif not torch.isfinite(amax):
        raise StatisticsError(f"a maximum of {amax.item()}", "repair the model")
    return _round(_best(weight.float(), candidates, target=target).double(), rule.rounding, target=target)


def _best(weight: Tensor, candidates: Iterable[Tensor], *, target: Target) -> Tensor:
    """Return the candidate, [] or per channel [O], that loses least of a weight [O, I]."""
    best, least = torch.ones(()), torch.full((), torch.inf, dtype=torch.float64)
    for candidate in candidates:
        step = candidate.reshape(-1, 1)  # [O, 1] or [1, 1]
        error = (float8.widen(float8.cast_(weight / step, target.flavour)) * step - weight).double().square().sum(dim=1)  # [O]
        if not candidate.ndim:
            error = error.sum()
        better = error < least if candidate.ndim else error <= least
        best = torch.where(better, candidate, best)
        least = torch.where(better, error, least)
    return best


def _raw(amax: Tensor, rule: Rule, *, target: Target, arithmetic: str) -> Tensor:
    if arithmetic not in ARITHMETICS:
        raise SchemeError(f"arithmetic {arithmetic!r} is unknown", f"use one of {', '.join(ARITHMETICS)}")
    return amax.to(ARITHMETICS[arithmetic]) / (target.largest * rule.backoff)


def _round(raw: Tensor, rounding: Rounding, *, target: Target) -> Tensor:
    """Return the rounded scale, float32; the arithmetic is that of raw's dtype."""
    if rounding == "IDENTITY":
        return raw.float()
    exponent = _ceil_log2(raw)
    if rounding == "HW_ALIGNED":
        known = torch.tensor(_hw_exponents(target), dtype=torch.float64)
        exponent = known[torch.searchsorted(known, exponent).clamp_max(len(known) - 1)]
    return torch.exp2(exponent).float()


def _ceil_log2(scale: Tensor) -> Tensor:
    """Return the exponent of the smallest power of 2 that is not below `scale`, float64; of zero it is -inf.

    In float64 it is exact, whatever the machine's log2 does; in other dtypes it is what the toolkit's log2 makes of it.
    """
    if scale.dtype != torch.float64:
        return torch.ceil(torch.log2(scale)).double()
    mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2^exponent, mantissa in [0.5, 1)
    found = (exponent - (mantissa == 0.5).int()).double()
    return torch.where(scale > 0, found, torch.full_like(found, -torch.inf))


def _hw_exponents(target: Target) -> tuple[int, ...]:
    if not target.hw_exponents:
        raise UnsupportedError(
            f"device {target.device} with {target.flavour} has no hardware scales that are known here",
            "use maxabs_pow2 or maxabs_arbitrary, or E4M3 on gaudi2 or gaudi3",
        )
    return target.hw_exponents

"""Scale methods: rules that derive a stored scale of float8, as plain data.

A rule is of one tensor, a method has one for weights and one for inputs.
`quantflow.core.device_scales` computes by them. Names and rows are those of Gaudi's toolkit.
Source: neural_compressor.torch.algorithms.fp8_quant, release 3.10.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

ScaleGranularity = Literal["PTS", "PCS"]
ScaleValue = Literal["MAXABS", "FIXED_VALUE", "OPT", "DUMMY_SCALES"]
ScaleRounding = Literal["IDENTITY", "POW2", "HW_ALIGNED", "HW_ALIGNED_FIXED", "SCALE_UNIT"]
ARITHMETIC_NAMES = ("exact", "BF16", "FP16", "FP32")  # dtypes in which a scale is derived
ACTIVATION_BACKOFF, WEIGHT_BACKOFF = 0.25, 0.5


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The rule for the scale of one side of a linear, its activations or its weights.

    Attributes:
        granularity: PTS is one scale per tensor, PCS one per output channel (weights) or per token
            (activations).
        value: MAXABS from the maximum, FIXED_VALUE from nothing, OPT by search, DUMMY_SCALES is 1
            for loading.
        rounding: rounding of the raw scale.
        backoff: used share of the range; 1 is all of it.
        exponents: exponents of OPT's candidates, in the order in which they are tried; None takes
            the hardware's scales.
        dynamic: whether the scale is computed from each input at run time.
    """

    granularity: ScaleGranularity
    value: ScaleValue
    rounding: ScaleRounding
    backoff: float = 1.0
    exponents: tuple[int, ...] | None = None
    dynamic: bool = False


@dataclass(frozen=True, kw_only=True)
class ScaleMethod:
    """One row: the rules of activations and weights, by the toolkit's name."""

    name: str
    activation: Rule
    weight: Rule

    @property
    def dynamic(self) -> bool:
        """Whether activations get their scales at run time."""
        return self.activation.dynamic

    @property
    def needs_weights(self) -> bool:
        """Whether the weights themselves are needed, not their maxima alone."""
        return self.weight.granularity == "PCS" or self.weight.value == "OPT"

    @property
    def needs_measurement(self) -> bool:
        """Whether a measurement is read."""
        return "MAXABS" in (self.activation.value, self.weight.value) and not self.dynamic


def _rule(
    granularity: ScaleGranularity,
    value: ScaleValue,
    rounding: ScaleRounding,
    backoff: float = 1.0,
    **more: Any,
) -> Rule:
    return Rule(granularity=granularity, value=value, rounding=rounding, backoff=backoff, **more)


_UNIT = _rule("PTS", "FIXED_VALUE", "SCALE_UNIT")
_SINGLE = _rule("PTS", "FIXED_VALUE", "HW_ALIGNED_FIXED")
_ACT_HW = _rule("PTS", "MAXABS", "HW_ALIGNED", ACTIVATION_BACKOFF)
_ACT_POW2 = _rule("PTS", "MAXABS", "POW2", ACTIVATION_BACKOFF)
_ACT_RAW = _rule("PTS", "MAXABS", "IDENTITY", ACTIVATION_BACKOFF)
_ACT_TOKEN = _rule("PCS", "MAXABS", "POW2", WEIGHT_BACKOFF, dynamic=True)
_HW = _rule("PTS", "MAXABS", "HW_ALIGNED", WEIGHT_BACKOFF)
_POW2 = _rule("PTS", "MAXABS", "POW2", WEIGHT_BACKOFF)
_RAW = _rule("PTS", "MAXABS", "IDENTITY", WEIGHT_BACKOFF)
_HW_SEARCH = _rule("PTS", "OPT", "HW_ALIGNED", WEIGHT_BACKOFF)
_POW2_SEARCH = _rule("PTS", "OPT", "POW2", WEIGHT_BACKOFF, exponents=tuple(range(-10, 10)))
_CHANNEL = _rule("PCS", "MAXABS", "POW2", WEIGHT_BACKOFF)
_CHANNEL_SEARCH = _rule("PCS", "OPT", "POW2", WEIGHT_BACKOFF, exponents=tuple(range(-3, 5)))

SCALE_METHODS: Mapping[str, ScaleMethod] = MappingProxyType(
    {
        name: ScaleMethod(name=name, activation=activation, weight=weight)
        for name, activation, weight in (
            ("unit_scale", _UNIT, _UNIT),
            ("hw_aligned_single_scale", _SINGLE, _SINGLE),
            ("maxabs_hw", _ACT_HW, _HW),
            ("maxabs_pow2", _ACT_POW2, _POW2),
            ("maxabs_arbitrary", _ACT_RAW, _RAW),
            ("maxabs_hw_opt_weight", _ACT_HW, _HW_SEARCH),
            ("maxabs_pow2_opt_weight", _ACT_POW2, _POW2_SEARCH),
            ("act_maxabs_hw_weights_pcs_maxabs_pow2", _ACT_HW, _CHANNEL),
            ("act_maxabs_hw_weights_pcs_opt_pow2", _ACT_HW, _CHANNEL_SEARCH),
            ("act_maxabs_pow2_weights_pcs_maxabs_pow2", _ACT_POW2, _CHANNEL),
            ("act_maxabs_pow2_weights_pcs_opt_pow2", _ACT_POW2, _CHANNEL_SEARCH),
            ("act_maxabs_pcs_pow2_weight_maxabs_pts_pow2_hw", _ACT_TOKEN, _HW),
            ("maxabs_pcs_pow2", _ACT_TOKEN, _CHANNEL),
        )
    }
)

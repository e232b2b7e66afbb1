"""Combinations that a method supports: a record of every algorithm and transform.

A field is None where the method can be combined with the thing, else a `Refusal` with the reason
and the remedy. `quantflow/planning/compatibility.py` reads the records before a weight is read;
docs/recipes.md has them as one table.
"""

from dataclasses import dataclass

from quantflow.core.scheme import LinearScheme
from quantflow.errors import QuantflowError, UnsupportedError, UsageError


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """The reason why a method cannot be combined with something.

    Attributes:
        remedy: what to do instead; {others} stands for the algorithms that go with the scheme.
        why: text that follows the two names in a message, with the mark that it begins with;
            {family} stands for the model's.
        unsupported: whether an implementation is missing (exit code 6) rather than sense (2).
    """

    remedy: str
    why: str = ""
    unsupported: bool = False

    def error(self, what: str, *, family: str = "", others: str = "") -> QuantflowError:
        """The exception for two things that cannot be combined, which `what` names."""
        kind = UnsupportedError if self.unsupported else UsageError
        return kind(what + self.why.format(family=family), self.remedy.format(others=others))


@dataclass(frozen=True, kw_only=True)
class Supports:
    """The combinations that an algorithm or a transform supports.

    Attributes:
        float8: weights in float8.
        float4: weights in float4.
        shared_scale: weights whose scale is not the method's to search: rows that share one, and
            scales that follow a rule.
        block_scales: weights of a llama.cpp type whose scales depend on each other, or that has
            minima.
        quantized_inputs: schemes that quantize inputs as well as weights.
        rotations: transforms that rotate the whole model.
        mixed_inputs: inputs that a Hadamard rotation mixes while the model runs.
        histograms: ranges of static inputs that are clipped by a histogram.
        chosen_schemes: schemes chosen for each linear by its sensitivity.
        layer_inputs: a recipe's choice of the model, original or quantized, whose outputs calibrate
            the next layer.
        mixtures: mixtures of experts.
        centred_norms: families whose norms subtract the mean.
        ranks: several ranks that share the work.
    """

    float8: Refusal | None = None
    float4: Refusal | None = None
    shared_scale: Refusal | None = None
    block_scales: Refusal | None = None
    quantized_inputs: Refusal | None = None
    rotations: Refusal | None = None
    mixed_inputs: Refusal | None = None
    histograms: Refusal | None = None
    chosen_schemes: Refusal | None = None
    layer_inputs: Refusal | None = None
    mixtures: Refusal | None = None
    centred_norms: Refusal | None = None
    ranks: Refusal | None = None

    def scheme(self, scheme: LinearScheme) -> Refusal | None:
        """The reason why the method cannot take a scheme; None where it can."""
        weights = scheme.weights
        refusal = self.float4 if weights.num_bits == 4 else self.float8
        if weights.kind == "float" and refusal is not None:
            return refusal
        if weights.granularity == "per_tensor" and self.shared_scale is not None:
            return self.shared_scale
        if weights.scale_rule is not None and self.shared_scale is not None:
            return RULED_SCALES
        if weights.block is not None and weights.block.dependent and self.block_scales is not None:
            return self.block_scales
        return self.quantized_inputs if scheme.input is not None else None


EVERYTHING = Supports()
SHARED_SCALE = Refusal(
    why=", whose weights share one scale",
    remedy="use {others}, or a scale per channel or block such as FP8_DYNAMIC's",
)
RULED_SCALES = Refusal(
    why=", whose scales follow from its scale_method",
    remedy="use {others}, or leave scale_method out",
)
BLOCK_SCALES = Refusal(why=", whose scales or minima are those of a block", remedy="use {others}")


def integers_only(method: str, kind: str = "float8") -> Refusal:
    """The refusal of a kind of floats by a method that chooses integers."""
    return Refusal(remedy=f"{method} chooses integers; use {{others}} for {kind}")


AS_MEASURED = Refusal(
    remedy="sensitivities are those of the weights as they are: leave transforms out"
)
AS_MEASURED_HISTOGRAMS = Refusal(
    remedy="histograms are those of the inputs as they are: give `transforms: []`, or leave "
    "input_observer out"
)

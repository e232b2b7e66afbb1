"""What a method goes with: a record that every algorithm and transform has beside its mathematics.

A field is None where the method goes with the thing, else a `Refusal` that says why not and what to
do instead. `quantflow/planning/compatibility.py` reads the records before a weight is read;
docs/recipes.md has them as one table.
"""

from dataclasses import dataclass

from quantflow.core.scheme import LinearScheme
from quantflow.errors import QuantflowError, UnsupportedError, UsageError


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a method does not go with something.

    Attributes:
        why: follows the two that do not go together in a message, with the mark that it begins
            with; {family} stands for the model's.
        remedy: what to do; {others} stands for the algorithms that go with the scheme.
        unsupported: whether it is for want of an implementation (exit code 6) and not of sense (2).
    """

    remedy: str
    why: str = ""
    unsupported: bool = False

    def error(self, what: str, *, family: str = "", others: str = "") -> QuantflowError:
        """Return the exception for two things that do not go together, which `what` names."""
        kind = UnsupportedError if self.unsupported else UsageError
        return kind(what + self.why.format(family=family), self.remedy.format(others=others))


@dataclass(frozen=True, kw_only=True)
class Supports:
    """What an algorithm or a transform goes with.

    Attributes:
        float8: weights in float8.
        float4: weights in float4.
        shared_scale: weights whose scale is not theirs to search: rows that share one, and scales
            that follow a rule.
        block_scales: weights of a type of llama.cpp's whose scales depend on each other, or that
            has minima.
        quantized_inputs: schemes that quantize inputs as well as weights.
        rotations: transforms that rotate the whole model.
        mixed_inputs: inputs that a rotation mixes while the model runs.
        histograms: ranges of static inputs that a histogram cuts short.
        chosen_schemes: schemes chosen for each linear by its sensitivity.
        layer_inputs: the recipe's word on whose outputs a layer is calibrated with, the original's
            or the quantized model's.
        mixtures: mixtures of experts.
        centred_norms: families whose norms subtract the mean.
        ranks: several cards that share the work.
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
        """Return why the method does not go with a scheme, None where it does."""
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
    """Return why a method that chooses integers does not go with a kind of floats."""
    return Refusal(remedy=f"{method} chooses integers; use {{others}} for {kind}")


AS_MEASURED = Refusal(
    remedy="sensitivities are those of the weights as they are: leave transforms out"
)
AS_MEASURED_HISTOGRAMS = Refusal(
    remedy="histograms are those of the inputs as they are: give `transforms: []`, or leave "
    "input_observer out"
)

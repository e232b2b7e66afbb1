"""The record that validation.json holds, one field a key."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

# keys that are absent where nobody asked for them
_OPTIONAL = ("tasks", "mtp", "diagnosis", "regression")


@dataclass(frozen=True, kw_only=True)
class Validation:
    """A judged comparison of an artifact with its source.

    Attributes:
        artifact: name of the artifact's entry in its recipe.
        digest: digest of the artifact's manifest.
        baseline: fingerprint of the source model's files.
        parameters: number of the source model's parameters.
        scheme: scheme of the artifact's linears.
        kv_cache: scheme of the KV cache; None where the cache is not quantized.
        algorithm: algorithm of the artifact, ` + tune` included.
        transforms: transforms before rounding, in their order.
        model: name of the source model.
        size: bytes of the artifact's files.
        bits_per_weight: stored bits per weight of the quantized linears.
        perplexity: perplexity of `baseline` and of `candidate`, the artifact.
        metrics: metric -> its value with one-sided 95 % bounds.
        noise_floor: the same metrics of the baseline against itself in another dtype.
        gate: thresholds that judged, and their names.
        windows: per-window values that a later comparison pairs.
        expect: outcome that the gate was expected to have.
        allow_inconclusive: whether the gate may fail to decide.
        rounded_inputs: whether inputs were rounded in linears whose scheme leaves them alone.
        protocol: windows, tokens, their hash, dtype, resamples, seed, and the hash of all of them.
        outcome: pass, fail or inconclusive.
        reasons: bounds that decided against the artifact.
        tasks: scores of both models in tasks; None where none were asked.
        mtp: guesses of `baseline` and of `candidate`, the artifact, by their layers that predict
            further tokens, and how many were taken; None where that was not asked.
        diagnosis: the places of the loss; None where that was not asked.
        regression: comparison with an older artifact; None without one.
    """

    artifact: str
    digest: str
    baseline: str
    parameters: int
    scheme: str
    kv_cache: str | None
    algorithm: str
    transforms: Sequence[Any]
    model: str
    size: int
    bits_per_weight: float
    perplexity: Mapping[str, float]
    metrics: Mapping[str, Mapping[str, float]]
    noise_floor: Mapping[str, Mapping[str, float]]
    gate: Mapping[str, Any]
    windows: Mapping[str, Any]
    expect: str
    allow_inconclusive: bool
    rounded_inputs: bool
    protocol: Mapping[str, Any]
    outcome: str
    reasons: Sequence[str]
    tasks: Mapping[str, Any] | None = None
    mtp: Mapping[str, Any] | None = None
    diagnosis: Mapping[str, Any] | None = None
    regression: Mapping[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """The content of validation.json."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["reasons"] = list(self.reasons)
        return {
            key: value for key, value in values.items() if key not in _OPTIONAL or value is not None
        }

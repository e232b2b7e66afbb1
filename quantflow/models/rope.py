"""Rotary embedding (RoPE): cosines and sines of the types that depend on the position alone.

    angle[p, i] = p * inv_freq[i]        features i and i + dim / 2 are a pair

The numbers are those of transformers bit for bit, whose model code takes seconds to import (tests
hold them to its ROPE_INIT_FUNCTIONS). Sources: Su et al. 2021, arXiv:2104.09864; Chen et al. 2023,
arXiv:2306.15595 (linear); Peng et al. 2023, arXiv:2309.00071 (yarn); Llama 3.1's model card
(llama3).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TYPES = ("default", "linear", "llama3", "yarn")
# The keys of rope_parameters that change numbers, by type; every type reads those of `default` too.
_KEYS = {
    "default": {"rope_type", "type", "rope_theta", "partial_rotary_factor"},
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        *(
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
        ),
        *("mscale", "mscale_all_dim", "truncate"),
    },
}
# yarn keeps a frequency above the first number of rotations, and divides one below the second
_BETA_FAST, _BETA_SLOW = 32, 1


@dataclass(frozen=True, kw_only=True)
class Rope:
    """A rotary embedding.

    Attributes:
        dim: number of a head's first features, which are rotated.
        parameters: `rope_parameters` of config.json, complete.
    """

    dim: int
    parameters: Mapping[str, Any]

    def table(self, positions: int) -> tuple[Tensor, Tensor]:
        """The cosines and sines of the positions from 0 on, each [positions, dim] float32."""
        inv_freq, attention_factor = inverse_frequencies(self)
        # [1, positions, dim / 2]
        angles = torch.arange(positions)[None, :, None].float() * inv_freq
        both = torch.cat((angles, angles), dim=-1)  # [1, positions, dim]
        cos, sin = both.cos() * attention_factor, both.sin() * attention_factor
        return cos[0].contiguous(), sin[0].contiguous()


def why_not(parameters: Mapping[str, Any]) -> str | None:
    """Why positions are rotated in a way that is not known here, in a sentence; None when known."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in TYPES:
        return (
            f"its rotation depends on the position alone, that of rope_type {kind} on the sequence "
            "too"
        )
    keys = _KEYS["default"] | _KEYS[kind]
    unknown = sorted(
        key for key, value in parameters.items() if key not in keys and value is not None
    )
    if unknown:
        return (
            f"it does not know what {unknown[0]}={parameters[unknown[0]]!r} does to a rotation of "
            f"rope_type {kind}"
        )
    needed = {
        "linear": _KEYS["linear"],
        "llama3": _KEYS["llama3"],
        "yarn": {"factor", "original_max_position_embeddings"},
    }
    for key in sorted({"rope_theta", *needed.get(kind, ())}):
        value = parameters.get(key)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < math.inf
        ):
            return f"{key} of its rotation is {value!r}, no positive number"
    return None


def inverse_frequencies(rope: Rope) -> tuple[Tensor, float]:
    """The angle of each pair of features at position 1, and the factor of cosines and sines.

    Returns:
        [dim / 2] float32, and the factor.
    """
    parameters, dim = rope.parameters, rope.dim
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    base = parameters["rope_theta"]
    inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if kind == "linear":
        return inv_freq / parameters["factor"], 1.0
    if kind == "llama3":
        return _llama3(inv_freq, parameters), 1.0
    if kind == "yarn":
        return _yarn(parameters, dim), _yarn_attention_factor(parameters)
    return inv_freq, 1.0


def _llama3(inv_freq: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """The frequencies with long waves stretched by `factor`, short ones kept, others in between."""
    factor = parameters["factor"]
    low = parameters["low_freq_factor"]
    high = parameters["high_freq_factor"]
    length = parameters["original_max_position_embeddings"]
    waves = 2 * math.pi / inv_freq
    stretched = torch.where(waves > length / low, inv_freq / factor, inv_freq)
    share = (length / waves - low) / (high - low)
    between = (1 - share) * stretched / factor + share * stretched
    return torch.where(~(waves < length / high) & ~(waves > length / low), between, stretched)


def _yarn(parameters: Mapping[str, Any], dim: int) -> Tensor:
    """The frequencies between those of the trained text length and of `factor` times as much."""
    base = parameters["rope_theta"]
    factor = parameters["factor"]
    length = parameters["original_max_position_embeddings"]

    def pair(rotations: float) -> float:
        """The pair of features that rotates so often over the length."""
        return (dim * math.log(length / (rotations * 2 * math.pi))) / (2 * math.log(base))

    first = pair(parameters.get("beta_fast") or _BETA_FAST)
    last = pair(parameters.get("beta_slow") or _BETA_SLOW)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    powers: Tensor = base ** (torch.arange(0, dim, 2).float() / dim)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - first) / (
        (last + 0.001 if first == last else last) - first
    )
    kept = 1 - torch.clamp(ramp, 0, 1)
    frequencies: Tensor = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    return frequencies


def _yarn_attention_factor(parameters: Mapping[str, Any]) -> float:
    factor: float = parameters["factor"]
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        all_dim = _yarn_scale(factor, parameters["mscale_all_dim"])
        return float(_yarn_scale(factor, parameters["mscale"]) / all_dim)
    return _yarn_scale(factor, 1)


def _yarn_scale(factor: float, of: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * of * math.log(factor) + 1.0


def latent_scale(parameters: Mapping[str, Any]) -> float:
    """The factor of all scores where multi-head latent attention has a stretched rotation.

    It makes up for `mscale_all_dim`, by which the rotated features are divided, in all features.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default" or not parameters.get("mscale_all_dim"):
        return 1.0
    return _yarn_scale(parameters["factor"], parameters["mscale_all_dim"]) ** 2

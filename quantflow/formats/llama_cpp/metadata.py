"""A model's configuration in llama.cpp's words: sizes, norms and rotary embedding."""

import math
from typing import Any

import torch
from torch import Tensor

from quantflow.errors import UnsupportedError
from quantflow.formats.llama_cpp.tensors import architecture_for, sizes_of
from quantflow.models.family import FAMILIES

# Divisor of each frequency of the rotary embedding; F32 [half of a head].
ROPE_FACTORS = "rope_freqs.weight"


def metadata(config: Any) -> dict[str, tuple[str, Any]]:
    """Fields of the architecture that llama.cpp needs: name -> (kind, value), as `gguf` has them.

    Raises:
        UnsupportedError: the family, its activation, or a kind of rotary embedding that is not
            written here.
    """
    architecture, sizes, rope = architecture_for(config), sizes_of(config), _rope(config)
    design = FAMILIES[config.model_type].decoder
    assert design is not None  # a family of GGUF has one
    window = getattr(config, "sliding_window", None)
    context = (
        config.max_position_embeddings
        if window is None
        else min(window, config.max_position_embeddings)
    )
    values: dict[str, tuple[str, Any]] = {
        "context_length": ("u32", context),
        "embedding_length": ("u32", config.hidden_size),
        "block_count": ("u32", config.num_hidden_layers),
        "feed_forward_length": ("u32", config.intermediate_size),
        "attention.head_count": ("u32", config.num_attention_heads),
        "attention.head_count_kv": ("u32", sizes["k"] // sizes["d"]),
        "attention.key_length": ("u32", sizes["d"]),
        "attention.value_length": ("u32", sizes["d"]),
        "rope.dimension_count": ("u32", int(sizes["d"] * rope.get("partial_rotary_factor", 1.0))),
        "rope.freq_base": ("f32", float(rope["rope_theta"])),
        "vocab_size": ("u32", config.vocab_size),
    }
    epsilon = float(getattr(config, design.eps_key))
    values[epsilon_field(config.model_type)] = ("f32", epsilon)
    if isinstance(design.parallel_residual, str):
        parallel = bool(getattr(config, design.parallel_residual))
        values["use_parallel_residual"] = ("bool", parallel)
    if rope["rope_type"] == "linear":
        values["rope.scaling.type"] = ("string", "linear")
        values["rope.scaling.factor"] = ("f32", float(rope["factor"]))
    named = {f"{architecture.name}.{key}": value for key, value in values.items()}
    return {"general.architecture": ("string", architecture.name), **named}


def epsilon_field(model_type: str) -> str:
    """llama.cpp's name of the norms' epsilon: LayerNorm's, or RMSNorm's."""
    centered = FAMILIES[model_type].centered
    return "attention.layer_norm_epsilon" if centered else "attention.layer_norm_rms_epsilon"


def rope_factors(config: Any) -> Tensor | None:
    """llama.cpp's divisor of each frequency, float32 [half of a head]; None where all are 1.

    Llama 3.1's rule: long waves are slowed down by `factor`, short ones are left alone, those
    between are blended.

    Raises:
        UnsupportedError: as `metadata`.
    """
    rope, size = _rope(config), sizes_of(config)["d"]
    if rope["rope_type"] != "llama3":
        return None
    factor, low, high = (
        float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    original = float(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    factors = []
    for position in range(0, size, 2):
        # how often the wave turns in the original context
        turns = original / (2 * math.pi * float(rope["rope_theta"]) ** (position / size))
        blend = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - blend) / factor + blend))
    return torch.tensor(factors, dtype=torch.float64).float()


def _rope(config: Any) -> dict[str, Any]:
    """The parameters of the rotary embedding."""
    design = FAMILIES[config.model_type].decoder
    rope = {"rope_type": "default", "partial_rotary_factor": 1.0, **config.rope_parameters}
    if rope["rope_type"] not in ("default", "linear", "llama3"):
        raise UnsupportedError(
            f"config.json: rope_type {rope['rope_type']!r}, exported to GGUF are default, linear "
            "and llama3",
            "convert this model with llama.cpp's own converter",
        )
    partial = design is not None and design.partial_rope
    if rope["partial_rotary_factor"] != 1.0 and not partial:
        raise UnsupportedError(
            f"config.json: partial_rotary_factor {rope['partial_rotary_factor']}, llama.cpp "
            "rotates whole heads",
            "run this model with transformers",
        )
    return rope

"""What a model's configuration is in llama.cpp's words: sizes, norms and rotary embedding."""

import math
from typing import Any

import torch
from torch import Tensor

from quantflow.errors import UnsupportedError
from quantflow.formats.llama_cpp.tensors import architecture_for, sizes_of

# what each rotation's frequency is divided by; F32 [half of a head]
ROPE_FACTORS = "rope_freqs.weight"


def metadata(config: Any) -> dict[str, tuple[str, Any]]:
    """Return what llama.cpp has to know of the architecture: name -> (kind, value), as `gguf` writes it.

    Raises:
        UnsupportedError: the family, its activation, or a kind of rotary embedding that is not
            written here.
    """
    architecture, sizes, rope = architecture_for(config), sizes_of(config), _rope(config)
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
    if architecture.name == "gptneox":
        values["attention.layer_norm_epsilon"] = ("f32", float(config.layer_norm_eps))
        values["use_parallel_residual"] = ("bool", bool(config.use_parallel_residual))
    else:
        values["attention.layer_norm_rms_epsilon"] = ("f32", float(config.rms_norm_eps))
    if rope["rope_type"] == "linear":
        values["rope.scaling.type"] = ("string", "linear")
        values["rope.scaling.factor"] = ("f32", float(rope["factor"]))
    named = {f"{architecture.name}.{key}": value for key, value in values.items()}
    return {"general.architecture": ("string", architecture.name), **named}


def rope_factors(config: Any) -> Tensor | None:
    """Return what llama.cpp divides each frequency by, float32 [half of a head]; None where all are 1.

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
        # in the original context
        turns = original / (2 * math.pi * float(rope["rope_theta"]) ** (position / size))
        blend = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - blend) / factor + blend))
    return torch.tensor(factors, dtype=torch.float64).float()


def _rope(config: Any) -> dict[str, Any]:
    """Return the parameters of the rotary embedding."""
    rope = {"rope_type": "default", "partial_rotary_factor": 1.0, **config.rope_parameters}
    if rope["rope_type"] not in ("default", "linear", "llama3"):
        raise UnsupportedError(
            f"config.json: rope_type {rope['rope_type']!r}, exported to GGUF are default, linear "
            "and llama3",
            "convert this model with llama.cpp's own converter",
        )
    if rope["partial_rotary_factor"] != 1.0 and config.model_type != "gpt_neox":
        raise UnsupportedError(
            f"config.json: partial_rotary_factor {rope['partial_rotary_factor']}, llama.cpp "
            "rotates whole heads",
            "run this model with transformers",
        )
    return rope

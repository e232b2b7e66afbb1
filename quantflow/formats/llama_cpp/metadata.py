"""A model's configuration in llama.cpp's words: sizes, norms and rotary embedding."""

import math
from typing import Any

import torch
from torch import Tensor

from quantflow.errors import UnsupportedError
from quantflow.formats.llama_cpp.experts import sizes_of_mixture
from quantflow.formats.llama_cpp.mixture_designs import MIXTURE_DESIGNS, MixtureDesign
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
    if (mixture := MIXTURE_DESIGNS.get(config.model_type)) is not None:
        return _of_mixture(config, mixture)
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


def _of_mixture(config: Any, design: MixtureDesign) -> dict[str, tuple[str, Any]]:
    """`metadata` of a mixture of experts.

    Raises:
        UnsupportedError: a kind of rotary embedding that is not written here.
    """
    sizes, rope = sizes_of_mixture(config, design), dict(config.rope_parameters)
    window = getattr(config, "sliding_window", None)
    context = config.max_position_embeddings
    rotated = int(sizes["d"] * rope.get("partial_rotary_factor", 1.0))
    values: dict[str, tuple[str, Any]] = {
        "context_length": ("u32", context if window is None else min(window, context)),
        "embedding_length": ("u32", config.hidden_size),
        "block_count": ("u32", config.num_hidden_layers),
        "feed_forward_length": ("u32", config.intermediate_size),
        "attention.head_count": ("u32", config.num_attention_heads),
        "attention.head_count_kv": ("u32", sizes["k"] // sizes["d"]),
        "attention.key_length": ("u32", sizes["d"]),
        "attention.value_length": ("u32", sizes["d"]),
        "attention.layer_norm_rms_epsilon": ("f32", float(config.rms_norm_eps)),
        "rope.dimension_count": ("u32", rotated),
        "rope.freq_base": ("f32", float(rope["rope_theta"])),
        "vocab_size": ("u32", config.vocab_size),
        "expert_count": ("u32", sizes["n"]),
        "expert_used_count": ("u32", config.num_experts_per_tok),
        **_scaling(config, rope, latent=design.heads_of is not None),
        **design.fields(config),
    }
    named = {f"{design.architecture}.{key}": value for key, value in values.items()}
    return {"general.architecture": ("string", design.architecture), **named}


def _scaling(config: Any, rope: dict[str, Any], *, latent: bool) -> dict[str, tuple[str, Any]]:
    """Fields of a mixture's rotary embedding that is stretched over a longer context.

    Attention with compressed keys multiplies its scores by YaRN's factor, which llama.cpp derives
    from `mscale_all_dim`, and takes `mscale` for the same.

    Raises:
        UnsupportedError: another kind, or numbers that llama.cpp would not compute with.
    """
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return {}
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(
            f"config.json: rope_type {kind!r}, exported to GGUF with experts are default, linear "
            "and yarn",
            "convert this model with llama.cpp's own converter",
        )
    factor = float(rope["factor"])
    fields: dict[str, tuple[str, Any]] = {
        "rope.scaling.type": ("string", kind),
        "rope.scaling.factor": ("f32", factor),
    }
    if kind == "linear":
        return fields
    scale, all_scale = rope.get("mscale"), rope.get("mscale_all_dim")
    own = rope.get("attention_factor")
    usual = 1.0 if latent else 0.1 * math.log(factor) + 1
    fits = scale == all_scale and bool(all_scale) == latent
    if not fits or (own is not None and abs(own - usual) > 1e-6):
        raise UnsupportedError(
            f"config.json: yarn with mscale {scale}, mscale_all_dim {all_scale} and "
            f"attention_factor {own}, which llama.cpp computes otherwise",
            "run this model with transformers",
        )
    fields["rope.scaling.original_context_length"] = (
        "u32",
        int(rope.get("original_max_position_embeddings") or config.max_position_embeddings),
    )
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if rope.get(ours) is not None:
            fields[f"rope.scaling.{theirs}"] = ("f32", float(rope[ours]))
    if latent:
        fields["rope.scaling.yarn_log_multiplier"] = ("f32", 0.1 * float(all_scale or 1.0))
    return fields


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
    if config.model_type in MIXTURE_DESIGNS:  # `metadata` refuses Llama 3's rule there
        return None
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

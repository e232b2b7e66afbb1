"""What a GGUF file says of a model's architecture, as config.json: the way back from quantflow.formats.llama_cpp.metadata.

Every field of the architecture is understood or the file is refused by the field's name: one that
was passed over could be another rotation or another mask, and nothing would say so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantflow.errors import InputError, UnsupportedError
from quantflow.formats.llama_cpp.gguf import Header
from quantflow.formats.llama_cpp.metadata import ROPE_FACTORS, rope_factors

ARCHITECTURE = "general.architecture"
_CONVERT = "give the model's Hugging Face folder, or convert it with transformers"
_DAMAGED = "download the file again"


@dataclass(frozen=True, kw_only=True)
class _Family:
    """How transformers calls an architecture of llama.cpp's, and its epsilon."""

    model_type: str
    architecture: str
    epsilon: tuple[str, str]  # field -> key of config.json


_RMS = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "llama": _Family(model_type="llama", architecture="LlamaForCausalLM", epsilon=_RMS),
        "qwen2": _Family(model_type="qwen2", architecture="Qwen2ForCausalLM", epsilon=_RMS),
        "qwen3": _Family(model_type="qwen3", architecture="Qwen3ForCausalLM", epsilon=_RMS),
        "gptneox": _Family(
            model_type="gpt_neox",
            architecture="GPTNeoXForCausalLM",
            epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
        ),
    }
)
# Read below, or without a meaning for the numbers.
_KNOWN = {
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "use_parallel_residual",
    "vocab_size",
    "tensor_data_layout",
    "expert_count",
    "expert_used_count",
}
# Llama 3.1's and 3.2's: factor, low_freq_factor, high_freq_factor,
# original_max_position_embeddings.
_LLAMA3 = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))


def config_from(header: Header, path: Path, *, factors: Tensor | None = None) -> dict[str, Any]:
    """Return config.json of the model in a file, without a dtype.

    Args:
        header: of the file.
        path: for messages.
        factors: what the tensor `rope_freqs.weight` holds, float32; None where there is none.

    Raises:
        InputError: a field is missing, or contradicts another.
        UnsupportedError: an architecture, a field or a rotary embedding that is not understood.
    """
    name = header.metadata.get(ARCHITECTURE, ("string", None))[1]
    family = FAMILIES.get(name)
    if family is None:
        cause = f"{path}: general.architecture {name!r}, read from GGUF are {', '.join(FAMILIES)}"
        raise UnsupportedError(cause, _CONVERT)
    fields = _Fields(path=path, values=_fields_of(header, name, path))
    for count in ("expert_count", "expert_used_count"):
        if experts := fields.get(count, 0):
            raise UnsupportedError(
                f"{path}: {name}.{count} is {experts}: experts are not read from GGUF", _CONVERT
            )
    heads, hidden = fields.count("attention.head_count"), fields.count("embedding_length")
    size = fields.count("attention.key_length", hidden // heads)
    if fields.count("attention.value_length", size) != size:
        cause = f"{path}: keys of {size} features and values of {fields.count('attention.value_length')}"
        raise UnsupportedError(cause, _CONVERT)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise InputError(f"{path}: no tensor 'token_embd.weight'", _DAMAGED)
    tied = family.model_type != "gpt_neox" and "output.weight" not in header.tensors
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": fields.count("block_count"),
        "num_attention_heads": heads,
        "max_position_embeddings": fields.count("context_length"),
        family.epsilon[1]: fields.real(family.epsilon[0]),
        "tie_word_embeddings": tied,
    }
    rotated = fields.count("rope.dimension_count", size)
    rope = _rope(fields, factors)
    if family.model_type == "gpt_neox":
        config |= {
            "hidden_act": "gelu",
            "use_parallel_residual": bool(fields.get("use_parallel_residual", True)),
        }
        rope["partial_rotary_factor"] = rotated / size
    elif rotated != size:
        raise UnsupportedError(
            f"{path}: {rotated} of {size} features of a head are rotated", _CONVERT
        )
    else:
        config |= {
            "hidden_act": "silu",
            "num_key_value_heads": fields.count("attention.head_count_kv", heads),
        }
        config |= (
            {"head_dim": size} if size * heads != hidden or family.model_type == "qwen3" else {}
        )
        config |= _variant(header, fields, family)
    config["rope_parameters"] = rope
    if factors is not None:
        config["rope_parameters"] |= _llama3(config, size, factors, path)
    return config


def _fields_of(header: Header, architecture: str, path: Path) -> dict[str, Any]:
    """Return the architecture's fields by their names without it.

    Raises:
        UnsupportedError: one is not known here.
    """
    prefix = f"{architecture}."
    found = {
        key.removeprefix(prefix): value
        for key, (_, value) in header.metadata.items()
        if key.startswith(prefix)
    }
    for key, value in found.items():
        if key not in _KNOWN:
            raise UnsupportedError(
                f"{path}: field {prefix}{key} = {str(value)[:60]!r} is not understood", _CONVERT
            )
    return found


def _variant(header: Header, fields: "_Fields", family: _Family) -> dict[str, Any]:
    """Return what tells a Mistral from a Llama, and the biases that there are."""
    window = fields.get("attention.sliding_window", 0)
    if family.model_type != "llama":
        if window:
            cause = f"{fields.path}: attention.sliding_window {window} of a {family.model_type}"
            raise UnsupportedError(cause, _CONVERT)
        return {}
    if window:
        return {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": int(window),
        }
    return {
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }


def _rope(fields: "_Fields", factors: Tensor | None) -> dict[str, Any]:
    """Return the parameters of the rotary embedding but for Llama 3's.

    Raises:
        UnsupportedError: a scaling that is not read.
    """
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": fields.real("rope.freq_base", 10000.0),
    }
    kind = fields.get("rope.scaling.type", "none")
    if kind == "linear" and factors is None:
        rope |= {"rope_type": "linear", "factor": fields.real("rope.scaling.factor")}
    elif kind == "yarn" and factors is None:
        original = fields.count("rope.scaling.original_context_length")
        rope |= {"rope_type": "yarn", "factor": fields.real("rope.scaling.factor")}
        rope |= {"original_max_position_embeddings": original}
    elif kind != "none":
        raise UnsupportedError(f"{fields.path}: rope.scaling.type {kind!r} is not read", _CONVERT)
    return rope


def _llama3(config: Mapping[str, Any], size: int, factors: Tensor, path: Path) -> dict[str, Any]:
    """Return the parameters whose factors are those of a file, which holds the factors alone.

    Raises:
        UnsupportedError: no released model's.
    """
    for factor, low, high, original in _LLAMA3:
        rope = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
        }
        rope |= {"original_max_position_embeddings": original}
        words = {**config, "num_key_value_heads": None, "head_dim": size}
        words["rope_parameters"] = {**config["rope_parameters"], **rope}
        expected = rope_factors(SimpleNamespace(**words))
        if (
            expected is not None
            and expected.shape == factors.shape
            and torch.allclose(expected, factors, rtol=1e-5, atol=0)
        ):
            return rope
    cause = f"{path}: {ROPE_FACTORS} {factors[:3].tolist()} ... {factors[-1].item():.6g} is no Llama 3's"
    raise UnsupportedError(cause, _CONVERT)


@dataclass(frozen=True, kw_only=True)
class _Fields:
    """Fields of the architecture, whose absence or kind is refused by name."""

    path: Path
    values: Mapping[str, Any]

    def get(self, name: str, default: Any) -> Any:
        return self.values.get(name, default)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(
                f"{self.path}: {name} is {str(value)[:60]}, a positive whole number is needed",
                _DAMAGED,
            )
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """Return a float32 as the shortest decimal number that is it: 1e-05, not 9.999999747378752e-06."""
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(
                f"{self.path}: {name} is {str(value)[:60]}, a number is needed", _DAMAGED
            )
        return float(str(np.float32(value)))

"""config.json from the fields of a GGUF file: the inverse of quantflow.formats.llama_cpp.metadata.

Every field of the architecture is understood, or the file is refused by the field's name. A field
that was passed over could be another rotary embedding or another mask, and nothing would say so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantflow.errors import InputError, UnsupportedError
from quantflow.formats.llama_cpp.gguf import Header
from quantflow.formats.llama_cpp.metadata import ROPE_FACTORS, epsilon_field, rope_factors
from quantflow.models.family import FAMILIES, DecoderDesign, FamilyRow, GgufDesign, KvHeads

ARCHITECTURE = "general.architecture"
_CONVERT = "give the model's Hugging Face folder, or convert it with transformers"
_DAMAGED = "download the file again"


# Values of `general.architecture` -> the families that llama.cpp has under that name.
ARCHITECTURES: dict[str, list[FamilyRow]] = {}
for _row in FAMILIES.values():
    if _row.gguf is not None:
        ARCHITECTURES.setdefault(_row.gguf.architecture, []).append(_row)
# Fields that are read below, or that change no number of a forward.
_UNDERSTOOD = {
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
# Llama 3.1's and 3.2's factor, low_freq_factor, high_freq_factor and
# original_max_position_embeddings.
_LLAMA3 = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))


def config_from(header: Header, path: Path, *, factors: Tensor | None = None) -> dict[str, Any]:
    """config.json of the model in a file, without a dtype.

    Args:
        header: header of the file.
        path: path of the file, for messages.
        factors: tensor `rope_freqs.weight`, float32; None where there is none.

    Raises:
        InputError: a field is missing, or contradicts another.
        UnsupportedError: an architecture, a field or a rotary embedding that is not understood.
    """
    name = header.metadata.get(ARCHITECTURE, ("string", None))[1]
    if name not in ARCHITECTURES:
        raise UnsupportedError(
            f"{path}: general.architecture {name!r}, read from GGUF are {', '.join(ARCHITECTURES)}",
            _CONVERT,
        )
    fields = _Fields(path=path, values=_fields_of(header, name, path))
    row = _row_of(name, fields)
    gguf, design = row.gguf, row.decoder
    assert gguf is not None and design is not None  # every row of ARCHITECTURES has both
    for count in ("expert_count", "expert_used_count"):
        if experts := fields.get(count, 0):
            raise UnsupportedError(
                f"{path}: {name}.{count} is {experts}: experts are not read from GGUF", _CONVERT
            )
    heads, hidden = fields.count("attention.head_count"), fields.count("embedding_length")
    size = fields.count("attention.key_length", hidden // heads)
    value_size = fields.count("attention.value_length", size)
    if value_size != size:
        raise UnsupportedError(
            f"{path}: keys of {size} features and values of {value_size}", _CONVERT
        )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise InputError(f"{path}: no tensor 'token_embd.weight'", _DAMAGED)
    tied = gguf.may_be_tied and "output.weight" not in header.tensors
    config: dict[str, Any] = {
        "architectures": [row.architecture],
        "model_type": row.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": fields.count("block_count"),
        "num_attention_heads": heads,
        "max_position_embeddings": fields.count("context_length"),
        design.eps_key: fields.real(epsilon_field(row.model_type)),
        "tie_word_embeddings": tied,
    }
    rotated = fields.count("rope.dimension_count", size)
    rope = _rope(fields, factors)
    if design.partial_rope:
        rope["partial_rotary_factor"] = rotated / size
    elif rotated != size:
        raise UnsupportedError(
            f"{path}: {rotated} of {size} features of a head are rotated", _CONVERT
        )
    config[design.activation_key] = gguf.activations[0]
    if isinstance(design.parallel_residual, str):
        parallel = bool(fields.get("use_parallel_residual", True))
        config[design.parallel_residual] = parallel
    if design.kv_heads is KvHeads.COUNTED:
        config["num_key_value_heads"] = fields.count("attention.head_count_kv", heads)
        if size * heads != hidden or "head_dim" in design.defaults:
            config["head_dim"] = size
    if design.windows is not None and (window := fields.get("attention.sliding_window", 0)):
        config["sliding_window"] = int(window)
    config |= _biases(gguf, design, header)
    config["rope_parameters"] = rope
    if factors is not None:
        config["rope_parameters"] |= _llama3(config, size, factors, path)
    return config


def _fields_of(header: Header, architecture: str, path: Path) -> dict[str, Any]:
    """The architecture's fields, by their names without the architecture.

    Raises:
        UnsupportedError: one is not known here.
    """
    prefix = f"{architecture}."
    fields = {
        key.removeprefix(prefix): value
        for key, (_, value) in header.metadata.items()
        if key.startswith(prefix)
    }
    for key, value in fields.items():
        if key not in _UNDERSTOOD:
            raise UnsupportedError(
                f"{path}: field {prefix}{key} = {str(value)[:60]!r} is not understood", _CONVERT
            )
    return fields


def _row_of(architecture: str, fields: "_Fields") -> FamilyRow:
    """The family of a file: of those of an architecture, a sliding window tells Mistral from Llama.

    Raises:
        UnsupportedError: a sliding window in an architecture of a single family.
    """
    rows = ARCHITECTURES[architecture]
    window = fields.get("attention.sliding_window", 0)
    if len(rows) == 1 and window:
        raise UnsupportedError(
            f"{fields.path}: attention.sliding_window {window} of a {rows[0].model_type}", _CONVERT
        )
    has_window = {row.decoder is not None and row.decoder.windows is not None: row for row in rows}
    return rows[0] if len(rows) == 1 else has_window[bool(window)]


def _biases(gguf: GgufDesign, design: DecoderDesign, header: Header) -> dict[str, bool]:
    """Keys of config.json that say which linears have a bias, where llama.cpp runs both."""
    keys: dict[str, bool] = {}
    for role, flag, linear in (
        ("qkv", design.qkv_bias, gguf.names.qkv[0]),
        ("output", design.output_bias, gguf.names.output),
        ("up", design.mlp_bias, gguf.names.up[-1]),
    ):
        if role in gguf.may_be_biased and isinstance(flag, tuple):
            # one key may stand for several linears: the first of them says it
            keys.setdefault(flag[0], f"{gguf.names.layers}.0.{linear}.bias" in header.tensors)
    return keys


def _rope(fields: "_Fields", factors: Tensor | None) -> dict[str, Any]:
    """The parameters of the rotary embedding but for Llama 3's.

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
    """The parameters whose factors a file holds, since it holds the factors alone.

    Raises:
        UnsupportedError: no released model has these factors.
    """
    for factor, low, high, original in _LLAMA3:
        rope = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
        }
        rope |= {"original_max_position_embeddings": original}
        candidate = {**config, "num_key_value_heads": None, "head_dim": size}
        candidate["rope_parameters"] = {**config["rope_parameters"], **rope}
        expected = rope_factors(SimpleNamespace(**candidate))
        if (
            expected is not None
            and expected.shape == factors.shape
            and torch.allclose(expected, factors, rtol=1e-5, atol=0)
        ):
            return rope
    raise UnsupportedError(
        f"{path}: {ROPE_FACTORS} {factors[:3].tolist()} ... {factors[-1].item():.6g} is no Llama "
        "3's",
        _CONVERT,
    )


@dataclass(frozen=True, kw_only=True)
class _Fields:
    """Fields of the architecture; one that is absent or of another kind is refused by name."""

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
        """A float32 as the shortest decimal that is it: 1e-05, not 9.999999747378752e-06."""
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(
                f"{self.path}: {name} is {str(value)[:60]}, a number is needed", _DAMAGED
            )
        return float(str(np.float32(value)))

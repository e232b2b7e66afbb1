"""A model in llama.cpp's words: names and order of rows of each family that both sides know.

llama.cpp rotates neighbouring rows of a head together for its architecture `llama`, transformers
rows that stand half a head apart; so those of q and k are written in another order. GPT-NeoX keeps
q, k and v of a head together in one linear, llama.cpp wants all of q, then all of k, then all of v.
Nothing else is moved. What a configuration asks for and llama.cpp would not do is refused by name.
Source: github.com/ggml-org/llama.cpp, the converter's LlamaModel, Qwen2Model and GPTNeoXModel.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from quantflow.errors import InputError, UnsupportedError

Order = Literal["stored", "rotary", "fused"]
_REPAIR = "check that config.json belongs to these weights"
# Buffers that old checkpoints carry and no side reads.
_COMPUTED = re.compile(r".*\.(rotary_emb\.inv_freq|attention\.bias|attention\.masked_bias)")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One of llama.cpp's.

    Attributes:
        name: as `general.architecture` has it.
        layers: where the decoder layers are in the checkpoint.
        inside, outside: module of the checkpoint, in a layer or in the model -> (llama.cpp's, sizes
            of its weight).
        biased: modules, of both kinds, that have a bias in every model.
        may_be_biased: modules that llama.cpp runs with and without.
        orders: module of a layer -> the order of its rows, where it is not the checkpoint's.
        activation: what `hidden_act` may be.
    """

    name: str
    layers: str
    inside: Mapping[str, tuple[str, str]]
    outside: Mapping[str, tuple[str, str]]
    biased: frozenset[str] = frozenset()
    may_be_biased: frozenset[str] = frozenset()
    orders: Mapping[str, Order]
    activation: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A tensor of the file.

    Attributes:
        name: llama.cpp's.
        source: the checkpoint's.
        shape: of both.
        order: of the file's rows.
        heads: among which the rows are divided; 0 for the checkpoint's order.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    order: Order = "stored"
    heads: int = 0


# Sizes: h hidden, q and k all heads of queries and keys, d one head, f feed-forward, v vocabulary,
# x all of q, k and v.
_LLAMA = {
    "input_layernorm": ("attn_norm", "h"),
    "self_attn.q_proj": ("attn_q", "qh"),
    "self_attn.k_proj": ("attn_k", "kh"),
    "self_attn.v_proj": ("attn_v", "kh"),
    "self_attn.o_proj": ("attn_output", "hq"),
    "post_attention_layernorm": ("ffn_norm", "h"),
    "mlp.gate_proj": ("ffn_gate", "fh"),
    "mlp.up_proj": ("ffn_up", "fh"),
    "mlp.down_proj": ("ffn_down", "hf"),
}
_LLAMA_OUTSIDE = {
    "model.embed_tokens": ("token_embd", "vh"),
    "model.norm": ("output_norm", "h"),
    "lm_head": ("output", "vh"),
}
_NEOX = {
    "input_layernorm": ("attn_norm", "h"),
    "attention.query_key_value": ("attn_qkv", "xh"),
    "attention.dense": ("attn_output", "hq"),
    "post_attention_layernorm": ("ffn_norm", "h"),
    "mlp.dense_h_to_4h": ("ffn_up", "fh"),
    "mlp.dense_4h_to_h": ("ffn_down", "hf"),
}
_NEOX_OUTSIDE = {
    "gpt_neox.embed_in": ("token_embd", "vh"),
    "gpt_neox.final_layer_norm": ("output_norm", "h"),
    "embed_out": ("output", "vh"),
}
_QKV = frozenset({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"})
_LLAMA_ARCHITECTURE = Architecture(
    name="llama",
    layers="model.layers",
    inside=_LLAMA,
    outside=_LLAMA_OUTSIDE,
    may_be_biased=frozenset(_LLAMA) - {"input_layernorm", "post_attention_layernorm"},
    orders={"self_attn.q_proj": "rotary", "self_attn.k_proj": "rotary"},
    activation=("silu",),
)
ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA_ARCHITECTURE,
    "mistral": _LLAMA_ARCHITECTURE,
    "qwen2": Architecture(
        name="qwen2",
        layers="model.layers",
        inside=_LLAMA,
        outside=_LLAMA_OUTSIDE,
        biased=_QKV,
        orders={},
        activation=("silu",),
    ),
    "qwen3": Architecture(
        name="qwen3",
        layers="model.layers",
        inside={
            **_LLAMA,
            "self_attn.q_norm": ("attn_q_norm", "d"),
            "self_attn.k_norm": ("attn_k_norm", "d"),
        },
        outside=_LLAMA_OUTSIDE,
        orders={},
        activation=("silu",),
    ),
    "gpt_neox": Architecture(
        name="gptneox",
        layers="gpt_neox.layers",
        inside=_NEOX,
        outside=_NEOX_OUTSIDE,
        biased=frozenset({*_NEOX, "gpt_neox.final_layer_norm"}),
        orders={"attention.query_key_value": "fused"},
        activation=("gelu", "gelu_new", "gelu_fast"),
    ),
}


def architecture_for(config: Any) -> Architecture:
    """Return llama.cpp's architecture for a configuration of transformers.

    Raises:
        UnsupportedError: the family has none here, or an activation that llama.cpp would not
            compute.
    """
    found = ARCHITECTURES.get(config.model_type)
    if found is None:
        raise UnsupportedError(
            f"config.json: model_type {config.model_type!r} has no architecture in GGUF here",
            f"use a model of one of {', '.join(ARCHITECTURES)}",
        )
    if config.hidden_act not in found.activation:
        raise UnsupportedError(
            f"config.json: hidden_act {config.hidden_act!r}, llama.cpp computes "
            f"{found.activation[0]!r} for {found.name}",
            "run this model with transformers",
        )
    return found


def places(config: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Place, ...]:
    """Return every tensor of the file that is one of the checkpoint's, in the order of the file.

    Args:
        config: transformers' configuration.
        shapes: source name -> shape, of every tensor of the checkpoint.

    Raises:
        InputError: a tensor that is missing, that belongs nowhere, or that has another shape than
            config.json says.
        UnsupportedError: the family, or a bias that llama.cpp's architecture has not.
    """
    architecture, sizes = architecture_for(config), sizes_of(config)
    found = []
    for source, (name, letters, module) in _modules(config).items():
        shape = tuple(sizes[letter] for letter in letters)
        order = architecture.orders.get(module, "stored")
        heads = (
            0
            if order == "stored"
            else sizes["k" if module.endswith("k_proj") else "q"] // sizes["d"]
        )
        found.append(
            Place(
                name=f"{name}.weight",
                source=f"{source}.weight",
                shape=shape,
                order=order,
                heads=heads,
            )
        )
        if module in architecture.biased or (
            module in architecture.may_be_biased and f"{source}.bias" in shapes
        ):
            found.append(
                Place(
                    name=f"{name}.bias",
                    source=f"{source}.bias",
                    shape=shape[:1],
                    order=order,
                    heads=heads,
                )
            )
    dropped = {
        f"{module}.weight"
        for module, (name, _) in architecture.outside.items()
        if name == "output" and _tied(config)
    }
    _check(found, shapes, architecture=architecture, dropped=dropped)
    return tuple(found)


def source_names(config: Any) -> dict[str, str]:
    """Return the file's name of every weight and bias that there may be -> the checkpoint's.

    Raises:
        UnsupportedError: the family has no architecture here.
    """
    kinds = ("weight", "bias")
    return {
        f"{name}.{kind}": f"{module}.{kind}"
        for module, (name, _, _) in _modules(config).items()
        for kind in kinds
    }


def _tied(config: Any) -> bool:
    return (
        bool(getattr(config, "tie_word_embeddings", False))
        and architecture_for(config).name != "gptneox"
    )


def _modules(config: Any) -> dict[str, tuple[str, str, str]]:
    """Return every module: in the checkpoint -> (in the file, sizes of its weight, module of the family)."""
    architecture = architecture_for(config)
    modules: dict[str, tuple[str, str, str]] = {}
    for module, (name, letters) in architecture.outside.items():
        if name != "output" or not _tied(config):
            modules[module] = (name, letters, module)
    for index in range(config.num_hidden_layers):
        for module, (name, letters) in architecture.inside.items():
            modules[f"{architecture.layers}.{index}.{module}"] = (
                f"blk.{index}.{name}",
                letters,
                module,
            )
    return modules


def row_order(place: Place) -> Tensor:
    """Return which row of the checkpoint each row of the file is, int64 [rows]."""
    rows = torch.arange(place.shape[0])
    if place.order == "rotary":  # a head's first half and second half become neighbours
        rows = rows.view(place.heads, 2, -1).transpose(1, 2)  # [heads, d / 2, 2]
    elif place.order == "fused":  # q, k and v of one head become q of all heads, then k, then v
        rows = rows.view(place.heads, 3, -1).transpose(0, 1)  # [3, heads, d]
    return rows.flatten()


def rows_at_once(place: Place) -> int:
    """Return how many rows of the file stand close together in the checkpoint: those of a head, or 1 for stored order."""
    if place.order == "stored":
        return 1
    return place.shape[0] // (place.heads * (3 if place.order == "fused" else 1))


def sizes_of(config: Any) -> dict[str, int]:
    """Return what the letters of the tables stand for.

    Raises:
        UnsupportedError: heads that cannot be rotated in pairs.
    """
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if size % 2:
        raise UnsupportedError(
            f"config.json: heads of {size}, llama.cpp rotates pairs",
            "run this model with transformers",
        )
    keys = (getattr(config, "num_key_value_heads", None) or heads) * size
    return {
        "h": config.hidden_size,
        "q": heads * size,
        "k": keys,
        "d": size,
        "f": config.intermediate_size,
        "v": config.vocab_size,
        "x": heads * size + 2 * keys,
    }


def _check(
    found: list[Place],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    architecture: Architecture,
    dropped: set[str],
) -> None:
    """Refuse a checkpoint that holds more, less or something else than the file will say."""
    for place in found:
        if place.source not in shapes:
            raise InputError(
                f"{place.source}: not in the checkpoint, {architecture.name} needs it", _REPAIR
            )
        if tuple(shapes[place.source]) != place.shape:
            raise InputError(
                f"{place.source}: {list(shapes[place.source])} in the checkpoint, config.json "
                f"says {list(place.shape)}",
                _REPAIR,
            )
    for name in sorted(shapes.keys() - {place.source for place in found} - dropped):
        if _COMPUTED.fullmatch(name):
            continue
        if name.endswith(".bias"):
            raise UnsupportedError(
                f"{name}: llama.cpp's {architecture.name} has no such bias",
                "run it with transformers",
            )
        raise InputError(
            f"{name}: in the checkpoint, {architecture.name} has no place for it", _REPAIR
        )

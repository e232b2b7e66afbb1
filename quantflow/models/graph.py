"""Which linears a model has, which of them share an input, and what that input comes from: one table per family.

Everything here is in SOURCE names, the names of the checkpoint, without the `.weight` at the end.
For the families in `FAMILIES` a decoder layer has the same names in the checkpoint and in the module tree;
`quantflow.models.capture` checks that when it opens a model.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quantflow.errors import UnsupportedError


@dataclass(frozen=True, kw_only=True)
class LinearGroup:
    """Linears that receive the same tensor.

    Attributes:
        linears: names, inside the layer in a `Family`, full in a `Layer`.
        norm: the norm whose output is exactly the group's input, or None when something else lies between.
        feeder: the linear of whose outputs the group's input is a sum of multiples, each channel from one output, by numbers
            that do not depend on it: a factor goes through. Attention weighs values, a gate multiplies what goes up.
        per_head: the feeder's outputs are heads, each of which `Layer.repeats` heads of the group's input come from.
        fused: runtimes run the group as one linear, so per-tensor scales have to be shared over it.
    """

    linears: tuple[str, ...]
    norm: str | None = None
    feeder: str | None = None
    per_head: bool = False
    fused: bool = False


@dataclass(frozen=True, kw_only=True)
class Residual:
    """What reads and writes the hidden state outside the layers, in families whose norms are all RMSNorms.

    Such a norm multiplies x / sqrt(mean x^2) by its weight (not by 1 + it), so it commutes with rotations.
    """

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model type.

    Attributes:
        model_type, architecture: as config.json names them.
        layers: the list of decoder layers, `model.layers`.
        attention: the attention module inside a layer, the one that writes the KV cache.
        groups: every linear of a decoder layer exactly once, in the order in which the layer calls them. Those whose input
            is no norm's output write the hidden state, and no others do.
        residual: None where a norm subtracts the mean, which no rotation commutes with.
    """

    model_type: str
    architecture: str
    layers: str
    attention: str
    groups: tuple[LinearGroup, ...]
    residual: Residual | None = None


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One decoder layer; `prefix` is `model.layers.3`, the names in `groups` are full.

    Attributes:
        repeats: how many query heads share a key/value head.
        head_dim: features of a head.
    """

    index: int
    prefix: str
    attention: str
    groups: tuple[LinearGroup, ...]
    repeats: int = 1
    head_dim: int = 1

    @property
    def linears(self) -> tuple[str, ...]:
        """Full names of the layer's linears, in call order."""
        return tuple(name for group in self.groups for name in group.linears)

    def relative(self, name: str) -> str:
        """Return a full name of this layer as the layer itself calls it: `self_attn.q_proj`."""
        return name.removeprefix(f"{self.prefix}.")


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The decoder layers of one model, in order."""

    family: Family
    layers: tuple[Layer, ...]

    @property
    def linears(self) -> tuple[str, ...]:
        """Full names of every linear of the decoder layers, in call order."""
        return tuple(name for layer in self.layers for name in layer.linears)


_LLAMA_GROUPS = (
    LinearGroup(linears=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), norm="input_layernorm", fused=True),
    LinearGroup(linears=("self_attn.o_proj",), feeder="self_attn.v_proj", per_head=True),
    LinearGroup(linears=("mlp.gate_proj", "mlp.up_proj"), norm="post_attention_layernorm", fused=True),
    LinearGroup(linears=("mlp.down_proj",), feeder="mlp.up_proj"),
)
_LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    layers="model.layers",
    attention="self_attn",
    groups=_LLAMA_GROUPS,
    residual=Residual(),
)
# The norms feed the same linears with and without use_parallel_residual; only what is added to the result differs.
_GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    layers="gpt_neox.layers",
    attention="attention",
    groups=(
        LinearGroup(linears=("attention.query_key_value",), norm="input_layernorm"),
        LinearGroup(linears=("attention.dense",)),
        LinearGroup(linears=("mlp.dense_h_to_4h",), norm="post_attention_layernorm"),
        LinearGroup(linears=("mlp.dense_4h_to_h",)),
    ),
)
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        _LLAMA,
        replace(_LLAMA, model_type="mistral", architecture="MistralForCausalLM"),
        replace(_LLAMA, model_type="qwen2", architecture="Qwen2ForCausalLM"),
        replace(_LLAMA, model_type="qwen3", architecture="Qwen3ForCausalLM"),
        _GPT_NEOX,
    )
}


def family_for(model_type: object, architectures: object = None) -> Family:
    """Return the family of a model.

    Args:
        model_type: the value in config.json, whatever it is.
        architectures: the value in config.json; None when it is missing.

    Raises:
        UnsupportedError: the model type is not in `FAMILIES`, or the architecture is not its causal LM.
    """
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedError(
            f"config.json: model_type {model_type!r} (architectures {architectures}) is not a supported family",
            f"use a model of one of {', '.join(FAMILIES)}",
        )
    if architectures is not None and architectures != [family.architecture]:
        raise UnsupportedError(
            f"config.json: architectures {architectures}, family {model_type} is supported as {family.architecture}",
            "use the causal language model of this family",
        )
    return family


def graph_for(config: Any) -> Graph:
    """Return the graph of a model from its configuration, transformers' or a `PlainConfig`.

    Raises:
        UnsupportedError: the family is not supported.
    """
    family = family_for(config.model_type, getattr(config, "architectures", None))
    count: int = config.num_hidden_layers
    heads = int(config.num_attention_heads)
    shared = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    layer = partial(_layer, family, repeats=heads // shared, head_dim=head_dim)
    return Graph(family=family, layers=tuple(map(layer, range(count))))


def _layer(family: Family, index: int, *, repeats: int, head_dim: int) -> Layer:
    prefix = f"{family.layers}.{index}"
    groups = tuple(
        replace(
            group,
            linears=tuple(f"{prefix}.{name}" for name in group.linears),
            norm=None if group.norm is None else f"{prefix}.{group.norm}",
            feeder=None if group.feeder is None else f"{prefix}.{group.feeder}",
        )
        for group in family.groups
    )
    attention = f"{prefix}.{family.attention}"
    return Layer(index=index, prefix=prefix, attention=attention, groups=groups, repeats=repeats, head_dim=head_dim)

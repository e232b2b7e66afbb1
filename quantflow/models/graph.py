"""Which linears a model has, which of them share an input, and what that input comes from: one table per family.

Everything here is in SOURCE names, the names of the checkpoint, without the `.weight` at the end.
For the families in `FAMILIES` a decoder layer has the same names in the checkpoint and in the
module tree, but for what `Layer.relative` renames; `quantflow.models.capture` checks that when it
opens a model. The experts of a mixture are linears of their own, as the checkpoint has them:
`quantflow.models.experts` gives the module tree the same. The rows of `FAMILIES` are what one
forward finds of these families (`quantflow.models.discovery`; a test holds that they are equal).
They stand here for the start of a command: reading a row takes 0.04 s, the forward 3.8 s, nearly
all of it for the import of transformers' model code.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quantflow.errors import InputError, UnsupportedError
from quantflow.files.safetensors_header import SplitTensor

if TYPE_CHECKING:
    from quantflow.models.carried import Carried

HEAD = "lm_head"  # how transformers calls what makes logits, whatever a checkpoint does


@dataclass(frozen=True, kw_only=True)
class LinearGroup:
    """Linears that receive the same tensor.

    Attributes:
        linears: names, inside the layer in a `Family`, full in a `Layer`.
        norm: the norm whose output is exactly the group's input and nobody else's, or None when
            something else lies between, or the router, which is not quantized, reads that output
            too.
        feeder: the linear of whose outputs the group's input is a sum of multiples, each channel
            from one output, by numbers that do not depend on it: a factor goes through. Attention
            weighs values, a gate multiplies what goes up.
        per_head: the feeder's outputs are heads, each of which `Layer.repeats` heads of the group's
            input come from.
        fused: runtimes run the group as one linear, so per-tensor scales have to be shared over it.
        expert: the expert that the linears are part of, such as `mlp.experts.3`; None outside a
            mixture. Only some tokens reach it.
    """

    linears: tuple[str, ...]
    norm: str | None = None
    feeder: str | None = None
    per_head: bool = False
    fused: bool = False
    expert: str | None = None

    @property
    def gated(self) -> bool:
        """Whether the input is what went up, multiplied by a gate: that of a down projection outside a mixture's experts."""
        return self.feeder is not None and not self.per_head

    @property
    def folds(self) -> bool:
        """Whether what the group reads comes from something that factors can be folded into."""
        return self.norm is not None or self.feeder is not None


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """What a sparse layer has in the place of its MLP.

    Attributes:
        block: its module inside a layer, as the checkpoint calls it; transformers calls it `mlp` in
            every family.
        linears: what the gate, up and down linears of an expert are called.
        shared: linears that every token goes through beside the experts, in call order.
        routers: linears that decide which experts a token goes to and what they count; they stay as
            they are.
    """

    block: str = "mlp"
    linears: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: tuple[LinearGroup, ...] = ()
    routers: tuple[str, ...] = ("gate",)


@dataclass(frozen=True, kw_only=True)
class Residual:
    """What reads and writes the hidden state outside the layers, in families whose norms are all RMSNorms.

    Such a norm multiplies x / sqrt(mean x^2) by its weight (not by 1 + it), so it commutes with
    rotations.
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
        groups: every linear of a decoder layer exactly once, in the order in which the layer calls
            them.
        mixture: what stands in the place of the `mlp` among `groups` in the layers that config.json
            makes sparse.
        embedding, head: what reads the tokens, and what makes logits of the last hidden state.
        head_place: what the whole model calls the head.
        residual: None where a norm subtracts the mean, which no rotation commutes with, and for
            mixtures, whose routers read the hidden state too. Elsewhere the groups whose input is
            no norm's output write it, and no others do.
        discovered: it is in no table: `quantflow.models.discovery` found it.
        tuple_of: a layer returns the hidden state as the first of a tuple of so many; 0 where it
            returns it alone.
        carried: what a layer hands to the next beside the hidden state; None where nothing is.
    """

    model_type: str
    architecture: str
    layers: str
    attention: str
    groups: tuple[LinearGroup, ...]
    mixture: Mixture | None = None
    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    head_place: str = HEAD
    residual: Residual | None = None
    discovered: bool = False
    tuple_of: int = 0
    carried: "Carried | None" = None


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One decoder layer; all names are full.

    Attributes:
        prefix: what the names of all its tensors begin with, `model.layers.3`.
        attention: the module that writes the KV cache; None where nothing does, such as in a state
            space layer.
        routers: linears of a mixture that are never quantized; empty in a dense layer.
        idle: linears that no token of a causal forward goes through, or whose weight is read past
            them; never quantized.
        skipped: text alone goes past the layer, such as one that attends to an image; all its
            linears are idle.
        place: what the whole model calls it; None where it is `prefix`.
        renamed: a source name in it -> what the whole model calls it, where more than `prefix`
            differs.
        block: the mixture's module, as the checkpoint calls it; None in a dense layer.
        block_place: what the layer calls that module.
        experts: how many experts the mixture has, 0 in a dense layer.
        chosen: how many of them a token goes to.
        repeats: how many query heads share a key/value head.
        head_dim: features of a head.
        kv_heads: heads of keys and values.
    """

    index: int
    prefix: str
    attention: str | None
    groups: tuple[LinearGroup, ...]
    routers: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    skipped: bool = False
    place: str | None = None
    renamed: Mapping[str, str] = field(default_factory=dict, hash=False)
    block: str | None = None
    block_place: str = "mlp"
    experts: int = 0
    chosen: int = 0
    repeats: int = 1
    head_dim: int = 1
    kv_heads: int = 1

    @property
    def linears(self) -> tuple[str, ...]:
        """Full names of the layer's linears, routers not among them, in call order."""
        return tuple(name for group in self.groups for name in group.linears)

    @property
    def gates(self) -> dict[str, str]:
        """Each expert, in order, and its first linear, under which its tokens are counted."""
        found: dict[str, str] = {}
        for group in self.groups:
            if group.expert is not None:
                found.setdefault(group.expert, group.linears[0])
        return found

    def inside(self, name: str) -> str:
        """Return a full name of this layer without the layer's own: `self_attn.q_proj`."""
        return name.removeprefix(f"{self.prefix}.")

    def relative(self, name: str) -> str:
        """Return a full name of this layer as its module calls it: `mlp.gate` for Mixtral's `block_sparse_moe.gate`."""
        if name in self.renamed:
            return self.renamed[name].removeprefix(f"{self.place or self.prefix}.")
        if self.block is not None and name.startswith(f"{self.block}."):
            return f"{self.block_place}.{name.removeprefix(f'{self.block}.')}"
        return self.inside(name)

    def module(self, name: str) -> str:
        """Return a full name of this layer as the whole model calls it: `model.layers.3.mlp.gate`."""
        return f"{self.place or self.prefix}.{self.relative(name)}"


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The decoder layers of one model, in order.

    Attributes:
        split: tensor of a checkpoint that is no linear's weight as [O, I] -> the tensors that it is
            read as: a transpose, or those of every expert. A checkpoint that has the parts under
            their own names needs none.
        others: linears outside the layers but the head, such as those that read images, by all
            names that loaders know.
    """

    family: Family
    layers: tuple[Layer, ...]
    split: Mapping[str, SplitTensor] = field(default_factory=dict, hash=False)
    others: tuple[str, ...] = ()

    @property
    def linears(self) -> tuple[str, ...]:
        """Full names of every linear of the decoder layers, routers not among them, in call order."""
        return tuple(name for layer in self.layers for name in layer.linears)

    @property
    def routers(self) -> tuple[str, ...]:
        """Full names of the linears of mixtures that are never quantized."""
        return tuple(name for layer in self.layers for name in layer.routers)

    @property
    def attentions(self) -> tuple[str, ...]:
        """Full names of the modules that write the KV cache, in order."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def idle(self) -> tuple[str, ...]:
        """Full names of the linears that no token goes through, which are never quantized."""
        return tuple(name for layer in self.layers for name in layer.idle)

    @property
    def sparse(self) -> bool:
        """Whether any layer has experts."""
        return any(layer.experts for layer in self.layers)


_NUMBERED = re.compile(r"(.+?\.[0-9]+)\.")  # what the names of a layer begin with
MLP = "mlp"  # how transformers calls the MLP of a layer, and the mixture in its place
_LLAMA_GROUPS = (
    LinearGroup(
        linears=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        norm="input_layernorm",
        fused=True,
    ),
    LinearGroup(linears=("self_attn.o_proj",), feeder="self_attn.v_proj", per_head=True),
    LinearGroup(
        linears=("mlp.gate_proj", "mlp.up_proj"), norm="post_attention_layernorm", fused=True
    ),
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
# The norms feed the same linears with and without use_parallel_residual; only what is added to the
# result differs.
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
    embedding="gpt_neox.embed_in",
    head="embed_out",
)
# The shared expert reads what the experts and the router read; its own gate is a row that says how
# much it counts.
_QWEN2_MOE = Mixture(
    shared=(
        LinearGroup(linears=("shared_expert.gate_proj", "shared_expert.up_proj"), fused=True),
        LinearGroup(linears=("shared_expert.down_proj",), feeder="shared_expert.up_proj"),
    ),
    routers=("gate", "shared_expert_gate"),
)
_SPARSE = replace(_LLAMA, residual=None)
_MIXTRAL = Mixture(block="block_sparse_moe", linears=("w1", "w3", "w2"))
# of each position alone; the others look at the sequence's length
_ROTATIONS = ("default", "linear", "llama3", "yarn")
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        _LLAMA,
        replace(_LLAMA, model_type="mistral", architecture="MistralForCausalLM"),
        replace(_LLAMA, model_type="qwen2", architecture="Qwen2ForCausalLM"),
        replace(_LLAMA, model_type="qwen3", architecture="Qwen3ForCausalLM"),
        _GPT_NEOX,
        replace(_SPARSE, model_type="mixtral", architecture="MixtralForCausalLM", mixture=_MIXTRAL),
        replace(
            _SPARSE, model_type="qwen2_moe", architecture="Qwen2MoeForCausalLM", mixture=_QWEN2_MOE
        ),
        replace(
            _SPARSE, model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", mixture=Mixture()
        ),
        replace(_SPARSE, model_type="olmoe", architecture="OlmoeForCausalLM", mixture=Mixture()),
    )
}


def family_for(model_type: object, architectures: object = None) -> Family:
    """Return the family of a model.

    Args:
        model_type: the value in config.json, whatever it is.
        architectures: the value in config.json; None when it is missing.

    Raises:
        UnsupportedError: the model type is not in `FAMILIES`, or the architecture is not its causal
            LM.
    """
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedError(
            f"config.json: model_type {model_type!r} (architectures {architectures}) is not a "
            "supported family",
            f"use a model of one of {', '.join(FAMILIES)}",
        )
    if architectures is not None and architectures != [family.architecture]:
        raise UnsupportedError(
            f"config.json: architectures {architectures}, family {model_type} is supported as "
            f"{family.architecture}",
            "use the causal language model of this family",
        )
    return family


class NamedLinears:
    """The configuration of a model whose linears were named instead of found: config.json, its keys as attributes."""

    def __init__(self, config: Mapping[str, Any], graph: Graph) -> None:
        """Keep both."""
        self._config, self.graph = config, graph

    def __getattr__(self, name: str) -> Any:
        """Return the value of a key."""
        try:
            return self._config[name]
        except KeyError as error:
            raise AttributeError(name) from error


def named_graph(
    config: Mapping[str, Any], names: Sequence[str], *, others: Sequence[str] = ()
) -> Graph:
    """Return the graph of linears that were named: each by itself, those that share a number in their names in one layer.

    Args:
        config: the content of config.json; nothing of it has to be there.
        names: full names of the linears, in the checkpoint's order.
        others: matrices that were not named, which loaders may take for linears.
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        numbered = _NUMBERED.match(name)
        layers.setdefault(name if numbered is None else numbered[1], []).append(name)
    architecture = config.get("architectures") or ["unknown"]
    family = Family(
        model_type=str(config.get("model_type")),
        architecture=str(architecture[0]),
        layers="",
        attention="",
        groups=(),
        discovered=True,
    )
    return Graph(
        family=family,
        layers=tuple(
            Layer(
                index=index,
                prefix=prefix,
                attention=None,
                groups=tuple(LinearGroup(linears=(name,)) for name in inside),
            )
            for index, (prefix, inside) in enumerate(layers.items())
        ),
        others=tuple(others),
    )


def graph_for(config: Any) -> Graph:
    """Return the graph of a model from its configuration, transformers' or a `PlainConfig`.

    Raises:
        UnsupportedError: the family is not supported.
        InputError: a mixture, and no number of experts.
    """
    if isinstance(config, NamedLinears):
        return config.graph
    if config.model_type not in FAMILIES:
        # here: it runs the model's own code, which the table makes unnecessary
        from quantflow.models.discovery import graph_of

        return graph_of(config)
    family = family_for(config.model_type, getattr(config, "architectures", None))
    count: int = config.num_hidden_layers
    return Graph(
        family=family, layers=tuple(_layer(family, index, config) for index in range(count))
    )


def text_config(config: Any) -> Any:
    """Return the configuration of the language model in one that speaks of images or sound too; else the configuration."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def moving_rotation(config: Any) -> str | None:
    """Return the rope type of a model that rotates by more than a position alone, None where it does not."""
    kind = str((getattr(config, "rope_parameters", None) or {}).get("rope_type"))
    return None if kind in _ROTATIONS else kind


def _layer(family: Family, index: int, config: Any) -> Layer:
    prefix = f"{family.layers}.{index}"
    experts = _experts(family, index, config)
    heads = int(config.num_attention_heads)
    shared = int(getattr(config, "num_key_value_heads", None) or heads)
    groups = tuple(_full(_unclipped(group, config), prefix) for group in family.groups)
    layer = Layer(
        index=index,
        prefix=prefix,
        attention=f"{prefix}.{family.attention}",
        groups=groups,
        repeats=heads // shared,
        kv_heads=shared,
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
    )
    if family.mixture is None or not experts:
        return layer
    block = f"{prefix}.{family.mixture.block}"
    dense = [group for group in groups if not group.linears[0].startswith(f"{prefix}.{MLP}.")]
    routed = [group for number in range(experts) for group in _expert(family.mixture, number)]
    chosen = getattr(config, "num_experts_per_tok", None)
    return replace(
        layer,
        groups=(*dense, *(_full(group, block) for group in (*family.mixture.shared, *routed))),
        routers=tuple(f"{block}.{name}" for name in family.mixture.routers),
        block=block,
        experts=experts,
        chosen=chosen if isinstance(chosen, int) else experts,
    )


def _unclipped(group: LinearGroup, config: Any) -> LinearGroup:
    """Return a group without its feeder where values are cut to a range (OLMoE's `clip_qkv`), which no factor goes through."""
    clips = group.per_head and getattr(config, "clip_qkv", None) is not None
    return replace(group, feeder=None, per_head=False) if clips else group


def _experts(family: Family, index: int, config: Any) -> int:
    """Return how many experts a layer has, 0 where it is dense, as the families' own modules decide.

    Raises:
        InputError: config.json has no number of experts.
    """
    if family.mixture is None:
        return 0
    # transformers takes either
    counts = [getattr(config, key, None) for key in ("num_experts", "num_local_experts")]
    found = [count for count in counts if isinstance(count, int)]
    if not found:
        raise InputError(
            f"config.json: num_experts and num_local_experts are {counts}, a {family.model_type} "
            "has experts",
            "restore the file from its source",
        )
    step = getattr(config, "decoder_sparse_step", None) or 1
    dense = index in (getattr(config, "mlp_only_layers", None) or ()) or (index + 1) % step
    return 0 if dense else found[0]


def _expert(mixture: Mixture, number: int) -> tuple[LinearGroup, LinearGroup]:
    """Return the groups of one expert: gate and up share an input, down has its own.

    What goes up does not absorb factors for down: an expert's few tokens would choose them.
    """
    expert = f"experts.{number}"
    gate, up, down = (f"{expert}.{name}" for name in mixture.linears)
    return LinearGroup(linears=(gate, up), fused=True, expert=expert), LinearGroup(
        linears=(down,), expert=expert
    )


def _full(group: LinearGroup, prefix: str) -> LinearGroup:
    """Return a group with full names."""
    return replace(
        group,
        linears=tuple(f"{prefix}.{name}" for name in group.linears),
        norm=None if group.norm is None else f"{prefix}.{group.norm}",
        feeder=None if group.feeder is None else f"{prefix}.{group.feeder}",
        expert=None if group.expert is None else f"{prefix}.{group.expert}",
    )

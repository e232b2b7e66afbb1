"""The linears of a model: which of them share an input, and what that input comes from.

All names here are SOURCE names, those of the checkpoint, without the `.weight` at the end. The
experts of a mixture are linears of their own, as the checkpoint has them; the module tree gets the
same from `quantflow.models.experts`. In the families of `UNTRACED` a decoder layer has the same
names in the checkpoint and in the module tree, but for what `Layer.relative` renames;
`quantflow.models.capture` checks that when it opens a model.

A graph comes from the row of a family (`row_graph`; a test holds that it equals what a trace
finds), from a trace of the model's forward (`quantflow.models.discovery`), or from names that a
user chose (`named_graph`). `quantflow.models.open.graph_for` takes the one that fits.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quantflow.errors import InputError, UnsupportedError
from quantflow.files.safetensors_header import SplitTensor
from quantflow.models.family import FAMILIES, FamilyRow, Mixture

if TYPE_CHECKING:  # it imports torch
    from quantflow.models.carried import Carried

HEAD = "lm_head"  # transformers' name of the module that makes logits, whatever a checkpoint says
MLP = "mlp"  # transformers' name of a layer's MLP, and of the mixture in its place
_CAUSAL = re.compile("(ForCausalLM|LMHeadModel|Model|ForConditionalGeneration)$", re.IGNORECASE)
_NUMBERED = re.compile(r"(.+?\.[0-9]+)\.")  # the beginning of every name of a layer
# Rope types whose angles depend on the position alone; others look at the sequence's length.
_ROPE_TYPES_BY_POSITION = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class LinearGroup:
    """Linears that receive the same tensor.

    Attributes:
        linears: names, inside the layer in a `Family`, full in a `Layer`.
        norm: norm whose output is the group's input and is read by nothing else; None where another
            operation lies between, or where a router, which is not quantized, reads it too.
        feeder: linear whose outputs the group's input is a weighted sum of, each channel from one
            output, by weights that do not depend on it: so a factor of a channel goes through.
            Attention weighs values, a gate multiplies what goes up. None where there is none.
        per_head: the feeder's outputs are heads; `Layer.repeats` heads of the group's input come
            from each.
        fused: runtimes run the group as one linear, so its linears share per-tensor scales.
        expert: expert that the linears are part of, such as `mlp.experts.3`, which only some tokens
            reach; None outside a mixture.
    """

    linears: tuple[str, ...]
    norm: str | None = None
    feeder: str | None = None
    per_head: bool = False
    fused: bool = False
    expert: str | None = None

    @property
    def gated(self) -> bool:
        """Whether a gate multiplies the input: that of a down projection outside of experts."""
        return self.feeder is not None and not self.per_head

    @property
    def folds(self) -> bool:
        """Whether factors can be folded into what the group's input comes from."""
        return self.norm is not None or self.feeder is not None


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model type, as the graphs of its models have it.

    Attributes:
        model_type, architecture: the type and its causal language model, as config.json names them.
        layers: the list of decoder layers, `model.layers`.
        attention: attention module inside a layer, the one that writes the KV cache.
        groups: every linear of a dense decoder layer exactly once, in the order in which the layer
            calls them.
        mixture: mixture in the place of the `mlp` among `groups`, in the layers that config.json
            makes sparse.
        embedding, head: token embedding and head, in the checkpoint.
        head_place: module of the head in the whole model.
        discovered: a trace found it (`quantflow.models.discovery`), not its row.
        tuple_of: length of the tuple that a layer returns, whose first is the hidden state; 0 where
            it returns the hidden state alone.
        carried: value that a layer hands to the next beside the hidden state; None for nothing.
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
    discovered: bool = False
    tuple_of: int = 0
    carried: "Carried | None" = None


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One decoder layer; all names are full.

    Attributes:
        index: number of the layer.
        prefix: beginning of the names of all its tensors, `model.layers.3`.
        attention: module that writes the KV cache; None where nothing does, such as in a state
            space layer.
        groups: the linears, in the order in which the layer calls them.
        routers: linears that are never quantized, since a choice hangs on few numbers: of experts
            those of a mixture, of positions that of how much each head of an indexer counts.
        idle: linears that no token of a causal forward goes through, or whose weight something else
            reads; they are never quantized.
        skipped: text alone goes past the layer, such as one that attends to an image; all its
            linears are idle.
        place: name of the layer in the whole model; None where it is `prefix`.
        renamed: source name -> name in the whole model, where more than `prefix` differs.
        block: module of the mixture, as the checkpoint calls it; None in a dense layer.
        block_place: name of that module inside the layer; empty where it is the layer itself.
        experts: number of experts of the mixture, 0 in a dense layer.
        chosen: number of experts that a token goes to.
        repeats: number of query heads that share a kv head.
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
        first_linears: dict[str, str] = {}
        for group in self.groups:
            if group.expert is not None:
                first_linears.setdefault(group.expert, group.linears[0])
        return first_linears

    def turn(self, group: LinearGroup) -> int:
        """1 for linears of an expert that read what all experts read, 2 for those behind, else 0.

        Gate and up have 1, down has 2.
        """
        if group.expert is None:
            return 0
        return 1 if self.gates[group.expert] == group.linears[0] else 2

    def inside(self, name: str) -> str:
        """A full name of this layer without the layer's own: `self_attn.q_proj`."""
        return name.removeprefix(f"{self.prefix}.")

    def relative(self, name: str) -> str:
        """A full name as the layer's module has it: `mlp.gate` for `block_sparse_moe.gate`."""
        if name in self.renamed:
            return self.renamed[name].removeprefix(f"{self.place or self.prefix}.")
        if self.block is not None and name.startswith(f"{self.block}."):
            part = name.removeprefix(f"{self.block}.")
            return f"{self.block_place}.{part}" if self.block_place else part
        return self.inside(name)

    def module(self, name: str) -> str:
        """A full name of this layer in the whole model: `model.layers.3.mlp.gate`."""
        return f"{self.place or self.prefix}.{self.relative(name)}"


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The decoder layers of one model, in order.

    Attributes:
        family: the model's type.
        layers: the decoder layers.
        split: tensor of a checkpoint that is no linear's weight as [O, I] -> the tensors that it is
            read as: a transpose, or those of every expert. A checkpoint that has the parts under
            their own names needs none.
        stacked: the same for tensors in the place of several that transformers writes: experts
            under their own names there, and in one tensor in some releases.
        others: linears outside the layers but the head, such as those that read images, by all
            names that loaders know.
    """

    family: Family
    layers: tuple[Layer, ...]
    split: Mapping[str, SplitTensor] = field(default_factory=dict, hash=False)
    stacked: Mapping[str, SplitTensor] = field(default_factory=dict, hash=False)
    others: tuple[str, ...] = ()

    @property
    def linears(self) -> tuple[str, ...]:
        """Full names of all linears of the decoder layers, routers not among them, in order."""
        return tuple(name for layer in self.layers for name in layer.linears)

    @property
    def routers(self) -> tuple[str, ...]:
        """Full names of the linears of mixtures and indexers that are never quantized."""
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


def _family(row: FamilyRow) -> Family:
    """The family of a row."""
    names = row.names
    return Family(
        model_type=row.model_type,
        architecture=row.architecture,
        layers=names.layers,
        attention=names.attention,
        groups=_groups(row),
        mixture=row.mixture,
        embedding=names.embedding,
        head=names.head,
    )


def _groups(row: FamilyRow) -> tuple[LinearGroup, ...]:
    """The groups of a dense layer: attention and MLP read a norm each, or the hidden state.

    One linear of queries, keys and values feeds nothing: a factor would reach queries too. Nothing
    feeds a down projection without a gate, since no factor goes through an activation.
    """
    names = row.names
    values = names.qkv[2] if len(names.qkv) == 3 else None
    up = names.up[-1] if row.gated and len(names.up) == 2 else None
    return (
        LinearGroup(linears=names.qkv, norm=names.attention_norm, fused=len(names.qkv) > 1),
        LinearGroup(linears=(names.output,), feeder=values, per_head=values is not None),
        LinearGroup(linears=names.up, norm=names.mlp_norm, fused=len(names.up) > 1),
        LinearGroup(linears=(names.down,), feeder=up),
    )


# The families whose graph comes from their row.
UNTRACED: dict[str, Family] = {
    row.model_type: _family(row) for row in FAMILIES.values() if not row.traced
}


def family_for(model_type: object, architectures: object = None) -> Family:
    """The family of a model, of those whose graph comes from their row.

    Args:
        model_type: value in config.json, whatever it is.
        architectures: value in config.json; None when it is missing.

    Raises:
        UnsupportedError: the model type is not in `UNTRACED`, or the architecture is for another
            task.
    """
    family = UNTRACED.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedError(
            f"config.json: model_type {model_type!r} (architectures {architectures}) is not a "
            "supported family",
            f"use a model of one of {', '.join(UNTRACED)}",
        )
    if not may_be_causal_lm(architectures, [family.architecture], family.model_type):
        raise UnsupportedError(
            f"config.json: architectures {architectures}, family {model_type} is supported as "
            f"{family.architecture}",
            "use the causal language model of this family",
        )
    return family


def may_be_causal_lm(architectures: object, names: Sequence[str], model_type: str) -> bool:
    """Whether config.json names a causal language model of its type, its base model, or nothing.

    transformers goes by the model type alone. Released models have names of other code
    (LLaMAForCausalLM), and the base model's where it was saved by itself; whether their tensors
    make a causal language model shows when they are compared. A model for another task has a head
    of its own, and is none.

    Args:
        architectures: value in config.json; None when it is missing.
        names: the type's causal language models in transformers.
        model_type: value in config.json.
    """
    if architectures is None:
        return True
    stems = {*map(_stem, names), model_type.replace("_", "").replace("-", "").lower()}
    return isinstance(architectures, list) and all(
        isinstance(name, str)
        and (name in names or (_CAUSAL.search(name) is not None and _stem(name) in stems))
        for name in architectures
    )


def _stem(architecture: str) -> str:
    """`llama` of LLaMAForCausalLM."""
    return _CAUSAL.sub("", architecture).lower()


def row_graph(config: Any) -> Graph:
    """The graph of a model, from its family's row and the sizes in its configuration.

    Args:
        config: configuration of a family of `UNTRACED`: transformers', or a `PlainConfig`.

    Raises:
        UnsupportedError: the architecture is not the family's causal LM.
        InputError: a mixture without a number of experts.
    """
    family = family_for(config.model_type, getattr(config, "architectures", None))
    count: int = config.num_hidden_layers
    return Graph(
        family=family, layers=tuple(_layer(family, index, config) for index in range(count))
    )


def named_graph(
    config: Mapping[str, Any], names: Sequence[str], *, others: Sequence[str] = ()
) -> Graph:
    """The graph of chosen linears: each is a group, those with one number in their names a layer.

    Args:
        config: content of config.json; nothing of it has to be there.
        names: full names of the linears, in the checkpoint's order.
        others: matrices that were not chosen, which loaders may take for linears.
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


def text_config(config: Any) -> Any:
    """The configuration of the language model in one of images or sound too; else the same one."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def moving_rotation(config: Any) -> str | None:
    """The rope type of a model whose angles depend on more than the position; None elsewhere.

    A model without rotations has none; one with several kinds of layers has parameters of each.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [each for each in parameters.values() if isinstance(each, Mapping)] or [parameters]
    types = [str(kind["rope_type"]) for kind in kinds if "rope_type" in kind]
    return next((each for each in types if each not in _ROPE_TYPES_BY_POSITION), None)


def _layer(family: Family, index: int, config: Any) -> Layer:
    """One layer of a family, with full names."""
    prefix = f"{family.layers}.{index}"
    experts = _experts(family, index, config)
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    groups = tuple(_with_prefix(_unclipped(group, config), prefix) for group in family.groups)
    layer = Layer(
        index=index,
        prefix=prefix,
        attention=f"{prefix}.{family.attention}",
        groups=groups,
        repeats=heads // kv_heads,
        kv_heads=kv_heads,
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
    )
    if family.mixture is None or not experts:
        return layer
    mixture, block = family.mixture, f"{prefix}.{family.mixture.block}"
    attention = [group for group in groups if not group.linears[0].startswith(f"{prefix}.{MLP}.")]
    inside = [
        *_shared_expert(mixture),
        *(group for number in range(experts) for group in _expert(mixture, number)),
    ]
    chosen = getattr(config, "num_experts_per_tok", None)
    return replace(
        layer,
        groups=(*attention, *(_with_prefix(group, block) for group in inside)),
        routers=tuple(f"{block}.{name}" for name in mixture.routers),
        block=block,
        experts=experts,
        chosen=chosen if isinstance(chosen, int) else experts,
    )


def _unclipped(group: LinearGroup, config: Any) -> LinearGroup:
    """A group without its feeder where values are clipped (OLMoE's `clip_qkv`).

    No factor goes through the clipping.
    """
    clips = group.per_head and getattr(config, "clip_qkv", None) is not None
    return replace(group, feeder=None, per_head=False) if clips else group


def _experts(family: Family, index: int, config: Any) -> int:
    """The number of experts of a layer, 0 where it is dense, as the families' modules decide.

    Raises:
        InputError: config.json has no number of experts.
    """
    if family.mixture is None:
        return 0
    # transformers takes either key
    values = [getattr(config, key, None) for key in ("num_experts", "num_local_experts")]
    counts = [value for value in values if isinstance(value, int)]
    if not counts:
        raise InputError(
            f"config.json: num_experts and num_local_experts are {values}, a {family.model_type} "
            "has experts",
            "restore the file from its source",
        )
    step = getattr(config, "decoder_sparse_step", None) or 1
    dense = index in (getattr(config, "mlp_only_layers", None) or ()) or (index + 1) % step
    return 0 if dense else counts[0]


def _shared_expert(mixture: Mixture) -> tuple[LinearGroup, ...]:
    """The groups of the expert that every token goes through; none where there is no such one."""
    if not mixture.shared:
        return ()
    gate, up, down = mixture.shared
    return LinearGroup(linears=(gate, up), fused=True), LinearGroup(linears=(down,), feeder=up)


def _expert(mixture: Mixture, number: int) -> tuple[LinearGroup, LinearGroup]:
    """The groups of one expert: gate and up share an input, down has its own.

    The up projection feeds nothing here: an expert's few tokens would choose the factors.
    """
    expert = f"experts.{number}"
    gate, up, down = (f"{expert}.{name}" for name in mixture.linears)
    return LinearGroup(linears=(gate, up), fused=True, expert=expert), LinearGroup(
        linears=(down,), expert=expert
    )


def _with_prefix(group: LinearGroup, prefix: str) -> LinearGroup:
    """A group with full names."""
    return replace(
        group,
        linears=tuple(f"{prefix}.{name}" for name in group.linears),
        norm=None if group.norm is None else f"{prefix}.{group.norm}",
        feeder=None if group.feeder is None else f"{prefix}.{group.feeder}",
        expert=None if group.expert is None else f"{prefix}.{group.expert}",
    )

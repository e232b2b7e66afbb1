"""A model's tensors in a GGUF file: llama.cpp's names, and the order of rows.

The names stand in the rows of the families that both sides know (`quantflow.models.family`). For
its architecture `llama`, llama.cpp rotates neighbouring rows of a head together where transformers
rotates rows half a head apart, so rows of q and k are written in another order. GPT-NeoX keeps
q, k and v of a head together in one linear, where llama.cpp wants all of q, then of k, then of v.
Nothing else is moved. A configuration that llama.cpp would not compute is refused by name.
Source: github.com/ggml-org/llama.cpp, the converter's LlamaModel, Qwen2Model and GPTNeoXModel.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from quantflow.errors import InputError, UnsupportedError
from quantflow.formats.llama_cpp.mixture_designs import MIXTURE_DESIGNS
from quantflow.models.family import BY_HEAD, FAMILIES, FamilyRow, GgufDesign

Order = Literal["stored", "rotary", "fused", "values", "keys"]
# A role's modules in the checkpoint, their names in the file, and sizes of their weights.
_Part = tuple[tuple[str | None, ...], tuple[str | None, ...], tuple[str, ...]]
_REPAIR = "check that config.json belongs to these weights"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of llama.cpp, for one family.

    Sizes are letters: h hidden, q and k all heads of queries and keys, d one head, f feed-forward,
    v vocabulary, x all of q, k and v.

    Attributes:
        name: value of `general.architecture`.
        layers: the list of decoder layers in the checkpoint.
        inside, outside: module of the checkpoint, in a layer or in the model -> (llama.cpp's name,
            sizes of its weight).
        biased: modules, of both kinds, that have a bias in every model.
        may_be_biased: modules that llama.cpp runs with and without a bias.
        orders: module of a layer -> the order of its rows, where it is not the checkpoint's.
        activations: values of `hidden_act` that llama.cpp computes.
        may_be_tied: llama.cpp takes the embedding for a head that the file does not have.
    """

    name: str
    layers: str
    inside: Mapping[str, tuple[str, str]]
    outside: Mapping[str, tuple[str, str]]
    biased: frozenset[str] = frozenset()
    may_be_biased: frozenset[str] = frozenset()
    orders: Mapping[str, Order]
    activations: tuple[str, ...]
    may_be_tied: bool


@dataclass(frozen=True, kw_only=True)
class Place:
    """A tensor of the file.

    Attributes:
        name: llama.cpp's name.
        source: the checkpoint's name.
        shape: shape in both.
        order: order of the file's rows; "values" are some rows of each head, the last ones, and
            "keys" the first ones of each head transposed, so that a row is a column of these.
        heads: number of heads that the rows are divided among; 0 for the checkpoint's order.
        other_rows: rows of each head that "values" and "keys" leave out.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    order: Order = "stored"
    heads: int = 0
    other_rows: int = 0


def _architecture(row: FamilyRow, gguf: GgufDesign) -> Architecture:
    """llama.cpp's architecture of a family, from the names of its parts in both."""
    ours, theirs = row.names, gguf.names
    # role -> (the checkpoint's names, the file's, sizes of each); in the order of a layer's tensors
    qkv = ("qh", "kh", "kh") if len(ours.qkv) == 3 else ("xh",)
    inside: dict[str, _Part] = {
        "attention_norm": ((ours.attention_norm,), (theirs.attention_norm,), ("h",)),
        "qkv": (ours.qkv, theirs.qkv, qkv),
        "output": ((ours.output,), (theirs.output,), ("hq",)),
        "mlp_norm": ((ours.mlp_norm,), (theirs.mlp_norm,), ("h",)),
        "up": (ours.up, theirs.up, ("fh",) * len(ours.up)),
        "down": ((ours.down,), (theirs.down,), ("hf",)),
        "q_norm": ((ours.q_norm,), (theirs.q_norm,), ("d",)),
        "k_norm": ((ours.k_norm,), (theirs.k_norm,), ("d",)),
    }
    outside: dict[str, _Part] = {
        "embedding": ((ours.embedding,), (theirs.embedding,), ("vh",)),
        "norm": ((ours.norm,), (theirs.norm,), ("h",)),
        "head": ((ours.head,), (theirs.head,), ("vh",)),
    }
    orders: dict[str, Order] = {}
    if gguf.rotary_pairs:
        orders = dict.fromkeys(ours.qkv[:2], "rotary")
    elif row.fused == BY_HEAD:
        orders = dict.fromkeys(ours.qkv, "fused")
    return Architecture(
        name=gguf.architecture,
        layers=ours.layers,
        inside=_named(inside),
        outside=_named(outside),
        biased=_modules_of(gguf.biased, inside | outside),
        may_be_biased=_modules_of(gguf.may_be_biased, inside | outside),
        orders=orders,
        activations=gguf.activations,
        may_be_tied=gguf.may_be_tied,
    )


def _named(parts: Mapping[str, _Part]) -> dict[str, tuple[str, str]]:
    """Module of the checkpoint -> (name in the file, sizes); without what the family has not."""
    return {
        module: (name, sizes)
        for modules, names, all_sizes in parts.values()
        for module, name, sizes in zip(modules, names, all_sizes, strict=True)
        if module is not None and name is not None
    }


def _modules_of(roles: frozenset[str], parts: Mapping[str, _Part]) -> frozenset[str]:
    """The checkpoint's modules of some roles."""
    return frozenset(module for role in roles for module in parts[role][0] if module is not None)


# model_type -> llama.cpp's architecture of it.
ARCHITECTURES: dict[str, Architecture] = {
    row.model_type: _architecture(row, row.gguf) for row in FAMILIES.values() if row.gguf
}


def architecture_for(config: Any) -> Architecture:
    """llama.cpp's architecture for a configuration of transformers.

    Raises:
        UnsupportedError: the family has none here, or an activation that llama.cpp would not
            compute.
    """
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise UnsupportedError(
            f"config.json: model_type {config.model_type!r} has no architecture in GGUF here",
            f"use a model of one of {', '.join([*ARCHITECTURES, *MIXTURE_DESIGNS])}",
        )
    if config.hidden_act not in architecture.activations:
        raise UnsupportedError(
            f"config.json: hidden_act {config.hidden_act!r}, llama.cpp computes "
            f"{architecture.activations[0]!r} for {architecture.name}",
            "run this model with transformers",
        )
    return architecture


def places(config: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Place, ...]:
    """The tensors of the file that are the checkpoint's, in the order of the file.

    Args:
        config: transformers' configuration.
        shapes: source name -> shape, of every tensor of the checkpoint.

    Raises:
        InputError: a tensor that is missing, that belongs nowhere, or that has another shape than
            config.json says.
        UnsupportedError: the family, or a bias that llama.cpp's architecture has not.
    """
    architecture, sizes = architecture_for(config), sizes_of(config)
    tensors = []
    for source, (name, letters, module) in _modules(config).items():
        shape = tuple(sizes[letter] for letter in letters)
        order = architecture.orders.get(module, "stored")
        rows = sizes["k" if letters.startswith("k") else "q"]
        heads = 0 if order == "stored" else rows // sizes["d"]
        tensors.append(
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
            tensors.append(
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
    _check(tensors, shapes, architecture=architecture, dropped=dropped)
    return tuple(tensors)


def source_names(config: Any) -> dict[str, str]:
    """The file's name of every weight and bias that there may be -> the checkpoint's.

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
    tied = bool(getattr(config, "tie_word_embeddings", False))
    return tied and architecture_for(config).may_be_tied


def _modules(config: Any) -> dict[str, tuple[str, str, str]]:
    """Module of the checkpoint -> (name in the file, sizes of its weight, module of the family)."""
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
    """For each row of the file, its row in the checkpoint, int64 [rows].

    Of "keys", whose rows are columns, it is the row's place among those of all heads.
    """
    rows = torch.arange(place.shape[0])
    if place.order == "values":
        own = place.shape[0] // place.heads
        return rows + (rows // own + 1) * place.other_rows
    if place.order == "rotary":  # a head's first half and second half become neighbours
        rows = rows.view(place.heads, 2, -1).transpose(1, 2)  # [heads, d / 2, 2]
    elif place.order == "fused":  # q, k and v of one head become q of all heads, then k, then v
        rows = rows.view(place.heads, 3, -1).transpose(0, 1)  # [3, heads, d]
    return rows.flatten()


def rows_at_once(place: Place) -> int:
    """Number of file rows that stand close together in the checkpoint: a head's, or 1 as stored."""
    if place.order == "stored":
        return 1
    if place.order == "values":
        return place.shape[0] // place.heads
    return place.shape[0] // (place.heads * (3 if place.order == "fused" else 1))


def sizes_of(config: Any) -> dict[str, int]:
    """The numbers that the letters of `Architecture` stand for.

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
    keys = (getattr(config, "num_key_value_heads", None) or heads) * size  # all kv heads
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
    tensors: list[Place],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    architecture: Architecture,
    dropped: set[str],
) -> None:
    """Refuse a checkpoint that holds more, less or something else than the file will say."""
    for place in tensors:
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
    for name in sorted(shapes.keys() - {place.source for place in tensors} - dropped):
        if name.endswith(".bias"):
            raise UnsupportedError(
                f"{name}: llama.cpp's {architecture.name} has no such bias",
                "run it with transformers",
            )
        raise InputError(
            f"{name}: in the checkpoint, {architecture.name} has no place for it", _REPAIR
        )

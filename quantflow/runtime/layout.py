"""The tensors of a model by arithmetic on its config.json: names, shapes, linears. No module is made for it.

It is what an artifact's headers are compared with where `quantflow.runtime.architecture` knows the
family. The list has every tensor of the family's module tree in transformers and no other (tests
hold both to be equal, for all families of `DESIGNS`). An artifact that it does not fit exactly, by
a name, a shape or a key of config.json, is judged by the module tree instead
(quantflow/runtime/module_layout.py): that one knows older names of tensors, and says what is wrong.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quantflow.errors import InputError
from quantflow.models.graph import HEAD, MLP, Mixture
from quantflow.runtime import architecture
from quantflow.runtime.architecture import DESIGNS, Blueprint, Design, Flag, Keys, No

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """What the model needs of a tensor.

    Attributes:
        source: the tensor that it is read from.
        shape: as the model has it.
        floating: whether it holds floating-point numbers.
    """

    source: str
    shape: Shape
    floating: bool = True


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Tensors, each of them a parameter.

    Attributes:
        parameters: of the model; of two that are tied, where one tensor is there, both.
        head: the linear that makes logits, by the name of the tensor that it multiplies by, without
            `.weight`.
    """

    parameters: tuple[Parameter, ...]
    head: str


class Layout(Protocol):
    """What a model is made of."""

    def linears(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Return which of these names of modules are linears, and their (out_features, in_features)."""

    def module(self, linear: str) -> str:
        """Return what transformers' model calls a linear of `linears`."""

    def bind(self, names: Sequence[str], *, quantized: Collection[str]) -> Bound:
        """Match tensors with parameters.

        Args:
            names: source names; a quantized linear stands for `NAME.weight`.
            quantized: source names of the quantized linears.

        Raises:
            InputError: a tensor that is no parameter, a parameter without a tensor.
        """

    def caches(self) -> dict[str, int]:
        """Return the attentions that write the KV cache, in order of the layers, and how many heads each has in it."""


class ListedLayout:
    """The layout of a family of `DESIGNS`."""

    def __init__(self, design: Design, made: Blueprint, keys: Keys) -> None:
        """List all tensors.

        Raises:
            No: a size that config.json does not say.
        """
        self._names, self._heads, self._layers = made.names, made.heads.shared, made.layers
        self._block = None if made.mixture is None else made.mixture.block
        self._tied = (
            bool(keys.get("tie_word_embeddings"))
            if keys.has("tie_word_embeddings")
            else design.tied
        )
        self._linears = {name: shape for name, shape, _ in _linears(design, made, keys)}
        self._shapes: dict[str, Shape] = {
            f"{name}.weight": shape for name, shape in self._linears.items()
        }
        self._shapes |= {
            f"{name}.bias": shape[:1] for name, shape, bias in _linears(design, made, keys) if bias
        }
        self._shapes |= {
            f"{made.names.embedding}.weight": self._shapes[f"{made.names.head}.weight"]
        }
        for name, width in _norms(made, keys):
            self._shapes |= {
                f"{name}.{leaf}": (width,)
                for leaf in (("weight", "bias") if design.centered else ("weight",))
            }

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Every tensor by its source name, and its shape; two that are tied both."""
        return self._shapes

    @property
    def tied(self) -> bool:
        """Whether the embedding's tensor stands for the head's, where that one is not there."""
        return self._tied

    def linears(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Return the linears among these names; see `Layout`."""
        return {name: self._linears[name] for name in names if name in self._linears}

    def module(self, linear: str) -> str:
        """Return what transformers' model calls a linear: its head `lm_head`, and a mixture as the MLP in its place."""
        if linear == self._names.head:
            return HEAD
        return linear if self._block is None else linear.replace(f".{self._block}.", f".{MLP}.", 1)

    def bind(self, names: Sequence[str], *, quantized: Collection[str]) -> Bound:
        """Match tensors with parameters; see `Layout`."""
        head, embedding = (f"{name}.weight" for name in (self._names.head, self._names.embedding))
        source = {name: name for name in self._shapes}
        if self._tied and head not in names:
            source[head] = embedding
        if differing := sorted(set(names) ^ set(source.values())):
            raise InputError(
                f"{differing[0]}: in only one of config.json and the folder",
                "export the artifact again",
            )
        parameters = tuple(
            Parameter(source=source[name], shape=shape) for name, shape in self._shapes.items()
        )
        return Bound(parameters=parameters, head=source[head].removesuffix(".weight"))

    def caches(self) -> dict[str, int]:
        """Return the attentions and their heads; see `Layout`."""
        attention = self._names.output.rpartition(".")[0]
        return {
            f"{self._names.layers}.{index}.{attention}": self._heads
            for index in range(self._layers)
        }


def listed(config: Mapping[str, Any]) -> ListedLayout | None:
    """Return the layout of a model from its config.json, None where that alone does not say it."""
    made, kind = architecture.read(config), str(config.get("model_type"))
    if isinstance(made, str) or not _is_causal_lm(kind, config.get("architectures")):
        return None
    try:
        return ListedLayout(DESIGNS[kind], made, Keys(config, DESIGNS[kind].defaults))
    except No:
        return None


def _is_causal_lm(model_type: str, architectures: object) -> bool:
    """Return whether config.json names the causal language model of its type, or nothing."""
    if architectures is None:
        return True
    name = f"{model_type.removesuffix('_text').replace('_', '')}forcausallm"
    return isinstance(architectures, list) and [str(given).lower() for given in architectures] == [
        name
    ]


def _linears(
    design: Design, made: Blueprint, keys: Keys
) -> Iterator[tuple[str, tuple[int, int], bool]]:
    """Yield every linear, its (out_features, in_features), and whether it has a bias."""
    names, hidden, heads = made.names, keys.count("hidden_size"), made.heads
    queries, values = heads.query * heads.dim, heads.shared * heads.dim
    for index, sparse in enumerate(made.sparse):
        prefix = f"{names.layers}.{index}"
        qkv = (queries, values, values)
        for name, rows in zip(names.qkv, qkv if len(names.qkv) > 1 else (sum(qkv),), strict=True):
            yield f"{prefix}.{name}", (rows, hidden), _has(design.qkv_bias, keys)
        yield f"{prefix}.{names.output}", (hidden, queries), _has(design.output_bias, keys)
        if sparse and made.mixture is not None:
            for name, shape in _of_mixture(design, made, made.mixture, keys):
                yield f"{prefix}.{made.mixture.block}.{name}", shape, False
            continue
        width = keys.count("intermediate_size")
        rows = width * (2 if made.form.gated else 1) // len(names.up)
        for name in names.up:
            yield f"{prefix}.{name}", (rows, hidden), _has(design.mlp_bias, keys)
        yield f"{prefix}.{names.down}", (hidden, width), _has(design.mlp_bias, keys)
    yield names.head, (made.vocab_size, hidden), _has(design.head_bias, keys)


def _of_mixture(
    design: Design, made: Blueprint, mixture: Mixture, keys: Keys
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the linears of a mixture by their names in its block, and their shapes."""
    assert made.routing is not None  # a layer is sparse
    hidden = keys.count("hidden_size")

    def expert(linears: Sequence[str], width: int) -> Iterator[tuple[str, tuple[int, int]]]:
        *entering, down = linears
        yield from ((name, (width, hidden)) for name in entering)
        yield down, (hidden, width)

    for name, rows in zip(mixture.routers, (made.routing.experts, 1), strict=False):
        yield name, (rows, hidden)
    if mixture.shared:
        linears = [name for group in mixture.shared for name in group.linears]
        yield from expert(linears, keys.count("shared_expert_intermediate_size"))
    for number in range(made.routing.experts):
        for name, shape in expert(mixture.linears, keys.count(design.expert_size)):
            yield f"experts.{number}.{name}", shape


def _norms(made: Blueprint, keys: Keys) -> Iterator[tuple[str, int]]:
    """Yield every norm and its length."""
    names, heads, hidden = made.names, made.heads, keys.count("hidden_size")
    queries, values = (heads.query, heads.shared) if heads.whole_norms else (1, 1)
    inside = (
        (names.attention_norm, hidden),
        (names.attended_norm, hidden),
        (names.mlp_norm, hidden),
        (names.gated_norm, hidden),
        (names.q_norm, queries * heads.dim),
        (names.k_norm, values * heads.dim),
    )
    for index in range(made.layers):
        yield from (
            (f"{names.layers}.{index}.{name}", width) for name, width in inside if name is not None
        )
    yield names.norm, hidden


def _has(flag: Flag, keys: Keys) -> bool:
    """Return whether there is a bias."""
    if isinstance(flag, bool):
        return flag
    key, default = flag
    return bool(keys.get(key)) if keys.has(key) else default

"""The tensors of a model by arithmetic on its config.json: names, shapes, linears.

No module is made for it. An artifact's headers are compared with this list where
`quantflow.models.architecture` knows the family. The list has every tensor of the family's module
tree in transformers and no other; tests hold both to be equal, for all families that the lean
decoder runs. An artifact that does not fit it exactly, by a name, a shape or a key of config.json,
is judged by the module tree instead (`quantflow.models.module_tensors`), which knows older names
of tensors and says what is wrong.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quantflow.errors import InputError
from quantflow.files.safetensors_header import TensorInfo
from quantflow.models import architecture
from quantflow.models.architecture import Blueprint, Delta, Keys, Latent, UnsupportedDesign
from quantflow.models.family import FAMILIES, BiasFlag, DecoderDesign, FamilyRow, Mixture
from quantflow.models.graph import HEAD

Shape = tuple[int, ...]
STORED = ("F64", "F32", "F16", "BF16")  # dtypes of parameters that are not quantized
_OTHER_MODEL = "check that config.json belongs to these weights"


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a model, and the tensor that it is read from.

    Attributes:
        source: source name of the tensor.
        shape: shape in the model.
        floating: it holds floating-point numbers.
    """

    source: str
    shape: Shape
    floating: bool = True


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Tensors, each of them a parameter.

    Attributes:
        parameters: the model's parameters; of two that are tied, where one tensor is there, both.
        head: linear that makes logits, by the name of the tensor that it multiplies by, without
            `.weight`.
        unused: source names that belong to no module of the model.
    """

    parameters: tuple[Parameter, ...]
    head: str
    unused: tuple[str, ...] = ()


class ModelTensors(Protocol):
    """The tensors that a model is made of."""

    def linears(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """The linears among names of modules, and their (out_features, in_features)."""

    def module(self, linear: str) -> str:
        """The name of a linear of `linears` in transformers' model."""

    def bind(self, names: Sequence[str], *, quantized: Collection[str]) -> Bound:
        """Match tensors with parameters.

        Args:
            names: source names; a quantized linear stands for `NAME.weight`.
            quantized: source names of the quantized linears.

        Raises:
            InputError: a tensor that its module does not have, a parameter without a tensor.
        """

    def caches(self) -> dict[str, int]:
        """The attentions that write the KV cache, in order, and how many kv heads each has."""


class ListedTensors:
    """The tensors of a family that the lean decoder runs."""

    def __init__(
        self, row: FamilyRow, design: DecoderDesign, blueprint: Blueprint, keys: Keys
    ) -> None:
        """List all tensors.

        Args:
            row: row of the family.
            design: its `decoder`.
            blueprint: the model, as `architecture.read` returns it.
            keys: keys of its config.json.

        Raises:
            UnsupportedDesign: a size that config.json does not say.
        """
        names = blueprint.names
        heads = blueprint.heads
        self._cached_heads = heads.num_heads if blueprint.repeated_cache else heads.num_kv_heads
        self._names = names
        self._attentions = [
            index for index in range(blueprint.layers) if not blueprint.is_linear(index)
        ]
        self._mixture = blueprint.mixture
        self._tied = design.tied
        if keys.has("tie_word_embeddings"):
            self._tied = bool(keys.get("tie_word_embeddings"))
        self._linears: dict[str, tuple[int, int]] = {}
        biases: dict[str, Shape] = {}
        for name, shape, has_bias in _linears(design, blueprint, keys):
            self._linears[name] = shape
            if has_bias:
                biases[f"{name}.bias"] = shape[:1]
        weights = {f"{name}.weight": shape for name, shape in self._linears.items()}
        norms = {
            f"{name}.{leaf}": (width,)
            for name, width in _norms(blueprint, keys)
            for leaf in (("weight", "bias") if row.centered and design.norm_bias else ("weight",))
        }
        embedding = {f"{names.embedding}.weight": weights[f"{names.head}.weight"]}
        others = dict(_others(blueprint, keys))
        if names.positions is not None:
            rows = keys.count("max_position_embeddings") + blueprint.position_offset
            others[f"{names.positions}.weight"] = (rows, keys.count("hidden_size"))
        self._shapes: dict[str, Shape] = {**weights, **biases, **embedding, **norms, **others}
        if row.traced and not (row.mixture and row.mixture.linear_router):
            # what chooses experts is no linear there, but a module of its own
            for name in _routers(blueprint):
                del self._linears[name]

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Source name of every tensor -> its shape; two that are tied are both there."""
        return self._shapes

    @property
    def tied(self) -> bool:
        """Whether the embedding's tensor stands for the head's, where that one is not there."""
        return self._tied

    def linears(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """The linears among these names; see `ModelTensors`."""
        return {name: self._linears[name] for name in names if name in self._linears}

    def module(self, linear: str) -> str:
        """The name of a linear in transformers' model; see `ModelTensors`.

        The head is `lm_head` there, and a mixture has the name of the MLP in whose place it stands.
        """
        if linear == self._names.head:
            return HEAD
        mixture = self._mixture
        if mixture is None:
            return linear
        return linear.replace(f".{mixture.block}.", f".{mixture.place}.", 1)

    def bind(self, names: Sequence[str], *, quantized: Collection[str]) -> Bound:
        """Match tensors with parameters; see `ModelTensors`."""
        head, embedding = f"{self._names.head}.weight", f"{self._names.embedding}.weight"
        source = {name: name for name in self._shapes}
        if self._tied and head not in names:
            source[head] = embedding
        owners = {name.rpartition(".")[0] for name in source.values()}
        known = set(source.values())
        unused = [name for name in names if name not in known]
        foreign = [name for name in unused if name.rpartition(".")[0] in owners]
        if differing := sorted({*foreign, *(known - set(names))}):
            raise InputError(
                f"{differing[0]}: in only one of config.json and the folder",
                "export the artifact again",
            )
        parameters = tuple(
            Parameter(source=source[name], shape=shape) for name, shape in self._shapes.items()
        )
        return Bound(
            parameters=parameters, head=source[head].removesuffix(".weight"), unused=tuple(unused)
        )

    def caches(self) -> dict[str, int]:
        """The attentions and their kv heads; see `ModelTensors`."""
        return {
            f"{self._names.layers}.{index}.{self._names.attention}": self._cached_heads
            for index in self._attentions
        }


def listed(config: Mapping[str, Any]) -> ListedTensors | None:
    """The tensors of a model from its config.json; None where that alone does not say them."""
    blueprint, row = architecture.read(config), FAMILIES.get(str(config.get("model_type")))
    if isinstance(blueprint, str) or row is None or row.decoder is None:
        return None
    if not _is_causal_lm(row, config.get("architectures")):
        return None
    try:
        keys = Keys(config, row.decoder)
        return ListedTensors(row, row.decoder, blueprint, keys)
    except UnsupportedDesign:
        return None


def require_shapes(
    infos: Mapping[str, TensorInfo],
    parameters: Iterable[Parameter],
    *,
    linears: Collection[str] = (),
) -> None:
    """Refuse a tensor of another shape than the configuration says.

    Decoders without modules would compute with it all the same.

    Args:
        infos: headers of the folder, by source name.
        parameters: parameters of the model, as the configuration alone makes it.
        linears: source names of quantized linears, whose weight is compared when it is decoded.

    Raises:
        InputError: another shape than the model's, or a dtype that is no floating point.
    """
    for parameter in parameters:
        source, needed = parameter.source, list(parameter.shape)
        if source.endswith(".weight") and source.removesuffix(".weight") in linears:
            continue
        info = infos[source]
        if list(info.shape) != needed:
            raise InputError(
                f"{source}: is {list(info.shape)}, the model needs {needed}", _OTHER_MODEL
            )
        if info.dtype not in STORED and parameter.floating:
            raise InputError(
                f"{source}: is {info.dtype}, and no scheme says how it is quantized", _OTHER_MODEL
            )


def _is_causal_lm(row: FamilyRow, architectures: object) -> bool:
    """Whether config.json names the causal language model of its type, or nothing."""
    if architectures is None:
        return True
    expected = [row.architecture.lower()]  # old files spell LLaMAForCausalLM
    return isinstance(architectures, list) and [str(name).lower() for name in architectures] == (
        expected
    )


def _linears(
    design: DecoderDesign, blueprint: Blueprint, keys: Keys
) -> Iterator[tuple[str, tuple[int, int], bool]]:
    """Every linear, its (out_features, in_features), and whether it has a bias."""
    names, hidden, heads = blueprint.names, keys.count("hidden_size"), blueprint.heads
    queries, values = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    for index, sparse in enumerate(blueprint.sparse):
        prefix = f"{names.layers}.{index}"
        qkv = (queries * (2 if heads.output_gate else 1), values, values)
        if blueprint.delta is not None and blueprint.is_linear(index):
            yield from _of_delta(blueprint.delta, prefix, hidden)
        elif blueprint.latent is not None:
            yield from _of_latent(design, blueprint, blueprint.latent, prefix, keys)
            yield from _of_indexer(blueprint, index, hidden)
        else:
            of_names = qkv if len(names.qkv) > 1 else (sum(qkv),)
            for name, rows in zip(names.qkv, of_names, strict=True):
                yield f"{prefix}.{name}", (rows, hidden), _has_bias(design.qkv_bias, keys)
            yield f"{prefix}.{names.output}", (hidden, queries), _has_bias(design.output_bias, keys)
        if sparse and blueprint.mixture is not None:
            for name, shape, has_bias in _of_mixture(design, blueprint, blueprint.mixture, keys):
                yield f"{prefix}.{name}", shape, has_bias
            continue
        width = _mlp_width(design, keys, hidden)
        rows = width * (2 if blueprint.form.gated else 1) // len(names.up)
        for name in names.up:
            yield f"{prefix}.{name}", (rows, hidden), _has_bias(design.mlp_bias, keys)
        yield f"{prefix}.{names.down}", (hidden, width), _has_bias(design.mlp_bias, keys)
    read = hidden
    if names.embedding_linear is not None and names.head_linear is not None:
        read = keys.count(str(design.embedding_size_key))
        yield names.embedding_linear, (hidden, read), False
        yield names.head_linear, (read, hidden), False
    yield names.head, (blueprint.vocab_size, read), _has_bias(design.head_bias, keys)


def _mlp_width(design: DecoderDesign, keys: Keys, hidden: int) -> int:
    """Width of a dense layer's MLP."""
    key = design.mlp_size_key
    if key is None or (design.mlp_size_optional and keys.get(key) is None):
        return 4 * hidden
    return keys.count(key)


def _of_latent(
    design: DecoderDesign, blueprint: Blueprint, latent: Latent, prefix: str, keys: Keys
) -> Iterator[tuple[str, tuple[int, int], bool]]:
    """The linears of multi-head latent attention, as `_linears` has them."""
    hidden, heads = keys.count("hidden_size"), blueprint.heads.num_heads
    biased, queries = _has_bias(design.qkv_bias, keys), heads * (latent.rotated + latent.plain)
    first, second = (f"{prefix}.{name}" for name in blueprint.names.qkv)
    if latent.compressed is None:
        yield first, (queries, hidden), False
    else:
        yield first, (latent.compressed, hidden), biased
        yield f"{prefix}.{latent.names.query_up}", (queries, latent.compressed), False
    yield second, (latent.features + latent.rotated, hidden), biased
    rows = heads * (latent.plain + latent.value)
    yield f"{prefix}.{latent.names.up}", (rows, latent.features), False
    output = (hidden, heads * latent.value)
    yield f"{prefix}.{blueprint.names.output}", output, _has_bias(design.output_bias, keys)


def _of_indexer(
    blueprint: Blueprint, index: int, hidden: int
) -> Iterator[tuple[str, tuple[int, int], bool]]:
    """The linears of a layer's indexer, as `_linears` has them; none where it has none."""
    indexer, latent, prefix = (
        blueprint.indexer,
        blueprint.latent,
        f"{blueprint.names.layers}.{index}",
    )
    if indexer is None or latent is None or not indexer.layers[index]:
        return
    queries = (indexer.heads * indexer.head_dim, latent.compressed or hidden)
    yield f"{prefix}.{indexer.names.queries}", queries, False
    yield f"{prefix}.{indexer.names.key}", (indexer.head_dim, hidden), False
    yield f"{prefix}.{indexer.names.weights}", (indexer.heads, hidden), False


def _of_delta(
    delta: Delta, prefix: str, hidden: int
) -> Iterator[tuple[str, tuple[int, int], bool]]:
    """The linears of a gated delta net, as `_linears` has them."""
    names, values = delta.names, delta.value_heads * delta.value_dim
    for linears, rows in (
        (names.inputs, (delta.channels, values)),
        (names.scores, (delta.value_heads, delta.value_heads)),
    ):
        if not linears:
            continue
        of_names = rows if len(linears) > 1 else (sum(rows),)
        for name, count in zip(linears, of_names, strict=True):
            yield f"{prefix}.{name}", (count, hidden), False
    yield f"{prefix}.{names.output}", (hidden, values), False


def _of_mixture(
    design: DecoderDesign, blueprint: Blueprint, mixture: Mixture, keys: Keys
) -> Iterator[tuple[str, tuple[int, int], bool]]:
    """The linears of a mixture by their names in the layer, as `_linears` has them."""
    assert blueprint.routing is not None  # a layer is sparse
    hidden, block = keys.count("hidden_size"), mixture.block

    def expert(
        place: str, linears: Sequence[str], width: int, *, biased: bool
    ) -> Iterator[tuple[str, tuple[int, int], bool]]:
        *entering, down = linears
        rows = width * (2 if blueprint.form.gated else 1) // len(entering)
        yield from ((f"{place}.{name}", (rows, hidden), biased) for name in entering)
        yield f"{place}.{down}", (hidden, width), biased

    for name, rows in zip(mixture.routers, (blueprint.routing.experts, 1), strict=False):
        yield f"{block}.{name}", (rows, hidden), mixture.biased
    if mixture.shared:
        width, biased = keys.product(design.shared_size_keys), _has_bias(design.mlp_bias, keys)
        yield from expert(mixture.shared_block or block, mixture.shared, width, biased=biased)
    width = keys.count(design.expert_size_key)
    for number in range(blueprint.routing.experts):
        place = f"{block}.experts.{number}"
        yield from expert(place, mixture.linears, width, biased=mixture.biased)


def _routers(blueprint: Blueprint) -> Iterator[str]:
    """The source names of all linears that decide which experts a token goes to."""
    for index, sparse in enumerate(blueprint.sparse):
        if sparse and blueprint.mixture is not None:
            block = f"{blueprint.names.layers}.{index}.{blueprint.mixture.block}"
            yield f"{block}.{blueprint.mixture.routers[0]}"


def _others(blueprint: Blueprint, keys: Keys) -> Iterator[tuple[str, Shape]]:
    """Every tensor that belongs to no linear and no norm, and its shape."""
    names, mixture = blueprint.names, blueprint.mixture
    for index, sparse in enumerate(blueprint.sparse):
        prefix, delta = f"{names.layers}.{index}", blueprint.delta
        if delta is not None and delta.lightning and blueprint.is_linear(index):
            heads, size = delta.value_heads, keys.count("block_size")
            yield f"{prefix}.{delta.names.norm}.weight", (heads * delta.value_dim,)
            yield f"{prefix}.{delta.names.rate}", (heads, 1, 1)
            shapes: tuple[Shape, ...] = ((heads, size, 1), (heads, size, 1), (1, heads, size, size))
            for name, shape in zip(delta.names.buffers, shapes, strict=True):
                yield f"{prefix}.{name}", shape
        elif delta is not None and blueprint.is_linear(index):
            yield f"{prefix}.{delta.names.convolution}.weight", (delta.channels, 1, delta.kernel)
            yield f"{prefix}.{delta.names.rate}", (delta.value_heads,)
            yield f"{prefix}.{delta.names.shift}", (delta.value_heads,)
            yield f"{prefix}.{delta.names.norm}.weight", (delta.value_dim,)
        indexer = blueprint.indexer
        if indexer is not None and indexer.layers[index]:
            for leaf in ("weight", "bias"):
                yield f"{prefix}.{indexer.names.key_norm}.{leaf}", (indexer.head_dim,)
        if names.sinks is not None:
            yield f"{prefix}.{names.sinks}", (blueprint.heads.num_heads,)
        if sparse and mixture is not None and mixture.correction is not None:
            assert blueprint.routing is not None  # a layer is sparse
            shape = (*(1,) * mixture.correction_rows, blueprint.routing.experts)
            yield f"{prefix}.{mixture.block}.{mixture.correction}", shape


def _norms(blueprint: Blueprint, keys: Keys) -> Iterator[tuple[str, int]]:
    """Every norm and its length."""
    names, heads, hidden = blueprint.names, blueprint.heads, keys.count("hidden_size")
    queries, values = (heads.num_heads, heads.num_kv_heads) if heads.whole_norms else (1, 1)
    branches = (
        (names.attention_norm, hidden),
        (names.attended_norm, hidden),
        (names.mlp_norm, hidden),
        (names.gated_norm, hidden),
    )
    attention = (
        (names.q_norm, queries * heads.head_dim),
        (names.k_norm, values * heads.head_dim),
        *_latent_norms(blueprint.latent),
    )
    for index in range(blueprint.layers):
        inside = branches if blueprint.is_linear(index) else branches + attention
        yield from (
            (f"{names.layers}.{index}.{name}", width) for name, width in inside if name is not None
        )
    if blueprint.norm is not None:
        yield blueprint.norm, hidden
    if names.embedding_norm is not None:
        yield names.embedding_norm, hidden


def _latent_norms(latent: Latent | None) -> Iterator[tuple[str, int]]:
    """The norms inside multi-head latent attention, and their lengths."""
    if latent is not None:
        yield latent.names.norm, latent.features
        if latent.compressed is not None:
            yield latent.names.query_norm, latent.compressed


def _has_bias(flag: BiasFlag, keys: Keys) -> bool:
    """Whether there is a bias."""
    if isinstance(flag, bool):
        return flag
    key, default = flag
    return bool(keys.get(key)) if keys.has(key) else default

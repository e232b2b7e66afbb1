"""What the lean decoder computes of a model, read from its config.json, or a sentence of why not.

Every key of config.json is one of three: it is read here; it changes no number of a forward
(`NEUTRAL`); or the answer is no, with the key's name. So a multiplier, a soft cap or a norm that
nothing here has heard of never runs as if it were not there. A key that config.json leaves out has
the default of the family's configuration in transformers.

The facts of a family, these defaults among them, stand in its row (`quantflow.models.family`): the
names of a layer's parts, and in `decoder` how its layers differ from Llama's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from quantflow.models import rope
from quantflow.models.family import (
    FAMILIES,
    DecoderDesign,
    DeltaNames,
    FamilyRow,
    FusedRows,
    GroupScores,
    IndexerNames,
    KvHeads,
    LatentNames,
    Mixture,
    PartNames,
    RouterScores,
    SparseLayers,
    Windows,
)
from quantflow.models.rope import Rope

# Keys of config.json that change no number of a forward, whatever they are.
NEUTRAL = frozenset(
    {
        # names, tokens, and what concerns training alone
        "model_type",
        "architectures",
        "auto_map",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "quantization_config",
        "name_or_path",
        "transformers.js_config",
        "use_cache",
        "cache_implementation",
        # layers beside the model's, which its forward does not run
        "num_nextn_predict_layers",
        "mtp_num_hidden_layers",
        "num_mtp_layers",
        "id2label",
        "label2id",
        "is_decoder",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "is_encoder_decoder",
        "problem_type",
        "task_specific_params",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "chunk_size_feed_forward",
        "output_router_logits",
        "initializer_range",
        "attention_dropout",
        "hidden_dropout",
        "classifier_dropout",
        "residual_dropout",
        "embedding_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "emb_pdrop",
        "router_aux_loss_coef",
        "pretraining_tp",
        # the tensors say it: a bias is added where there is one, and shapes are checked
        "intermediate_size",
        "ffn_hidden_size",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "use_bias",
        "qkv_bias",
    }
)
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_CHUNKED = "chunked_attention"
_INDEXED = "indexed_attention"
_GRID_KEYS = ("mrope_section", "mrope_interleaved")  # see `DecoderDesign.grid_rope`
_ACTIVATIONS = {  # hidden_act -> an activation of decode.c
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "relu": "relu",
    **{name: "gelu_tanh" for name in ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")},
}


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The attention of a model.

    Attributes:
        num_heads, num_kv_heads: query heads, and kv heads.
        head_dim: features of a head.
        scale: factor of the scores.
        eps: epsilon of all norms.
        cap: scores become cap * tanh(score / cap); 0: they stay.
        clip: queries, keys and values lie between -clip and clip; 0: they stay.
        whole_norms: norms of queries and keys are of all heads at once.
        latent: last features of the one kv head's keys that are its values too; 0: values apart.
        output_gate: a head's output is multiplied by the sigmoid of a gate of its own, which comes
            with queries, keys and values.
        slopes: for each query head, what a score loses for each position between (ALiBi); empty:
            nothing.
        rounded_alibi: slopes, positions and their products are rounded to bfloat16, and what a
            score loses is multiplied by `scale` too.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    eps: float
    cap: float = 0.0
    clip: float = 0.0
    whole_norms: bool = False
    latent: int = 0
    output_gate: bool = False
    slopes: tuple[float, ...] = ()
    rounded_alibi: bool = False


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """How queries grow with their positions, so that attention over long texts stays sharp.

        query *= 1 + attn_scale log(1 + floor((position + 1) / floor_scale))

    Source: Nakanishi 2025, arXiv:2501.19399.

    Attributes:
        floor_scale: positions from one step to the next.
        attn_scale: how much a step counts.
    """

    floor_scale: float
    attn_scale: float


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention; see `quantflow.runtime.latent_attention`.

    Attributes:
        names: names of its parts.
        features: features of a latent.
        rotated: features that are rotated, of a query and of the key that all heads share.
        plain: features of a head's queries and keys that are not rotated.
        value: features of a head's values.
        compressed: features of compressed queries; None: queries come from the hidden state.
        pairs: neighbouring features are rotated together.
        eps: epsilon of the norms inside attention.
    """

    names: LatentNames
    features: int
    rotated: int
    plain: int
    value: int
    compressed: int | None
    pairs: bool
    eps: float = 1e-6  # transformers' modules have it whatever rms_norm_eps says


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """The indexer of sparse attention; see `quantflow.runtime.sparse_attention`.

    Attributes:
        names: names of its parts.
        heads: its heads of queries, which share one key.
        head_dim: features of a head; the first are rotated, as many as attention rotates.
        chosen: positions that a query sees, itself among those that it may choose.
        pairs: neighbouring features are rotated together.
        layers: for each layer, whether it has an indexer; the queries of others see the positions
            that those of the layer before do.
        eps: epsilon of the norm of keys.
    """

    names: IndexerNames
    heads: int
    head_dim: int
    chosen: int
    pairs: bool
    layers: tuple[bool, ...]
    eps: float = 1e-6  # transformers' modules have it whatever rms_norm_eps says


@dataclass(frozen=True, kw_only=True)
class Delta:
    """A gated delta net in the place of attention; see `quantflow.runtime.delta_net`.

    Attributes:
        names: names of its parts.
        key_heads, value_heads: heads of queries and of keys; of values, a multiple of those.
        key_dim, value_dim: features of a head of queries and keys, and of a head of values.
        kernel: tokens that the convolution sees, the present one included.
        lightning: it is lightning attention; see `quantflow.runtime.delta_net`.
        layers: number of layers of the model, on which the rates of lightning attention depend.
        eps: epsilon of lightning attention's norm.
    """

    names: DeltaNames
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    lightning: bool = False
    layers: int = 0
    eps: float = 1e-6  # transformers' module has it whatever rms_norm_eps says

    @property
    def kind(self) -> str:
        """What it is, in words."""
        return "lightning attention" if self.lightning else "a gated delta net"

    @property
    def channels(self) -> int:
        """Features that go through the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Factors of the hidden state and of what a branch adds to it, in a layer.

    Attributes:
        attention, mlp: those of either branch, (of the hidden state, of what is added).
    """

    attention: tuple[float, float]
    mlp: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Form:
    """What all layers of a model have in common beside their attention.

    Attributes:
        activation: activation of the MLP, one of ACTIVATIONS.
        gated: the MLP is activation(gate) * up, else activation(up).
        alpha, limit: numbers of clamped_swiglu, gate * sigmoid(alpha gate) * (up + 1), with gate at
            most `limit` and up between -limit and limit.
        parallel: the MLP reads the hidden state that attention reads, not the one that attention
            was added to.
        post: a norm is of the hidden state after a branch was added, and takes its place: the MLP's
            first norm after attention, its second one after the MLP.
        replaced: the norm of what a branch reads takes the place of the hidden state.
        centered: norms subtract the mean first (LayerNorm).
        residual: factor of what attention and MLP add.
    """

    activation: str = "silu"
    gated: bool = True
    alpha: float = 1.0
    limit: float = math.inf
    parallel: bool = False
    post: bool = False
    replaced: bool = False
    centered: bool = False
    residual: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How tokens find experts.

    Attributes:
        experts: number of experts.
        chosen: number of experts that a token goes to.
        normalized: the weights of a token's experts are divided by their sum.
        least: the least that they are divided by.
        factor: factor of the weights.
        scores: how the router's logits become scores.
        near: share of a logit by which others may be less and count (RouterScores.SPARSE_MIXER).
        groups, chosen_groups: number of groups that experts lie in, and of those that a token's
            experts may be chosen from.
        group_scores: how much a group counts.
        scales_inputs: the weight of an expert multiplies what it reads, not what it puts out.
    """

    experts: int
    chosen: int
    normalized: bool
    least: float = 0.0
    factor: float = 1.0
    scores: RouterScores = RouterScores.SOFTMAX
    near: float = 0.0
    groups: int = 1
    chosen_groups: int = 1
    group_scores: GroupScores = GroupScores.BEST_TWO
    scales_inputs: bool = False


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """A model as the lean decoder runs it.

    Attributes:
        names: names of its parts.
        norm: name of the last norm; None: there is none.
        layers: number of layers.
        vocab_size: V.
        positions: most positions of a sequence; None where nothing bounds them.
        heads, form: attention and layers, alike in all layers.
        windows: for each layer, how many positions a query sees, itself included; 0: all before it.
        chunks: for each layer, the positions of a chunk, of which a query sees its own alone; 0,
            and empty: there are no chunks.
        temperature: of queries in layers without a rotary embedding; None: they stay.
        unit_qk_norms: queries and keys of layers with a rotary embedding have norms of ones.
        ropes: the rotary embeddings.
        rope_of_layer: index into `ropes` of each layer; None for none, and for gated delta nets.
        position_offset: row of the embedding of positions that the first position has.
        sparse: for each layer, whether experts stand in the place of the MLP.
        mixture, routing: the experts, and how tokens find them; None where no layer is sparse.
        latent: multi-head latent attention; None: queries, keys and values of heads.
        indexer: the indexer of sparse attention; None: a query sees all positions before it.
        delta: the gated delta net of some layers; None: all layers have attention.
        linear: for each layer, whether the gated delta net stands in the place of attention.
        shares: factors of each layer's sums; empty: `Form.residual` alone.
        fused: how the rows of one linear of queries, keys and values lie; the number of blocks
            is there.
        repeated_cache: transformers' cache has a kv head once for each query head that it serves
            (Falcon with new_decoder_architecture); measured scales of heads are as many.
        rotary_pairs: neighbouring features of a head are rotated together.
        unit_offset: norms multiply by 1 + their weight.
        embedding_scale: factor of a token's embedding.
        logits_scale: factor of the logits.
        logits_cap: logits become cap * tanh(logit / cap); 0: they stay.
    """

    names: PartNames
    norm: str | None
    layers: int
    vocab_size: int
    positions: int | None
    heads: Heads
    form: Form
    windows: tuple[int, ...]
    ropes: tuple[Rope, ...]
    rope_of_layer: tuple[int | None, ...]
    sparse: tuple[bool, ...]
    mixture: Mixture | None = None
    routing: Routing | None = None
    chunks: tuple[int, ...] = ()
    temperature: Temperature | None = None
    unit_qk_norms: bool = False
    latent: Latent | None = None
    indexer: Indexer | None = None
    delta: Delta | None = None
    linear: tuple[bool, ...] = ()
    shares: tuple[Shares, ...] = ()
    fused: FusedRows = FusedRows()
    repeated_cache: bool = False
    rotary_pairs: bool = False
    position_offset: int = 0
    unit_offset: bool = False
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float = 0.0

    def is_linear(self, index: int) -> bool:
        """Whether a gated delta net stands in the place of a layer's attention."""
        return bool(self.linear) and self.linear[index]


class UnsupportedDesign(Exception):
    """Why the lean decoder cannot run a configuration, in a sentence."""


class Keys:
    """The keys of a config.json; it remembers which were read."""

    def __init__(self, config: Mapping[str, Any], design: DecoderDesign) -> None:
        """Take a configuration; the design has values for keys that it leaves out.

        Raises:
            UnsupportedDesign: a key differs from another name of it.
        """
        defaults, aliases = design.defaults, design.aliases
        config = _flat(config, design.parts)
        for old, name in aliases.items():
            value = config.get(old)
            if value is not None and config.get(name) not in (None, value):
                raise UnsupportedDesign(
                    f"{old}={value!r} of config.json differs from {name}={config[name]!r}"
                )
            config = config if value is None else {**config, name: value}
        self._config, self._defaults, self.read = config, defaults, {*aliases}

    def has(self, key: str) -> bool:
        """Whether config.json has a value for a key."""
        return self._config.get(key) is not None

    def get(self, key: str) -> Any:
        """The value of a key, its default where config.json has none, None without a default."""
        self.read.add(key)
        return self._config[key] if key in self._config else self._defaults.get(key)

    def number(self, key: str) -> float:
        """A number that is finite."""
        value = self.get(key)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise UnsupportedDesign(f"{key} of config.json is {value!r}, no number")
        return float(value)

    def cap(self, key: str) -> float:
        """A positive number, 0 where the value is null."""
        if self.get(key) is None:
            return 0.0
        if self.number(key) <= 0:
            raise UnsupportedDesign(f"{key} of config.json is {self.get(key)!r}, not positive")
        return self.number(key)

    def count(self, key: str) -> int:
        """A positive integer."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnsupportedDesign(f"{key} of config.json is {value!r}, no positive integer")
        return value

    def product(self, names: Sequence[str]) -> int:
        """The product of integers that are not negative."""
        values = [self.get(name) for name in names]
        for name, value in zip(names, values, strict=True):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UnsupportedDesign(f"{name} of config.json is {value!r}, no integer from 0 on")
        return math.prod(values)

    def flag(self, value: bool | str) -> bool:
        """A fact of the family, or the truth of the key that it names."""
        return bool(self.get(value)) if isinstance(value, str) else value

    def of_layers(self, key: str, layers: int) -> list[Any] | None:
        """A list with a value for each layer, or None."""
        value = self.get(key)
        if value is not None and (not isinstance(value, list) or len(value) != layers):
            raise UnsupportedDesign(
                f"{key} of config.json is {value!r}, {layers} layers need as many values"
            )
        return value

    def unread(self) -> dict[str, Any]:
        """The keys that nothing here knows and that have a value, and that value."""
        return {
            key: value
            for key, value in sorted(self._config.items())
            if key not in self.read
            and value is not None
            and (leaf := key.rpartition(".")[2]) not in NEUTRAL
            and not leaf.startswith(("_", "unsloth"))
        }


def _flat(config: Mapping[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """A configuration with the keys of its parts, and of tables in them, as `part.key`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        leaf = key.rpartition(".")[2]
        if (key in parts or leaf != key) and isinstance(value, Mapping) and leaf not in NEUTRAL:
            inner = {f"{key}.{name}": inside for name, inside in value.items()}
            flat |= _flat(inner, parts)
        else:
            flat[key] = value
    return flat


def _window(keys: Keys) -> int:
    """`sliding_window`, 0 where it is null."""
    return 0 if keys.get("sliding_window") is None else keys.count("sliding_window")


def _window_if_used(keys: Keys) -> int:
    """`sliding_window` if `use_sliding_window` is true, else 0: files have both, used or not."""
    keys.read |= {"sliding_window"}
    return _window(keys) if keys.get("use_sliding_window") else 0


def _by_layer_type(keys: Keys, layers: int, window: int, default: list[str]) -> list[int]:
    """A window for the layers that `layer_types` calls sliding; `default` stands for that key."""
    layer_types = keys.of_layers("layer_types", layers) or default
    for layer_type in layer_types:
        if layer_type not in (_SLIDING, _FULL) or (layer_type == _SLIDING and not window):
            raise UnsupportedDesign(
                f"layer_types of config.json has {layer_type!r}, and sliding_window is "
                f"{keys.get('sliding_window')!r}"
            )
    return [window if layer_type == _SLIDING else 0 for layer_type in layer_types]


def _all_layers(keys: Keys, layers: int) -> list[int]:
    return [_window(keys)] * layers


def _all_layers_if_used(keys: Keys, layers: int) -> list[int]:
    return [_window_if_used(keys)] * layers


def _after_n_layers(keys: Keys, layers: int) -> list[int]:
    first, window = keys.get("max_window_layers") or 0, _window_if_used(keys)
    default = [_SLIDING if window and index >= first else _FULL for index in range(layers)]
    return _by_layer_type(keys, layers, window, default)


def _even_of_first_n(keys: Keys, layers: int) -> list[int]:
    end, window = keys.get("max_window_layers") or 0, _window_if_used(keys)
    default = [
        _SLIDING if window and index < end and index % 2 == 0 else _FULL for index in range(layers)
    ]
    return _by_layer_type(keys, layers, window, default)


def _all_but_every_nth(keys: Keys, layers: int) -> list[int]:
    keys.read |= {"_sliding_window_pattern"}
    pattern = keys.count("sliding_window_pattern")
    default = [_SLIDING if (index + 1) % pattern else _FULL for index in range(layers)]
    return _by_layer_type(keys, layers, _window(keys), default)


def _layers_without_rope(keys: Keys, layers: int) -> list[int]:
    window, with_rope = _window_if_used(keys), _layers_with_rope(keys, layers)
    default = [_SLIDING if window and not has_rope else _FULL for has_rope in with_rope]
    return _by_layer_type(keys, layers, window, default)


def _every_other(keys: Keys, layers: int) -> list[int]:
    default = [_FULL if index % 2 else _SLIDING for index in range(layers)]
    return _by_layer_type(keys, layers, _window(keys), default)


def _none_of_attention(keys: Keys, layers: int) -> list[int]:
    for layer_type in keys.of_layers("layer_types", layers) or ["mamba"]:
        if layer_type not in (_FULL, "attention"):
            raise UnsupportedDesign(
                f"layer_types of config.json has {layer_type!r}, it runs attention alone"
            )
    return [0] * layers


def _layers_with_rope(keys: Keys, layers: int) -> list[bool]:
    """For each layer, whether it has a rotary embedding (SmolLM3, Llama 4)."""
    # the key is 1 where there is one, whatever its name suggests; files have an empty list for none
    values = keys.of_layers("no_rope_layers", layers) if keys.get("no_rope_layers") else None
    step = keys.count("no_rope_layer_interval")
    if values is not None:
        return [bool(value) for value in values]
    return [bool((index + 1) % step) for index in range(layers)]


def _chunks(keys: Keys, layers: int) -> tuple[int, ...]:
    """For each layer, the positions of a chunk; 0 where there are no chunks."""
    default = [_CHUNKED if has_rope else _FULL for has_rope in _layers_with_rope(keys, layers)]
    layer_types = keys.of_layers("layer_types", layers) or default
    if unknown := sorted({str(each) for each in layer_types} - {_CHUNKED, _FULL}):
        raise UnsupportedDesign(f"layer_types of config.json has {unknown[0]!r}")
    size = keys.count("attention_chunk_size")
    return tuple(size if layer_type == _CHUNKED else 0 for layer_type in layer_types)


def _temperature(keys: Keys) -> Temperature | None:
    """How queries grow with their positions; None where they stay."""
    floor_scale, attn_scale = keys.number("floor_scale"), keys.number("attn_scale")
    if not keys.get("attn_temperature_tuning"):
        return None
    if floor_scale <= 0:
        raise UnsupportedDesign(f"floor_scale of config.json is {floor_scale:g}, not positive")
    return Temperature(floor_scale=floor_scale, attn_scale=attn_scale)


# For each rule, a function of (keys, number of layers) that returns the window of each layer.
_WINDOWS: Mapping[Windows, Callable[[Keys, int], list[int]]] = MappingProxyType(
    {
        Windows.ALL_LAYERS: _all_layers,
        Windows.ALL_LAYERS_IF_USED: _all_layers_if_used,
        Windows.AFTER_N_LAYERS: _after_n_layers,
        Windows.EVEN_OF_FIRST_N: _even_of_first_n,
        Windows.ALL_BUT_EVERY_NTH: _all_but_every_nth,
        Windows.LAYERS_WITHOUT_ROPE: _layers_without_rope,
        Windows.EVERY_OTHER: _every_other,
        Windows.NONE_OF_ATTENTION: _none_of_attention,
    }
)


def read(config: Mapping[str, Any]) -> Blueprint | str:
    """A model as the lean decoder runs it, or why it does not, in a sentence.

    Args:
        config: content of config.json.
    """
    row, config = _of_text(config)
    if row is None or row.decoder is None:
        return f"it does not know the layers of {config.get('model_type')}"
    try:
        keys = Keys(config, row.decoder)
        blueprint = _blueprint(row, row.decoder, keys)
    except UnsupportedDesign as reason:
        return str(reason)
    for key, value in keys.unread().items():
        return f"it does not know what {key}={value!r} of config.json does"
    return blueprint


def _of_text(config: Mapping[str, Any]) -> tuple[FamilyRow | None, Mapping[str, Any]]:
    """The row of what a model computes of text, None for none, and its part of config.json."""
    kind, inside = str(config.get("model_type")), config.get("text_config")
    row = next((row for row in FAMILIES.values() if row.text_of == kind), None)
    if row is None or not isinstance(inside, Mapping):
        return FAMILIES.get(kind), config
    own, whole = row.text_names
    names = {part: getattr(row.names, part) for part in ("layers", "embedding", "norm", "head")}
    places = {
        part: whole + name.removeprefix(own) for part, name in names.items() if name.startswith(own)
    }
    # the flag is the whole model's
    tied = {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
    return replace(row, names=replace(row.names, **places)), {**inside, **tied}


def _blueprint(row: FamilyRow, design: DecoderDesign, keys: Keys) -> Blueprint:
    """The blueprint of a configuration.

    Raises:
        UnsupportedDesign: a value that the lean decoder does not compute.
    """
    for key, value in design.supported_values.items():
        if keys.get(key) not in (None, value):
            raise UnsupportedDesign(
                f"it knows {key}={value!r} of config.json, not {keys.get(key)!r}"
            )
    keys.read |= design.ignored_keys
    if design.mlp_size_key is not None:
        keys.read.add(design.mlp_size_key)  # the shapes of tensors say it
    # a bias is added where there is a tensor, whatever its key says
    biases = (design.qkv_bias, design.output_bias, design.mlp_bias, design.head_bias)
    keys.read |= {flag[0] for flag in biases if isinstance(flag, tuple)}
    layers, hidden_size = keys.count("num_hidden_layers"), keys.count("hidden_size")
    latent = None if row.latent is None else _latent(row.latent, design, keys)
    delta = None if row.delta is None else _delta(row.delta, keys)
    num_heads, num_kv_heads, head_dim = _heads(design, keys, hidden_size)
    names, form = row.names, _form(row, design, keys)
    if design.twin_norms is not None:
        names, parallel = _norms_by_generation(names, design.twin_norms, keys)
        form = replace(form, parallel=parallel)
    scale = head_dim**-0.5
    if design.query_pre_attn_scalar:
        scale = keys.number("query_pre_attn_scalar") ** -0.5
    embedding_scale = residual_scale = logits_scale = 1.0
    if design.multipliers:
        scale = keys.number("attention_multiplier")
        embedding_scale = keys.number("embedding_multiplier")
        residual_scale = keys.number("residual_multiplier")
        logits_scale = 1 / keys.cap("logits_scaling")
    if design.scaled_embedding:
        embedding_scale = hidden_size**0.5
    windows = [0] * layers if design.windows is None else _WINDOWS[design.windows](keys, layers)
    ropes, rope_of_layer = _ropes(
        design, keys, head_dim if latent is None else latent.rotated, windows
    )
    linear = () if delta is None else _linear_layers(keys, layers, lightning=delta.lightning)
    shares = tuple(_shares(keys, is_linear=each) for each in linear if design.replaced_norms)
    if linear:
        rope_of_layer = tuple(
            None if is_linear else at for is_linear, at in zip(linear, rope_of_layer, strict=True)
        )
    if latent is not None:
        if num_kv_heads != num_heads:
            raise UnsupportedDesign(
                f"num_key_value_heads of config.json is {num_kv_heads}, of {num_heads} heads that "
                "all have keys of their own"
            )
        num_kv_heads, head_dim = 1, latent.rotated + latent.features
        scale = (latent.rotated + latent.plain) ** -0.5 * rope.latent_scale(ropes[0].parameters)
    positions = None
    if keys.get("max_position_embeddings") is not None:
        positions = keys.count("max_position_embeddings")
    sparse, routing = _routing(row, design, keys, layers)
    mixture = row.mixture if routing is not None else None
    if latent is not None and latent.compressed is not None:
        names = replace(names, qkv=(latent.names.compressed, *names.qkv[1:]))
    has_qk_norms = design.qk_norm_key is None or bool(keys.get(design.qk_norm_key))
    if not has_qk_norms:
        names = replace(names, q_norm=None, k_norm=None)
    unit_qk_norms = design.unit_qk_norms and has_qk_norms
    if unit_qk_norms and any(rope.inverse_frequencies(each)[1] != 1 for each in ropes):
        raise UnsupportedDesign("it knows norms behind a rotation that stretches no feature")
    names = _ends(names, design, keys, hidden_size)
    norm: str | None = names.norm
    if design.norm_before_key is not None and not keys.get(design.norm_before_key):
        form, norm = replace(form, post=True), None
        names = replace(
            names, attention_norm=None, mlp_norm=names.attention_norm, gated_norm=names.mlp_norm
        )
    if design.no_last_norm_key is not None and keys.get(design.no_last_norm_key):
        norm = None
    keys.read |= {*design.shared_size_keys}
    if mixture is not None and any(keys.get(key) == 0 for key in design.shared_size_keys):
        mixture = replace(mixture, shared=())
    return Blueprint(
        names=names,
        norm=norm,
        layers=layers,
        vocab_size=keys.count("vocab_size"),
        positions=positions,
        heads=Heads(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=scale,
            eps=keys.number(design.eps_key) if design.eps is None else design.eps,
            cap=keys.cap("attn_logit_softcapping") if design.soft_caps else 0.0,
            clip=0.0 if design.clip_key is None else keys.cap(design.clip_key),
            whole_norms=design.whole_qk_norms,
            latent=0 if latent is None else latent.features,
            output_gate=design.output_gate,
            slopes=_slopes(num_heads) if keys.flag(design.alibi) else (),
            rounded_alibi=design.rounded_alibi,
        ),
        form=replace(form, residual=residual_scale, replaced=design.replaced_norms),
        windows=tuple(windows),
        chunks=_chunks(keys, layers) if design.chunked else (),
        temperature=_temperature(keys) if design.tempered else None,
        unit_qk_norms=unit_qk_norms,
        ropes=ropes,
        rope_of_layer=rope_of_layer,
        sparse=sparse,
        mixture=mixture,
        routing=routing,
        latent=latent,
        indexer=None if row.indexer is None else _indexer(row.indexer, design, keys, layers),
        delta=delta,
        linear=linear,
        shares=shares,
        fused=_fused(row.fused, num_heads, num_kv_heads),
        repeated_cache=design.kv_heads is KvHeads.BY_GENERATION
        and num_kv_heads not in (1, num_heads),
        rotary_pairs=latent is None and keys.flag(design.rotary_pairs),
        position_offset=design.position_offset,
        unit_offset=row.unit_offset,
        embedding_scale=embedding_scale,
        logits_scale=logits_scale,
        logits_cap=keys.cap("final_logit_softcapping") if design.soft_caps else 0.0,
    )


def _ends(names: PartNames, design: DecoderDesign, keys: Keys, hidden_size: int) -> PartNames:
    """The names, without linears behind embeddings and before the head where widths are equal."""
    key = design.embedding_size_key
    if key is None or keys.get(key) in (None, hidden_size):
        return replace(names, embedding_linear=None, head_linear=None)
    keys.count(key)
    return names


def _heads(design: DecoderDesign, keys: Keys, hidden_size: int) -> tuple[int, int, int]:
    """Numbers of query heads and of kv heads, and the features of a head."""
    num_heads = keys.count("num_attention_heads")
    num_kv_heads, head_dim = num_heads, hidden_size // num_heads
    if design.kv_heads is KvHeads.BY_GENERATION:
        num_kv_heads = _kv_heads_by_generation(keys, num_heads)
    elif design.kv_heads is KvHeads.COUNTED:
        if keys.get("num_key_value_heads") is not None:
            num_kv_heads = keys.count("num_key_value_heads")
        if keys.get("head_dim") is not None:
            head_dim = keys.count("head_dim")
    if num_heads % num_kv_heads:
        raise UnsupportedDesign(
            f"{num_kv_heads} heads of keys and values do not divide {num_heads} heads"
        )
    return num_heads, num_kv_heads, head_dim


def _kv_heads_by_generation(keys: Keys, num_heads: int) -> int:
    """The kv heads of a Falcon."""
    told = num_heads if keys.get("num_kv_heads") is None else keys.count("num_kv_heads")
    if keys.get("new_decoder_architecture"):
        keys.read.add("multi_query")
        return told
    if keys.get("multi_query"):
        return 1  # files have the number of query heads in num_kv_heads
    if told != num_heads:
        raise UnsupportedDesign(
            f"num_kv_heads of config.json is {told}, of {num_heads} heads that all have keys of "
            "their own without multi_query"
        )
    return num_heads


def _norms_by_generation(
    names: PartNames, twins: tuple[str, str], keys: Keys
) -> tuple[PartNames, bool]:
    """The names with the norms of a Falcon's layers, and whether its branches are side by side."""
    new, parallel = bool(keys.get("new_decoder_architecture")), bool(keys.get("parallel_attn"))
    count = keys.get("num_ln_in_parallel_attn")
    if count is None:
        count = 2 if new else 1
    if not new and not parallel:
        return names, False
    if not parallel or count not in ((1, 2) if new else (1,)):
        raise UnsupportedDesign(
            f"it knows no layers with new_decoder_architecture={new}, parallel_attn={parallel} and "
            f"num_ln_in_parallel_attn={count} of config.json"
        )
    if count == 1:
        return replace(names, mlp_norm=names.attention_norm), True
    before_attention, before_mlp = twins
    return replace(names, attention_norm=before_attention, mlp_norm=before_mlp), True


def _fused(rows: FusedRows, num_heads: int, num_kv_heads: int) -> FusedRows:
    """How the rows of one linear of queries, keys and values lie, with the number of blocks."""
    blocks = num_kv_heads if rows.blocks is None else rows.blocks
    if num_heads % blocks or num_kv_heads % blocks:
        raise UnsupportedDesign(
            f"{num_heads} heads, {num_kv_heads} of keys and values, do not lie in {blocks} blocks"
        )
    return replace(rows, blocks=blocks)


def _slopes(heads: int) -> tuple[float, ...]:
    """ALiBi's slope of each head: Press et al. 2022, arXiv:2108.12409, section 3.

    Of a number of heads that is no power of two, the first have those of the power below; the
    others every second one of the power above.
    """
    below = 1 << (heads.bit_length() - 1)

    def powers(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (index + 1) / count) for index in range(count)]

    return tuple((powers(below) + powers(2 * below)[::2])[:heads])


def _latent(names: LatentNames, design: DecoderDesign, keys: Keys) -> Latent:
    """The sizes of multi-head latent attention."""
    rotated = keys.count("qk_rope_head_dim")
    if keys.get("head_dim") not in (None, rotated):
        raise UnsupportedDesign(
            f"head_dim of config.json is {keys.get('head_dim')!r}, and qk_rope_head_dim {rotated}"
        )
    return Latent(
        names=names,
        features=keys.count("kv_lora_rank"),
        rotated=rotated,
        plain=keys.count("qk_nope_head_dim"),
        value=keys.count("v_head_dim"),
        compressed=None if keys.get("q_lora_rank") is None else keys.count("q_lora_rank"),
        pairs=keys.flag(design.rotary_pairs),
    )


def _indexer(names: IndexerNames, design: DecoderDesign, keys: Keys, layers: int) -> Indexer:
    """The sizes of the indexer of sparse attention."""
    rotated, head_dim = keys.count("qk_rope_head_dim"), keys.count("index_head_dim")
    if keys.get("q_lora_rank") is None:
        raise UnsupportedDesign("its indexer reads compressed queries, q_lora_rank is null")
    if rotated > head_dim:
        raise UnsupportedDesign(
            f"index_head_dim of config.json is {head_dim}, of which {rotated} are rotated"
        )
    for layer_type in keys.of_layers("layer_types", layers) or []:
        if layer_type != _INDEXED:
            raise UnsupportedDesign(f"layer_types of config.json has {layer_type!r}")
    return Indexer(
        names=names,
        heads=keys.count("index_n_heads"),
        head_dim=head_dim,
        chosen=keys.count("index_topk"),
        pairs=design.indexer_pairs,
        layers=_layers_with_indexer(keys, layers) if design.shared_selections else (True,) * layers,
    )


def _layers_with_indexer(keys: Keys, layers: int) -> tuple[bool, ...]:
    """For each layer, whether it has an indexer: a list, a pattern such as FSSF, or every n-th."""
    step = 1 if keys.get("index_topk_freq") is None else keys.count("index_topk_freq")
    first = keys.get("index_skip_topk_offset")
    first = 2 if first is None else keys.product(["index_skip_topk_offset"])
    pattern, kinds = keys.get("index_topk_pattern"), keys.of_layers("indexer_types", layers)
    if kinds is None and isinstance(pattern, str):
        kinds = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    elif kinds is None:
        kinds = keys.of_layers("index_topk_pattern", layers) or [
            "shared" if max(index - first + 1, 0) % step else "full" for index in range(layers)
        ]
    if len(kinds) != layers or not {*kinds} <= {"full", "shared"} or kinds[0] != "full":
        raise UnsupportedDesign(
            f"layers of config.json have the indexers {kinds!r}, {layers} layers need as many, "
            "full or shared, and the first full"
        )
    return tuple(kind == "full" for kind in kinds)


def _delta(names: DeltaNames, keys: Keys) -> Delta:
    """The sizes of a gated delta net."""
    if keys.get("hidden_act") not in ("silu", "swish"):
        raise UnsupportedDesign(
            f"it knows linear attention, as a gated delta net has it, with silu, not with "
            f"{keys.get('hidden_act')!r}"
        )
    if names.lightning:
        heads = keys.count("num_attention_heads")
        told = keys.get("head_dim") is not None
        dim = keys.count("head_dim") if told else keys.count("hidden_size") // heads
        return Delta(
            names=names,
            key_heads=heads,
            value_heads=heads,
            key_dim=dim,
            value_dim=dim,
            kernel=1,
            lightning=True,
            layers=keys.count("num_hidden_layers"),
        )
    key_heads, value_heads = (keys.count(f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if value_heads % key_heads:
        raise UnsupportedDesign(
            f"linear_num_key_heads of config.json is {key_heads}, which does not divide "
            f"{value_heads} heads of values"
        )
    return Delta(
        names=names,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=keys.count("linear_key_head_dim"),
        value_dim=keys.count("linear_value_head_dim"),
        kernel=keys.count("linear_conv_kernel_dim"),
    )


def _linear_layers(keys: Keys, layers: int, *, lightning: bool) -> tuple[bool, ...]:
    """For each layer, whether it has a gated delta net in the place of attention."""
    if lightning:
        default = [_LINEAR if index % 2 else _FULL for index in range(layers)]
    else:
        step = keys.count("full_attention_interval")
        default = [_FULL if (index + 1) % step == 0 else _LINEAR for index in range(layers)]
    layer_types = keys.of_layers("layer_types", layers) or default
    if unknown := sorted({str(each) for each in layer_types} - {_LINEAR, _FULL}):
        raise UnsupportedDesign(f"layer_types of config.json has {unknown[0]!r}")
    if _FULL not in layer_types:
        raise UnsupportedDesign("layer_types of config.json has no layer with attention")
    return tuple(layer_type == _LINEAR for layer_type in layer_types)


def _shares(keys: Keys, *, is_linear: bool) -> Shares:
    """The factors of a layer's sums."""

    def pair(branch: str) -> tuple[float, float]:
        return keys.number(f"{branch}_alpha_factor"), keys.number(f"{branch}_beta_factor")

    both = {each: pair(each) for each in ("full_attn", "linear_attn", "mlp")}  # all keys are read
    return Shares(attention=both["linear_attn" if is_linear else "full_attn"], mlp=both["mlp"])


def _form(row: FamilyRow, design: DecoderDesign, keys: Keys) -> Form:
    """What a configuration says of all layers, but for the factor of what they add."""
    form = Form(
        gated=row.gated, parallel=keys.flag(design.parallel_residual), centered=row.centered
    )
    if design.clamped_swiglu:
        alpha, limit = keys.number("swiglu_alpha"), keys.cap("swiglu_limit")
        return replace(form, activation="clamped_swiglu", alpha=alpha, limit=limit or math.inf)
    name = design.activation or str(keys.get(design.activation_key))
    activation = _ACTIVATIONS.get(design.activation_aliases.get(name, name))
    if activation is None:
        raise UnsupportedDesign(f"it knows the activations {', '.join(_ACTIVATIONS)}, not {name}")
    return replace(form, activation=activation)


def _routing(
    row: FamilyRow, design: DecoderDesign, keys: Keys, layers: int
) -> tuple[tuple[bool, ...], Routing | None]:
    """For each layer, whether it is sparse; and how tokens find experts, None without experts."""
    if row.mixture is None:
        return (False,) * layers, None
    there = [key for key in design.experts_keys if keys.get(key) is not None]
    experts_key, chosen_key = there[0] if there else design.experts_keys[0], design.chosen_key
    if keys.get(experts_key) == 0:
        keys.read.add(chosen_key)
        return (False,) * layers, None
    experts = keys.count(experts_key)
    chosen = keys.count(chosen_key)
    if chosen > experts:
        raise UnsupportedDesign(f"{chosen_key} of config.json is {chosen}, of {experts} experts")
    sparse = _SPARSE[design.sparse_layers](keys, layers)
    least, groups, chosen_groups = design.least_expert_sum, 1, 1
    in_groups = design.expert_groups
    if isinstance(in_groups, str):
        method = keys.get("topk_method")
        if method not in ("greedy", in_groups):
            raise UnsupportedDesign(
                f"it knows the topk_method greedy and {in_groups} of config.json, not {method!r}"
            )
        in_groups = method == in_groups
        keys.read |= {"n_group", "topk_group"}
    if in_groups:
        groups, chosen_groups = keys.count("n_group"), keys.count("topk_group")
        if experts % groups or chosen_groups > groups or experts // groups < 2 <= groups:
            raise UnsupportedDesign(
                f"n_group and topk_group of config.json are {groups} and {chosen_groups}, of "
                f"{experts} experts"
            )
        if experts // groups * chosen_groups < chosen:
            raise UnsupportedDesign(
                f"{chosen_key} of config.json is {chosen}, {chosen_groups} of {groups} groups have "
                f"{experts // groups * chosen_groups} experts"
            )
    mixes = design.router_scores is RouterScores.SPARSE_MIXER
    routing = Routing(
        experts=experts,
        chosen=chosen,
        normalized=keys.flag(design.normalized_experts),
        least=keys.number(least) if isinstance(least, str) else least,
        factor=keys.number("routed_scaling_factor") if design.scaled_experts else 1.0,
        scores=design.router_scores,
        near=2 * keys.number("router_jitter_noise") if mixes else 0.0,
        groups=groups,
        chosen_groups=chosen_groups,
        group_scores=design.group_scores,
        scales_inputs=design.scaled_expert_inputs,
    )
    return sparse, routing if any(sparse) else None


def _every_layer(_: Keys, layers: int) -> tuple[bool, ...]:
    return (True,) * layers


def _every_nth(keys: Keys, layers: int) -> tuple[bool, ...]:
    step = keys.get("decoder_sparse_step") and keys.count("decoder_sparse_step")
    dense = keys.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise UnsupportedDesign(f"mlp_only_layers of config.json is {dense!r}, no list")
    return tuple(index not in dense and (index + 1) % (step or 1) == 0 for index in range(layers))


def _after_first_k(keys: Keys, layers: int) -> tuple[bool, ...]:
    first = keys.product(["first_k_dense_replace"])
    return tuple(index >= first for index in range(layers))


def _from_start_to_end(keys: Keys, layers: int) -> tuple[bool, ...]:
    first, step = keys.product(["moe_layer_start_index"]), keys.count("moe_layer_interval")
    last = keys.get("moe_layer_end_index")
    last = layers - 1 if last in (None, -1) else keys.product(["moe_layer_end_index"])
    return tuple(first <= index <= last and (index + 1) % step == 0 for index in range(layers))


def _listed(keys: Keys, layers: int) -> tuple[bool, ...]:
    step, places = keys.count("interleave_moe_layer_step"), keys.get("moe_layers")
    if places is None:
        places = range(step - 1, layers, step)
    elif not isinstance(places, list):
        raise UnsupportedDesign(f"moe_layers of config.json is {places!r}, no list")
    return tuple(index in places for index in range(layers))


def _named(keys: Keys, layers: int) -> tuple[bool, ...]:
    return _by_mlp_type(keys, layers, tuple(index > 0 for index in range(layers)))


def _named_or_after_first_k(keys: Keys, layers: int) -> tuple[bool, ...]:
    return _by_mlp_type(keys, layers, _after_first_k(keys, layers))


def _by_mlp_type(keys: Keys, layers: int, default: tuple[bool, ...]) -> tuple[bool, ...]:
    """The layers that `mlp_layer_types` calls sparse; `default` stands for that key."""
    kinds = keys.get("mlp_layer_types")
    if kinds is None:
        return default
    if not isinstance(kinds, list) or len(kinds) != layers or not {*kinds} <= {"dense", "sparse"}:
        raise UnsupportedDesign(
            f"mlp_layer_types of config.json is {kinds!r}, not dense or sparse for each of "
            f"{layers} layers"
        )
    return tuple(kind == "sparse" for kind in kinds)


# For each rule, a function of (keys, number of layers): for each layer, whether it is sparse.
_SPARSE: Mapping[SparseLayers, Callable[[Keys, int], tuple[bool, ...]]] = MappingProxyType(
    {
        SparseLayers.ALL_LAYERS: _every_layer,
        SparseLayers.EVERY_NTH: _every_nth,
        SparseLayers.AFTER_FIRST_K: _after_first_k,
        SparseLayers.FROM_START_TO_END: _from_start_to_end,
        SparseLayers.LISTED: _listed,
        SparseLayers.NAMED: _named,
        SparseLayers.NAMED_OR_AFTER_FIRST_K: _named_or_after_first_k,
    }
)


def _ropes(
    design: DecoderDesign, keys: Keys, head_dim: int, windows: Sequence[int]
) -> tuple[tuple[Rope, ...], tuple[int | None, ...]]:
    """The rotary embeddings of a model, and for each layer which one it has."""
    if keys.flag(design.alibi) or not design.rotates:
        if isinstance(design.alibi, str):  # files have these keys, used or not
            keys.read |= {"rope_scaling", "rope_parameters", design.theta_key}
        return (), (None,) * len(windows)
    if design.theta is not None:
        fixed = _fixed_rope(keys, str(design.partial_rope), design.theta, head_dim)
        return (fixed,), (0,) * len(windows)
    parameters = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise UnsupportedDesign(f"rope_parameters of config.json is {parameters!r}, no table")
    keys.read |= {"rope_scaling", "rope_parameters"}
    theta, local_theta = keys.get(design.theta_key), keys.get("rope_local_base_freq")
    other = parameters.get("rope_theta")
    if design.theta_key != "rope_theta" and theta is not None and other not in (None, theta):
        raise UnsupportedDesign(
            f"{design.theta_key} of config.json is {theta!r}, and rope_theta of rope_parameters "
            f"{other!r}"
        )
    if design.partial_rope:
        theta = keys.get("rotary_emb_base") or theta
    nested = {
        layer_type: dict(parameters[layer_type])
        for layer_type in (_FULL, _SLIDING)
        if isinstance(parameters.get(layer_type), dict)
    }
    tables = [(parameters, theta)]
    rope_of_layer: list[int | None] = [0] * len(windows)
    if design.rope_by_layer_type:
        full = nested.get(_FULL) if nested else parameters
        tables = [(full or {}, theta), (nested.get(_SLIDING) or {}, local_theta)]
        rope_of_layer = [1 if window else 0 for window in windows]
    ropes = tuple(_rope(design, keys, table, base, head_dim) for table, base in tables)
    if design.rope_where is not None and keys.get(design.rope_where[0]) != design.rope_where[1]:
        rope_of_layer = [None] * len(windows)
    if design.no_rope_layers:
        with_rope = _layers_with_rope(keys, len(windows))
        rope_of_layer = [
            index if has_rope else None
            for index, has_rope in zip(rope_of_layer, with_rope, strict=True)
        ]
    return ropes, tuple(rope_of_layer)


def _fixed_rope(keys: Keys, key: str, theta: float, head_dim: int) -> Rope:
    """A rotary embedding of which config.json says the number of features alone, by a key."""
    rotated = keys.count(key)
    if rotated % 2 or rotated > head_dim:
        raise UnsupportedDesign(
            f"it rotates pairs of features, {key} of config.json is {rotated} of the {head_dim} of "
            "a head"
        )
    return Rope(dim=rotated, parameters={"rope_type": "default", "rope_theta": theta})


def _rope(
    design: DecoderDesign, keys: Keys, table: Mapping[str, Any], theta: Any, head_dim: int
) -> Rope:
    """A rotary embedding, its parameters complete.

    Args:
        design: the family's.
        keys: keys of config.json.
        table: `rope_parameters` of config.json, or those of one layer type.
        theta: base of the angles where the table has none.
        head_dim: features of a head.
    """
    part: Any = 1.0
    features = None  # as a share of a head's
    if isinstance(design.partial_rope, str) and keys.get(design.partial_rope) is not None:
        features = keys.count(design.partial_rope) / head_dim
    if design.partial_rope:
        part = (
            table.get("partial_rotary_factor")
            or keys.get("rotary_pct")
            or features
            or keys.get("partial_rotary_factor")
            or 1.0
        )
    if design.grid_rope:
        table = {key: value for key, value in table.items() if key not in _GRID_KEYS}
    parameters = {"rope_type": table.get("type", "default"), "rope_theta": theta, **table}
    if parameters["rope_type"] in ("llama3", "yarn"):
        parameters.setdefault(
            "original_max_position_embeddings", keys.get("max_position_embeddings")
        )
        if keys.get("original_max_position_embeddings") is not None:
            parameters["original_max_position_embeddings"] = keys.get(
                "original_max_position_embeddings"
            )
    elif design.partial_rope:
        # rope types that depend on the key are refused below; phi3 has it for its longrope
        keys.read.add("original_max_position_embeddings")
    if reason := rope.why_not(parameters):
        raise UnsupportedDesign(reason)
    if not design.partial_rope:
        part = parameters.get("partial_rotary_factor") or 1.0
    rotated = int(head_dim * part) if isinstance(part, int | float) and 0 < part <= 1 else 0
    if rotated != head_dim and not design.partial_rope:
        raise UnsupportedDesign(
            f"it rotates all {head_dim} features of a head, this model {rotated}"
        )
    if rotated < 2 or rotated % 2:
        raise UnsupportedDesign(
            f"it rotates pairs of features, this model {part!r} of the {head_dim} of a head"
        )
    return Rope(dim=rotated, parameters=parameters)

"""What the lean decoder computes of a model, read from its config.json: a record, or a sentence that says why not.

Every key of config.json is one of three: it is read here; it changes no number of a forward
(`NEUTRAL`); or the answer is no, with the key's name. So a multiplier, a soft cap or a norm that
nothing here has heard of never runs as if it were not there. A key that config.json leaves out has
the default of the family's configuration in transformers; the rows of `DESIGNS` hold these.

A family is a row of `DESIGNS`: names inside a layer, defaults, and how its layers differ from
Llama's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from quantflow.models.graph import FAMILIES, Mixture
from quantflow.runtime import rope
from quantflow.runtime.operations import Form, Heads
from quantflow.runtime.rope import Rope

# Keys of config.json that change no number of a forward, whatever they are: names, tokens,
# training, sizes that weights have.
NEUTRAL = frozenset(
    {
        *(
            "model_type",
            "architectures",
            "auto_map",
            "dtype",
            "torch_dtype",
            "transformers_version",
            "quantization_config",
        ),
        *(
            "name_or_path",
            "transformers.js_config",
            "use_cache",
            "cache_implementation",
            "id2label",
            "label2id",
            "is_decoder",
        ),
        *(
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "unk_token_id",
            "is_encoder_decoder",
            "problem_type",
            "task_specific_params",
        ),
        *(
            "output_attentions",
            "output_hidden_states",
            "return_dict",
            "chunk_size_feed_forward",
            "output_router_logits",
        ),
        *(
            "initializer_range",
            "attention_dropout",
            "hidden_dropout",
            "classifier_dropout",
            "residual_dropout",
        ),
        *(
            "embedding_dropout",
            "resid_pdrop",
            "embd_pdrop",
            "router_aux_loss_coef",
            "router_jitter_noise",
            "pretraining_tp",
        ),
        *(
            "intermediate_size",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "tie_word_embeddings",
        ),
        # a bias is added where there is one, and shapes are checked
        *("attention_bias", "mlp_bias", "use_bias", "qkv_bias"),
    }
)
_SLIDING, _FULL = "sliding_attention", "full_attention"
_ACTIVATIONS = {  # hidden_act -> an activation of decode.c
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "relu": "relu",
    **{name: "gelu_tanh" for name in ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")},
}


@dataclass(frozen=True, kw_only=True)
class Names:
    """What the parts of a layer are called inside it, and what stands outside the layers, in source names without `.weight`.

    Attributes:
        qkv, output, up, down: linears; `up` is gate and up where there is a gate.
        attention_norm, attended_norm: norms of what attention reads and of what it adds; None where
            there is none.
        mlp_norm, gated_norm: the same of the MLP.
        q_norm, k_norm: norms of queries and keys; None where there are none.
        layers, embedding, norm, head: outside.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    attention_norm: str | None = "input_layernorm"
    attended_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    gated_norm: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How tokens find experts.

    Attributes:
        experts: how many there are.
        chosen: how many a token goes to.
        normalized: the weights of the chosen ones are divided by their sum.
    """

    experts: int
    chosen: int
    normalized: bool


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """A model as the lean decoder runs it.

    Attributes:
        names: of its parts.
        layers: how many.
        vocab_size: V.
        positions: the most positions of a sequence; None where nothing bounds them.
        heads, form: of all layers.
        windows: of each layer, how many positions a query sees, itself included; 0: all before it.
        ropes: the rotations that there are.
        rotations: of each layer, which of `ropes`; None rotates nothing.
        sparse: of each layer, whether experts stand in the place of the MLP.
        mixture, routing: what those layers hold, and how tokens find it; None where no layer is
            sparse.
        by_head: rows of the fused q/k/v come head by head: its query, its key, its value.
        unit_offset: norms multiply by 1 + their weight.
        embedding_scale: times a token's row.
        logits_scale: times the logits.
        logits_cap: logits become cap * tanh(logit / cap); 0: they stay.
    """

    names: Names
    layers: int
    vocab_size: int
    positions: int | None
    heads: Heads
    form: Form
    windows: tuple[int, ...]
    ropes: tuple[Rope, ...]
    rotations: tuple[int | None, ...]
    sparse: tuple[bool, ...]
    mixture: Mixture | None = None
    routing: Routing | None = None
    by_head: bool = False
    unit_offset: bool = False
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float = 0.0


class No(Exception):
    """Why a configuration cannot be run, in a sentence."""


class Keys:
    """The keys of a config.json; it remembers which were read."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Take a configuration, and what stands for keys that it leaves out."""
        self._config, self._defaults, self.read = config, defaults, set[str]()

    def has(self, key: str) -> bool:
        """Return whether config.json says something of a key."""
        return self._config.get(key) is not None

    def get(self, key: str) -> Any:
        """Return the value of a key, its default where config.json has none, None where there is none either."""
        self.read.add(key)
        return self._config[key] if key in self._config else self._defaults.get(key)

    def number(self, key: str) -> float:
        """Return a number that is finite."""
        value = self.get(key)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise No(f"{key} of config.json is {value!r}, no number")
        return float(value)

    def cap(self, key: str) -> float:
        """Return a positive number, 0 where the value is null."""
        if self.get(key) is None:
            return 0.0
        if self.number(key) <= 0:
            raise No(f"{key} of config.json is {self.get(key)!r}, not positive")
        return self.number(key)

    def count(self, key: str) -> int:
        """Return a positive integer."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise No(f"{key} of config.json is {value!r}, no positive integer")
        return value

    def of_layers(self, key: str, layers: int) -> list[Any] | None:
        """Return a list with a value for each layer, or None."""
        value = self.get(key)
        if value is not None and (not isinstance(value, list) or len(value) != layers):
            raise No(f"{key} of config.json is {value!r}, {layers} layers need as many values")
        return value

    def unread(self) -> list[str]:
        """Return the keys that nothing here knows and that say something."""
        known = self.read | NEUTRAL
        return sorted(
            key
            for key, value in self._config.items()
            if key not in known and value is not None and not key.startswith(("_", "unsloth"))
        )


# always so, or as a key of config.json says, and what stands for it where there is none
Flag = bool | tuple[str, bool]


@dataclass(frozen=True, kw_only=True)
class Design:
    """A family.

    Attributes:
        names: of the parts of a layer.
        defaults: transformers' defaults of the keys that are read.
        only: keys that may have one value alone, or be null.
        ignored: keys that the family's own modules do not read.
        renamed: activations that mean another one in this family.
        mixture: what a sparse layer holds.
        normalizes: whether the weights of the chosen experts are divided by their sum; may be a
            key.
        activation, eps: the keys that hold them.
        windows: the windows of the layers.
        kinds: rotations differ by kind of layer, as `layer_types` has them.
        partial: a part of a head may be rotated.
        skips: `no_rope_layers` says which layers rotate nothing.
        scaled_queries: scores are multiplied by query_pre_attn_scalar^-0.5, not by head_dim^-0.5.
        caps: there may be soft caps.
        multipliers: those of Granite.
        scaled_embedding: a token's row is multiplied by hidden_size^0.5.
        gated, parallel, centered, whole_norms, by_head, unit_offset: see `Blueprint` and `Form`;
            `parallel` may be a key.
        qkv_bias, output_bias, mlp_bias, head_bias: which linears have a bias; experts and routers
            have none.
        expert_size: the key that holds the width of an expert.
        tied: whether the head is the embedding where config.json has no `tie_word_embeddings`.
    """

    names: Names = Names()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)
    mixture: Mixture | None = None
    normalizes: bool | str = "norm_topk_prob"
    activation: str = "hidden_act"
    eps: str = "rms_norm_eps"
    windows: Callable[[Keys, int], list[int]] | None = None
    kinds: bool = False
    partial: bool = False
    skips: bool = False
    scaled_queries: bool = False
    caps: bool = False
    multipliers: bool = False
    scaled_embedding: bool = False
    gated: bool = True
    parallel: bool | str = False
    centered: bool = False
    whole_norms: bool = False
    by_head: bool = False
    unit_offset: bool = False
    qkv_bias: Flag = ("attention_bias", False)
    output_bias: Flag = ("attention_bias", False)
    mlp_bias: Flag = False
    head_bias: Flag = False
    expert_size: str = "moe_intermediate_size"
    tied: bool = False


def _window(keys: Keys) -> int:
    """Return `sliding_window`, 0 where it is null."""
    return 0 if keys.get("sliding_window") is None else keys.count("sliding_window")


def _window_if_wanted(keys: Keys) -> int:
    """Return `sliding_window` where `use_sliding_window` says so, else 0: files have both, whatever is used."""
    keys.read |= {"sliding_window"}
    return _window(keys) if keys.get("use_sliding_window") else 0


def _everywhere(keys: Keys, layers: int) -> list[int]:
    """Return the same window for every layer."""
    return [_window(keys)] * layers


def _after_some(keys: Keys, layers: int) -> list[int]:
    """Return windows where use_sliding_window says so, in the layers that layer_types names, else from max_window_layers on."""
    first, window = keys.get("max_window_layers"), _window_if_wanted(keys)
    later = [_SLIDING if window and index >= (first or 0) else _FULL for index in range(layers)]
    return _by_kind(keys, layers, window, later)


def _by_kind(keys: Keys, layers: int, window: int, default: list[str]) -> list[int]:
    """Return the window of the layers that layer_types calls sliding; `default` stands for it where config.json has none."""
    kinds = keys.of_layers("layer_types", layers) or default
    for kind in kinds:
        if kind not in (_SLIDING, _FULL) or (kind == _SLIDING and not window):
            raise No(
                f"layer_types of config.json has {kind!r}, and sliding_window is "
                f"{keys.get('sliding_window')!r}"
            )
    return [window if kind == _SLIDING else 0 for kind in kinds]


def _alternating(keys: Keys, layers: int) -> list[int]:
    """Return windows that alternate with full attention: all but each n-th layer have one."""
    keys.read |= {"_sliding_window_pattern"}
    pattern = keys.count("sliding_window_pattern")
    default = [_SLIDING if (index + 1) % pattern else _FULL for index in range(layers)]
    return _by_kind(keys, layers, _window(keys), default)


def _without_rotation(keys: Keys, layers: int) -> list[int]:
    """Return SmolLM3's windows, which layers that rotate nothing have."""
    window = _window_if_wanted(keys)
    rotated = _rotated(keys, layers)
    return _by_kind(
        keys, layers, window, [_FULL if on or not window else _SLIDING for on in rotated]
    )


def _rotated(keys: Keys, layers: int) -> list[bool]:
    """Return which layers rotate positions."""
    # 1 where there is a rotation, whatever its name says
    told = keys.of_layers("no_rope_layers", layers)
    step = keys.count("no_rope_layer_interval")
    return [
        bool((index + 1) % step) if told is None else bool(told[index]) for index in range(layers)
    ]


def _where_wanted(keys: Keys, layers: int) -> list[int]:
    """Return the same window for every layer, none without use_sliding_window."""
    return [_window_if_wanted(keys)] * layers


def _every_second(keys: Keys, layers: int) -> list[int]:
    """Return the windows of Qwen2-MoE: where layer_types says nothing, in every second layer before max_window_layers."""
    window, first = _window_if_wanted(keys), keys.get("max_window_layers") or 0
    some = [
        _FULL if index % 2 or index >= first or not window else _SLIDING for index in range(layers)
    ]
    return _by_kind(keys, layers, window, some)


_FROM: MappingProxyType[str, Any] = MappingProxyType(
    {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
)
_LLAMA = Design(defaults=_FROM)
_MLP_BIAS = ("mlp_bias", False)
_HEAD_NORMS = Names(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
_QWEN = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
_SANDWICH = Names(
    attended_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    gated_norm="post_feedforward_layernorm",
)
_GEMMA = Design(
    defaults=_FROM
    | {"hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "num_key_value_heads": 16},
    only={"use_bidirectional_attention": False},
    ignored=frozenset({"hidden_activation"}),
    renamed={"gelu": "gelu_pytorch_tanh"},  # so its first configurations were written
    scaled_embedding=True,
    unit_offset=True,
    tied=True,
)
_GEMMA2 = replace(
    _GEMMA,
    names=_SANDWICH,
    ignored=frozenset({"hidden_act"}),
    renamed={},
    activation="hidden_activation",
    defaults={key: value for key, value in _GEMMA.defaults.items() if key != "hidden_act"}
    | {"num_key_value_heads": 4}
    | {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
    }
    | {
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    windows=_alternating,
    scaled_queries=True,
    caps=True,
)
_LAYER_NORM = {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "rope_theta": 10000.0}
DESIGNS: Mapping[str, Design] = MappingProxyType(
    {
        "llama": replace(
            _LLAMA,
            ignored=frozenset({"is_llama_config"}),
            only={"rope_interleaved": False},
            mlp_bias=_MLP_BIAS,
        ),
        "mistral": replace(
            _LLAMA,
            defaults=_FROM | {"sliding_window": 4096, "num_key_value_heads": 8},
            windows=_everywhere,
            qkv_bias=False,
            output_bias=False,
        ),
        "qwen2": replace(
            _LLAMA,
            only={"use_mrope": False},
            defaults=_FROM | _QWEN | {"num_key_value_heads": 32},
            windows=_after_some,
            qkv_bias=True,
            output_bias=False,
        ),
        "qwen3": replace(
            _LLAMA,
            names=_HEAD_NORMS,
            defaults=_FROM | _QWEN | {"num_key_value_heads": 32, "head_dim": 128},
            windows=_after_some,
        ),
        "gemma": _GEMMA,
        "gemma2": _GEMMA2,
        "gemma3_text": replace(
            _GEMMA2,
            names=replace(_SANDWICH, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
            defaults={
                **_GEMMA2.defaults,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "sliding_window_pattern": 6,
                "rope_theta": 1000000.0,
                "rope_local_base_freq": 10000.0,
            },
            only={**_GEMMA.only, "attn_logit_softcapping": None},
            kinds=True,
        ),
        "phi3": replace(
            _LLAMA,
            names=Names(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
            defaults=_FROM | {"rms_norm_eps": 1e-5},
            windows=_everywhere,
            partial=True,
            qkv_bias=False,
            output_bias=False,
        ),
        "granite": replace(
            _LLAMA,
            defaults=_FROM
            | dict.fromkeys(
                (
                    "embedding_multiplier",
                    "logits_scaling",
                    "residual_multiplier",
                    "attention_multiplier",
                ),
                1.0,
            ),
            multipliers=True,
            mlp_bias=_MLP_BIAS,
        ),
        "smollm3": replace(
            _LLAMA,
            defaults=_FROM
            | {"num_key_value_heads": 4, "rope_theta": 2000000.0, "no_rope_layer_interval": 4},
            ignored=frozenset({"max_window_layers"}),
            windows=_without_rotation,
            skips=True,
            mlp_bias=_MLP_BIAS,
            tied=True,
        ),
        "gpt_neox": Design(
            names=Names(
                qkv=("attention.query_key_value",),
                output="attention.dense",
                up=("mlp.dense_h_to_4h",),
                down="mlp.dense_4h_to_h",
                layers="gpt_neox.layers",
                embedding="gpt_neox.embed_in",
                norm="gpt_neox.final_layer_norm",
                head="embed_out",
            ),
            defaults=_LAYER_NORM | {"partial_rotary_factor": 0.25, "use_parallel_residual": True},
            eps="layer_norm_eps",
            partial=True,
            gated=False,
            parallel="use_parallel_residual",
            centered=True,
            by_head=True,
            qkv_bias=("attention_bias", True),
            output_bias=("attention_bias", True),
            mlp_bias=True,
        ),
        "phi": Design(
            names=Names(
                output="self_attn.dense",
                up=("mlp.fc1",),
                down="mlp.fc2",
                mlp_norm="input_layernorm",
                norm="model.final_layernorm",
            ),
            defaults=_LAYER_NORM | {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
            only={"qk_layernorm": False},
            eps="layer_norm_eps",
            partial=True,
            gated=False,
            parallel=True,
            centered=True,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            head_bias=True,
        ),
        "starcoder2": Design(
            names=Names(up=("mlp.c_fc",), down="mlp.c_proj"),
            defaults={
                "hidden_act": "gelu_pytorch_tanh",
                "norm_epsilon": 1e-5,
                "rope_theta": 10000.0,
                "num_key_value_heads": 2,
            },
            ignored=frozenset({"activation_function"}),
            only={"mlp_type": "default", "norm_type": "layer_norm"},
            eps="norm_epsilon",
            windows=_everywhere,
            gated=False,
            centered=True,
            qkv_bias=("use_bias", True),
            output_bias=("use_bias", True),
            mlp_bias=("use_bias", True),
            tied=True,
        ),
        "mixtral": replace(
            _LLAMA,
            defaults=_FROM
            | {"rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "num_key_value_heads": 8}
            | {"num_local_experts": 8, "num_experts_per_tok": 2},
            windows=_everywhere,
            mixture=FAMILIES["mixtral"].mixture,
            normalizes=True,
            expert_size="intermediate_size",
            qkv_bias=False,
            output_bias=False,
        ),
        "qwen2_moe": replace(
            _LLAMA,
            defaults=_FROM
            | _QWEN
            | {"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4},
            windows=_every_second,
            mixture=FAMILIES["qwen2_moe"].mixture,
            qkv_bias=("qkv_bias", True),
            output_bias=False,
        ),
        "qwen3_moe": replace(
            _LLAMA,
            names=_HEAD_NORMS,
            ignored=frozenset({"max_window_layers"}),
            defaults=_FROM
            | {
                "sliding_window": 4096,
                "use_sliding_window": False,
                "num_key_value_heads": 4,
                "num_experts": 128,
                "num_experts_per_tok": 8,
            },
            windows=_where_wanted,
            mixture=FAMILIES["qwen3_moe"].mixture,
        ),
        "olmoe": replace(
            _LLAMA,
            names=_HEAD_NORMS,
            defaults=_FROM | {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
            only={"clip_qkv": None},
            whole_norms=True,
            mixture=FAMILIES["olmoe"].mixture,
            expert_size="intermediate_size",
        ),
    }
)


def read(config: Mapping[str, Any]) -> Blueprint | str:
    """Return what a model computes, or why the lean decoder does not run it, in a sentence.

    Args:
        config: config.json.
    """
    design = DESIGNS.get(str(config.get("model_type")))
    if design is None:
        return f"it does not know the layers of {config.get('model_type')}"
    keys = Keys(config, design.defaults)
    try:
        found = _architecture(design, keys)
    except No as no:
        return str(no)
    if unread := keys.unread():
        return f"it does not know what {unread[0]}={config[unread[0]]!r} of config.json does"
    return found


def _architecture(design: Design, keys: Keys) -> Blueprint:
    for key, value in design.only.items():
        if keys.get(key) not in (None, value):
            raise No(f"it knows {key}={value!r} of config.json, not {keys.get(key)!r}")
    layers, hidden, query = (
        keys.count(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    shared, dim = query, hidden // query
    if not design.by_head:
        shared = (
            query if keys.get("num_key_value_heads") is None else keys.count("num_key_value_heads")
        )
        dim = dim if keys.get("head_dim") is None else keys.count("head_dim")
    if query % shared:
        raise No(f"{shared} heads of keys and values do not divide {query} heads")
    keys.read |= design.ignored
    asked = str(keys.get(design.activation))
    activation = _ACTIVATIONS.get(design.renamed.get(asked, asked))
    if activation is None:
        raise No(f"it knows the activations {', '.join(_ACTIVATIONS)}, not {asked}")
    scale = keys.number("query_pre_attn_scalar") ** -0.5 if design.scaled_queries else dim**-0.5
    multipliers = [1.0, 1.0, 1.0]  # of embedding, branches, logits
    if design.multipliers:
        scale = keys.number("attention_multiplier")
        multipliers = [
            keys.number("embedding_multiplier"),
            keys.number("residual_multiplier"),
            1 / keys.cap("logits_scaling"),
        ]
    if design.scaled_embedding:
        multipliers[0] = hidden**0.5
    parallel = (
        bool(keys.get(design.parallel)) if isinstance(design.parallel, str) else design.parallel
    )
    windows = [0] * layers if design.windows is None else design.windows(keys, layers)
    ropes, rotations = _rotations(design, keys, dim, layers, windows)
    positions = (
        None
        if keys.get("max_position_embeddings") is None
        else keys.count("max_position_embeddings")
    )
    sparse, routing = _routing(design, keys, layers)
    return Blueprint(
        names=design.names,
        layers=layers,
        vocab_size=keys.count("vocab_size"),
        positions=positions,
        heads=Heads(
            query=query,
            shared=shared,
            dim=dim,
            scale=scale,
            eps=keys.number(design.eps),
            cap=keys.cap("attn_logit_softcapping") if design.caps else 0.0,
            whole_norms=design.whole_norms,
        ),
        form=Form(
            activation=activation,
            gated=design.gated,
            parallel=parallel,
            centered=design.centered,
            residual=multipliers[1],
        ),
        windows=tuple(windows),
        ropes=ropes,
        rotations=rotations,
        sparse=sparse,
        mixture=design.mixture if any(sparse) else None,
        routing=routing,
        by_head=design.by_head,
        unit_offset=design.unit_offset,
        embedding_scale=multipliers[0],
        logits_scale=multipliers[2],
        logits_cap=keys.cap("final_logit_softcapping") if design.caps else 0.0,
    )


def _routing(design: Design, keys: Keys, layers: int) -> tuple[tuple[bool, ...], Routing | None]:
    """Return which layers are sparse, and how their tokens find experts."""
    if design.mixture is None:
        return (False,) * layers, None
    experts = keys.count(
        "num_experts" if keys.get("num_local_experts") is None else "num_local_experts"
    )
    keys.read |= {"num_experts", "num_local_experts"}
    chosen = keys.count("num_experts_per_tok")
    if chosen > experts:
        raise No(f"num_experts_per_tok of config.json is {chosen}, of {experts} experts")
    normalized = (
        keys.get(design.normalizes) if isinstance(design.normalizes, str) else design.normalizes
    )
    step, dense = (
        keys.get("decoder_sparse_step") and keys.count("decoder_sparse_step"),
        keys.get("mlp_only_layers") or [],
    )
    if not isinstance(dense, list):
        raise No(f"mlp_only_layers of config.json is {dense!r}, no list")
    sparse = tuple(index not in dense and (index + 1) % (step or 1) == 0 for index in range(layers))
    return sparse, Routing(experts=experts, chosen=chosen, normalized=bool(normalized)) if any(
        sparse
    ) else None


def _rotations(
    design: Design, keys: Keys, dim: int, layers: int, windows: Sequence[int]
) -> tuple[tuple[Rope, ...], tuple[int | None, ...]]:
    """Return the rotations that there are, and which of them each layer has."""
    given = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise No(f"rope_parameters of config.json is {given!r}, no table")
    keys.read |= {"rope_scaling", "rope_parameters"}
    theta, local = keys.get("rope_theta"), keys.get("rope_local_base_freq")
    if design.partial:
        theta = keys.get("rotary_emb_base") or theta
    nested = {
        kind: dict(given[kind]) for kind in (_FULL, _SLIDING) if isinstance(given.get(kind), dict)
    }
    if design.kinds:
        full = nested.get(_FULL) if nested else given
        tables = [(full or {}, theta), (nested.get(_SLIDING) or {}, local)]
        indices: list[int | None] = [1 if window else 0 for window in windows]
    else:
        tables, indices = [(given, theta)], [0] * layers
    ropes = tuple(_rope(design, keys, parameters, base, dim) for parameters, base in tables)
    if design.skips:
        indices = [
            index if on else None for index, on in zip(indices, _rotated(keys, layers), strict=True)
        ]
    return ropes, tuple(indices)


def _rope(design: Design, keys: Keys, given: Mapping[str, Any], theta: Any, dim: int) -> Rope:
    """Return a rotation, its parameters complete."""
    part: Any = 1.0
    if design.partial:
        part = (
            given.get("partial_rotary_factor")
            or keys.get("rotary_pct")
            or keys.get("partial_rotary_factor")
            or 1.0
        )
    parameters = {"rope_type": given.get("type", "default"), "rope_theta": theta, **given}
    if parameters["rope_type"] in ("llama3", "yarn"):
        parameters.setdefault(
            "original_max_position_embeddings", keys.get("max_position_embeddings")
        )
        if keys.get("original_max_position_embeddings") is not None:
            parameters["original_max_position_embeddings"] = keys.get(
                "original_max_position_embeddings"
            )
    elif design.partial:
        # of rope types that depend on it, phi3's longrope
        keys.read.add("original_max_position_embeddings")
    if reason := rope.why_not(parameters):
        raise No(reason)
    if not design.partial:
        part = parameters.get("partial_rotary_factor") or 1.0
    rotated = int(dim * part) if isinstance(part, int | float) and 0 < part <= 1 else 0
    if rotated != dim and not design.partial:
        raise No(f"it rotates all {dim} features of a head, this model {rotated}")
    if rotated < 2 or rotated % 2:
        raise No(f"it rotates pairs of features, this model {part!r} of the {dim} of a head")
    return Rope(dim=rotated, parameters=parameters)

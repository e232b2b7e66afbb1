"""How llama.cpp has each family of mixtures of experts: names, sizes, and what it cannot compute.

The experts of a layer are one tensor of three dimensions there, `ffn_gate_exps` [E, I, H],
`ffn_up_exps` and `ffn_down_exps` [E, H, I]; a checkpoint has a linear per expert. Nothing here
reads a tensor: the table is plain data, and `experts` makes the places of a file from it.

Sizes are letters, those of `quantflow.formats.llama_cpp.tensors` and these:

| letter | size | letter | size |
|---|---|---|---|
| n | experts of a layer | a | compressed queries (q_lora_rank) |
| e | width of an expert | c | compressed keys and values (kv_lora_rank) |
| s | width of the shared expert | r | c and the rotated part of a key |
| 1 | one | b | all heads of keys and values as `kv_b_proj` makes them |
| g | heads of queries | o | all heads of values |

Source: github.com/ggml-org/llama.cpp, `src/models/*.cpp` and `conversion/*.py`; package `gguf`
0.19.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

# module or tensor of the checkpoint -> (llama.cpp's name, sizes)
Names = Mapping[str, tuple[str, str]]
Fields = dict[str, tuple[str, Any]]
_SOFTMAX, _SIGMOID = 1, 2  # values of expert_gating_func


@dataclass(frozen=True, kw_only=True)
class MixtureDesign:
    """One family of mixtures.

    Attributes:
        architecture: value of `general.architecture`.
        attention: modules of every layer with a `weight`.
        biased: those of them that may have a `bias` in the checkpoint, and then in the file.
        tensors: tensors of every layer by their whole name -> the file's whole name.
        dense: modules of a layer without experts.
        block: module of the mixture inside a layer.
        experts: linears of an expert.
        expert_biases: whether they have biases.
        sparse: modules of a layer with experts, beside them.
        sparse_tensors: tensors of such a layer by their whole name, as `tensors`.
        rotary_pairs: modules whose rows are written in pairs, as llama.cpp rotates neighbours.
        heads_of: module of which the file has two tensors, of keys transposed and of values; None
            in a family without.
        count, width: keys of config.json of the number of experts and of the width of one.
        required: keys that have this value alone where llama.cpp computes the model.
        tied: llama.cpp takes the embedding for a head that the file does not have.
        fields: further fields of the architecture from a configuration.
    """

    architecture: str
    attention: Names
    biased: frozenset[str] = frozenset()
    tensors: Names = field(default_factory=dict)
    dense: Names
    block: str = "mlp"
    experts: Names
    expert_biases: bool = False
    sparse: Names
    sparse_tensors: Names = field(default_factory=dict)
    rotary_pairs: tuple[str, ...] = ()
    heads_of: str | None = None
    count: str = "num_experts"
    width: str = "moe_intermediate_size"
    required: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = True
    fields: Callable[[Any], Fields] = lambda _: {}

    def is_sparse(self, config: Any, layer: int) -> bool:
        """Whether a layer has experts; llama.cpp knows a number of dense layers that come first."""
        del self
        return layer >= (getattr(config, "first_k_dense_replace", None) or 0)


_QKV: Names = {
    "self_attn.q_proj": ("attn_q", "qh"),
    "self_attn.k_proj": ("attn_k", "kh"),
    "self_attn.v_proj": ("attn_v", "kh"),
    "self_attn.o_proj": ("attn_output", "hq"),
}
_NORMS: Names = {
    "input_layernorm": ("attn_norm", "h"),
    "post_attention_layernorm": ("ffn_norm", "h"),
}
_POST_NORM: Names = {**_NORMS, "post_attention_layernorm": ("post_attention_norm", "h")}
_HEAD_NORMS: Names = {
    "self_attn.q_norm": ("attn_q_norm", "d"),
    "self_attn.k_norm": ("attn_k_norm", "d"),
}
_MLP: Names = {
    "mlp.gate_proj": ("ffn_gate", "fh"),
    "mlp.up_proj": ("ffn_up", "fh"),
    "mlp.down_proj": ("ffn_down", "hf"),
}
_EXPERTS: Names = {
    "gate_proj": ("ffn_gate_exps", "eh"),
    "up_proj": ("ffn_up_exps", "eh"),
    "down_proj": ("ffn_down_exps", "he"),
}
_ROUTER: Names = {"mlp.gate": ("ffn_gate_inp", "nh")}
_SHARED: Names = {
    "mlp.shared_experts.gate_proj": ("ffn_gate_shexp", "sh"),
    "mlp.shared_experts.up_proj": ("ffn_up_shexp", "sh"),
    "mlp.shared_experts.down_proj": ("ffn_down_shexp", "hs"),
}
_LATENT: Names = {
    "self_attn.q_proj": ("attn_q", "qh"),
    "self_attn.q_a_proj": ("attn_q_a", "ah"),
    "self_attn.q_a_layernorm": ("attn_q_a_norm", "a"),
    "self_attn.q_b_proj": ("attn_q_b", "qa"),
    "self_attn.kv_a_proj_with_mqa": ("attn_kv_a_mqa", "rh"),
    "self_attn.kv_a_layernorm": ("attn_kv_a_norm", "c"),
    "self_attn.kv_b_proj": ("attn_kv_b", "bc"),
    "self_attn.o_proj": ("attn_output", "ho"),
}
_QKV_BIASES = frozenset({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"})
_EVERY_LAYER = {"mlp_only_layers": [], "decoder_sparse_step": 1}


def _routed(config: Any) -> Fields:
    """Fields of the families whose experts are `n_routed_experts` beside shared ones."""
    return {
        "leading_dense_block_count": ("u32", config.first_k_dense_replace),
        "expert_feed_forward_length": ("u32", config.moe_intermediate_size),
        "expert_shared_count": ("u32", config.n_shared_experts),
        "expert_weights_scale": ("f32", float(config.routed_scaling_factor)),
    }


def _chosen_by_sigmoid(config: Any) -> Fields:
    """Fields of routers whose groups are ranked by the sum of their two best experts."""
    fields: Fields = {
        "expert_gating_func": ("u32", _SIGMOID),
        "expert_weights_norm": ("bool", bool(config.norm_topk_prob)),
    }
    if (config.n_group or 1) > 1:
        fields["expert_group_count"] = ("u32", config.n_group)
        fields["expert_group_used_count"] = ("u32", config.topk_group)
    return fields


def _latent(config: Any) -> Fields:
    """Fields of attention with compressed keys: one key head that all queries read."""
    rotated = config.qk_rope_head_dim
    return {
        **_routed(config),
        "attention.head_count_kv": ("u32", 1),
        "attention.q_lora_rank": ("u32", config.q_lora_rank or 0),
        "attention.kv_lora_rank": ("u32", config.kv_lora_rank),
        "attention.key_length": ("u32", config.kv_lora_rank + rotated),
        "attention.value_length": ("u32", config.kv_lora_rank),
        "attention.key_length_mla": ("u32", config.qk_nope_head_dim + rotated),
        "attention.value_length_mla": ("u32", config.v_head_dim),
        "rope.dimension_count": ("u32", rotated),
    }


def _deepseek_v2(config: Any) -> Fields:
    return {**_latent(config), "expert_gating_func": ("u32", _SOFTMAX)}


def _deepseek_v3(config: Any) -> Fields:
    return {**_latent(config), **_chosen_by_sigmoid(config)}


def _glm(config: Any) -> Fields:
    return {**_routed(config), **_chosen_by_sigmoid(config)}


def _qwen2(config: Any) -> Fields:
    return {
        "expert_feed_forward_length": ("u32", config.moe_intermediate_size),
        "expert_shared_feed_forward_length": ("u32", config.shared_expert_intermediate_size),
    }


def _qwen3(config: Any) -> Fields:
    return {"expert_feed_forward_length": ("u32", config.moe_intermediate_size)}


def _gpt_oss(config: Any) -> Fields:
    return {
        "expert_feed_forward_length": ("u32", config.intermediate_size),
        "attention.sliding_window": ("u32", config.sliding_window),
        "context_length": ("u32", config.max_position_embeddings),
    }


# model_type -> how llama.cpp has it
MIXTURE_DESIGNS: Mapping[str, MixtureDesign] = MappingProxyType(
    {
        "mixtral": MixtureDesign(
            architecture="llama",
            attention={**_NORMS, **_QKV},
            dense={},
            block="block_sparse_moe",
            experts={
                "w1": ("ffn_gate_exps", "eh"),
                "w3": ("ffn_up_exps", "eh"),
                "w2": ("ffn_down_exps", "he"),
            },
            sparse={"block_sparse_moe.gate": ("ffn_gate_inp", "nh")},
            rotary_pairs=("self_attn.q_proj", "self_attn.k_proj"),
            count="num_local_experts",
            width="intermediate_size",
        ),
        "qwen2_moe": MixtureDesign(
            architecture="qwen2moe",
            attention={**_NORMS, **_QKV},
            biased=_QKV_BIASES,
            dense={},
            experts=_EXPERTS,
            sparse={
                **_ROUTER,
                **{
                    module.replace("shared_experts", "shared_expert"): names
                    for module, names in _SHARED.items()
                },
                "mlp.shared_expert_gate": ("ffn_gate_inp_shexp", "1h"),
            },
            required={**_EVERY_LAYER, "norm_topk_prob": False},
            tied=False,
            fields=_qwen2,
        ),
        "qwen3_moe": MixtureDesign(
            architecture="qwen3moe",
            attention={**_NORMS, **_QKV, **_HEAD_NORMS},
            dense={},
            experts=_EXPERTS,
            sparse=_ROUTER,
            required={**_EVERY_LAYER, "norm_topk_prob": True},
            fields=_qwen3,
        ),
        "olmoe": MixtureDesign(
            architecture="olmoe",
            attention={
                **_NORMS,
                **_QKV,
                "self_attn.q_norm": ("attn_q_norm", "h"),
                "self_attn.k_norm": ("attn_k_norm", "h"),
            },
            dense={},
            experts=_EXPERTS,
            sparse=_ROUTER,
            width="intermediate_size",
            required={"norm_topk_prob": False, "clip_qkv": None},
            tied=False,
        ),
        "gpt_oss": MixtureDesign(
            architecture="gpt-oss",
            attention={**_POST_NORM, **_QKV},
            biased=_QKV_BIASES | {"self_attn.o_proj"},
            tensors={"self_attn.sinks": ("attn_sinks.weight", "g")},
            dense={},
            experts=_EXPERTS,
            expert_biases=True,
            sparse={"mlp.router": ("ffn_gate_inp", "nh")},
            sparse_tensors={"mlp.router.bias": ("ffn_gate_inp.bias", "n")},
            count="num_local_experts",
            width="intermediate_size",
            required={"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "attention_bias": True},
            tied=False,
            fields=_gpt_oss,
        ),
        "deepseek_v2": MixtureDesign(
            architecture="deepseek2",
            attention={**_NORMS, **_LATENT},
            dense=_MLP,
            experts=_EXPERTS,
            sparse={**_ROUTER, **_SHARED},
            heads_of="self_attn.kv_b_proj",
            count="n_routed_experts",
            # groups are ranked by the sum of their two best experts, this family's by the best one
            required={"topk_method": "greedy", "attention_bias": False},
            fields=_deepseek_v2,
        ),
        "deepseek_v3": MixtureDesign(
            architecture="deepseek2",
            attention={**_NORMS, **_LATENT},
            dense=_MLP,
            experts=_EXPERTS,
            sparse={**_ROUTER, **_SHARED},
            sparse_tensors={"mlp.gate.e_score_correction_bias": ("exp_probs_b.bias", "n")},
            heads_of="self_attn.kv_b_proj",
            count="n_routed_experts",
            required={"rope_interleave": True, "attention_bias": False},
            fields=_deepseek_v3,
        ),
        "glm4_moe": MixtureDesign(
            architecture="glm4moe",
            attention={**_POST_NORM, **_QKV, **_HEAD_NORMS},
            biased=_QKV_BIASES,
            dense=_MLP,
            experts=_EXPERTS,
            sparse={**_ROUTER, **_SHARED},
            sparse_tensors={"mlp.gate.e_score_correction_bias": ("exp_probs_b.bias", "n")},
            count="n_routed_experts",
            fields=_glm,
        ),
    }
)

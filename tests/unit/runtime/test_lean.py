"""The lean decoder against transformers' model with the same dequantized weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    CodeGenConfig,
    DbrxConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DynamicCache,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoXConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from quantflow.backends import native
from quantflow.core.kv import SCHEMES, kv_scales, kv_words
from quantflow.core.scheme import PRESETS, with_group_size
from quantflow.errors import UnsupportedError, UsageError
from quantflow.models.open import graph_for
from quantflow.runtime import projection
from quantflow.runtime.artifact import Artifact, open_artifact, open_folder
from quantflow.runtime.decoder import Decoder, HiddenDecoder
from quantflow.runtime.decoding import Lookup, generate
from quantflow.runtime.lean import LeanDecoder
from quantflow.runtime.load import load
from quantflow.runtime.transformers_decoder import TransformersDecoder
from tests.shared import slow, slow_but

ROOT = Path(__file__).resolve().parents[3]
W4A16 = with_group_size(PRESETS["W4A16"], 32)
W8A16 = PRESETS["W8A16"]
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 96,
    "eos_token_id": 2,
}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def rope(kind: str, **more) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 3,
}
STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 16}
ALIKE = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
# where the family's own default lies outside of a small vocabulary
PAD = {"pad_token_id": 0, "bos_token_id": 1}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 96}
GPT |= {"bos_token_id": 1, "eos_token_id": 2}


def falcon(**more):
    """The configuration of a small Falcon; without more, of one generation with 7b's."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    return FalconConfig(
        **sizes | {"bos_token_id": 1, "eos_token_id": 2} | more,
        architectures=["FalconForCausalLM"],
    )


LLAMA = LlamaConfig(**SIZES, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
FAMILIES = {
    "llama": LLAMA,
    "llama, wide heads": LlamaConfig(
        **SIZES, head_dim=48, attention_bias=True, mlp_bias=True, architectures=["LlamaForCausalLM"]
    ),
    "llama, seven to a head": LlamaConfig(
        **SIZES
        | {"hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 16},
        architectures=["LlamaForCausalLM"],
    ),
    "llama3 rope": LlamaConfig(
        **SIZES, **rope("llama3", factor=8.0, **BANDS), architectures=["LlamaForCausalLM"]
    ),
    "linear rope": LlamaConfig(
        **SIZES, **rope("linear", factor=2.0), architectures=["LlamaForCausalLM"]
    ),
    "yarn rope": LlamaConfig(
        **SIZES,
        **rope("yarn", factor=4.0, original_max_position_embeddings=16),
        architectures=["LlamaForCausalLM"],
    ),
    "mistral, a window of 6": MistralConfig(
        **SIZES, sliding_window=6, architectures=["MistralForCausalLM"]
    ),
    "qwen2, biases and a tied head": Qwen2Config(
        **SIZES, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"]
    ),
    "qwen2, one of two layers slides": Qwen2Config(
        **SIZES,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
        architectures=["Qwen2ForCausalLM"],
    ),
    "qwen3, norms over heads": Qwen3Config(
        **SIZES, head_dim=32, architectures=["Qwen3ForCausalLM"]
    ),
    "llama, gelu": LlamaConfig(**SIZES, hidden_act="gelu", architectures=["LlamaForCausalLM"]),
    "gemma": GemmaConfig(**SIZES, head_dim=32, architectures=["GemmaForCausalLM"]),
    "gemma2, caps that are felt": Gemma2Config(
        **{
            **SIZES,
            "head_dim": 16,
            "sliding_window": 5,
            "query_pre_attn_scalar": 4,
            "attn_logit_softcapping": 0.7,
        },
        final_logit_softcapping=0.5,
        architectures=["Gemma2ForCausalLM"],
    ),
    "gemma3, two rotations": Gemma3TextConfig(
        **{
            **SIZES,
            "num_hidden_layers": 3,
            "head_dim": 32,
            "sliding_window": 5,
            "query_pre_attn_scalar": 24,
        },
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        architectures=["Gemma3ForCausalLM"],
    ),
    "phi3": Phi3Config(**SIZES, **PAD, sliding_window=6, architectures=["Phi3ForCausalLM"]),
    "phi3, half of a head rotated": Phi3Config(
        **{**SIZES, "num_attention_heads": 2, "num_key_value_heads": 1},
        **PAD,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        architectures=["Phi3ForCausalLM"],
    ),
    "granite": GraniteConfig(
        **SIZES,
        embedding_multiplier=3.0,
        attention_multiplier=0.4,
        residual_multiplier=0.3,
        logits_scaling=0.25,
        architectures=["GraniteForCausalLM"],
    ),
    "smollm3, a layer of three without rotation": SmolLM3Config(
        **{**SIZES, "num_hidden_layers": 3},
        **PAD,
        no_rope_layers=[1, 0, 1],
        architectures=["SmolLM3ForCausalLM"],
    ),
    "smollm3, whose layer without rotation slides": SmolLM3Config(
        **SIZES,
        **PAD,
        no_rope_layers=[1, 0],
        use_sliding_window=True,
        sliding_window=5,
        architectures=["SmolLM3ForCausalLM"],
    ),
    "gpt_neox": GPTNeoXConfig(**ALIKE, architectures=["GPTNeoXForCausalLM"]),
    "gpt_neox, one branch after the other": GPTNeoXConfig(
        **ALIKE,
        use_parallel_residual=False,
        hidden_act="relu",
        architectures=["GPTNeoXForCausalLM"],
    ),
    "phi": PhiConfig(**SIZES, architectures=["PhiForCausalLM"]),
    "bloom": BloomConfig(
        hidden_size=64, n_layer=2, n_head=4, vocab_size=96, architectures=["BloomForCausalLM"]
    ),
    "bloom, whose heads are no power of two": BloomConfig(
        hidden_size=96, n_layer=2, n_head=6, vocab_size=96, architectures=["BloomForCausalLM"]
    ),
    "gpt2": GPT2Config(**GPT, architectures=["GPT2LMHeadModel"]),
    "gpt2, a narrow MLP and a head of its own": GPT2Config(
        **GPT,
        n_inner=96,
        activation_function="gelu",
        tie_word_embeddings=False,
        architectures=["GPT2LMHeadModel"],
    ),
    "opt": OPTConfig(**ALIKE, **PAD, ffn_dim=96, architectures=["OPTForCausalLM"]),
    "opt, norms behind and narrow embeddings, as 350m": OPTConfig(
        **ALIKE,
        **PAD,
        ffn_dim=96,
        do_layer_norm_before=False,
        word_embed_proj_dim=32,
        architectures=["OPTForCausalLM"],
    ),
    "opt, no biases and no last norm": OPTConfig(
        **ALIKE,
        **PAD,
        ffn_dim=96,
        enable_bias=False,
        _remove_final_layer_norm=True,
        activation_function="gelu",
        architectures=["OPTForCausalLM"],
    ),
    "falcon, a kv head for all, as 7b": falcon(num_kv_heads=4),
    "falcon, groups and two norms, as 40b": falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon, groups and one norm, as 11b": falcon(
        new_decoder_architecture=True,
        num_kv_heads=2,
        num_ln_in_parallel_attn=1,
        ffn_hidden_size=96,
        rope_parameters={"rope_type": "default", "rope_theta": 500042.0},
        tie_word_embeddings=False,
    ),
    "falcon, one branch after the other and alibi, as rw": falcon(
        alibi=True, multi_query=False, parallel_attn=False, bias=True
    ),
    "falcon, alibi over one kv head": falcon(
        hidden_size=96, num_attention_heads=6, alibi=True, activation="relu"
    ),
    "gpt_bigcode": GPTBigCodeConfig(**GPT, architectures=["GPTBigCodeForCausalLM"]),
    "gpt_bigcode, keys for each head": GPTBigCodeConfig(
        **GPT, n_inner=96, multi_query=False, architectures=["GPTBigCodeForCausalLM"]
    ),
    "gptj": GPTJConfig(**GPT | {"n_embd": 128}, rotary_dim=16, architectures=["GPTJForCausalLM"]),
    "gptj, whole heads rotated and a narrow MLP": GPTJConfig(
        **GPT, n_inner=96, rotary_dim=16, architectures=["GPTJForCausalLM"]
    ),
    "codegen": CodeGenConfig(
        **GPT | {"n_embd": 256, "n_head": 8}, rotary_dim=16, architectures=["CodeGenForCausalLM"]
    ),
    "starcoder2": Starcoder2Config(
        **SIZES, sliding_window=6, architectures=["Starcoder2ForCausalLM"]
    ),
    "mixtral": MixtralConfig(
        **SIZES, num_local_experts=4, sliding_window=6, architectures=["MixtralForCausalLM"]
    ),
    "qwen2_moe, a dense layer before a sparse one": Qwen2MoeConfig(
        **SIZES,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        num_experts=5,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
        architectures=["Qwen2MoeForCausalLM"],
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES,
        head_dim=32,
        moe_intermediate_size=32,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        architectures=["Qwen3MoeForCausalLM"],
    ),
    "olmoe, norms of all heads at once": OlmoeConfig(
        **SIZES, **PAD, num_experts=4, num_experts_per_tok=2, architectures=["OlmoeForCausalLM"]
    ),
}


def mixture(model_type: str, architecture: str, **more):
    """The configuration of a small mixture."""
    sizes = {**SIZES, **PAD, "num_experts_per_tok": 2, **more}
    return CONFIG_MAPPING[model_type](**sizes, architectures=[architecture])


def dbrx(*, clip: float = 0.5, **ffn):
    """The configuration of a small DBRX."""
    return DbrxConfig(
        **PAD,
        d_model=64,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        vocab_size=96,
        attn_config={"kv_n_heads": 2, "clip_qkv": clip, "rope_theta": 500000.0},
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 6, "moe_top_k": 3, **ffn},
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        architectures=["DbrxForCausalLM"],
    )


def llama4(**more):
    """The configuration of a small Llama 4: chunks of 5 in all layers but the third."""
    sizes = SIZES | {"intermediate_size": 48, "intermediate_size_mlp": 96, "num_hidden_layers": 3}
    sizes |= {"no_rope_layers": [1, 1, 0], "attention_chunk_size": 5, "head_dim": 32}
    sizes |= {"num_local_experts": 4, "attn_temperature_tuning": False, "rms_norm_eps": 1e-3}
    return Llama4TextConfig(**PAD, **sizes | more, architectures=["Llama4ForCausalLM"])


GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.3}
FAMILIES |= {
    "gpt_oss, sinks and a gate that is clamped": mixture(
        "gpt_oss",
        "GptOssForCausalLM",
        head_dim=16,
        num_local_experts=4,
        sliding_window=5,
        swiglu_limit=0.2,
    ),
    "glm4_moe, groups of experts behind a dense layer": mixture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        head_dim=32,
        moe_intermediate_size=32,
        use_qk_norm=True,
        **{**GROUPS, "attention_bias": True, "num_hidden_layers": 3},
    ),
    "glm4_moe, as GLM-4.5-Air": mixture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        head_dim=32,
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_shared_experts=2,
    ),
    "minimax_m2, half of a head rotated": mixture(
        "minimax_m2", "MiniMaxM2ForCausalLM", head_dim=32, num_local_experts=4, rotary_dim=16
    ),
    "ernie4_5_moe, neighbours rotated": mixture(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        moe_num_experts=5,
        moe_k=2,
        moe_intermediate_size=32,
        use_bias=True,
        tie_word_embeddings=False,
    ),
    "ernie4_5_moe, every second layer sparse, no shared expert": mixture(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        moe_num_experts=5,
        moe_k=3,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        moe_layer_interval=2,
        moe_layer_end_index=2,
        moe_num_shared_experts=0,
    ),
    "granitemoe": mixture(
        "granitemoe", "GraniteMoeForCausalLM", num_local_experts=4, logits_scaling=0.25, **GRANITE
    ),
    "granitemoeshared": mixture(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        num_local_experts=4,
        shared_intermediate_size=48,
    ),
    "granitemoeshared without a shared expert": mixture(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        num_local_experts=4,
        shared_intermediate_size=0,
    ),
    "granitemoehybrid without Mamba": mixture(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        num_local_experts=4,
        shared_intermediate_size=48,
        layer_types=["attention"] * 2,
        **GRANITE,
    ),
    "granitemoehybrid, dense, as Granite 4 Micro": mixture(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        num_local_experts=0,
        shared_intermediate_size=48,
        layer_types=["attention"] * 2,
        position_embedding_type="rope",
    ),
    "phimoe, one expert after the other": mixture(
        "phimoe",
        "PhimoeForCausalLM",
        num_local_experts=4,
        attention_bias=True,
        lm_head_bias=True,
        router_jitter_noise=0.4,
    ),
    "olmoe, clipped": mixture("olmoe", "OlmoeForCausalLM", num_experts=4, clip_qkv=0.8),
    "dbrx, clipped": dbrx(),
    "dbrx, weights of experts as they are": dbrx(
        clip=8, moe_normalize_expert_weights=None, ffn_act_fn={"name": "gelu"}
    ),
    "llama4, a dense layer between": llama4(
        interleave_moe_layer_step=2,
        **rope(
            "llama3",
            factor=16.0,
            original_max_position_embeddings=16,
            low_freq_factor=1.0,
            high_freq_factor=1.0,
        ),
    ),
    "llama4, three experts, no norms, chunks without a rotation": llama4(
        num_experts_per_tok=3,
        moe_layers=[1, 2],
        use_qk_norm=False,
        layer_types=["full_attention", "chunked_attention", "chunked_attention"],
    ),
    # released configurations of DeepSeek V2 Lite, V2, V3 and Kimi K2, made small
    "deepseek_v2, queries as they are": DeepseekV2Config(
        **LATENT | {"q_lora_rank": None},
        **rope("yarn", **STRETCHED, mscale=0.707, mscale_all_dim=0.707),
        topk_method="greedy",
        architectures=["DeepseekV2ForCausalLM"],
    ),
    "deepseek_v2, groups by their best expert": DeepseekV2Config(
        **LATENT,
        n_shared_experts=2,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=16.0,
        architectures=["DeepseekV2ForCausalLM"],
    ),
    "deepseek_v3": DeepseekV3Config(
        **LATENT,
        **rope("yarn", **STRETCHED, mscale=1.0, mscale_all_dim=1.0, beta_fast=32, beta_slow=1),
        n_group=4,
        topk_group=2,
        architectures=["DeepseekV3ForCausalLM"],
    ),
    "deepseek_v3 as Kimi has it": DeepseekV3Config(
        **LATENT,
        **rope("yarn", **STRETCHED, mscale=1.0, mscale_all_dim=1.0, beta_fast=1, beta_slow=1),
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.827,
        architectures=["DeepseekV3ForCausalLM"],
    ),
    "glm4_moe_lite, as GLM-4.7-Flash": CONFIG_MAPPING["glm4_moe_lite"](
        **LATENT,
        **PAD,
        n_group=1,
        topk_group=1,
        num_nextn_predict_layers=1,
        architectures=["Glm4MoeLiteForCausalLM"],
    ),
    "glm4_moe_lite, a dense layer between": CONFIG_MAPPING["glm4_moe_lite"](
        **LATENT,
        **PAD,
        mlp_layer_types=["sparse", "dense", "sparse"],
        n_group=4,
        topk_group=2,
        rope_interleave=False,
        architectures=["Glm4MoeLiteForCausalLM"],
    ),
    "deepseek_v3, half a head apart and biases": DeepseekV3Config(
        **LATENT,
        n_group=2,
        topk_group=1,
        rope_interleave=False,
        attention_bias=True,
        norm_topk_prob=False,
        architectures=["DeepseekV3ForCausalLM"],
    ),
}


# released configurations of DeepSeek V3.2 and GLM-5, made small: a query sees 5 positions
INDEX = {"index_topk": 5, "index_n_heads": 12, "index_head_dim": 32}
SELECTIVE = {
    "deepseek_v32": CONFIG_MAPPING["deepseek_v32"](
        **LATENT,
        **INDEX,
        **rope("yarn", **STRETCHED, mscale=1.0, mscale_all_dim=1.0, beta_fast=32, beta_slow=1),
        n_group=4,
        topk_group=2,
        architectures=["DeepseekV32ForCausalLM"],
    ),
    "glm_moe_dsa": CONFIG_MAPPING["glm_moe_dsa"](
        **LATENT, **PAD, **INDEX, architectures=["GlmMoeDsaForCausalLM"]
    ),
    "glm_moe_dsa, layers that share a choice": CONFIG_MAPPING["glm_moe_dsa"](
        **LATENT | {"num_hidden_layers": 5, "attention_bias": True},
        **PAD,
        **INDEX,
        indexer_types=["full", "shared", "full", "shared", "shared"],
        mlp_layer_types=["sparse", "dense", "dense", "sparse", "dense"],
        architectures=["GlmMoeDsaForCausalLM"],
    ),
}
FAMILIES |= SELECTIVE

# released configurations of Qwen3-Next-80B-A3B and Qwen3.5 27B and 35B-A3B, made small
DELTA = {
    **SIZES,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}
GRID = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}


def delta(model_type: str, architecture: str, **more):
    """The configuration of a small model with gated delta nets."""
    theirs = CONFIG_MAPPING[model_type]
    has = theirs().to_dict()
    sizes = {key: value for key, value in DELTA.items() if key in SIZES or key in has}
    return theirs(**{**sizes, **more}, architectures=[architecture])


STATEFUL = {
    "qwen3_next": delta("qwen3_next", "Qwen3NextForCausalLM"),
    "qwen3_next, a dense layer, attention first": delta(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        mlp_only_layers=[1],
        layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
        linear_conv_kernel_dim=2,
    ),
    "qwen3_5": delta(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        **rope("default", **GRID),
        linear_key_head_dim=48,
        linear_value_head_dim=128,
        attention_bias=True,
    ),
    "qwen3_5_moe": delta("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", **rope("default", **GRID)),
}
FAMILIES |= STATEFUL


# transformers counts their positions from the first column, be it padding
TEMPERED = {
    "llama4, queries that grow": llama4(
        attn_temperature_tuning=True, floor_scale=3, attn_scale=0.8, num_experts_per_tok=2
    )
}
FAMILIES |= TEMPERED


def ids(rows: int, count: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 96, (rows, count), generator=torch.Generator().manual_seed(seed))


def walk(
    decoder: Decoder, *, crops: bool = True, padding: int = 3, seed: int = 0
) -> list[torch.Tensor]:
    """Logits of every call of a decoder: a prompt, steps, a few at once, crop, other rows."""
    found = []
    with torch.inference_mode():
        decoder.begin(rows=2, capacity=40)
        found.append(decoder.forward(ids(2, 9, seed), padding=torch.tensor([0, padding])))
        found += [decoder.forward(ids(2, 1, seed + step)) for step in (1, 2, 3)]
        found.append(decoder.forward(ids(2, 4, seed + 4), last_only=False))
        if crops:
            decoder.crop(11)
        found.append(decoder.forward(ids(2, 1, seed + 5)))
        decoder.keep(torch.tensor([1, 1, 0]))
        found.append(decoder.forward(ids(3, 18, seed + 6), last_only=False))
        decoder.keep(torch.tensor([2]))
        found.append(decoder.forward(ids(1, 1, seed + 7)))
        decoder.begin(rows=1, capacity=20)
        found.append(decoder.forward(ids(1, 20, seed + 8), last_only=False))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_logits_of_transformers_whatever_is_asked(
    family, tmp_path, make_artifact
):
    model = make_artifact(tmp_path, FAMILIES[family], W8A16)
    artifact = open_artifact(tmp_path, backend="reference")
    # its experts are dequantized by the loader: transformers has them in one tensor
    if graph_for(FAMILIES[family]).sparse:
        model = load(tmp_path, decoder="transformers", backend="reference").model
    crops, padding = family not in STATEFUL, 0 if family in TEMPERED else 3
    expected = walk(TransformersDecoder(model, crops=crops), crops=crops, padding=padding)
    found = walk(LeanDecoder(artifact), crops=crops, padding=padding)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name.startswith("llama4")])
def test_a_padded_sequence_has_the_logits_that_transformers_gives_it_alone(
    family, tmp_path, make_artifact
):
    """Chunks and the growth of queries are counted from a text's own first token."""
    make_artifact(tmp_path, FAMILIES[family], W8A16)
    model = load(tmp_path, decoder="transformers", backend="reference").model
    decoder, text = LeanDecoder(open_artifact(tmp_path, backend="reference")), ids(2, 19, 0)
    padding = torch.tensor([7, 2])
    decoder.begin(rows=2, capacity=19)
    found = [decoder.forward(text[:, :14], padding=padding, last_only=False)]
    found += [decoder.forward(text[:, at : at + 1], last_only=False) for at in range(14, 19)]
    for row, skip in enumerate(padding.tolist()):
        ours = torch.cat(found, dim=1)[row, skip:]
        theirs = model(text[row : row + 1, skip:]).logits[0]
        assert torch.allclose(ours, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["W8A8", "W8A8_STATIC", "FP8", "FP8_BLOCK", "W4A16_ASYM", "W4A8"])
def test_linears_of_every_scheme_are_put_together_without_changing_their_outputs(
    name, tmp_path, make_artifact
):
    config = LlamaConfig(
        **SIZES | {"hidden_size": 128, "intermediate_size": 128}, architectures=["LlamaForCausalLM"]
    )
    scheme = (
        PRESETS[name]
        if name == "FP8_BLOCK" or not PRESETS[name].weights.group_size
        else with_group_size(PRESETS[name], 32)
    )
    model = make_artifact(tmp_path, config, scheme)
    decoder = LeanDecoder(open_artifact(tmp_path, backend="reference"))
    prompt = ids(2, 12, 0)
    decoder.begin(rows=2, capacity=12)
    # Another order of sums can move an input over a rounding boundary of its grid.
    assert torch.allclose(
        decoder.forward(prompt, last_only=False), model(prompt).logits, atol=2e-2, rtol=2e-2
    )


def test_linears_that_are_quantized_differently_are_computed_apart(tmp_path, make_artifact):
    def scheme_of(name):
        return (
            None
            if name.endswith(("v_proj", "gate_proj"))
            else W8A16
            if name.endswith("k_proj")
            else W4A16
        )

    config = Qwen2Config(**SIZES, architectures=["Qwen2ForCausalLM"])
    model = make_artifact(tmp_path, config, scheme_of)
    decoder = LeanDecoder(open_artifact(tmp_path, backend="reference"))
    decoder.begin(rows=1, capacity=12)
    prompt = ids(1, 12, 0)
    assert torch.allclose(
        decoder.forward(prompt, last_only=False), model(prompt).logits, atol=2e-5, rtol=2e-5
    )


def test_bfloat16_weights_are_kept_so_and_their_logits_are_those_of_float32(
    tmp_path, make_artifact, edit_tensors
):
    model = make_artifact(tmp_path, LLAMA, W4A16)

    def narrow(tensors):
        tensors |= {
            name: tensors[name].bfloat16()
            for name in ("lm_head.weight", "model.embed_tokens.weight")
        }

    edit_tensors(tmp_path, narrow)
    for name in ("lm_head", "model.embed_tokens"):
        weight = model.get_submodule(name).weight
        weight.data = weight.data.bfloat16().float()
    expected = walk(TransformersDecoder(model, crops=True))
    found = walk(LeanDecoder(open_artifact(tmp_path, backend="reference", verify=False)))
    assert all(
        torch.allclose(ours, theirs, atol=2e-5, rtol=2e-5)
        for ours, theirs in zip(found, expected, strict=True)
    )


# the first of each family
KINDS = {config.model_type: name for name, config in reversed(FAMILIES.items())}


@pytest.mark.parametrize("family", slow_but(FAMILIES, *KINDS.values()))
def test_layers_in_one_call_have_the_bits_of_one_call_for_each_operation(
    family, tmp_path, make_artifact, monkeypatch
):
    make_artifact(tmp_path, FAMILIES[family], with_group_size(PRESETS["W4A8"], 16))
    artifact, crops = open_artifact(tmp_path), family not in STATEFUL
    together = walk(LeanDecoder(artifact), crops=crops)
    # A product that is no partial of kernels.linear is one that C cannot call.
    monkeypatch.setattr(
        projection, "partial", lambda function, **settings: lambda x: function(x, **settings)
    )
    for one, many in zip(together, walk(LeanDecoder(artifact), crops=crops), strict=True):
        assert torch.equal(one, many)


def test_one_and_two_threads_give_the_same_bits(tmp_path, make_artifact):
    config = LlamaConfig(
        **SIZES | {"hidden_size": 512, "head_dim": 64}, architectures=["LlamaForCausalLM"]
    )
    make_artifact(tmp_path, config, W8A16)
    decoder, found = LeanDecoder(open_artifact(tmp_path)), []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            decoder.begin(rows=2, capacity=80)
            found.append(
                [
                    decoder.forward(ids(2, 16, 0)),
                    decoder.forward(ids(2, 16, 1)),
                    decoder.forward(ids(2, 1, 2)),
                ]
            )
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def to_int8(x: torch.Tensor) -> torch.Tensor:
    step = x.abs().amax(dim=-1, keepdim=True) / 127.5
    return (x / step).round().clamp(-128, 127) * step


ROUNDED = {
    "bfloat16": lambda x: x.bfloat16().float(),
    "float8": lambda x: x.to(torch.float8_e4m3fn).float(),
    "int8": to_int8,
}


def short_text(decoder: Decoder, *, seed: int) -> list[torch.Tensor]:
    """Logits of three tokens, of one after them and of two, in a cache that begins anew."""
    with torch.inference_mode():
        decoder.begin(rows=1, capacity=6)
        return [
            decoder.forward(ids(1, count, 10 * seed + at), last_only=False)
            for at, count in enumerate((3, 1, 2))
        ]


@pytest.mark.parametrize("kind", ROUNDED)
def test_a_smaller_cache_gives_the_logits_of_transformers_with_rounded_keys_and_values(
    kind, tmp_path, make_artifact, monkeypatch
):
    model = make_artifact(tmp_path, LLAMA, W4A16)
    update = DynamicCache.update

    def rounding(self, keys, values, *arguments, **options):
        return update(self, ROUNDED[kind](keys), ROUNDED[kind](values), *arguments, **options)

    theirs = TransformersDecoder(model, crops=True)
    ours = LeanDecoder(open_artifact(tmp_path, backend="reference"), kv_cache=kind)

    def away(calls: Callable[[Decoder], list[torch.Tensor]]) -> float:
        """How far the worst call is, in what rounding does to it."""
        monkeypatch.setattr(DynamicCache, "update", update)
        exact = calls(theirs)
        monkeypatch.setattr(DynamicCache, "update", rounding)
        expected = calls(theirs)
        return max(
            float((one - other).abs().max() / (other - whole).abs().max())
            for one, other, whole in zip(calls(ours), expected, exact, strict=True)
        )

    # Another rule of rounding would move every call. A number in the middle between two codes may
    # fall to either, which depends on the CPU's sums. It moves the calls that read it, and few of
    # many short texts have one.
    assert away(partial(walk, seed=20)) < 0.05
    texts = [away(partial(short_text, seed=seed)) for seed in range(40)]
    assert median(texts) < 1e-3, texts


@pytest.mark.parametrize("scheme", SCHEMES, ids=kv_words)
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "llama, seven to a head",
        "mistral, a window of 6",
        "falcon, groups and two norms, as 40b",  # in whose cache transformers repeats kv heads
    ],
)
def test_measured_scales_give_the_logits_of_transformers_with_keys_and_values_rounded_by_them(
    family, scheme, tmp_path, make_artifact, monkeypatch
):
    config = FAMILIES[family]
    model = make_artifact(tmp_path, config, W8A16)
    of_falcon = isinstance(config, FalconConfig)
    heads = config.num_kv_heads if of_falcon else config.num_key_value_heads
    repeats = config.num_attention_heads // heads if of_falcon else 1
    if scheme.granularity == "per_tensor":
        heads = repeats = 1
    scales = [
        kv_scales(
            scheme,
            keys=torch.linspace(0.4, 0.9, heads).repeat_interleave(repeats) * (layer + 1),
            values=torch.linspace(0.2, 0.4, heads).repeat_interleave(repeats),
        )
        for layer in (0, 1)
    ]
    exact = walk(TransformersDecoder(model, crops=True))
    expected = walk(TransformersDecoder(model, crops=True, kv_scales=scales))
    monkeypatch.setattr(Artifact, "kv_scales", lambda artifact: scales)
    found = walk(LeanDecoder(open_artifact(tmp_path, backend="reference")))
    for ours, theirs, whole in zip(found, expected, exact, strict=True):
        # As above: a number in the middle between two codes may fall to either.
        assert (ours - theirs).abs().max() < 0.05 * (theirs - whole).abs().max()


@pytest.mark.parametrize("family", ["llama", "opt, norms behind and narrow embeddings, as 350m"])
def test_hidden_states_are_what_the_head_reads(family, tmp_path, make_artifact):
    model = make_artifact(tmp_path, FAMILIES[family], W8A16)
    decoder, peer = (
        LeanDecoder(open_artifact(tmp_path, backend="reference")),
        TransformersDecoder(model),
    )
    assert isinstance(decoder, HiddenDecoder)
    for each in (decoder, peer):
        each.begin(rows=1, capacity=9)
    for ours, theirs in zip(
        decoder.forward_hidden(ids(1, 9, 0)), peer.forward_hidden(ids(1, 9, 0)), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=2e-5, rtol=2e-5)


@pytest.fixture(scope="module")
def example(tmp_path_factory, make_artifact):
    """The example model in W4A16: the artifact, and transformers' model of its weights."""
    folder = tmp_path_factory.mktemp("example")
    model = AutoModelForCausalLM.from_pretrained(
        ROOT / "examples/tiny-llama", dtype=torch.float32
    ).eval()
    return folder, make_artifact(folder, model.config, PRESETS["W4A16"], model=model)


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Fifty pieces of this repository's own text, padded on the left."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/tiny-llama")
    text = tokenizer((ROOT / "CHANGELOG.md").read_text() * 2)["input_ids"]
    rows = [text[60 * index : 60 * index + 5 + index % 23] for index in range(50)]
    padding = torch.tensor([27 - len(row) for row in rows])
    return torch.tensor([[2] * (27 - len(row)) + row for row in rows]), padding


@pytest.mark.slow
def test_fifty_prompts_continue_with_the_64_tokens_of_transformers(example):
    folder, model = example
    tokens, padding = prompts()
    expected = generate(model, tokens, padding=padding, max_new_tokens=64)
    decoder = LeanDecoder(open_artifact(folder, backend="reference", verify=False))
    assert torch.equal(generate(decoder, tokens, padding=padding, max_new_tokens=64), expected)


@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16])
def test_the_kernels_choose_the_token_of_the_reference_99_times_of_100(dtype, example):
    folder, _ = example
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/tiny-llama")
    text = "".join(
        (ROOT / "examples/tiny-llama" / name).read_text()
        for name in ("train.py", "plant_outliers.py")
    )
    tokens = torch.tensor(tokenizer(text)["input_ids"][: 8 * 256]).view(8, 256)
    chosen = []
    for settings in ({"backend": "reference"}, {"backend": "auto", "dtype": dtype}):
        decoder = LeanDecoder(open_artifact(folder, verify=False, **settings))
        decoder.begin(rows=8, capacity=256)
        chosen.append(decoder.forward(tokens, last_only=False).argmax(dim=-1))
    assert (chosen[0] == chosen[1]).float().mean() >= 0.99


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["W4A8", "W8A8"])
def test_the_kernels_choose_transformers_token_99_times_of_100_along_what_it_generates(
    scheme, make_artifact, tmp_path
):
    """Rounded inputs: sums of another order round some of them to another code."""
    model = AutoModelForCausalLM.from_pretrained(
        ROOT / "examples/tiny-llama", dtype=torch.float32
    ).eval()
    model = make_artifact(tmp_path, model.config, PRESETS[scheme], model=model)
    text = AutoTokenizer.from_pretrained(ROOT / "examples/tiny-llama")(
        (ROOT / "examples/tiny-llama/train.py").read_text()
    )
    prompts = torch.tensor(text["input_ids"]).unfold(0, 16, 40)[:50]
    expected = generate(model, prompts, max_new_tokens=64)
    decoder = LeanDecoder(
        open_artifact(tmp_path, backend="auto", dtype=torch.float32, verify=False)
    )
    decoder.begin(rows=50, capacity=80)
    chosen = decoder.forward(expected[:, :-1], last_only=False)[:, 15:].argmax(dim=-1)
    assert chosen.shape == (50, 64)
    assert (chosen == expected[:, 16:]).float().mean() >= 0.99


def test_speculation_gives_the_tokens_of_greedy_decoding(example):
    folder, _ = example
    decoder = LeanDecoder(open_artifact(folder, verify=False))
    prompt = prompts()[0][22:23]
    expected = generate(decoder, prompt, max_new_tokens=48)
    assert torch.equal(
        generate(decoder, prompt, max_new_tokens=48, method=Lookup(tokens=4)), expected
    )


def test_a_position_without_an_embedding_is_an_error(tmp_path, make_artifact):
    make_artifact(tmp_path, FAMILIES["gpt2"], W8A16)
    decoder = LeanDecoder(open_artifact(tmp_path))
    decoder.begin(rows=1, capacity=80)
    decoder.forward(ids(1, 64, 0))
    with pytest.raises(UsageError, match=r"^position 64: transformer\.wpe has 64; use shorter"):
        decoder.forward(ids(1, 1, 1))


def test_a_linear_of_gpt2_that_is_not_quantized_is_read_the_right_way_round(
    tmp_path, make_artifact
):
    model = make_artifact(
        tmp_path, FAMILIES["gpt2"], lambda name: None if name.endswith("attn.c_proj") else W8A16
    )
    decoder = LeanDecoder(open_artifact(tmp_path, backend="reference"))
    decoder.begin(rows=1, capacity=12)
    prompt = ids(1, 12, 0)
    assert torch.allclose(
        decoder.forward(prompt, last_only=False), model(prompt).logits, atol=2e-5, rtol=2e-5
    )


OLMO2 = Olmo2Config(**SIZES, **PAD, architectures=["Olmo2ForCausalLM"])
TANH = LlamaConfig(**SIZES, hidden_act="tanh", architectures=["LlamaForCausalLM"])
NORMED = PhiConfig(**SIZES, qk_layernorm=True, architectures=["PhiForCausalLM"])
NARROW = LlamaConfig(
    **SIZES | {"num_attention_heads": 8, "head_dim": 8}, architectures=["LlamaForCausalLM"]
)
DYNAMIC = LlamaConfig(**SIZES, **rope("dynamic", factor=2.0), architectures=["LlamaForCausalLM"])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (OLMO2, "it does not know the layers of olmo2"),
        (
            TANH,
            "it knows the activations silu, swish, gelu, relu, gelu_pytorch_tanh, gelu_new, "
            "gelu_fast, not tanh",
        ),
        (NORMED, "it knows qk_layernorm=False of config.json, not True"),
        (NARROW, "it works on 16 features at once, heads have 8"),
        (
            DYNAMIC,
            "its rotation depends on the position alone, that of rope_type dynamic on the "
            "sequence too",
        ),
    ],
)
def test_what_it_cannot_run_goes_through_transformers_and_says_why(
    config, reason, tmp_path, make_artifact
):
    model = make_artifact(tmp_path, config, W4A16)
    loaded = load(tmp_path, decoder="auto")
    assert (loaded.name, loaded.reasons) == (
        "transformers",
        (f"the lean decoder is not used: {reason}",),
    )
    loaded.decoder.begin(rows=1, capacity=8)
    assert torch.allclose(
        loaded.decoder.forward(ids(1, 8, 0)), model(ids(1, 8, 0)).logits[:, -1], atol=1e-4
    )
    with pytest.raises(
        UnsupportedError, match=f"the lean decoder: {reason}; use decoder transformers"
    ):
        load(tmp_path, decoder="lean")
    with pytest.raises(
        UsageError, match=r"kv cache int8: the lean decoder has it, and is not used: "
    ):
        load(tmp_path, decoder="auto", kv_cache="int8")


def test_the_lean_decoder_is_taken_where_it_can_be_and_transformers_where_it_is_asked_for(
    tmp_path, make_artifact
):
    make_artifact(tmp_path, LLAMA, W4A16)
    assert isinstance(load(tmp_path, decoder="auto").decoder, LeanDecoder)
    asked = load(tmp_path, decoder="transformers")
    assert (asked.name, asked.reasons) == (
        "transformers",
        ("the lean decoder is not used: it was not asked for",),
    )
    assert isinstance(asked.decoder, TransformersDecoder)
    with pytest.raises(
        UsageError, match="decoder 'fast' is unknown; use one of auto, lean, transformers"
    ):
        load(tmp_path, decoder="fast")


def test_without_a_compiler_transformers_modules_run_it_and_say_so(
    tmp_path, make_artifact, monkeypatch
):
    model = make_artifact(tmp_path, LLAMA, W4A16)
    monkeypatch.setenv("CC", "no-such-compiler")
    native._attempt.cache_clear()  # as in a new process
    try:
        loaded = load(tmp_path, decoder="auto")
        with pytest.raises(
            UnsupportedError,
            match=r"the lean decoder: no C compiler \(no-such-compiler\); install gcc",
        ):
            load(tmp_path, decoder="lean")
    finally:
        native._attempt.cache_clear()
    assert set(loaded.backends.values()) == {"int4_pack"}
    (reason,) = loaded.reasons
    assert reason.startswith(
        "the lean decoder is not used: no C compiler (no-such-compiler); install gcc"
    )
    loaded.decoder.begin(rows=1, capacity=8)
    assert torch.allclose(
        loaded.decoder.forward(ids(1, 8, 0)), model(ids(1, 8, 0)).logits[:, -1], atol=1e-4
    )


def test_the_cache_is_allocated_once_for_all_batches_that_fit(tmp_path, make_artifact):
    make_artifact(tmp_path, LLAMA, W4A16)
    decoder = LeanDecoder(open_artifact(tmp_path))
    decoder.begin(rows=2, capacity=16)
    cache = decoder.cache
    places = [keys.data_ptr() for keys in cache.keys]
    decoder.forward(ids(2, 3, 0))
    decoder.forward(ids(2, 1, 1))
    decoder.begin(rows=1, capacity=12)
    assert decoder.cache is cache and cache.length == 0
    assert [keys.data_ptr() for keys in cache.keys] == places
    decoder.begin(rows=3, capacity=16)
    assert decoder.cache is not cache


def test_more_than_there_is_room_for_is_an_error(tmp_path, make_artifact):
    make_artifact(tmp_path, LLAMA, W4A16)
    decoder = LeanDecoder(open_artifact(tmp_path))
    with pytest.raises(
        UsageError, match="the decoder has no cache; call begin before anything else"
    ):
        decoder.forward(ids(1, 3, 0))
    decoder.begin(rows=1, capacity=16)
    with pytest.raises(
        UsageError, match="input_ids 2 x 3: the cache has 1 rows, 0 of 16 positions"
    ):
        decoder.forward(ids(2, 3, 0))
    decoder.forward(ids(1, 16, 0))
    with pytest.raises(
        UsageError, match="input_ids 1 x 1: the cache has 1 rows, 16 of 16 positions"
    ):
        decoder.forward(ids(1, 1, 0))


@pytest.mark.parametrize(
    "family",
    [
        "gemma2, caps that are felt",
        "gpt_neox",
        "granite",
        "mixtral",
        "llama4, queries that grow",
        "gpt2",
        "opt, norms behind and narrow embeddings, as 350m",
        "falcon, groups and two norms, as 40b",
        "falcon, alibi over one kv head",
        "codegen",
        "glm_moe_dsa, layers that share a choice",
    ],
)
def test_sequences_in_blocks_have_the_logits_of_transformers_in_every_family(
    family, tmp_path, make_artifact
):
    model = make_artifact(tmp_path, FAMILIES[family], W8A16)
    if graph_for(FAMILIES[family]).sparse:
        model = load(tmp_path, decoder="transformers", backend="reference").model
    decoder, texts = (
        LeanDecoder(open_artifact(tmp_path, backend="reference")),
        (ids(1, 11, 0), ids(1, 20, 1)),
    )
    decoder.begin_blocks(blocks=3, columns=16, positions=32)
    first, table = torch.tensor([0, 11, 31]), torch.tensor([[2, 0], [0, 1]])
    table[0, 1] = 2  # the first text fits into one block
    places = {
        "first": first,
        "start": torch.tensor([0, 0]),
        "table": table,
        "wanted": torch.tensor([10, 30]),
    }
    found = decoder.forward_rows(torch.cat([text[0] for text in texts]), **places)
    expected = torch.cat([model(text).logits[:, -1] for text in texts])
    assert torch.allclose(found, expected, atol=2e-5, rtol=2e-5)
    everywhere = decoder.forward_rows(
        torch.cat([text[0] for text in texts]), **places | {"wanted": torch.arange(31)}
    )
    assert len(everywhere) == 31 and torch.equal(everywhere[[10, 30]], found)


@pytest.mark.parametrize(
    "family",
    [
        "mixtral",
        "gpt_oss, sinks and a gate that is clamped",
        "dbrx, clipped",
        "llama4, queries that grow",
        "deepseek_v32",
        "glm_moe_dsa, layers that share a choice",
    ],
)
def test_a_sequence_of_a_mixture_has_the_same_bits_alone_and_beside_others(
    family, tmp_path, make_artifact
):
    make_artifact(tmp_path, FAMILIES[family], with_group_size(PRESETS["W4A8"], 16))
    decoder = LeanDecoder(open_artifact(tmp_path))
    if decoder.why_not_invariant is not None:
        pytest.skip(decoder.why_not_invariant)
    texts = [ids(1, length, length)[0] for length in (19, 7, 16)]

    def logits(rows, pieces):
        """Logits of some texts, in so many pieces of each."""
        decoder.begin_blocks(blocks=6, columns=16, positions=32)
        table = torch.tensor([[2 * row, 2 * row + 1] for row in rows])
        found = [[] for _ in rows]
        for piece in range(pieces):
            parts = [texts[row].tensor_split(pieces)[piece] for row in rows]
            start = [sum(map(len, texts[row].tensor_split(pieces)[:piece])) for row in rows]
            lengths = torch.tensor([0, *map(len, parts)])
            found_here = decoder.forward_rows(
                torch.cat(parts),
                first=lengths.cumsum(0),
                start=torch.tensor(start),
                table=table,
                wanted=torch.arange(int(lengths.sum())),
            )
            for own, part in zip(found, found_here.split(lengths[1:].tolist()), strict=True):
                own.append(part)
        return [torch.cat(own) for own in found]

    together = logits([0, 1, 2], pieces=3)
    for row, found in enumerate(together):
        assert torch.equal(found, logits([row], pieces=1)[0])


def test_a_mixture_that_is_not_quantized_has_the_bits_of_one_call_for_each_product(
    tmp_path, monkeypatch
):
    config = FAMILIES["qwen2_moe, a dense layer before a sparse one"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        artifact = open_folder(tmp_path, dtype=dtype)
        together = walk(LeanDecoder(artifact))
        with monkeypatch.context() as patched:
            patched.setattr(
                projection, "partial", lambda function, **given: lambda x: function(x, **given)
            )
            apart = walk(LeanDecoder(artifact))
        assert all(map(torch.equal, together, apart))


@pytest.mark.parametrize("rows", ["together", "in blocks"])
def test_alibi_in_bfloat16_is_that_of_transformers_at_far_positions(rows, tmp_path, make_artifact):
    """Beyond 256 positions bfloat16 rounds positions too: distances alone would be other ones."""
    config = falcon(
        hidden_size=96, num_attention_heads=6, num_hidden_layers=1, alibi=True, multi_query=False
    )
    model = make_artifact(tmp_path, config, W8A16)
    decoder = LeanDecoder(open_artifact(tmp_path, backend="reference"))
    prompt, padding = ids(2, 700, 0), torch.tensor([0, 133])
    mask = torch.arange(700) >= padding[:, None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    theirs = model(prompt, attention_mask=mask.long(), position_ids=positions).logits[:, -1]
    if rows == "together":
        decoder.begin(rows=2, capacity=700)
        ours = decoder.forward(prompt, padding=padding)
    else:
        decoder.begin_blocks(blocks=24, columns=64, positions=700)
        first = torch.tensor([0, 700, 1267])
        ours = decoder.forward_rows(
            torch.cat([prompt[0], prompt[1, 133:]]),
            first=first,
            start=torch.zeros(2, dtype=torch.int64),
            table=torch.arange(24).view(2, 12),
            wanted=first[1:] - 1,
        )
    assert torch.allclose(ours, theirs, atol=2e-5, rtol=2e-5)

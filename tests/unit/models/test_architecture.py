"""The lean decoder knows every key that changes numbers, and transformers' defaults and names."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon

from quantflow.models.architecture import NEUTRAL, Blueprint, read
from quantflow.models.family import FAMILIES
from quantflow.models.open import graph_for

ROOT = Path(__file__).resolve().parents[3]
# a type that is read as another has that one's decoder, and no configuration in transformers
DECODED = {
    row.model_type: row
    for row in FAMILIES.values()
    if row.decoder is not None and row.read_as is None
}
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 96,
    "num_attention_heads": 4,
}
QWEN = {"model_type": "qwen2", "num_key_value_heads": 4, "use_sliding_window": True}
# families whose heads all have keys and values of their own, or another key for their number
ALL_HEADS = ("gpt_neox", "bloom", "dbrx", "gpt2", "gpt_bigcode", "opt", "falcon", "gptj", "codegen")
LLAMA = {"model_type": "llama", **SIZES, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}


def test_a_type_that_is_read_as_another_differs_from_it_by_its_name_alone():
    others = {name: row for name, row in FAMILIES.items() if row.read_as is not None}
    assert others.keys() == {"kimi_k2"}
    for row in others.values():
        assert row.model_type not in CONFIG_MAPPING
        assert replace(row, model_type=row.read_as, read_as=None) == FAMILIES[row.read_as]


@pytest.mark.parametrize("family", DECODED)
def test_a_key_that_config_json_leaves_out_has_the_default_of_transformers(family):
    theirs = CONFIG_MAPPING[family](num_hidden_layers=12)
    for key, value in DECODED[family].decoder.defaults.items():
        if key in ("rope_theta", "rope_local_base_freq", "partial_rotary_factor"):
            kind = {
                "rope_theta": "full_attention",
                "rope_local_base_freq": "sliding_attention",
            }.get(key)
            table = theirs.rope_parameters.get(kind, theirs.rope_parameters)
            assert table[key if key == "partial_rotary_factor" else "rope_theta"] == value, key
        elif key in ("sliding_window_pattern", "full_attention_interval"):
            assert [kind == "full_attention" for kind in theirs.layer_types] == [
                not (i + 1) % value for i in range(12)
            ]
        elif key == "sliding_window" and not DECODED[family].decoder.defaults.get(
            "use_sliding_window", True
        ):
            assert CONFIG_MAPPING[family](use_sliding_window=True).sliding_window == value
        else:
            found = theirs
            for name in key.split("."):
                found = found[name] if isinstance(found, dict) else getattr(found, name)
            assert found == value, key


def runs(family):
    """What a configuration says where the family's defaults are another design's."""
    if DECODED[family].delta is not None:
        return {"layer_types": ["linear_attention", "full_attention"]}
    if family == "dbrx":  # its modules do not run without these keys
        attention = {"kv_n_heads": 4, "rope_theta": 10000.0, "clip_qkv": 8.0}
        return {"d_model": 64, "attn_config": attention}
    if family in ("gptj", "codegen"):  # as many features as a head has
        return {"rotary_dim": 16}
    return {"layer_types": ["attention"] * 2} if family == "granitemoehybrid" else {}


@pytest.mark.parametrize("family", DECODED)
def test_every_key_of_the_configuration_class_is_read_or_changes_nothing(family):
    # every head of multi-head latent attention has keys of its own
    heads = 4 if DECODED[family].latent else 2
    few = {} if family in ALL_HEADS else {"num_key_value_heads": heads}
    # transformers' default is no number
    few |= {"num_experts_per_tok": 2} if family == "deepseek_v2" else runs(family)
    theirs = CONFIG_MAPPING[family](**SIZES, **few)
    found = read(theirs.to_dict())
    assert isinstance(found, Blueprint), found


@pytest.mark.parametrize("family", DECODED)
def test_the_products_are_the_groups_of_the_graph(family):
    # as many experts as features would make the trace take a linear for a router
    few = {"moe_num_experts": 8} if family == "ernie4_5_moe" else runs(family)
    if (latent := DECODED[family].latent) is not None:
        few = {"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
        few |= {"n_group": 2, "topk_group": 1}
    config = CONFIG_MAPPING[family](**SIZES, num_key_value_heads=4, pad_token_id=0, **few)
    names, mixture = DECODED[family].names, DECODED[family].mixture
    if latent is not None:
        names = read(config.to_dict()).names  # queries are compressed
    graph = graph_for(config)
    layer = graph.layers[-1]  # the first ones of a mixture may be dense
    if (delta := DECODED[family].delta) is not None:
        theirs = [set(map(graph.layers[0].inside, each.linears)) for each in graph.layers[0].groups]
        for group in (delta.inputs, delta.scores, (delta.output,)):
            assert any(set(group) <= other for other in theirs), group
    ours = [names.qkv, (names.output,), *([] if mixture else [names.up, (names.down,)])]
    if latent is not None:
        ours += [(latent.query_up,), (latent.up,)]
    if (indexer := DECODED[family].indexer) is not None:
        ours += [(indexer.queries,), (indexer.key,)]
        assert layer.routers[:1] == (f"{layer.prefix}.{indexer.weights}",)
    for number in range(layer.experts):
        gate, up, down = (f"{mixture.block}.experts.{number}.{name}" for name in mixture.linears)
        ours += [(gate, up), (down,)]
    shared = read(config.to_dict()).mixture.shared if mixture else ()
    if shared:
        *entering, down = (f"{mixture.shared_block or mixture.block}.{name}" for name in shared)
        ours += [tuple(entering), (down,)]
    theirs = [tuple(map(layer.inside, group.linears)) for group in layer.groups]
    assert sorted(name for group in ours for name in group) == sorted(
        name for group in theirs for name in group
    )
    for group in ours:
        # linears that are one product share an input
        assert any(set(group) <= set(other) for other in theirs)


DBRX = {
    "model_type": "dbrx",
    "d_model": 6144,
    "n_heads": 48,
    "n_layers": 40,
    "max_seq_len": 32768,
    "vocab_size": 100352,
    "emb_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000},
    "ffn_config": {
        "ffn_hidden_size": 10752,
        "model_type": "",
        "moe_jitter_eps": 0,
        "moe_loss_weight": 0.05,
        "moe_num_experts": 16,
        "moe_top_k": 4,
    },
}


def test_keys_in_tables_of_config_json_are_read():
    found = read(DBRX)
    assert isinstance(found, Blueprint), found
    heads, routing = found.heads, found.routing
    assert (heads.num_kv_heads, heads.head_dim, heads.clip, heads.eps) == (8, 128, 8.0, 1e-5)
    assert (routing.experts, routing.chosen, routing.normalized) == (16, 4, True)
    assert (found.ropes[0].parameters["rope_theta"], found.positions) == (500000, 32768)


@pytest.mark.parametrize(
    ("part", "key", "value", "why"),
    [
        ("attn_config", "scale", 2.0, "it does not know what attn_config.scale=2.0 of config.json"),
        ("ffn_config", "moe_normalize_expert_weights", 2.0, "not 2.0"),
        ("attn_config", "clip_qkv", -1, "attn_config.clip_qkv of config.json is -1, not positive"),
        ("attn_config", "kv_n_heads", 7, "7 heads of keys and values do not divide 48 heads"),
    ],
)
def test_a_key_in_a_table_is_a_no_with_its_name(part, key, value, why):
    assert why in read(DBRX | {part: DBRX[part] | {key: value}})


def test_two_bases_of_the_angles_are_a_no():
    table = {"rope_type": "default", "rope_theta": 10000.0}
    assert read(DBRX | {"rope_parameters": table}) == (
        "attn_config.rope_theta of config.json is 500000, and rope_theta of rope_parameters 10000.0"
    )


# as released: the text's part of Scout and of Maverick, with keys that other programs read
SCOUT = json.loads((ROOT / "benchmarks/released/llama-4-scout.json").read_text())["config"]
MAVERICK = SCOUT | {
    "text_config": SCOUT["text_config"]
    | {
        "for_llm_compressor": False,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [],
        "num_local_experts": 128,
        "rope_scaling": None,
        "router_jitter_noise": 0.0,
        "use_qk_norm": False,
    }
}


def test_the_text_of_a_released_llama_4_is_read():
    scout, maverick = read(SCOUT), read(MAVERICK)
    assert isinstance(scout, Blueprint) and isinstance(maverick, Blueprint), (scout, maverick)
    layers = [index % 4 != 3 for index in range(48)]  # those that are rotated, in chunks
    for found in (scout, maverick):
        assert [rope is not None for rope in found.rope_of_layer] == layers
        assert found.chunks == tuple(8192 if rotated else 0 for rotated in layers)
        assert (found.temperature.floor_scale, found.temperature.attn_scale) == (8192, 0.1)
        names = found.names
        assert {names.layers, names.embedding, names.norm, names.head} == {
            "language_model.model.layers",
            "language_model.model.embed_tokens",
            "language_model.model.norm",
            "language_model.lm_head",
        }
    assert (scout.unit_qk_norms, maverick.unit_qk_norms) == (True, False)
    assert all(scout.sparse) and maverick.sparse == (False, True) * 24
    assert (scout.routing.experts, maverick.routing.experts) == (16, 128)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layer_types": ["sliding_attention"] * 48}, "layer_types of config.json has 'sliding_a"),
        ({"attention_chunk_size": None}, "attention_chunk_size of config.json is None, no positi"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers of config.json is [1, 0], 48 layers need"),
        ({"moe_layers": 3}, "moe_layers of config.json is 3, no list"),
        ({"floor_scale": 0}, "floor_scale of config.json is 0, not positive"),
        ({"floor_scale": None}, "floor_scale of config.json is None, no number"),
        ({"attn_scale": "0.1"}, "attn_scale of config.json is '0.1', no number"),
        ({"interleave_moe_layer_step": 0}, "interleave_moe_layer_step of config.json is 0, no p"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "it knows norms behind a rotation that stretches no feature",
        ),
    ],
)
def test_what_is_unknown_of_llama_4_is_a_no_that_says_what(change, why):
    found = read(SCOUT | {"text_config": SCOUT["text_config"] | change})
    assert isinstance(found, str) and found.startswith(why), found


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("embedding_multiplier", 12.0),
        ("attn_logit_softcapping", 50.0),
        ("clip_qkv", 8.0),
        ("logit_scale", 0.0625),
        ("no_rope_layers", [1, 0]),
        ("use_qk_norm", True),
        ("sliding_window", 4096),
        ("query_pre_attn_scalar", 256),
        ("a_key_of_next_year", 1),
    ],
)
def test_a_key_that_llama_has_not_is_a_no_with_its_name(key, value):
    assert isinstance(read(LLAMA), Blueprint)
    assert (
        read(LLAMA | {key: value}) == f"it does not know what {key}={value!r} of config.json does"
    )
    assert isinstance(read(LLAMA | {key: None}), Blueprint)


def test_tokens_that_a_configuration_names_change_no_forward():
    # as GGUF files have them
    named = {key: 0 for key in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")}
    assert read(LLAMA | named) == read(LLAMA)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "cohere"}, "it does not know the layers of cohere"),
        (
            {"partial_rotary_factor": 0.5},
            "it does not know what partial_rotary_factor=0.5 of config.json does",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "it rotates all 16 features of a head, this model 8",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "its rotation depends on the position alone, that of rope_type longrope on the "
            "sequence too",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "spiral": 3}},
            "it does not know what spiral=3 does to a rotation of rope_type linear",
        ),
        (
            {"rope_scaling": {"rope_type": "linear"}},
            "factor of its rotation is None, no positive number",
        ),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps of config.json is '1e-5', no number"),
        (
            {"num_attention_heads": 0},
            "num_attention_heads of config.json is 0, no positive integer",
        ),
        ({"num_key_value_heads": 3}, "3 heads of keys and values do not divide 4 heads"),
        (
            {"model_type": "glm4_moe", "num_key_value_heads": 4, "n_group": 3},
            "n_group and topk_group of config.json are 3 and 1, of 128 experts",
        ),
        (
            {"model_type": "glm4_moe", "num_key_value_heads": 4, "n_group": 32},
            "num_experts_per_tok of config.json is 8, 1 of 32 groups have 4 experts",
        ),
        (
            {"model_type": "ernie4_5_moe", "num_key_value_heads": 4, "moe_k": 65},
            "moe_k of config.json is 65, of 64 experts",
        ),
        (
            {"model_type": "glm4_moe", "num_key_value_heads": 4, "first_k_dense_replace": -1},
            "first_k_dense_replace of config.json is -1, no integer from 0 on",
        ),
        (
            {"model_type": "glm4_moe_lite", "num_key_value_heads": 4, "mlp_layer_types": ["moe"]},
            "mlp_layer_types of config.json is ['moe'], not dense or sparse for each of 2 layers",
        ),
        (
            {"model_type": "glm4_moe_lite", "first_k_dense_replace": 3, "num_key_value_heads": 4},
            "it knows first_k_dense_replace=1 of config.json, not 3",
        ),
        (
            {"model_type": "minimax_m2", "num_key_value_heads": 4, "scoring_func": "softmax"},
            "it knows scoring_func='sigmoid' of config.json, not 'softmax'",
        ),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]},
            "layer_types of config.json has 'mamba', it runs attention alone",
        ),
        (
            {"model_type": "phimoe", "num_key_value_heads": 4, "num_experts_per_tok": 3},
            "it knows num_experts_per_tok=2 of config.json, not 3",
        ),
        (
            QWEN | {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types of config.json has 'chunked_attention', and sliding_window is 4096",
        ),
        (
            {"model_type": "smollm3", "no_rope_layers": [1]},
            "no_rope_layers of config.json is [1], 2 layers need as many values",
        ),
        (
            {"model_type": "gemma", "num_key_value_heads": 4, "use_bidirectional_attention": True},
            "it knows use_bidirectional_attention=False of",
        ),
    ],
)
def test_what_is_not_implemented_is_a_no_that_says_what(change, reason):
    found = read(LLAMA | change)
    assert isinstance(found, str) and found.startswith(reason)


def test_no_key_that_is_read_passes_as_one_that_changes_nothing():
    for family, row in DECODED.items():
        assert not set(row.decoder.defaults) & NEUTRAL, family


def test_the_old_spelling_of_a_rotation_is_the_new_one():
    old = read(LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}})
    new = read(
        LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}}
    )
    assert isinstance(old, Blueprint) and isinstance(new, Blueprint)
    assert [
        a.equal(b) for a, b in zip(old.ropes[0].table(9), new.ropes[0].table(9), strict=True)
    ] == [True, True]


def test_a_window_that_is_not_used_is_no_window():
    """So the released Qwen2.5 and Qwen3 have it."""
    for family in ("qwen2", "qwen3"):
        found = read(
            LLAMA
            | QWEN
            | {"model_type": family, "use_sliding_window": False, "sliding_window": 32768}
        )
        assert isinstance(found, Blueprint) and found.windows == (0, 0)


COMMON = {
    "architectures": ["X"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "use_cache": True,
}
COMMON |= {
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
# keys and values that released models' config.json files have beside COMMON, sizes as they are
RELEASED = {
    "Llama 3.1": LLAMA
    | {
        "hidden_act": "silu",
        "mlp_bias": False,
        "attention_bias": False,
        "pretraining_tp": 1,
        "max_position_embeddings": 131072,
    }
    | {
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        }
    },
    "TinyLlama": LLAMA | {"rope_scaling": None, "hidden_act": "silu", "pretraining_tp": 1},
    "SmolLM2": LLAMA | {"rope_interleaved": False, "is_llama_config": True, "head_dim": 16},
    "Mistral 7B 0.1": LLAMA
    | {"model_type": "mistral", "sliding_window": 4096, "num_key_value_heads": 2},
    "Qwen2.5": LLAMA
    | {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "max_window_layers": 21,
        "sliding_window": 32768,
    }
    | {"use_sliding_window": False, "use_mrope": False},
    "Qwen3": LLAMA
    | {
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "max_window_layers": 28,
        "sliding_window": None,
        "head_dim": 128,
    }
    | {"use_sliding_window": False, "rope_scaling": None, "attention_bias": False},
    "Gemma": LLAMA
    | {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 256, "hidden_act": "gelu"},
    "Gemma 2": LLAMA
    | {
        "model_type": "gemma2",
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    | {
        "hidden_act": "gelu_pytorch_tanh",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    | {"query_pre_attn_scalar": 256, "sliding_window": 4096, "cache_implementation": "hybrid"},
    "Gemma 3 1B": LLAMA
    | {
        "model_type": "gemma3_text",
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    | {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
    }
    | {
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window_pattern": 6,
    },
    "Phi 3 mini 4k": LLAMA
    | {
        "model_type": "phi3",
        "original_max_position_embeddings": 4096,
        "rope_scaling": None,
        "sliding_window": 2047,
    }
    | {
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "attention_bias": False,
        "auto_map": {"AutoModelForCausalLM": "x"},
    },
    "Granite 3": LLAMA
    | {
        "model_type": "granite",
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
    }
    | {"residual_multiplier": 0.22, "mlp_bias": False, "rope_scaling": None},
    "SmolLM3": LLAMA
    | {
        "model_type": "smollm3",
        "no_rope_layers": [1, 0],
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
    }
    | {
        "layer_types": ["full_attention"] * 2,
        "sliding_window": None,
        "max_window_layers": 28,
        "mlp_bias": False,
    },
    "Pythia": {
        "model_type": "gpt_neox",
        **SIZES,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-05,
        "rotary_pct": 0.25,
    }
    | {
        "rotary_emb_base": 10000,
        "use_parallel_residual": True,
        "max_position_embeddings": 2048,
        "classifier_dropout": 0.1,
    },
    "phi-2": {
        "model_type": "phi",
        **SIZES,
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-05,
        "partial_rotary_factor": 0.5,
    }
    | {
        "qk_layernorm": False,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.1,
    },
    "StarCoder2": {
        "model_type": "starcoder2",
        **SIZES,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-05,
    }
    | {
        "activation_function": "gelu_pytorch_tanh",
        "num_key_value_heads": 2,
        "mlp_type": "default",
        "norm_type": "layer_norm",
    }
    | {
        "rope_theta": 999999.4420358813,
        "sliding_window": 4096,
        "use_bias": True,
        "residual_dropout": 0.1,
    },
    "Mixtral": LLAMA
    | {
        "model_type": "mixtral",
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    }
    | {"output_router_logits": False, "router_aux_loss_coef": 0.02, "sliding_window": None},
    "Qwen1.5 MoE": LLAMA
    | {
        "model_type": "qwen2_moe",
        "num_key_value_heads": 4,
        "num_experts": 60,
        "num_experts_per_tok": 4,
    }
    | {
        "decoder_sparse_step": 1,
        "max_window_layers": 21,
        "moe_intermediate_size": 96,
        "norm_topk_prob": False,
    }
    | {"shared_expert_intermediate_size": 96, "sliding_window": 32768, "use_sliding_window": False},
    "Qwen3 MoE": LLAMA
    | {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "head_dim": 128,
    }
    | {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "max_window_layers": 48,
    }
    | {"sliding_window": None, "use_sliding_window": False, "moe_intermediate_size": 96},
    "OLMoE": LLAMA
    | {
        "model_type": "olmoe",
        "clip_qkv": None,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    "gpt-oss 20b": LLAMA
    | {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 32,
        "output_router_logits": False,
        "quantization_config": {"quant_method": "mxfp4"},
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
    },
    "GLM 4.5 Air": LLAMA
    | {
        "model_type": "glm4_moe",
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 2,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
    },
    "GLM 4.7 Flash": LLAMA
    | {
        "model_type": "glm4_moe_lite",
        "attention_bias": False,
        "eos_token_id": [154820, 154827, 154829],
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 256,
    },
    "DeepSeek V3.2": LLAMA
    | {
        "model_type": "deepseek_v32",
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 2048,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0"},
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
    },
    "GLM 5": LLAMA
    | {
        "model_type": "glm_moe_dsa",
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "head_dim": 64,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_topk": 2048,
        "indexer_rope_interleave": True,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "q_lora_rank": 2048,
        "qk_head_dim": 256,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "rope_theta": None,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 256,
    },
    "MiniMax M2": LLAMA
    | {
        "model_type": "minimax_m2",
        "attn_type_list": [1, 1],
        "head_dim": 128,
        "mtp_transformer_layers": 1,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 2,
        "num_local_experts": 256,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    "ERNIE 4.5 21B A3B": LLAMA
    | {
        "model_type": "ernie4_5_moe",
        "moe_capacity": [64, 64, 64],
        "moe_gate": "topk",
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_layer_end_index": 27,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_use_aux_free": True,
        "num_key_value_heads": 4,
        "rope_theta": 500000.0,
        "use_bias": False,
    },
    "Granite 4.0 Micro": LLAMA
    | {
        "model_type": "granitemoehybrid",
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12,
        "init_method": "mup",
        "layer_types": ["attention", "attention"],
        "logits_scaling": 10,
        "mamba_chunk_size": 256,
        "mamba_n_heads": 128,
        "normalization_function": "rmsnorm",
        "num_experts_per_tok": 0,
        "num_key_value_heads": 2,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "residual_multiplier": 0.22,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "shared_intermediate_size": 8192,
    },
    "Granite 3.1 3B A800M": LLAMA
    | {
        "model_type": "granitemoe",
        "attention_bias": False,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 6.0,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 2,
        "num_local_experts": 40,
        "output_router_logits": False,
        "residual_multiplier": 0.22,
        "rope_scaling": None,
        "rope_theta": 10000000.0,
        "router_aux_loss_coef": 0.001,
    },
}


@pytest.mark.parametrize("name", RELEASED)
def test_the_keys_of_released_models_are_known(name):
    found = read(COMMON | RELEASED[name])
    assert isinstance(found, Blueprint), found


GPT2_MEDIUM = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "gradient_checkpointing": False,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "n_ctx": 1024,
    "n_embd": 1024,
    "n_head": 16,
    "n_inner": None,
    "n_layer": 24,
    "n_positions": 1024,
    "n_special": 0,
    "predict_special_tokens": True,
    "reorder_and_upcast_attn": False,
    "resid_pdrop": 0.1,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}


def test_gpt2_has_a_row_for_each_position_and_rotates_nothing():
    found = read(GPT2_MEDIUM)
    assert isinstance(found, Blueprint), found
    assert (found.layers, found.heads.head_dim, found.positions) == (24, 64, 1024)
    assert (found.names.positions, found.position_offset) == ("transformer.wpe", 0)
    assert found.ropes == () and set(found.rope_of_layer) == {None}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scale_attn_by_inverse_layer_idx", True),
        ("scale_attn_weights", False),
        ("add_cross_attention", True),
    ],
)
def test_what_changes_the_scores_of_gpt2_is_a_no(key, value):
    assert read(GPT2_MEDIUM | {key: value}) == (
        f"it knows {key}={not value} of config.json, not {value}"
    )


OPT_6B = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "_remove_final_layer_norm": False,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "attention_dropout": 0.0,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "ffn_dim": 16384,
    "hidden_size": 4096,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "pad_token_id": 1,
    "prefix": "</s>",
    "vocab_size": 50272,
    "word_embed_proj_dim": 4096,
}
OPT_350M = OPT_6B | {
    "do_layer_norm_before": False,
    "hidden_size": 1024,
    "ffn_dim": 4096,
    "num_attention_heads": 16,
    "word_embed_proj_dim": 512,
}


def test_opt_has_norms_before_a_branch_or_behind_it():
    usual, behind = read(OPT_6B), read(OPT_350M)
    assert isinstance(usual, Blueprint) and isinstance(behind, Blueprint), (usual, behind)
    assert (usual.form.post, usual.norm) == (False, "model.decoder.final_layer_norm")
    assert (usual.names.attention_norm, usual.names.gated_norm) == ("self_attn_layer_norm", None)
    assert (behind.form.post, behind.norm) == (True, None)
    names = behind.names
    assert (names.attention_norm, names.mlp_norm) == (None, "self_attn_layer_norm")
    assert names.gated_norm == "final_layer_norm"
    assert read(OPT_6B | {"_remove_final_layer_norm": True}).norm is None


def test_opt_has_linears_behind_narrow_embeddings_alone():
    assert read(OPT_6B).names.embedding_linear is None
    assert read(OPT_6B | {"word_embed_proj_dim": None}).names.head_linear is None
    narrow = read(OPT_350M).names
    assert narrow.embedding_linear == "model.decoder.project_in"
    assert narrow.head_linear == "model.decoder.project_out"
    assert read(OPT_350M | {"word_embed_proj_dim": "512"}) == (
        "word_embed_proj_dim of config.json is '512', no positive integer"
    )
    assert "layer_norm_elementwise_affine" in str(
        read(OPT_6B | {"layer_norm_elementwise_affine": False})
    )


FALCON_7B, FALCON_40B, FALCON_180B, GPTJ_6B = (
    json.loads((ROOT / f"benchmarks/released/{name}.json").read_text())["config"]
    for name in ("falcon-7b", "falcon-40b", "falcon-180b-chat", "gpt-j-6b")
)
FALCON_RW = FALCON_7B | {
    "alibi": True,
    "bias": True,
    "multi_query": False,
    "parallel_attn": False,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "vocab_size": 50304,
}


def test_falcons_generations_have_their_heads_and_norms():
    found = {
        name: read(config)
        for name, config in (("7b", FALCON_7B | {"num_kv_heads": 71}), ("40b", FALCON_40B),
                             ("180b", FALCON_180B), ("rw", FALCON_RW))
    }  # fmt: skip
    assert all(isinstance(each, Blueprint) for each in found.values()), found
    heads = {name: (each.heads.num_heads, each.heads.num_kv_heads, each.heads.head_dim)
             for name, each in found.items()}  # fmt: skip
    assert heads == {
        "7b": (71, 1, 64), "40b": (128, 8, 64), "180b": (232, 8, 64), "rw": (32, 32, 64)
    }  # fmt: skip
    assert {name: each.fused.blocks for name, each in found.items()} == {
        "7b": 1, "40b": 8, "180b": 8, "rw": 32
    }  # fmt: skip
    norms = {name: (each.names.attention_norm, each.names.mlp_norm, each.form.parallel)
             for name, each in found.items()}  # fmt: skip
    twins = ("ln_attn", "ln_mlp", True)
    assert norms == {
        "7b": ("input_layernorm", "input_layernorm", True),
        "40b": twins,
        "180b": twins,
        "rw": ("input_layernorm", "post_attention_layernorm", False),
    }
    assert found["rw"].ropes == () and len(found["rw"].heads.slopes) == 32
    one_norm = read(FALCON_180B | {"num_ln_in_parallel_attn": 1}).names
    assert one_norm.attention_norm == one_norm.mlp_norm == "input_layernorm"


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (FALCON_40B | {"parallel_attn": False}, "it knows no layers with new_decoder_architecture="
         "True, parallel_attn=False and num_ln_in_parallel_attn=2 of config.json"),
        (FALCON_7B | {"num_ln_in_parallel_attn": 2}, "it knows no layers with new_decoder_architec"
         "ture=False, parallel_attn=True and num_ln_in_parallel_attn=2 of config.json"),
        (FALCON_RW | {"num_kv_heads": 8}, "num_kv_heads of config.json is 8, of 32 heads that all "
         "have keys of their own without multi_query"),
        (FALCON_40B | {"num_kv_heads": 7}, "7 heads of keys and values do not divide 128 heads"),
        (FALCON_7B | {"apply_residual_connection_post_layernorm": True}, "it knows apply_residual_"
         "connection_post_layernorm=False of config.json, not True"),
        (GPTJ_6B | {"rotary_dim": None}, "rotary_dim of config.json is None, no positive integer"),
        (GPTJ_6B | {"rotary_dim": 512}, "it rotates pairs of features, rotary_dim of config.json "
         "is 512 of the 256 of a head"),
        (GPTJ_6B | {"rope_theta": 20000.0}, "it does not know what rope_theta=20000.0 of config."
         "json does"),
        (GPTJ_6B | {"model_type": "codegen", "n_head": 14, "n_embd": 3584}, "14 heads, 14 of keys "
         "and values, do not lie in 4 blocks"),
    ],
)  # fmt: skip
def test_what_falcon_gptj_and_codegen_cannot_be_is_a_no(config, told):
    assert read(config) == told


def test_gptj_and_codegen_differ_by_how_queries_keys_and_values_lie():
    gptj = read(GPTJ_6B)
    codegen = read(GPTJ_6B | {"model_type": "codegen"})
    assert isinstance(gptj, Blueprint) and isinstance(codegen, Blueprint), (gptj, codegen)
    assert gptj.ropes == codegen.ropes and gptj.ropes[0].dim == 64 and gptj.rotary_pairs
    assert (codegen.fused.blocks, codegen.fused.order) == (4, "qvk")
    assert gptj.names.qkv == ("attn.q_proj", "attn.k_proj", "attn.v_proj")
    assert gptj.names.mlp_norm == gptj.names.attention_norm == "ln_1" and gptj.form.parallel


BLOOM_560M = {
    "model_type": "bloom",
    "architectures": ["BloomForCausalLM"],
    "apply_residual_connection_post_layernorm": False,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "layer_norm_epsilon": 1e-05,
    "masked_softmax_fusion": True,
    "n_embed": 1024,
    "n_inner": None,
    "n_layer": 24,
    "num_attention_heads": 16,
    "offset_alibi": 100,
    "pretraining_tp": 1,
    "skip_bias_add": True,
    "skip_bias_add_qkv": False,
    "slow_but_exact": False,
    "vocab_size": 250880,
}


def test_older_names_of_keys_are_read_and_may_not_contradict_the_newer_ones():
    blueprint = read(BLOOM_560M)
    assert isinstance(blueprint, Blueprint)
    assert (blueprint.layers, blueprint.heads.head_dim, blueprint.positions) == (24, 64, None)
    assert read(BLOOM_560M | {"hidden_size": 1024, "num_hidden_layers": 24}) == blueprint
    assert read(BLOOM_560M | {"hidden_size": 512}) == (
        "n_embed=1024 of config.json differs from hidden_size=512"
    )
    assert "slow_but_exact" in str(read(BLOOM_560M | {"slow_but_exact": True}))


@pytest.mark.parametrize("heads", [1, 4, 6, 16, 112])
def test_slopes_of_falcon_in_bfloat16_are_those_of_transformers(heads):
    found = read({**FALCON_RW, "hidden_size": 64 * heads, "num_attention_heads": heads}).heads
    assert found.rounded_alibi
    mask = torch.ones(1, 2, dtype=torch.int64)  # of two positions, the second has the slopes
    theirs = modeling_falcon.build_alibi_tensor(mask, heads, torch.float32)[:, 0, 1]
    assert torch.equal(torch.tensor(found.slopes).bfloat16().float(), theirs)


@pytest.mark.parametrize("heads", [1, 4, 6, 16, 112])
def test_slopes_of_distances_are_those_of_transformers(heads):
    slopes = read({**BLOOM_560M, "n_embed": 128 * heads, "num_attention_heads": heads})
    theirs = modeling_bloom._get_alibi_slopes(heads, torch.device("cpu"))
    assert torch.allclose(torch.tensor(slopes.heads.slopes), theirs, rtol=1e-6, atol=0)

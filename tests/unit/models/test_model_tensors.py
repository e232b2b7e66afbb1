"""The tensors of a model by arithmetic on config.json are those of transformers' module tree."""

import itertools
import json

import pytest
from transformers import CONFIG_MAPPING

from quantflow.models.family import FAMILIES
from quantflow.models.model_tensors import ListedTensors, listed
from quantflow.models.names import HubNames, twins
from quantflow.models.open import graph_for
from quantflow.models.skeleton import skeleton
from tests.shared import slow

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "vocab_size": 112,
    "num_attention_heads": 4,
}
HEADS = {"head_dim": 32, "num_key_value_heads": 2, "pad_token_id": 0}
SPARSE = {
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 8,
    "shared_intermediate_size": 24,
}
SPARSE |= {"num_experts_per_tok": 2, "mlp_only_layers": [1]}
DECODED = [
    row.model_type for row in FAMILIES.values() if row.decoder is not None and row.read_as is None
]
LATENT = {
    "head_dim": 16,
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 40,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
FLAGS = ("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "tie_word_embeddings")


def configurations(family):
    """Configurations of a family: its defaults, and every combination of its flags."""
    theirs = CONFIG_MAPPING[family]
    has = theirs().to_dict()
    keys = [key for key in FLAGS if key in has and family != "dbrx"]  # which is never tied
    sizes = {
        key: value for key, value in (SIZES | HEADS | SPARSE).items() if key in SIZES or key in has
    }
    if FAMILIES[family].latent is not None:
        sizes |= LATENT
        if FAMILIES[family].indexer is None:  # which reads compressed queries
            yield theirs(**sizes, q_lora_rank=None), {}
        elif "indexer_types" in has:
            yield theirs(**sizes, indexer_types=["full", "shared", "full"]), {}
    if FAMILIES[family].delta is not None:
        sizes |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        few = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 24}
        sizes |= {key: value for key, value in few.items() if key in has}
    if family == "dbrx":
        heads = {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}
        sizes |= {"d_model": SIZES["hidden_size"], "attn_config": heads}
    if family == "opt":  # as 350m has them
        yield theirs(**sizes, word_embed_proj_dim=32, do_layer_norm_before=False), {}
        yield theirs(**sizes, enable_bias=False, _remove_final_layer_norm=True), {}
    if family == "gpt_bigcode":
        yield theirs(**sizes, multi_query=False, n_inner=96), {}
    if family in ("gptj", "codegen"):
        sizes |= {"rotary_dim": 16}
        yield theirs(**sizes, n_inner=96), {}
    if family == "falcon":
        new = {"new_decoder_architecture": True, "num_kv_heads": 2}
        yield theirs(**sizes, **new, ffn_hidden_size=96), {}
        apart = {"tie_word_embeddings": False}
        yield theirs(**sizes, **new, num_ln_in_parallel_attn=1, **apart), apart
        yield theirs(**sizes, multi_query=False, parallel_attn=False, alibi=True, bias=True), {}
    if family == "granitemoehybrid":
        sizes |= {"layer_types": ["attention"] * SIZES["num_hidden_layers"]}
        yield theirs(**sizes | {"num_local_experts": 0}), {}
    yield theirs(**sizes), {}
    for values in itertools.product((False, True), repeat=len(keys)):
        yield (
            theirs(**sizes, **dict(zip(keys, values, strict=True))),
            dict(zip(keys, values, strict=True)),
        )


MANY_FLAGS = ("deepseek_v2", "granitemoehybrid")  # and the parts of deepseek_v3 and granitemoe


@pytest.mark.parametrize(
    "family", [slow(family) if family in MANY_FLAGS else family for family in DECODED]
)
def test_every_tensor_has_the_name_and_shape_of_transformers_modules(family):
    for config, flags in configurations(family):
        model, told = skeleton(config), config.to_dict()
        hub = HubNames(model)
        for key in () if flags else FLAGS:
            told.pop(key, None)  # what stands for a key that config.json leaves out
        found = listed(told | {"architectures": [type(model).__name__]})
        assert isinstance(found, ListedTensors), (family, flags)
        expected = {
            hub.of(name): tuple(tensor.shape) for name, tensor in model.state_dict().items()
        }
        if FAMILIES[family].mixture:  # the linears of experts are ours, and have the graph's names
            expected = {name: shape for name, shape in expected.items() if ".experts." not in name}
            ours = {name: shape for name, shape in found.shapes.items() if ".experts." not in name}
            assert ours == expected, (family, flags)
        else:
            assert dict(found.shapes) == expected, (family, flags)
        graph = graph_for(config)
        shapes = {
            layer.relative(name): tuple(model.get_submodule(layer.module(name)).weight.shape)
            for layer in graph.layers
            for name in layer.linears
        }
        for layer in graph.layers:
            ours = found.linears(layer.linears)
            assert {layer.relative(name): shape for name, shape in ours.items()} == {
                layer.relative(name): shapes[layer.relative(name)] for name in layer.linears
            }
        assert (
            len(found.linears(name.rpartition(".")[0] for name in found.shapes))
            == len(graph.linears) + len(graph.routers) + len(graph.others) + 1
        )
        assert found.tied == bool(twins(model)), (family, flags)
        assert found.module(graph.family.head) == graph.family.head_place
        for layer in graph.layers:
            assert [found.module(name) for name in layer.linears] == [
                layer.module(name) for name in layer.linears
            ]
            assert [found.module(name) for name in layer.routers] == [
                layer.module(name) for name in layer.routers
            ]
        caches = {layer.attention: layer.kv_heads for layer in graph.layers if layer.attention}
        if family == "minimax":  # whose own class of cache no trace gives it
            assert not caches
            caches = {"model.layers.1.self_attn": config.num_key_value_heads}
        assert found.caches() == caches


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "cohere"},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": ["MistralForCausalLM"]},
        {"intermediate_size": None},
        {"intermediate_size": -96},
        {"hidden_size": "64"},
        {"logit_scale": 2.0},
    ],
)
def test_what_config_json_alone_does_not_say_is_left_to_the_modules(change):
    told = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **SIZES,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
    }
    assert listed(told) is not None
    assert listed(json.loads(json.dumps(told | change))) is None

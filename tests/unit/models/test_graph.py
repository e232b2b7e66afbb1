"""Families as data; that the data is true of the real modules is tested with `capture`."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import GPTNeoXConfig, LlamaConfig, MixtralConfig, OlmoeConfig, Qwen2MoeConfig

from quantflow.errors import InputError, UnsupportedError
from quantflow.models.graph import UNTRACED, Layer, family_for, moving_rotation
from quantflow.models.open import graph_for
from quantflow.models.residual import residual_of


def test_a_llama_layer_by_hand():
    graph = graph_for(LlamaConfig(num_hidden_layers=12))
    layer = graph.layers[11]
    assert layer.prefix == "model.layers.11"
    assert layer.attention == "model.layers.11.self_attn"
    assert [(group.linears, group.norm, group.fused) for group in layer.groups] == [
        (
            tuple(f"model.layers.11.self_attn.{name}_proj" for name in "qkv"),
            "model.layers.11.input_layernorm",
            True,
        ),
        (("model.layers.11.self_attn.o_proj",), None, False),
        (
            ("model.layers.11.mlp.gate_proj", "model.layers.11.mlp.up_proj"),
            "model.layers.11.post_attention_layernorm",
            True,
        ),
        (("model.layers.11.mlp.down_proj",), None, False),
    ]
    assert len(graph.linears) == 12 * 7
    assert graph.linears[0] == "model.layers.0.self_attn.q_proj"


def test_a_gpt_neox_layer_by_hand():
    layer = graph_for(GPTNeoXConfig(num_hidden_layers=2)).layers[1]
    assert [(group.linears, group.norm, group.fused) for group in layer.groups] == [
        (
            ("gpt_neox.layers.1.attention.query_key_value",),
            "gpt_neox.layers.1.input_layernorm",
            False,
        ),
        (("gpt_neox.layers.1.attention.dense",), None, False),
        (
            ("gpt_neox.layers.1.mlp.dense_h_to_4h",),
            "gpt_neox.layers.1.post_attention_layernorm",
            False,
        ),
        (("gpt_neox.layers.1.mlp.dense_4h_to_h",), None, False),
    ]


def test_values_feed_the_output_projection_head_by_head_and_what_goes_up_feeds_what_goes_down():
    layer = graph_for(
        LlamaConfig(
            num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096
        )
    ).layers[0]
    fed = {
        group.linears: (group.feeder, group.per_head)
        for group in layer.groups
        if group.feeder is not None
    }
    assert fed == {
        ("model.layers.0.self_attn.o_proj",): ("model.layers.0.self_attn.v_proj", True),
        ("model.layers.0.mlp.down_proj",): ("model.layers.0.mlp.up_proj", False),
    }
    assert (layer.repeats, layer.head_dim) == (4, 128)


def test_a_head_may_be_wider_than_its_share_of_the_hidden_state():
    layer = graph_for(
        LlamaConfig(num_hidden_layers=1, num_attention_heads=4, hidden_size=64, head_dim=32)
    ).layers[0]
    assert (layer.repeats, layer.head_dim) == (1, 32)


def test_nothing_is_folded_through_an_activation_or_into_a_linear_of_queries_keys_and_values():
    assert all(group.feeder is None for group in UNTRACED["gpt_neox"].groups)
    with pytest.raises(UnsupportedError, match="the norms of family gpt_neox subtract the mean"):
        residual_of(graph_for(GPTNeoXConfig(num_hidden_layers=1)))


@pytest.mark.parametrize(
    "config", [MixtralConfig, Qwen2MoeConfig, OlmoeConfig], ids=lambda config: config.model_type
)
def test_of_a_mixture_nothing_is_folded_into_the_norm_that_the_router_reads_or_inside_an_expert(
    config,
):
    layer = graph_for(config(num_hidden_layers=1, num_local_experts=2, num_experts=2)).layers[0]
    name = layer.prefix
    folded = {
        group.linears[-1]: group.norm or group.feeder for group in layer.groups if group.folds
    }
    shared = {f"{name}.mlp.shared_expert.down_proj": f"{name}.mlp.shared_expert.up_proj"}
    assert folded == {
        f"{name}.self_attn.v_proj": f"{name}.input_layernorm",
        f"{name}.self_attn.o_proj": f"{name}.self_attn.v_proj",
        **(shared if config is Qwen2MoeConfig else {}),
    }


def test_the_dense_layers_of_a_mixture_are_folded_like_any_other():
    layer = graph_for(
        Qwen2MoeConfig(num_hidden_layers=1, num_experts=2, mlp_only_layers=[0])
    ).layers[0]
    assert [group.norm or group.feeder for group in layer.groups] == [
        "model.layers.0.input_layernorm",
        "model.layers.0.self_attn.v_proj",
        "model.layers.0.post_attention_layernorm",
        "model.layers.0.mlp.up_proj",
    ]


def test_values_that_are_cut_to_a_range_feed_nothing():
    layer = graph_for(OlmoeConfig(num_hidden_layers=1, num_experts=2, clip_qkv=8.0)).layers[0]
    assert [group.linears for group in layer.groups if group.folds] == [
        tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
    ]


def test_a_full_name_is_told_as_the_layer_calls_it():
    layer = graph_for(LlamaConfig(num_hidden_layers=2)).layers[1]
    assert layer.relative("model.layers.1.mlp.down_proj") == "mlp.down_proj"


def test_a_sparse_layer_of_mixtral_by_hand():
    layer = graph_for(
        MixtralConfig(num_hidden_layers=2, num_local_experts=3, num_experts_per_tok=2)
    ).layers[1]
    block = "model.layers.1.block_sparse_moe"
    assert [group.linears for group in layer.groups[:2]] == [
        tuple(f"model.layers.1.self_attn.{name}_proj" for name in "qkv"),
        ("model.layers.1.self_attn.o_proj",),
    ]
    assert [
        (group.linears, group.norm, group.fused, group.expert) for group in layer.groups[2:]
    ] == [
        group
        for number in range(3)
        for group in (
            (
                (f"{block}.experts.{number}.w1", f"{block}.experts.{number}.w3"),
                None,
                True,
                f"{block}.experts.{number}",
            ),
            ((f"{block}.experts.{number}.w2",), None, False, f"{block}.experts.{number}"),
        )
    ]
    assert layer.routers == (f"{block}.gate",)
    assert (layer.experts, layer.chosen) == (3, 2)
    assert layer.gates == {
        f"{block}.experts.{number}": f"{block}.experts.{number}.w1" for number in range(3)
    }


def test_mixtral_calls_its_mixture_by_another_name_in_memory():
    layer = graph_for(MixtralConfig(num_hidden_layers=2, num_local_experts=2)).layers[1]
    name = "model.layers.1.block_sparse_moe.experts.0.w2"
    assert layer.inside(name) == "block_sparse_moe.experts.0.w2"
    assert layer.relative(name) == "mlp.experts.0.w2"
    assert layer.module(name) == "model.layers.1.mlp.experts.0.w2"
    assert layer.relative("model.layers.1.self_attn.q_proj") == "self_attn.q_proj"


def test_qwen2_moe_has_a_shared_expert_whose_gate_is_a_router():
    layer = graph_for(Qwen2MoeConfig(num_hidden_layers=1, num_experts=2)).layers[0]
    assert [group.linears for group in layer.groups[2:4]] == [
        ("model.layers.0.mlp.shared_expert.gate_proj", "model.layers.0.mlp.shared_expert.up_proj"),
        ("model.layers.0.mlp.shared_expert.down_proj",),
    ]
    assert [group.expert for group in layer.groups[2:4]] == [None, None]
    assert layer.routers == ("model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate")


@pytest.mark.parametrize(
    ("options", "sparse"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"decoder_sparse_step": 2}, [1, 3, 5]),
        ({"mlp_only_layers": [0, 3]}, [1, 2, 4, 5]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, [5]),
    ],
    ids=str,
)
def test_which_layers_are_sparse_is_what_the_families_modules_say(options, sparse):
    graph = graph_for(Qwen2MoeConfig(num_hidden_layers=6, num_experts=2, **options))
    assert [layer.index for layer in graph.layers if layer.experts] == sparse
    dense = [layer for layer in graph.layers if not layer.experts]
    assert all(
        layer.linears[-1].endswith("mlp.down_proj") and len(layer.linears) == 7 for layer in dense
    )
    assert all(layer.routers == () for layer in dense)
    assert graph.sparse


def test_a_mixture_without_a_number_of_experts_is_refused():
    class Config:
        model_type, num_hidden_layers = "qwen3_moe", 1

    with pytest.raises(
        InputError,
        match=r"num_experts and num_local_experts are \[None, None\], a qwen3_moe has experts",
    ):
        graph_for(Config())


def test_the_supported_families_are_these():
    dense = ["llama", "mistral", "qwen2", "qwen3", "gpt_neox"]
    assert list(UNTRACED) == [*dense, "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"]


def test_another_head_of_a_supported_family_is_refused_by_name():
    with pytest.raises(
        UnsupportedError, match="LlamaForSequenceClassification.* supported as LlamaForCausalLM"
    ):
        graph_for(LlamaConfig(architectures=["LlamaForSequenceClassification"]))


def test_experts_of_the_layer_itself_keep_their_names():
    layer = Layer(index=0, prefix="layers.0", attention=None, groups=(), block="layers.0")
    itself = replace(layer, block_place="")
    assert layer.module("layers.0.experts.1.up_proj") == "layers.0.mlp.experts.1.up_proj"
    assert itself.module("layers.0.experts.1.up_proj") == "layers.0.experts.1.up_proj"


@pytest.mark.parametrize("name", ["LLaMAForCausalLM", "LlamaModel"])
def test_names_of_other_code_for_the_same_family_are_taken(name):
    assert len(graph_for(LlamaConfig(architectures=[name], num_hidden_layers=2)).layers) == 2


@pytest.mark.parametrize("names", ["LlamaForCausalLM", [3], [None], ["MambaForCausalLM"]])
def test_architectures_of_another_form_are_refused(names):
    with pytest.raises(UnsupportedError, match="is supported as LlamaForCausalLM"):
        family_for("llama", names)


@pytest.mark.parametrize("model_type", [None, 3, ["llama"], {}])
def test_a_model_type_that_is_no_name_is_refused(model_type):
    with pytest.raises(UnsupportedError, match="model_type"):
        family_for(model_type)


@pytest.mark.parametrize(
    ("parameters", "moving"),
    [
        (None, None),  # positions are learned, or ALiBi's
        ({"rope_type": "yarn", "factor": 4.0}, None),
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({kind: {"rope_type": "default"} for kind in ("full_attention", "sliding")}, None),
        ({"sliding": {"rope_type": "default"}, "full": {"rope_type": "longrope"}}, "longrope"),
    ],
)
def test_a_rotation_moves_where_any_layers_angles_depend_on_more_than_the_position(
    parameters, moving
):
    assert moving_rotation(SimpleNamespace(rope_parameters=parameters)) == moving

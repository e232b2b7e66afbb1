"""Families as data; that the data is true of the real modules is tested with `capture`."""

import pytest
from transformers import GPT2Config, GPTNeoXConfig, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from quantflow.errors import UnsupportedError
from quantflow.models.graph import FAMILIES, family_for, graph_for


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
        (("gpt_neox.layers.1.attention.query_key_value",), "gpt_neox.layers.1.input_layernorm", False),
        (("gpt_neox.layers.1.attention.dense",), None, False),
        (("gpt_neox.layers.1.mlp.dense_h_to_4h",), "gpt_neox.layers.1.post_attention_layernorm", False),
        (("gpt_neox.layers.1.mlp.dense_4h_to_h",), None, False),
    ]


def test_values_feed_the_output_projection_head_by_head_and_what_goes_up_feeds_what_goes_down():
    layer = graph_for(LlamaConfig(num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096)).layers[
        0
    ]
    fed = {group.linears: (group.feeder, group.per_head) for group in layer.groups if group.feeder is not None}
    assert fed == {
        ("model.layers.0.self_attn.o_proj",): ("model.layers.0.self_attn.v_proj", True),
        ("model.layers.0.mlp.down_proj",): ("model.layers.0.mlp.up_proj", False),
    }
    assert (layer.repeats, layer.head_dim) == (4, 128)


def test_a_head_may_be_wider_than_its_share_of_the_hidden_state():
    layer = graph_for(LlamaConfig(num_hidden_layers=1, num_attention_heads=4, hidden_size=64, head_dim=32)).layers[0]
    assert (layer.repeats, layer.head_dim) == (1, 32)


def test_nothing_is_folded_through_an_activation_or_into_a_linear_of_queries_keys_and_values():
    assert all(group.feeder is None for group in FAMILIES["gpt_neox"].groups)
    assert FAMILIES["gpt_neox"].residual is None


def test_a_full_name_is_told_as_the_layer_calls_it():
    layer = graph_for(LlamaConfig(num_hidden_layers=2)).layers[1]
    assert layer.relative("model.layers.1.mlp.down_proj") == "mlp.down_proj"


def test_the_supported_families_are_these():
    assert list(FAMILIES) == ["llama", "mistral", "qwen2", "qwen3", "gpt_neox"]


@pytest.mark.parametrize("config", [GPT2Config(), MixtralConfig(), Qwen3MoeConfig()], ids=lambda c: c.model_type)
def test_an_unsupported_family_is_refused_by_name(config):
    message = f"model_type '{config.model_type}' .*; use a model of one of llama, mistral, qwen2, qwen3, gpt_neox"
    with pytest.raises(UnsupportedError, match=message):
        graph_for(config)


def test_another_head_of_a_supported_family_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="LlamaForSequenceClassification.* supported as LlamaForCausalLM"):
        graph_for(LlamaConfig(architectures=["LlamaForSequenceClassification"]))


@pytest.mark.parametrize("model_type", [None, 3, ["llama"], {}])
def test_a_model_type_that_is_no_name_is_refused(model_type):
    with pytest.raises(UnsupportedError, match="model_type"):
        family_for(model_type)

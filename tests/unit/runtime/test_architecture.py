"""What the lean decoder knows of a configuration: every key that changes numbers, and transformers' defaults and names."""

import pytest
from transformers import CONFIG_MAPPING

from quantflow.models.graph import graph_for
from quantflow.runtime.architecture import DESIGNS, NEUTRAL, Blueprint, read

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 96, "num_attention_heads": 4}
QWEN = {"model_type": "qwen2", "num_key_value_heads": 4, "use_sliding_window": True}
LLAMA = {"model_type": "llama", **SIZES, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}


@pytest.mark.parametrize("family", DESIGNS)
def test_a_key_that_config_json_leaves_out_has_the_default_of_transformers(family):
    theirs = CONFIG_MAPPING[family](num_hidden_layers=12)
    for key, value in DESIGNS[family].defaults.items():
        if key in ("rope_theta", "rope_local_base_freq", "partial_rotary_factor"):
            kind = {"rope_theta": "full_attention", "rope_local_base_freq": "sliding_attention"}.get(key)
            table = theirs.rope_parameters.get(kind, theirs.rope_parameters)
            assert table[key if key == "partial_rotary_factor" else "rope_theta"] == value, key
        elif key == "sliding_window_pattern":
            assert [kind == "full_attention" for kind in theirs.layer_types] == [not (i + 1) % value for i in range(12)]
        elif key == "sliding_window" and not DESIGNS[family].defaults.get("use_sliding_window", True):
            assert CONFIG_MAPPING[family](use_sliding_window=True).sliding_window == value
        else:
            assert getattr(theirs, key) == value, key


@pytest.mark.parametrize("family", DESIGNS)
def test_every_key_of_the_configuration_class_is_read_or_changes_nothing(family):
    theirs = CONFIG_MAPPING[family](**SIZES, **({} if family == "gpt_neox" else {"num_key_value_heads": 2}))
    found = read(theirs.to_dict())
    assert isinstance(found, Blueprint), found


@pytest.mark.parametrize("family", DESIGNS)
def test_the_products_are_the_groups_of_the_graph(family):
    config = CONFIG_MAPPING[family](**{**SIZES, "num_key_value_heads": 4, "pad_token_id": 0})
    names, (layer, *_) = DESIGNS[family].names, graph_for(config).layers
    ours = [names.qkv, (names.output,), names.up, (names.down,)]
    theirs = [tuple(map(layer.inside, group.linears)) for group in layer.groups]
    assert sorted(name for group in ours for name in group) == sorted(name for group in theirs for name in group)
    for group in ours:
        assert any(set(group) <= set(other) for other in theirs)  # linears that are one product share an input


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
    assert read(LLAMA | {key: value}) == f"it does not know what {key}={value!r} of config.json does"
    assert isinstance(read(LLAMA | {key: None}), Blueprint)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "cohere"}, "it does not know the layers of cohere"),
        ({"partial_rotary_factor": 0.5}, "it does not know what partial_rotary_factor=0.5 of config.json does"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "it rotates all 16 features of a head, this model 8",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "its rotation depends on the position alone, that of rope_type longrope on the sequence too",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "spiral": 3}},
            "it does not know what spiral=3 does to a rotation of rope_type linear",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor of its rotation is None, no positive number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps of config.json is '1e-5', no number"),
        ({"num_attention_heads": 0}, "num_attention_heads of config.json is 0, no positive integer"),
        ({"num_key_value_heads": 3}, "3 heads of keys and values do not divide 4 heads"),
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
    for family, design in DESIGNS.items():
        assert not set(design.defaults) & NEUTRAL, family


def test_the_old_spelling_of_a_rotation_is_the_new_one():
    old = read(LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}})
    new = read(LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}})
    assert isinstance(old, Blueprint) and isinstance(new, Blueprint)
    assert [a.equal(b) for a, b in zip(old.ropes[0].table(9), new.ropes[0].table(9), strict=True)] == [True, True]

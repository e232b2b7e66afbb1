"""A Falcon under the names of its first release is read in transformers' words."""

import json

import pytest

from quantflow.errors import InputError
from quantflow.files.renamed_config import in_todays_words

# tiiuae/falcon-7b and tiiuae/falcon-40b as they were first released
FIRST_7B = {
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["RWForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_RW.RWConfig",
        "AutoModelForCausalLM": "modelling_RW.RWForCausalLM",
    },
    "bias": False,
    "bos_token_id": 11,
    "eos_token_id": 11,
    "hidden_dropout": 0.0,
    "hidden_size": 4544,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "RefinedWebModel",
    "multi_query": True,
    "n_head": 71,
    "n_layer": 32,
    "parallel_attn": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.27.4",
    "use_cache": True,
    "vocab_size": 65024,
}
FIRST_40B = {key: value for key, value in FIRST_7B.items() if key != "multi_query"} | {
    "hidden_size": 8192,
    "model_type": "RefinedWeb",
    "n_head": 128,
    "n_head_kv": 8,
    "n_layer": 60,
}
PLACE = "m/config.json"


def test_both_first_releases_have_the_keys_of_transformers():
    first, second = (in_todays_words(each, place=PLACE) for each in (FIRST_7B, FIRST_40B))
    for each, heads, layers in ((first, 71, 32), (second, 128, 60)):
        assert (each["num_attention_heads"], each["num_hidden_layers"]) == (heads, layers)
        assert each["architectures"] == ["FalconForCausalLM"] and each["model_type"] == "falcon"
        assert not {"auto_map", "n_head", "n_layer", "n_head_kv"} & each.keys()
    assert first["new_decoder_architecture"] is False and "num_kv_heads" not in first
    assert second["new_decoder_architecture"] is True and second["num_kv_heads"] == 8
    others = FIRST_7B.keys() - {"architectures", "auto_map", "model_type", "n_head", "n_layer"}
    assert all(first[key] == FIRST_7B[key] for key in others)


def test_a_configuration_in_transformers_words_stays():
    assert in_todays_words({"model_type": "falcon", "n_head": 71}, place=PLACE) is None
    assert in_todays_words({"model_type": ["RefinedWeb"]}, place=PLACE) is None
    assert in_todays_words(json.loads("{}"), place=PLACE) is None


def test_keys_that_differ_or_are_missing_are_refused():
    with pytest.raises(InputError, match=r"^m/config.json: n_head is 71, num_attention_heads 64; "):
        in_todays_words(FIRST_7B | {"num_attention_heads": 64}, place=PLACE)
    for config, key in ((FIRST_7B, "multi_query"), (FIRST_40B, "parallel_attn")):
        less = {name: value for name, value in config.items() if name != key}
        with pytest.raises(InputError, match=rf"^m/config.json: model_type RefinedWeb.* {key}; "):
            in_todays_words(less, place=PLACE)

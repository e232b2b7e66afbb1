"""What the tensors are that no module of a model has."""

import pytest

from quantflow.files.checkpoint import Checkpoint
from quantflow.files.safetensors_header import TensorInfo
from quantflow.models.unused import BUFFER, MTP, OTHER, VALUE_HEAD, reason_of, unused_words

CONFIG = {"num_hidden_layers": 46, "num_nextn_predict_layers": 1}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mtp.layers.0.mlp.experts.3.down_proj.weight", MTP),
        ("model.mtp.fc.weight", MTP),
        ("model.layers.46.eh_proj.weight", MTP),
        ("model.layers.47.mlp.up_proj.weight", "of a layer beyond the 46 of config.json"),
        ("transformer.h.0.attn.bias", BUFFER),
        ("gpt_neox.layers.0.attention.masked_bias", BUFFER),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", BUFFER),
        ("v_head.summary.weight", VALUE_HEAD),
        ("something.else", OTHER),
    ],
)
def test_each_name_says_what_the_tensor_is(name, reason):
    assert reason_of(name, CONFIG) == reason


@pytest.mark.parametrize(
    "config", [{"text_config": {"num_hidden_layers": 2}}, {"n_layer": 2}], ids=["nested", "GPT-2"]
)
def test_the_number_of_layers_is_found_in_every_configuration(config):
    assert reason_of("transformer.h.2.ln_1.weight", config) == (
        "of a layer beyond the 2 of config.json"
    )


def test_the_sentence_names_one_tensor_of_each_kind(tmp_path):
    def info(name):
        return TensorInfo(name=name, dtype="BF16", shape=(500_000,), offset=0, nbytes=1_000_000)

    names = ("mtp.fc.weight", "mtp.norm.weight", "v_head.summary.bias")
    checkpoint = Checkpoint(
        folder=tmp_path,
        config={},
        tensors={name: ("a", info(name)) for name in names},
        files=(),
    )
    assert unused_words(checkpoint) is None
    apart = checkpoint.without({name: reason_of(name, {}) for name in names})
    assert apart.tensors == {}
    assert unused_words(apart) == (
        "3 tensors, 3 MB, copied and not used: predicts tokens further ahead (MTP): "
        "mtp.fc.weight and 1 more; a value head: v_head.summary.bias"
    )
    assert set(apart.located) == set(names)

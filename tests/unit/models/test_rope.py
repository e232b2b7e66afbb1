"""Rotations, bit for bit those of transformers."""

import pytest
import torch
from transformers import LlamaConfig, PhiConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from quantflow.models.rope import TYPES, Rope, inverse_frequencies

BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LONG = {"original_max_position_embeddings": 4096}
PARAMETERS = {
    "default": {},
    "linear": {"factor": 2.5},
    "llama3": {"factor": 8.0, **BANDS},
    "yarn": {"factor": 4.0, **LONG},
    "yarn, all keys": {
        "factor": 40.0,
        **LONG,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    "yarn, factor of attention": {
        "factor": 4.0,
        **LONG,
        "attention_factor": 1.25,
        "truncate": False,
    },
}


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1000000])
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("kind", PARAMETERS)
def test_frequencies_and_tables_have_the_bits_of_transformers(kind, dim, theta):
    name = kind.partition(",")[0]
    parameters = {"rope_type": name, "rope_theta": theta, **PARAMETERS[kind]}
    config = LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        max_position_embeddings=32768,
        rope_parameters=parameters,
    )
    rope, peer = Rope(dim=dim, parameters=parameters), LlamaRotaryEmbedding(config)
    found, factor = inverse_frequencies(rope)
    if name in ROPE_INIT_FUNCTIONS:
        expected, theirs = ROPE_INIT_FUNCTIONS[name](config)
        assert torch.equal(found, expected) and factor == theirs
    cos, sin = peer(torch.empty(0), torch.arange(333)[None])
    for ours, theirs in zip(rope.table(333), (cos[0], sin[0]), strict=True):
        assert torch.equal(ours, theirs)


def test_a_part_of_a_head_has_the_bits_of_transformers():
    config = PhiConfig(hidden_size=320, num_attention_heads=4)  # heads of 80, half of one rotated
    rope = Rope(dim=40, parameters={"rope_type": "default", "rope_theta": 10000.0})
    cos, sin = PhiRotaryEmbedding(config)(torch.empty(0), torch.arange(77)[None])
    for ours, theirs in zip(rope.table(77), (cos[0], sin[0]), strict=True):
        assert torch.equal(ours, theirs)


def test_every_type_is_compared():
    assert {kind.partition(",")[0] for kind in PARAMETERS} == set(TYPES)

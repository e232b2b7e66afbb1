"""Scales of KV caches in the compressed-tensors layout: tensors, the config, and refusals."""

import json

import pytest
import torch

from quantflow.core.kv import SCHEMES, KVScales, kv_scheme, kv_words
from quantflow.core.scheme import preset
from quantflow.errors import InputError, UnsupportedError
from quantflow.formats import compressed_tensors as layout

ATTENTION = "model.layers.0.self_attn"
PER_HEAD = kv_scheme("FP8", "per_head")


def scales(scheme, heads=3):
    count = 1 if scheme.granularity == "per_tensor" else heads
    return KVScales(
        scheme=scheme,
        keys=torch.arange(1.0, count + 1),
        values=torch.arange(count + 1.0, 2 * count + 1),
    )


def config_with(scheme):
    config = layout.quantization_config(
        {"a": preset("FP8")}, ignore=["lm_head"], model_type="llama", kv_cache=scheme
    )
    return json.loads(json.dumps(config))


def test_tensors_worked_by_hand():
    made = layout.encode_kv(ATTENTION, scales(PER_HEAD))
    assert {name: tensor.tolist() for name, tensor in made.items()} == {
        f"{ATTENTION}.k_scale": [[[1.0]], [[2.0]], [[3.0]]],
        f"{ATTENTION}.v_scale": [[[4.0]], [[5.0]], [[6.0]]],
    }
    made = layout.encode_kv(ATTENTION, scales(kv_scheme("INT8", "per_tensor")))
    assert {name: tensor.tolist() for name, tensor in made.items()} == {
        f"{ATTENTION}.k_scale": [1.0],
        f"{ATTENTION}.v_scale": [2.0],
    }


@pytest.mark.parametrize("scheme", SCHEMES, ids=kv_words)
def test_what_is_encoded_is_decoded_and_has_the_announced_form(scheme):
    given = scales(scheme)
    made = layout.encode_kv(ATTENTION, given)
    back = layout.decode_kv(ATTENTION, made, scheme, kv_heads=3)
    assert (
        torch.equal(back.keys, given.keys)
        and torch.equal(back.values, given.values)
        and back.scheme == scheme
    )
    specs = layout.kv_tensor_specs(ATTENTION, scheme, 3)
    assert specs == {name: ("F32", tuple(tensor.shape)) for name, tensor in made.items()}
    assert tuple(specs) == layout.kv_tensor_names(ATTENTION)


@pytest.mark.parametrize("scheme", [None, *SCHEMES], ids=str)
def test_the_config_says_how_the_cache_is_kept(scheme):
    config = config_with(scheme)
    assert layout.kv_scheme_from_config(config) == scheme
    # of linears it says what it says without
    assert layout.schemes_from_config(config, ["a"])["a"] == preset("FP8")


def test_the_config_worked_by_hand():
    assert config_with(PER_HEAD)["kv_cache_scheme"] == {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "attn_head",
        "group_size": None,
        "dynamic": False,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 4, "type": "int"}, "kv_cache_scheme is int4 per_head"),
        ({"symmetric": False, "type": "int"}, "kv_cache_scheme is int8 per_head, symmetric=False"),
        (
            {"strategy": "tensor", "dynamic": True},
            "kv_cache_scheme is float8 per_tensor, symmetric=True, dynamic=True",
        ),
        ({"strategy": "channel"}, "kv_cache_scheme is float8 per_channel"),
        ({"strategy": "tensor_group"}, "strategy 'tensor_group'"),
        ({"num_bits": 6}, "num_bits=6"),
    ],
)
def test_another_cache_is_unsupported_whoever_reads_the_config(change, message):
    config = config_with(PER_HEAD)
    config["kv_cache_scheme"] |= change
    for read in (
        layout.kv_scheme_from_config,
        lambda found: layout.schemes_from_config(found, ["a"]),
    ):
        with pytest.raises(UnsupportedError, match=message):
            read(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{ATTENTION}.v_scale"), r"v_scale: missing"),
        (
            lambda t: t.update({f"{ATTENTION}.k_scale": torch.ones(3)}),
            r"k_scale: is torch.float32 \[3\]",
        ),
        (
            lambda t: t.update({f"{ATTENTION}.k_scale": torch.ones(2, 1, 1)}),
            r"k_scale: is torch.float32 \[2, 1, 1\]",
        ),
        (
            lambda t: t[f"{ATTENTION}.k_scale"][1].fill_(0),
            r"k_scale: scale 0.0; scales are finite and positive",
        ),
        (
            lambda t: t[f"{ATTENTION}.v_scale"][1].fill_(torch.nan),
            r"v_scale: scale nan; scales are finite and positive",
        ),
    ],
)
def test_scales_that_are_none_are_refused(change, message):
    tensors = layout.encode_kv(ATTENTION, scales(PER_HEAD))
    change(tensors)
    with pytest.raises(InputError, match=message):
        layout.decode_kv(ATTENTION, tensors, PER_HEAD, kv_heads=3)

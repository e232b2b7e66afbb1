"""Schemes refuse what has no meaning, and presets mean what compressed-tensors means."""

from dataclasses import replace

import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from hypothesis import given
from hypothesis import strategies as st

from quantflow.core.scheme import (
    ALIASES,
    PRESETS,
    LinearScheme,
    TensorScheme,
    preset,
    with_group_size,
)
from quantflow.errors import SchemeError, UsageError

INT8 = TensorScheme(kind="int", num_bits=8, granularity="per_channel")
INT4_GROUP = TensorScheme(kind="int", num_bits=4, granularity="per_group", group_size=32)
TOKEN = TensorScheme(kind="int", num_bits=8, granularity="per_token", dynamic=True)
STATIC = TensorScheme(kind="int", num_bits=8, granularity="per_tensor", symmetric=False)


@pytest.mark.parametrize(
    ("num_bits", "qmin", "qmax"), [(2, -2, 1), (3, -4, 3), (4, -8, 7), (8, -128, 127)]
)
def test_the_range_of_an_int_scheme_is_twos_complement(num_bits, qmin, qmax):
    scheme = TensorScheme(kind="int", num_bits=num_bits, granularity="per_tensor")
    assert (scheme.qmin, scheme.qmax) == (qmin, qmax)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "uint"}, r"kind='uint' is unknown; use one of int, float"),
        (
            {"granularity": "per_row"},
            r"granularity='per_row' is unknown; use one of per_tensor, per_channel",
        ),
        ({"float8": "e3m4"}, r"float8='e3m4' is unknown; use one of e4m3fn, e5m2"),
        (
            {"num_bits": 1},
            r"num_bits=1 with kind='int'; use 2, 3, 4, 5, 6 or 8 for int and 8 for float",
        ),
        (
            {"num_bits": 7},
            r"num_bits=7 with kind='int'; use 2, 3, 4, 5, 6 or 8 for int and 8 for float",
        ),
        ({"num_bits": 3, "kind": "float"}, r"num_bits=3 with kind='float'"),
        ({"num_bits": 4, "kind": "float"}, r"num_bits=4 with kind='float'"),
        (
            {"group_size": 32},
            r"granularity='per_channel' with group_size=32; give group_size with per_group",
        ),
        ({"granularity": "per_group"}, r"granularity='per_group' with group_size=None"),
        ({"granularity": "per_group", "group_size": 0}, r"group_size=0; use a positive divisor"),
        ({"granularity": "per_group", "group_size": -1}, r"group_size=-1"),
        (
            {"granularity": "per_token"},
            r"granularity='per_token' with dynamic=False; .* always dynamic",
        ),
        (
            {"granularity": "per_block", "kind": "float"},
            r"granularity='per_block' with group_size=None; give group_size",
        ),
        (
            {"granularity": "per_block", "group_size": 8},
            r"granularity='per_block' with kind='int', dynamic=False; blocks are",
        ),
        (
            {"granularity": "per_block", "group_size": 8, "kind": "float", "dynamic": True},
            r"granularity='per_block' with kind='float', dynamic=True",
        ),
        (
            {"kind": "float", "symmetric": False},
            r"kind='float' with symmetric=False; float8 has no zero_point",
        ),
    ],
)
def test_a_tensor_scheme_that_has_no_meaning_is_refused(changes, message):
    with pytest.raises(SchemeError, match=message):
        replace(INT8, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "marlin"}, r"layout='marlin' is unknown"),
        (
            {"weights": TOKEN},
            r"mine: weights with dynamic=True; the scale of a weight is always stored",
        ),
        (
            {"input": replace(TOKEN, symmetric=False)},
            r"mine: input with granularity='per_token', .* symmetric=False",
        ),
        (
            {"input": replace(STATIC, dynamic=True)},
            r"mine: input with granularity='per_tensor', dynamic=True",
        ),
        ({"input": INT8}, r"mine: input with granularity='per_channel'"),
        (
            {"input": replace(INT4_GROUP, dynamic=True)},
            r"mine: input with granularity='per_group'.*in groups of the weights' size",
        ),
        (
            {"layout": "float-quantized"},
            r"mine: layout='float-quantized' with weights of kind='int'",
        ),
        (
            {"weights": TensorScheme(kind="float", num_bits=8, granularity="per_tensor")},
            r"layout='int-quantized' with weights of kind='float'",
        ),
    ],
)
def test_a_linear_scheme_that_no_linear_computes_is_refused(changes, message):
    scheme = LinearScheme(name="mine", weights=INT8, input=None, layout="int-quantized")
    with pytest.raises(SchemeError, match=message):
        replace(scheme, **changes)


def test_an_input_in_groups_stands_beside_blocks_of_its_size_alone():
    scheme = preset("FP8_BLOCK")
    assert (scheme.weights.block_rows, scheme.weights.group_size, scheme.input.group_size) == (
        128,
        128,
        128,
    )
    for changed in (replace(scheme.input, group_size=64), replace(scheme.input, dynamic=False)):
        with pytest.raises(SchemeError, match=r"FP8_BLOCK: input with granularity='per_group'"):
            replace(scheme, input=changed)
    with pytest.raises(SchemeError, match=r"FP8_BLOCK: input with granularity='per_group'"):
        replace(scheme, weights=preset("FP8_DYNAMIC").weights)


def test_only_blocks_share_scales_between_some_rows():
    assert {name for name, scheme in PRESETS.items() if scheme.weights.block_rows > 1} == {
        "FP8_BLOCK"
    }


def test_inputs_are_none_static_per_tensor_or_dynamic_per_token():
    for inputs in (None, STATIC, replace(STATIC, symmetric=True), TOKEN):
        assert (
            LinearScheme(name="mine", weights=INT8, input=inputs, layout="int-quantized").input
            == inputs
        )


@pytest.mark.parametrize(
    "name",
    sorted(set(PRESETS) - {"W8A8_STATIC", "W8A16", *(f"W{bits}A16_ASYM" for bits in (2, 3, 5, 6))}),
)
def test_a_preset_means_what_compressed_tensors_means_by_its_name(name):
    theirs = preset_name_to_scheme(name, ["Linear"])
    ours = preset(name)
    for mine, args in ((ours.weights, theirs.weights), (ours.input, theirs.input_activations)):
        if mine is None or args is None:
            assert mine is None
            assert args is None
            continue
        strategy = {
            "per_tensor": "tensor",
            "per_channel": "channel",
            "per_group": "group",
            "per_token": "token",
        }
        strategy["per_block"] = "block"
        if mine.scale_format == "e4m3":
            strategy["per_group"] = "tensor_group"
        assert (
            args.scale_dtype
            == {"float": None, "e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}[mine.scale_format]
        )
        size = mine.group_size if args.block_structure is None else None
        assert args.block_structure in (None, [mine.group_size] * 2)
        assert (
            mine.kind,
            mine.num_bits,
            mine.symmetric,
            mine.dynamic,
            strategy[mine.granularity],
            size,
        ) == (
            str(args.type),
            args.num_bits,
            args.symmetric,
            bool(args.dynamic),
            str(args.strategy),
            args.group_size,
        )


def test_w8a16_has_a_scale_per_channel_where_compressed_tensors_has_groups():
    assert preset_name_to_scheme("W8A16", ["Linear"]).weights.group_size == 128
    assert preset("W8A16").weights == INT8
    assert preset("W8A16").input is None


@pytest.mark.parametrize("num_bits", [2, 3, 4])
def test_a_preset_with_zero_points_differs_from_the_one_without_in_nothing_else(num_bits):
    plain, asymmetric = preset(f"W{num_bits}A16"), preset(f"W{num_bits}A16_ASYM")
    assert (plain.weights.num_bits, plain.weights.group_size, plain.input) == (num_bits, 128, None)
    assert asymmetric == replace(
        plain, name=asymmetric.name, weights=replace(plain.weights, symmetric=False)
    )


def test_w4a8_has_the_weights_of_w4a16_and_the_input_of_w8a8():
    scheme = preset("W4A8")
    assert (scheme.weights, scheme.input) == (preset("W4A16").weights, preset("W8A8").input)
    assert (scheme.layout, scheme.algorithm, scheme.transforms) == ("pack-quantized", "gptq", ())


def test_the_static_int8_preset_is_asymmetric_per_tensor_because_only_that_loads_everywhere():
    scheme = preset("W8A8_STATIC")
    assert scheme.input == STATIC
    assert scheme.weights == INT8


@pytest.mark.parametrize(("alias", "name"), [("FP8_STATIC", "FP8"), ("INT8", "W8A8")])
def test_an_alias_is_the_preset_itself(alias, name):
    assert ALIASES[alias] == name
    assert preset(alias) is PRESETS[name]


def test_an_unknown_preset_is_refused_with_the_list():
    with pytest.raises(
        SchemeError, match=r"scheme 'W5A5' is unknown; use one of FP8, .*W4A16.*INT8"
    ) as caught:
        preset("W5A5")
    assert isinstance(caught.value, UsageError)
    assert caught.value.exit_code == 2


@given(name=st.sampled_from(["W4A16", "W4A8", "W3A16_ASYM", "W2A16"]), size=st.integers(1, 4096))
def test_a_group_size_replaces_that_of_a_scheme_with_groups(name, size):
    scheme = with_group_size(preset(name), size)
    assert scheme.weights == replace(preset(name).weights, group_size=size)
    assert replace(scheme, weights=preset(name).weights) == preset(name)


def test_the_size_of_blocks_is_that_of_the_inputs_groups():
    scheme = with_group_size(preset("FP8_BLOCK"), 64)
    assert (scheme.weights.group_size, scheme.weights.block_rows, scheme.input.group_size) == (
        64,
        64,
        64,
    )


def test_a_group_size_for_a_scheme_without_groups_is_refused():
    with pytest.raises(
        SchemeError,
        match=r"scheme W8A8 has per_channel weights, group_size=64 was given; drop group_size",
    ):
        with_group_size(preset("W8A8"), 64)

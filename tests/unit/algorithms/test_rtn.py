"""RTN: by hand, properties, compressed-tensors, edges, errors, and why it exists."""

import itertools

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.algorithms import ALGORITHMS, rtn
from quantflow.core.parallel import Workers
from quantflow.core.qtensor import QTensor
from quantflow.core.scheme import PRESETS, LinearScheme, TensorScheme
from quantflow.errors import InputError, SchemeError
from tests.shared import random

GRANULARITIES = {"per_tensor": None, "per_channel": None, "per_group": 16}
INT_SCHEMES = [
    TensorScheme(
        kind="int", num_bits=bits, granularity=granularity, group_size=size, symmetric=symmetric
    )
    for (granularity, size), bits, symmetric in itertools.product(
        GRANULARITIES.items(), (2, 3, 4, 8), (True, False)
    )
]
FLOAT_SCHEMES = [
    TensorScheme(kind="float", num_bits=8, granularity=granularity, group_size=size)
    for granularity, size in GRANULARITIES.items()
]


def linear_scheme(weights: TensorScheme) -> LinearScheme:
    layout = "float-quantized" if weights.kind == "float" else "int-quantized"
    return LinearScheme(name="test", weights=weights, input=None, layout=layout)


def label(scheme: TensorScheme) -> str:
    zero = "sym" if scheme.symmetric else "asym"
    return f"{scheme.kind}{scheme.num_bits}-{scheme.granularity}-{zero}"


def run(
    weight: torch.Tensor, scheme: TensorScheme, *, scale_dtype: torch.dtype = torch.float32
) -> QTensor:
    results = rtn.quantize_group(
        {"w": weight}, linear_scheme(scheme), statistics={}, scale_dtype=scale_dtype
    )
    return results["w"].weight


# scale 7.5 / 7.5 = 1; ties go to even, the positive end is clamped to 7
def test_int4_worked_by_hand():
    scheme = TensorScheme(kind="int", num_bits=4, granularity="per_channel")
    quantized = run(torch.tensor([[7.5, 0.5, 1.5, -2.5, -7.5, 3.3]]), scheme)
    assert quantized.scale.tolist() == [[1.0]]
    assert quantized.qvalue.tolist() == [[7, 0, 2, -2, -8, 3]]


def test_asymmetric_int4_worked_by_hand():  # scale (11 + 4) / 15 = 1, zero_point -8 + 4 = -4
    scheme = TensorScheme(kind="int", num_bits=4, granularity="per_channel", symmetric=False)
    quantized = run(torch.tensor([[-4.0, 11.0, 0.0, 2.6]]), scheme)
    assert (quantized.scale.tolist(), quantized.zero_point.tolist()) == ([[1.0]], [[-4]])
    assert quantized.qvalue.tolist() == [[-8, 7, -4, -1]]
    assert quantized.dequantize().tolist() == [[-4.0, 11.0, 0.0, 3.0]]


# scale 896 / 448 = 2; 9.5 lies between 9 and 10, even mantissa wins
def test_float8_worked_by_hand():
    scheme = TensorScheme(kind="float", num_bits=8, granularity="per_channel")
    quantized = run(torch.tensor([[-896.0, 19.0, 3.0]]), scheme)
    assert quantized.scale.tolist() == [[2.0]]
    assert quantized.qvalue.float().tolist() == [[-448.0, 10.0, 1.5]]


@settings(max_examples=60)
@given(st.integers(0, 2**31), st.sampled_from(INT_SCHEMES), st.floats(1e-6, 1e6))
def test_no_value_is_further_than_half_a_step(seed, scheme, size):
    weight = random(4, 32, seed=seed) * size
    quantized = run(weight, scheme)
    step = quantized.scale.repeat_interleave(32 // quantized.scale.shape[1], dim=1)
    assert (quantized.scale > 0).all()
    assert ((quantized.dequantize() - weight).abs() <= 0.5001 * step).all()


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.sampled_from(FLOAT_SCHEMES), st.floats(1e-6, 1e6))
def test_float8_keeps_four_significant_bits(seed, scheme, size):
    weight = random(4, 32, seed=seed) * size
    quantized = run(weight, scheme)
    step = quantized.scale.repeat_interleave(32 // quantized.scale.shape[1], dim=1)
    # Half of the last bit of a 3 bit mantissa; below 2^-6 the distance between values is constant.
    bound = torch.maximum(weight.abs() * 2**-4, step * 2**-10)
    assert ((quantized.dequantize() - weight).abs() <= 1.0001 * bound).all()


@pytest.mark.parametrize("scheme", INT_SCHEMES + FLOAT_SCHEMES, ids=label)
def test_compressed_tensors_computes_the_same(scheme):
    weight = random(48, 64)
    arguments = QuantizationArgs(
        num_bits=scheme.num_bits,
        type=scheme.kind,
        symmetric=scheme.symmetric,
        strategy={"per_tensor": "tensor", "per_channel": "channel", "per_group": "group"}[
            scheme.granularity
        ],
        group_size=scheme.group_size,
    )
    rows = {"per_tensor": (1, -1), "per_channel": (48, 1, -1), "per_group": (48, 4, 16)}[
        scheme.granularity
    ]
    low, high = weight.reshape(rows).aminmax(dim=-1)
    scale, zero_point = calculate_qparams(low, high, arguments)
    expected = quantize(weight, scale, zero_point, arguments, dtype=arguments.pytorch_dtype())
    quantized = run(weight, scheme)
    assert torch.equal(quantized.scale.reshape(scale.shape), scale)
    assert torch.equal(quantized.qvalue.float(), expected.float())
    if not scheme.symmetric:
        assert torch.equal(quantized.zero_point.reshape(scale.shape), zero_point)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_gives_a_valid_tensor_and_leaves_the_weight_alone(name):
    weight = random(8, 256).to(torch.bfloat16)
    before = weight.clone()
    result = rtn.quantize_group(
        {"w": weight}, PRESETS[name], statistics={}, scale_dtype=torch.bfloat16
    )["w"]
    result.weight.validate("w")
    assert torch.equal(weight, before)
    assert torch.equal(result.weight.scale.to(torch.bfloat16).float(), result.weight.scale)


def test_qvalues_are_chosen_with_the_scale_as_it_is_stored():
    # 7.5 * 1.0035 / 7.5 is stored as 1.0 in bfloat16; 2.5069 rounds to 3 with it, and to 2 with
    # 1.0035.
    weight = torch.tensor([[7.5 * 1.0035, 2.505]])
    scheme = TensorScheme(kind="int", num_bits=4, granularity="per_channel")
    quantized = run(weight, scheme, scale_dtype=torch.bfloat16)
    assert (quantized.scale.tolist(), quantized.qvalue.tolist()) == ([[1.0]], [[7, 3]])


def test_the_linears_of_a_group_share_a_per_tensor_scale():
    weights = {"q": torch.tensor([[448.0]]), "k": torch.tensor([[896.0]])}
    results = rtn.quantize_group(weights, PRESETS["FP8"], statistics={}, scale_dtype=torch.float32)
    assert [result.weight.scale.item() for result in results.values()] == [2.0, 2.0]
    assert [result.weight.qvalue.float().item() for result in results.values()] == [224.0, 448.0]


@pytest.mark.parametrize("scheme", INT_SCHEMES + FLOAT_SCHEMES, ids=label)
def test_zeros_stay_zeros_with_a_positive_scale_and_are_counted(scheme):
    results = rtn.quantize_group(
        {"w": torch.zeros(2, 32)}, linear_scheme(scheme), statistics={}, scale_dtype=torch.float32
    )
    weight = results["w"].weight
    assert (weight.scale > 0).all()
    assert not weight.dequantize().any()
    assert results["w"].decisions == {"zero_groups": weight.scale.numel()}


@pytest.mark.parametrize(
    "scheme", [s for s in INT_SCHEMES if s.group_size is None and s.num_bits > 3], ids=label
)
def test_one_element_is_a_weight(scheme):
    assert run(torch.tensor([[-3.0]]), scheme).dequantize().item() == pytest.approx(-3.0, rel=0.07)


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (
            torch.ones(4, 100),
            SchemeError,
            r"layers\.0\.q_proj: in_features=100.*group_size=128.*ignore",
        ),
        (
            torch.full((4, 128), float("nan")),
            InputError,
            r"layers\.0\.q_proj: weight holds NaN or Inf; .*damaged",
        ),
        (torch.ones(0, 128), InputError, r"layers\.0\.q_proj: weight is \[0, 128\]"),
    ],
    ids=["indivisible", "nan", "empty"],
)
def test_errors_name_the_layer_and_the_remedy(weight, error, message):
    with pytest.raises(error, match=message):
        rtn.quantize_group(
            {"layers.0.q_proj": weight}, PRESETS["W4A16"], statistics={}, scale_dtype=torch.float32
        )


# why it exists: nearest is the best for the weight
def test_no_other_choice_of_qvalues_is_closer_to_the_weight():
    scheme = TensorScheme(kind="int", num_bits=4, granularity="per_channel")
    weight = random(6, 8)
    quantized = run(weight, scheme)
    grid = quantized.scale[:, :, None] * torch.arange(-8, 8)  # [O, 1, 16]
    best = (grid - weight[:, :, None]).abs().amin(-1)
    assert torch.allclose((quantized.dequantize() - weight).abs(), best, rtol=0, atol=1e-6)


def test_it_needs_no_statistics():
    assert ALGORITHMS["rtn"] is rtn
    assert rtn.NEEDS == ()


BY_HAND = {"FP8": 448, "FP8_DYNAMIC": 448, "W8A8": 127.5, "W4A16": 7.5, "W3A16": 3.5, "W2A16": 1.5}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_weight_of_several_units_is_that_of_the_formulas_over_the_whole(name):
    weight = random(300, 2048, seed=5).to(torch.bfloat16)  # three units of 128 rows
    weight[130:140] *= 3  # the largest magnitude is not in the first
    scheme = PRESETS[name].weights
    # [O, G, g]
    split = weight.float().reshape(300, 16, 128) if scheme.group_size else weight.float()[:, None]
    amax = (
        split.abs().max(-1).values.max()
        if name == "FP8"
        else split.abs().max(-1, keepdim=True).values
    )
    scale = amax / BY_HAND[name]
    expected = (split / scale).flatten(1)
    result = rtn.quantize_group(
        {"w": weight}, PRESETS[name], statistics={}, scale_dtype=torch.float32
    )["w"].weight
    assert torch.equal(result.scale.flatten(), scale.flatten())
    if scheme.kind == "float":
        assert torch.equal(result.qvalue.float(), expected.to(torch.float8_e4m3fn).float())
    else:
        assert torch.equal(
            result.qvalue, expected.round().clamp(scheme.qmin, scheme.qmax).to(torch.int8)
        )


@pytest.mark.parametrize("name", ["FP8", "W8A8", "W4A16_ASYM"])
def test_the_number_of_workers_and_rows_given_at_once_do_not_change_a_bit(name):
    weight = random(300, 2048, seed=6).to(torch.bfloat16)
    weights = {"a": weight, "b": weight[:40]}
    alone = rtn.quantize_group(weights, PRESETS[name], statistics={}, scale_dtype=torch.bfloat16)
    with Workers(3) as workers:
        together = rtn.quantize_group(
            weights, PRESETS[name], statistics={}, scale_dtype=torch.bfloat16, workers=workers
        )
    for key in weights:
        one, other = alone[key].weight, together[key].weight
        assert torch.equal(one.qvalue.view(torch.int8), other.qvalue.view(torch.int8))
        assert torch.equal(one.scale, other.scale)
        assert one.zero_point is None or torch.equal(one.zero_point, other.zero_point)
    if name != "FP8":  # its scale is that of everything given at once
        rows = rtn.quantize_group(
            {"a": weight[96:104]}, PRESETS[name], statistics={}, scale_dtype=torch.bfloat16
        )["a"].weight
        assert torch.equal(rows.qvalue, alone["a"].weight.qvalue[96:104])


def test_nan_in_the_last_unit_is_found():
    weight = random(300, 2048)
    weight[299, 2047] = float("nan")
    with pytest.raises(InputError, match="q_proj: weight holds NaN or Inf"):
        rtn.quantize_group(
            {"q_proj": weight}, PRESETS["FP8_DYNAMIC"], statistics={}, scale_dtype=torch.float32
        )


# safetensors refuses to store shared memory
def test_per_tensor_scales_are_equal_but_not_the_same_memory():
    results = rtn.quantize_group(
        {"q": random(2, 8), "k": random(2, 8)},
        PRESETS["FP8"],
        statistics={},
        scale_dtype=torch.float32,
    )
    assert results["q"].weight.scale.data_ptr() != results["k"].weight.scale.data_ptr()

"""The equation, both ways: worked by hand, as properties, and against compressed-tensors."""

import math
from dataclasses import replace

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization import fake_quantize as their_fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.core import affine
from quantflow.core.scheme import TensorScheme
from quantflow.errors import SchemeError

INT4 = TensorScheme(kind="int", num_bits=4, granularity="per_channel")
INT3 = TensorScheme(kind="int", num_bits=3, granularity="per_channel")
INT2 = TensorScheme(kind="int", num_bits=2, granularity="per_channel")
INT8 = TensorScheme(kind="int", num_bits=8, granularity="per_channel")
INT2_ASYM = TensorScheme(kind="int", num_bits=2, granularity="per_channel", symmetric=False)
INT3_ASYM = TensorScheme(kind="int", num_bits=3, granularity="per_channel", symmetric=False)
INT4_ASYM = TensorScheme(kind="int", num_bits=4, granularity="per_channel", symmetric=False)
INT8_ASYM = TensorScheme(kind="int", num_bits=8, granularity="per_channel", symmetric=False)
FP8 = TensorScheme(kind="float", num_bits=8, granularity="per_channel")
SMALLEST_NORMAL = 2.0**-126

reals = st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize(
    ("scheme", "amax", "scale"),
    [
        (INT4, 7.5, 1.0),
        (INT4, 15.0, 2.0),
        (INT3, 3.5, 1.0),
        (INT2, 3.0, 2.0),
        (INT8, 127.5, 1.0),
        (INT8, 1.0, 1 / 127.5),
        (FP8, 448.0, 1.0),
        (FP8, 7.0, 1 / 64),
    ],
)
def test_a_symmetric_scale_is_amax_over_half_the_range(scheme, amax, scale):
    assert affine.scale_from_amax(tensor(amax), scheme).tolist() == tensor(scale).tolist()


@pytest.mark.parametrize(
    "flavour_and_largest", [("e4m3fn", 448), ("e5m2", 57344), ("e4m3fnuz", 240), ("gaudi2", 240)]
)
def test_a_float8_scale_maps_amax_to_the_largest_value_of_the_flavour(flavour_and_largest):
    flavour, largest = flavour_and_largest
    scheme = TensorScheme(kind="float", num_bits=8, granularity="per_tensor", float8=flavour)
    scale = affine.scale_from_amax(tensor(3.0), scheme)
    assert scale.tolist() == tensor(3.0 / largest).tolist()
    assert affine.quantize(tensor(3.0, -3.0), scale, None, scheme).float().tolist() == [
        largest,
        -largest,
    ]


@pytest.mark.parametrize("scheme", [INT4, INT8, FP8])
def test_a_zero_amax_has_scale_one_and_a_tiny_one_a_normal_number(scheme):
    scale = affine.scale_from_amax(tensor(0.0, 1e-45, 1e-38), scheme)
    assert scale.tolist() == [1.0, SMALLEST_NORMAL, SMALLEST_NORMAL]


def test_nan_and_inf_are_passed_on_by_scales_so_that_validation_sees_them():
    scale = affine.scale_from_amax(tensor(math.nan, math.inf), INT8)
    assert scale[0].isnan()
    assert scale[1].isinf()
    wide, _ = affine.scale_and_zero_point_from_range(
        tensor(math.nan, -3e38), tensor(1.0, 3e38), INT8_ASYM
    )
    assert wide[0].isnan()
    assert wide[1].isinf()


def test_a_symmetric_scale_keeps_the_shape_and_is_float32_whatever_comes_in():
    scale = affine.scale_from_amax(torch.ones(2, 3, 1, dtype=torch.bfloat16), INT8)
    assert scale.shape == (2, 3, 1)
    assert scale.dtype == torch.float32


@pytest.mark.parametrize(
    ("scheme", "low", "high", "scale", "zero_point"),
    [
        (INT8_ASYM, -51.0, 204.0, 1.0, -77),
        (INT8_ASYM, -510.0, 0.0, 2.0, 127),
        (INT8_ASYM, 0.0, 127.5, 0.5, -128),
        (INT4_ASYM, -3.0, 12.0, 1.0, -5),
        (INT3_ASYM, -3.0, 4.0, 1.0, -1),
        (INT3_ASYM, 0.0, 14.0, 2.0, -4),
        (INT2_ASYM, -1.0, 2.0, 1.0, -1),
        (INT2_ASYM, -6.0, 0.0, 2.0, 1),
        (INT4_ASYM, -0.5, 14.5, 1.0, -8),  # -7.5 is a tie, to even
        (INT4_ASYM, -1.5, 13.5, 1.0, -6),  # -6.5 is a tie, to even
        (INT8_ASYM, 10.0, 255.0, 1.0, -128),  # zero is forced in from below
        (INT8_ASYM, -255.0, -5.0, 1.0, 127),  # and from above
        (INT8_ASYM, 0.0, 0.0, 1.0, -128),
        (INT4_ASYM, 0.0, 0.0, 1.0, -8),
    ],
)
def test_an_asymmetric_range_worked_by_hand(scheme, low, high, scale, zero_point):
    got_scale, got_zero_point = affine.scale_and_zero_point_from_range(
        tensor(low), tensor(high), scheme
    )
    assert got_scale.tolist() == [scale]
    assert got_zero_point.tolist() == [zero_point]
    assert got_zero_point.dtype == torch.int8


def test_a_tiny_range_has_a_positive_scale_and_a_zero_point_in_range():
    scale, zero_point = affine.scale_and_zero_point_from_range(
        tensor(-1e-45, 0.0), tensor(1e-45, 1e-44), INT8_ASYM
    )
    assert scale.tolist() == [SMALLEST_NORMAL] * 2
    assert zero_point.tolist() == [-128, -128]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_stored_scale_keeps_its_sign_and_is_never_zero(dtype):
    # 2^-24 and 2^-133 are the smallest of float16 and bfloat16; 1.0 + 2^-9 is none of bfloat16 and
    # below half a step
    smallest = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}[dtype]
    assert affine.stored(tensor(-3.0, 3.0, -1e-42, 1e-42, 0.0, -0.25), dtype).tolist() == [
        -3.0, 3.0, -smallest, smallest, smallest, -0.25
    ]  # fmt: skip
    assert affine.stored(tensor(-(1 + 2**-9)), torch.bfloat16).tolist() == [-1.0]
    assert affine.stored(tensor(math.nan, -math.inf), dtype).isfinite().tolist() == [False, False]


@pytest.mark.parametrize(
    ("scheme", "signed"), [(INT4, True), (INT8, True), (INT4_ASYM, False), (FP8, False)]
)
def test_a_scale_is_finite_and_positive_or_of_symmetric_integers_not_zero(scheme, signed):
    scale = tensor(1.0, -1.0, 0.0, -0.0, math.inf, -math.inf, math.nan)
    assert affine.is_scale(scale, scheme).tolist() == [
        True,
        signed,
        False,
        False,
        False,
        False,
        False,
    ]
    assert affine.sign_of_scales(scheme) == ("not zero" if signed else "positive")


def test_with_a_negative_scale_the_longer_side_is_above_zero():
    assert affine.quantize(
        tensor(8.0, 7.0, 0.5, -7.0, -8.0), tensor(-1.0), None, INT4
    ).tolist() == [-8, -7, 0, 7, 7]


@pytest.mark.parametrize("scheme", [INT8, FP8])
def test_a_range_for_a_symmetric_or_float_scheme_is_refused(scheme):
    with pytest.raises(
        SchemeError, match=r"a range with symmetric=True, kind='(int|float)'; use scale_from_amax"
    ):
        affine.scale_and_zero_point_from_range(tensor(-1.0), tensor(1.0), scheme)


def test_rounding_is_half_to_even_and_the_ends_clamp():
    x = tensor(-7.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 6.5, 7.5, 100.0, -100.0, math.inf, -math.inf)
    assert affine.quantize(x, tensor(1.0), None, INT4).tolist() == [
        -8,
        -2,
        -2,
        0,
        0,
        2,
        2,
        6,
        7,
        7,
        -8,
        7,
        -8,
    ]
    assert affine.quantize(x, tensor(1.0), None, INT8).tolist()[:9] == [
        -8,
        -2,
        -2,
        0,
        0,
        2,
        2,
        6,
        8,
    ]
    assert affine.quantize(tensor(1e9, -1e9), tensor(1.0), None, INT8).tolist() == [127, -128]
    assert affine.quantize(tensor(3.5, 2.5, -3.5, -9.0), tensor(1.0), None, INT3).tolist() == [
        3,
        2,
        -4,
        -4,
    ]
    assert affine.quantize(tensor(1.5, 0.5, -1.5, -9.0), tensor(1.0), None, INT2).tolist() == [
        1,
        0,
        -2,
        -2,
    ]


def test_the_zero_point_is_added_before_rounding():
    zero_point = torch.tensor([3], dtype=torch.int8)
    # 0.5 + 3 = 3.5 rounds to 4; rounding first would give 3
    assert affine.quantize(
        tensor(0.5, -0.5, 1.5, -20.0), tensor(1.0), zero_point, INT4
    ).tolist() == [4, 2, 4, -8]


def test_dequantize_is_scale_times_qvalue_minus_zero_point():
    qvalue = torch.tensor([[-8, 7], [0, 1]], dtype=torch.int8)
    scale = torch.tensor([[0.5], [2.0]])
    zero_point = torch.tensor([[-8], [1]], dtype=torch.int8)
    assert affine.dequantize(qvalue, scale, None).tolist() == [[-4.0, 3.5], [0.0, 2.0]]
    assert affine.dequantize(qvalue, scale, zero_point).tolist() == [[0.0, 7.5], [-2.0, 0.0]]


def test_int8_differences_do_not_wrap():
    zero_point = torch.tensor([-128], dtype=torch.int8)
    assert affine.dequantize(
        torch.tensor([127], dtype=torch.int8), tensor(1.0), zero_point
    ).tolist() == [255.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fake_quantize_keeps_the_dtype_and_does_not_change_its_argument(dtype):
    x = torch.tensor([0.26, -1.0, 0.74], dtype=dtype)
    before = x.clone()
    result = affine.fake_quantize(x, tensor(0.5), None, INT4)
    assert result.tolist() == [0.5, -1.0, 0.5]
    assert result.dtype == dtype
    assert torch.equal(x, before)


@pytest.mark.parametrize("scheme", [INT8, FP8])
def test_nan_survives_fake_quantize_because_zero_would_hide_it(scheme):
    x = torch.tensor([[1.0, math.nan], [2.0, 1.0]])
    assert affine.fake_quantize(x, tensor(1.0), None, scheme).isnan().tolist() == [
        [False, True],
        [False, False],
    ]
    assert affine.fake_quantize_per_token(x, scheme)[0].isnan().any()
    assert affine.fake_quantize_per_token(x, scheme)[1].isfinite().all()


def test_each_token_has_a_scale_of_its_own():
    x = torch.tensor([[[127.5, 1.4], [1275.0, 14.0]], [[0.0, 0.0], [-0.1275, 0.0014]]])
    # scales 1, 10, 1, 0.001: qvalues [127 (of 127.5), 1], [127, 1], [0, 0], [-128, 1]
    expected = torch.tensor([[[127.0, 1.0], [1270.0, 10.0]], [[0.0, 0.0], [-0.128, 0.001]]])
    torch.testing.assert_close(affine.fake_quantize_per_token(x, INT8), expected)


def test_no_tokens_stay_no_tokens():
    assert affine.fake_quantize_per_token(torch.empty(0, 4), INT8).shape == (0, 4)


@pytest.mark.parametrize(
    ("dtype", "scale", "expected"),
    [
        (torch.float32, 0.1, torch.tensor(0.1).item()),
        (torch.bfloat16, 1.00390625, 1.0),  # 1 + 2^-8 is a tie, to even
        (torch.bfloat16, 1.01171875, 1.015625),  # 1 + 3 * 2^-8, to even
        (torch.float16, 2.0**-20, 2.0**-20),  # subnormal, and representable
        (torch.float16, 1e-9, 2.0**-24),  # would be stored as zero
        (torch.float16, 1e6, math.inf),  # refused by QTensor.validate
    ],
)
def test_a_stored_scale_is_what_the_file_gives_back(dtype, scale, expected):
    result = affine.stored(tensor(scale), dtype)
    assert result.tolist() == [expected]
    assert result.dtype == torch.float32
    assert result.to(dtype).float().tolist() == [expected]  # storing it again loses nothing


@pytest.mark.parametrize("scheme", [INT2, INT3, INT4, INT8])
@settings(max_examples=50)
@given(values=st.lists(reals, min_size=1, max_size=8))
def test_a_symmetric_error_is_at_most_half_a_step(scheme, values):
    x = tensor(*values)
    scale = affine.scale_from_amax(x.abs().amax(), scheme)
    error = (affine.fake_quantize(x, scale, None, scheme).double() - x.double()).abs()
    assert (error <= scale.double() * 0.5001).all()


@pytest.mark.parametrize("scheme", [INT2_ASYM, INT3_ASYM, INT4_ASYM, INT8_ASYM])
@settings(max_examples=50)
@given(values=st.lists(reals, min_size=1, max_size=8))
def test_an_asymmetric_error_is_at_most_half_a_step_and_zero_is_exact(scheme, values):
    x = tensor(*values, 0.0)
    scale, zero_point = affine.scale_and_zero_point_from_range(x.amin(), x.amax(), scheme)
    assert scheme.qmin <= zero_point <= scheme.qmax
    rounded = affine.fake_quantize(x, scale, zero_point, scheme)
    assert rounded[-1] == 0
    assert ((rounded.double() - x.double()).abs() <= scale.double() * 0.5001).all()


@settings(max_examples=50)
@given(values=st.lists(reals, min_size=1, max_size=8))
def test_a_float8_error_is_at_most_a_sixteenth_or_half_a_subnormal_step(values):
    x = tensor(*values)
    scale = affine.scale_from_amax(x.abs().amax(), FP8)
    error = (affine.fake_quantize(x, scale, None, FP8).double() - x.double()).abs()
    bound = torch.maximum(x.double().abs() / 16, scale.double() * 2.0**-10)
    assert (error <= bound * 1.0001).all()


@pytest.mark.parametrize(
    "scheme", [INT2, INT3, INT4, INT8, INT2_ASYM, INT3_ASYM, INT4_ASYM, INT8_ASYM, FP8]
)
@settings(max_examples=50)
@given(values=st.lists(st.floats(width=32, min_value=-1e6, max_value=1e6), min_size=2, max_size=8))
def test_quantizing_twice_changes_nothing_and_order_is_kept(scheme, values):
    x = tensor(*sorted(values))
    if scheme.symmetric:
        scale, zero_point = affine.scale_from_amax(x.abs().amax(), scheme), None
    else:
        scale, zero_point = affine.scale_and_zero_point_from_range(x.amin(), x.amax(), scheme)
    qvalue = affine.quantize(x, scale, zero_point, scheme)
    real = affine.dequantize(qvalue, scale, zero_point)
    assert torch.equal(affine.quantize(real, scale, zero_point, scheme).float(), qvalue.float())
    assert (real.diff() >= 0).all()


def their_args(scheme: TensorScheme) -> QuantizationArgs:
    return QuantizationArgs(
        num_bits=scheme.num_bits,
        type=scheme.kind,
        symmetric=scheme.symmetric,
        strategy="channel",
        dynamic=False,
    )


@pytest.mark.parametrize(
    "scheme", [INT2, INT3, INT4, INT8, INT2_ASYM, INT3_ASYM, INT4_ASYM, INT8_ASYM, FP8]
)
def test_scales_zero_points_and_rounding_are_those_of_compressed_tensors(scheme):
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) + 0.3
    low, high = x.amin(dim=1, keepdim=True), x.amax(dim=1, keepdim=True)
    args = their_args(scheme)
    their_scale, their_zero_point = calculate_qparams(low, high, args)
    if scheme.symmetric:
        scale, zero_point = affine.scale_from_amax(x.abs().amax(dim=1, keepdim=True), scheme), None
    else:
        scale, zero_point = affine.scale_and_zero_point_from_range(low, high, scheme)
        assert torch.equal(zero_point, their_zero_point)
    assert torch.equal(scale, their_scale)
    theirs = their_fake_quantize(x, their_scale, their_zero_point, args)
    assert torch.equal(affine.fake_quantize(x, scale, zero_point, scheme), theirs)


@pytest.mark.parametrize(
    ("amax", "scale"),
    [(448.0, 1.0), (448.1, 2.0), (447.9, 1.0), (224.0, 0.5), (0.0, 1.0), (3.0, 2.0**-7)],
)
def test_a_scale_rounded_to_a_power_of_two_is_the_next_one_that_is_not_below(amax, scale):
    scheme = TensorScheme(
        kind="float", num_bits=8, granularity="per_channel", scale_rounding="pow2"
    )
    assert affine.scale_from_amax(torch.tensor([amax]), scheme).tolist() == [scale]


@settings(max_examples=100)
@given(st.floats(1e-30, 1e30), st.sampled_from(["e4m3fn", "e5m2", "e4m3fnuz", "gaudi2"]))
def test_scales_of_powers_of_two_cut_nothing_and_are_less_than_twice_the_plain_ones(amax, flavour):
    scheme = TensorScheme(kind="float", num_bits=8, granularity="per_tensor", float8=flavour)
    plain = affine.scale_from_amax(torch.tensor([amax]), scheme)
    rounded = affine.scale_from_amax(torch.tensor([amax]), replace(scheme, scale_rounding="pow2"))
    assert math.frexp(rounded.item())[0] == 0.5
    assert plain <= rounded < 2 * plain

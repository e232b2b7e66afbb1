"""Static input scales: by hand, properties, compressed-tensors, edges, errors."""

import math

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.core.scheme import TensorScheme
from quantflow.errors import SchemeError, StatisticsError
from quantflow.numerics.activations import clipped, least_error_reach, static_input, unseen

FP8 = TensorScheme(kind="float", num_bits=8, granularity="per_tensor")
GAUDI2 = TensorScheme(kind="float", num_bits=8, granularity="per_tensor", float8="gaudi2")
INT8 = TensorScheme(kind="int", num_bits=8, granularity="per_tensor")
INT8_ASYM = TensorScheme(kind="int", num_bits=8, granularity="per_tensor", symmetric=False)


@pytest.mark.parametrize(
    ("scheme", "amax", "scale"), [(FP8, 896.0, 2.0), (GAUDI2, 480.0, 2.0), (INT8, 63.75, 0.5)]
)
def test_symmetric_scales_worked_by_hand(scheme, amax, scale):
    result, zero_point = static_input({"amax": torch.tensor(amax)}, scheme)
    assert (result.tolist(), result.dtype, zero_point) == ([scale], torch.float32, None)


# -51..204 in 255 steps of 1; -128 + 51 = -77
def test_an_asymmetric_range_is_that_over_all_channels():
    statistics = {"min_val": torch.tensor([-51.0, 3.0]), "max_val": torch.tensor([4.0, 204.0])}
    scale, zero_point = static_input(statistics, INT8_ASYM)
    assert (scale.tolist(), zero_point.tolist(), zero_point.dtype) == ([1.0], [-77], torch.int8)


def test_an_input_that_is_never_negative_uses_the_whole_range():
    scale, zero_point = static_input(
        {"min_val": torch.tensor([3.0]), "max_val": torch.tensor([51.0])}, INT8_ASYM
    )
    assert (scale.item(), zero_point.item()) == (pytest.approx(0.2), -128)


@settings(max_examples=100)
@given(st.floats(-(2.0**100), 2.0**100, width=32), st.floats(-(2.0**100), 2.0**100, width=32))
def test_zero_is_exact_and_the_range_is_covered(a, b):
    low, high = min(a, b, 0.0), max(a, b, 0.0)
    statistics = {"min_val": torch.tensor([min(a, b)]), "max_val": torch.tensor([max(a, b)])}
    scale, zero_point = (tensor.item() for tensor in static_input(statistics, INT8_ASYM))
    assert scale > 0
    assert -128 <= zero_point <= 127
    assert scale * (-128 - zero_point) <= low + 0.5001 * scale
    assert scale * (127 - zero_point) >= high - 0.5001 * scale


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scheme", [FP8, INT8, INT8_ASYM], ids=["fp8", "int8", "asymmetric"])
def test_compressed_tensors_computes_the_same(scheme, seed):
    x = torch.randn(64, generator=torch.Generator().manual_seed(seed)) * 3 + 1
    arguments = QuantizationArgs(
        num_bits=8, type=scheme.kind, symmetric=scheme.symmetric, strategy="tensor"
    )
    expected_scale, expected_zero_point = calculate_qparams(x.min(), x.max(), arguments)
    scale, zero_point = static_input(
        {"amax": x.abs().max(), "min_val": x.min(), "max_val": x.max()}, scheme
    )
    assert torch.equal(scale, expected_scale)
    assert scheme.symmetric or torch.equal(zero_point, expected_zero_point)


@pytest.mark.parametrize("scheme", [FP8, INT8, INT8_ASYM], ids=["fp8", "int8", "asymmetric"])
def test_an_unseen_input_has_scale_one_and_is_told(scheme):
    statistics = {"amax": torch.zeros(()), "min_val": torch.zeros(4), "max_val": torch.zeros(4)}
    scale, zero_point = static_input(statistics, scheme)
    assert scale.tolist() == [1.0]
    assert zero_point is None or zero_point.tolist() == [-128]
    assert unseen(statistics)


@pytest.mark.parametrize("name", ["amax", "min_val", "max_val"])
def test_an_input_with_one_value_is_seen(name):
    assert not unseen({"amax": torch.zeros(()), name: torch.tensor([0.0, -1.0])})


def test_statistics_that_hold_no_range_do_not_say_unseen():
    assert not unseen({"count": torch.zeros(())})


@pytest.mark.parametrize(
    ("statistics", "scheme", "message"),
    [
        ({}, FP8, r"statistic amax is missing; measure with --stats amax"),
        (
            {"min_val": torch.zeros(2)},
            INT8_ASYM,
            r"statistic max_val is missing; measure with --stats max_val",
        ),
        (
            {"amax": torch.tensor(math.nan)},
            FP8,
            r"amax \[\] is empty or holds NaN or Inf; measure again",
        ),
        ({"amax": torch.tensor(math.inf)}, INT8, r"NaN or Inf"),
        ({"amax": torch.tensor(-1.0)}, FP8, r"amax is -1\.0"),
        (
            {"min_val": torch.ones(2), "max_val": torch.zeros(2)},
            INT8_ASYM,
            r"min_val 1\.0 is above max_val 0\.0",
        ),
        (
            {"min_val": torch.zeros(0), "max_val": torch.zeros(0)},
            INT8_ASYM,
            r"min_val \[0\] is empty",
        ),
    ],
)
def test_errors_name_the_statistic_and_the_remedy(statistics, scheme, message):
    with pytest.raises(StatisticsError, match=message):
        static_input(statistics, scheme)


def test_a_dynamic_input_has_no_stored_scale():
    scheme = TensorScheme(kind="int", num_bits=8, granularity="per_token", dynamic=True)
    with pytest.raises(SchemeError, match=r"dynamic=True.*a stored input scale is static"):
        static_input({"amax": torch.ones(())}, scheme)


def test_ranges_end_at_the_reach_where_they_go_beyond():
    statistics = {
        "amax": torch.tensor(5.0),
        "min_val": torch.tensor([-5.0, -0.5]),
        "max_val": torch.tensor([1.0, 3.0]),
    }
    found = clipped(statistics, 2.0)
    assert {name: value.tolist() for name, value in found.items()} == {
        "amax": 2.0,
        "min_val": [-2.0, -0.5],
        "max_val": [1.0, 2.0],
    }
    assert clipped({"count": torch.tensor(9), "amax": torch.tensor(1.0)}, 2.0) == {
        "count": torch.tensor(9),
        "amax": 1.0,
    }
    assert statistics["amax"] == 5


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scheme", [INT8, INT8_ASYM, FP8], ids=["int8", "asymmetric", "fp8"])
def test_the_reach_is_the_one_of_least_error_among_those_tried(scheme, sign):
    values = torch.randn(3000, generator=torch.Generator().manual_seed(0)).abs()
    values[0] = 40.0  # one outlier
    values = values.sort().values
    low, high = (
        (torch.zeros(1), values.max()[None]) if sign > 0 else (-values.max()[None], torch.zeros(1))
    )
    statistics = {"amax": values.max(), "min_val": low, "max_val": high}
    found = least_error_reach(statistics, scheme, magnitudes=values, counts=torch.ones(3000))
    losses = {}
    for step in range(4, 65):
        reach = 40.0 * step / 64
        if scheme.kind == "float":
            scale = reach / 448
            rounded = (values / scale).clamp(max=448).to(torch.float8_e4m3fn).float() * scale
        elif scheme.symmetric:
            scale = reach / 127.5
            rounded = (values / scale).round().clamp(max=127) * scale
        else:
            rounded = (values / (reach / 255)).round().clamp(max=255) * (reach / 255)
        losses[reach] = float((rounded.double() - values.double()).square().sum())
    assert losses[found] == pytest.approx(min(losses.values()), rel=1e-3)
    if scheme is INT8:
        assert found < 40
    if scheme is FP8:  # has points enough for small values beside a large one
        assert found > 30


def test_a_range_without_outliers_stays_whole_and_what_was_not_seen_has_none():
    values = torch.linspace(0, 1, 1000)
    about = {"magnitudes": values, "counts": torch.ones(1000)}
    assert least_error_reach({"amax": torch.tensor(1.0)}, INT8, **about) == 1.0
    assert least_error_reach({"amax": torch.tensor(0.0)}, INT8, **about) == 0.0
    with pytest.raises(StatisticsError, match="statistic amax is missing"):
        least_error_reach({}, INT8, **about)

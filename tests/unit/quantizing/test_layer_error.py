"""The relative error of a tensor, by hand and at its edges."""

import pytest
import torch

from quantflow.algorithms import rtn
from quantflow.core.scheme import PRESETS
from quantflow.errors import InputError
from quantflow.quantizing.layer_error import error_from, relative_error, squared_sums, weight_sums


def test_worked_by_hand():  # (1 + 4) / (9 + 16)
    assert relative_error(
        torch.tensor([3.0, 4.0]), torch.tensor([2.0, 6.0]), name="x"
    ) == pytest.approx(0.2, abs=1e-15)


def test_equal_tensors_have_no_error_even_when_they_are_zero():
    assert relative_error(torch.ones(3), torch.ones(3), name="x") == 0.0
    assert relative_error(torch.zeros(3), torch.zeros(3), name="x") == 0.0


def test_small_differences_of_large_values_are_not_lost_to_float32():
    large = torch.full((4,), 2.0**24, dtype=torch.float64)
    assert relative_error(large, large + 1, name="x") == pytest.approx(2.0**-48, rel=1e-12)


@pytest.mark.parametrize(
    "original", [torch.tensor([float("nan")]), torch.tensor([float("inf")]), torch.zeros(1)]
)
def test_an_error_without_a_finite_value_is_refused_by_name(original):
    with pytest.raises(InputError, match=r"layers\.0\.q_proj: relative error"):
        relative_error(original, torch.ones(1), name="layers.0.q_proj")


def test_sums_worked_by_hand_add_up_to_the_same_error():
    original, approximation = torch.tensor([[3.0], [4.0]]), torch.tensor([[2.0], [6.0]])
    sums = [squared_sums(original[i : i + 1], approximation[i : i + 1]) for i in range(2)]
    assert sums == [(1.0, 9.0), (4.0, 16.0)]
    assert error_from(sum(d for d, _ in sums), sum(p for _, p in sums), name="x") == pytest.approx(
        0.2, abs=1e-15
    )


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e25])
def test_sums_agree_with_float64_for_small_and_large_weights(size):
    generator = torch.Generator().manual_seed(0)
    original = torch.randn(40, 300, generator=generator) * size
    approximation = original + torch.randn(40, 300, generator=generator) * size / 100
    difference, power = squared_sums(original, approximation)
    expected = float(
        (original.double() - approximation.double()).square().sum()
        / original.double().square().sum()
    )
    assert error_from(difference, power, name="x") == pytest.approx(expected, rel=1e-6)


def test_a_ratio_to_nothing_is_refused_by_name_and_nothing_to_nothing_is_no_error():
    assert error_from(0.0, 0.0, name="x") == 0.0
    for difference, power in ((1.0, 0.0), (float("nan"), 1.0), (1.0, float("nan"))):
        with pytest.raises(InputError, match="q_proj: relative error"):
            error_from(difference, power, name="q_proj")


@pytest.mark.parametrize("name", ["FP8", "FP8_DYNAMIC", "W8A8", "W4A16_ASYM"])
def test_the_sums_of_a_weight_are_those_of_its_dequantized_values(name):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 1024, generator=generator).bfloat16()  # more than one unit of rows
    scheme = PRESETS[name]
    quantized = rtn.quantize_group({"q": weight}, scheme, statistics={}, scale_dtype=torch.float32)[
        "q"
    ].weight
    expected = relative_error(weight, quantized.dequantize(), name="q")
    assert error_from(*weight_sums(weight, quantized), name="q") == pytest.approx(
        expected, rel=1e-6
    )

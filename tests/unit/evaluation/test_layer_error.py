"""The relative error of a tensor, by hand and at its edges."""

import pytest
import torch

from quantflow.errors import InputError
from quantflow.evaluation.layer_error import relative_error


def test_worked_by_hand():  # (1 + 4) / (9 + 16)
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([2.0, 6.0]), name="x") == pytest.approx(0.2, abs=1e-15)


def test_equal_tensors_have_no_error_even_when_they_are_zero():
    assert relative_error(torch.ones(3), torch.ones(3), name="x") == 0.0
    assert relative_error(torch.zeros(3), torch.zeros(3), name="x") == 0.0


def test_small_differences_of_large_values_are_not_lost_to_float32():
    large = torch.full((4,), 2.0**24, dtype=torch.float64)
    assert relative_error(large, large + 1, name="x") == pytest.approx(2.0**-48, rel=1e-12)


@pytest.mark.parametrize("original", [torch.tensor([float("nan")]), torch.tensor([float("inf")]), torch.zeros(1)])
def test_an_error_without_a_finite_value_is_refused_by_name(original):
    with pytest.raises(InputError, match=r"layers\.0\.q_proj: relative error"):
        relative_error(original, torch.ones(1), name="layers.0.q_proj")

"""Predicted costs of rounding, by hand and against sums written out."""

import itertools

import pytest
import torch

from quantflow.core.scheme import preset, with_group_size
from quantflow.errors import InputError, SchemeError, StatisticsError
from quantflow.numerics.sensitivity import ROWS, predicted_divergence, sampled_rows
from tests.shared import random

W2_G2 = with_group_size(preset("W2A16"), 2).weights  # -2, -1, 0, 1 times a scale


def predicted(weight, scheme, rows, columns, dtype=torch.float32):
    return predicted_divergence(
        weight,
        scheme,
        name="q",
        row_factors=rows.double(),
        column_factors=columns.double(),
        scale_dtype=dtype,
    )


def test_a_weight_of_two_rows_worked_by_hand():
    # 2 bits are -2, -1, 0, 1 times a scale. For 1.5 the largest scale that is tried is best, 33/32
    # of 1: an error of 15/32. For -1.5 it is 24/32, whose double is 1.5. The columns weigh 4 and 2,
    # the rows 3 and 1, 2 in the mean.
    weight = torch.tensor([[1.5, 1.5], [-1.5, -1.5]])
    found = predicted(weight, W2_G2, torch.tensor([3.0, 1.0]), torch.tensor([4.0, 2.0]))
    assert found == pytest.approx(0.5 * (15 / 32) ** 2 * (4 + 2) * 3 / 2, rel=1e-6)


@pytest.mark.parametrize("name", ["W2A16", "W4A16", "W4A16_ASYM", "W6A16", "W8A16"])
def test_it_is_half_the_weighted_sum_of_squared_errors(name):
    scheme = preset(name)
    scheme = scheme if scheme.weights.group_size is None else with_group_size(scheme, 32)
    weight, rows, columns = (
        random(24, 64),
        random(24, seed=1).square(),
        random(64, seed=2).square() + 0.1,
    )
    found = predicted(weight, scheme.weights, rows, columns)
    size, levels, expected = scheme.weights.group_size or 64, 2**scheme.weights.num_bits, 0.0
    # what the best of thirteen cuts of each range is chosen by
    matters = columns / columns.mean() + 0.01
    for row, first in itertools.product(range(24), range(0, 64, size)):
        part, here = weight[row, first : first + size], slice(first, first + size)
        tried = []
        for cut in [1.0, *(step / 32 for step in range(33, 21, -1))]:
            low, high = part.min().clamp(max=0) * cut, part.max().clamp(min=0) * cut
            step, zero = part.abs().max() * cut / (levels / 2 - 0.5), 0
            if not scheme.weights.symmetric:
                step = (high - low) / (levels - 1)
                zero = (-levels / 2 - low / step).round()
            value = ((part / step + zero).round().clamp(-levels / 2, levels / 2 - 1) - zero) * step
            tried.append((value - part).square())
        best = min(tried, key=lambda squares: float((squares * matters[here]).sum()))
        expected += float((best * columns[here]).sum() * rows[row])
    assert found == pytest.approx(0.5 * expected / float(rows.mean()), rel=1e-4)


def test_a_bit_more_costs_a_quarter_and_a_finer_group_costs_less():
    weight, rows, columns = random(64, 512), random(64, seed=1).square(), torch.ones(512)
    costs = [
        predicted(weight, with_group_size(preset(f"W{bits}A16"), 128).weights, rows, columns)
        for bits in (4, 5, 6)
    ]
    assert costs[0] / costs[1] == pytest.approx(4, rel=0.15)
    assert costs[1] / costs[2] == pytest.approx(4, rel=0.15)
    finer = predicted(weight, with_group_size(preset("W4A16"), 32).weights, rows, columns)
    assert 0.5 * costs[0] < finer < 0.9 * costs[0]


def test_columns_that_matter_more_are_rounded_by_a_grid_that_serves_them():
    weight = random(32, 64)
    columns = torch.ones(64)
    columns[::8] = 1000.0
    alike = predicted(
        weight, with_group_size(preset("W3A16"), 64).weights, torch.ones(32), torch.ones(64)
    )
    chosen = predicted(
        weight, with_group_size(preset("W3A16"), 64).weights, torch.ones(32), columns
    )
    # what a grid that knows nothing of columns costs in the mean
    assert chosen < alike * float(columns.mean())


def test_of_a_tall_weight_the_rows_looked_at_stand_for_all():
    assert sampled_rows(5).tolist() == [0, 1, 2, 3, 4]
    assert (
        len(sampled_rows(ROWS + 1)) == ROWS and int(sampled_rows(10 * ROWS)[-1]) == 10 * ROWS - 10
    )
    weight, rows = random(4 * ROWS, 32), random(4 * ROWS, seed=1).square()
    scheme = with_group_size(preset("W4A16"), 32).weights
    parts = [
        predicted(weight[i::4], scheme, rows[i::4], torch.ones(32)) * float(rows[i::4].mean())
        for i in range(4)
    ]
    found = predicted(weight[sampled_rows(4 * ROWS)], scheme, rows, torch.ones(32)) * float(
        rows.mean()
    )
    # Of 512 rows, weighed as unevenly as squares of normal numbers are, 170 count; their costs vary
    # by a third.
    assert found == pytest.approx(sum(parts), rel=3 * 0.34 / 170**0.5)


def test_a_linear_that_no_gradient_reached_costs_nothing():
    weight = random(8, 32)
    scheme = with_group_size(preset("W4A16"), 32).weights
    assert predicted(weight, scheme, torch.zeros(8), torch.ones(32)) == 0
    assert predicted(weight, scheme, torch.ones(8), torch.zeros(32)) == 0
    assert predicted(torch.zeros(8, 32), scheme, torch.ones(8), torch.ones(32)) == 0


def test_what_does_not_fit_together_is_refused():
    scheme = with_group_size(preset("W4A16"), 32).weights
    with pytest.raises(
        StatisticsError,
        match=r"q: weight is \[8, 32\], its factors are \[9\] and \[32\]; measure this model",
    ):
        predicted(random(8, 32), scheme, torch.ones(9), torch.ones(32))
    with pytest.raises(SchemeError, match="in_features=48 is not a multiple of group_size=32"):
        predicted(random(8, 48), scheme, torch.ones(8), torch.ones(48))
    with pytest.raises(InputError, match="q: weight holds NaN or Inf"):
        predicted(torch.full((8, 32), torch.nan), scheme, torch.ones(8), torch.ones(32))

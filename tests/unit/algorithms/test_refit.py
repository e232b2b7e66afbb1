"""Refitting: least squares by numpy, exact where nothing changed, workers, edges, errors."""

import numpy as np
import pytest
import torch

from quantflow.algorithms import refit
from quantflow.algorithms.refit import DAMPING, RefitSums
from quantflow.core.parallel import Workers
from quantflow.errors import StatisticsError
from quantflow.observers.hessian import ROWS, add_products_
from tests.shared import random

FEATURES, HIDDEN, SEQUENCES = 40, 24, (70, 1, 33)


def told(*, features=FEATURES, hidden=HIDDEN, drifted=True):
    """The sums of a few sequences, and all of their rows: x, x' and r."""
    sums, rows = RefitSums(features=features, hidden=hidden), []
    for seed, length in enumerate(SEQUENCES):
        x = random(1, length, features, seed=seed) * torch.linspace(0.1, 3, features)
        other = x + 0.2 * random(1, length, features, seed=seed + 10) if drifted else x
        gap = random(1, length, hidden, seed=seed + 20) if hidden and drifted else None
        sums.update(x, other, gap)
        rows.append((x[0], other[0], None if gap is None else gap[0]))
    return sums, [None if part[0] is None else torch.cat(part) for part in zip(*rows, strict=True)]


def fitted(sums, weight, **options):
    statistics = sums.statistics()
    return sums.refitted({"a": weight}, statistics, **options)["a"], statistics


@pytest.mark.parametrize("hidden", [0, HIDDEN])
def test_weights_are_the_damped_least_squares_of_all_tokens(hidden):
    sums, (x, seen, gap) = told(hidden=hidden)
    weight = random(HIDDEN, FEATURES, seed=5)
    result, statistics = fitted(sums, weight)
    aims = x @ weight.T + (gap if hidden else 0)
    share = DAMPING + FEATURES / sum(SEQUENCES)
    strength = share * float((seen.double() ** 2).sum(0).mean())
    # by numpy: rows of the damping stand below those of the tokens
    left = np.concatenate([seen.double(), strength**0.5 * np.eye(FEATURES)])
    right = np.concatenate([aims.double(), strength**0.5 * weight.double().T])
    expected = np.linalg.lstsq(left, right, rcond=None)[0].T
    torch.testing.assert_close(result.double(), torch.from_numpy(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(statistics["hessian_sum"], seen.T @ seen, rtol=1e-4, atol=1e-3)
    assert int(statistics["count"]) == sum(SEQUENCES)


def test_a_weight_whose_inputs_are_the_original_s_stays_to_the_bit():
    sums, _ = told(drifted=False)
    weight = random(HIDDEN, FEATURES, seed=5)
    assert torch.equal(fitted(sums, weight)[0], weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_original_weight_is_not_written_to(dtype):
    sums, _ = told()
    weight = random(HIDDEN, FEATURES, seed=5).to(dtype)
    before = weight.clone()
    result, _ = fitted(sums, weight)
    assert torch.equal(weight, before)
    assert result.dtype == torch.float32
    assert not torch.equal(result, before.float())


def test_the_number_of_workers_changes_no_bit():
    weight = random(600, FEATURES, seed=5)
    with Workers(3) as workers:
        several, _ = fitted(told(hidden=600)[0], weight, workers=workers)
    assert torch.equal(several, fitted(told(hidden=600)[0], weight)[0])


def test_a_channel_that_the_quantized_model_never_uses_keeps_its_weight():
    sums = RefitSums(features=4)
    x, seen = random(1, 50, 4, seed=1), random(1, 50, 4, seed=2)
    seen[..., 2] = 0
    sums.update(x, seen, None)
    weight = random(3, 4, seed=3)
    result, _ = fitted(sums, weight)
    assert torch.equal(result[:, 2], weight[:, 2])
    assert not torch.equal(result, weight)


def test_a_linear_that_no_token_reached_keeps_its_weight():
    weight = random(3, 4, seed=3)
    assert torch.equal(fitted(RefitSums(features=4), weight)[0], weight)


@pytest.mark.parametrize("place", ["x", "gap"])
def test_inputs_that_are_not_finite_are_an_error_that_names_the_linear(place):
    parts = {"x": random(1, 9, 4, seed=1), "seen": random(1, 9, 4, seed=2)}
    parts["gap"] = random(1, 9, 3, seed=3)
    parts[place][0, 4, 1] = torch.nan
    sums = RefitSums(features=4, hidden=3)
    sums.update(parts["x"], parts["seen"], parts["gap"])
    with pytest.raises(StatisticsError, match="^a: .*NaN or Inf.*--no-refit"):
        fitted(sums, random(3, 4, seed=4))


def test_quantized_inputs_that_are_not_finite_are_an_error_at_once():
    seen = random(1, 9, 4, seed=2)
    seen[0, 4, 1] = torch.inf
    with pytest.raises(StatisticsError, match=r"input \[9, 4\] holds 0 NaN and 1 Inf"):
        RefitSums(features=4).update(random(1, 9, 4, seed=1), seen, None)


@pytest.mark.parametrize("left", [1, ROWS, ROWS + 3])
@pytest.mark.parametrize("right", [5, 4 * ROWS + 1])
def test_sums_of_products_are_those_of_float64(left, right):
    total = torch.ones(left, right)
    a, b = random(65, left, seed=1), random(65, right, seed=2)
    add_products_(total, a, b)
    expected = 1 + a.double().T @ b.double()
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)


def test_it_says_what_its_sums_take():
    assert refit.sums_bytes(FEATURES, hidden=HIDDEN) == sum(
        tensor.nbytes for tensor in (told()[0].drift, told()[0].residual)
    )

"""SmoothQuant: by hand, as a property, against the authors' rule, at the edges, its errors, and why it exists."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from quantflow.errors import InputError, StatisticsError, UsageError
from quantflow.transforms import TRANSFORMS, smoothquant


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_two_channels_worked_by_hand():  # sqrt(4 / 1) = 2, sqrt(1 / 4) = 0.5; column maxima are over both linears
    weights = {"q": torch.tensor([[1.0, -2.0]]), "k": torch.tensor([[0.5, 4.0]])}
    smoothing = smoothquant.solve(weights, input_amax=torch.tensor([4.0, 1.0]), norm_weight=torch.tensor([3.0, 3.0]), alpha=0.5)
    assert smoothing.factors.tolist() == [2.0, 0.5]
    assert smoothing.norm_weight.tolist() == [1.5, 6.0]


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.8, 1.0])
def test_factors_are_those_of_the_authors_code(alpha):  # smooth.py, smooth_ln_fcs_llama_like
    weight, act_scales = random(8, 16), random(16, seed=1).abs() * 10
    weight_scales = weight.abs().max(dim=0, keepdim=True)[0].max(dim=0)[0].clamp(min=1e-5)
    expected = (act_scales.pow(alpha) / weight_scales.pow(1 - alpha)).clamp(min=1e-5)
    smoothing = smoothquant.solve({"q": weight}, input_amax=act_scales, norm_weight=torch.ones(16), alpha=alpha)
    torch.testing.assert_close(smoothing.factors, expected)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.floats(0, 1),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
)
def test_the_function_is_preserved_although_the_norm_is_stored_in_its_own_dtype(seed, alpha, dtype, has_bias):
    norm = nn.LayerNorm(16, bias=has_bias).to(dtype).float()
    linears = [nn.Linear(16, 4), nn.Linear(16, 3)]
    with torch.no_grad():
        norm.weight.copy_(random(16, seed=seed).to(dtype))
    x = random(5, 16, seed=seed + 1) * torch.logspace(-2, 2, 16)
    inner = norm(x)
    before = [linear(inner) for linear in linears]
    smoothing = smoothquant.solve(
        {str(i): linear.weight.detach() for i, linear in enumerate(linears)},
        input_amax=inner.detach().abs().amax(0),
        norm_weight=norm.weight.detach().to(dtype),
        alpha=alpha,
    )
    assert smoothing.norm_weight.dtype == dtype
    smoothquant.apply_(norm, linears, smoothing=smoothing)
    assert torch.equal(norm.weight, smoothing.norm_weight.float())
    for linear, expected in zip(linears, before, strict=True):
        torch.testing.assert_close(linear(norm(x)), expected, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max()))


def test_a_norms_bias_is_divided_too():
    norm, linear = nn.LayerNorm(2), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        norm.bias.copy_(torch.tensor([8.0, 8.0]))
        linear.weight.copy_(torch.tensor([[1.0, 1.0]]))
    smoothing = smoothquant.Smoothing(factors=torch.tensor([2.0, 0.5]), norm_weight=torch.tensor([0.5, 2.0]))
    smoothquant.apply_(norm, [linear], smoothing=smoothing)
    assert norm.bias.tolist() == [4.0, 16.0]
    assert linear.weight.tolist() == [[2.0, 0.5]]


def test_channels_that_carry_nothing_keep_factor_one():
    weight = torch.ones(2, 4)
    weight[:, 1] = 0
    smoothing = smoothquant.solve(
        {"q": weight},
        input_amax=torch.tensor([0.0, 9.0, 9.0, 9.0]),
        norm_weight=torch.tensor([1.0, 1.0, 0.0, 1.0]),
        alpha=0.5,
    )
    assert smoothing.factors.tolist() == [1.0, 1.0, 1.0, 3.0]
    assert smoothing.norm_weight.tolist()[:3] == [1.0, 1.0, 0.0]


def test_factors_stay_within_four_decades():
    smoothing = smoothquant.solve(
        {"q": torch.ones(1, 2)}, input_amax=torch.tensor([1e9, 1e-9]), norm_weight=torch.ones(2), alpha=1.0
    )
    torch.testing.assert_close(smoothing.factors, torch.tensor([1e4, 1e-4]))


@pytest.mark.parametrize("norm_value", [1e-4, 6e4], ids=["underflow", "overflow"])
def test_a_norm_that_cannot_store_the_quotient_keeps_its_channel(norm_value):
    norm_weight = torch.tensor([norm_value], dtype=torch.float16)
    amax = 1e4 if norm_value < 1 else 1e-4
    smoothing = smoothquant.solve({"q": torch.ones(1, 1)}, input_amax=torch.tensor([amax]), norm_weight=norm_weight, alpha=1.0)
    assert smoothing.factors.tolist() == [1.0]
    assert torch.equal(smoothing.norm_weight, norm_weight)


def test_smoothed_statistics_are_what_a_second_measurement_would_have_seen():
    x, factors = random(32, 8) * 5, random(8, seed=3).abs() + 0.5
    smooth = x / factors
    stats = {
        "amax": x.abs().max(),
        "channel_amax": x.abs().amax(0),
        "min_val": x.amin(0),
        "max_val": x.amax(0),
        "abs_sum": x.abs().double().sum(0),
        "count": torch.tensor(32),
        "counts": torch.ones(4, dtype=torch.int64),
        "hessian_sum": (x.T @ x).double(),
    }
    smoothed = smoothquant.smooth_statistics(stats, factors)
    expected = {
        "amax": smooth.abs().max(),
        "channel_amax": smooth.abs().amax(0),
        "min_val": smooth.amin(0),
        "max_val": smooth.amax(0),
        "abs_sum": smooth.abs().double().sum(0),
        "count": torch.tensor(32),
        "hessian_sum": (smooth.T @ smooth).double(),
    }
    assert set(smoothed) == set(expected)  # the histogram is gone
    for name, value in expected.items():
        torch.testing.assert_close(smoothed[name], value, rtol=1e-5, atol=1e-4 if name == "hessian_sum" else 1e-5)


def test_amax_is_taken_from_the_range_where_channels_are_missing_and_dropped_without_any():
    stats = {"amax": torch.tensor(9.0), "min_val": torch.tensor([-9.0, -1.0]), "max_val": torch.tensor([1.0, 4.0])}
    assert smoothquant.smooth_statistics(stats, torch.tensor([3.0, 0.5]))["amax"] == 8
    assert smoothquant.smooth_statistics({"amax": torch.tensor(9.0)}, torch.ones(2)) == {}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"alpha": 1.5}, UsageError, r"alpha=1\.5 is outside 0\.\.1; choose"),
        ({"alpha": math.nan}, UsageError, r"alpha=nan"),
        ({"fold_weights": {}}, InputError, r"the fold has no linears"),
        ({"fold_weights": {"q": torch.ones(2, 3)}}, InputError, r"q: weight is \[2, 3\], the norm has 2 features"),
        ({"fold_weights": {"q": torch.full((2, 2), math.nan)}}, InputError, r"q: weight holds NaN or Inf"),
        ({"input_amax": torch.ones(3)}, StatisticsError, r"channel_amax is \[3\], the norm is \[2\]"),
        ({"input_amax": torch.tensor([1.0, -1.0])}, StatisticsError, r"negative value, NaN or Inf; measure again"),
        ({"input_amax": torch.tensor([1.0, math.inf])}, StatisticsError, r"negative value, NaN or Inf"),
    ],
)
def test_errors_name_what_disagrees(changes, error, message):
    arguments = {"fold_weights": {"q": torch.ones(2, 2)}, "input_amax": torch.ones(2), "alpha": 0.5} | changes
    with pytest.raises(error, match=message):
        smoothquant.solve(norm_weight=torch.ones(2), **arguments)


def test_an_unknown_statistic_is_not_passed_on_unsmoothed():
    with pytest.raises(StatisticsError, match=r"statistic median has no rule for smoothing"):
        smoothquant.smooth_statistics({"median": torch.ones(2)}, torch.ones(2))


def test_smoothing_takes_most_of_the_error_that_an_outlier_channel_causes():
    def int8(x: torch.Tensor) -> torch.Tensor:  # one scale per row, plain textbook
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * scale

    x, weight = random(256, 64), random(32, 64, seed=1)
    x[:, 7] *= 100
    factors = smoothquant.solve({"q": weight}, input_amax=x.abs().amax(0), norm_weight=torch.ones(64), alpha=0.5).factors
    exact = x @ weight.T
    plain = (int8(x) @ int8(weight).T - exact).norm()
    smooth = (int8(x / factors) @ int8(weight * factors).T - exact).norm()
    assert smooth < 0.3 * plain


def test_the_table_knows_it_by_name():
    assert TRANSFORMS["smoothquant"] is smoothquant
    assert smoothquant.NEEDS == ("channel_amax",)

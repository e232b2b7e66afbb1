"""SmoothQuant: by hand, a property, the authors' rule, edges, errors, and why it exists."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from quantflow.core.parallel import Workers
from quantflow.core.scheme import preset
from quantflow.errors import InputError, StatisticsError, UsageError
from quantflow.numerics.smoothing import Absorber, Fold, Smoothing, apply_, smooth_statistics
from quantflow.transforms import TRANSFORMS, smoothquant
from tests.shared import random


def fold_of(weights, amax, absorber=None, *, scheme="W8A8", **statistics):
    """A fold with a norm of ones, unless another is given."""
    return Fold(
        weights=weights,
        schemes=dict.fromkeys(weights, preset(scheme)),
        scale_dtypes=dict.fromkeys(weights, torch.float32),
        statistics={"channel_amax": amax, **statistics},
        absorber=Absorber(norm_weight=torch.ones(amax.shape[0])) if absorber is None else absorber,
    )


def solve(weights, amax, absorber=None, *, alpha):
    options = {"alpha": alpha, "linears": True}
    smoothing = smoothquant.solve(fold_of(weights, amax, absorber), options=options).smoothing
    assert smoothing is not None
    return smoothing


# sqrt(4 / 1) = 2, sqrt(1 / 4) = 0.5; column maxima are over both linears
def test_two_channels_worked_by_hand():
    weights = {"q": torch.tensor([[1.0, -2.0]]), "k": torch.tensor([[0.5, 4.0]])}
    smoothing = solve(
        weights, torch.tensor([4.0, 1.0]), Absorber(norm_weight=torch.tensor([3.0, 3.0])), alpha=0.5
    )
    assert smoothing.factors.tolist() == [2.0, 0.5]
    assert smoothing.norm_weight.tolist() == [1.5, 6.0]


def test_heads_that_share_their_values_share_factors_worked_by_hand():
    """Two heads of one value head of two features.

    The larger amax of each feature counts: 16 and 4, over columns 1 and 4.
    """
    weights = {"o": torch.tensor([[1.0, 4.0, 0.5, 1.0]])}
    smoothing = solve(
        weights, torch.tensor([16.0, 1.0, 1.0, 4.0]), Absorber(repeats=2, head_dim=2), alpha=0.5
    )
    assert smoothing.factors.tolist() == [4.0, 1.0, 4.0, 1.0]
    assert smoothing.divisors.tolist() == [4.0, 1.0]
    assert smoothing.norm_weight is None


# sqrt(9) = 3 -> 4, sqrt(1 / 7) = 0.38 -> 0.5
def test_a_linear_that_is_stored_in_few_bits_is_divided_by_powers_of_two():
    smoothing = solve(
        {"o": torch.tensor([[1.0, 7.0]])}, torch.tensor([9.0, 1.0]), Absorber(exact=True), alpha=0.5
    )
    assert smoothing.factors.tolist() == [4.0, 0.5]
    weight = random(2, 3).to(torch.bfloat16)
    divided = (weight.float() / smoothing.divisors[:, None]).to(torch.bfloat16).float()
    assert torch.equal(divided * smoothing.divisors[:, None], weight.float())


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.8, 1.0])
def test_factors_are_those_of_the_authors_code(alpha):  # smooth.py, smooth_ln_fcs_llama_like
    weight, act_scales = random(8, 16), random(16, seed=1).abs() * 10
    weight_scales = weight.abs().max(dim=0, keepdim=True)[0].max(dim=0)[0].clamp(min=1e-5)
    expected = (act_scales.pow(alpha) / weight_scales.pow(1 - alpha)).clamp(min=1e-5)
    torch.testing.assert_close(solve({"q": weight}, act_scales, alpha=alpha).factors, expected)


@settings(max_examples=40)
@given(
    st.integers(0, 2**31),
    st.floats(0, 1),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
)
def test_the_function_is_preserved_although_the_norm_is_stored_in_its_own_dtype(
    seed, alpha, dtype, has_bias
):
    norm = nn.LayerNorm(16, bias=has_bias).to(dtype).float()
    linears = [nn.Linear(16, 4), nn.Linear(16, 3)]
    with torch.no_grad():
        norm.weight.copy_(random(16, seed=seed).to(dtype))
    x = random(5, 16, seed=seed + 1) * torch.logspace(-2, 2, 16)
    inner = norm(x)
    before = [linear(inner) for linear in linears]
    weights = {str(i): linear.weight.detach() for i, linear in enumerate(linears)}
    absorber = Absorber(norm_weight=norm.weight.detach().to(dtype))
    smoothing = solve(weights, inner.detach().abs().amax(0), absorber, alpha=alpha)
    assert smoothing.norm_weight.dtype == dtype
    apply_(norm, linears, smoothing=smoothing)
    assert torch.equal(norm.weight, smoothing.norm_weight.float())
    for linear, expected in zip(linears, before, strict=True):
        torch.testing.assert_close(
            linear(norm(x)), expected, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max())
        )


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.floats(0, 1), st.sampled_from([1, 2, 4]), st.booleans())
def test_the_function_is_preserved_where_a_linear_absorbs_the_factors(
    seed, alpha, repeats, has_bias
):
    """Attention's mean over tokens stands for its weighted sum of values.

    Each value head is read by several query heads.
    """
    torch.manual_seed(seed)
    values, output = nn.Linear(6, 8, bias=has_bias), nn.Linear(8 * repeats, 5)
    # as the output has weights below 8 ** -0.5, some factor exceeds 1 at any alpha
    x = torch.randn(7, 6) * 300

    def inputs():
        heads = values(x).reshape(7, 2, 1, 4).expand(7, 2, repeats, 4)
        return heads.reshape(7, 8 * repeats).cumsum(0) / 7

    expected = output(inputs())
    absorber = Absorber(repeats=repeats, head_dim=4, exact=has_bias)
    smoothing = solve(
        {"o": output.weight.detach()}, inputs().detach().abs().amax(0), absorber, alpha=alpha
    )
    assert not torch.equal(smoothing.factors, torch.ones(8 * repeats))
    apply_(values, [output], smoothing=smoothing)
    torch.testing.assert_close(
        output(inputs()), expected, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max())
    )


def test_a_norms_bias_is_divided_too():
    norm, linear = nn.LayerNorm(2), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        norm.bias.copy_(torch.tensor([8.0, 8.0]))
        linear.weight.copy_(torch.tensor([[1.0, 1.0]]))
    factors = torch.tensor([2.0, 0.5])
    apply_(
        norm,
        [linear],
        smoothing=Smoothing(
            factors=factors, divisors=factors, norm_weight=torch.tensor([0.5, 2.0])
        ),
    )
    assert norm.bias.tolist() == [4.0, 16.0]
    assert linear.weight.tolist() == [[2.0, 0.5]]


def test_channels_that_carry_nothing_keep_factor_one():
    weight = torch.ones(2, 4)
    weight[:, 1] = 0
    absorber = Absorber(norm_weight=torch.tensor([1.0, 1.0, 0.0, 1.0]))
    smoothing = solve({"q": weight}, torch.tensor([0.0, 9.0, 9.0, 9.0]), absorber, alpha=0.5)
    assert smoothing.factors.tolist() == [1.0, 1.0, 1.0, 3.0]
    assert smoothing.norm_weight.tolist()[:3] == [1.0, 1.0, 0.0]


def test_factors_stay_within_four_decades():
    smoothing = solve({"q": torch.ones(1, 2)}, torch.tensor([1e9, 1e-9]), alpha=1.0)
    torch.testing.assert_close(smoothing.factors, torch.tensor([1e4, 1e-4]))


@pytest.mark.parametrize("norm_value", [1e-4, 6e4], ids=["underflow", "overflow"])
def test_a_norm_that_cannot_store_the_quotient_keeps_its_channel(norm_value):
    norm_weight = torch.tensor([norm_value], dtype=torch.float16)
    amax = 1e4 if norm_value < 1 else 1e-4
    smoothing = solve(
        {"q": torch.ones(1, 1)}, torch.tensor([amax]), Absorber(norm_weight=norm_weight), alpha=1.0
    )
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
        "rows": x[:3],
    }
    smoothed = smooth_statistics(stats, factors)
    expected = {
        "amax": smooth.abs().max(),
        "channel_amax": smooth.abs().amax(0),
        "min_val": smooth.amin(0),
        "max_val": smooth.amax(0),
        "abs_sum": smooth.abs().double().sum(0),
        "count": torch.tensor(32),
        "hessian_sum": (smooth.T @ smooth).double(),
        "rows": smooth[:3],
    }
    assert set(smoothed) == set(expected)  # the histogram is gone
    for name, value in expected.items():
        torch.testing.assert_close(
            smoothed[name], value, rtol=1e-5, atol=1e-4 if name == "hessian_sum" else 1e-5
        )


def test_amax_is_taken_from_the_range_where_channels_are_missing_and_dropped_without_any():
    stats = {
        "amax": torch.tensor(9.0),
        "min_val": torch.tensor([-9.0, -1.0]),
        "max_val": torch.tensor([1.0, 4.0]),
    }
    assert smooth_statistics(stats, torch.tensor([3.0, 0.5]))["amax"] == 8
    assert smooth_statistics({"amax": torch.tensor(9.0)}, torch.ones(2)) == {}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"options": {"alpha": 1.5, "linears": True}},
            UsageError,
            r"alpha=1\.5; give a number from 0 to 1, or auto",
        ),
        ({"options": {"alpha": math.nan, "linears": True}}, UsageError, r"alpha=nan"),
        ({"options": {"alpha": True, "linears": True}}, UsageError, r"alpha=True"),
        (
            {"options": {"alpha": 0.5, "linears": "all"}},
            UsageError,
            r"linears='all'; give true or false",
        ),
        ({"weights": {}}, InputError, r"the fold has no linears"),
        (
            {"weights": {"q": torch.ones(2, 3)}},
            InputError,
            r"q: weight is \[2, 3\], its input has 2 features",
        ),
        (
            {"weights": {"q": torch.full((2, 2), math.nan)}},
            InputError,
            r"q: weight holds NaN or Inf",
        ),
        (
            {"amax": torch.ones(3)},
            StatisticsError,
            r"q: channel_amax is \[3\], the fold needs \[2\]",
        ),
        (
            {"amax": torch.tensor([1.0, -1.0])},
            StatisticsError,
            r"negative value, NaN or Inf; measure again",
        ),
        ({"amax": torch.tensor([1.0, math.inf])}, StatisticsError, r"negative value, NaN or Inf"),
        (
            {"options": {"alpha": "auto", "linears": True}},
            StatisticsError,
            r"q\|input\|rows: the measurement does not hold",
        ),
    ],
)
def test_errors_name_what_disagrees(changes, error, message):
    given = {
        "weights": {"q": torch.ones(2, 2)},
        "amax": torch.ones(2),
        "options": {"alpha": 0.5, "linears": True},
    } | changes
    fold = fold_of(given["weights"], given["amax"], Absorber(norm_weight=torch.ones(2)))
    with pytest.raises(error, match=message):
        smoothquant.solve(fold, options=given["options"])


def test_a_sample_without_rows_is_refused():
    fold = fold_of({"q": torch.ones(2, 2)}, torch.ones(2), rows=torch.zeros(0, 2))
    with pytest.raises(StatisticsError, match=r"rows is \[0, 2\]"):
        smoothquant.solve(fold, options={"alpha": "auto", "linears": True})


def test_an_unknown_statistic_is_not_passed_on_unsmoothed():
    with pytest.raises(StatisticsError, match=r"statistic median has no rule"):
        smooth_statistics({"median": torch.ones(2)}, torch.ones(2))


# one scale per row, with compressed-tensors' divisor
def int8_rows(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    return (x / scale).round().clamp(-128, 127) * scale


def test_smoothing_takes_most_of_the_error_that_an_outlier_channel_causes():
    def int8(x: torch.Tensor) -> torch.Tensor:  # one scale per row, plain textbook
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * scale

    x, weight = random(256, 64), random(32, 64, seed=1)
    x[:, 7] *= 100
    factors = solve({"q": weight}, x.abs().amax(0), alpha=0.5).factors
    exact = x @ weight.T
    plain = (int8(x) @ int8(weight).T - exact).norm()
    smooth = (int8(x / factors) @ int8(weight * factors).T - exact).norm()
    assert smooth < 0.3 * plain


def test_the_automatic_alpha_is_the_one_of_least_output_error():
    """Against a search of ten lines over the same 21 alphas, on the same rows."""
    x, weight = random(256, 64), random(32, 64, seed=1)
    x[:, 7] *= 30
    amax_x, amax_w = x.abs().amax(0), weight.abs().amax(0)
    losses = {}
    for step in range(21):
        s = (amax_x.double() ** (step / 20) / amax_w.double() ** (1 - step / 20)).float()
        # what a norm of ones was really divided by: at int8's ties the last digit counts
        s = 1 / (1 / s)
        losses[step / 20] = (
            (int8_rows(x / s) @ int8_rows(weight * s).T - x @ weight.T).square().sum()
        )
    plain = (int8_rows(x) @ int8_rows(weight).T - x @ weight.T).square().sum()
    outcome = smoothquant.solve(
        fold_of({"q": weight}, amax_x, rows=x), options={"alpha": "auto", "linears": True}
    )
    found = outcome.decisions
    assert found["alpha"] == min(losses, key=losses.get) not in (0.0, 1.0)
    assert found["error"] == pytest.approx(
        float(min(losses.values()) / (x @ weight.T).square().sum()), rel=1e-4
    )
    assert found["error_before"] == pytest.approx(
        float(plain / (x @ weight.T).square().sum()), rel=1e-4
    )


def test_static_inputs_are_tried_with_the_range_that_they_will_have():
    """The outlier's channel alone decides a static range.

    The search sees that, and moves it into the weight.
    """
    x, weight = random(256, 64), random(32, 64, seed=1)
    x[:, 7] = 100 + x[:, 7]
    ranges = {"min_val": x.amin(0), "max_val": x.amax(0)}
    fold = fold_of({"q": weight}, x.abs().amax(0), scheme="W8A8_STATIC", rows=x, **ranges)
    found = smoothquant.solve(fold, options={"alpha": "auto", "linears": True}).decisions
    assert found["error"] < 0.2 * found["error_before"]
    scale = (x.amax() - x.amin().clamp_max(0)) / 255
    lost = (x / scale).round() * scale @ int8_rows(weight).T - x @ weight.T
    assert found["error_before"] == pytest.approx(
        float(lost.square().sum() / (x @ weight.T).square().sum()), rel=1e-2
    )


def test_a_fold_that_nothing_helps_is_left_as_it_is_and_says_so():
    """Every channel and column is the same: no factor but one, and the loss is that of nothing."""
    x, weight = torch.ones(8, 4), torch.ones(2, 4)
    outcome = smoothquant.solve(
        fold_of({"q": weight}, torch.ones(4), rows=x), options={"alpha": "auto", "linears": True}
    )
    assert outcome.smoothing is None
    assert outcome.decisions["alpha"] is None
    assert outcome.decisions["kept"] == "no alpha lowers the error"
    assert outcome.decisions["error"] == outcome.decisions["error_before"]


def test_the_search_is_the_same_on_two_workers():
    x, weight = random(128, 64), random(32, 64, seed=1)
    x[:, 3] *= 20
    fold, options = (
        fold_of({"q": weight}, x.abs().amax(0), rows=x),
        {"alpha": "auto", "linears": True},
    )
    with Workers(2) as workers:
        two = smoothquant.solve(fold, options=options, workers=workers)
    one = smoothquant.solve(fold, options=options)
    assert one.decisions == two.decisions
    assert torch.equal(one.smoothing.factors, two.smoothing.factors)


def test_linears_absorb_factors_where_alpha_is_searched_unless_the_recipe_says_otherwise():
    told = [
        ({"alpha": alpha, "linears": linears})
        for alpha in (0.5, "auto")
        for linears in (None, True, False)
    ]
    assert [smoothquant.checked(options)["linears"] for options in told] == [
        False,
        True,
        False,
        True,
        True,
        False,
    ]


def test_the_table_knows_it_by_name():
    assert TRANSFORMS["smoothquant"] is smoothquant
    assert smoothquant.needs({"alpha": 0.5, "linears": True}) == ("channel_amax",)
    assert smoothquant.needs({"alpha": "auto", "linears": True}) == ("channel_amax", "rows")

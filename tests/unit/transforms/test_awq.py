"""AWQ: by hand, a property, AutoAWQ's own steps, edges, errors, and why it exists."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.core.parallel import Workers
from quantflow.core.scheme import preset, with_group_size
from quantflow.errors import InputError, StatisticsError, UsageError
from quantflow.numerics.smoothing import Absorber, Fold
from quantflow.transforms import TRANSFORMS, awq
from tests.shared import random

OPTIONS = {"duo": "both", "clip": "auto", "linears": True}
SCHEME = with_group_size(preset("W4A16"), 16)


def unequal_inputs(rows: int = 256, features: int = 64) -> torch.Tensor:
    """Channels of very different sizes, as a trained model has them."""
    order = torch.randperm(features, generator=torch.Generator().manual_seed(3))
    return random(rows, features) * torch.logspace(-1, 1, features)[order]


def fold_of(weights, x, absorber=None, *, scheme=SCHEME, **statistics):
    features = x.shape[1]
    measured = {
        "abs_sum": x.abs().double().sum(0),
        "count": torch.tensor(len(x)),
        "hessian_sum": x.T @ x,
    }
    return Fold(
        weights=weights,
        schemes=dict.fromkeys(weights, scheme),
        scale_dtypes=dict.fromkeys(weights, torch.float32),
        statistics=measured | statistics,
        absorber=Absorber(norm_weight=torch.ones(features)) if absorber is None else absorber,
    )


def textbook(weight: torch.Tensor, size: int, bits: int = 4) -> torch.Tensor:
    """Round to nearest in groups, symmetric, with compressed-tensors' divisor."""
    split = weight.reshape(-1, size)
    half = 2 ** (bits - 1)
    scale = split.abs().amax(1, keepdim=True) / (half - 0.5)
    return ((split / scale).round().clamp(-half, half - 1) * scale).reshape(weight.shape)


def with_zeros(weight: torch.Tensor, size: int) -> torch.Tensor:
    """Asymmetric round to nearest in groups, as AutoAWQ's pseudo_quantize_tensor with four bits.

    With symmetric ranges the largest negative value lies halfway between two points, where the last
    digit decides.
    """
    split = weight.reshape(-1, size)
    high, low = split.amax(1, keepdim=True), split.amin(1, keepdim=True)
    scale = (high - low) / 15
    zeros = (-(low / scale).round()).clamp(0, 15)
    return (((split / scale).round() + zeros).clamp(0, 15) - zeros).mul(scale).reshape(weight.shape)


def autoawq(weights, x, size, *, duo):
    """Loss without scales, least loss and ratio, of AutoAWQ's _search_best_scale on outputs."""
    w = torch.cat(list(weights.values()))
    split = w.view(-1, size)
    w_mean = (split.abs() / (split.abs().amax(dim=1, keepdim=True) + 1e-6)).view(w.shape).mean(0)
    x_mean = x.abs().mean(0)
    losses = []
    for step in range(20):
        ratio = step / 20
        scales = x_mean.pow(ratio) / (w_mean.pow(1 - ratio) + 1e-4) if duo else x_mean.pow(ratio)
        scales = scales.clamp(min=1e-4)
        scales = scales / (scales.max() * scales.min()).sqrt()
        losses.append(float((x @ (with_zeros(w * scales, size) / scales - w).T).square().sum()))
    plain = float((x @ (with_zeros(w, size) - w).T).square().sum())
    return plain, min(losses), losses.index(min(losses)) / 20


@pytest.mark.parametrize("duo", [False, True])
def test_the_search_takes_the_step_of_autoawq(duo):
    x, weights = unequal_inputs(), {"q": random(24, 64, seed=1), "k": random(8, 64, seed=2)}
    plain, least, ratio = autoawq(weights, x, 16, duo=duo)
    power = float((x @ torch.cat(list(weights.values())).T).square().sum())
    scheme = with_group_size(preset("W4A16_ASYM"), 16)
    found = awq.solve(fold_of(weights, x, scheme=scheme), options=OPTIONS | {"duo": duo}).decisions
    assert (found["alpha"], found["duo"]) == (ratio, duo)
    assert found["error_before"] == pytest.approx(plain / power, rel=1e-3)
    assert found["error"] == pytest.approx(least / power, rel=1e-3)


def test_both_forms_take_the_better_of_the_two():
    x, weights = unequal_inputs(), {"q": random(24, 64, seed=1)}
    both = awq.solve(fold_of(weights, x), options=OPTIONS).decisions
    each = [
        awq.solve(fold_of(weights, x), options=OPTIONS | {"duo": duo}).decisions
        for duo in (False, True)
    ]
    assert both["error"] == min(found["error"] for found in each)


def test_factors_worked_by_hand(monkeypatch):
    """Means 1 and 16, alpha 0.5: 1 and 4, divided by sqrt(1 * 4) = 2."""
    monkeypatch.setattr(awq, "ALPHAS", (0.5,))
    x = torch.tensor([[1.0, 16.0], [-1.0, 16.0]])
    scheme = with_group_size(preset("W2A16"), 2)
    fold = fold_of({"q": torch.tensor([[1.0, 0.3], [1.0, 0.2]])}, x, scheme=scheme)
    smoothing = awq.solve(fold, options=OPTIONS | {"duo": False}).smoothing
    assert smoothing.factors.tolist() == [0.5, 2.0]
    assert smoothing.norm_weight.tolist() == [2.0, 0.5]


@settings(max_examples=25)
@given(
    st.integers(0, 2**31),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(["W4A16", "W3A16", "W8A16"]),
)
def test_the_error_is_never_larger_than_without(seed, dtype, scheme):
    x, weight = unequal_inputs(64, 32), random(8, 32, seed=seed)
    chosen = preset(scheme) if scheme == "W8A16" else with_group_size(preset(scheme), 16)
    fold = fold_of(
        {"q": weight},
        x,
        Absorber(norm_weight=(random(32, seed=seed + 1).abs() + 0.1).to(dtype)),
        scheme=chosen,
    )
    outcome = awq.solve(fold, options=OPTIONS)
    found = outcome.decisions
    assert 0 <= found["error"] <= found["error_before"]
    assert (outcome.smoothing is None) == (found["error"] == found["error_before"])
    if outcome.smoothing is not None:
        product = outcome.smoothing.factors * outcome.smoothing.norm_weight.float()
        torch.testing.assert_close(product, fold.absorber.norm_weight.float(), rtol=1e-6, atol=0)


def test_the_error_is_that_of_every_token():
    """tr(E H E^T) against the outputs themselves, with the factors that were found."""
    x, weight = unequal_inputs(), random(24, 64, seed=1)
    outcome = awq.solve(fold_of({"q": weight}, x), options=OPTIONS)
    s = outcome.smoothing.factors
    lost = x @ (textbook(weight * s, 16) / s - weight).T
    assert outcome.decisions["error"] == pytest.approx(
        float(lost.square().sum() / (x @ weight.T).square().sum()), rel=1e-3
    )


def test_dead_channels_keep_factor_one_and_do_not_move_the_others():
    x, weight = unequal_inputs(), random(24, 64, seed=1)
    alive = awq.solve(fold_of({"q": weight[:, :48]}, x[:, :48]), options=OPTIONS)
    x[:, 48:] = 0
    found = awq.solve(fold_of({"q": weight}, x), options=OPTIONS)
    assert torch.equal(found.smoothing.factors[48:], torch.ones(16))
    assert torch.allclose(found.smoothing.factors[:48], alive.smoothing.factors)


def test_a_fold_of_equal_channels_is_left_as_it_is():
    x = torch.eye(16)
    outcome = awq.solve(fold_of({"q": torch.ones(4, 16)}, x), options=OPTIONS)
    assert outcome.smoothing is None
    assert outcome.decisions["kept"] == "no factors lower the error"


def test_the_search_is_the_same_on_two_workers():
    fold = fold_of({"q": random(24, 64, seed=1)}, unequal_inputs())
    with Workers(2) as workers:
        two = awq.solve(fold, options=OPTIONS, workers=workers)
    assert awq.solve(fold, options=OPTIONS).decisions == two.decisions


def autoawq_clip(weight, x, size):
    """AutoAWQ's _compute_best_clip of a weight, on all tokens."""
    w, grouped = weight.reshape(len(weight), -1, size), x.reshape(len(x), -1, size)
    outputs = torch.einsum("tgi,ogi->tog", grouped, w)
    top = w.abs().amax(-1, keepdim=True)
    best, least = top.clone(), torch.full(w.shape[:2], torch.inf)
    for step in range(10):
        limit = top * (1 - step / 20)
        rounded = textbook(w.clamp(-limit, limit).reshape(weight.shape), size).reshape(w.shape)
        error = (torch.einsum("tgi,ogi->tog", grouped, rounded) - outputs).square().mean(0)
        better = error < least
        least, best = torch.where(better, error, least), torch.where(better[..., None], limit, best)
    return w.clamp(-best, best).reshape(weight.shape)


def test_the_clip_is_that_of_autoawq():
    x, weight = unequal_inputs(), random(24, 64, seed=1) ** 3
    found, shares = awq.clipped(
        {"q": weight}, SCHEME.weights, hessian_sum=x.T @ x, scale_dtype=torch.float32
    )
    expected = autoawq_clip(weight, x, 16)
    same = torch.isclose(found["q"], expected).reshape(24, 4, 16).all(-1)  # [O, G]
    assert same.float().mean() > 0.98  # of the groups; at a tie the last digit of a sum decides
    cut = (expected != weight).reshape(24, 4, 16).any(-1)
    assert shares["q"] == pytest.approx(float(cut.float().mean()), abs=0.02)
    assert 0.2 < shares["q"] < 1


def test_clipping_lowers_the_output_error_of_rounding():
    x, weight = unequal_inputs(), random(24, 64, seed=1) ** 3
    found, _ = awq.clipped(
        {"q": weight}, SCHEME.weights, hessian_sum=x.T @ x, scale_dtype=torch.float32
    )
    plain, cut = ((x @ (textbook(w, 16) - weight).T).square().sum() for w in (weight, found["q"]))
    assert cut < 0.9 * plain


@pytest.mark.parametrize("scheme", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK"])
def test_weights_whose_rows_have_no_integers_of_their_own_are_not_clipped(scheme):
    weights = {"q": random(4, 128)}
    found, shares = awq.clipped(
        weights, preset(scheme).weights, hessian_sum=torch.eye(128), scale_dtype=torch.float32
    )
    assert found["q"] is weights["q"]
    assert shares == {}


def test_clipping_is_the_same_on_two_workers_and_leaves_its_input_alone():
    x, weight = unequal_inputs(64, 1024), random(512, 1024, seed=1)
    before, told = weight.clone(), {"hessian_sum": x.T @ x, "scale_dtype": torch.bfloat16}
    with Workers(2) as workers:
        two, _ = awq.clipped({"q": weight}, SCHEME.weights, workers=workers, **told)
    one, _ = awq.clipped({"q": weight}, SCHEME.weights, **told)
    assert torch.equal(one["q"], two["q"])
    assert torch.equal(weight, before)


def test_rtn_alone_has_its_weights_clipped_unless_the_recipe_says_otherwise():
    assert [awq.clips(OPTIONS, whole_range=whole) for whole in (True, False)] == [True, False]
    assert awq.clips(OPTIONS | {"clip": True}, whole_range=False)
    assert not awq.clips(OPTIONS | {"clip": False}, whole_range=True)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"options": OPTIONS | {"duo": "yes"}},
            UsageError,
            r"awq duo='yes'; give true, false, both",
        ),
        (
            {"options": OPTIONS | {"clip": 0.5}},
            UsageError,
            r"awq clip=0\.5; give true, false, auto",
        ),
        (
            {"options": OPTIONS | {"linears": "auto"}},
            UsageError,
            r"awq linears='auto'; give true, false",
        ),
        ({"weights": {}}, InputError, r"the fold has no linears"),
        (
            {"weights": {"q": torch.ones(2, 32)}},
            InputError,
            r"q: weight is \[2, 32\], its input has 16 features",
        ),
        ({"weights": {"q": torch.full((2, 16), math.nan)}}, InputError, r"weight holds NaN or Inf"),
        (
            {"hessian_sum": torch.eye(8)},
            StatisticsError,
            r"q: hessian_sum is \[8, 8\], the fold needs \[16, 16\]",
        ),
        (
            {"abs_sum": -torch.ones(16)},
            StatisticsError,
            r"abs_sum holds a negative value, NaN or Inf",
        ),
        ({"count": torch.tensor(0)}, StatisticsError, r"count=0"),
    ],
)
def test_errors_name_what_disagrees(changes, error, message):
    options = changes.pop("options", OPTIONS)
    weights = changes.pop("weights", {"q": torch.ones(2, 16)})
    fold = fold_of(weights, torch.eye(16), **changes)
    with pytest.raises(error, match=message):
        awq.solve(fold, options=options)


def test_a_statistic_that_is_missing_is_named():
    fold = fold_of({"q": torch.ones(2, 16)}, torch.eye(16))
    fold.statistics.pop("abs_sum")
    with pytest.raises(
        StatisticsError, match=r"q\|input\|abs_sum: the measurement does not hold it; measure again"
    ):
        awq.solve(fold, options=OPTIONS)


def test_enlarging_what_matters_lowers_the_output_error_and_raises_that_of_the_weight():
    """Why it exists: with a few salient channels, rounding costs less there and more elsewhere."""
    x, weight = random(512, 256), random(96, 256, seed=1)
    x[:, ::64] *= 20
    s = awq.solve(
        fold_of({"q": weight}, x, scheme=preset("W4A16")), options=OPTIONS
    ).smoothing.factors
    plain, smooth = textbook(weight, 128) - weight, textbook(weight * s, 128) / s - weight
    assert (x @ smooth.T).square().sum() < 0.6 * (x @ plain.T).square().sum()
    assert smooth.square().sum() > plain.square().sum()


def test_the_table_knows_it_by_name():
    assert TRANSFORMS["awq"] is awq
    assert awq.needs(OPTIONS) == ("abs_sum", "hessian_sum", "count")

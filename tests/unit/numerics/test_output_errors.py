"""Output errors of rounding, beside round to nearest: by hand, against outputs, at the edges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.algorithms import gptq, rtn
from quantflow.core import groups
from quantflow.core.parallel import Workers
from quantflow.core.qtensor import QTensor
from quantflow.core.scheme import LinearScheme, TensorScheme, preset, with_group_size
from quantflow.numerics import output_errors
from quantflow.numerics.feedback import feedback_of
from quantflow.numerics.output_errors import ROWS, SecondMoment, compared, moment_of, unchanged
from tests.shared import random

W4_G32 = with_group_size(preset("W4A16"), 32)
W4_G32_ASYM = with_group_size(preset("W4A16_ASYM"), 32)
FP8_BLOCK = with_group_size(preset("FP8_BLOCK"), 32)
SCHEMES = [W4_G32, W4_G32_ASYM, preset("W8A16"), preset("FP8"), preset("FP8_DYNAMIC"), FP8_BLOCK]


def of(x):
    hessian = x.T @ x
    return SecondMoment(upper=hessian, diagonal=hessian.diagonal())


def nearest(weights, scheme):
    results = rtn.quantize_group(weights, scheme, statistics={}, scale_dtype=torch.float32)
    return {name: result.weight for name, result in results.items()}


def told(weight, result, x):
    return compared({"w": weight}, {"w": result}, of(x), scale_dtype=torch.float32)["w"]


def output_error(weight, result, x):
    weight, approximation, x = weight.double(), result.dequantize().double(), x.double()
    return float((x @ (weight - approximation).T).norm() / (x @ weight.T).norm())


def test_one_row_worked_by_hand():
    # 4 bits of a row whose largest value is 7.5 have the scale 1. Rounded up instead of down, 2.25
    # is off by 0.75, not 0.25, of which the error of 0.5 in the other column takes some back: H =
    # [[2, 1], [1, 4]].
    scheme = TensorScheme(kind="int", num_bits=4, granularity="per_channel")
    weight, hessian = torch.tensor([[2.25, -7.5]]), torch.tensor([[2.0, 1.0], [1.0, 4.0]])
    made = QTensor(
        qvalue=torch.tensor([[3, -8]], dtype=torch.int8), scale=torch.ones(1, 1), scheme=scheme
    )
    moment = SecondMoment(upper=hessian, diagonal=hessian.diagonal())
    found = compared({"w": weight}, {"w": made}, moment, scale_dtype=torch.float32)["w"]
    power = 2 * 2.25**2 - 2 * 2.25 * 7.5 + 4 * 7.5**2
    assert found["output_error"] == pytest.approx(
        math.sqrt((2 * 0.75**2 - 2 * 0.75 * 0.5 + 4 * 0.5**2) / power)
    )
    assert found["output_error_rtn"] == pytest.approx(
        math.sqrt((2 * 0.25**2 + 2 * 0.25 * 0.5 + 4 * 0.5**2) / power)
    )
    assert found["same_as_rtn"] is False


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_errors_are_those_of_the_outputs(scheme):
    weight, x = random(32, 64), random(200, 64, seed=1) * torch.logspace(-1, 1, 64)
    worse = nearest({"w": weight + 0.05 * random(32, 64, seed=2)}, scheme)["w"]
    found = told(weight, worse, x)
    assert found["output_error"] == pytest.approx(output_error(weight, worse, x), rel=1e-4)
    assert found["output_error_rtn"] == pytest.approx(
        output_error(weight, nearest({"w": weight}, scheme)["w"], x), rel=1e-4
    )
    assert found["output_error"] > found["output_error_rtn"] > 0


def test_of_a_tall_weight_rows_at_equal_distances_stand_for_all():
    weight, x = random(4 * ROWS, 64), random(200, 64, seed=1)
    made = nearest({"w": weight}, W4_G32)["w"]
    found, rows = told(weight, made, x)["output_error"], slice(None, None, 4)
    part = QTensor(qvalue=made.qvalue[rows], scale=made.scale[rows], scheme=made.scheme)
    assert found == pytest.approx(output_error(weight[rows], part, x), rel=1e-4)
    assert found == pytest.approx(output_error(weight, made, x), rel=0.1)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_what_round_to_nearest_makes_is_the_same_as_rtn(scheme):
    weights, moment = (
        {"a": random(96, 64), "b": 3 * random(40, 64, seed=1)},
        of(random(9, 64, seed=2)),
    )  # one shared scale, of FP8
    found = compared(weights, nearest(weights, scheme), moment, scale_dtype=torch.float32)
    for name in weights:
        assert found[name]["same_as_rtn"] is True
        assert found[name]["output_error"] == found[name]["output_error_rtn"]


@pytest.mark.parametrize("what", ["qvalue", "scale", "zero_point"])
@pytest.mark.parametrize("row", [0, 77, 299])
def test_one_value_that_differs_in_any_row_is_not_the_same(monkeypatch, what, row):
    monkeypatch.setattr(groups, "UNIT_ELEMENTS", 64 * 64)  # five units of rows
    weight = random(300, 64)
    made = nearest({"w": weight}, W4_G32_ASYM)["w"]
    tensor = getattr(made, what)
    tensor[row, -1] = tensor[row, -1] * 1.5 if what == "scale" else (tensor[row, -1] ^ 1)
    assert told(weight, made, random(9, 64, seed=1))["same_as_rtn"] is False


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 40), st.sampled_from([3, 64, 300]), st.floats(-30, 30))
def test_a_moment_gives_the_squared_lengths_of_outputs(seed, count, features, power):
    x, rows = random(50, features, seed=seed) * 2.0**power, random(count, features, seed=seed + 1)
    expected = (x.double() @ rows.double().T).square().sum(dim=0)
    torch.testing.assert_close(of(x).powers(rows), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("in_place", [False, True])
def test_the_factored_matrix_is_still_the_moment(in_place):
    x, rows = random(600, 300) * torch.logspace(-1, 1, 300), random(20, 300, seed=1)
    feedback = feedback_of(x.T @ x, name="w", in_place=in_place)
    found = moment_of(feedback).powers(rows)
    expected = of(x).powers(rows)
    torch.testing.assert_close(found / found[0], expected / expected[0], rtol=1e-4, atol=0)


def test_it_still_is_where_the_first_damping_did_not_suffice():
    x, rows = random(40, 8), random(5, 8, seed=1)
    hessian = x.T @ x
    # no sum of x^T x
    hessian[1, 0] = hessian[0, 1] = 1.05 * math.sqrt(hessian[0, 0] * hessian[1, 1])
    feedback = feedback_of(hessian, name="w")
    assert feedback.decisions["attempts"] > 1
    found, expected = (
        moment_of(feedback).powers(rows),
        torch.einsum("ri,ij,rj->r", rows, hessian, rows).double(),
    )
    torch.testing.assert_close(found / found[0], expected / expected[0], rtol=1e-4, atol=0)


def test_an_output_of_zeros_has_no_relative_error():
    silent, weight = torch.zeros(9, 32), random(8, 32)
    assert told(weight, nearest({"w": weight}, W4_G32)["w"], silent)["output_error"] == 0.0
    doubled = nearest({"w": torch.ones(8, 32)}, W4_G32)["w"]
    assert told(torch.zeros(8, 32), doubled, random(9, 32))["output_error"] is None
    assert compared({}, {}, of(silent), scale_dtype=torch.float32) == {}


def test_workers_and_neighbours_change_nothing():
    weights, moment = {str(i): random(40, 64, seed=i) for i in range(4)}, of(random(90, 64, seed=9))
    made = nearest(weights, W4_G32)
    alone = {
        name: compared(
            {name: weights[name]}, {name: made[name]}, moment, scale_dtype=torch.float32
        )[name]
        for name in weights
    }
    with Workers(2) as workers:
        assert compared(weights, made, moment, scale_dtype=torch.float32, workers=workers) == alone


def test_gptq_tells_of_all_its_linears_and_its_error_is_the_smaller_one():
    weights, x = (
        {"a": random(48, 64), "b": random(16, 64, seed=1)},
        random(500, 16, seed=2) @ random(16, 64, seed=3),
    )
    statistics = {"hessian_sum": x.T @ x, "count": torch.tensor(len(x))}
    results = gptq.quantize_group(weights, W4_G32, statistics=statistics, scale_dtype=torch.float32)
    for name, result in results.items():
        decisions, rows = (
            result.decisions,
            output_errors.sampled_rows(len(weights[name]), most=ROWS),
        )
        part = QTensor(
            qvalue=result.weight.qvalue[rows],
            scale=result.weight.scale[rows],
            scheme=W4_G32.weights,
        )
        assert decisions["output_error"] == pytest.approx(
            output_error(weights[name][rows], part, x), rel=1e-3
        )
        assert decisions["output_error"] < 0.9 * decisions["output_error_rtn"]
        assert decisions["same_as_rtn"] is False


def test_gptq_without_correlation_on_a_grid_that_fits_is_round_to_nearest():
    # 15 values at distance 1 with 7.5 among them: the whole range loses nothing, and no column owes
    # another anything.
    scheme = LinearScheme(
        name="test",
        weights=TensorScheme(kind="int", num_bits=8, granularity="per_channel"),
        input=None,
        layout="pack-quantized",
    )
    weight = torch.arange(-16.0, 16.0)[None] * 4
    weight[0, 0] = -127.5
    statistics = {"hessian_sum": torch.eye(32), "count": torch.tensor(1)}
    result = gptq.quantize_group(
        {"w": weight}, scheme, statistics=statistics, scale_dtype=torch.float32
    )["w"]
    assert result.decisions["same_as_rtn"] is True


def test_nothing_changed_only_if_every_linear_that_was_compared_is_rtns():
    same, other, silent = {"same_as_rtn": True}, {"same_as_rtn": False}, {"zero_groups": 0}
    assert unchanged({"a": same, "b": same, "c": silent})
    assert not unchanged({"a": same, "b": other})
    assert not unchanged({"a": silent}) and not unchanged({})


def test_what_it_takes_is_a_few_rows_or_a_unit():
    assert output_errors.working_bytes(512) == groups.unit_bytes(512)
    assert output_errors.working_bytes(1 << 18) == max(
        groups.unit_bytes(1 << 18), 9 * 4 * ROWS << 18
    )

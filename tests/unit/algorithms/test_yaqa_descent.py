"""Descent: scales by least squares, steps one at a time, losses against plain algebra."""

import itertools
from dataclasses import replace

import pytest
import torch

from quantflow.algorithms.yaqa import descent
from quantflow.algorithms.yaqa.descent import Problem, Side, apart, descend_, loss_of, rescaled
from quantflow.core.scheme import TensorScheme
from quantflow.numerics.grid import Grid
from tests.shared import random

SCHEME = TensorScheme(kind="int", num_bits=4, granularity="per_channel")


def problem_of(weight, *, groups=1, zero_point=None, outputs=None, inputs=None, scale=0.3):
    rows, columns = weight.shape
    g, x = random(3 * rows, rows, seed=1), random(3 * columns, columns, seed=2)
    return Problem(
        weight=weight,
        grid=Grid(scale=torch.full((rows, groups), scale), zero_point=zero_point, zero_groups=0),
        scheme=SCHEME,
        scale_dtype=torch.float32,
        outputs=Side(matrix=g.T @ g if outputs is None else outputs, damping=0.5),
        inputs=Side(matrix=x.T @ x if inputs is None else inputs, damping=0.25),
    )


def nearest(problem):
    columns = problem.weight.shape[1]
    scale = problem.grid.scale.repeat_interleave(columns // problem.grid.scale.shape[1], 1)
    zero_point = (
        0
        if problem.grid.zero_point is None
        else problem.grid.zero_point.repeat_interleave(columns, 1)
    )
    return (problem.weight / scale + zero_point).round().clamp(-8, 7).to(torch.int8)


def plain_loss(problem, real):
    errors = (problem.weight - real).double()
    outputs, inputs = (
        side.matrix.double() + side.damping * torch.eye(len(side.matrix), dtype=torch.float64)
        for side in (problem.outputs, problem.inputs)
    )
    return float((outputs @ errors @ inputs @ errors.T).trace())


def test_the_loss_is_the_trace():
    problem = problem_of(random(5, 8))
    qvalue = nearest(problem)
    assert loss_of(problem, qvalue) == pytest.approx(
        plain_loss(problem, 0.3 * qvalue.float()), rel=1e-5
    )
    assert loss_of(problem, None) == pytest.approx(plain_loss(problem, torch.zeros(5, 8)), rel=1e-5)


def test_rows_of_a_block_lie_far_apart_and_every_row_is_in_one():
    assert [block.tolist() for block in apart(7, 3)] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [block.tolist() for block in apart(2, 8)] == [[0, 1]]
    assert sorted(torch.cat(apart(130, 128)).tolist()) == list(range(130))


def test_a_scale_is_fitted_by_least_squares_worked_by_hand():
    # H = diag(1, 3) + 1/4, d = (2, -1), w = (1.3, -0.5): s = (2 * 1.3 * 1.25 + 0.5 * 3.25) / (4 *
    # 1.25 + 3.25) = 4.875 / 8.25
    problem = problem_of(
        torch.tensor([[1.3, -0.5]]),
        outputs=torch.ones(1, 1),
        inputs=torch.diag(torch.tensor([1.0, 3.0])),
    )
    fitted = rescaled(
        replace(problem, grid=replace(problem.grid, scale=torch.tensor([[0.5]]))),
        torch.tensor([[2, -1]]).char(),
    )
    assert fitted.grid.scale.item() == pytest.approx(4.875 / 8.25, rel=1e-5)


def test_scales_of_one_row_are_the_solution_of_the_normal_equations():
    weight, zero_point = random(1, 12, seed=5), torch.tensor([[1, -2, 0]], dtype=torch.int8)
    problem = problem_of(weight, groups=3, scale=0.3)
    problem = replace(problem, grid=replace(problem.grid, zero_point=zero_point))
    points = (weight / 0.3).round()
    fitted = rescaled(problem, (points + zero_point.repeat_interleave(4, 1)).to(torch.int8))
    basis = torch.block_diag(*points.view(3, 1, 4)).double()  # [G, I]
    hessian = problem.inputs.matrix.double() + 0.25 * torch.eye(12, dtype=torch.float64)
    expected = torch.linalg.solve(basis @ hessian @ basis.T, basis @ hessian @ weight.double().T)[
        :, 0
    ]
    torch.testing.assert_close(fitted.grid.scale[0].double(), expected, rtol=1e-4, atol=0)
    assert fitted.grid.zero_point is problem.grid.zero_point


def test_a_negative_scale_is_fitted_and_keeps_its_sign():  # the same equation, d turned
    problem = problem_of(
        torch.tensor([[1.3, -0.5]]),
        outputs=torch.ones(1, 1),
        inputs=torch.diag(torch.tensor([1.0, 3.0])),
    )
    turned = replace(problem, grid=replace(problem.grid, scale=torch.tensor([[-0.5]])))
    assert rescaled(turned, torch.tensor([[-2, 1]]).char()).grid.scale.item() == pytest.approx(
        -4.875 / 8.25, rel=1e-5
    )
    # never through zero
    assert rescaled(turned, torch.tensor([[2, -1]]).char()).grid.scale.item() == -0.5


@pytest.mark.parametrize("seed", range(3))
def test_negative_scales_are_positive_ones_of_the_turned_weight(seed):
    weight = 2 * random(20, 16, seed=seed)
    one, other = problem_of(weight, groups=2), problem_of(-weight, groups=2, scale=-0.3)
    qvalue, same = nearest(one), nearest(one)
    assert loss_of(other, same) == loss_of(one, qvalue)
    one, other = rescaled(one, qvalue), rescaled(other, same)
    assert torch.equal(other.grid.scale, -one.grid.scale)
    assert not torch.equal(one.grid.scale, torch.full_like(one.grid.scale, 0.3))
    for problem, points in ((one, qvalue), (other, same)):
        descend_(problem, points)
    assert torch.equal(qvalue, same) and not torch.equal(
        qvalue, nearest(problem_of(weight, groups=2))
    )


@pytest.mark.parametrize("length", [1, 3, 128])
def test_fitted_scales_never_lose_more_whatever_the_blocks(monkeypatch, length):
    monkeypatch.setattr(descent, "_ROWS", length)
    problem = problem_of(random(9, 16, seed=3), groups=2)
    qvalue = nearest(problem)
    fitted = rescaled(problem, qvalue)
    assert loss_of(fitted, qvalue) < loss_of(problem, qvalue)


def test_a_scale_that_would_more_than_double_is_left_and_a_group_of_zeros_keeps_its_own():
    problem = problem_of(torch.tensor([[3.0, 3.0, 0.01, 0.0]]), groups=2)
    fitted = rescaled(problem, torch.tensor([[1, 1, 0, 0]], dtype=torch.int8))
    assert torch.equal(fitted.grid.scale, problem.grid.scale)


def test_scales_are_what_their_layout_stores():
    problem = replace(problem_of(random(4, 8)), scale_dtype=torch.bfloat16)
    scale = rescaled(problem, nearest(problem)).grid.scale
    # 0.3 is none of bfloat16, and stays where a fit is refused
    changed = scale != problem.grid.scale
    assert changed.any() and torch.equal(scale[changed], scale[changed].bfloat16().float())


@pytest.mark.parametrize("length", [1, 2, 128])
def test_one_column_ends_where_no_step_of_a_single_row_helps(monkeypatch, length):
    """All 16^3 roundings of three weights: the end is no worse than any one step away."""
    monkeypatch.setattr(descent, "_ROWS", length)
    problem = problem_of(torch.tensor([[0.4], [-0.7], [0.9]]), scale=0.25)
    qvalue = nearest(problem)
    for _ in range(10):
        descend_(problem, qvalue)
    losses = {
        point: plain_loss(problem, 0.25 * torch.tensor(point)[:, None])
        for point in itertools.product(range(-8, 8), repeat=3)
    }
    end = tuple(qvalue[:, 0].tolist())
    for row, step in itertools.product(range(3), (-1, 1)):
        other = tuple(value + step * (index == row) for index, value in enumerate(end))
        assert losses[end] <= losses.get(other, float("inf")) * (1 + 1e-6)
    assert losses[end] < losses[tuple(nearest(problem)[:, 0].tolist())]


def test_a_pass_never_ends_higher_and_stays_in_range():
    problem = problem_of(3 * random(20, 16, seed=7))  # many at the ends of the range
    qvalue = nearest(problem)
    before = loss_of(problem, qvalue)
    descend_(problem, qvalue)
    assert loss_of(problem, qvalue) < before
    assert int(qvalue.min()) >= -8 and int(qvalue.max()) <= 7

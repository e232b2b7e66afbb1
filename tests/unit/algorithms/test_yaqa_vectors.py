"""YAQA onto codebooks: beside Schur complements, and a search through every entry and sign."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from quantflow.algorithms.yaqa import vectors
from quantflow.algorithms.yaqa.descent import Problem, Side, descend_, loss_of
from quantflow.core import codebooks
from quantflow.core.block_types import BLOCK_TYPES
from quantflow.core.scheme import preset
from quantflow.numerics.feedback import feedback_of, order_of_units, round_units_
from quantflow.numerics.grid import Grid
from tests.shared import random

NAMES = [name for name, kind in BLOCK_TYPES.items() if kind.codebook is not None]
COLUMNS = 256


def correlated(size: int, *, seed: int) -> torch.Tensor:
    x = random(2 * size, size, seed=seed) + random(2 * size, 1, seed=seed + 1)
    return x.T @ x


def scheme_of(name: str):
    return preset(name).weights


def grid_of(rows: int, name: str) -> Grid:
    kind = BLOCK_TYPES[name]
    scale = torch.full((rows, COLUMNS // kind.group_size), 2.0 / kind.points[-1])
    scale *= torch.linspace(0.8, 1.2, rows)[:, None]
    return Grid(scale=scale, zero_point=None, zero_groups=0)


def whole(grid: Grid) -> torch.Tensor:
    return grid.scale.repeat_interleave(COLUMNS // grid.scale.shape[1], 1)


def problem_of(rows: int, name: str) -> Problem:
    return Problem(
        weight=random(rows, COLUMNS),
        grid=grid_of(rows, name),
        scheme=scheme_of(name),
        scale_dtype=torch.float32,
        outputs=Side(matrix=correlated(rows, seed=1), damping=0.5),
        inputs=Side(matrix=correlated(COLUMNS, seed=3), damping=2.0),
    )


def nearest(problem: Problem) -> torch.Tensor:
    kind = problem.scheme.block
    assert kind is not None
    return codebooks.round_(problem.weight / whole(problem.grid), kind).to(torch.int8)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_aims_where_the_rows_still_free_would_follow_it(name):
    weight, grid, matrix = random(6, COLUMNS), grid_of(6, name), correlated(6, seed=1)
    kind, parts = BLOCK_TYPES[name], [torch.tensor([row]) for row in (4, 1, 5, 0, 2, 3)]
    order = torch.cat(parts)
    rows = feedback_of(matrix, name="w", dampings=(0.1,), order=order)
    units = order_of_units(torch.ones(COLUMNS), codebooks.unit(kind))
    columns = feedback_of(torch.eye(COLUMNS), name="w", order=units)
    damped = matrix.double() + rows.damping * torch.eye(6)
    found = vectors.round_rows(
        weight, grid, scheme=scheme_of(name), rows=rows, parts=parts, columns=columns
    )
    # with uncorrelated inputs a row is rounded to the entries nearest to its aim
    errors, done = torch.zeros(6, COLUMNS, dtype=torch.float64), []
    for row in reversed(order.tolist()):
        free = [other for other in range(6) if other != row and other not in done]
        fixed = [row, *done]
        left = damped[fixed][:, fixed]
        if free:
            across = damped[fixed][:, free]
            left = left - across @ torch.linalg.solve(damped[free][:, free], across.T)
        aim = weight[row] + (left[0, 1:] @ errors[done] / left[0, 0]).float()
        scale = whole(grid)[row]
        expected = codebooks.round_((aim / scale)[None], kind)[0]
        assert (found[row] == expected).float().mean() > 0.98  # but for near ties
        errors[row] = (weight[row] - found[row] * scale).double()
        done.append(row)


@pytest.mark.parametrize("name", NAMES)
def test_a_single_row_is_rounded_as_gptq_rounds_it(name):
    weight, grid, hessian = random(1, COLUMNS), grid_of(1, name), correlated(COLUMNS, seed=3)
    order = order_of_units(hessian.diagonal(), codebooks.unit(BLOCK_TYPES[name]))
    columns = feedback_of(hessian, name="w", order=order)
    part = torch.tensor([0])
    rows = feedback_of(torch.ones(1, 1), name="w", order=part)
    scheme = scheme_of(name)
    found = vectors.round_rows(
        weight, grid, scheme=scheme, rows=rows, parts=[part], columns=columns
    )
    work = weight.T[order].contiguous()
    expected = round_units_(work, grid.scale.T.contiguous(), scheme=scheme, feedback=columns)
    assert torch.equal(found, expected.T)


def test_no_entry_of_a_unit_makes_the_descended_weight_better():
    name = "IQ3_S"
    # signs are those of the aim, which is best where inputs of a unit do not go together
    matrix = torch.kron(correlated(COLUMNS // 4, seed=3), torch.eye(4))
    problem = replace(problem_of(3, name), inputs=Side(matrix=matrix, damping=2.0))
    qvalue = nearest(problem)
    for _ in range(60):
        before = qvalue.clone()
        descend_(problem, qvalue)
        if torch.equal(before, qvalue):
            break
    table = codebooks.entries(BLOCK_TYPES[name], torch.device("cpu")).double()
    signs = torch.tensor(list(itertools.product((1.0, -1.0), repeat=4)), dtype=torch.float64)
    every = (table[:, None] * signs).view(-1, 4)
    outputs = problem.outputs.matrix.double() + 0.5 * torch.eye(3)
    inputs = problem.inputs.matrix.double() + 2.0 * torch.eye(COLUMNS)
    scale = whole(problem.grid).double()
    gradient = outputs @ (problem.weight - qvalue * scale) @ inputs
    floor = 1e-5 * loss_of(problem, qvalue)
    assert floor > 0
    for row, start in itertools.product(range(3), range(0, COLUMNS, 4)):
        at = slice(start, start + 4)
        steps = (every - qvalue[row, at]) * scale[row, at]
        gains = 2 * steps @ gradient[row, at]
        gains -= outputs[row, row] * ((steps @ inputs[at, at]) * steps).sum(dim=1)
        assert gains.max() < floor, (row, start)


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_lowers_the_loss_and_ends_on_entries(name):
    problem = problem_of(40, name)
    qvalue = nearest(problem)
    start = loss_of(problem, qvalue)
    descend_(problem, qvalue)
    assert loss_of(problem, qvalue) < 0.65 * start
    kind = problem.scheme.block
    assert kind is not None
    assert codebooks.holds(qvalue, kind)


def test_rows_move_one_after_the_other_worked_by_hand():
    # Two outputs that count only together: both rows want the step, one is enough.
    left = torch.ones(1, 2).numpy()
    steps, ones, metric = torch.ones(1, 2).numpy(), torch.ones(2, 2).numpy(), left[:, :1]
    # gains of 2 * 1 - 1 each; after the first moves, the other's is 2 * (1 - 1) - 1
    assert vectors._moving_rows(steps, left, ones, metric) == [0]
    apart = torch.eye(2).numpy()
    assert vectors._moving_rows(steps, left, apart, metric) == [0, 1]


def positive(size: int, *, seed: int) -> torch.Tensor:
    """A symmetric positive matrix whose rows go together, [size, size]."""
    mixed = random(3 * size, size, seed=seed) @ random(size, size, seed=seed + 1)
    return mixed.T @ mixed / len(mixed) + 0.1 * torch.eye(size)


def entries_of(kind, rows: int, columns: int, *, seed: int) -> torch.Tensor:
    """Qvalues that are entries, [columns, rows]."""
    values = random(rows, columns, seed=seed) * kind.points[-1] / 2
    return codebooks.round_(values, kind).T.contiguous()


def moved(kind, now, gradient, *, scales, coupling, matrix):
    """The qvalues and the change of the rounded weights, without changing the arguments."""
    now = now.clone()
    change = vectors.moves_(
        now,
        gradient.clone(),
        scales=scales,
        coupling=coupling,
        matrix=matrix,
        damping=0.0,
        scheme=scheme_of(kind.name),
    )
    return now, change


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_a_single_unit_takes_the_entry_that_loses_least_of_all(name, seed):
    kind = BLOCK_TYPES[name]
    size, scale, coupling = codebooks.unit(kind), 0.02, 1.7
    metric = torch.diag(random(size, seed=seed).square() + 0.1)  # signs are then those of the aim
    weight = random(1, size, seed=seed + 20) * scale * kind.points[-1] / 2
    start = entries_of(kind, 1, size, seed=seed + 40)
    errors = weight.T - start * scale
    found, change = moved(
        kind,
        start,
        coupling * (metric @ errors),
        scales=torch.full((1, 1), scale),
        coupling=torch.full((1, 1), coupling),
        matrix=metric,
    )

    def loss(values: torch.Tensor) -> float:
        left = weight.T.double() - values.double() * scale
        return float((left.T @ metric.double() @ left).squeeze())

    best = codebooks.round_units(weight / scale, kind, metric).T  # tested beside a search of all
    assert loss(found) == pytest.approx(min(loss(best), loss(start)), rel=1e-5)
    assert torch.allclose(change, (found - start) * scale)


def plain(kind, now, weight, *, scales, outputs, inputs):
    """The same moves in float64, every gain from the errors of all weights."""
    now, size = now.T.double().numpy().copy(), codebooks.unit(kind)
    scale = scales.T.double().numpy().repeat(now.shape[1] // len(scales), axis=1)
    weight, outputs, inputs = (part.double().numpy() for part in (weight, outputs, inputs))
    for first in range(0, now.shape[1], size):
        unit = slice(first, first + size)
        metric = inputs[unit, unit]
        half_gradient = outputs @ (weight - now * scale) @ inputs
        curve = outputs.diagonal()[:, None] * scale[:, unit][:, :1]
        aims = now[:, unit] + np.linalg.solve(metric, half_gradient[:, unit].T).T / curve
        wanted = codebooks.round_units(
            torch.from_numpy(aims).float().contiguous(), kind, torch.from_numpy(metric).float()
        )
        moves = (wanted.double().numpy() - now[:, unit]) * scale[:, unit]
        free = set(range(len(now)))
        while free:
            half_gradient = (outputs @ (weight - now * scale) @ inputs)[:, unit]
            gains = {
                row: 2 * moves[row] @ half_gradient[row]
                - outputs[row, row] * moves[row] @ metric @ moves[row]
                for row in free
            }
            row = max(gains, key=lambda each: gains[each])
            if not gains[row] > 0:
                break
            now[row, unit] += moves[row] / scale[row, unit]
            free.remove(row)
    return torch.from_numpy(now).float().T


@pytest.mark.parametrize("name", NAMES)
def test_every_move_is_that_of_the_formulas_and_gains(name):
    kind, rows, columns = BLOCK_TYPES[name], 6, 256
    outputs, inputs = positive(rows, seed=3), positive(columns, seed=5)
    scales = random(columns // kind.group_size, rows, seed=7).abs() * 0.01 + 0.01
    weight = random(rows, columns, seed=9) * 0.015 * kind.points[-1] / 2
    start = entries_of(kind, rows, columns, seed=11)
    each = scales.repeat_interleave(kind.group_size, dim=0)
    errors = weight.T - start * each
    found, change = moved(
        kind,
        start,
        inputs @ errors @ outputs,
        scales=scales,
        coupling=outputs,
        matrix=inputs,
    )
    expected = plain(kind, start, weight, scales=scales, outputs=outputs, inputs=inputs)
    assert torch.equal(found, expected)
    assert torch.allclose(change, (found - start) * each, atol=1e-6)
    assert codebooks.holds(found.T.to(torch.int8).contiguous(), kind)

    def loss(values: torch.Tensor) -> float:
        left = (weight.T - values * each).double()
        return float((inputs.double() @ left @ outputs.double() * left).sum())

    assert loss(found) < 0.5 * loss(start)


def test_a_row_without_gradients_stays():
    kind = BLOCK_TYPES["IQ2_XS"]
    matrix = positive(64, seed=1)
    start = entries_of(kind, 2, 64, seed=2)
    coupling = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    weight = random(64, 2, seed=3) * 0.02 * kind.points[-1] / 2
    gradient = matrix @ (weight - 0.02 * start) @ coupling
    scales = torch.full((64 // kind.group_size, 2), 0.02)
    found, change = moved(kind, start, gradient, scales=scales, coupling=coupling, matrix=matrix)
    assert torch.equal(found[:, 0], start[:, 0])
    assert not change[:, 0].any()
    assert change[:, 1].any()

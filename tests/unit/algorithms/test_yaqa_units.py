"""Descent over entries of a codebook: beside a search of all entries, and beside plain formulas."""

import numpy as np
import pytest
import torch

from quantflow.algorithms.yaqa import units
from quantflow.core import codebooks
from quantflow.core.block_types import BLOCK_TYPES
from tests.shared import random

CODEBOOKS = ("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS")


def positive(size: int, *, seed: int) -> torch.Tensor:
    """A symmetric positive matrix whose rows go together, [size, size]."""
    mixed = random(3 * size, size, seed=seed) @ random(size, size, seed=seed + 1)
    return mixed.T @ mixed / len(mixed) + 0.1 * torch.eye(size)


def entries_of(kind, rows: int, columns: int, *, seed: int) -> torch.Tensor:
    """Qvalues that are entries, [columns, rows]."""
    values = random(rows, columns, seed=seed) * kind.points[-1] / 2
    return codebooks.round_(values, kind).T.contiguous()


def moved(kind, now, gradient, *, scales, coupling, matrix, damping=0.0):
    """The qvalues and the change of the rounded weights, without changing the arguments."""
    now = now.clone()
    change = units.moves_(
        now,
        gradient.clone(),
        scales=scales,
        coupling=coupling,
        matrix=matrix,
        curves=(matrix.diagonal() + damping).tolist(),
        kind=kind,
    )
    return now, change


@pytest.mark.parametrize("name", CODEBOOKS)
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


@pytest.mark.parametrize("name", CODEBOOKS)
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

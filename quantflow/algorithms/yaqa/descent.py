"""Descent from a rounded weight to a better one: steps of single weights, and scales that fit, under a loss with two sides.

The loss of errors E = W - Q, [O, I], is tr(G E H E^T) with G [O, O] and H [I, I] symmetric and
positive: how much an error is felt depends on those in the other rows and in the other columns.
Half its gradient by Q is -G E H.

Rows are taken in blocks (`apart`) whose gradient is computed once and kept exact while they change.
Source: Behdin et al. 2023, "QuantEase", arXiv:2309.01885, for the descent by columns, there with G
= 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantflow.algorithms.yaqa.points import nearest_, unit
from quantflow.core import affine, groups
from quantflow.core.scheme import TensorScheme
from quantflow.numerics.feedback import per_row
from quantflow.numerics.grid import Grid

_ROWS = 128  # of a block; part of the result, because it orders what is done
_COLUMNS = 64  # whose changes reach the gradient of the columns after them in one product; likewise
Row = NDArray[np.float32]
# a scale that would grow or shrink by more is left: its weights are too few to say what it should
# be
_FARTHEST = 2.0


@dataclass(frozen=True, kw_only=True)
class Side:
    """A damped sum of x^T x, whose damping is not in it but beside it.  matrix: [K, K] float32."""

    matrix: Tensor
    damping: float

    def times(self, x: Tensor) -> Tensor:
        """Return (matrix + damping) @ x.  x: [K, n]."""
        return (self.matrix @ x).add_(x, alpha=self.damping)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be rounded, onto what, and how errors count.

    Attributes:
        weight: [O, I], any float dtype.
        grid: the scales of its points and zero points, one scale or more for each row.
        scheme: of points that are known (quantflow/algorithms/yaqa/points.py), which qvalues here
            are.
        scale_dtype: the dtype in which the layout stores scales.
        outputs: G.
        inputs: H.
    """

    weight: Tensor
    grid: Grid
    scheme: TensorScheme
    scale_dtype: torch.dtype
    outputs: Side
    inputs: Side


def working_bytes_of(features: int, rows: int) -> int:
    """Return the most memory that any function here takes beyond its arguments, in bytes.

    Errors (4 O I); of a block of R <= 128 rows its part of G, and six tensors as large as its
    weights, and the equations for at most one scale per 32 columns (4 R (I / 32)^2, twice).
    """
    block = min(rows, _ROWS)
    return 4 * (rows * features + block * (rows + 6 * features + 2 * (features // 32 + 1) ** 2))


def apart(rows: int, length: int) -> list[Tensor]:
    """Cut rows into blocks of at most `length` that lie as far apart as they can, int64 each.

    Neighbours are the features of a head, whose gradients go together; those at equal distances are
    of different heads.
    """
    count = -(-rows // length)
    return [torch.arange(first, rows, count) for first in range(count)]


def of_rows(grid: Grid, members: Tensor) -> Grid:
    """Return the grid of some rows.  members: [R] int64."""
    zero_point = None if grid.zero_point is None else grid.zero_point[members]
    return Grid(
        scale=grid.scale[members],
        zero_point=zero_point,
        zero_groups=0,
        global_scale=grid.global_scale,
    )


def errors_of(problem: Problem, qvalue: Tensor, members: Tensor) -> Tensor:
    """Return weight - rounded weight of some rows, [R, I] float32.  qvalue: theirs, members: [R] int64."""
    grid, columns = of_rows(problem.grid, members), qvalue.shape[1]
    zero_point = None if grid.zero_point is None else groups.expand(grid.zero_point, columns)
    return problem.weight[members].float() - affine.dequantize(
        qvalue, groups.expand(grid.scale, columns), zero_point
    )


def all_errors(problem: Problem, qvalue: Tensor) -> Tensor:
    """Return weight - rounded weight, [O, I] float32.  qvalue: [O, I]."""
    errors = torch.empty(qvalue.shape)
    for rows in groups.spans(len(qvalue), _ROWS):
        errors[rows] = errors_of(problem, qvalue[rows], torch.arange(rows.start, rows.stop))
    return errors


def loss_of(problem: Problem, qvalue: Tensor | None) -> float:
    """Return the loss of rounding to `qvalue` [O, I]; of None that of rounding everything to zero."""
    errors = problem.weight.float() if qvalue is None else all_errors(problem, qvalue)
    loss = 0.0
    for rows in groups.spans(len(errors), _ROWS):
        # [R, I]
        behind = (problem.outputs.matrix[rows] @ errors).add_(
            errors[rows], alpha=problem.outputs.damping
        )
        loss += float(behind.mul_(problem.inputs.times(errors[rows].T).T).sum(dtype=torch.float64))
    return loss


def rescaled(problem: Problem, qvalue: Tensor) -> Problem:
    """Return the problem with the scales for which the loss of `qvalue` [O, I] is smallest, as their layout stores them.

    The rows of a block are fitted each by itself, by least squares; a block whose loss grows with
    that, because its rows are felt together or its scales were rounded, keeps its own.
    """
    scale, zero_point = problem.grid.scale.clone(), problem.grid.zero_point
    if zero_point is not None and problem.scheme.minima:
        zero_point = zero_point.clone()
    errors = all_errors(problem, qvalue)
    for rows in apart(qvalue.shape[0], _ROWS):
        coupling, gradient = _gradient(problem, rows, errors)
        grid = of_rows(problem.grid, rows)
        points = qvalue[rows].float()
        if grid.zero_point is not None:
            points -= groups.expand(grid.zero_point.float(), points.shape[1])
        size = points.shape[1] // scale.shape[1]
        split = groups.to_groups(points, size)  # [R, G, g]
        # [R, G]
        wanted = (groups.to_groups(gradient.T, size) * split).sum(dim=-1) / coupling.diagonal()[
            :, None
        ]
        moved = scale[rows] + torch.linalg.solve(_moments(problem.inputs, split), wanted)
        growth = moved / scale[rows]
        fits = (growth > 1 / _FARTHEST) & (growth < _FARTHEST)
        new = _stored(torch.where(fits, moved, scale[rows]), problem)
        change = points * groups.expand(new - scale[rows], points.shape[1])
        # they move with their scales, and are stored
        if zero_point is not None and problem.scheme.minima:
            new_zero = affine.moved_zero_point(zero_point[rows], new, problem.scheme)
            change -= groups.expand(new * (new_zero - zero_point[rows]), points.shape[1])
        felt = coupling @ problem.inputs.times(change.T).T  # [R, I]
        if (change * (2 * gradient.T - felt)).sum() > 0:
            scale[rows] = new
            errors[rows] -= change
            if zero_point is not None and problem.scheme.minima:
                zero_point[rows] = new_zero
    return replace(problem, grid=replace(problem.grid, scale=scale, zero_point=zero_point))


def _stored(scale: Tensor, problem: Problem) -> Tensor:
    """Return the scales of points as their layout stores them, [R, G]."""
    size, global_scale = unit(problem.scheme), problem.grid.global_scale
    return (
        affine.stored_scale(
            scale * size, problem.scheme, problem.scale_dtype, global_scale=global_scale
        )
        / size
    )


def _moments(inputs: Side, split: Tensor) -> Tensor:
    """Return how the scales of a row bear on each other, d H d^T, [R, G, G].  split: d, qvalues less zero points, [R, G, g]."""
    rows, count, size = split.shape
    found = torch.empty(rows, count, count)
    for index, columns in enumerate(groups.spans(count * size, size)):
        felt = split[:, index] @ inputs.matrix[columns]  # [R, I]
        found[:, index] = (felt.view(rows, count, size) * split).sum(dim=-1)
        found[:, index, index] += inputs.damping * split[:, index].square().sum(dim=-1)
    diagonal = found.diagonal(dim1=1, dim2=2)
    diagonal += 1e-6 * diagonal.mean(dim=1, keepdim=True)
    diagonal += (diagonal == 0).float()  # groups of zeros say nothing of their scale
    return found


def _gradient(problem: Problem, rows: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Return damped G among a block's rows, [R, R], and G E H of them, transposed: [I, R], so that a column is contiguous."""
    outputs = problem.outputs
    coupling = outputs.matrix[rows][:, rows]
    coupling.diagonal().add_(outputs.damping)
    behind = (outputs.matrix[rows] @ errors).add_(errors[rows], alpha=outputs.damping)  # [R, I]
    return coupling, problem.inputs.times(behind.T)


def descend_(problem: Problem, qvalue: Tensor) -> None:
    """Move weights by steps while that makes the loss smaller: each block of rows once, column by column.

    Args:
        problem: its grid is the one of `qvalue`.
        qvalue: [O, I] int8, modified.
    """
    errors = all_errors(problem, qvalue)
    for rows in apart(qvalue.shape[0], _ROWS):
        coupling, gradient = _gradient(problem, rows, errors)
        # a step is a step wherever zero lies
        scales, _ = per_row([(of_rows(problem.grid, rows), slice(0, len(rows)))])
        now = qvalue[rows].T.float().contiguous()  # [I, R]
        curves = (problem.inputs.matrix.diagonal() + problem.inputs.damping).tolist()
        change = _moves_(
            now,
            gradient,
            scales=scales,
            coupling=coupling,
            matrix=problem.inputs.matrix,
            curves=curves,
            scheme=problem.scheme,
        )
        qvalue[rows] = now.T.to(torch.int8)
        errors[rows] -= change.T


def _moves_(
    now: Tensor,
    gradient: Tensor,
    *,
    scales: Tensor,
    coupling: Tensor,
    matrix: Tensor,
    curves: Sequence[float],
    scheme: TensorScheme,
) -> Tensor:
    """Move the qvalues `now` [I, R] of a block, and return what that adds to the rounded weights, [I, R].

    In a column the weight moves whose move gains most, then the next, until none gains. The
    gradient [I, R] by that column is kept exact meanwhile, that by the others follows before they
    are looked at.
    """
    change, group_size = torch.zeros_like(now), len(now) // len(scales)
    for columns in groups.spans(len(now), _COLUMNS):
        felt = torch.zeros(columns.stop - columns.start, now.shape[1])
        for i in range(columns.start, columns.stop):
            rows = (now[i], gradient[i], scales[i // group_size], change[i])
            if _move_column_(
                *(row.numpy() for row in rows),
                coupling=coupling.numpy(),
                curve=curves[i],
                scheme=scheme,
            ):
                torch.mv(coupling, change[i], out=felt[i - columns.start])
                after = slice(i + 1, columns.stop)
                gradient[after].addr_(matrix[i, after], felt[i - columns.start], alpha=-1)
        gradient[columns.stop :].addmm_(matrix[columns.stop :, columns], felt, alpha=-1)
    return change


def _move_column_(
    at: Row,
    left: Row,
    scale: Row,
    change: Row,
    *,
    coupling: NDArray[np.float32],
    curve: float,
    scheme: TensorScheme,
) -> bool:
    """Move the weight of a column whose move gains most, then the next, until none gains; return whether one moved.

    In numpy, whose calls take a fifth of torch's time on so few numbers, and give the same bits.

    Args:
        at: [R], its qvalues, modified.
        left: [R], the gradient by it; overwritten.
        scale: [R].
        change: [R], what is added to the rounded weights, likewise.
        coupling: [R, R].
        curve: of the column.
        scheme: of the weight.
    """
    curvature = coupling.diagonal() * scale * np.float32(curve)  # of a step
    moved = False
    with np.errstate(all="ignore"):  # what is too small to move divides by zero, and gains nothing
        for _ in range(len(at)):
            steps = left / curvature
            steps += at
            nearest_(steps, scheme)
            steps -= at
            gains = left + left
            gains -= steps * curvature
            gains *= steps
            gains *= scale
            row = int(gains.argmax())
            if not gains[row] > 0:
                break
            step = steps[row] * scale[row]
            at[row] += steps[row]
            change[row] += step
            left -= coupling[row] * (step * np.float32(curve))
            moved = True
    return moved

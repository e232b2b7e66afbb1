"""Descent from a rounded weight to a better one: steps of single weights, and fitted scales.

The loss of errors E = W - Q, [O, I], is tr(G E H E^T) with G [O, O] and H [I, I] symmetric and
positive: the cost of an error depends on those in the other rows and in the other columns. Half its
gradient by Q is -G E H.

Rows are taken in blocks (`apart`) whose gradient is computed once and kept exact while they change.
Source: Behdin et al. 2023, "QuantEase", arXiv:2309.01885, for the descent by columns, there with G
= 1.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantflow.algorithms.yaqa import vectors
from quantflow.algorithms.yaqa.points import nearest_, unit
from quantflow.core import affine, groups
from quantflow.core.scheme import TensorScheme
from quantflow.numerics.feedback import per_row
from quantflow.numerics.grid import Grid

# Both are part of the result, because they order the sums.
_ROWS = 128  # rows of a block
_COLUMNS = 64  # columns whose changes reach the gradient of later columns in one product
RowValues = NDArray[np.float32]
# A scale that would grow or shrink by more stays: its weights are too few to determine it.
_FARTHEST = 2.0


@dataclass(frozen=True, kw_only=True)
class Side:
    """A damped sum of x^T x, [K, K] float32, with the damping beside the matrix."""

    matrix: Tensor
    damping: float

    def times(self, x: Tensor) -> Tensor:
        """Product (matrix + damping) @ x, for x [K, n]."""
        return (self.matrix @ x).add_(x, alpha=self.damping)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A weight, the points it is rounded to, and the cost of errors.

    Attributes:
        weight: [O, I], any float dtype.
        grid: scales of its points and zero points, one scale or more for each row.
        scheme: scheme of small-integer points (quantflow/algorithms/yaqa/points.py); qvalues here
            are these points.
        scale_dtype: dtype in which the layout stores scales.
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
    """The most memory that any function here takes beyond its arguments, in bytes.

    Errors (4 O I); for a block of R <= 128 rows its part of G, six tensors as large as its weights,
    and the equations for at most one scale per 32 columns (4 R (I / 32)^2, twice).
    """
    block = min(rows, _ROWS)
    return 4 * (rows * features + block * (rows + 6 * features + 2 * (features // 32 + 1) ** 2))


def apart(rows: int, length: int) -> list[Tensor]:
    """Rows in blocks of at most `length` that lie as far apart as they can, int64 each.

    Neighbours are the features of a head, whose gradients go together; rows at equal distances
    belong to different heads.
    """
    count = -(-rows // length)
    return [torch.arange(first, rows, count) for first in range(count)]


def of_rows(grid: Grid, members: Tensor) -> Grid:
    """The grid of some rows.

    members is [R] int64.
    """
    zero_point = None if grid.zero_point is None else grid.zero_point[members]
    return Grid(
        scale=grid.scale[members],
        zero_point=zero_point,
        zero_groups=0,
        global_scale=grid.global_scale,
    )


def errors_of(problem: Problem, qvalue: Tensor, members: Tensor) -> Tensor:
    """Errors weight - rounded weight of some rows, [R, I] float32.

    Args:
        problem: weight and grid of all rows.
        qvalue: qvalues of these rows, [R, I].
        members: the rows, [R] int64.
    """
    grid = of_rows(problem.grid, members)
    columns = qvalue.shape[1]
    zero_point = None if grid.zero_point is None else groups.expand(grid.zero_point, columns)
    return problem.weight[members].float() - affine.dequantize(
        qvalue, groups.expand(grid.scale, columns), zero_point
    )


def all_errors(problem: Problem, qvalue: Tensor) -> Tensor:
    """Errors weight - rounded weight, [O, I] float32, for qvalue [O, I]."""
    errors = torch.empty(qvalue.shape)
    for rows in groups.spans(len(qvalue), _ROWS):
        errors[rows] = errors_of(problem, qvalue[rows], torch.arange(rows.start, rows.stop))
    return errors


def loss_of(problem: Problem, qvalue: Tensor | None) -> float:
    """The loss of rounding to `qvalue` [O, I]; None stands for rounding everything to zero."""
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
    """The problem with the scales that make the loss of `qvalue` [O, I] smallest, as stored.

    The rows of a block are fitted each by itself, by least squares. Their errors act together and
    their scales are rounded, so the loss of a block may grow; such a block keeps its own scales.
    """
    scale = problem.grid.scale.clone()
    zero_point = problem.grid.zero_point
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
        # minima are stored, so their zero points move with the scales
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
    """The scales of points as their layout stores them, [R, G]."""
    size = unit(problem.scheme)
    global_scale = problem.grid.global_scale
    return (
        affine.stored_scale(
            scale * size, problem.scheme, problem.scale_dtype, global_scale=global_scale
        )
        / size
    )


def _moments(inputs: Side, split: Tensor) -> Tensor:
    """The second derivatives d H d^T of a row's loss by its scales, [R, G, G].

    split is d, qvalues less zero points, [R, G, g].
    """
    rows, count, size = split.shape
    moments = torch.empty(rows, count, count)
    for index, columns in enumerate(groups.spans(count * size, size)):
        felt = split[:, index] @ inputs.matrix[columns]  # [R, I]
        moments[:, index] = (felt.view(rows, count, size) * split).sum(dim=-1)
        moments[:, index, index] += inputs.damping * split[:, index].square().sum(dim=-1)
    diagonal = moments.diagonal(dim1=1, dim2=2)
    diagonal += 1e-6 * diagonal.mean(dim=1, keepdim=True)
    diagonal += (diagonal == 0).float()  # groups of zeros do not determine their scale
    return moments


def _gradient(problem: Problem, rows: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Damped G among a block's rows, [R, R], and their G E H transposed, [I, R].

    Transposed, the gradient of a column is contiguous.
    """
    outputs = problem.outputs
    coupling = outputs.matrix[rows][:, rows]
    coupling.diagonal().add_(outputs.damping)
    behind = (outputs.matrix[rows] @ errors).add_(errors[rows], alpha=outputs.damping)  # [R, I]
    return coupling, problem.inputs.times(behind.T)


def descend_(problem: Problem, qvalue: Tensor) -> None:
    """Move weights by steps while that lowers the loss: each block of rows once, column by column.

    Args:
        problem: weight and the grid of `qvalue`.
        qvalue: [O, I] int8, modified.
    """
    errors = all_errors(problem, qvalue)
    for rows in apart(qvalue.shape[0], _ROWS):
        coupling, gradient = _gradient(problem, rows, errors)
        # zero points are not needed: the length of a step does not depend on them
        scales, _ = per_row([(of_rows(problem.grid, rows), slice(0, len(rows)))])
        now = qvalue[rows].T.float().contiguous()  # [I, R]
        move_ = vectors.moves_ if vectors.has_units(problem.scheme) else _moves_
        change = move_(
            now,
            gradient,
            scales=scales,
            coupling=coupling,
            matrix=problem.inputs.matrix,
            damping=problem.inputs.damping,
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
    damping: float,
    scheme: TensorScheme,
) -> Tensor:
    """Move the qvalues `now` [I, R] of a block; return the change of the rounded weights, [I, R].

    In a column the weight whose move gains most moves, then the next, until none gains. Meanwhile
    the gradient [I, R] by that column is kept exact; that by the other columns follows before they
    are processed.
    """
    change = torch.zeros_like(now)
    curves = (matrix.diagonal() + damping).tolist()
    group_size = len(now) // len(scales)
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
    at: RowValues,
    left: RowValues,
    scale: RowValues,
    change: RowValues,
    *,
    coupling: NDArray[np.float32],
    curve: float,
    scheme: TensorScheme,
) -> bool:
    """Move the weight of a column whose move gains most, then the next, until none gains.

    In numpy, whose calls take a fifth of torch's time on so few numbers, and give the same bits.

    Args:
        at: [R], qvalues of the column, modified.
        left: [R], gradient by the column; overwritten.
        scale: [R].
        change: [R], change of the rounded weights, modified.
        coupling: [R, R], damped G among the rows.
        curve: damped diagonal element of H for the column.
        scheme: scheme of the weight.

    Returns:
        Whether a weight moved.
    """
    curvature = coupling.diagonal() * scale * np.float32(curve)  # curvature of a step
    moved = False
    # A curvature of zero divides by zero, and its weight gains nothing.
    with np.errstate(all="ignore"):
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

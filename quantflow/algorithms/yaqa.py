"""YAQA: round so that the model's own output changes least, with error feedback over the columns and over the rows.

GPTQ makes the error of one linear's output small, every output counting alike. What counts is how far the output of the whole
model moves, and near the original model that is its KL divergence

    1/2 sum_t g_t^T E x_t x_t^T E^T g_t  ~  1/2 tr(G E H E^T),    G = mean over t of g_t g_t^T,    H = sum over t of x_t x_t^T

with g_t the gradient of the model's own loss by the linear's output (quantflow/models/backward.py) and E = W - Q. The
outputs of queries and keys, and what is written to the residual stream, are far from alike: an error in one of them can make
up for that in another, as one of a column can for that of another in GPTQ.

Two steps:

1. Feedback on both sides. With G = (I + M) D' (I + M)^T by blocks of rows, as H in GPTQ by columns, rows still to be rounded
   aim at w - (what the errors of rounded rows make of them), and GPTQ rounds them for that. Rows within a block of 32 do
   not make up for each other, so that they can be rounded side by side.
2. Descent. Every weight in turn is moved to the step that makes tr(G E H E^T) smallest with all others as they are, row block
   by row block, column by column, until a sweep changes nothing or `_SWEEPS` are done. The best of all sweeps is kept, and
   the first step's result where none is better.

Both use damped G and H. Linears are independent of each other: they are the units that workers run.
Sources: Tseng, Sun, De Sa 2025, "Model-Preserving Adaptive Rounding", arXiv:2505.22988, for the objective and the feedback on
both sides; Behdin et al. 2023, "QuantEase", arXiv:2309.01885, for the descent, there with G = 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.core import affine, groups
from quantflow.core.feedback import (
    BLOCK,
    DAMPINGS,
    Feedback,
    checked_hessian,
    feedback_of,
    gathered,
    per_row,
    round_columns_,
)
from quantflow.core.grid import Grid, weight_grids
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.qtensor import QTensor
from quantflow.core.result import GroupResult
from quantflow.core.scheme import LinearScheme, TensorScheme
from quantflow.errors import SchemeError, StatisticsError

NEEDS: tuple[str, ...] = ("hessian_sum", "count", "gradient_sum")
BY_ROW: bool = False
VERSION: int = 1

# Constants, since they order the sums and so are part of the result.
_ROWS = 8  # of a block, rounded side by side
_DESCENDING = 128  # rows of a block whose gradient is kept together
_SWEEPS = 2
_GRADIENT_DAMPINGS = (0.03, 0.3, 3.0)  # a gradient counts for one draw of a label: its sum is noisier than an input's


@dataclass(frozen=True, kw_only=True)
class _Side:
    """A damped sum of x^T x, whose damping is not in it but beside it.  matrix: [K, K] float32."""

    matrix: Tensor
    damping: float

    def times(self, x: Tensor) -> Tensor:
        """Return (matrix + damping) @ x.  x: [K, n]."""
        return (self.matrix @ x).add_(x, alpha=self.damping)


@dataclass(frozen=True, kw_only=True)
class _Linear:
    """What one linear is rounded with; `outputs` is the side of its rows, `inputs` that of its columns."""

    weight: Tensor
    grid: Grid
    outputs: _Side
    inputs: _Side
    scheme: TensorScheme


def working_bytes(features: int, rows: int, *, workers: int = 1, in_place: bool = False) -> int:
    """Return the most memory that `quantize_group` takes beyond weights, statistics and results, in bytes.

    4 I^2 for the factor of the group's Hessian. For each worker a linear, of O rows at most: the factor of its G and a part
    of it (4 O^2 + 4 O R with R = 32 rows of a block), its errors and qvalues, the best of them, and the product that
    tells how good they are (4 + 1 + 1 + 4 + 4 bytes each), and of a block of rows five tensors (5 * 4 I R).

    Args:
        features: I, in_features of the group.
        rows: out_features of the group, all linears together; one may have nearly all of them.
        workers: how many.
        in_place: not read: the Hessian is read again after it was factored.
    """
    del in_place
    linear = 4 * rows * (rows + _ROWS) + 14 * rows * features + 5 * 4 * features * _ROWS + 4 * BLOCK * _ROWS
    return 4 * features * features + workers * max(linear, groups.unit_bytes(features))


def quantize_group(
    weights: Mapping[str, Tensor],
    scheme: LinearScheme,
    *,
    statistics: Mapping[str, Tensor],
    scale_dtype: torch.dtype,
    workers: Workers = SEQUENTIAL,
    in_place: bool = False,
) -> dict[str, GroupResult]:
    """Quantize the linears that share an input.

    Args:
        weights: name -> [O, I], any float dtype; not modified.
        scheme: its `weights` are int, per channel or per group.
        statistics: `hessian_sum` [I, I], the sum of x^T x over the group's input rows, and `count` [], how many rows; and for
            every weight `<name>|gradient_sum` [O, O], the sum of g^T g over the gradients of the loss by its output.
        scale_dtype: the dtype in which the layout stores scales.
        workers: run linears; how many there are changes nothing but the time.
        in_place: not read.

    Returns:
        name -> the quantized weight; decisions: those of gptq, `gradient_damping` as `damping`, of G; `sweeps` (how many are
        in the result), `moved` (weights that they changed), and `loss_start` and `loss` (tr(G E H E^T) after the first step
        and in the end, over tr(G W H W^T)).

    Raises:
        SchemeError: the scheme's weights are not int or share one scale, or group_size does not divide in_features.
        InputError: a weight is empty or holds NaN or Inf.
        StatisticsError: a statistic is missing, has another shape, is not finite, or is no sum of x^T x.
    """
    del in_place
    if scheme.weights.kind != "int":
        raise SchemeError(f"scheme {scheme.name}: yaqa with kind={scheme.weights.kind!r}", "use rtn for float8")
    if scheme.weights.granularity == "per_tensor":
        raise SchemeError(f"scheme {scheme.name}: yaqa with one scale per tensor", "use gptq, or a scale per channel or group")
    if not weights:
        return {}
    hessian_sum, tokens = checked_hessian(statistics, weights, algorithm="yaqa")
    gradients = {name: _checked_gradient(name, weight.shape[0], statistics) for name, weight in weights.items()}
    diagonal = hessian_sum.diagonal().double() / max(tokens, 1)
    importance = diagonal + DAMPINGS[0] * diagonal.mean()  # as gptq's
    grids = weight_grids(weights, scheme.weights, scale_dtype=scale_dtype, importance=importance, workers=workers)
    columns = feedback_of(hessian_sum, name=next(iter(weights)), workers=workers)
    inputs = _Side(matrix=hessian_sum, damping=columns.damping)

    def unit(name: str) -> GroupResult:
        apart = torch.cat(_apart(weights[name].shape[0], _ROWS))
        rows = feedback_of(
            gradients[name], name=name, statistic="gradient_sum", dampings=_GRADIENT_DAMPINGS, order=apart
        )
        outputs = _Side(matrix=gradients[name], damping=rows.damping)
        linear = _Linear(weight=weights[name], grid=grids[name], outputs=outputs, inputs=inputs, scheme=scheme.weights)
        decisions = {**columns.decisions, "gradient_damping": rows.decisions["damping"], "order": "hessian_diagonal"}
        found = _descended(linear, _rounded(linear, rows, columns))
        return GroupResult(
            weight=QTensor(
                qvalue=found.qvalue, scale=grids[name].scale, zero_point=grids[name].zero_point, scheme=scheme.weights
            ),
            decisions={
                **decisions,
                "tokens": tokens,
                "zero_groups": grids[name].zero_groups,
                "sweeps": found.sweeps,
                "moved": found.moved,
                "loss_start": found.loss_start,
                "loss": found.loss,
            },
        )

    return dict(zip(weights, workers.map(unit, weights), strict=True))


def _checked_gradient(name: str, rows: int, statistics: Mapping[str, Tensor]) -> Tensor:
    gradient_sum = statistics.get(f"{name}|gradient_sum")
    if gradient_sum is None:
        raise StatisticsError(f"{name}: statistic gradient_sum is missing", "measure for yaqa")
    if tuple(gradient_sum.shape) != (rows, rows):
        raise StatisticsError(
            f"{name}: gradient_sum is {list(gradient_sum.shape)}, the weight has {rows} rows", "measure with this model"
        )
    diagonal = gradient_sum.diagonal()
    if not torch.isfinite(diagonal).all() or (diagonal < 0).any():
        raise StatisticsError(f"{name}: gradient_sum holds NaN, Inf or a negative diagonal", "measure again")
    return gradient_sum


def _rounded(linear: _Linear, rows: Feedback, columns: Feedback) -> Tensor:
    """Return the qvalues [O, I] int8 that feedback on both sides finds."""
    weight, grid = linear.weight, linear.grid
    qvalue = torch.empty(weight.shape, dtype=torch.int8)
    errors = torch.zeros(weight.shape)  # in the order of `rows`
    stop = weight.shape[0]
    for members in reversed(_apart(weight.shape[0], _ROWS)):
        block, done = slice(stop - len(members), stop), slice(stop, None)
        stop = block.start
        wanted = weight[members].float()  # [R, I]
        if block.stop < weight.shape[0]:
            # What a block owes to those before it: their part of the factor, with the block's own made 1.
            within = rows.lower[block, block].tril(-1) + torch.eye(len(members))
            owed = torch.linalg.solve_triangular(within, rows.lower[done, block], upper=False, left=False, unitriangular=True)
            wanted += owed.T @ errors[done]
        work = gathered([wanted], order=columns.order)
        scales, zero_points = per_row([(_of_rows(grid, members), slice(0, len(members)))])
        qvalue[members] = round_columns_(work, scales, zero_points, scheme=linear.scheme, feedback=columns).T
        errors[block] = _errors(linear, qvalue[members], members)
    return qvalue


def _apart(rows: int, length: int) -> list[Tensor]:
    """Cut rows into blocks of at most `length` that lie as far apart as they can, int64 each.

    Neighbours are the features of a head, whose gradients go together; those at equal distances are of different heads.
    """
    count = -(-rows // length)
    return [torch.arange(first, rows, count) for first in range(count)]


def _of_rows(grid: Grid, members: Tensor) -> Grid:
    """Return the grid of some rows.  members: [R] int64."""
    zero_point = None if grid.zero_point is None else grid.zero_point[members]
    return Grid(scale=grid.scale[members], zero_point=zero_point, zero_groups=0)


def _errors(linear: _Linear, qvalue: Tensor, members: Tensor) -> Tensor:
    """Return weight - rounded weight of some rows, [R, I] float32.  qvalue: theirs, members: [R] int64."""
    grid, columns = _of_rows(linear.grid, members), qvalue.shape[1]
    zero_point = None if grid.zero_point is None else groups.expand(grid.zero_point, columns)
    return linear.weight[members].float() - affine.dequantize(qvalue, groups.expand(grid.scale, columns), zero_point)


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What the descent ended with; the fields are those of the decisions."""

    qvalue: Tensor
    sweeps: int
    moved: int
    loss_start: float
    loss: float


def _descended(linear: _Linear, qvalue: Tensor) -> _Found:
    """Return the best of the start and what sweeps of descent make of it.  qvalue: [O, I] int8, modified."""
    everything = torch.arange(qvalue.shape[0])
    start = best = qvalue.clone()
    errors = _errors(linear, qvalue, everything)
    least = first = _loss(linear, errors)
    sweeps = 0
    for sweep in range(1, _SWEEPS + 1):
        moved = sum(_descend_(linear, rows, qvalue, errors) for rows in _apart(qvalue.shape[0], _DESCENDING))
        errors = _errors(linear, qvalue, everything)  # sums of steps are not it to the last bit
        loss = _loss(linear, errors)
        if not loss < least:
            break
        least, best, sweeps = loss, qvalue.clone(), sweep
        if not moved:
            break
    whole = _loss(linear, linear.weight.float()) or 1.0
    return _Found(qvalue=best, sweeps=sweeps, moved=int((best != start).sum()), loss_start=first / whole, loss=least / whole)


def _loss(linear: _Linear, errors: Tensor) -> float:
    """Return tr(G E H E^T).  errors: [O, I]."""
    seen = linear.inputs.times(errors.T)  # [I, O]
    return float((linear.outputs.times(errors) * seen.T).sum(dtype=torch.float64))


def _descend_(linear: _Linear, rows: Tensor, qvalue: Tensor, errors: Tensor) -> int:
    """Move the weights of a block of rows, one column after the other; return how many moves that took.

    In a column the weight moves whose move gains most, then the next, until none gains. Half the gradient of the loss by the
    column is kept exact meanwhile, that of the others follows before they are looked at.
    """
    outputs, inputs, scheme = linear.outputs, linear.inputs, linear.scheme
    coupling = outputs.matrix[rows][:, rows]  # [R, R]
    coupling.diagonal().add_(outputs.damping)
    behind = (outputs.matrix[rows] @ errors).add_(errors[rows], alpha=outputs.damping)  # [R, I]: G E
    gradient = inputs.times(behind.T)  # [I, R]: transposed, a column is contiguous
    scales, _ = per_row([(_of_rows(linear.grid, rows), slice(0, len(rows)))])  # a step is a step wherever zero lies
    now = qvalue[rows].T.float().contiguous()  # [I, R]
    change = torch.zeros_like(now)
    group_size = len(now) // len(scales)
    moves = 0
    for i, curve in enumerate((inputs.matrix.diagonal() + inputs.damping).tolist()):
        scale, at, left = scales[i // group_size], now[i], gradient[i].clone()
        curvature = coupling.diagonal() * (curve * scale)  # [R], of a step
        for _ in range(len(rows)):
            steps = (at + left / curvature).round_().clamp_(scheme.qmin, scheme.qmax).sub_(at)
            gains = steps * scale * (2 * left - steps * curvature)
            row = int(gains.argmax())
            if not gains[row] > 0:
                break
            step = steps[row] * scale[row]
            at[row] += steps[row]
            change[i, row] += step
            left -= coupling[row] * (step * curve)
            moves += 1
        if change[i].any():
            pushed = coupling @ change[i]  # [R]
            gradient.addr_(inputs.matrix[i], pushed, alpha=-1)
    qvalue[rows] = now.T.to(torch.int8)
    errors[rows] -= change.T
    return moves

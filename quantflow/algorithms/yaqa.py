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
2. Descent (quantflow/core/descent.py), in `_SWEEPS` sweeps: scales are fitted to the qvalues by least squares, then weights
   are moved by steps, one at a time, as long as that makes tr(G E H E^T) smaller. The best of all sweeps is kept, and the
   first step's result where none is better.

Both use damped G and H. Linears are independent of each other: they are the units that workers run.
Sources: Tseng, Sun, De Sa 2025, "Model-Preserving Adaptive Rounding", arXiv:2505.22988, for the objective and the feedback on
both sides; Behdin et al. 2023, "QuantEase", arXiv:2309.01885, for the descent, there with G = 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantflow.core import comparison
from quantflow.core.descent import Problem, Side, apart, descend_, errors_of, loss_of, of_rows, rescaled, working_bytes_of
from quantflow.core.feedback import (
    DAMPINGS,
    Feedback,
    checked_hessian,
    feedback_of,
    gathered,
    per_row,
    round_columns_,
)
from quantflow.core.grid import weight_grids
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.qtensor import QTensor
from quantflow.core.result import GroupResult
from quantflow.core.scheme import LinearScheme
from quantflow.errors import SchemeError, StatisticsError

NEEDS: tuple[str, ...] = ("hessian_sum", "count", "gradient_sum")
BY_ROW: bool = False
VERSION: int = 1

# Constants, since they order the sums and so are part of the result.
_ROWS = 8  # of a block, rounded side by side
_SWEEPS = 2
_GRADIENT_DAMPINGS = (0.03, 0.3, 3.0)  # a gradient counts for one draw of a label: its sum is noisier than an input's


def working_bytes(features: int, rows: int, *, workers: int = 1, in_place: bool = False) -> int:
    """Return the most memory that `quantize_group` takes beyond weights, statistics and results, in bytes.

    4 I^2 for the factor of the group's Hessian. For each worker a linear, of O rows at most: the factor of its G and a part
    of it (4 O^2 + 4 O R with R = 8 rows of a block), its qvalues thrice, its errors, and what the descent takes.

    Args:
        features: I, in_features of the group.
        rows: out_features of the group, all linears together; one may have nearly all of them.
        workers: how many.
        in_place: not read: the Hessian is read again after it was factored.
    """
    del in_place
    linear = 4 * rows * (rows + _ROWS) + (3 + 4) * rows * features + working_bytes_of(features, rows)
    return 4 * features * features + workers * max(linear, comparison.working_bytes(features))


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
    inputs = Side(matrix=hessian_sum.float(), damping=columns.damping)

    def unit(name: str) -> GroupResult:
        order = torch.cat(apart(weights[name].shape[0], _ROWS))
        rows = feedback_of(gradients[name], name=name, statistic="gradient_sum", dampings=_GRADIENT_DAMPINGS, order=order)
        problem = Problem(
            weight=weights[name],
            grid=grids[name],
            scheme=scheme.weights,
            scale_dtype=scale_dtype,
            outputs=Side(matrix=gradients[name].float(), damping=rows.damping),
            inputs=inputs,
        )
        decisions = {**columns.decisions, "gradient_damping": rows.decisions["damping"], "order": "hessian_diagonal"}
        found = _descended(problem, _rounded(problem, rows, columns))
        return GroupResult(
            weight=found.weight,
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

    made = dict(zip(weights, workers.map(unit, weights), strict=True))
    moment = comparison.SecondMoment(upper=inputs.matrix, diagonal=inputs.matrix.diagonal())
    found = {name: result.weight for name, result in made.items()}
    told = comparison.compared(weights, found, moment, scale_dtype=scale_dtype, workers=workers)
    return {name: replace(result, decisions={**result.decisions, **told[name]}) for name, result in made.items()}


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


def _rounded(problem: Problem, rows: Feedback, columns: Feedback) -> Tensor:
    """Return the qvalues [O, I] int8 that feedback on both sides finds."""
    weight = problem.weight
    qvalue = torch.empty(weight.shape, dtype=torch.int8)
    errors = torch.zeros(weight.shape)  # in the order of `rows`
    stop = weight.shape[0]
    for members in reversed(apart(weight.shape[0], _ROWS)):
        block, done = slice(stop - len(members), stop), slice(stop, None)
        stop = block.start
        wanted = weight[members].float()  # [R, I]
        if block.stop < weight.shape[0]:
            # What a block owes to those before it: their part of the factor, with the block's own made 1.
            within = rows.lower[block, block].tril(-1) + torch.eye(len(members))
            owed = torch.linalg.solve_triangular(within, rows.lower[done, block], upper=False, left=False, unitriangular=True)
            wanted += owed.T @ errors[done]
        work = gathered([wanted], order=columns.order)
        scales, zero_points = per_row([(of_rows(problem.grid, members), slice(0, len(members)))])
        qvalue[members] = round_columns_(work, scales, zero_points, scheme=problem.scheme, feedback=columns).T
        errors[block] = errors_of(problem, qvalue[members], members)
    return qvalue


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What the descent ended with; the fields are those of the decisions."""

    weight: QTensor
    sweeps: int
    moved: int
    loss_start: float
    loss: float


def _descended(problem: Problem, qvalue: Tensor) -> _Found:
    """Return the best of the start and what sweeps of descent make of it.  qvalue: [O, I] int8, modified."""
    start = kept = qvalue.clone()
    best, least, sweeps = problem, loss_of(problem, qvalue), 0
    first = least
    for sweep in range(1, _SWEEPS + 1):
        problem = rescaled(problem, qvalue)
        descend_(problem, qvalue)
        loss = loss_of(problem, qvalue)
        if not loss < least:
            break
        best, kept, least, sweeps = problem, qvalue.clone(), loss, sweep
    whole = loss_of(problem, None) or 1.0
    return _Found(
        weight=QTensor(qvalue=kept, scale=best.grid.scale, zero_point=best.grid.zero_point, scheme=problem.scheme),
        sweeps=sweeps,
        moved=int((kept != start).sum()),
        loss_start=first / whole,
        loss=least / whole,
    )

"""GPTQ: round column by column, and let the columns that are still to come make up for the error.

What is minimised is the error of the output, tr((W - Q) H (W - Q)^T) with H = X^T X, not that of the weight. Columns
are processed in order of the Hessian's diagonal, the largest first; groups, scales and zero points stay in place
(compressed-tensors calls it `actorder: weight`). They come from the original weight, from the multiple of each range that
loses least where the Hessian's diagonal says how much a column matters.

The form used here needs no inverse of H. With H = (I + U) D (I + U)^T, U strictly upper triangular, and E = W - Q,

    tr(E H E^T) = sum_j D_j * |e_j + sum_{i<j} e_i U_ij|^2,    so    q_j = round(w_j + sum_{i<j} e_i U_ij).

It takes the same decisions as the paper's form, which propagates the error with the Cholesky factor of H^-1, with one
factorisation instead of two and an inverse: a quarter of the work, and fewer digits lost.
Sources: Frantar et al. 2022, arXiv:2210.17323, algorithm 1; Chee et al. 2023, arXiv:2307.13304, which shows that this
form (LDLQ there) and GPTQ are the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.core import affine
from quantflow.core.grid import Grid, weight_grids
from quantflow.core.qtensor import QTensor
from quantflow.core.result import JSON, GroupResult
from quantflow.core.scheme import LinearScheme, TensorScheme
from quantflow.errors import SchemeError, StatisticsError

NEEDS: tuple[str, ...] = ("hessian_sum", "count")
VERSION: int = 2

_BLOCK = 128  # columns; part of the result, because it orders the sums
_DAMPINGS = (0.01, 0.1, 1.0)  # tried in this order, as fractions of the mean diagonal


@dataclass(frozen=True, kw_only=True)
class _Feedback:
    """How the error of a column reaches the later ones; the same for every weight of a group.

    Attributes:
        order: [I] int64, the columns in the order in which they are processed.
        upper: [I, I] float32, I + U of the permuted Hessian.
        decisions: what was done to factor it.
    """

    order: Tensor
    upper: Tensor
    decisions: dict[str, JSON]


def quantize_group(
    weights: Mapping[str, Tensor],
    scheme: LinearScheme,
    *,
    statistics: Mapping[str, Tensor],
    scale_dtype: torch.dtype,
) -> dict[str, GroupResult]:
    """Quantize the linears that share an input.

    Args:
        weights: name -> [O, I], any float dtype; not modified.
        scheme: its `weights` are int, at any granularity.
        statistics: `hessian_sum` [I, I], the sum of x^T x over the group's input rows, and `count` [], how many rows.
        scale_dtype: the dtype in which the layout stores scales.

    Returns:
        name -> the quantized weight; decisions: `damping` (the fraction of the mean diagonal that was added) and
        `attempts` (factorisations tried), `dead_channels` (inputs that were always zero; their columns are rounded to
        nearest), `tokens` (count), `zero_groups` (scales that stand for zeros only), `order`.

    Raises:
        SchemeError: the scheme's weights are not int, or group_size does not divide in_features.
        InputError: a weight is empty or holds NaN or Inf.
        StatisticsError: a statistic is missing, has another shape, is not finite, or is no sum of x^T x.
    """
    if scheme.weights.kind != "int":
        raise SchemeError(f"scheme {scheme.name}: gptq with kind={scheme.weights.kind!r}", "use rtn for float8")
    if not weights:
        return {}
    hessian_sum, tokens = _checked(statistics, weights=weights)
    diagonal = hessian_sum.diagonal() / max(tokens, 1)
    importance = diagonal + _DAMPINGS[0] * diagonal.mean()  # damped too: an unseen channel still matters a little
    grids = weight_grids(weights, scheme.weights, scale_dtype=scale_dtype, importance=importance)
    feedback = _feedback(hessian_sum, name=next(iter(weights)))
    results = {}
    for name, weight in weights.items():
        grid = grids[name]
        qvalue = _round_columns(weight, grid, scheme=scheme.weights, feedback=feedback)
        results[name] = GroupResult(
            weight=QTensor(qvalue=qvalue, scale=grid.scale, zero_point=grid.zero_point, scheme=scheme.weights),
            decisions={**feedback.decisions, "tokens": tokens, "zero_groups": grid.zero_groups},
        )
    return results


def _checked(statistics: Mapping[str, Tensor], *, weights: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Return hessian_sum and count after looking at them."""
    for statistic in NEEDS:
        if statistic not in statistics:
            raise StatisticsError(f"{next(iter(weights))}: statistic {statistic} is missing", "measure for gptq")
    hessian_sum, tokens = statistics["hessian_sum"], int(statistics["count"])
    for name, weight in weights.items():
        if tuple(hessian_sum.shape) != (weight.shape[1], weight.shape[1]):
            raise StatisticsError(
                f"{name}: hessian_sum is {list(hessian_sum.shape)}, weight is {list(weight.shape)}",
                "measure with this model, and quantize together only linears that share an input",
            )
    name = next(iter(weights))
    if not torch.isfinite(hessian_sum).all() or (hessian_sum.diagonal() < 0).any() or tokens < 0:
        raise StatisticsError(
            f"{name}: hessian_sum holds NaN, Inf or a negative diagonal, or count={tokens} is negative", "measure again"
        )
    return hessian_sum, tokens


def _feedback(hessian_sum: Tensor, *, name: str) -> _Feedback:
    """Factor the damped Hessian in float64.  hessian_sum: [I, I]; its scale does not matter, so count is not read."""
    diagonal = hessian_sum.diagonal().double()
    dead = diagonal == 0
    # Over the living: how strongly these are damped does not depend on how many others are dead.
    mean = diagonal[~dead].mean() if not dead.all() else torch.ones((), dtype=torch.float64)
    order = torch.argsort(diagonal, descending=True, stable=True)
    # Cholesky eliminates from the first row down; U needs the last one first. Hence the reversal before and after.
    backwards = order.flip(0)
    matrix = hessian_sum.double()[backwards[:, None], backwards]
    # A dead channel has a zero row and column: damping alone makes it positive, and independent of all others.
    pivots = diagonal[backwards]
    for attempt, damping in enumerate(_DAMPINGS, start=1):
        matrix.diagonal().copy_(pivots + damping * mean)
        lower, failed = torch.linalg.cholesky_ex(matrix)
        if not failed:
            upper = (lower / lower.diagonal()).float().flip(0, 1)
            decisions: dict[str, JSON] = {
                "damping": damping,
                "attempts": attempt,
                "dead_channels": int(dead.sum()),
                "order": "hessian_diagonal",
            }
            return _Feedback(order=order, upper=upper, decisions=decisions)
    raise StatisticsError(
        f"{name}: hessian_sum is not positive definite with a damping of {_DAMPINGS[-1]} times its mean diagonal",
        "the statistic is damaged; measure again",
    )


def _round_columns(weight: Tensor, grid: Grid, *, scheme: TensorScheme, feedback: _Feedback) -> Tensor:
    """Return the qvalues of one weight, [O, I] int8.

    Everything is transposed, so that a column of the weight is contiguous.
    """
    rows, columns = weight.shape
    work = weight.float().T[feedback.order]  # [I, O], rows not yet rounded hold the weight, the others their error
    qvalue = torch.empty(columns, rows, dtype=torch.int8)
    scales = grid.scale.T.contiguous()  # [G, O or 1]
    zero_points = None if grid.zero_point is None else grid.zero_point.T.contiguous()
    group_size = columns // scales.shape[0]
    order = feedback.order.tolist()
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        upper = feedback.upper[start:stop, start:stop]
        target = torch.addmm(work[start:stop], feedback.upper[:start, start:stop].T, work[:start])  # [B, O]
        for i in range(stop - start):
            column = order[start + i]
            scale = scales[column // group_size]
            zero_point = None if zero_points is None else zero_points[column // group_size]
            qvalue[column] = affine.quantize(target[i], scale, zero_point, scheme)
            error = work[start + i].sub_(affine.dequantize(qvalue[column], scale, zero_point))
            target[i + 1 :].addr_(upper[i, i + 1 :], error)
    return qvalue.T.contiguous()

"""GPTQ: round column by column, and let the columns that are still to come make up for the error.

Minimised is the error of the output, tr((W - Q) H (W - Q)^T) with the Hessian H = X^T X, not the
error of the weight. Columns are processed in order of the Hessian's diagonal, the largest first
(act-order). Groups, scales and zero points stay in place (compressed-tensors: `actorder: weight`).
Scales come from the original weight, from the multiple of each range that loses least; the
Hessian's diagonal is the importance of each column. Where 4 or 8 neighbours are one entry of a
codebook they are rounded together, under the metric of their part of H.

The form used here needs no inverse of H (quantflow/numerics/feedback.py). With H = (I + U) D (I +
U)^T, U strictly upper triangular, D diagonal, and E = W - Q with columns e_j,

    tr(E H E^T) = sum_j D_j * |e_j + sum_{i<j} e_i U_ij|^2,
            so  q_j = round(w_j + sum_{i<j} e_i U_ij).

It takes the same decisions as the paper's form, which propagates the error with the Cholesky factor
of H^-1. It needs one factorisation instead of two and an inverse: a quarter of the work, and fewer
digits lost. So few are lost that float32 is enough: its rounding, 2^-24 of the largest eigenvalue,
is small beside the damping, a hundredth of the mean one.

Memory, beyond the caller's: one float32 copy of the Hessian, or none where it may be overwritten,
factored in place; then rows of weights, transposed, one unit per worker (`working_bytes`). Rows are
independent of each other, so all linears that share the input form one row space. It is cut into an
even number of equal units, so that two or four workers are done at the same time. Sources: Frantar
et al. 2022, arXiv:2210.17323, algorithm 1; Chee et al. 2023, arXiv:2307.13304, which shows that
this form (LDLQ there) and GPTQ are the same.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quantflow.core import codebooks, groups
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.qtensor import QTensor, qvalue_dtype
from quantflow.core.result import JSON, GroupResult
from quantflow.core.scheme import LinearScheme, TensorScheme
from quantflow.core.support import EVERYTHING
from quantflow.numerics import output_errors
from quantflow.numerics.feedback import (
    BLOCK,
    DAMPINGS,
    Feedback,
    feedback_of,
    gathered,
    order_of_units,
    per_row,
    round_columns_,
    round_units_,
)
from quantflow.numerics.grid import Grid, either_sign, weight_grids
from quantflow.numerics.statistics import COUNT
from quantflow.observers.hessian import HESSIAN_SUM, checked_hessian

NAME: str = "gptq"
NEEDS: tuple[str, ...] = (HESSIAN_SUM.name, COUNT.name)
BY_ROW: bool = False
VERSION: int = 5
TO_NEAREST: bool = False
ON_DEVICE: bool = True
SUPPORTS = EVERYTHING

# Constants, since they order the sums and so are part of the result.
_UNIT_ROWS = 1024  # most rows of a unit; fewer make calls per column dear, more leave workers idle
# most weights of a unit, unless that is less than 128 rows: units dominate a wide layer's memory
_UNIT_WEIGHTS = 4 << 20

_Piece = tuple[str, slice]  # rows of one linear


def working_bytes(features: int, rows: int, *, workers: int = 1, in_place: bool = False) -> int:
    """The most memory that `quantize_group` takes, in bytes.

    Weights, statistics and results are not counted. 4 I^2 for the factor, unless it is made in
    place. For each worker a unit of R rows (`_unit_rows`): its work in float32 (4 I R), the qvalues
    (I R) and the scales, at most one per 32 columns (2 * 4 I R / 32); and of a block its aims,
    errors, qvalues and scratch (R (2 * 4 * 128 + 128 + 4)), or the memory of elementwise units or
    of comparing a linear, if that is more.

    Args:
        features: I, in_features of the group.
        rows: out_features of the group, all linears together.
        workers: number of workers.
        in_place: whether `quantize_group` may overwrite the Hessian.
    """
    each = features * (4 + 1) + features // 4 + (2 * 4 + 1) * BLOCK + 4
    unit = min(_unit_rows(features), rows) * each
    factor = 0 if in_place else 4 * features * features
    return factor + workers * max(unit, output_errors.working_bytes(features))


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
        scheme: its `weights` are int or float8, at any granularity.
        statistics: `hessian_sum` [I, I], the sum of x^T x over the group's input rows, and `count`
            [], the number of these rows.
        scale_dtype: dtype in which the layout stores scales.
        workers: run blocks of the factorisation and units of rows; how many there are changes
            nothing but the time.
        in_place: overwrite `hessian_sum`, where it is float32 and contiguous, instead of copying
            it; the result is the same.

    Returns:
        name -> the quantized weight; decisions: `damping` (the fraction of the mean diagonal that
        was added) and `attempts` (factorisations tried), `dead_channels` (inputs that were always
        zero; their columns are rounded to nearest), `tokens` (count), `zero_groups` (scales that
        stand for zeros only), `order`, and those of `output_errors.compared`.

    Raises:
        SchemeError: group_size does not divide in_features.
        InputError: a weight is empty or holds NaN or Inf.
        StatisticsError: a statistic is missing, has another shape, is not finite, or is no sum of
            x^T x.
    """
    if not weights:
        return {}
    hessian_sum, tokens = checked_hessian(statistics, weights, algorithm=NAME)
    diagonal = hessian_sum.diagonal().double() / max(tokens, 1)
    # damped too: an unseen channel still matters a little
    importance = diagonal + DAMPINGS[0] * diagonal.mean()
    sign = either_sign(scheme)
    grids = weight_grids(
        weights,
        scheme.weights,
        scale_dtype=scale_dtype,
        importance=importance,
        either_sign=sign,
        workers=workers,
    )
    kind = scheme.weights.block
    units = codebooks.unit(kind) if kind is not None and kind.codebook is not None else None
    feedback = feedback_of(
        hessian_sum,
        name=next(iter(weights)),
        statistic=HESSIAN_SUM.name,
        order=None if units is None else order_of_units(hessian_sum.diagonal(), units),
        workers=workers,
        in_place=in_place,
    )
    qvalues = {
        name: weight.new_empty(weight.shape, dtype=qvalue_dtype(scheme.weights))
        for name, weight in weights.items()
    }

    def unit(pieces: Sequence[_Piece]) -> None:
        _round_rows(
            pieces, weights, grids, scheme=scheme.weights, feedback=feedback, qvalues=qvalues
        )

    limit = _unit_rows(hessian_sum.shape[0]) * groups.at_once(hessian_sum.device)
    workers.map(
        unit, _units({name: weight.shape[0] for name, weight in weights.items()}, limit=limit)
    )
    quantized = {
        name: QTensor(
            qvalue=qvalues[name],
            scale=grid.scale,
            zero_point=grid.zero_point,
            scheme=scheme.weights,
            global_scale=grid.global_scale,
        )
        for name, grid in grids.items()
    }
    about: dict[str, JSON] = {**feedback.decisions, "order": "hessian_diagonal", "tokens": tokens}
    moment = output_errors.moment_of(feedback)
    errors = output_errors.compared(
        weights, quantized, moment, scale_dtype=scale_dtype, workers=workers
    )
    return {
        name: GroupResult(
            weight=weight,
            decisions={**about, "zero_groups": grids[name].zero_groups, **errors[name]},
        )
        for name, weight in quantized.items()
    }


def _unit_rows(features: int) -> int:
    """The most rows of I features in a unit."""
    return min(_UNIT_ROWS, max(128, _UNIT_WEIGHTS // max(1, features)))


def _units(rows: Mapping[str, int], *, limit: int) -> list[list[_Piece]]:
    """The rows of all linears, cut into an even number of equal units of at most `limit` rows."""
    total = sum(rows.values())
    length = -(-total // (2 * -(-total // (2 * limit))))
    units: list[list[_Piece]] = []
    left = 0  # rows that the last unit still takes
    for name, count in rows.items():
        start = 0
        while start < count:
            if left == 0:
                units.append([])
                left = length
            stop = min(count, start + left)
            units[-1].append((name, slice(start, stop)))
            left, start = left - (stop - start), stop
    return units


def _round_rows(
    pieces: Sequence[_Piece],
    weights: Mapping[str, Tensor],
    grids: Mapping[str, Grid],
    *,
    scheme: TensorScheme,
    feedback: Feedback,
    qvalues: Mapping[str, Tensor],
) -> None:
    """Write the qvalues of some rows of the group."""
    work = gathered([weights[name][rows] for name, rows in pieces], order=feedback.order)  # [I, R]
    scales, zero_points = per_row([(grids[name], rows) for name, rows in pieces])
    if scheme.block is not None and scheme.block.codebook is not None:
        qvalue = round_units_(work, scales, scheme=scheme, feedback=feedback)
    else:
        qvalue = round_columns_(work, scales, zero_points, scheme=scheme, feedback=feedback)
    first = 0
    for name, rows in pieces:
        last = first + rows.stop - rows.start
        qvalues[name][rows] = qvalue[:, first:last].T
        first = last

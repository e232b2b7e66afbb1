"""GPTQ: round column by column, and let the columns that are still to come make up for the error.

What is minimised is the error of the output, tr((W - Q) H (W - Q)^T) with H = X^T X, not that of the weight. Columns
are processed in order of the Hessian's diagonal, the largest first; groups, scales and zero points stay in place
(compressed-tensors calls it `actorder: weight`). They come from the original weight, from the multiple of each range that
loses least where the Hessian's diagonal says how much a column matters.

The form used here needs no inverse of H. With H = (I + U) D (I + U)^T, U strictly upper triangular, and E = W - Q,

    tr(E H E^T) = sum_j D_j * |e_j + sum_{i<j} e_i U_ij|^2,    so    q_j = round(w_j + sum_{i<j} e_i U_ij).

It takes the same decisions as the paper's form, which propagates the error with the Cholesky factor of H^-1, with one
factorisation instead of two and an inverse: a quarter of the work, and fewer digits lost. So few that float32 will do:
its rounding, 2^-24 of the largest eigenvalue, is small beside the damping, a hundredth of the mean one.

Memory, beyond the caller's: one float32 copy of the Hessian, or none where it may be overwritten, factored in place; then
rows of weights, transposed, one unit per worker (`working_bytes`). Rows are independent of each other, so all linears that
share the input form one row space, cut into an even number of equal units: two or four workers are done at the same time.
Sources: Frantar et al. 2022, arXiv:2210.17323, algorithm 1; Chee et al. 2023, arXiv:2307.13304, which shows that this
form (LDLQ there) and GPTQ are the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.core import affine, groups
from quantflow.core.cholesky import cholesky_, mirror_, reorder_
from quantflow.core.grid import Grid, weight_grids
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.qtensor import QTensor
from quantflow.core.result import JSON, GroupResult
from quantflow.core.scheme import LinearScheme, TensorScheme
from quantflow.errors import SchemeError, StatisticsError

NEEDS: tuple[str, ...] = ("hessian_sum", "count")
BY_ROW: bool = False
VERSION: int = 4

# Constants, since they order the sums and so are part of the result.
_BLOCK = 128  # columns whose errors reach the columns after them in one product
_SUB_BLOCK = 32  # columns within a block, likewise
_UNIT_ROWS = 1024  # at most; fewer make the calls per column dear, more leave workers idle
_UNIT_WEIGHTS = 4 << 20  # at most, unless that would be fewer than 128 rows: of wide layers a unit is what takes the memory
_DAMPINGS = (0.01, 0.1, 1.0)  # tried in this order, as fractions of the mean diagonal

_Piece = tuple[str, slice]  # rows of one linear


@dataclass(frozen=True, kw_only=True)
class _Feedback:
    """How the error of a column reaches the later ones; the same for every weight of a group.

    The last column is processed first: a Cholesky factorisation eliminates from the first on, U needs the last one first.

    Attributes:
        order: [I] int64, the columns by ascending diagonal of the Hessian.
        lower: [I, I] float32, below the diagonal (I + U)^T of the Hessian in that order; the rest has no meaning.
        decisions: what was done to factor it.
    """

    order: Tensor
    lower: Tensor
    decisions: dict[str, JSON]


def working_bytes(features: int, rows: int, *, workers: int = 1, in_place: bool = False) -> int:
    """Return the most memory that `quantize_group` takes beyond weights, statistics and results, in bytes.

    4 I^2 for the factor, unless it is made in place. For each worker a unit of R rows (`_unit_rows`): its work in
    float32 (4 I R), the qvalues (I R) and the scales, at most one per 32 columns (2 * 4 I R / 32); and a block and its
    scratch (4 R (128 + 1)), or what the elementwise units take, if that is more.

    Args:
        features: I, in_features of the group.
        rows: out_features of the group, all linears together.
        workers: how many.
        in_place: as `quantize_group` is called.
    """
    unit = min(_unit_rows(features), rows) * (features * (4 + 1) + features // 4 + 4 * (_BLOCK + 1))
    factor = 0 if in_place else 4 * features * features
    return factor + workers * max(unit, groups.unit_bytes(features))


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
        scheme: its `weights` are int, at any granularity.
        statistics: `hessian_sum` [I, I], the sum of x^T x over the group's input rows, and `count` [], how many rows.
        scale_dtype: the dtype in which the layout stores scales.
        workers: run blocks of the factorisation and units of rows; how many there are changes nothing but the time.
        in_place: overwrite `hessian_sum`, where it is float32 and contiguous, instead of copying it; the result is the same.

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
    diagonal = hessian_sum.diagonal().double() / max(tokens, 1)
    importance = diagonal + _DAMPINGS[0] * diagonal.mean()  # damped too: an unseen channel still matters a little
    grids = weight_grids(weights, scheme.weights, scale_dtype=scale_dtype, importance=importance, workers=workers)
    feedback = _feedback(hessian_sum, name=next(iter(weights)), workers=workers, in_place=in_place)
    qvalues = {name: torch.empty(weight.shape, dtype=torch.int8) for name, weight in weights.items()}

    def unit(pieces: Sequence[_Piece]) -> None:
        _round_rows(pieces, weights, grids, scheme=scheme.weights, feedback=feedback, qvalues=qvalues)

    limit = _unit_rows(hessian_sum.shape[0])
    workers.map(unit, _units({name: weight.shape[0] for name, weight in weights.items()}, limit=limit))
    return {
        name: GroupResult(
            weight=QTensor(qvalue=qvalues[name], scale=grid.scale, zero_point=grid.zero_point, scheme=scheme.weights),
            decisions={**feedback.decisions, "tokens": tokens, "zero_groups": grid.zero_groups},
        )
        for name, grid in grids.items()
    }


def _unit_rows(features: int) -> int:
    """Return how many rows of I features a unit has at most."""
    return min(_UNIT_ROWS, max(128, _UNIT_WEIGHTS // max(1, features)))


def _units(rows: Mapping[str, int], *, limit: int) -> list[list[_Piece]]:
    """Cut the rows of all linears, one after the other, into an even number of equal units of at most `limit` rows."""
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


def _checked(statistics: Mapping[str, Tensor], *, weights: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Return hessian_sum and count after looking at them; off its diagonal the sum is looked at when it is copied."""
    for statistic in NEEDS:
        if statistic not in statistics:
            raise StatisticsError(f"{next(iter(weights))}: statistic {statistic} is missing", "measure for gptq")
    hessian_sum, tokens = statistics["hessian_sum"], int(statistics["count"])
    for name, weight in weights.items():
        if tuple(hessian_sum.shape) != (weight.shape[-1], weight.shape[-1]):
            raise StatisticsError(
                f"{name}: hessian_sum is {list(hessian_sum.shape)}, weight is {list(weight.shape)}",
                "measure with this model, and quantize together only linears that share an input",
            )
    diagonal = hessian_sum.diagonal()
    if not torch.isfinite(diagonal).all() or (diagonal < 0).any() or tokens < 0:
        raise _damaged(next(iter(weights)), tokens)
    return hessian_sum, tokens


def _damaged(name: str, tokens: int) -> StatisticsError:
    return StatisticsError(
        f"{name}: hessian_sum holds NaN, Inf or a negative diagonal, or count={tokens} is negative", "measure again"
    )


def _feedback(hessian_sum: Tensor, *, name: str, workers: Workers, in_place: bool) -> _Feedback:
    """Factor the damped Hessian.  hessian_sum: [I, I]; its scale does not matter, so count is not read.

    Raises:
        StatisticsError: it holds NaN or Inf, or stays indefinite however much it is damped.
    """
    diagonal = hessian_sum.diagonal().double()
    dead = diagonal == 0
    # Over the living: how strongly these are damped does not depend on how many others are dead.
    mean = diagonal[~dead].mean().item() if not dead.all() else 1.0
    # Near 1, by a power of two: the damping is then no subnormal, and other units of the input give the same bits.
    unit = 2.0 ** -min(max(math.frexp(mean)[1], -120), 120)
    order = torch.argsort(diagonal, descending=True, stable=True).flip(0)
    # A dead channel has a zero row and column: damping alone makes it positive, and independent of all others.
    pivots = diagonal[order] * unit
    lower = (hessian_sum.mul_(unit) if in_place else hessian_sum * unit).float().contiguous()
    if not reorder_(lower, order, workers=workers):
        raise StatisticsError(f"{name}: hessian_sum holds NaN or Inf", "measure again")
    for attempt, damping in enumerate(_DAMPINGS, start=1):
        if attempt > 1:
            mirror_(lower)
        lower.diagonal().copy_(pivots + damping * mean * unit)
        if cholesky_(lower, workers=workers):
            roots = lower.diagonal().clone()
            for columns in groups.spans(lower.shape[0], _BLOCK):
                lower[columns.start :, columns] /= roots[columns]
            decisions: dict[str, JSON] = {
                "damping": damping,
                "attempts": attempt,
                "dead_channels": int(dead.sum()),
                "order": "hessian_diagonal",
            }
            return _Feedback(order=order, lower=lower, decisions=decisions)
    raise StatisticsError(
        f"{name}: hessian_sum is not positive definite with a damping of {_DAMPINGS[-1]} times its mean diagonal",
        "the statistic is damaged; measure again",
    )


def _round_rows(
    pieces: Sequence[_Piece],
    weights: Mapping[str, Tensor],
    grids: Mapping[str, Grid],
    *,
    scheme: TensorScheme,
    feedback: _Feedback,
    qvalues: Mapping[str, Tensor],
) -> None:
    """Write the qvalues of some rows of the group.

    Everything is transposed, so that a column of the weights is contiguous, and in the order of `feedback`.
    """
    order, lower = feedback.order, feedback.lower
    work = _gathered(pieces, weights, order=order)  # [I, R], rows not yet rounded hold weights, the others their error
    scales = torch.cat([_per_row(grids[name].rows(rows)[0], rows) for name, rows in pieces], dim=1)  # [G, R]
    zero_points = None
    if not scheme.symmetric:
        zero_points = torch.cat([_per_row(grids[name].rows(rows)[1], rows) for name, rows in pieces], dim=1)  # [G, R]
    columns, width = work.shape
    qvalue = torch.empty(columns, width, dtype=torch.int8)
    rounded = torch.empty(width)
    places = order.tolist()
    group_size = columns // scales.shape[0]
    for stop in range(columns, 0, -_BLOCK):
        start = max(0, stop - _BLOCK)
        target = torch.addmm(work[start:stop], lower[stop:, start:stop].T, work[stop:])  # [B, R]
        within = lower[start:stop, start:stop].T.contiguous()  # [B, B]: row i says what reaches column i
        for end in range(stop - start, 0, -_SUB_BLOCK):
            begin = max(0, end - _SUB_BLOCK)
            target[begin:end].addmm_(within[begin:end, end:], work[start + end : stop])
            for i in range(end - 1, begin - 1, -1):
                wanted, error = target[i], work[start + i]
                if i + 1 < end:
                    wanted.addmv_(work[start + i + 1 : start + end].T, within[i, i + 1 : end])
                group = places[start + i] // group_size
                zero_point = None if zero_points is None else zero_points[group]
                torch.div(wanted, scales[group], out=rounded)
                qvalue[places[start + i]] = affine.round_(rounded, zero_point, scheme)
                if zero_point is not None:
                    rounded -= zero_point
                error -= rounded.mul_(scales[group])
    first = 0
    for name, rows in pieces:
        last = first + rows.stop - rows.start
        qvalues[name][rows] = qvalue[:, first:last].T
        first = last


def _gathered(pieces: Sequence[_Piece], weights: Mapping[str, Tensor], *, order: Tensor) -> Tensor:
    """Return rows of the weights, transposed and with their columns in `order`, [I, R] float32."""
    work = torch.empty(order.numel(), sum(rows.stop - rows.start for _, rows in pieces))
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel())
    first = 0
    for name, rows in pieces:
        last = first + rows.stop - rows.start
        for columns in groups.spans(order.numel(), _BLOCK):
            work[:, first:last].index_copy_(0, place[columns], weights[name][rows, columns].T.contiguous().float())
        first = last
    return work


def _per_row(values: Tensor | None, rows: slice) -> Tensor:
    """Return values of a grid for each of some rows, transposed, [G, rows] float32."""
    assert values is not None  # the scheme is asymmetric, so the grid has zero points
    return values.float().expand(rows.stop - rows.start, -1).T

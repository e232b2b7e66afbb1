"""Error feedback: what is still to be rounded makes up for the errors of what already is.

With a symmetric positive H = (I + U) D (I + U)^T, U strictly upper triangular, and errors e_j of
columns j,

    tr(E H E^T) = sum_j D_j * |e_j + sum_{i<j} e_i U_ij|^2.

Whoever rounds the columns in order can make every term as small as rounding to nearest makes it, by
aiming at w_j - sum_{i<j} e_i U_ij. Columns are taken in order of the diagonal, the largest first.
Source: Chee et al. 2023, arXiv:2307.13304 (LDLQ), which shows that it takes GPTQ's decisions.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.core import affine, groups
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.qtensor import qvalue_dtype
from quantflow.core.result import JSON
from quantflow.core.scheme import TensorScheme
from quantflow.errors import StatisticsError
from quantflow.numerics.cholesky import cholesky_, mirror_, reorder_
from quantflow.numerics.grid import Grid

# Constants, since they order the sums and so are part of the result.
BLOCK = 128  # columns whose errors reach the columns after them in one product
_SUB_BLOCK = 32  # columns within a block, likewise
DAMPINGS = (0.01, 0.1, 1.0)  # tried in this order, as fractions of the mean diagonal

# One thread at a time goes from column to column, while others multiply: what is done with a column
# is so short that two threads would hand the interpreter's lock to each other at every step.
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """How the error of a column reaches the later ones.

    The last column is processed first: a Cholesky factorisation eliminates from the first on, U
    needs the last one first.

    Attributes:
        order: [I] int64, the columns from the last to be processed to the first.
        lower: [I, I] float32, below the diagonal (I + U)^T of the matrix in that order; above it
            the matrix itself, times a power of two; the diagonal has no meaning.
        diagonal: [I] float64, of that matrix.
        damping: what was added to the diagonal, as the matrix has it.
        share: the same as a fraction of the mean diagonal.
        decisions: what was done to factor it.
    """

    order: Tensor
    lower: Tensor
    diagonal: Tensor
    damping: float
    share: float
    decisions: dict[str, JSON]


def checked_hessian(
    statistics: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, algorithm: str
) -> tuple[Tensor, int]:
    """Return hessian_sum and count after looking at them; off its diagonal the sum is looked at when it is copied.

    Args:
        statistics: of the input that all `weights` share.
        weights: name -> [O, I].
        algorithm: that needs them, for messages.

    Raises:
        StatisticsError: one is missing, has another shape, or is damaged.
    """
    for statistic in ("hessian_sum", "count"):
        if statistic not in statistics:
            raise StatisticsError(
                f"{next(iter(weights))}: statistic {statistic} is missing",
                f"measure for {algorithm}",
            )
    hessian_sum, tokens = statistics["hessian_sum"], int(statistics["count"])
    for name, weight in weights.items():
        if tuple(hessian_sum.shape) != (weight.shape[-1], weight.shape[-1]):
            raise StatisticsError(
                f"{name}: hessian_sum is {list(hessian_sum.shape)}, weight is {list(weight.shape)}",
                "measure with this model, and quantize together only linears that share an input",
            )
    diagonal = hessian_sum.diagonal()
    if not torch.isfinite(diagonal).all() or (diagonal < 0).any() or tokens < 0:
        raise StatisticsError(
            f"{next(iter(weights))}: hessian_sum holds NaN, Inf or a negative diagonal, or "
            f"count={tokens} is negative",
            "measure again",
        )
    return hessian_sum, tokens


def feedback_of(
    matrix: Tensor,
    *,
    name: str,
    statistic: str = "hessian_sum",
    dampings: Sequence[float] = DAMPINGS,
    order: Tensor | None = None,
    workers: Workers = SEQUENTIAL,
    in_place: bool = False,
) -> Feedback:
    """Factor a damped sum of x^T x; its scale does not matter.

    Args:
        matrix: [I, I] float32, its diagonal finite and at least zero.
        name: whose it is, for messages.
        statistic: what it is called, likewise.
        dampings: fractions of the mean diagonal, of which the first that makes it positive definite
            is added.
        order: [I] int64, the columns from the last to be processed to the first; None is by
            ascending diagonal.
        workers: run blocks; how many there are changes nothing but the time.
        in_place: overwrite it.

    Raises:
        StatisticsError: it holds NaN or Inf, or stays indefinite however much it is damped.
    """
    diagonal = matrix.diagonal().double()
    dead = diagonal == 0
    # Over the living: how strongly these are damped does not depend on how many others are dead.
    mean = diagonal[~dead].mean().item() if not dead.all() else 1.0
    # Near 1, by a power of two: the damping is then no subnormal, and other units of the input give
    # the same bits.
    unit = 2.0 ** -min(max(math.frexp(mean)[1], -120), 120)
    if order is None:
        order = torch.argsort(diagonal, descending=True, stable=True).flip(0)
    # A dead channel has a zero row and column: damping alone makes it positive, and independent of
    # all others.
    pivots = diagonal[order] * unit
    lower = (matrix.mul_(unit) if in_place else matrix * unit).float().contiguous()
    if not reorder_(lower, order, workers=workers):
        raise StatisticsError(f"{name}: {statistic} holds NaN or Inf", "measure again")
    for attempt, damping in enumerate(dampings, start=1):
        if attempt > 1:
            mirror_(lower)
        lower.diagonal().copy_(pivots + damping * mean * unit)
        if cholesky_(lower, workers=workers):
            roots = lower.diagonal().clone()
            for columns in groups.spans(lower.shape[0], BLOCK):
                lower[columns.stop :, columns] /= roots[columns]
                corner = lower[columns, columns]
                corner.copy_((corner / roots[columns]).tril() + corner.triu(1))
            decisions: dict[str, JSON] = {
                "damping": damping,
                "attempts": attempt,
                "dead_channels": int(dead.sum()),
            }
            return Feedback(
                order=order,
                lower=lower,
                diagonal=pivots,
                damping=damping * mean,
                share=damping,
                decisions=decisions,
            )
    raise StatisticsError(
        f"{name}: {statistic} is not positive definite with a damping of {dampings[-1]} times "
        "its mean diagonal",
        "the statistic is damaged; measure again",
    )


def gathered(rows: Sequence[Tensor], *, order: Tensor) -> Tensor:
    """Return rows of weights, transposed and with their columns in `order`, [I, R] float32.  rows: [., I] each."""
    work = torch.empty(order.numel(), sum(len(part) for part in rows), device=order.device)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    first = 0
    for part in rows:
        last = first + len(part)
        for columns in groups.spans(order.numel(), BLOCK):
            work[:, first:last].index_copy_(
                0, place[columns], part[:, columns].T.contiguous().float()
            )
        first = last
    return work


def per_row(pieces: Sequence[tuple[Grid, slice]]) -> tuple[Tensor, Tensor | None]:
    """Return the scales and zero points of rows of some grids, one below the other and transposed, [G, R] float32 each."""
    parts = [(*grid.rows(rows), rows.stop - rows.start) for grid, rows in pieces]
    scales = torch.cat([scale.expand(count, -1).T for scale, _, count in parts], dim=1)  # [G, R]
    zero_points = [
        zero_point.float().expand(count, -1).T
        for _, zero_point, count in parts
        if zero_point is not None
    ]
    return scales, torch.cat(zero_points, dim=1) if zero_points else None


def round_columns_(
    work: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    *,
    scheme: TensorScheme,
    feedback: Feedback,
) -> Tensor:
    """Round rows of weights column by column, each making up for the errors of the columns before it.

    Everything is transposed, so that a column of the weights is contiguous.

    Args:
        work: [I, R], the weights in the order of `feedback` (`gathered`); afterwards weight -
            rounded weight.
        scales: [G, R], of groups in the order of the weights.
        zero_points: likewise, or None.
        scheme: any.
        feedback: of the rows' input.

    Returns:
        The qvalues, [I, R] in the dtype of the scheme's, in the order of the weights.
    """
    lower, (columns, width) = feedback.lower, work.shape
    qvalue = torch.empty(columns, width, dtype=qvalue_dtype(scheme), device=work.device)
    rounded = torch.empty(width, device=work.device)
    places = feedback.order.tolist()
    group_size = columns // scales.shape[0]
    for stop in range(columns, 0, -BLOCK):
        start = max(0, stop - BLOCK)
        target = torch.addmm(work[start:stop], lower[stop:, start:stop].T, work[stop:])  # [B, R]
        # [B, B]: row i says what reaches column i
        within = lower[start:stop, start:stop].T.contiguous()
        with _ONE_AT_A_TIME:
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
    return qvalue

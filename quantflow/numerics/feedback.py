"""Error feedback: columns still to be rounded make up for the errors of those already rounded.

W [O, I] is a weight with columns w_j, Q its rounded form with columns q_j, and E = W - Q their
difference with columns e_j = w_j - q_j. H [I, I] is the damped Hessian of the input, so tr(E H E^T)
is the squared error of the output. Columns are numbered in the order in which they are rounded. H
is factored as (I + U) D (I + U)^T: U [I, I] is strictly upper triangular, D diagonal and positive.
Then

    tr(E H E^T) = sum_j D_j * |t_j - q_j|^2,    t_j = w_j + sum_{i<j} e_i U_ij,

since t_j - q_j = e_j + sum_{i<j} e_i U_ij. The errors e_i, i < j, are known when column j is
rounded, so q_j = round(t_j) makes each term as small as rounding to nearest can. The sum is added
to w_j, not subtracted; tests/unit/numerics/test_feedback.py works that by hand.

Columns are taken in order of the Hessian's diagonal, the largest first. Source: Chee et al. 2023,
arXiv:2307.13304 (LDLQ), which shows that this takes GPTQ's decisions.

Neighbours that are one entry of a codebook are rounded together. For a unit V of columns, with c_j
the part of the sum over columns outside of it and A = (I + U_VV)^T, its terms are

    sum_{j in V} D_j * |(A (w - q))_j + c_j|^2 = (q - t)^T M (q - t),
    t = w + A^-1 c,    M = A^T D A,

so q is the entry nearest to t under M. Source: van Baalen et al. 2024, arXiv:2402.15319 (GPTVQ),
which rounds vectors so, there by M's diagonal alone.
"""

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from quantflow.accelerators import runs_triton
from quantflow.core import affine, codebooks, groups
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.qtensor import qvalue_dtype
from quantflow.core.result import JSON
from quantflow.core.scheme import TensorScheme
from quantflow.errors import StatisticsError
from quantflow.numerics import compiled_rounding
from quantflow.numerics.cholesky import cholesky_, mirror_, reorder_
from quantflow.numerics.grid import Grid

# Constants, since they order the sums and so are part of the result.
BLOCK = 128  # columns whose errors reach the columns after them in one product
_SUB_BLOCK = 32  # columns whose errors reach the rest of their block in one product
DAMPINGS = (0.01, 0.1, 1.0)  # tried in this order, as fractions of the mean diagonal

# One thread at a time goes from column to column with torch's operators, while others multiply. The
# work of a column is so short that two threads would hand the interpreter's lock to each other at
# every step.
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """The factor by which the error of a column reaches the later ones.

    A Cholesky factorisation eliminates from the first row on, while U needs the last column first.
    So rows and columns are stored in reverse: the last column to be rounded comes first. The factor
    is then lower triangular: it is I + U with rows and columns reversed.

    Attributes:
        order: [I] int64, the columns from the last to be rounded to the first.
        lower: [I, I] float32, I + U in that order below the diagonal; above it the matrix itself,
            times a power of two; the diagonal has no meaning.
        diagonal: [I] float64, the diagonal of the matrix in that order, times the same power of
            two.
        pivots: [I] float32, the diagonal of D in that order, times the same power of two.
        damping: number added to the diagonal, in the matrix's own scale.
        share: the damping as a fraction of the mean diagonal.
        decisions: damping, attempts and dead channels, for the record.
    """

    order: Tensor
    lower: Tensor
    diagonal: Tensor
    pivots: Tensor
    damping: float
    share: float
    decisions: dict[str, JSON]


def feedback_of(
    matrix: Tensor,
    *,
    name: str,
    statistic: str = "matrix",
    dampings: Sequence[float] = DAMPINGS,
    order: Tensor | None = None,
    workers: Workers = SEQUENTIAL,
    in_place: bool = False,
) -> Feedback:
    """The factor of a damped sum of x^T x; a constant factor of the sum does not matter.

    Args:
        matrix: [I, I] float32, its diagonal finite and at least zero.
        name: tensor's name, for messages.
        statistic: the matrix's name, for messages.
        dampings: fractions of the mean diagonal; the first that makes the matrix positive definite
            is added.
        order: [I] int64, the columns from the last to be rounded to the first; None is by ascending
            diagonal.
        workers: run blocks; how many there are changes nothing but the time.
        in_place: overwrite `matrix`.

    Raises:
        StatisticsError: the matrix holds NaN or Inf, or stays indefinite under every damping.
    """
    diagonal = matrix.diagonal().double()
    dead = diagonal == 0
    # The mean is over living channels: their damping does not depend on how many others are dead.
    mean = diagonal[~dead].mean().item() if not dead.all() else 1.0
    # A power of two brings the mean near 1: the damping is then no subnormal, and an input in other
    # units gives the same bits.
    unit = 2.0 ** -min(max(math.frexp(mean)[1], -120), 120)
    if order is None:
        order = torch.argsort(diagonal, descending=True, stable=True).flip(0)
    # A dead channel has a zero row and column: damping alone makes it positive, and independent of
    # all others.
    own = diagonal[order] * unit
    lower = (matrix.mul_(unit) if in_place else matrix * unit).float().contiguous()
    if not reorder_(lower, order, workers=workers):
        raise StatisticsError(f"{name}: {statistic} holds NaN or Inf", "measure again")
    for attempt, damping in enumerate(dampings, start=1):
        if attempt > 1:
            mirror_(lower)
        lower.diagonal().copy_(own + damping * mean * unit)
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
                diagonal=own,
                pivots=roots.square(),
                damping=damping * mean,
                share=damping,
                decisions=decisions,
            )
    raise StatisticsError(
        f"{name}: {statistic} is not positive definite with a damping of {dampings[-1]} times "
        "its mean diagonal",
        "the statistic is damaged; measure again",
    )


def order_of_units(diagonal: Tensor, unit: int) -> Tensor:
    """The columns from the last to be rounded to the first, neighbours of a unit together.

    Units are in order of their sums of the diagonal.

    Args:
        diagonal: [I], the matrix's.
        unit: neighbours that are rounded together, a divisor of I.
    """
    sums = diagonal.double().view(-1, unit).sum(dim=1)
    units = torch.argsort(sums, descending=True, stable=True).flip(0)
    return (units[:, None] * unit + torch.arange(unit, device=units.device)).flatten()


def gathered(rows: Sequence[Tensor], *, order: Tensor) -> Tensor:
    """Rows of weights, transposed and with their columns in `order`, [I, R] float32.

    Args:
        rows: weights, [., I] each; R is the sum of their rows.
        order: [I] int64.
    """
    work = torch.empty(order.numel(), sum(len(part) for part in rows), device=order.device)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    first = 0
    for part in rows:
        last = first + len(part)
        for columns in groups.spans(order.numel(), BLOCK):
            # float32 first: torch transposes it five times as fast as bfloat16
            work[place[columns], first:last] = part[:, columns].float().T.contiguous()
        first = last
    return work


def per_row(pieces: Sequence[tuple[Grid, slice]]) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points of rows of several grids, transposed, [G, R] float32 each."""
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
    """Round weights column by column, each making up for the errors of the columns before it.

    Everything is transposed, so that a column of the weights is contiguous.

    Args:
        work: [I, R], the weights in the order of `feedback` (`gathered`); afterwards E, weight -
            rounded weight.
        scales: [G, R], groups in the order of the weights' own columns.
        zero_points: [G, R], or None.
        scheme: any.
        feedback: factor of the rows' Hessian.

    Returns:
        The qvalues, [I, R], in the order of the weights' own columns.
    """
    lower = feedback.lower
    columns, width = work.shape
    qvalue = torch.empty(columns, width, dtype=qvalue_dtype(scheme), device=work.device)
    rounding = _rounding_of_blocks(work.device, scheme)
    operands: dict[str, Any] = {
        "work": work,
        "lower": lower,
        "order": feedback.order,
        "scales": scales,
        "zero_points": zero_points,
        "scheme": scheme,
        "qvalue": qvalue,
    }
    round_block_ = _Blocks(**operands) if rounding is _Blocks else partial(rounding, **operands)
    # From the last row to the first, since `order` is reversed. `work` holds w_j in rows below
    # `stop` and e_i from there on; the aims are t_j = w_j + sum_i e_i U_ij.
    for stop in range(columns, 0, -BLOCK):
        start = max(0, stop - BLOCK)
        aims = torch.addmm(work[start:stop], lower[stop:, start:stop].T, work[stop:])  # [B, R]
        round_block_(range(start, stop), aims)
    return qvalue


def _rounding_of_blocks(device: torch.device, scheme: TensorScheme) -> Callable[..., Any]:
    """`_Blocks`, or on a GPU the kernel that computes the same, where it takes the scheme."""
    if not runs_triton(device.type):
        return _Blocks
    kernel = import_module("quantflow.numerics.columns_kernel")
    return kernel.round_block_ if kernel.takes(scheme) else _Blocks


class _Blocks:
    """Rounds blocks of columns; writes their qvalues, and their errors in the place of weights.

    C rounds the columns of a sub-block in one call (compiled_rounding.py), where it takes the
    scheme. Else torch's operators do, to the same bits. Their products are so small that a view of
    an operand takes as long. So operands lie in memory that all blocks share, and its views are
    made once.
    """

    def __init__(
        self,
        *,
        work: Tensor,
        lower: Tensor,
        order: Tensor,
        scales: Tensor,
        zero_points: Tensor | None,
        scheme: TensorScheme,
        qvalue: Tensor,
    ) -> None:
        """Take everything but the blocks.

        Args:
            work: [I, R], modified.
            lower: [I, I].
            order: [I].
            scales: [G, R].
            zero_points: [G, R], or None.
            scheme: any.
            qvalue: [I, R], in the order of the weights' own columns.
        """
        size, width = min(BLOCK, len(work)), work.shape[1]
        self._work, self._lower, self._order, self._scheme = work, lower, order, scheme
        self._scales = scales.contiguous()
        self._zero_points = None if zero_points is None else zero_points.contiguous()
        self._scale_rows = self._scales.unbind()
        self._zero_rows = None if self._zero_points is None else self._zero_points.unbind()
        self._groups = order // (len(work) // len(scales))
        self._compiled = compiled_rounding.takes(scheme, work.device)
        # in C columns are not stepped through under the interpreter's lock
        self._turn = nullcontext() if self._compiled else _ONE_AT_A_TIME
        self._qvalue = qvalue.view(torch.uint8)  # torch 2.8 takes no rows of float8
        self._dtype = qvalue.dtype
        # [B, B]: row i holds the factors of the errors that reach column i
        self._within = torch.empty(size, size, device=work.device)
        self._errors = torch.empty(size, width, device=work.device)
        self._rows = self._errors.unbind()
        self._rounded = torch.empty(width, device=work.device)
        # columns of a block -> of each column the later ones' errors, [R, n], and factors, [n]
        self._known: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, columns: range, aims: Tensor) -> None:
        """Round a block.

        Args:
            columns: rows of `work` that are the block.
            aims: [B, R], their weights and what the errors of later rows add to them; overwritten.
        """
        size, block = len(columns), slice(columns.start, columns.stop)
        errors, within = self._errors[:size], self._within[:size, :size]
        errors.copy_(self._work[block])
        within.copy_(self._lower[block, block].T)
        groups = self._groups[block]
        with self._turn:
            for end in range(size, 0, -_SUB_BLOCK):
                part = range(max(0, end - _SUB_BLOCK), end)
                aims[part.start : end].addmm_(within[part.start : end, end:], errors[end:])
                if self._compiled:
                    compiled_rounding.round_columns_(
                        aims,
                        errors,
                        within,
                        columns=part,
                        groups=groups,
                        scales=self._scales,
                        zero_points=self._zero_points,
                        scheme=self._scheme,
                    )
                else:
                    self._round_columns(aims, part, groups.tolist())
        self._qvalue[self._order[block]] = aims.to(self._dtype).view(torch.uint8)
        self._work[block] = errors

    def _round_columns(self, aims: Tensor, columns: range, groups: Sequence[int]) -> None:
        """`compiled_rounding.round_columns_` by torch's operators."""
        codes, known = aims.unbind(), self._known_of(len(aims))
        for i in reversed(columns):
            if i + 1 < columns.stop:
                codes[i].addmv_(*known[i])
            self._round(i, codes[i], groups[i])

    def _round(self, i: int, code: Tensor, group: int) -> None:
        """Replace the aims [R] of a column by its qvalues, and its weights by its errors."""
        scale = self._scale_rows[group]
        code.div_(scale)
        if self._zero_rows is None:
            affine.round_(code, None, self._scheme)
            torch.mul(code, scale, out=self._rounded)
        else:
            zero_point = self._zero_rows[group]
            affine.round_(code, zero_point, self._scheme)
            torch.sub(code, zero_point, out=self._rounded).mul_(scale)
        self._rows[i].sub_(self._rounded)  # e = w - q

    def _known_of(self, size: int) -> list[tuple[Tensor, Tensor]]:
        """The operands of each column's product with the columns of its sub-block after it."""
        if size not in self._known:
            ends = [size - (size - 1 - i) // _SUB_BLOCK * _SUB_BLOCK for i in range(size)]
            self._known[size] = [
                (self._errors[i + 1 : end].T, self._within[i, i + 1 : end])
                for i, end in enumerate(ends)
            ]
        return self._known[size]


def round_units_(
    work: Tensor, scales: Tensor, *, scheme: TensorScheme, feedback: Feedback
) -> Tensor:
    """Round weights unit by unit onto the entries of a codebook; otherwise as `round_columns_`.

    Args:
        work: [I, R], the weights in the order of `feedback`, which is one of `order_of_units`;
            afterwards E, weight - rounded weight.
        scales: [G, R], groups in the order of the weights' own columns.
        scheme: its block type has a codebook.
        feedback: factor of the rows' Hessian.

    Returns:
        The qvalues, [I, R], in the order of the weights' own columns.
    """
    kind = scheme.block
    assert kind is not None
    lower, unit = feedback.lower, codebooks.unit(kind)
    qvalue = torch.empty(work.shape, dtype=qvalue_dtype(scheme), device=work.device)
    places = feedback.order[::unit].tolist()
    for stop in range(len(work), 0, -BLOCK):
        start = max(0, stop - BLOCK)
        outside = lower[stop:, start:stop].T @ work[stop:]  # [B, R]
        for end in range(stop, start, -unit):
            columns = slice(end - unit, end)
            within = lower[columns, columns].tril(-1)
            within.diagonal().fill_(1)
            sums = torch.addmm(
                outside[end - unit - start : end - start],
                lower[end:stop, columns].T,
                work[end:stop],
            )
            moved = torch.linalg.solve_triangular(within.T, sums, upper=True, unitriangular=True)
            metric = within @ (feedback.pivots[columns, None] * within.T)
            place = places[(end - unit) // unit]
            scale = scales[place // kind.group_size]  # [R]
            wanted = (work[columns] + moved).div_(scale)
            rounded = codebooks.round_units(wanted.T.contiguous(), kind, metric).T  # [u, R]
            qvalue[place : place + unit] = rounded
            work[columns] -= rounded * scale  # e = w - q
    return qvalue

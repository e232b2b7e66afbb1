"""Descent where neighbours are one entry of a codebook: a move takes another entry.

A unit V of neighbours (quantflow/core/codebooks.py) of row r changes by d. With the errors E = W -
Q, L = G E H and the damped G and H of quantflow/algorithms/yaqa/descent.py the loss falls by

    2 d L_rV^T - G_rr d H_VV d^T,

so the best entry is the one nearest to q + H_VV^-1 L_rV / G_rr under the metric H_VV. Signs change
with it, and a rule of signs is kept.

Every row's best entry is looked for once a unit, before any row moves. Then the row whose move
gains most moves, then the next, until none gains: each gain is taken anew with the gradient that
the moves so far left, while the entries stay those that were found. A row moves once a unit.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantflow.core import codebooks, groups
from quantflow.core.block_types import BlockType

_COLUMNS = 64  # columns whose changes reach the gradient of later columns in one product
_Values = NDArray[np.float32]


def moves_(
    now: Tensor,
    gradient: Tensor,
    *,
    scales: Tensor,
    coupling: Tensor,
    matrix: Tensor,
    curves: Sequence[float],
    kind: BlockType,
) -> Tensor:
    """Move the qvalues of a block of rows, unit by unit; return the change of rounded weights.

    Args:
        now: [I, R] qvalues, entries of the codebook; modified.
        gradient: [I, R], G E H; overwritten.
        scales: [groups, R].
        coupling: [R, R], damped G among the rows.
        matrix: [I, I], H without its damping.
        curves: I values, the diagonal of H with its damping.
        kind: type with a codebook, whose length divides 64.

    Returns:
        The change of the rounded weights, [I, R].
    """
    change = torch.zeros_like(now)
    size = codebooks.unit(kind)
    group_size = len(now) // len(scales)
    damped = torch.tensor(curves)
    for columns in groups.spans(len(now), _COLUMNS):
        felt = torch.zeros(columns.stop - columns.start, now.shape[1])
        for first in range(columns.start, columns.stop, size):
            unit = slice(first, first + size)
            metric = matrix[unit, unit].clone()
            metric.diagonal().copy_(damped[unit])
            scale = scales[first // group_size]
            steps = _moves_of_unit(
                now[unit], gradient[unit], scale, coupling=coupling, metric=metric, kind=kind
            )
            if steps is None:
                continue
            now[unit] += steps
            change[unit] = steps * scale
            within = slice(first - columns.start, first - columns.start + size)
            felt[within] = change[unit] @ coupling
            after = slice(unit.stop, columns.stop)
            gradient[after] -= matrix[after, unit] @ felt[within]
        gradient[columns.stop :].addmm_(matrix[columns.stop :, columns], felt, alpha=-1)
    return change


def _moves_of_unit(
    now: Tensor,
    gradient: Tensor,
    scale: Tensor,
    *,
    coupling: Tensor,
    metric: Tensor,
    kind: BlockType,
) -> Tensor | None:
    """The steps of qvalues that rows take in a unit, [u, R]; None where no row gains.

    Args:
        now: [u, R] qvalues.
        gradient: [u, R].
        scale: [R].
        coupling: [R, R].
        metric: [u, u], damped H of the unit.
        kind: type with a codebook.
    """
    own = coupling.diagonal()
    # a row without gradients has no gradient here either, and stays
    curve = (own * scale).clamp_min(torch.finfo(torch.float32).tiny)
    aims = torch.linalg.solve(metric, gradient).div_(curve).add_(now)
    steps = codebooks.round_units(aims.T.contiguous(), kind, metric).T - now
    moves = steps * scale
    felt = metric @ moves
    cost = (felt * moves).sum(dim=0) * own
    chosen = _chosen(
        moves.numpy(), gradient.numpy(), felt.numpy(), cost.numpy(), coupling=coupling.numpy()
    )
    return steps * torch.from_numpy(chosen) if chosen.any() else None


def _chosen(
    moves: _Values, gradient: _Values, felt: _Values, cost: _Values, *, coupling: _Values
) -> NDArray[np.bool_]:
    """The rows that move, [R]: the one that gains most, then the next, until none gains.

    Args:
        moves: [u, R], each row's change of rounded weights if it moves.
        gradient: [u, R].
        felt: [u, R], the metric times the moves.
        cost: [R], the second-order cost of each row's move by itself.
        coupling: [R, R], damped G among the rows.
    """
    left = (moves * gradient).sum(axis=0)
    chosen = np.zeros(len(cost), dtype=bool)
    for _ in range(len(cost)):
        gains = np.where(chosen, -np.inf, 2 * left - cost)
        row = int(gains.argmax())
        if not gains[row] > 0:
            break
        chosen[row] = True
        # what this move leaves of the gradient by the other rows, along their moves
        left -= coupling[row] * (felt[:, row] @ moves)
    return chosen

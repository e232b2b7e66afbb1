"""Both steps of YAQA where neighbours are one entry of a codebook: units of 4 or 8 columns.

A unit of a row is rounded as one: the nearest entry under a metric M of its columns
(quantflow/core/codebooks.py).

Feedback takes the rows block by block. A block aims at w_i + sum_{k<i} M_ik e_k
(quantflow/algorithms/yaqa/wavefront.py) and is rounded for that aim as GPTQ rounds units
(quantflow/numerics/feedback.py).

Descent moves units. With P = G E H half the negative gradient and V the columns of a unit, a change
d [V] of row r's rounded weights changes the loss by

    G_rr d H_VV d^T - 2 d P_rV^T = G_rr |d - P_rV H_VV^-1 / G_rr|^2 in the metric H_VV, less a
    constant,

so the best entry is the one nearest to q + P_rV H_VV^-1 / G_rr under H_VV. Each row has such a
candidate. The row whose candidate gains most moves, the gains of the others follow by G, then the
next row moves, until none gains. So the loss never grows, also where the nearest entry is found
with less than H_VV (two entries with even signs). Source: van Baalen et al. 2024, arXiv:2402.15319
(GPTVQ), for vectors rounded with feedback; Behdin et al. 2023, arXiv:2309.01885, for the descent,
there weight by weight.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantflow.algorithms.yaqa.wavefront import owed_
from quantflow.core import codebooks, groups
from quantflow.core.scheme import TensorScheme
from quantflow.numerics.feedback import Feedback, order_of_units, round_units_
from quantflow.numerics.grid import Grid

# Columns whose changes reach the gradient of later columns in one product; part of the result,
# because it orders the sums.
_COLUMNS = 64
_Array = NDArray[np.float32]


def has_units(scheme: TensorScheme) -> bool:
    """Whether neighbours of a scheme's weights are entries of a codebook."""
    return scheme.block is not None and scheme.block.codebook is not None


def order_of(diagonal: Tensor, scheme: TensorScheme) -> Tensor:
    """The columns from the last to be rounded to the first, by H's diagonal [I]; units together."""
    assert scheme.block is not None
    return order_of_units(diagonal, codebooks.unit(scheme.block))


def round_rows(
    weight: Tensor,
    grid: Grid,
    *,
    scheme: TensorScheme,
    rows: Feedback,
    parts: Sequence[Tensor],
    columns: Feedback,
) -> Tensor:
    """Round a weight with feedback over columns and rows, [O, I] int8.

    Args:
        weight: [O, I], any float dtype.
        grid: scales, one or more for each row.
        scheme: its block type has a codebook.
        rows: factor of G, in the order of `parts`; overwritten.
        parts: rows in blocks, int64 each, from the last to be rounded to the first; rows of a block
            do not make up for each other.
        columns: factor of H, in the order of `order_of`.
    """
    qvalue = torch.empty(weight.shape, dtype=torch.int8)
    errors = torch.empty(weight.shape)  # rows in their places
    blocks, stop = [], 0
    for part in parts:
        blocks.append(slice(stop, stop + len(part)))
        stop += len(part)
    owed = owed_(rows.lower, blocks[::-1])
    for block, part in zip(blocks[::-1], parts[::-1], strict=True):
        real, scale = weight[part].float(), grid.scale[part]
        aim = torch.addmm(real, owed[block, block.stop :], errors[block.stop :])
        work = aim.T.index_select(0, columns.order)  # [I, R]
        rounded = round_units_(work, scale.T.contiguous(), scheme=scheme, feedback=columns).T
        errors[block] = real - rounded * groups.expand(scale, rounded.shape[1])
        qvalue[part] = rounded
    return qvalue


def moves_(
    now: Tensor,
    gradient: Tensor,
    *,
    scales: Tensor,
    coupling: Tensor,
    matrix: Tensor,
    damping: float,
    scheme: TensorScheme,
) -> Tensor:
    """Move the qvalues of a block of rows; return the change of the rounded weights, [I, R].

    Args:
        now: [I, R] float32, qvalues, modified.
        gradient: [I, R], G E H of the block transposed; overwritten.
        scales: [G, R].
        coupling: [R, R], damped G among the rows.
        matrix: H, [I, I], not damped.
        damping: number added to H's diagonal.
        scheme: its block type has a codebook.
    """
    kind = scheme.block
    assert kind is not None
    unit, change = codebooks.unit(kind), torch.zeros_like(now)
    own = coupling.diagonal()
    for columns in groups.spans(len(now), _COLUMNS):
        for start in range(columns.start, columns.stop, unit):
            here = slice(start, start + unit)
            metric = matrix[here, here] + damping * torch.eye(unit)
            scale = scales[start // kind.group_size]  # [R]
            # where G_rr is zero no row moves, since nothing is gained there
            aim = torch.linalg.solve(metric, gradient[here]) / own.clamp_min(1e-30)
            wanted = (now[here] + aim / scale).T.contiguous()  # [R, u]
            points = codebooks.round_units(wanted, kind, metric).T - now[here]
            steps = points * scale  # [u, R]
            moved = _moving_rows(
                steps.numpy(), gradient[here].numpy(), coupling.numpy(), metric.numpy()
            )
            if len(moved):
                rows = torch.tensor(moved)
                now[here, rows] += points[:, rows]
                change[here, rows] = steps[:, rows]
                felt = change[here] @ coupling  # [u, R]
                after = slice(here.stop, columns.stop)
                gradient[after].addmm_(matrix[after, here], felt, alpha=-1)
        felt = change[columns] @ coupling
        gradient[columns.stop :].addmm_(matrix[columns.stop :, columns], felt, alpha=-1)
    return change


def _moving_rows(steps: _Array, left: _Array, coupling: _Array, metric: _Array) -> list[int]:
    """The rows that take their candidates, in the order of their moves.

    Args:
        steps: [u, R], change of the rounded weights by each row's candidate.
        left: [u, R], half the negative gradient by the unit, before any row moves.
        coupling: [R, R].
        metric: [u, u].
    """
    felt = metric @ steps  # [u, R]
    costs = (steps * felt).sum(axis=0) * coupling.diagonal()
    moved: list[int] = []
    gains = 2 * (steps * left).sum(axis=0) - costs
    # The gains of the others change by the product of their steps with the mover's, times G.
    products = 2 * (steps.T @ felt) * coupling  # [R, R]
    while True:
        row = int(gains.argmax())
        if not gains[row] > 0:
            return moved
        moved.append(row)
        gains -= products[row]
        gains[row] = -np.inf

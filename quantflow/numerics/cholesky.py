"""Cholesky factorisation in place, for matrices of which there is room for one.

`torch.linalg.cholesky` makes a second matrix, and a third on the way. This one works on blocks of
the matrix itself: every block is updated with all columns to its left (a product), then divided by
the factor of the block on the diagonal. The blocks of a column are independent of each other, so
the number of workers changes no bit. Source: Golub and Van Loan, Matrix Computations, 4th edition,
section 4.2.
"""

import torch
from torch import Tensor

from quantflow.core.groups import spans
from quantflow.core.parallel import SEQUENTIAL, Workers

_BLOCK = 256  # rows and columns; part of the result, because it orders the sums


def cholesky_(matrix: Tensor, *, workers: Workers = SEQUENTIAL) -> bool:
    """Replace the lower triangle of `matrix` by L, with L L^T = matrix.

    Args:
        matrix: [K, K] float32 or float64, contiguous. Only its lower triangle is read; the part
            above the diagonal stays. Each worker needs 3 * 256 * 256 elements of its own.
        workers: run blocks; how many there are changes nothing but the time.

    Returns:
        Whether the matrix is positive definite within its rounding. If not, its lower triangle is
        left half done.
    """
    for columns in spans(matrix.shape[0], _BLOCK):
        left = slice(0, columns.start)
        corner = matrix[columns, columns]
        above = corner.triu(1)
        corner.addmm_(matrix[columns, left], matrix[columns, left].T, alpha=-1)
        factor, failed = torch.linalg.cholesky_ex(corner)
        corner.copy_(factor.tril() + above)
        if failed:
            return False

        def below(
            rows: slice, columns: slice = columns, left: slice = left, factor: Tensor = factor
        ) -> None:
            block = matrix[rows, columns]
            block.addmm_(matrix[rows, left], matrix[columns, left].T, alpha=-1)
            block.copy_(torch.linalg.solve_triangular(factor.T, block, upper=True, left=False))

        workers.map(below, spans(matrix.shape[0], _BLOCK, start=columns.stop))
    return True


def reorder_(matrix: Tensor, order: Tensor, *, workers: Workers = SEQUENTIAL) -> bool:
    """Put the columns and the rows of a matrix in another order, in its own memory.

    Args:
        matrix: [K, K].
        order: [K] int64, the old index of each new row and column.
        workers: run blocks; each needs 256 K elements.

    Returns:
        Whether the matrix is finite.
    """

    def columns_of(rows: slice) -> bool:
        part = matrix[rows].index_select(1, order)
        matrix[rows] = part
        return all(bool(torch.isfinite(end)) for end in torch.aminmax(part))

    def rows_of(columns: slice) -> None:
        matrix[:, columns] = matrix[:, columns].index_select(0, order)

    finite = all(workers.map(columns_of, spans(matrix.shape[0], _BLOCK)))
    workers.map(rows_of, spans(matrix.shape[0], _BLOCK))
    return finite


def mirror_(matrix: Tensor) -> None:
    """Copy the part of a matrix [K, K] above its diagonal to below it, which undoes `cholesky_`.

    For a transposed view, the part below goes above.
    """
    for rows in spans(matrix.shape[0], _BLOCK):
        matrix[rows.stop :, rows] = matrix[rows, rows.stop :].T
        corner = matrix[rows, rows]
        corner.copy_(corner.triu() + corner.triu(1).T)

"""Cholesky factorisation in place, for matrices of which there is room for one.

`torch.linalg.cholesky` makes a second matrix, and a third on the way. This one works on blocks of the matrix itself:
every block is brought up to date with all columns to its left (a product), then divided by the factor of the block on the
diagonal. The blocks of a column are independent of each other and of how many work on them.
Source: Golub and Van Loan, Matrix Computations, 4th edition, section 4.2.
"""

import torch
from torch import Tensor

from quantflow.core.groups import spans
from quantflow.core.parallel import SEQUENTIAL, Workers

_BLOCK = 256  # rows and columns; part of the result, because it orders the sums


def cholesky_(matrix: Tensor, *, workers: Workers = SEQUENTIAL) -> bool:
    """Replace the lower triangle of `matrix` by L, with L L^T = matrix.

    Args:
        matrix: [K, K] float32 or float64, contiguous; only its lower triangle is read. What is above the diagonal has no
            meaning afterwards. Beyond it, each worker needs 2 * 256 * 256 elements.
        workers: run blocks; how many there are changes nothing but the time.

    Returns:
        Whether the matrix is positive definite within its rounding; if not, it is left half done.
    """
    for columns in spans(matrix.shape[0], _BLOCK):
        left = slice(0, columns.start)
        corner = matrix[columns, columns]
        corner.addmm_(matrix[columns, left], matrix[columns, left].T, alpha=-1)
        factor, failed = torch.linalg.cholesky_ex(corner)
        if failed:
            return False
        corner.copy_(factor)

        def below(rows: slice, columns: slice = columns, left: slice = left, factor: Tensor = factor) -> None:
            block = matrix[rows, columns]
            block.addmm_(matrix[rows, left], matrix[columns, left].T, alpha=-1)
            block.copy_(torch.linalg.solve_triangular(factor.T, block, upper=True, left=False))

        workers.map(below, spans(matrix.shape[0], _BLOCK, start=columns.stop))
    return True

"""Outputs of a linear in blocks, between which nothing is known of their gradients.

The sum of g^T g over the gradients by O outputs is [O, O]: 0.8 GB for 13,824 of them. Kept are its
blocks on the diagonal, one below the other, [O, W]: row o holds the products of output o with those
of its own block. Up to `MOST` outputs are one block, and the sum is whole. More are cut into equal
blocks of a multiple of `ALIGNED`, so that few heads are cut; a last block of fewer outputs leaves
zeros at the end of its rows.

What rounding the rows of one block costs then does not depend on the rows of another: they are
rounded by themselves.

What is lost: on the example model, whose linears have 256 to 1024 outputs, W4A16 has a mean KLD of
0.00783 with whole sums and of 0.00828 with `MOST` = 256 (benchmarks/accuracy.py --models tiny-llama
--only "best: W4A16 g128"); gptq, without any, 0.01009.
"""

import torch
from torch import Tensor

from quantflow.core.groups import spans

# Constants, since they say what is known of the gradients and so are part of the result.
MOST = 2048
ALIGNED = 128


def width(outputs: int) -> int:
    """Return W: how many outputs a block has, the last one perhaps fewer."""
    if outputs <= MOST:
        return outputs
    equal = -(-outputs // -(-outputs // MOST))
    return -(-equal // ALIGNED) * ALIGNED


def blocks(outputs: int) -> list[slice]:
    """Return the outputs of every block."""
    return spans(outputs, max(1, width(outputs)))


def nbytes(outputs: int) -> int:
    """Return the bytes of the float32 sums of a linear."""
    return 4 * outputs * width(outputs)


def block_of(sums: Tensor, rows: slice) -> Tensor:
    """Return the sum of one block, a view.  sums: [O, W], rows: of the block; returns [R, R]."""
    return sums[rows, : rows.stop - rows.start]


def diagonal_of(sums: Tensor) -> Tensor:
    """Return the sums of squares of every output.  sums: [O, W]; returns [O]."""
    return torch.cat(
        [sums.new_empty(0), *(block_of(sums, rows).diagonal() for rows in blocks(sums.shape[0]))]
    )


def scale_(sums: Tensor, factors: Tensor) -> Tensor:
    """Make of the sums those of g * factors, in place, and return them.  sums: [O, W]; factors: [O]."""
    for rows in blocks(sums.shape[0]):
        block_of(sums, rows).mul_(factors[rows, None]).mul_(factors[rows])
    return sums


def cut(sums: Tensor, part: slice) -> Tensor:
    """Return the sums of some outputs by themselves; products of two whose blocks were others are not known, and zero.

    Args:
        sums: [O, W].
        part: which outputs, P of them.

    Returns:
        [P, width(P)].
    """
    count = part.stop - part.start
    found = sums.new_zeros(count, width(count))
    for old in blocks(sums.shape[0]):
        for new in blocks(count):
            first, stop = (
                max(old.start, part.start + new.start),
                min(old.stop, part.start + new.stop),
            )
            if first < stop:
                mine = slice(first - part.start - new.start, stop - part.start - new.start)
                theirs = slice(first - old.start, stop - old.start)
                block_of(found, new)[mine, mine] = block_of(sums, old)[theirs, theirs]
    return found

"""Outputs of a linear in blocks, so that the sum of their gradients' products fits into memory.

The sum of g^T g over the gradients by O outputs is [O, O]: 0.8 GB for 13,824 outputs. Only its
blocks on the diagonal are kept, one below the other, [O, W]: row o holds the products of output o
with the outputs of its own block. Up to `MOST` outputs are one block, and the sum is whole. More
are cut into equal blocks of a multiple of `ALIGNED`, so that few heads are cut; a last block of
fewer outputs leaves zeros at the end of its rows.

The loss of rounding the rows of one block then does not depend on the rows of another, so each
block is rounded by itself.

The price: on the example model, whose linears have 256 to 1024 outputs, W4A16 has a mean KLD of
0.00783 with whole sums and of 0.00828 with `MOST` = 256 (benchmarks/accuracy.py --models tiny-llama
--only "best: W4A16 g128"); gptq, without any, 0.01009.
"""

import torch
from torch import Tensor

from quantflow.core.groups import spans, unit_bytes
from quantflow.core.orthogonal import HadamardRotation, rotate_rows_

# Constants, since they decide which products are kept and so are part of the result.
MOST = 2048
ALIGNED = 128


def width(outputs: int) -> int:
    """W, the number of outputs of a block; the last block may have fewer."""
    if outputs <= MOST:
        return outputs
    equal = -(-outputs // -(-outputs // MOST))
    return -(-equal // ALIGNED) * ALIGNED


def blocks(outputs: int) -> list[slice]:
    """The outputs of every block."""
    return spans(outputs, max(1, width(outputs)))


def nbytes(outputs: int) -> int:
    """The bytes of the float32 sums of a linear."""
    return 4 * outputs * width(outputs)


def block_of(sums: Tensor, rows: slice) -> Tensor:
    """The sum of one block [R, R], a view of sums [O, W]."""
    return sums[rows, : rows.stop - rows.start]


def diagonal_of(sums: Tensor) -> Tensor:
    """The sum of squares of every output, [O], from sums [O, W]."""
    return torch.cat(
        [sums.new_empty(0), *(block_of(sums, rows).diagonal() for rows in blocks(sums.shape[0]))]
    )


def scale_(sums: Tensor, factors: Tensor) -> Tensor:
    """Turn the sums [O, W] of g into those of g * factors [O], in place, and return them."""
    for rows in blocks(sums.shape[0]):
        block_of(sums, rows).mul_(factors[rows, None]).mul_(factors[rows])
    return sums


def rotated(sums: Tensor, by: HadamardRotation) -> Tensor:
    """The sums [O, W] of g Q, Q^T G Q, from those of g; products between blocks count as zero.

    They are zero in G, where they were not kept, and are not kept of the result. A rotation that
    mixes the outputs of several blocks takes 4 W O^2 additions and multiplications.

    Args:
        sums: [O, W] float32; not modified.
        by: Q, of outputs y Q; each `by.size` outputs are rotated by themselves.
    """
    total, parts = torch.zeros_like(sums), blocks(sums.shape[0])
    apart = width(sums.shape[0]) % by.size == 0  # each block then stays by itself
    for rows in parts:
        if apart:
            block = block_of(sums, rows)
            half = rotate_rows_(torch.empty_like(block), block, by)
            rotate_rows_(block_of(total, rows), half.T, by)
        else:
            _add_rotated_(total, block_of(sums, rows), rows, by)
    return total


def _add_rotated_(total: Tensor, block: Tensor, rows: slice, by: HadamardRotation) -> None:
    """Add what a block of products contributes to every block of the rotated sums."""
    outputs = total.shape[0]
    units = torch.zeros(len(block), outputs)
    units.diagonal(rows.start).fill_(1)
    # the rows of Q that meet the block, [R, O]
    turned = rotate_rows_(torch.empty_like(units), units, by)
    del units
    half = block @ turned
    for new in blocks(outputs):
        block_of(total, new).addmm_(turned[:, new].T, half[:, new])


def rotation_bytes(outputs: int) -> int:
    """The most memory that `rotated` takes beside the sums, in bytes: its result and 2 [W, O]."""
    return 3 * nbytes(outputs) + unit_bytes(outputs)


def shrink_(sums: Tensor, *, share: float = 1.0) -> Tensor:
    """Add a share of its mean to the diagonal of every block, in place, and return the sums.

    It is to gradients of few tokens what `shrink_` of a Hessian is to their inputs
    (quantflow/observers/hessian.py). A block of zeros stays zero.
    """
    for rows in blocks(sums.shape[0]):
        diagonal = block_of(sums, rows).diagonal()
        diagonal += (share * diagonal.double().mean()).to(sums.dtype)
    return sums


def cut(sums: Tensor, part: slice) -> Tensor:
    """The sums of some outputs by themselves.

    Products of two outputs that were in different blocks were not kept and become zero.

    Args:
        sums: [O, W].
        part: the outputs to keep, P of them.

    Returns:
        [P, width(P)].
    """
    count = part.stop - part.start
    own_sums = sums.new_zeros(count, width(count))
    for old in blocks(sums.shape[0]):
        for new in blocks(count):
            first = max(old.start, part.start + new.start)
            stop = min(old.stop, part.start + new.stop)
            if first < stop:
                mine = slice(first - part.start - new.start, stop - part.start - new.start)
                theirs = slice(first - old.start, stop - old.start)
                block_of(own_sums, new)[mine, mine] = block_of(sums, old)[theirs, theirs]
    return own_sums

"""A block of columns rounded with error feedback in one kernel of Triton, all rows at once.

`quantflow.numerics.feedback` says what is computed. A program has some rows of the weights, and the
aims t_k of the block's columns for them in registers. It goes through the columns in their order:

    q_i = round(t_i),    e_i = w_i - q_i,    t_k += e_i U_ik  for all columns k after i

so the errors of a column reach the aims at once, and nothing is read back. Errors go out, and the
block's errors reach the columns after the block in one product, which is torch's. A sum has one
order whatever the rows and the card: that of the columns. Products are rounded before they are
added (no fused multiply-add), as Triton's interpreter does it.

The module imports the package triton, so it is imported where a weight is on a GPU.
"""

import triton
import triton.language as tl
from torch import Tensor

from quantflow.core.scheme import TensorScheme

WARPS = 4
ROWS = 32  # of a program: 32 registers of a thread hold its aims of 128 columns
# 1.5 * 2^23: adding and subtracting it rounds a float32 below 2^22 to an integer, half to even
_TO_INTEGER = tl.constexpr(12582912.0)


@triton.jit
def kernel(
    work,
    aims,
    lower,
    order,
    scales,
    zeros,
    qvalue,
    start,
    size,
    width,
    columns,
    group_size,
    qmin: tl.constexpr,
    qmax: tl.constexpr,
    zeroed: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
):
    """Some rows of one block.  Arguments as those of `round_block_`; size: columns of the block."""
    r = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    there = r < width
    k = tl.arange(0, block)
    at = k[:, None].to(tl.int64) * width + r[None, :]
    aim = tl.load(aims + at, mask=(k[:, None] < size) & there[None, :], other=0.0)
    for step in range(size):
        i = size - 1 - step  # stored in reverse: the last row is rounded first
        place = tl.load(order + start + i)
        of_group = place // group_size * width + r
        scale = tl.load(scales + of_group, mask=there, other=1.0)
        # the sum has one term
        code = tl.div_rn(tl.sum(tl.where(k[:, None] == i, aim, 0.0), axis=0), scale)
        if zeroed:
            zero = tl.load(zeros + of_group, mask=there, other=0.0)
            code += zero
        # bounds are integers, so rounding does not leave them
        code = tl.minimum(tl.maximum(code, qmin), qmax)
        code = (code + _TO_INTEGER) - _TO_INTEGER
        tl.store(qvalue + place * width + r, code.to(tl.int8), mask=there)
        if zeroed:
            code -= zero
        row = (start + i).to(tl.int64)
        weight = tl.load(work + row * width + r, mask=there, other=0.0)
        error = weight - code * scale
        tl.store(work + row * width + r, error, mask=there)
        # U of the columns that come later: left of the diagonal
        factor = tl.load(lower + row * columns + start + k, mask=k < i, other=0.0)
        aim += factor[:, None] * error[None, :]


def takes(scheme: TensorScheme) -> bool:
    """Whether the kernel rounds to a scheme: to integers, one step apart."""
    return scheme.kind == "int" and (scheme.block is None or not scheme.block.points)


def round_block_(
    columns: range,
    aims: Tensor,
    *,
    work: Tensor,
    lower: Tensor,
    order: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    scheme: TensorScheme,
    qvalue: Tensor,
) -> None:
    """Round a block of columns; write its qvalues, and its errors in the place of its weights.

    Args:
        columns: rows of `work` that are the block, at most a power of two.
        aims: [B, R] float32, contiguous: the block's weights and what the errors of later rows add.
        work: [I, R] float32, contiguous.
        lower: [I, I] float32, contiguous; read left of the diagonal, within the block.
        order: [I] int64, place of each row of `work` among the weights' own columns.
        scales: [G, R] float32.
        zero_points: [G, R] float32, or None.
        scheme: one that the kernel `takes`.
        qvalue: [I, R] int8, in the order of the weights' own columns.
    """
    width, scales = work.shape[1], scales.contiguous()
    zeros = scales if zero_points is None else zero_points.contiguous()
    kernel[(triton.cdiv(width, ROWS),)](
        work,
        aims,
        lower,
        order,
        scales,
        zeros,
        qvalue,
        columns.start,
        len(columns),
        width,
        work.shape[0],
        work.shape[0] // scales.shape[0],
        qmin=float(scheme.qmin),
        qmax=float(scheme.qmax),
        zeroed=zero_points is not None,
        block=max(16, triton.next_power_of_2(len(columns))),
        rows=ROWS,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )

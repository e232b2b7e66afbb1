"""Products of inputs as they are with int8 weights, without a wider copy of the weight.

    y[m, o] = sum over groups g  scale[o, g] * sum over columns k of g  x[m, k] qvalue[o, k]

A qvalue is exact in bfloat16 and sums are float32, so the weight is not rounded; only the output
is. Shares of the columns are as in w4a16.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantflow.backends.triton.layout import STAGES, WARPS, sizes


@triton.jit
def kernel(
    x,
    qvalue,
    scale,
    y,
    tokens,
    rows,
    columns: tl.constexpr,
    group: tl.constexpr,
    shares: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    dot: tl.constexpr,
):
    """One block of the output's share.  y: [shares, tokens, rows] float32."""
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    m = tl.program_id(1) * block_m + tl.arange(0, block_m)
    share = tl.program_id(2)
    steps: tl.constexpr = (columns + block_k - 1) // block_k
    groups: tl.constexpr = columns // group
    k = tl.arange(0, block_k)
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    n_long, m_long = n.to(tl.int64), m.to(tl.int64)
    there = m[:, None] < tokens
    for step in range(share * steps // shares, (share + 1) * steps // shares):
        column = step * block_k + k
        inside = column[None, :] < columns
        at = n_long[:, None] * columns + column[None, :]
        codes = tl.load(qvalue + at, mask=(n[:, None] < rows) & inside, other=0).to(dot)
        at = m_long[:, None] * columns + column[None, :]
        inputs = tl.load(x + at, mask=there & inside, other=0.0).to(dot)
        place = n_long * groups + step * block_k // group
        factor = tl.load(scale + place, mask=n < rows, other=0.0)
        total += tl.dot(inputs, tl.trans(codes), input_precision="ieee") * factor[None, :]
    at = (share * tokens + m_long[:, None]) * rows + n_long[None, :]
    tl.store(y + at, total, mask=there & (n[None, :] < rows))


def product(x: Tensor, qvalue: Tensor, scale: Tensor, *, block: int) -> Tensor:
    """The product x @ W.T.

    Args:
        x: [M, I] bfloat16, contiguous.
        qvalue: [O, I] int8, contiguous.
        scale: [O, G] float32.
        block: columns of a step, a power of two of 16 or more, which divides a group; any where
            there is one group.

    Returns:
        [M, O] float32.
    """
    (tokens, columns), rows = x.shape, qvalue.shape[0]
    block_m, block_n, shares = sizes(tokens, rows, triton.cdiv(columns, block))
    y = torch.empty(shares, tokens, rows, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, block_n), triton.cdiv(tokens, block_m), shares)
    kernel[grid](
        x,
        qvalue,
        scale,
        y,
        tokens,
        rows,
        columns=columns,
        group=columns // scale.shape[1],
        shares=shares,
        block_m=block_m,
        block_n=block_n,
        block_k=block,
        # the interpreter multiplies bfloat16 by its bits
        dot=tl.float32 if x.device.type == "cpu" else tl.bfloat16,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return y[0] if shares == 1 else y.sum(dim=0)

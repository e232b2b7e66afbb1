"""Products of inputs as they are with int4 weights, without a wider copy of the weight.

    y[m, o] = sum over groups g  scale[o, g] *
              sum over columns k of g  x[m, k] (code[o, k] - zero[o, g])

Codes are qvalue + 8, two to a byte; zero is zero_point + 8. Both factors of the inner sum are exact
in bfloat16, and sums are float32, so the weight is not rounded; only the output is. A program has
some rows and outputs, and a share of the columns. Shares are added up afterwards in their order, so
a sum has one order on any card. Their number is a constant of the shape.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantflow.backends.triton.layout import STAGES, WARPS, sizes


@triton.jit
def kernel(
    x,
    packed,
    scale,
    zero,
    y,
    tokens,
    rows,
    columns: tl.constexpr,
    group: tl.constexpr,
    zeros: tl.constexpr,
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
    half: tl.constexpr = block_k // 2
    steps: tl.constexpr = columns // block_k
    groups: tl.constexpr = columns // group
    j = tl.arange(0, half)
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    inside = n[:, None] < rows
    there = m[:, None] < tokens
    n_long, m_long = n.to(tl.int64), m.to(tl.int64)
    for step in range(share * steps // shares, (share + 1) * steps // shares):
        # byte j of a block: its column j in the lower half, column j + half in the upper one
        at = n_long[:, None] * (columns // 2) + step * half + j[None, :]
        codes = tl.load(packed + at, mask=inside, other=0)
        place = n_long * groups + step * block_k // group
        factor = tl.load(scale + place, mask=n < rows, other=0.0)
        if zeros:
            offset = tl.load(zero + place, mask=n < rows, other=0).to(tl.float32)
        else:
            offset = tl.full((block_n,), 8.0, tl.float32)
        low = ((codes & 15).to(tl.float32) - offset[:, None]).to(dot)
        high = ((codes >> 4).to(tl.float32) - offset[:, None]).to(dot)
        at = m_long[:, None] * columns + step * block_k + j[None, :]
        first = tl.load(x + at, mask=there, other=0.0).to(dot)
        second = tl.load(x + at + half, mask=there, other=0.0).to(dot)
        part = tl.dot(first, tl.trans(low), input_precision="ieee")
        part = tl.dot(second, tl.trans(high), acc=part, input_precision="ieee")
        total += part * factor[None, :]
    at = (share * tokens + m_long[:, None]) * rows + n_long[None, :]
    tl.store(y + at, total, mask=there & (n[None, :] < rows))


def product(x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, *, block: int) -> Tensor:
    """The product x @ W.T.

    Args:
        x: [M, I] bfloat16, contiguous.
        words: [O, I / 2] of `packed`.
        scale: [O, G] float32.
        zero: [O, G] uint8, zero points + 8; None for 8.
        block: columns of a step, which divides a group; 32 or more, a power of two.

    Returns:
        [M, O] float32.
    """
    (tokens, columns), rows = x.shape, words.shape[0]
    block_m, block_n, shares = sizes(tokens, rows, columns // block)
    y = torch.empty(shares, tokens, rows, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, block_n), triton.cdiv(tokens, block_m), shares)
    kernel[grid](
        x,
        words,
        scale,
        words if zero is None else zero,
        y,
        tokens,
        rows,
        columns=columns,
        group=columns // scale.shape[1],
        zeros=zero is not None,
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

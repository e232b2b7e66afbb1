"""Root mean square norms in one kernel; torch takes eight.

    y_k = x_k / sqrt(mean(x^2) + eps) * (offset + w_k)

A program has one row, which it reads twice, the second time from the cache. Sums are float32, in an
order that follows from the width alone. Families differ in where they round to the inputs' dtype:
before the product with the weight (`early`), or after it alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantflow.backends.triton.casts import rounded

WARPS = 4
_TILE = 4096  # inputs of a program at a time


@triton.jit
def kernel(
    x,
    weight,
    y,
    width,
    eps,
    offset: tl.constexpr,
    early: tl.constexpr,
    by_bits: tl.constexpr,
    block: tl.constexpr,
):
    """One row.  x, y: [rows, width]; weight: [width]."""
    to: tl.constexpr = y.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * width
    k = tl.arange(0, block)
    squares = tl.zeros((block,), tl.float32)
    for first in range(0, width, block):
        there = first + k < width
        given = tl.load(x + at + first + k, mask=there, other=0.0).to(tl.float32)
        squares += given * given
    mean = tl.sum(squares, axis=0) / width
    factor = 1.0 / tl.sqrt_rn(mean + eps)
    for first in range(0, width, block):
        there = first + k < width
        given = tl.load(x + at + first + k, mask=there, other=0.0).to(tl.float32)
        normed = given * factor
        if early:
            normed = rounded(normed, to, by_bits).to(tl.float32)
        scale = tl.load(weight + first + k, mask=there, other=0.0).to(tl.float32) + offset
        tl.store(y + at + first + k, rounded(normed * scale, to, by_bits), mask=there)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, offset: float, early: bool) -> Tensor:
    """Rows divided by their root mean square, times a weight.

    Args:
        x: [..., H] float32, bfloat16 or float16.
        weight: [H], of x's dtype.
        eps: added to the mean of squares.
        offset: added to the weight in float32.
        early: round to x's dtype before the product with the weight, and after it; else after it.

    Returns:
        [..., H] in x's dtype.
    """
    x = x.contiguous()
    y, width = torch.empty_like(x), x.shape[-1]
    rows = x.shape[:-1].numel()
    if rows:
        kernel[(rows,)](
            x,
            weight,
            y,
            width,
            eps,
            **constants(width, offset=offset, early=early),
            # the interpreter's cast to bfloat16 drops bits
            by_bits=x.device.type == "cpu" and x.dtype == torch.bfloat16,
            num_warps=WARPS,
        )
    return y


def constants(width: int, *, offset: float, early: bool) -> dict[str, float | bool | int]:
    """The kernel's constants."""
    return {
        "offset": offset,
        "early": early,
        "block": min(_TILE, triton.next_power_of_2(width)),
    }

"""The gate of an MLP in one kernel; torch takes two.

    y = g / (1 + exp(-g)) * u

The factor by SiLU is rounded to the inputs' dtype before the product, as torch's operators do. The
exponential is the card's, so a value now and then falls to the other side of a half.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantflow.backends.triton.casts import rounded

WARPS = 4
BLOCK = 1024  # values of a program


@triton.jit
def kernel(gate, up, y, count, by_bits: tl.constexpr, block: tl.constexpr):
    """Some values.  gate, up, y: [count]."""
    to: tl.constexpr = y.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = at < count
    given = tl.load(gate + at, mask=there, other=0.0).to(tl.float32)
    factor = rounded(given / (1.0 + tl.exp(-given)), to, by_bits).to(tl.float32)
    product = factor * tl.load(up + at, mask=there, other=0.0).to(tl.float32)
    tl.store(y + at, rounded(product, to, by_bits), mask=there)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up.

    Args:
        gate: [..., I] float32, bfloat16 or float16.
        up: likewise, of its shape and dtype.

    Returns:
        Likewise, contiguous.
    """
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    if count := y.numel():
        kernel[(triton.cdiv(count, BLOCK),)](
            gate,
            up,
            y,
            count,
            by_bits=y.device.type == "cpu" and y.dtype == torch.bfloat16,
            block=BLOCK,
            num_warps=WARPS,
        )
    return y

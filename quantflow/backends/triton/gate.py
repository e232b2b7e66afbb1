"""The gate of an MLP in one kernel; torch takes two.

    y = g / (1 + exp(-g)) * u                       silu
    y = g / (1 + exp(-2 a (g + b g^3))) * u         gelu_tanh, a = sqrt(2 / pi), b = 0.044715

The second is GELU by its tangent, g (1 + tanh(a (g + b g^3))) / 2, since
(1 + tanh z) / 2 = 1 / (1 + exp(-2 z)). The factor is rounded to the inputs' dtype before the
product, as torch's operators do. The exponential is the card's, so a value now and then falls to
the other side of a half.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantflow.backends.triton.casts import rounded

WARPS = 4
BLOCK = 1024  # values of a program
SILU, GELU_TANH = "silu", "gelu_tanh"  # the activations, by the names of quantflow.runtime
_IS_GELU = {SILU: False, GELU_TANH: True}
_TWICE = tl.constexpr(2 * math.sqrt(2 / math.pi))
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def kernel(gate, up, y, count, gelu: tl.constexpr, by_bits: tl.constexpr, block: tl.constexpr):
    """Some values.  gate, up, y: [count]; gelu: GELU by its tangent, else SiLU."""
    to: tl.constexpr = y.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = at < count
    given = tl.load(gate + at, mask=there, other=0.0).to(tl.float32)
    power = _TWICE * (given + _CUBIC * given * given * given) if gelu else given
    factor = rounded(given / (1.0 + tl.exp(-power)), to, by_bits).to(tl.float32)
    product = factor * tl.load(up + at, mask=there, other=0.0).to(tl.float32)
    tl.store(y + at, rounded(product, to, by_bits), mask=there)


def gated(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """activation(gate) * up.

    Args:
        gate: [..., I] float32, bfloat16 or float16.
        up: likewise, of its shape and dtype.
        activation: SILU or GELU_TANH.

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
            gelu=_IS_GELU[activation],
            by_bits=y.device.type == "cpu" and y.dtype == torch.bfloat16,
            block=BLOCK,
            num_warps=WARPS,
        )
    return y

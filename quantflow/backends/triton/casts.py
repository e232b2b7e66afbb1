"""Casts of values inside of kernels."""

import triton
import triton.language as tl


@triton.jit
def rounded(value, to: tl.constexpr, by_bits: tl.constexpr):
    """A float32 value in another dtype, the nearest, half to even.

    Args:
        value: float32.
        to: dtype of the result.
        by_bits: `to` is bfloat16 and the interpreter runs, whose cast drops bits.
    """
    if by_bits:  # what a cast then drops is zero
        bits = value.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        value = tl.where(value == value, (bits & -65536).to(tl.float32, bitcast=True), value)
    return value.to(to)

"""Inputs rounded to codes in one kernel of Triton, with the bits of `quantflow.core.affine`.

    amax = max |x_k|,    scale = amax / half,    code_k = round(x_k / scale + zero_point)

for each row on its own, or with a stored scale. Torch takes 4 to 14 kernels for it. A program has
one row, or some where rows are short; it reads a row twice, the second time from the cache. Each
operation is the one of affine.py in its order, and nothing is summed, so the bits are equal.

The bits of a float8 code are put together from integers: no card's own conversion is used, and
cards without float8 have the kernel too. The module imports the package triton, so it is imported
where an input is on a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantflow.core import affine
from quantflow.core.float8 import FLAVOURS
from quantflow.core.qtensor import qvalue_dtype
from quantflow.core.scheme import TensorScheme

WARPS = 4
_TILE = 2048  # inputs of a program at a time
_TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: rounds a float32 below 2^22, half to even
_SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def kernel(
    x,
    codes,
    scales,
    zero,
    count,
    width,
    half: tl.constexpr,
    low: tl.constexpr,
    high: tl.constexpr,
    stored: tl.constexpr,
    zeroed: tl.constexpr,
    to_float8: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    """Some rows.  x, codes: [count, width]; scales: [count], or [1] where they are `stored`."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    k = tl.arange(0, block)
    if stored:
        scale = tl.zeros((rows,), tl.float32) + tl.load(scales)
    else:
        amax = tl.zeros((rows,), tl.float32)
        nan = tl.zeros((rows,), tl.int32)
        for first in range(0, width, block):
            there = (row[:, None] < count) & (first + k[None, :] < width)
            at = row[:, None] * width + first + k[None, :]
            given = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
            amax = tl.maximum(amax, tl.max(tl.abs(given), axis=1))
            nan = tl.maximum(nan, tl.max((given != given).to(tl.int32), axis=1))
        scale = tl.maximum(tl.div_rn(amax, tl.full((rows,), half, tl.float32)), _SMALLEST)
        scale = tl.where(amax <= 0.0, 1.0, scale)
        scale = tl.where(nan > 0, float("nan"), scale)
        tl.store(scales + row, scale, mask=row < count)
    for first in range(0, width, block):
        there = (row[:, None] < count) & (first + k[None, :] < width)
        at = row[:, None] * width + first + k[None, :]
        given = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        code = tl.div_rn(given, tl.zeros((rows, block), tl.float32) + scale[:, None])
        if zeroed:
            code += tl.load(zero).to(tl.float32)
        # a bound is a code, so rounding does not leave it; NaN passes both choices
        code = tl.where(code < low, low, tl.where(code > high, high, code))
        if to_float8:
            bits = code.to(tl.int32, bitcast=True)
            # biased as e4m3's; 1 is that of the subnormals too, which are multiples of 2^-9
            exponent = tl.maximum(((bits >> 23) & 0xFF) - 120, 1)
            steps = tl.abs(code) * ((137 - exponent) << 23).to(tl.float32, bitcast=True)
            steps = tl.where(code == code, steps, 0.0)  # NaN is no integer
            # 8 to 16 steps of 2^(exponent - 10), or fewer: 16 carry into the exponent
            steps = ((steps + _TO_INTEGER) - _TO_INTEGER).to(tl.int32)
            e4m3 = (exponent << 3) + steps - 8
            e4m3 = tl.where(code != code, 0x7F, e4m3) | ((bits >> 24) & 0x80)
            tl.store(codes + at, e4m3.to(tl.int8), mask=there)
        else:
            code = (code + _TO_INTEGER) - _TO_INTEGER
            tl.store(codes + at, code.to(tl.int8), mask=there)


def takes(scheme: TensorScheme) -> bool:
    """Whether the kernel rounds to a scheme: int8 or e4m3fn, scales as they come."""
    if scheme.rounds_at_run_time or scheme.scale_format != "float":
        return False
    return (
        (scheme.float8 == "e4m3fn" and scheme.scale_rule is None)
        if scheme.kind == "float"
        else scheme.num_bits == 8
    )


def rounded(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, scheme: TensorScheme
) -> tuple[Tensor, Tensor]:
    """Codes of an input, and their scales.

    Args:
        x: [..., features] float32, bfloat16 or float16.
        scale: [1] float32; None for one of each row.
        zero_point: [1] int8, or None.
        scheme: one that the kernel `takes`.

    Returns:
        codes: [..., features] int8 or float8; scale: [..., 1], or `scale`.
    """
    x = x.contiguous()
    width = x.shape[-1]
    count = x.shape[:-1].numel()
    codes = torch.empty(x.shape, dtype=qvalue_dtype(scheme), device=x.device)
    scales = scale
    if scales is None:
        scales = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    if count and width:
        chosen = constants(
            scheme, width=width, stored=scale is not None, zeroed=zero_point is not None
        )
        kernel[(triton.cdiv(count, chosen["rows"]),)](
            x,
            codes.view(torch.int8),
            scales,
            scales if zero_point is None else zero_point,
            count,
            width,
            **chosen,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return codes, scales


def constants(
    scheme: TensorScheme, *, width: int, stored: bool, zeroed: bool
) -> dict[str, float | int | bool]:
    """The kernel's constants.

    Args:
        scheme: one that the kernel `takes`.
        width: inputs of a row.
        stored: whether a scale is given.
        zeroed: whether a zero point is.
    """
    to_float8, largest = scheme.kind == "float", FLAVOURS["e4m3fn"].largest
    block = min(_TILE, triton.next_power_of_2(width))
    return {
        "half": affine.half_range(scheme),
        "low": -largest if to_float8 else float(scheme.qmin),
        "high": largest if to_float8 else float(scheme.qmax),
        "stored": stored,
        "zeroed": zeroed,
        "to_float8": to_float8,
        "rows": max(1, min(16, _TILE // block)),
        "block": block,
    }

"""Rotary embeddings of queries and keys in one kernel; torch takes ten.

Channel i of a head turns with channel i + D/2, by the angle that cos and sin are of:

    y_i       = x_i cos_i - x_(i+D/2) sin_i
    y_(i+D/2) = x_(i+D/2) cos_(i+D/2) + x_i sin_(i+D/2)

A program has one head of one token. Products and sums are rounded to the inputs' dtype where
torch's operators round, so the bits are theirs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantflow.backends.triton.casts import rounded

WARPS = 1  # a head has 64 to 256 channels


@triton.jit
def _turned(x, y, cos, sin, half, to: tl.constexpr, by_bits: tl.constexpr, block: tl.constexpr):
    """One head.  x, y, cos, sin: [2 half]."""
    i = tl.arange(0, block)
    there = i < half
    first = tl.load(x + i, mask=there, other=0.0).to(tl.float32)
    second = tl.load(x + half + i, mask=there, other=0.0).to(tl.float32)
    cos_first = tl.load(cos + i, mask=there, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + i, mask=there, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + half + i, mask=there, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + half + i, mask=there, other=0.0).to(tl.float32)
    straight = rounded(first * cos_first, to, by_bits).to(tl.float32)
    across = rounded(-second * sin_first, to, by_bits).to(tl.float32)
    tl.store(y + i, rounded(straight + across, to, by_bits), mask=there)
    straight = rounded(second * cos_second, to, by_bits).to(tl.float32)
    across = rounded(first * sin_second, to, by_bits).to(tl.float32)
    tl.store(y + half + i, rounded(straight + across, to, by_bits), mask=there)


@triton.jit
def kernel(
    q,
    k,
    cos,
    sin,
    new_q,
    new_k,
    length,
    heads,
    half,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    cos_batch,
    cos_token,
    new_q_batch,
    new_q_head,
    new_q_token,
    new_k_batch,
    new_k_head,
    new_k_token,
    by_bits: tl.constexpr,
    block: tl.constexpr,
):
    """One head of one token.  q, new_q: [B, heads, length, 2 half], with strides; k likewise."""
    to: tl.constexpr = new_q.dtype.element_ty
    batch = tl.program_id(0).to(tl.int64) // length
    token = tl.program_id(0).to(tl.int64) % length
    head = tl.program_id(1).to(tl.int64)
    at = batch * cos_batch + token * cos_token
    if head < heads:
        x = q + batch * q_batch + head * q_head + token * q_token
        y = new_q + batch * new_q_batch + head * new_q_head + token * new_q_token
        _turned(x, y, cos + at, sin + at, half, to, by_bits, block)
    else:
        head -= heads
        x = k + batch * k_batch + head * k_head + token * k_token
        y = new_k + batch * new_k_batch + head * new_k_head + token * new_k_token
        _turned(x, y, cos + at, sin + at, half, to, by_bits, block)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys, turned by the positions of their tokens.

    Args:
        q: [B, H, S, D] float32, bfloat16 or float16; the channels of a head lie side by side.
        k: [B, K, S, D] likewise, of q's dtype.
        cos: cosines, [B or 1, S, D] likewise.
        sin: sines likewise, of the layout of cos.

    Returns:
        q and k likewise.
    """
    new_q, new_k = torch.empty_like(q), torch.empty_like(k)
    (batch, heads, length, width), keys = q.shape, k.shape[1]
    if q.numel() + k.numel():
        kernel[(batch * length, heads + keys)](
            q,
            k,
            cos,
            sin,
            new_q,
            new_k,
            length,
            heads,
            width // 2,
            *q.stride()[:3],
            *k.stride()[:3],
            cos.stride(0) if len(cos) > 1 else 0,
            cos.stride(1),
            *new_q.stride()[:3],
            *new_k.stride()[:3],
            **constants(width),
            by_bits=q.device.type == "cpu" and q.dtype == torch.bfloat16,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return new_q, new_k


def constants(width: int) -> dict[str, int]:
    """The kernel's constants for heads of so many channels."""
    return {"block": triton.next_power_of_2(width // 2)}

"""Weights of 4 and 8 bits on a GPU, inputs as they are: few tokens by Triton, many by cuBLAS.

A weight is read once a product, as it is stored. Up to `FEW` tokens a product is as slow as that
read, so kernels multiply the codes (w4a16.py, w8a16.py). Above, the product itself is slow: the
weight is dequantized into scratch memory, which is freed after it, and cuBLAS multiplies. Both ways
take from the weight in the model's memory, which has no second copy.
"""

from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.accelerators import has_triton
from quantflow.backends import backend
from quantflow.backends.backend import Backend, Case, is_int, requirement
from quantflow.backends.triton import layout
from quantflow.core.qtensor import QuantizedLinear

FEW = 64  # tokens; about where the product takes as long as reading the weight
_BLOCK = 128  # columns of a step of the kernels
_LEAST = 32  # so that half a block of int4 fills a tile of the tensor cores


@dataclass(frozen=True, kw_only=True, eq=False)
class CodedWeight:
    """A weight as the kernels read it.

    Attributes:
        codes: int4: [O, I / 2] uint8 of `layout.packed`; int8: the qvalues, [O, I].
        scale: [O, G] float32.
        zero: [O, G] uint8, zero points + 8; None for int8 and for symmetric int4.
        block: columns of a step.
        exact: whether bfloat16 holds the scales.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    block: int
    exact: bool


def _prepare(linear: QuantizedLinear, dtype: torch.dtype) -> CodedWeight:
    del dtype
    weight = linear.weight
    rows, columns = weight.qvalue.shape
    four = weight.scheme.num_bits == 4
    block = min(_BLOCK, weight.scheme.group_size or _of_channel(columns, four=four))
    codes = weight.qvalue.contiguous()
    if four:
        codes = layout.packed((codes + 8).to(torch.uint8), block)
    scale = weight.scale.float().expand(rows, -1).contiguous()
    zero = weight.zero_point
    return CodedWeight(
        codes=codes,
        scale=scale,
        zero=None if zero is None else (zero + 8).to(torch.uint8).expand(rows, -1).contiguous(),
        block=block,
        exact=bool((scale.bfloat16().float() == scale).all()),
    )


def _of_channel(columns: int, *, four: bool) -> int:
    """The columns of a step of a weight with one scale a row; int4 has no part of a step."""
    return next(size for size in (_BLOCK, 64, _LEAST) if not four or columns % size == 0)


def dequantized(stored: CodedWeight) -> Tensor:
    """The weight in bfloat16, [O, I], rounded once."""
    four = stored.codes.dtype == torch.uint8
    codes = layout.unpacked(stored.codes, stored.block) if four else stored.codes
    # codes and their differences are exact in bfloat16; a product of two bfloat16 is rounded once
    wide = torch.bfloat16 if stored.exact else torch.float32
    split = codes.view(codes.shape[0], stored.scale.shape[1], -1).to(wide)  # [O, G, g]
    if four:
        split -= 8 if stored.zero is None else stored.zero[..., None].to(wide)
    split *= stored.scale[..., None].to(wide)
    return split.flatten(1).to(torch.bfloat16)  # [O, I]


def _linear(x: Tensor, stored: CodedWeight, bias: Tensor | None) -> Tensor:
    """The product x @ W.T + bias. x: [..., I] bfloat16; returns [..., O]."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # [M, I]
    tokens = len(rows)
    if not 0 < tokens <= FEW:
        return functional.linear(x, dequantized(stored), bias)
    if stored.codes.dtype == torch.uint8:
        four = import_module("quantflow.backends.triton.w4a16")
        result = four.product(rows, stored.codes, stored.scale, stored.zero, block=stored.block)
    else:
        eight = import_module("quantflow.backends.triton.w8a16")
        result = eight.product(rows, stored.codes, stored.scale, block=stored.block)
    if bias is not None:
        result = result + bias
    y: Tensor = result.to(x.dtype).reshape(*x.shape[:-1], result.shape[1])  # [..., O]
    return y


def _in_steps(case: Case) -> bool:
    size = case.weights.group_size
    if size is not None:
        return size in (32, 64) or size % _BLOCK == 0
    return case.weights.num_bits == 8 or case.shape[1] % _LEAST == 0


_SHARED = (
    backend.on_any_gpu(),
    requirement("needs the package triton", lambda _: has_triton()),
    backend.BFLOAT16,
    backend.INPUTS_AS_THEY_ARE,
    requirement(
        "needs groups of 32, 64 or a multiple of 128 columns, or rows of a multiple of 32 for "
        "int4, not {c.weights.group_size} of {c.shape[1]}",
        _in_steps,
    ),
    requirement(
        "needs in_features that group_size {c.weights.group_size} divides, not {c.shape[1]}",
        lambda c: c.shape[1] % (c.weights.group_size or 1) == 0,
    ),
    backend.weights_per("per_group", "per_channel"),
)
_INT4 = requirement("needs int4 weights, {c.stored}", lambda c: is_int(c.weights, 4))
BACKENDS = (
    Backend(name="triton_w4a16", requirements=(*_SHARED, _INT4), prepare=_prepare, linear=_linear),
    Backend(
        name="triton_w8a16",
        requirements=(*_SHARED, backend.INT8_WEIGHTS),
        prepare=_prepare,
        linear=_linear,
    ),
)

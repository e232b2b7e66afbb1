"""Operators that deterministic mode refuses on a GPU, computed in a fixed order.

`torch.use_deterministic_algorithms` makes kernels without a fixed order raise an error. Models
call one of them in their layers, `cumsum` of floats: state-space and linear attention sum decays
along a chunk (Mamba 2, Bamba, Granite hybrids, Falcon-H1, Nemotron-H, Qwen3-Next, Qwen3.5). Here it
is log2(n) additions of a tensor to itself, shifted by 1, 2, 4, ... places, so each sum has one
order on any card:

    s_0 = x,    s_{k+1}[i] = s_k[i] + s_k[i - 2^k],    cumsum(x) = s_{ceil(log2(n))}

A sum of float16 or bfloat16 is float32 until the end. That of integers is exact in any order.
tests/test_refused_operators.py runs all families against torch's list, and so finds the next
operator. Source: Hillis and Steele 1986, Data parallel algorithms.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import Library


def cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """The sums along a dimension, each with the elements before it, in a fixed order.

    Args:
        x: any shape and dtype.
        dim: the dimension.
        dtype: dtype of the result; None is that of x, or int64 for integers.

    Returns:
        A new tensor of x's shape.
    """
    exact = not (x.is_floating_point() or x.is_complex())
    kept = dtype or (torch.int64 if exact else x.dtype)
    total = x.to(torch.float32 if kept in (torch.float16, torch.bfloat16) else kept, copy=True)
    length, step = x.shape[dim] if x.ndim else 1, 1
    while step < length:
        first, rest = total.narrow(dim, 0, step), total.narrow(dim, step, length - step)
        total = torch.cat((first, rest + total.narrow(dim, 0, length - step)), dim)
        step *= 2
    return total.to(kept)


def _into(x: Tensor, dim: int, *, dtype: torch.dtype | None = None, out: Tensor) -> Tensor:
    result = cumsum(x, dim, dtype=dtype or out.dtype)
    return out.resize_(result.shape).copy_(result)


def _in_place(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    return x.copy_(cumsum(x, dim, dtype=dtype or x.dtype))


# operator of aten -> what computes it
ORDERED = {"cumsum": cumsum, "cumsum.out": _into, "cumsum_": _in_place}


@contextmanager
def in_fixed_order(key: str) -> Iterator[None]:
    """Compute `ORDERED` as here, in all threads of the process, until the block ends.

    Args:
        key: torch's key of the kernels that are replaced, a value of
            `quantflow.accelerators.GPUS`.
    """
    library: Any = Library("aten", "IMPL", key)  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            # torch's own kernel is overridden on purpose
            warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid")
            for name, function in ORDERED.items():
                library.impl(name, function, allow_override=True)
        yield
    finally:
        library._destroy()

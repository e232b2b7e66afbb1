"""Rotary embeddings of transformers' modules that one kernel computes on a GPU.

A family's attention calls a function of its file, `apply_rotary_pos_emb`. Where that function's
values for a probe are those of halves that turn together, the module's `forward` is given a kernel
under that name; transformers' own function stays as it is for other models. Families that turn
neighbours, or a part of a head, keep torch's operators.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

Rotary = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

NAME = "apply_rotary_pos_emb"
_PARAMETERS = ["q", "k", "cos", "sin"]  # its first ones


def fuse_rotary_(model: nn.Module, *, rotary: Rotary) -> int:
    """Have the rotary embeddings of a model computed by a kernel; returns in how many modules.

    Args:
        model: modified.
        rotary: (q, k, cos, sin) -> q and k; `quantflow.backends.triton.rope.rotary`, or one like
            it.
    """
    count = 0
    known: dict[int, bool] = {}
    for module in model.modules():
        forward = type(module).forward
        if not isinstance(forward, FunctionType) or NAME not in forward.__code__.co_names:
            continue
        by_torch = forward.__globals__.get(NAME)
        if not callable(by_torch) or "forward" in vars(module):
            continue
        if not known.setdefault(id(by_torch), turns_halves(by_torch)):
            continue
        named = {**forward.__globals__, NAME: partial(_rotated, by_torch, rotary)}
        function = FunctionType(
            forward.__code__, named, forward.__name__, forward.__defaults__, forward.__closure__
        )
        function.__kwdefaults__ = forward.__kwdefaults__
        function.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        module.forward = MethodType(function, module)
        count += 1
    return count


def _rotated(
    by_torch: Callable[..., tuple[Tensor, Tensor]],
    rotary: Rotary,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *more: Any,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    # torch.compile fuses by itself
    if torch.compiler.is_compiling() or more or options or not _one_layout(q, k, cos, sin):
        return by_torch(q, k, cos, sin, *more, **options)
    return rotary(q, k, cos, sin)


def _one_layout(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel reads these: of one dtype and width, channels side by side."""
    tensors = (q, k, cos, sin)
    return (
        q.ndim == k.ndim == 4
        and cos.ndim == 3
        and cos.shape == sin.shape
        and cos.stride() == sin.stride()
        and cos.shape[1] == q.shape[2] == k.shape[2]
        and cos.shape[0] in (1, len(q))
        and all(tensor.dtype == q.dtype for tensor in tensors)
        and all(tensor.shape[-1] == q.shape[-1] for tensor in tensors)
        and all(tensor.stride(-1) == 1 for tensor in tensors)
    )


def turned_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel's values by torch: channel i turns with channel i + D/2."""
    cos, sin = cos[:, None], sin[:, None]

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return turned(q), turned(k)


def turns_halves(function: Callable[..., Any]) -> bool:
    """Whether a family's function has the values of `turned_halves`."""
    if list(inspect.signature(function).parameters)[:4] != _PARAMETERS:
        return False
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8))
    )
    try:
        found = function(q, k, cos, sin)
    except (RuntimeError, TypeError, ValueError, IndexError):  # it takes others
        return False
    expected = turned_halves(q, k, cos, sin)
    return len(found) == 2 and all(map(torch.equal, found, expected))

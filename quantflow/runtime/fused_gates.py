"""MLPs of transformers' modules whose gate one kernel computes on a GPU.

A module with the linears gate_proj, up_proj and down_proj multiplies the activation of the first by
the second. Which do so with SiLU and nothing else is found by their outputs for a probe, in which
the linears stand for themselves; others stay as they are.
"""

from collections.abc import Callable
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SiluProduct = Callable[[Tensor, Tensor], Tensor]

LINEARS = ("gate_proj", "up_proj", "down_proj")
ACTIVATION = "act_fn"


def fuse_gates_(model: nn.Module, *, silu_product: SiluProduct) -> int:
    """Have the gates of a model computed by a kernel; returns how many.

    Args:
        model: modified.
        silu_product: (gate, up) -> silu(gate) * up; `quantflow.backends.triton.gate.silu_product`,
            or one like it.
    """
    count = 0
    for module in model.modules():
        if "forward" not in vars(module) and multiplies_by_silu(module):
            module.forward = partial(_forward, module, module.forward, silu_product)
            count += 1
    return count


def _forward(
    module: Any, by_torch: Callable[[Tensor], Tensor], silu_product: SiluProduct, x: Tensor
) -> Tensor:
    if torch.compiler.is_compiling():  # it fuses by itself
        return by_torch(x)
    output: Tensor = module.down_proj(silu_product(module.gate_proj(x), module.up_proj(x)))
    return output


def multiplies_by_silu(module: nn.Module) -> bool:
    """Whether a module is down_proj(silu(gate_proj(x)) * up_proj(x))."""
    forward = type(module).forward
    children = dict(module.named_children())
    if not isinstance(forward, FunctionType) or not {*LINEARS} <= children.keys():
        return False
    if children.keys() - {*LINEARS, ACTIVATION} or next(module.parameters(False), None) is not None:
        return False
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.arange(-2, 4)[:, None]  # where a family may cut values off, too
    gate, up = (torch.randn(2, 6, 16, generator=generator) * sizes).bfloat16()
    stand_in = SimpleNamespace(
        gate_proj=lambda _: gate, up_proj=lambda _: up, down_proj=lambda product: product
    )
    stand_in.act_fn = getattr(module, ACTIVATION, None)
    try:
        found = forward(stand_in, gate)
    except (AttributeError, TypeError):  # it reads more than these
        return False
    return isinstance(found, Tensor) and torch.equal(found, functional.silu(gate) * up)

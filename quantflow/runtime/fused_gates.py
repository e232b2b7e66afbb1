"""MLPs of transformers' modules whose gate one kernel computes on a GPU.

A module with the linears gate_proj, up_proj and down_proj multiplies the activation of the first by
the second. Which do so with SiLU, or with GELU by its tangent, and nothing else, is found by their
outputs for a probe, in which the linears stand for themselves; others stay as they are.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional


class Gated(Protocol):
    """The kernel: activation(gate) * up, of tensors of one shape and dtype."""

    def __call__(self, gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
        """The product, likewise."""


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
LINEARS = ("gate_proj", "up_proj", "down_proj")
ACTIVATION = "act_fn"


def fuse_gates_(model: nn.Module, *, gated: Gated) -> int:
    """Have the gates of a model computed by a kernel; returns how many.

    Args:
        model: modified.
        gated: `quantflow.backends.triton.gate.gated`, or one like it.
    """
    count = 0
    for module in model.modules():
        if "forward" in vars(module) or (activation := activation_of(module)) is None:
            continue
        product = partial(gated, activation=activation)
        module.forward = partial(_forward, module, module.forward, product)
        count += 1
    return count


def _forward(
    module: Any,
    by_torch: Callable[[Tensor], Tensor],
    product: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
) -> Tensor:
    if torch.compiler.is_compiling():  # it fuses by itself
        return by_torch(x)
    output: Tensor = module.down_proj(product(module.gate_proj(x), module.up_proj(x)))
    return output


def activation_of(module: nn.Module) -> str | None:
    """The activation in a module that is down_proj(activation(gate_proj(x)) * up_proj(x)).

    It is one of ACTIVATIONS; None of every other module.
    """
    forward = type(module).forward
    children = dict(module.named_children())
    if not isinstance(forward, FunctionType) or not {*LINEARS} <= children.keys():
        return None
    if children.keys() - {*LINEARS, ACTIVATION} or next(module.parameters(False), None) is not None:
        return None
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
        return None
    same = (
        name
        for name, activation in ACTIVATIONS.items()
        if isinstance(found, Tensor) and torch.equal(found, activation(gate) * up)
    )
    return next(same, None)

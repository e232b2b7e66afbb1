"""Norms of transformers' modules that one kernel computes on a GPU.

A family's class says by its name that it is a norm of root mean squares, and by its outputs which:
the forms below compute a probe, and a module whose bits one of them has is given the kernel of that
form. Others stay as they are.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

RmsNorm = Callable[..., Tensor]  # quantflow.backends.triton.norm.rms_norm, or one like it


@dataclass(frozen=True, kw_only=True)
class NormForm:
    """How a family computes its norm.

    Attributes:
        offset: added to the weight.
        early: whether it rounds to the inputs' dtype before the product with the weight too.
    """

    offset: float
    early: bool

    def compute(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        """The norm by torch, [..., H] in x's dtype."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if self.early:
            return weight * normed.to(x.dtype)
        return (normed * (self.offset + weight.float())).to(x.dtype)


# Llama's; OLMo 2's; Gemma's
FORMS = (
    NormForm(offset=0.0, early=True),
    NormForm(offset=0.0, early=False),
    NormForm(offset=1.0, early=False),
)


def fuse_norms_(model: nn.Module, *, rms_norm: RmsNorm) -> int:
    """Have the norms of a model computed by a kernel; returns how many.

    Args:
        model: modified.
        rms_norm: (x, weight, eps, offset, early) -> the norm.
    """
    count = 0
    for module in model.modules():
        found = _form_of(module)
        if found is None:
            continue
        eps, form = found
        module.forward = partial(_forward, module, module.forward, rms_norm, eps, form)
        count += 1
    return count


def _forward(
    module: nn.Module,
    by_torch: Callable[[Tensor], Tensor],
    rms_norm: RmsNorm,
    eps: float,
    form: NormForm,
    x: Tensor,
) -> Tensor:
    # torch.compile fuses by itself
    if torch.compiler.is_compiling() or x.dtype != module.weight.dtype:
        return by_torch(x)
    return rms_norm(x, module.weight, eps=eps, offset=form.offset, early=form.early)


def _form_of(module: nn.Module) -> tuple[float, NormForm] | None:
    """A norm's epsilon and its form; None for a module that is no such norm."""
    if not type(module).__name__.endswith("RMSNorm"):
        return None
    weight: Any = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    tensors = [*module.parameters(), *module.buffers()]
    alone = len(tensors) == 1 and tensors[0] is weight
    if not alone or weight.ndim != 1 or weight.is_meta or not isinstance(eps, float):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, len(weight), generator=generator).to(weight)
    with torch.no_grad():
        found = module(x)
        for form in FORMS:
            expected = form.compute(x, weight, eps=eps)
            if found.dtype == expected.dtype and torch.equal(found, expected):
                return eps, form
    return None

"""The record of one way to compute `x @ W.T + bias` with a quantized weight; `quantflow.backends` has them all."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme


class WhyNot(Protocol):
    """Why a backend cannot run a linear."""

    def __call__(self, scheme: LinearScheme, device: torch.device, *, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
        """Return the reason in a sentence, None when it can.  shape: (out_features, in_features); dtype: of the inputs."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A backend.

    Attributes:
        name: the key in `quantflow.backends.BACKENDS`.
        why_not: see `WhyNot`.
        prepare: (linear, dtype of the inputs) -> the weight in the kernel's own layout, a record.
        linear: (x [..., in_features], what was prepared, bias [out_features] or None) -> [..., out_features] in x's dtype.
    """

    name: str
    why_not: WhyNot
    prepare: Callable[[QuantizedLinear, torch.dtype], Any]
    linear: Callable[[Tensor, Any, Tensor | None], Tensor]

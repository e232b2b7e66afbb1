"""The oracle: dequantize the weight once, fake-quantize the input, multiply. Runs every scheme anywhere."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme

NAME = "reference"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A dequantized weight and the linear it came from.

    Attributes:
        weight: [O, I] in the dtype of the inputs.
        source: the quantized linear, for the quantization of its input.
    """

    weight: Tensor
    source: QuantizedLinear


def why_not(scheme: LinearScheme, device: torch.device, *, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Return None: it runs every linear."""
    return None


def prepare(linear: QuantizedLinear, dtype: torch.dtype) -> Prepared:
    """Dequantize the weight in float32 and round it to `dtype`."""
    return Prepared(weight=linear.weight.dequantize().to(dtype), source=linear)


def linear(x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
    """Return x @ W.T + bias.  x: [..., I] in the prepared dtype; returns [..., O]."""
    return functional.linear(prepared.source.fake_quantize_input(x), prepared.weight, bias)

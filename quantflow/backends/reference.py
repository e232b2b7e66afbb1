"""The oracle: dequantize the weight once, fake-quantize the input, multiply. Runs every scheme anywhere."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.core import affine
from quantflow.core.backend import Backend
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import TensorScheme


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A dequantized weight, and what happens to the input; the qvalues are not kept.

    Attributes:
        weight: [O, I] in the dtype of the inputs.
        scheme, scale, zero_point: of the input, None where it has none.
    """

    weight: Tensor
    scheme: TensorScheme | None
    scale: Tensor | None
    zero_point: Tensor | None


def _prepare(linear: QuantizedLinear, dtype: torch.dtype) -> Prepared:
    """Dequantize the weight in float32 and round it to `dtype`."""
    return Prepared(
        weight=linear.weight.dequantize().to(dtype),
        scheme=linear.scheme.input,
        scale=linear.input_scale,
        zero_point=linear.input_zero_point,
    )


def _linear(x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
    """Return x @ W.T + bias.  x: [..., I] in the prepared dtype; returns [..., O]."""
    x = affine.fake_quantize_input(x, prepared.scheme, prepared.scale, prepared.zero_point)
    return functional.linear(x, prepared.weight, bias)


BACKEND = Backend(name="reference", prepare=_prepare, linear=_linear)

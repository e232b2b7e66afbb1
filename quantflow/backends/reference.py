"""The oracle, which runs every scheme anywhere: dequantize, fake-quantize the input, multiply."""

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.backends.backend import Backend
from quantflow.core import affine
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import TensorScheme

# The dequantized weight [O, I] in the dtype of the inputs; scheme, scale and zero point of the
# inputs. The qvalues are not kept.
ReferenceOperands = tuple[Tensor, TensorScheme | None, Tensor | None, Tensor | None]


def _prepare(linear: QuantizedLinear, dtype: torch.dtype) -> ReferenceOperands:
    """Dequantize the weight in float32 and round it to `dtype`."""
    return (
        linear.weight.dequantize().to(dtype),
        linear.scheme.input,
        linear.input_scale,
        linear.input_zero_point,
    )


def _round_input(x: Tensor, prepared: ReferenceOperands) -> Tensor:
    """The input after quantize and dequantize, [..., I]."""
    return affine.fake_quantize_input(x, *prepared[1:])


def _linear(
    x: Tensor, prepared: ReferenceOperands, bias: Tensor | None, rounded: Tensor | None = None
) -> Tensor:
    """The product x @ W.T + bias. x: [..., I] in the prepared dtype; returns [..., O]."""
    return functional.linear(
        _round_input(x, prepared) if rounded is None else rounded, prepared[0], bias
    )


BACKEND = Backend(name="reference", prepare=_prepare, linear=_linear, round_input=_round_input)

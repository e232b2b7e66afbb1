"""INT8 weights and INT8 inputs: an exact int32 product (`torch._int_mm`), rescaled in float32.

    y[m, o] = scale_x[m] * scale_w[o] * (sum_k qx[m, k] qw[o, k]  -  zero_point_x * sum_k qw[o, k])

The input is quantized per token at run time, or with the stored scale of a static scheme. The sums are integers, so the
only rounding is the rescaling; with bfloat16 inputs that is more exact than the oracle, which rounds
the dequantized input.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.core import affine
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme, TensorScheme

NAME = "int8_mm"

# |qx - zero_point| <= 255 and |qw| <= 128, so an int32 holds this many products whatever the numbers are.
_MAX_IN_FEATURES = (2**31 - 1) // (255 * 128)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """An int8 weight, transposed as the kernel wants it.

    Attributes:
        weight: [I, O] int8, a transposed view of row-major [O, I].
        scale: [O] or [1] float32.
        row_sums: [O] int32, the sum of each output's qvalues; None unless the input has a zero_point.
        input_scheme: how the input is quantized.
        input_scale: [1] float32 for a static input.
        input_zero_point: [1] int8 for a static asymmetric input.
    """

    weight: Tensor
    scale: Tensor
    row_sums: Tensor | None
    input_scheme: TensorScheme
    input_scale: Tensor | None
    input_zero_point: Tensor | None


def why_not(scheme: LinearScheme, device: torch.device, *, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot run this linear, or None.  shape: (out_features, in_features)."""
    weights, inputs = scheme.weights, scheme.input
    if device.type != "cpu":
        return f"{NAME} runs on cpu, not on {device.type}"
    if (weights.kind, weights.num_bits, weights.symmetric) != ("int", 8, True) or weights.granularity == "per_group":
        return f"{NAME} needs symmetric int8 weights per channel or per tensor, scheme {scheme.name} has others"
    if inputs is None or (inputs.kind, inputs.num_bits) != ("int", 8):
        return f"{NAME} needs int8 inputs, scheme {scheme.name} has {'none' if inputs is None else inputs.kind}"
    if shape[1] == 1:
        return f"{NAME} needs 2 or more input features, torch's kernel returns wrong sums for 1"
    if shape[1] > _MAX_IN_FEATURES:
        return f"{NAME} sums in int32, which holds {_MAX_IN_FEATURES} input features, not {shape[1]}"
    return None


def prepare(linear: QuantizedLinear, dtype: torch.dtype) -> Prepared:
    """Keep the int8 weight and its scales; `dtype` is not needed, the rescaling is float32."""
    assert linear.scheme.input is not None  # why_not refuses such a scheme
    qvalue = linear.weight.qvalue.contiguous()
    return Prepared(
        weight=qvalue.t(),
        scale=linear.weight.scale.reshape(-1),  # [O or 1]
        row_sums=None if linear.input_zero_point is None else qvalue.sum(dim=1, dtype=torch.int32),
        input_scheme=linear.scheme.input,
        input_scale=linear.input_scale,
        input_zero_point=linear.input_zero_point,
    )


def linear(x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
    """Return x @ W.T + bias.  x: [..., I], any float dtype; returns [..., O] in that dtype."""
    rows = x.reshape(-1, x.shape[-1])  # [M, I]
    scale = prepared.input_scale
    if scale is None:
        scale = affine.scale_from_amax(rows.abs().amax(dim=-1, keepdim=True), prepared.input_scheme)  # [M, 1]
    qvalue = affine.quantize(rows, scale, prepared.input_zero_point, prepared.input_scheme)
    product = torch._int_mm(qvalue, prepared.weight)  # [M, O] int32
    if prepared.row_sums is not None and prepared.input_zero_point is not None:
        product -= prepared.input_zero_point.int() * prepared.row_sums
    result = product.float() * scale * prepared.scale
    if bias is not None:
        result += bias
    return result.to(x.dtype).reshape(*x.shape[:-1], prepared.weight.shape[1])  # [..., O]

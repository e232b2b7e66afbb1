"""The kernels that torch brings for integer weights on every CPU.

int8_mm (`torch._int_mm`): int8 weights and inputs, an exact int32 product that is rescaled in float32:

    y[m, o] = scale_x[m] * scale_w[o] * (sum_k qx[m, k] qw[o, k]  -  zero_point_x * sum_k qw[o, k])

The input is quantized per token at run time, or with the stored scale of a static scheme. Only the rescaling rounds; with
bfloat16 inputs that is more exact than the oracle, which rounds the dequantized input.

int4_pack (`aten._weight_int4pack_mm_for_cpu`): int4 in groups, inputs as they are. The kernel's weight is
(q - 8) * scale + zero with q in 0..15 and `zero` in units of the real weight. Ours is scale * (qvalue - zero_point) with
qvalue in -8..7, so q = qvalue + 8 and zero = -scale * zero_point (0 when symmetric).

int8_pack (`aten._weight_int8pack_mm`): int8, inputs as they are. Both keep scales in the dtype of the inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.core import affine
from quantflow.core.backend import Backend
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme, TensorScheme

# |qx - zero_point| <= 255 and |qw| <= 128, so an int32 holds this many products whatever the numbers are.
_MAX_IN_FEATURES = (2**31 - 1) // (255 * 128)
_GROUP_SIZES = (32, 64, 128, 256)
_MULTIPLE = 16  # of int4's out_features and int8's in_features; torch does not check: wrong numbers, or a crash
_ROWS = 128  # packed at once, a multiple of the kernel's tiles of at most 64 rows: their int32 copy stays small
_INNER_TILES = 1  # read by the GPU's packing only, but the CPU's has the argument as well


@dataclass(frozen=True, kw_only=True)
class Int8:
    """An int8 weight, transposed as the kernel wants it, and how inputs are quantized.

    Attributes:
        weight: [I, O] int8, a transposed view of row-major [O, I].
        scale: [O] or [1] float32.
        row_sums: [O] int32, the sum of each output's qvalues; None unless the input has a zero_point.
        input_scheme: of the input.
        input_scale: [1] float32 for a static input.
        input_zero_point: [1] int8 for a static asymmetric input.
    """

    weight: Tensor
    scale: Tensor
    row_sums: Tensor | None
    input_scheme: TensorScheme
    input_scale: Tensor | None
    input_zero_point: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A weight whose inputs stay as they are.

    Attributes:
        weight: int4: [O, I / 2] uint8, two qvalues a byte in the kernel's own tile order; int8: [O, I].
        scale: in the dtype of the inputs; int4: scale and zero, [I / group_size, O, 2]; int8: [O].
        group_size: of int4, input features per group; None for int8.
    """

    weight: Tensor
    scale: Tensor
    group_size: int | None


def _int8_why_not(scheme: LinearScheme, device: torch.device, *, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    weights, inputs = scheme.weights, scheme.input
    if device.type != "cpu":
        return f"int8_mm runs on cpu, not on {device.type}"
    if (weights.kind, weights.num_bits, weights.symmetric) != ("int", 8, True) or weights.granularity == "per_group":
        return f"int8_mm needs symmetric int8 weights per channel or per tensor, scheme {scheme.name} has others"
    if inputs is None or (inputs.kind, inputs.num_bits) != ("int", 8):
        return f"int8_mm needs int8 inputs, scheme {scheme.name} has {'none' if inputs is None else inputs.kind}"
    if shape[1] == 1:
        return "int8_mm needs 2 or more input features, torch's kernel returns wrong sums for 1"
    if shape[1] > _MAX_IN_FEATURES:
        return f"int8_mm sums in int32, which holds {_MAX_IN_FEATURES} input features, not {shape[1]}"
    return None


def _int8_prepare(linear: QuantizedLinear, dtype: torch.dtype) -> Int8:
    """Keep the weight and its scales; `dtype` is not needed, the rescaling is float32."""
    assert linear.scheme.input is not None  # why_not refuses such a scheme
    qvalue = linear.weight.qvalue.contiguous()
    return Int8(
        weight=qvalue.t(),
        scale=linear.weight.scale.reshape(-1),  # [O or 1]
        row_sums=None if linear.input_zero_point is None else qvalue.sum(dim=1, dtype=torch.int32),
        input_scheme=linear.scheme.input,
        input_scale=linear.input_scale,
        input_zero_point=linear.input_zero_point,
    )


def _int8_linear(x: Tensor, prepared: Int8, bias: Tensor | None) -> Tensor:
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


def _int4_pack_why_not(scheme: LinearScheme, device: torch.device, *, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    weights = scheme.weights
    if device.type != "cpu":
        return f"int4_pack runs on cpu, not on {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"int4_pack needs float32 or bfloat16 inputs, which hold every scale, not {dtype}"
    if (weights.kind, weights.num_bits) != ("int", 4):
        return f"int4_pack needs int4 weights, scheme {scheme.name} has {weights.kind}{weights.num_bits}"
    if weights.group_size not in _GROUP_SIZES:
        return f"int4_pack needs group_size {', '.join(map(str, _GROUP_SIZES))}, not {weights.group_size}"
    if scheme.input is not None:
        return f"int4_pack needs inputs in the model's dtype, scheme {scheme.name} quantizes them"
    if shape[0] % _MULTIPLE:
        return f"int4_pack needs out_features that {_MULTIPLE} divides, not {shape[0]}"
    if shape[1] % weights.group_size:
        return f"int4_pack needs in_features that group_size {weights.group_size} divides, not {shape[1]}"
    return None


def _int4_pack_prepare(linear: QuantizedLinear, dtype: torch.dtype) -> Packed:
    weight = linear.weight
    assert weight.scheme.group_size is not None  # why_not refuses other granularities
    zero = torch.zeros_like(weight.scale) if weight.zero_point is None else -weight.scale * weight.zero_point.float()
    packed = [
        torch.ops.aten._convert_weight_to_int4pack_for_cpu(rows.int().add_(8), _INNER_TILES)
        for rows in weight.qvalue.split(_ROWS)  # type: ignore[no-untyped-call]
    ]
    return Packed(
        weight=packed[0] if len(packed) == 1 else torch.cat(packed),
        scale=torch.stack([weight.scale.t(), zero.t()], dim=-1).to(dtype).contiguous(),  # [G, O, 2]
        group_size=weight.scheme.group_size,
    )


def _int8_pack_why_not(scheme: LinearScheme, device: torch.device, *, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    weights = scheme.weights
    if device.type != "cpu":
        return f"int8_pack runs on cpu, not on {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"int8_pack needs float32 or bfloat16 inputs, which hold every scale, not {dtype}"
    if (weights.kind, weights.num_bits, weights.granularity, weights.symmetric) != ("int", 8, "per_channel", True):
        return f"int8_pack needs symmetric int8 weights per channel, scheme {scheme.name} has others"
    if scheme.input is not None:
        return f"int8_pack needs inputs in the model's dtype, scheme {scheme.name} quantizes them"
    if shape[1] % _MULTIPLE:
        return f"int8_pack needs in_features that {_MULTIPLE} divides, not {shape[1]}"
    return None


def _int8_pack_prepare(linear: QuantizedLinear, dtype: torch.dtype) -> Packed:
    scale = linear.weight.scale.reshape(-1).to(dtype)  # [O]
    return Packed(weight=linear.weight.qvalue.contiguous(), scale=scale, group_size=None)


def _packed_linear(x: Tensor, prepared: Packed, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # [M, I]
    if prepared.group_size is None:
        result = torch.ops.aten._weight_int8pack_mm(rows, prepared.weight, prepared.scale)
    else:
        result = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, prepared.weight, prepared.group_size, prepared.scale)
    if bias is not None:
        result = result + bias
    return torch.reshape(result, (*x.shape[:-1], prepared.weight.shape[0]))  # [..., O]


BACKENDS = (
    Backend(name="int8_mm", why_not=_int8_why_not, prepare=_int8_prepare, linear=_int8_linear),
    Backend(name="int4_pack", why_not=_int4_pack_why_not, prepare=_int4_pack_prepare, linear=_packed_linear),
    Backend(name="int8_pack", why_not=_int8_pack_why_not, prepare=_int8_pack_prepare, linear=_packed_linear),
)

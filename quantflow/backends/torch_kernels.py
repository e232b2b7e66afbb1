"""The kernels that torch brings for integer weights, on every CPU and on GPUs by NVIDIA.

int8_mm (`torch._int_mm`): int8 weights and inputs, an exact int32 product that is rescaled in float32:

    y[m, o] = scale_x[m] * scale_w[o] * (sum_k qx[m, k] qw[o, k]  -  zero_point_x * sum_k qw[o, k])

The input is quantized per token at run time, or with the stored scale of a static scheme. Only the rescaling rounds; with
bfloat16 inputs that is more exact than the oracle, which rounds the dequantized input. A GPU wants more than 16 tokens and
both features in eights: tokens are padded, features are refused.

int4_pack: int4 in groups, inputs as they are. The kernel's weight is (q - 8) * scale + zero with q in 0..15 and `zero` in units
of the real weight. Ours is scale * (qvalue - zero_point) with qvalue in -8..7, so q = qvalue + 8 and zero = -scale * zero_point
(0 when symmetric). A CPU (`aten._weight_int4pack_mm_for_cpu`) packs int32; a GPU (`aten._weight_int4pack_mm`, tensor cores, so
bfloat16 alone) packs bytes of two columns, the even one in the upper half, in tiles of 8 rows by 16 columns, up to 8 side by
side.

int8_pack (`aten._weight_int8pack_mm`): int8, inputs as they are. All but int8_mm keep scales in the dtype of the inputs.
Source: torch 2.13, aten/src/ATen/native/cuda/{Blas.cpp, int4mm.cu, int8mm.cu}, for what the GPU's kernels check and pack.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.core import affine
from quantflow.core.backend import INPUTS_AS_THEY_ARE, INT8_INPUTS, INT8_WEIGHTS, Backend, need, on, weights_per
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import TensorScheme

# |qx - zero_point| <= 255 and |qw| <= 128, so an int32 holds this many products whatever the numbers are.
_MAX_IN_FEATURES = (2**31 - 1) // (255 * 128)
_GROUP_SIZES = (32, 64, 128, 256)
_MULTIPLE = 16  # of int4's out_features and int8's in_features; torch does not check: wrong numbers, or a crash
_ROWS = 128  # packed at once, a multiple of the kernel's tiles of at most 64 rows: their int32 copy stays small
_INNER_TILES = 1  # read by the GPU's packing only, but the CPU's has the argument as well
_TOKENS, _ON_GPU = 32, 8  # a GPU multiplies more than 16 tokens, here at least so many; its int8 features come in eights


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
        weight: int4: two qvalues a byte in the kernel's own tile order, [O, I / 2] uint8 of a CPU and
            [O / 8, I / (16 * tiles), 32, tiles / 2] int32 of a GPU; int8: [O, I].
        scale: in the dtype of the inputs; int4: scale and zero, [I / group_size, O, 2]; int8: [O].
        group_size: of int4, input features per group; None for int8.
    """

    weight: Tensor
    scale: Tensor
    group_size: int | None


def _int8_prepare(linear: QuantizedLinear, dtype: torch.dtype) -> Int8:
    """Keep the weight and its scales; `dtype` is not needed, the rescaling is float32."""
    assert linear.scheme.input is not None  # its needs refuse such a scheme
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
        scale = affine.scale_per_token(rows, prepared.input_scheme)  # [M, 1]
    qvalue = affine.quantize(rows, scale, prepared.input_zero_point, prepared.input_scheme)
    if on_gpu(x):
        qvalue = functional.pad(qvalue, (0, 0, 0, max(0, _TOKENS - len(rows))))
    product = torch._int_mm(qvalue, prepared.weight)[: len(rows)]  # [M, O] int32
    if prepared.row_sums is not None and prepared.input_zero_point is not None:
        product -= prepared.input_zero_point.int() * prepared.row_sums
    result = product.float() * scale * prepared.scale
    if bias is not None:
        result += bias
    return result.to(x.dtype).reshape(*x.shape[:-1], prepared.weight.shape[1])  # [..., O]


def _int4_pack_prepare(linear: QuantizedLinear, dtype: torch.dtype) -> Packed:
    weight = linear.weight
    zero = torch.zeros_like(weight.scale) if weight.zero_point is None else -weight.scale * weight.zero_point.float()
    pack = _tiles if on_gpu(weight.qvalue) else _int4_of_cpu
    return Packed(
        weight=pack(weight.qvalue),
        scale=torch.stack([weight.scale.t(), zero.t()], dim=-1).to(dtype).contiguous(),  # [G, O, 2]
        group_size=weight.scheme.group_size,
    )


def _int4_of_cpu(qvalue: Tensor) -> Tensor:
    convert = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    packed = [convert(rows.int().add_(8), _INNER_TILES) for rows in qvalue.split(_ROWS)]  # type: ignore[no-untyped-call]
    return packed[0] if len(packed) == 1 else torch.cat(packed)


def _tiles(qvalue: Tensor) -> Tensor:
    """Pack a weight for a GPU.  qvalue: [O, I] int8."""
    codes = (qvalue + 8).to(torch.uint8)
    side_by_side = next(tiles for tiles in (8, 4, 2) if codes.shape[1] % (16 * tiles) == 0)  # groups of 32 leave 2 at least
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], side_by_side)
    return packed


def _int8_pack_prepare(linear: QuantizedLinear, dtype: torch.dtype) -> Packed:
    scale = linear.weight.scale.reshape(-1).to(dtype)  # [O]
    return Packed(weight=linear.weight.qvalue.contiguous(), scale=scale, group_size=None)


def _packed_linear(x: Tensor, prepared: Packed, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # [M, I]
    if prepared.group_size is None:
        result = torch.ops.aten._weight_int8pack_mm(rows, prepared.weight, prepared.scale)
    else:
        multiply = torch.ops.aten._weight_int4pack_mm if on_gpu(x) else torch.ops.aten._weight_int4pack_mm_for_cpu
        result = multiply(rows, prepared.weight, prepared.group_size, prepared.scale)
    if bias is not None:
        result = result + bias
    return torch.reshape(result, (*x.shape[:-1], result.shape[1]))  # [..., O]


def on_gpu(tensor: Tensor) -> bool:
    """Return whether the GPU's kernels take a tensor."""
    return tensor.is_cuda


_DEVICES = on("cpu", "cuda")
_DTYPES = need(
    "needs float32 or bfloat16 inputs, which hold every scale, not {c.dtype}",
    lambda case: case.dtype in (torch.float32, torch.bfloat16),
)
_INT8_MM = (
    _DEVICES,
    INT8_WEIGHTS,
    weights_per("per_channel", "per_tensor"),
    INT8_INPUTS,
    need("needs 2 or more input features, torch's kernel returns wrong sums for 1", lambda case: case.shape[1] > 1),
    need(
        f"sums in int32, which holds {_MAX_IN_FEATURES} input features, not {{c.shape[1]}}",
        lambda case: case.shape[1] <= _MAX_IN_FEATURES,
    ),
    need(
        f"needs features that {_ON_GPU} divides on {{c.device.type}}, not {{c.shape[0]}} by {{c.shape[1]}}",
        lambda case: case.device.type == "cpu" or not any(size % _ON_GPU for size in case.shape),
    ),
)
_INT4_PACK = (
    _DEVICES,
    _DTYPES,
    need(
        "needs bfloat16 inputs on {c.device.type}, not {c.dtype}",
        lambda case: case.device.type == "cpu" or case.dtype == torch.bfloat16,
    ),
    need(
        "needs int4 weights, {c.weights}", lambda case: (case.scheme.weights.kind, case.scheme.weights.num_bits) == ("int", 4)
    ),
    need(
        f"needs group_size {', '.join(map(str, _GROUP_SIZES))}, not {{c.scheme.weights.group_size}}",
        lambda case: case.scheme.weights.group_size in _GROUP_SIZES,
    ),
    INPUTS_AS_THEY_ARE,
    need(f"needs out_features that {_MULTIPLE} divides, not {{c.shape[0]}}", lambda case: case.shape[0] % _MULTIPLE == 0),
    need(
        "needs in_features that group_size {c.scheme.weights.group_size} divides, not {c.shape[1]}",
        lambda case: case.shape[1] % (case.scheme.weights.group_size or 1) == 0,
    ),
)
_INT8_PACK = (
    _DEVICES,
    _DTYPES,
    INT8_WEIGHTS,
    weights_per("per_channel"),
    INPUTS_AS_THEY_ARE,
    need(f"needs in_features that {_MULTIPLE} divides, not {{c.shape[1]}}", lambda case: case.shape[1] % _MULTIPLE == 0),
)
BACKENDS = (
    Backend(name="int8_mm", needs=_INT8_MM, prepare=_int8_prepare, linear=_int8_linear),
    Backend(name="int4_pack", needs=_INT4_PACK, prepare=_int4_pack_prepare, linear=_packed_linear),
    Backend(name="int8_pack", needs=_INT8_PACK, prepare=_int8_pack_prepare, linear=_packed_linear),
)

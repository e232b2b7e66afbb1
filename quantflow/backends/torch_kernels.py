"""The kernels that torch brings for integer weights, on every CPU and on GPUs by NVIDIA.

int8_mm (`torch._int_mm`): int8 weights and inputs, an exact int32 product that is rescaled in
float32:

    y[m, o] = scale_x[m] * scale_w[o] * (sum_k qx[m, k] qw[o, k]  -  zero_point_x * sum_k qw[o, k])

The input is quantized per token at run time, or with the stored scale of a static scheme. Only the
rescaling rounds; with bfloat16 inputs that is more exact than the oracle, which rounds the
dequantized input. A GPU wants more than 16 tokens and both features in eights: tokens are padded,
features are refused.

int4_pack: int4 in groups, inputs as they are. The kernel's weight is (q - 8) * scale + zero with q
in 0..15 and `zero` in units of the real weight. Ours is scale * (qvalue - zero_point) with qvalue
in -8..7, so q = qvalue + 8 and zero = -scale * zero_point (0 when symmetric). A CPU
(`aten._weight_int4pack_mm_for_cpu`) packs int32. A GPU (`aten._weight_int4pack_mm`, tensor cores,
so bfloat16 alone) packs bytes of two columns, the even one in the upper half, in tiles of 8 rows by
16 columns, up to 8 side by side.

int8_pack (`aten._weight_int8pack_mm`): int8, inputs as they are; a GPU multiplies the codes in the
dtype of the inputs. All but int8_mm keep scales in that dtype. Source: torch 2.13,
aten/src/ATen/native/cuda/{Blas.cpp, int4mm.cu, int8mm.cu}, for what the GPU's kernels check and
pack.
"""

import torch
from torch import Tensor
from torch.nn import functional

from quantflow.accelerators import CUDA
from quantflow.backends import backend
from quantflow.backends.backend import is_int, requirement
from quantflow.core.qtensor import QuantizedLinear

# |qx - zero_point| <= 255 and |qw| <= 128, so an int32 holds this many products whatever the
# numbers are.
_MOST = (2**31 - 1) // (255 * 128)
_GROUP_SIZES = (32, 64, 128, 256)
_IN_GROUPS = "needs in_features that group_size {c.weights.group_size} divides, not {c.shape[1]}"
# Divides int4's out_features and int8's in_features; torch does not check it: other features give
# wrong numbers or a crash.
_MULTIPLE = 16
# Rows that are packed at once, so that their int32 copy stays small: a multiple of the kernel's
# tiles, which have at most 64 rows.
_ROWS = 128
_INNER_TILES = 1  # read by the GPU's packing only, but the CPU's has the argument as well
_TOKENS = 32  # a GPU multiplies more than 16, and the rows of the product stay aligned


# A weight whose inputs stay as they are. int4: two qvalues a byte in the kernel's own tile order,
# [O, I / 2] uint8 on a CPU and [O / 8, I / (16 * tiles), 32, tiles / 2] int32 on a GPU; scale and
# zero, [I / group_size, O, 2]; group_size. int8: qvalues [O, I]; the scale, [O]; None. Scales are
# in the dtype of the inputs.
Packed = tuple[Tensor, Tensor, int | None]


def _int8_prepare(
    linear: QuantizedLinear, dtype: torch.dtype
) -> tuple[QuantizedLinear, Tensor | None]:
    """The linear, and what its input's zero point adds to each sum, [O] int32."""
    del dtype
    zero = linear.input_zero_point
    return linear, None if zero is None else zero.int() * linear.weight.qvalue.sum(
        dim=1, dtype=torch.int32
    )


def _int8_round_input(
    x: Tensor, prepared: tuple[QuantizedLinear, Tensor | None]
) -> tuple[Tensor, Tensor]:
    """The codes of the tokens, [M or more, I], and their scale, [M, 1] or [1]."""
    qvalue, scale = prepared[0].quantize_input(x.reshape(-1, x.shape[-1]))
    if on_gpu(x):
        qvalue = functional.pad(qvalue, (0, 0, 0, max(0, _TOKENS - len(qvalue))))
    return qvalue, scale


def _int8_linear(
    x: Tensor,
    prepared: tuple[QuantizedLinear, Tensor | None],
    bias: Tensor | None,
    rounded: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    linear, offset = prepared
    qvalue, scale = _int8_round_input(x, prepared) if rounded is None else rounded
    tokens = x.shape[:-1].numel()
    product = torch._int_mm(qvalue, linear.weight.qvalue.t())[:tokens]  # [M, O] int32
    if offset is not None:
        product -= offset
    result = product.float() * scale * linear.weight.scale.t()
    if bias is not None:
        result += bias
    return result.to(x.dtype).reshape(*x.shape[:-1], result.shape[1])  # [..., O]


def _int4_pack_prepare(linear: QuantizedLinear, dtype: torch.dtype) -> Packed:
    weight = linear.weight
    zero = (
        torch.zeros_like(weight.scale)
        if weight.zero_point is None
        else -weight.scale * weight.zero_point.float()
    )
    pack = _tiles if on_gpu(weight.qvalue) else _int4_of_cpu
    scale = torch.stack([weight.scale.t(), zero.t()], dim=-1).to(dtype).contiguous()  # [G, O, 2]
    return pack(weight.qvalue), scale, weight.scheme.group_size


def _int4_of_cpu(qvalue: Tensor) -> Tensor:
    convert = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    packed = [convert(rows.int().add_(8), _INNER_TILES) for rows in qvalue.split(_ROWS)]  # type: ignore[no-untyped-call]
    return packed[0] if len(packed) == 1 else torch.cat(packed)


def _tiles(qvalue: Tensor) -> Tensor:
    """Pack a weight for a GPU.  qvalue: [O, I] int8."""
    codes = (qvalue + 8).to(torch.uint8)
    # 2 always fits: in_features is a multiple of the group size, which is 32 or more
    side_by_side = next(tiles for tiles in (8, 4, 2) if codes.shape[1] % (16 * tiles) == 0)
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack(
        codes[:, ::2] << 4 | codes[:, 1::2], side_by_side
    )
    return packed


def _int8_pack_prepare(linear: QuantizedLinear, dtype: torch.dtype) -> Packed:
    return linear.weight.qvalue.contiguous(), linear.weight.scale.reshape(-1).to(dtype), None


def _packed_linear(x: Tensor, prepared: Packed, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # [M, I]
    (weight, scale, group_size), aten = prepared, torch.ops.aten
    if group_size is None:
        # the kernel of a GPU has a thread for each output, which goes through all inputs
        result = (
            functional.linear(rows, weight.to(x.dtype)) * scale
            if on_gpu(x)
            else aten._weight_int8pack_mm(rows, weight, scale)
        )
    else:
        multiply = aten._weight_int4pack_mm if on_gpu(x) else aten._weight_int4pack_mm_for_cpu
        result = multiply(rows, weight, group_size, scale)
    if bias is not None:
        result = result + bias
    return torch.reshape(result, (*x.shape[:-1], result.shape[1]))  # [..., O]


def on_gpu(tensor: Tensor) -> bool:
    """Whether the GPU's kernels take a tensor."""
    return tensor.is_cuda


def _on_gpu(requirement: backend.Requirement) -> backend.Requirement:
    return lambda case: None if case.device.type == "cpu" else requirement(case)


_DEVICES = backend.on("cpu", CUDA)
_INT8_MM = (
    _DEVICES,
    backend.INT8_WEIGHTS,
    backend.weights_per("per_channel", "per_tensor"),
    backend.INT8_INPUTS,
    requirement(
        "needs 2 or more input features, torch's kernel returns wrong sums for 1",
        lambda c: c.shape[1] > 1,
    ),
    backend.sums_in_int32(_MOST),
    _on_gpu(backend.divides(8, 0, where=" on cuda")),
    _on_gpu(backend.divides(8, 1, where=" on cuda")),
)
_INT4_PACK = (
    _DEVICES,
    backend.FLOATS,
    _on_gpu(backend.BFLOAT16),
    requirement("needs int4 weights, {c.stored}", lambda c: is_int(c.weights, 4)),
    backend.INPUTS_AS_THEY_ARE,
    requirement(
        "needs group_size 32, 64, 128, 256, not {c.weights.group_size}",
        lambda c: c.weights.group_size in _GROUP_SIZES,
    ),
    backend.divides(_MULTIPLE, 0),
    requirement(_IN_GROUPS, lambda c: c.shape[1] % (c.weights.group_size or 1) == 0),
)
_INT8_PACK = (
    _DEVICES,
    backend.FLOATS,
    backend.INT8_WEIGHTS,
    backend.weights_per("per_channel"),
    backend.INPUTS_AS_THEY_ARE,
    backend.divides(_MULTIPLE, 1),
)
BACKENDS = (
    backend.Backend(
        name="int8_mm",
        requirements=_INT8_MM,
        prepare=_int8_prepare,
        linear=_int8_linear,
        round_input=_int8_round_input,
    ),
    backend.Backend(
        name="int4_pack", requirements=_INT4_PACK, prepare=_int4_pack_prepare, linear=_packed_linear
    ),
    backend.Backend(
        name="int8_pack", requirements=_INT8_PACK, prepare=_int8_pack_prepare, linear=_packed_linear
    ),
)

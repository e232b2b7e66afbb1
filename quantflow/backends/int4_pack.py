"""INT4 weights in groups, inputs in the model's dtype: `aten._weight_int4pack_mm_for_cpu`.

The kernel's weight is (q - 8) * scale + zero with q in 0..15 and `zero` in units of the real weight. Ours is
scale * (qvalue - zero_point) with qvalue in -8..7, so q = qvalue + 8 and zero = -scale * zero_point (0 when symmetric).
Scale and zero are kept in the dtype of the inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme

NAME = "int4_pack"

_GROUP_SIZES = (32, 64, 128, 256)
_OUT_FEATURES_MULTIPLE = 16
_ROWS = 128  # packed at once, a multiple of the kernel's tiles of at most 64 rows: their int32 copy stays small
_INNER_TILES = 1  # read by the GPU's packing only, but the CPU's has the argument as well


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A weight as the kernel reads it.

    Attributes:
        weight: [O, I / 2] uint8, two qvalues a byte in the kernel's own tile order.
        scale_and_zero: [I / group_size, O, 2] in the dtype of the inputs.
        group_size: input features per group.
    """

    weight: Tensor
    scale_and_zero: Tensor
    group_size: int


def why_not(scheme: LinearScheme, device: torch.device, *, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot run this linear, or None.  shape: (out_features, in_features)."""
    weights = scheme.weights
    if device.type != "cpu":
        return f"{NAME} runs on cpu, not on {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"{NAME} needs float32 or bfloat16 inputs, which hold every scale, not {dtype}"
    if (weights.kind, weights.num_bits) != ("int", 4):
        return f"{NAME} needs int4 weights, scheme {scheme.name} has {weights.kind}{weights.num_bits}"
    if weights.group_size not in _GROUP_SIZES:
        return f"{NAME} needs group_size {', '.join(map(str, _GROUP_SIZES))}, not {weights.group_size}"
    if scheme.input is not None:
        return f"{NAME} needs inputs in the model's dtype, scheme {scheme.name} quantizes them"
    if shape[0] % _OUT_FEATURES_MULTIPLE:
        return f"{NAME} needs out_features that {_OUT_FEATURES_MULTIPLE} divides, not {shape[0]}"
    if shape[1] % weights.group_size:
        return f"{NAME} needs in_features that group_size {weights.group_size} divides, not {shape[1]}"
    return None


def prepare(linear: QuantizedLinear, dtype: torch.dtype) -> Prepared:
    """Pack the weight into the kernel's tiles, scale and zero side by side."""
    weight = linear.weight
    assert weight.scheme.group_size is not None  # why_not refuses other granularities
    zero = torch.zeros_like(weight.scale) if weight.zero_point is None else -weight.scale * weight.zero_point.float()
    packed = [
        torch.ops.aten._convert_weight_to_int4pack_for_cpu(rows.int().add_(8), _INNER_TILES)
        for rows in weight.qvalue.split(_ROWS)  # type: ignore[no-untyped-call]
    ]
    return Prepared(
        weight=packed[0] if len(packed) == 1 else torch.cat(packed),
        scale_and_zero=torch.stack([weight.scale.t(), zero.t()], dim=-1).to(dtype).contiguous(),  # [G, O, 2]
        group_size=weight.scheme.group_size,
    )


def linear(x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
    """Return x @ W.T + bias.  x: [..., I] in the prepared dtype; returns [..., O]."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # [M, I]
    result = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, prepared.weight, prepared.group_size, prepared.scale_and_zero)
    if bias is not None:
        result = result + bias
    return torch.reshape(result, (*x.shape[:-1], prepared.weight.shape[0]))  # [..., O]

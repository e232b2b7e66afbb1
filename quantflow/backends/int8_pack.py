"""INT8 weights, inputs in the model's dtype: `aten._weight_int8pack_mm`.

The kernel converts the weight on its way to the product; it reads int8 rows as they are and
takes the scales in the dtype of the inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme

NAME = "int8_pack"

# torch checks none of it: with bfloat16 and other widths the kernel returns wrong numbers or crashes.
_IN_FEATURES_MULTIPLE = 16


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A weight as the kernel reads it.

    Attributes:
        weight: [O, I] int8.
        scale: [O] in the dtype of the inputs.
    """

    weight: Tensor
    scale: Tensor


def why_not(scheme: LinearScheme, device: torch.device, *, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot run this linear, or None.  shape: (out_features, in_features)."""
    weights = scheme.weights
    if device.type != "cpu":
        return f"{NAME} runs on cpu, not on {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"{NAME} needs float32 or bfloat16 inputs, which hold every scale, not {dtype}"
    if (weights.kind, weights.num_bits, weights.granularity, weights.symmetric) != ("int", 8, "per_channel", True):
        return f"{NAME} needs symmetric int8 weights per channel, scheme {scheme.name} has others"
    if scheme.input is not None:
        return f"{NAME} needs inputs in the model's dtype, scheme {scheme.name} quantizes them"
    if shape[1] % _IN_FEATURES_MULTIPLE:
        return f"{NAME} needs in_features that {_IN_FEATURES_MULTIPLE} divides, not {shape[1]}"
    return None


def prepare(linear: QuantizedLinear, dtype: torch.dtype) -> Prepared:
    """Keep the int8 weight, round its scales to `dtype`."""
    return Prepared(weight=linear.weight.qvalue.contiguous(), scale=linear.weight.scale.reshape(-1).to(dtype))  # [O]


def linear(x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
    """Return x @ W.T + bias.  x: [..., I] in the prepared dtype; returns [..., O]."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # [M, I]
    result = torch.ops.aten._weight_int8pack_mm(rows, prepared.weight, prepared.scale)
    if bias is not None:
        result = result + bias
    return torch.reshape(result, (*x.shape[:-1], prepared.weight.shape[0]))  # [..., O]

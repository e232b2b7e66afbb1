"""FP8 (e4m3) weights, kept as bytes and widened to bfloat16 in registers, exactly; inputs as they are, or quantized to e4m3.

No CPU multiplies float8. A product of two e4m3 values, or of one and a bfloat16, is exact in float32; scales of tensors,
channels, tokens, blocks and groups multiply sums. Source: Micikevicius et al. 2022, arXiv:2209.05433.
"""

import torch

from quantflow.core import float8, kernels
from quantflow.core.kernels import linear, prepare
from quantflow.core.scheme import LinearScheme

__all__ = ["NAME", "linear", "prepare", "why_not"]

NAME = "fp8"


def why_not(scheme: LinearScheme, device: torch.device, *, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot run this linear, or None.  shape: (out_features, in_features)."""
    weights, inputs = scheme.weights, scheme.input
    if weights.kind != "float" or float8.FLAVOURS[weights.float8].dtype != torch.float8_e4m3fn:
        found = weights.float8 if weights.kind == "float" else f"{weights.kind}{weights.num_bits}"
        return f"{NAME} needs e4m3fn weights, scheme {scheme.name} has {found}"
    if inputs is not None and (inputs.kind != "float" or float8.FLAVOURS[inputs.float8].dtype != torch.float8_e4m3fn):
        found = inputs.float8 if inputs.kind == "float" else f"{inputs.kind}{inputs.num_bits}"
        return f"{NAME} needs e4m3fn inputs or none, scheme {scheme.name} has {found}"
    return kernels.why_not(scheme, device, shape=shape, dtype=dtype, name=NAME)

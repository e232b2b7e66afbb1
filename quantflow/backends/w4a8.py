"""INT4 weights and inputs quantized to INT8 per token: integer products (VNNI) in groups, rescaled in float32.

A group's sum of products is an exact integer; the zero point is taken out of it as zero_point * sum(input). With bfloat16
inputs that is more exact than the oracle, which rounds the dequantized input.
"""

import torch

from quantflow.core import kernels
from quantflow.core.kernels import linear, prepare
from quantflow.core.scheme import LinearScheme

__all__ = ["NAME", "linear", "prepare", "why_not"]

NAME = "w4a8"


def why_not(scheme: LinearScheme, device: torch.device, *, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot run this linear, or None.  shape: (out_features, in_features)."""
    weights, inputs = scheme.weights, scheme.input
    if weights.kind != "int" or weights.num_bits > 4:
        return f"{NAME} needs integer weights of at most 4 bits, scheme {scheme.name} has {weights.kind}{weights.num_bits}"
    if inputs is None or (inputs.kind, inputs.num_bits, inputs.symmetric) != ("int", 8, True):
        return f"{NAME} needs symmetric int8 inputs, scheme {scheme.name} has {'none' if inputs is None else 'others'}"
    return kernels.why_not(scheme, device, shape=shape, dtype=dtype, name=NAME)

"""INT8 weights and INT8 inputs: integer products (VNNI), rescaled in float32.

The input is quantized per token at run time, or with the stored scale and zero point of a static scheme. The instruction
multiplies unsigned with signed bytes: inputs are shifted by 128, which begins every sum at -(128 + zero_point) * sum(weight).
The sums are exact integers.
"""

import torch

from quantflow.core import kernels
from quantflow.core.kernels import linear, prepare
from quantflow.core.scheme import LinearScheme

__all__ = ["NAME", "linear", "prepare", "why_not"]

NAME = "w8a8"


def why_not(scheme: LinearScheme, device: torch.device, *, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot run this linear, or None.  shape: (out_features, in_features)."""
    weights, inputs = scheme.weights, scheme.input
    if (weights.kind, weights.num_bits, weights.symmetric) != ("int", 8, True):
        return f"{NAME} needs symmetric int8 weights, scheme {scheme.name} has others"
    if inputs is None or (inputs.kind, inputs.num_bits) != ("int", 8):
        return f"{NAME} needs int8 inputs, scheme {scheme.name} has {'none' if inputs is None else inputs.kind}"
    return kernels.why_not(scheme, device, shape=shape, dtype=dtype, name=NAME)

"""INT8 weights, inputs in the model's dtype: the integers become bfloat16 or float32 in registers, exactly.

The inputs are not rounded, and the scale multiplies a sum: nothing else is rounded. 5 and 6 bits are stored in 8, as
qvalue - zero_point.
"""

import torch

from quantflow.core import kernels
from quantflow.core.kernels import linear, prepare
from quantflow.core.scheme import LinearScheme

__all__ = ["NAME", "linear", "prepare", "why_not"]

NAME = "w8a16"


def why_not(scheme: LinearScheme, device: torch.device, *, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot run this linear, or None.  shape: (out_features, in_features)."""
    weights, inputs = scheme.weights, scheme.input
    if weights.kind != "int" or weights.num_bits < 5 or (weights.num_bits == 8 and not weights.symmetric):
        return f"{NAME} needs symmetric int8 weights, or 5 or 6 bits, scheme {scheme.name} has others"
    if inputs is not None:
        return f"{NAME} needs inputs in the model's dtype, scheme {scheme.name} quantizes them"
    return kernels.why_not(scheme, device, shape=shape, dtype=dtype, name=NAME)

"""INT4 weights in groups, inputs in the model's dtype; 2 and 3 bits are stored in 4.

The integers qvalue - zero_point become bfloat16 or float32 in registers, exactly; the inputs are not rounded, and the scale
of a group multiplies its sum. Nothing is rounded but the sums, so it is closer to the exact product than the oracle, which
rounds the dequantized weight to the dtype of the inputs.
"""

import torch

from quantflow.core import kernels
from quantflow.core.kernels import linear, prepare
from quantflow.core.scheme import LinearScheme

__all__ = ["NAME", "linear", "prepare", "why_not"]

NAME = "w4a16"


def why_not(scheme: LinearScheme, device: torch.device, *, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot run this linear, or None.  shape: (out_features, in_features)."""
    weights, inputs = scheme.weights, scheme.input
    if weights.kind != "int" or weights.num_bits > 4:
        return f"{NAME} needs integer weights of at most 4 bits, scheme {scheme.name} has {weights.kind}{weights.num_bits}"
    if inputs is not None:
        return f"{NAME} needs inputs in the model's dtype, scheme {scheme.name} quantizes them"
    return kernels.why_not(scheme, device, shape=shape, dtype=dtype, name=NAME)

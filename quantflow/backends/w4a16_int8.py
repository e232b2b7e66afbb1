"""INT4 weights whose scheme leaves inputs alone, run with inputs quantized to INT8 per token as W4A8 does.

Another model than the artifact's: faster for prompts and batches, and less exact. It is taken by name only, never by `auto`.
"""

from dataclasses import replace

import torch

from quantflow.core import kernels
from quantflow.core.kernels import Prepared, linear
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme, TensorScheme

__all__ = ["NAME", "linear", "prepare", "why_not"]

NAME = "w4a16_int8"

_INPUT = TensorScheme(kind="int", num_bits=8, granularity="per_token", dynamic=True)


def why_not(scheme: LinearScheme, device: torch.device, *, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot run this linear, or None.  shape: (out_features, in_features)."""
    weights, inputs = scheme.weights, scheme.input
    if weights.kind != "int" or weights.num_bits > 4:
        return f"{NAME} needs integer weights of at most 4 bits, scheme {scheme.name} has {weights.kind}{weights.num_bits}"
    if inputs is not None:
        return f"{NAME} needs inputs in the model's dtype, scheme {scheme.name} quantizes them"
    return kernels.why_not(scheme, device, shape=shape, dtype=dtype, name=NAME)


def prepare(linear: QuantizedLinear, dtype: torch.dtype) -> Prepared:
    """Pack the weight as for W4A8."""
    return kernels.prepare(replace(linear, scheme=replace(linear.scheme, input=_INPUT)), dtype)

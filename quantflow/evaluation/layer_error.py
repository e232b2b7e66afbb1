"""How far a quantized tensor or output is from the original: one number per linear for the manifest and the report."""

import torch
from torch import Tensor

from quantflow.errors import InputError


def relative_error(original: Tensor, approximation: Tensor, *, name: str) -> float:
    """Return ||original - approximation||^2 / ||original||^2, in float64; 0 when both are zero.

    Args:
        original: any shape, any float dtype.
        approximation: the same shape.
        name: for the error message.

    Raises:
        InputError: the result is not finite.
    """
    difference = (original.double() - approximation.double()).square().sum()
    power = original.double().square().sum()
    if power == 0 and difference == 0:
        return 0.0
    ratio = difference / power
    if not torch.isfinite(ratio):
        raise InputError(f"{name}: relative error {ratio.item()}", "the weight or its input holds NaN or Inf, or is zero")
    return float(ratio)

"""The distance of a quantized tensor or output from the original: one number per linear.

Sums are taken in float64 over blocks of a constant size, in order, so that a float64 copy of a
tensor is never needed.
"""

import math

from torch import Tensor

from quantflow.core import groups
from quantflow.core.affine import dequantize
from quantflow.core.qtensor import QTensor
from quantflow.errors import InputError

_BLOCK = 1 << 20  # elements; part of the result's last digits, so it never changes


# sums of squares; smaller ones have lost terms, larger ones are near the end of float32
_SMALLEST, _LARGEST = 1e-20, 1e30


def relative_error(original: Tensor, approximation: Tensor, *, name: str) -> float:
    """||original - approximation||^2 / ||original||^2, in float64; 0 when both are zero.

    Args:
        original: any shape, any float dtype.
        approximation: the same shape.
        name: name of the tensor, for the error message.

    Raises:
        InputError: the result is not finite.
    """
    difference = power = 0.0
    left, right = original.reshape(-1).split(_BLOCK), approximation.reshape(-1).split(_BLOCK)  # type: ignore[no-untyped-call]
    for block, other in zip(left, right, strict=True):
        exact = block.double()
        difference += float((exact - other.double()).square().sum())
        power += float(exact.square().sum())
    return error_from(difference, power, name=name)


def squared_sums(original: Tensor, approximation: Tensor) -> tuple[float, float]:
    """||original - approximation||^2 and ||original||^2 of some rows, to be added up over all rows.

    Faster than `relative_error`: squares are float32, summed within a row in float32 and over the
    rows in float64, which is good to six digits; rows whose squares float32 does not hold are
    squared in float64.

    Args:
        original: [O, I], any float dtype.
        approximation: [O, I] float32.
    """
    power = float(_squares(exact := original.float()))
    if not _SMALLEST < power < _LARGEST:
        exact = original.double()
        return float((approximation.double() - exact).square().sum()), float(exact.square().sum())
    return float(_squares(approximation - exact)), power


def _squares(tensor: Tensor) -> Tensor:
    """The sum of squares of a float32 matrix: within a row in float32, over the rows in float64."""
    return (tensor * tensor).sum(dim=1).double().sum()


def weight_sums(weight: Tensor, quantized: QTensor) -> tuple[float, float]:
    """The `squared_sums` of a weight, or some rows, and its quantized values; a few rows at once.

    Args:
        weight: [O, I], any float dtype.
        quantized: [O, I].
    """
    size = weight.shape[1] // quantized.scale.shape[1]
    difference = 0.0
    power = 0.0
    for part in groups.row_units(weight):
        grid = slice(None) if quantized.scheme.granularity == "per_tensor" else part
        scale = quantized.scale[grid, :, None]  # [O or 1, G, 1]
        zero_point = None if quantized.zero_point is None else quantized.zero_point[grid, :, None]
        split = groups.to_groups(quantized.qvalue[part], size)  # [O, G, g]
        sums = squared_sums(weight[part], dequantize(split, scale, zero_point).flatten(1))
        difference, power = difference + sums[0], power + sums[1]
    return difference, power


def error_from(difference: float, power: float, *, name: str) -> float:
    """The relative squared error of added `squared_sums`; 0 when both are zero.

    Raises:
        InputError: the result is not finite.
    """
    if difference == power == 0:
        return 0.0
    ratio = difference / power if power else math.inf
    if not math.isfinite(ratio):
        raise InputError(
            f"{name}: relative error {ratio}",
            "the weight or its input holds NaN or Inf, or is zero",
        )
    return ratio

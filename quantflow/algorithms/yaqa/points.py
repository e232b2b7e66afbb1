"""The points that a weight is rounded to, as small integers: qvalues, or twice the values of e2m1.

Twice the values of e2m1 are 0, 1, 2, 3, 4, 6, 8, 12 and their negatives, and their scale is half
the scale. Both steps of YAQA work with int8 and with the distances of points, which in e2m1 grow
with the value.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantflow.core import affine
from quantflow.core.qtensor import qvalue_dtype
from quantflow.core.scheme import FLOAT4, TensorScheme

_HALVES = 2  # integers per unit of e2m1


def known(scheme: TensorScheme) -> bool:
    """Whether the points of a scheme are small integers."""
    return scheme.kind == "int" or scheme.float8 == FLOAT4


def unit(scheme: TensorScheme) -> int:
    """The integer that stands for a qvalue of 1."""
    return 1 if scheme.kind == "int" else _HALVES


def round_(scaled: Tensor, zero_point: Tensor | None, scheme: TensorScheme) -> Tensor:
    """Replace x / scale by the nearest point, as a float32; return it.

    Args:
        scaled: x / scale, with the scale of an integer here.
        zero_point: zero point for `affine.round_`.
        scheme: scheme of the weight.
    """
    if scheme.kind == "int":
        return affine.round_(scaled, zero_point, scheme)
    return affine.round_(scaled.div_(_HALVES), None, scheme).mul_(_HALVES)


def nearest_(values: NDArray[np.float32], scheme: TensorScheme) -> None:
    """Replace values by their nearest points, as `round_` does except for ties."""
    if scheme.block is not None and scheme.block.points:
        points = np.array(scheme.block.points, dtype=np.float32)
        values[...] = points[np.searchsorted((points[1:] + points[:-1]) / 2, values, side="right")]
        return
    if scheme.kind == "int":
        np.rint(values, out=values)
        np.maximum(values, np.float32(scheme.qmin), out=values)
        np.minimum(values, np.float32(scheme.qmax), out=values)
        return
    size = np.abs(values)
    step = np.where(size > 8, np.float32(4), np.where(size > 4, np.float32(2), np.float32(1)))
    values /= step
    np.rint(values, out=values)
    values *= step
    np.clip(values, -12, 12, out=values)


def qvalues(points: Tensor, scheme: TensorScheme) -> Tensor:
    """The qvalues of int8 points of any shape, in the scheme's dtype."""
    if scheme.kind == "int":
        return points
    return (points.to(torch.float32) / _HALVES).to(qvalue_dtype(scheme))

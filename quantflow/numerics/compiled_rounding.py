"""Weights rounded in C (rounding.c), to the bits of torch's operators, which do it elsewhere.

Torch takes four to nine operators for what C does to each number at once. C is compiled when it is
first needed (quantflow/backends/native.py). Without a compiler, on devices other than the CPU, and
for points that are not evenly spaced, torch's operators do the work: `takes` decides.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantflow.backends import native
from quantflow.core import float8
from quantflow.core.scheme import TensorScheme

SOURCE = Path(__file__).with_name("rounding.c")
# torch's BLAS, or what it loads as such
_TORCH = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
# of C's arguments; the last one is `_points`
_TENSOR: list[Any] = [ctypes.c_void_p]
_SIZE: list[Any] = [ctypes.c_int64]
_POINTS: list[Any] = [*[ctypes.c_float] * 4, ctypes.c_int]


def takes(scheme: TensorScheme, device: torch.device) -> bool:
    """Whether C rounds weights on a device to a scheme: one of integers or floats."""
    regular = scheme.block is None or not scheme.block.points
    return regular and device.type == "cpu" and _library() is not None


def round_columns_(
    aims: Tensor,
    errors: Tensor,
    within: Tensor,
    *,
    columns: range,
    groups: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    scheme: TensorScheme,
) -> None:
    """Round some columns of a block, the last one first, as `quantflow.numerics.feedback` does.

    Args:
        aims: [B, R] float32, contiguous: each of the columns, and what the errors of later ones add
            to it; afterwards its qvalues.
        errors: [B, R] float32, contiguous: the columns; afterwards weight - rounded weight.
        within: [B, B] float32, its rows contiguous; row i holds the factors of the errors that
            reach column i.
        columns: the columns.
        groups: [B] int64, group of each column.
        scales: [G, R] float32, contiguous.
        zero_points: [G, R] float32, contiguous, or None.
        scheme: one that C `takes`.
    """
    library = _library()
    assert library is not None  # `takes` has looked
    library.round_columns(
        *map(native.address, (aims, errors, within)),
        within.stride(0),
        *map(native.address, (groups, scales, zero_points)),
        columns.start,
        columns.stop,
        aims.shape[1],
        *_points(scheme),
        _sgemv(),
    )


def losses(
    weights: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    importance: Tensor,
    *,
    scheme: TensorScheme,
    out: Tensor,
) -> Tensor:
    """The loss importance * (rounded - weight)^2 of every weight, rounded to nearest; `out`.

    Args:
        weights: [O, G, g] float32, contiguous.
        scales: [O, G] float32.
        zero_points: [O, G] float32, or None.
        importance: [G, g] float32.
        scheme: one that C `takes`.
        out: [O, G, g] float32, contiguous.
    """
    library = _library()
    assert library is not None  # `takes` has looked
    zeros = None if zero_points is None else zero_points.contiguous()
    scales, importance = scales.contiguous(), importance.contiguous()
    library.rounding_losses(
        *map(native.address, (weights, scales, zeros, importance, out)),
        *weights.shape,
        *_points(scheme),
    )
    return out


def _points(scheme: TensorScheme) -> tuple[float, float, float, float, bool]:
    """A scheme's points for C: the smallest, the largest, tiny and eps of floats; whether floats.

    Those are of `quantflow.core.float8`.
    """
    if scheme.kind != "float":
        return scheme.qmin, scheme.qmax, 0.0, 0.0, False
    flavour = float8.FLAVOURS[scheme.float8]
    return -flavour.largest, flavour.largest, flavour.tiny, flavour.eps, True


@functools.cache
def _library() -> ctypes.CDLL | None:
    """rounding.c; None where it cannot be compiled, or torch has no `sgemv_`."""
    if native.why_not(SOURCE, cpu_flags=()) is not None or _sgemv() is None:
        return None
    library = native.library(SOURCE)
    library.rounding_losses.argtypes = 5 * _TENSOR + 3 * _SIZE + _POINTS
    library.round_columns.argtypes = (
        3 * _TENSOR + _SIZE + 3 * _TENSOR + 3 * _SIZE + _POINTS + [ctypes.c_void_p]
    )
    library.rounding_losses.restype = library.round_columns.restype = None
    return library


@functools.cache
def _sgemv() -> int | None:
    """The address of BLAS's product of a matrix and a vector as torch calls it; None without."""
    try:
        return native.function_address(ctypes.CDLL(str(_TORCH)).sgemv_)
    except (OSError, AttributeError):
        return None

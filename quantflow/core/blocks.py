"""Scales and minima rounded to values that llama.cpp's blocks can hold.

The types are in quantflow/core/block_types.py. `stored` rounds the scales of a row to values of its
blocks, and leaves scales that are such values already. The largest magnitude of a block gets the
largest integer, so that d follows from the scales: a weight holds scales alone.
"""

import functools

import torch
from torch import Tensor

from quantflow.core import codebooks
from quantflow.core.block_types import BlockType

_LEAST = 2.0**-24  # float16's smallest number


@functools.cache
def _points(kind: BlockType, device: torch.device) -> tuple[Tensor, Tensor]:
    """The points of a type, [P] float32, and the limits between neighbours, [P - 1]."""
    points = torch.tensor(kind.points, dtype=torch.float32, device=device)
    return points, (points[1:] + points[:-1]) / 2


def round_(scaled: Tensor, kind: BlockType, importance: Tensor | None = None) -> Tensor:
    """Replace values by the nearest points of a type; return them.

    In the middle the larger point is taken, as llama.cpp does.

    Args:
        scaled: x / scale, float32, any shape; with a codebook its last dimension is a group's.
        kind: type with points.
        importance: importance of each value, broadcastable against scaled; only a codebook, whose
            entries stand for several values, reads it.
    """
    if kind.codebook is not None:
        return codebooks.round_(scaled, kind, importance)
    points, limits = _points(kind, scaled.device)
    return scaled.copy_(points[torch.bucketize(scaled, limits, out_int32=True, right=True)])


def holds(qvalue: Tensor, kind: BlockType) -> bool:
    """Whether the qvalues [O, I] int8 are points of a type that has points, and whole entries."""
    points, _ = _points(kind, qvalue.device)
    if not torch.isin(qvalue, points.to(torch.int8)).all():
        return False
    return kind.codebook is None or codebooks.holds(qvalue, kind)


def codes(qvalue: Tensor, kind: BlockType) -> Tensor:
    """The numbers of points, uint8 from 0 on; qvalue is int8 of any shape, points of the type."""
    points, _ = _points(kind, qvalue.device)
    return torch.bucketize(qvalue.float(), points, out_int32=True).to(torch.uint8)


def stored(scale: Tensor, kind: BlockType) -> Tensor:
    """Scales as a block of the type holds them, float32, their sign kept.

    Scales that the block holds exactly are returned unchanged.

    Args:
        scale: [O, G] float32, not zero; G is a multiple of `kind.groups`.
        kind: type of the blocks.

    Returns:
        [O, G], no zeros; Inf where d or a scale is too large for float16, which `QTensor.validate`
        refuses.
    """
    if kind.scale_bits is None:
        return scale.abs().half().float().clamp_min(_LEAST).copysign(scale)
    d, steps = steps_of(scale, kind)
    return (steps * d[..., None]).flatten(1)  # [O, G]


def steps_of(scale: Tensor, kind: BlockType) -> tuple[Tensor, Tensor]:
    """The d of each block and the integer of each scale.

    Args:
        scale: [O, G] float32.
        kind: type whose blocks have a d.

    Returns:
        d: [O, B] float32, rounded to float16, and divided by the type's divisor where it has one;
        integers: [O, B, groups] float32, none of them zero.
    """
    split = scale.view(len(scale), -1, kind.groups)  # [O, B, groups]
    lowest, highest = kind.steps
    largest = lowest if kind.signed else highest
    place = split.abs().argmax(dim=-1, keepdim=True)  # [O, B, 1]
    d = split.gather(-1, place) / largest
    divisor = kind.divisor or 1
    d = (d.abs() * divisor).half().float().clamp_min(_LEAST).div_(divisor).copysign(d)
    if kind.divisor is not None:  # odd ones
        steps = (split / d - 1).div_(2).round_().mul_(2).add_(1).clamp_(lowest, highest)
        return d[..., 0], _with_largest(steps, place, largest, d * divisor)
    steps = (split / d).round_()
    smallest = torch.ones_like(steps).copysign_(split * d)
    steps = torch.where(steps == 0, smallest, steps).clamp_(lowest, highest)
    return d[..., 0], _with_largest(steps, place, largest, d)


def _with_largest(steps: Tensor, place: Tensor, largest: int, d: Tensor) -> Tensor:
    """Steps with the largest integer at `place`, from which d follows.

    A small d is coarse, since float16 has no more digits there, and the step at `place` may have
    been rounded to another integer. The smallest d is left as it is: it cannot follow from the
    scales.
    """
    there = torch.where(d.abs() > _LEAST, float(largest), steps.gather(-1, place))
    return steps.scatter_(-1, place, there)


def stored_minima(minimum: Tensor, kind: BlockType) -> Tensor:
    """Minima as a block of the type holds them; minima that it holds exactly are unchanged.

    Args:
        minimum: [O, G] float32, at least zero where the type has integers for it.
        kind: type of the blocks; it has minima.
    """
    if kind.scale_bits is None:
        return minimum.half().float()
    d, steps = minimum_steps_of(minimum, kind)
    return (steps * d[..., None]).flatten(1)  # [O, G]


def minimum_steps_of(minimum: Tensor, kind: BlockType) -> tuple[Tensor, Tensor]:
    """The dmin of each block and the integer of each minimum.

    Returns:
        dmin: [O, B] float32, rounded to float16; integers: [O, B, groups] float32.
    """
    split = minimum.view(len(minimum), -1, kind.groups)  # [O, B, groups]
    _, highest = kind.steps
    top, place = split.max(dim=-1, keepdim=True)  # [O, B, 1]
    d = torch.where(top > 0, (top / highest).half().float().clamp_min(_LEAST), 0.0)
    steps = torch.where(d > 0, (split / d).round(), 0.0).clamp_(0, highest)
    return d[..., 0], _with_largest(steps, place, highest, d)

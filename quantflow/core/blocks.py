"""What the scales and minima of a weight can be where one of llama.cpp's blocks holds it (quantflow/core/block_types.py).

`stored` rounds the scales of a row to such as a block can have, and leaves those that are. The
largest magnitude of a block gets the largest integer, so that d follows from the scales: a weight
holds scales alone.
"""

import functools

import torch
from torch import Tensor

from quantflow.core.block_types import BlockType

_LEAST = 2.0**-24  # float16's smallest number


@functools.cache
def _points(kind: BlockType, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the points of a type, [P] float32, and where one becomes nearer than the one before, [P - 1]."""
    points = torch.tensor(kind.points, dtype=torch.float32, device=device)
    return points, (points[1:] + points[:-1]) / 2


def round_(scaled: Tensor, kind: BlockType) -> Tensor:
    """Replace values by the nearest points of a type, in the middle by the larger one, as llama.cpp does; return them.

    Args:
        scaled: x / scale, float32, any shape.
        kind: with points.
    """
    points, limits = _points(kind, scaled.device)
    return scaled.copy_(points[torch.bucketize(scaled, limits, out_int32=True, right=True)])


def holds(qvalue: Tensor, kind: BlockType) -> bool:
    """Return whether every qvalue is a point of a type that has points.  qvalue: int8, any shape."""
    return torch.equal(round_(qvalue.float(), kind).to(torch.int8), qvalue)


def codes(qvalue: Tensor, kind: BlockType) -> Tensor:
    """Return the numbers of points, uint8 from 0 on.  qvalue: int8, any shape, points of the type."""
    points, _ = _points(kind, qvalue.device)
    return torch.bucketize(qvalue.float(), points, out_int32=True).to(torch.uint8)


def stored(scale: Tensor, kind: BlockType) -> Tensor:
    """Return scales as a block of the type holds them, float32, their sign kept; those that it holds are returned as they are.

    Args:
        scale: [O, G] float32, not zero; G is a multiple of `kind.groups`.
        kind: of the blocks.

    Returns:
        [O, G], no zeros; Inf where d or a scale is too large for float16, which `QTensor.validate`
        refuses.
    """
    if kind.scale_bits is None:
        return scale.abs().half().float().clamp_min(_LEAST).copysign(scale)
    d, steps = steps_of(scale, kind)
    return (steps * d[..., None]).flatten(1)  # [O, G]


def steps_of(scale: Tensor, kind: BlockType) -> tuple[Tensor, Tensor]:
    """Return d, [O, B] float32 as float16 holds it, and the integer of each scale, [O, B, groups] float32, none of them zero.

    Args:
        scale: [O, G] float32.
        kind: a type whose blocks have a d.
    """
    split = scale.view(len(scale), -1, kind.groups)  # [O, B, groups]
    lowest, highest = kind.steps
    largest = lowest if kind.signed else highest
    place = split.abs().argmax(dim=-1, keepdim=True)  # [O, B, 1]
    d = split.gather(-1, place) / largest
    d = d.abs().half().float().clamp_min(_LEAST).copysign(d)
    steps = (split / d).round_()
    smallest = torch.ones_like(steps).copysign_(split * d)
    steps = torch.where(steps == 0, smallest, steps).clamp_(lowest, highest)
    return d[..., 0], _with_largest(steps, place, largest, d)


def _with_largest(steps: Tensor, place: Tensor, largest: int, d: Tensor) -> Tensor:
    """Return steps of which that at `place` is the largest, from which d follows; a d that could not be smaller is no such.

    Small d are coarse, float16 has no more: the step there may have been rounded to another.
    """
    there = torch.where(d.abs() > _LEAST, float(largest), steps.gather(-1, place))
    return steps.scatter_(-1, place, there)


def stored_minima(minimum: Tensor, kind: BlockType) -> Tensor:
    """Return minima as a block of the type holds them; those that it holds are returned as they are.

    Args:
        minimum: [O, G] float32, at least zero where the type has integers for it.
        kind: of the blocks; it has minima.
    """
    if kind.scale_bits is None:
        return minimum.half().float()
    d, steps = minimum_steps_of(minimum, kind)
    return (steps * d[..., None]).flatten(1)  # [O, G]


def minimum_steps_of(minimum: Tensor, kind: BlockType) -> tuple[Tensor, Tensor]:
    """Return dmin, [O, B] float32 as float16 holds it, and the integer of each minimum, [O, B, groups] float32."""
    split = minimum.view(len(minimum), -1, kind.groups)  # [O, B, groups]
    _, highest = kind.steps
    top, place = split.max(dim=-1, keepdim=True)  # [O, B, 1]
    d = torch.where(top > 0, (top / highest).half().float().clamp_min(_LEAST), 0.0)
    steps = torch.where(d > 0, (split / d).round(), 0.0).clamp_(0, highest)
    return d[..., 0], _with_largest(steps, place, highest, d)

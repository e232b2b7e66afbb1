"""A part of a quantized weight, and the weight from its parts.

Nothing is rounded: what is cut and put together again has the bits that were chosen for the whole.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantflow.core.qtensor import QTensor
from quantflow.core.scheme import TensorScheme
from quantflow.errors import SchemeError


def cut(weight: QTensor, part: slice, *, axis: int) -> QTensor:
    """Some rows or columns of a weight.

    Args:
        weight: [O, I]; not modified.
        part: start and stop along the axis.
        axis: 0 takes rows, 1 columns.

    Returns:
        [length, I] or [O, length], with the scales of the whole that it shares: of columns of
        per_channel weights those of whole rows.

    Raises:
        SchemeError: a group would be split.
    """
    rows, columns = (part, slice(None)) if axis == 0 else (slice(None), part)
    scales: tuple[slice, slice] = (slice(None), slice(None))
    if _follow(weight.scheme, axis):
        scales = (part, slice(None)) if axis == 0 else (slice(None), _groups(weight.scheme, part))
    zero_point = None if weight.zero_point is None else weight.zero_point[scales].contiguous()
    return QTensor(
        qvalue=weight.qvalue[rows, columns].contiguous(),
        scale=weight.scale[scales].contiguous(),
        zero_point=zero_point,
        scheme=weight.scheme,
        global_scale=weight.global_scale,
    )


def side_by_side(parts: Sequence[QTensor], *, axis: int) -> QTensor:
    """The weight of which `cut` made the parts.

    Args:
        parts: parts of one weight, in order, without hole or overlap.
        axis: axis along which they were cut.

    Raises:
        SchemeError: parts that share scales have different ones.
    """
    first = parts[0]
    qvalue = torch.cat([part.qvalue.view(torch.uint8) for part in parts], dim=axis).view(
        first.qvalue.dtype
    )
    grids = []
    for parts_of_grid in (
        [part.scale for part in parts],
        [part.zero_point for part in parts if part.zero_point is not None],
    ):
        if not parts_of_grid or _follow(first.scheme, axis):
            grids.append(torch.cat(parts_of_grid, dim=axis) if parts_of_grid else None)
        else:
            grids.append(_one(parts_of_grid, first.scheme))
    scale, zero_point = grids
    assert scale is not None  # every part has one
    return QTensor(
        qvalue=qvalue,
        scale=scale,
        zero_point=zero_point,
        scheme=first.scheme,
        global_scale=first.global_scale,
    )


def _follow(scheme: TensorScheme, axis: int) -> bool:
    """Whether each part has scales of its own."""
    return scheme.granularity == "per_group" or (scheme.granularity == "per_channel" and axis == 0)


def _groups(scheme: TensorScheme, part: slice) -> slice:
    """The groups of some columns."""
    size = scheme.group_size
    if size is None or part.start % size or part.stop % size:
        raise SchemeError(
            f"columns {part.start} to {part.stop} of groups of {size}",
            "cut where groups end, or choose smaller groups",
        )
    return slice(part.start // size, part.stop // size)


def _one(tensors: Sequence[Tensor], scheme: TensorScheme) -> Tensor:
    """The tensor that all parts share."""
    for other in tensors[1:]:
        if not torch.equal(tensors[0], other):
            raise SchemeError(
                f"parts of a {scheme.granularity} weight have different scales or zero points",
                "put parts of one weight together",
            )
    return tensors[0]

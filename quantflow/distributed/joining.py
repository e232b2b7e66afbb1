"""One quantized weight from those of several cards that each rounded a part of it.

Cards that hold rows, or columns in whole groups, have the scales that one process has: their parts
are put side by side. Cards that hold columns of rows that have one scale each took it from their
own columns, and cards that hold any part of a weight that has one scale took that from their own
part. One process takes it from the largest magnitude of the whole, and scales follow magnitudes
monotonically, so its scale is the largest of the cards', bit for bit; the values that were rounded
with a smaller one are rounded again, from the original weight. A part of zeros alone has scale 1,
which stands for no magnitude and does not count (a row with that scale and any other part has a
value that is not zero; of a whole weight the caller knows). Nothing is rounded from already rounded
values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from quantflow.core import affine, float8, groups
from quantflow.core.qtensor import QTensor
from quantflow.errors import SchemeError


@dataclass(frozen=True, kw_only=True, eq=False)
class Joined:
    """A weight, and those of its values that have yet to be rounded with its scale.

    Attributes:
        weight: [O, I]; `requantize_` brings the values of `stale` up to date.
        stale: rows of columns that were rounded with another scale, (bool [O], columns), once for
            each part that holds columns.
    """

    weight: QTensor
    stale: tuple[tuple[Tensor, slice], ...]


def shared_scale(scales: Sequence[Tensor], *, zeros: Sequence[bool]) -> Tensor:
    """The scale that one process gives a weight, from those that cards gave their parts.

    Args:
        scales: [1, 1] each, symmetric, one per card.
        zeros: for each scale, whether it stands for zeros alone.
    """
    known = [scale for scale, empty in zip(scales, zeros, strict=True) if not empty]
    return torch.stack(known or [scales[0]]).amax(dim=0)


def join_rows(parts: Sequence[QTensor], *, scale: Tensor | None = None) -> Joined:
    """The weight whose rows are those of the parts, in order.

    Args:
        parts: [O_i, I] each.
        scale: [1, 1], see `shared_scale`; of per_tensor weights, and only of these.

    Raises:
        SchemeError: per_tensor parts without their scale, or with a zero_point.
    """
    granularity = parts[0].scheme.granularity
    if granularity == "per_block":
        raise SchemeError(
            f"parts of a {granularity} weight",
            "quantize it in one process, or choose scales per channel",
        )
    if granularity == "per_tensor":
        scale = _checked(parts, scale)
        # [O]
        stale = torch.cat([(part.scale != scale)[0].expand(len(part.qvalue)) for part in parts])
        return Joined(weight=_side_by_side(parts, 0, scale=scale), stale=((stale, slice(None)),))
    return Joined(
        weight=_side_by_side(parts, 0, scale=torch.cat([part.scale for part in parts])), stale=()
    )


def join_columns(parts: Sequence[QTensor], *, scale: Tensor | None = None) -> Joined:
    """The weight whose columns are those of the parts, in order.

    Args:
        parts: [O, I_i] each; per group the groups are whole in one part, per channel each row has a
            scale in every part.
        scale: [1, 1], see `shared_scale`; of per_tensor weights, and only of these.

    Raises:
        SchemeError: a scale of an asymmetric weight spans the parts: their zero points do not tell
            the range that it came from; or per_tensor parts without their scale.
    """
    scheme = parts[0].scheme
    if scheme.granularity == "per_group":
        return Joined(
            weight=_side_by_side(parts, 1, scale=torch.cat([part.scale for part in parts], dim=1)),
            stale=(),
        )
    if scheme.granularity == "per_tensor":
        scale = _checked(parts, scale)
        stale = [(part.scale != scale)[0].expand(len(part.qvalue)) for part in parts]
        return Joined(weight=_side_by_side(parts, 1, scale=scale), stale=_of_columns(parts, stale))
    if scheme.granularity != "per_channel" or not scheme.symmetric:
        raise SchemeError(
            f"columns of a {scheme.granularity} weight with symmetric={scheme.symmetric}, one "
            f"scale over {len(parts)} parts",
            "quantize it in one process, or choose groups that lie in one part each",
        )
    # [O, 1] each
    zeros = [
        (float8.widen(part.qvalue) == 0).all(dim=1, keepdim=True) & (part.scale == 1)
        for part in parts
    ]
    scales = [
        torch.where(empty, torch.zeros_like(part.scale), part.scale)
        for part, empty in zip(parts, zeros, strict=True)
    ]
    largest = torch.stack(scales).amax(dim=0)  # [O, 1]
    scale = torch.where(largest == 0, torch.ones_like(largest), largest)
    stale = [
        ((part.scale != scale) & ~empty)[:, 0] for part, empty in zip(parts, zeros, strict=True)
    ]
    return Joined(weight=_side_by_side(parts, 1, scale=scale), stale=_of_columns(parts, stale))


def requantize_(weight: QTensor, original: Tensor, *, rows: Tensor, columns: slice) -> None:
    """Round some rows of some columns again, with the scale that the weight has now.

    Args:
        weight: weight with scales per channel or per tensor, symmetric; its qvalue is changed.
        original: [O, I], before quantization.
        rows: mask of the rows, bool [O].
        columns: range of the columns.
    """
    if not rows.any():
        return
    scale = weight.scale.expand(len(weight.qvalue), 1)[rows]  # [n, 1]
    # [n, columns]; moved as bytes, since torch has no indexed assignment of float8
    codes = affine.quantize(original[rows, columns].float(), scale, None, weight.scheme)
    weight.qvalue.view(torch.uint8)[rows, columns] = codes.view(torch.uint8)


def zero_groups(original: Tensor, scale: Tensor) -> int:
    """The number of scales that stand for zeros only.

    Args:
        original: [O, I], before quantization.
        scale: [O, G].
    """
    split = groups.to_groups(original.float(), original.shape[1] // scale.shape[1])  # [O, G, g]
    return int((split.abs().amax(dim=-1) == 0).sum())


def _checked(parts: Sequence[QTensor], scale: Tensor | None) -> Tensor:
    """The scale that per_tensor parts are to have."""
    if scale is None or not parts[0].scheme.symmetric:
        raise SchemeError(
            f"parts of a per_tensor weight with symmetric={parts[0].scheme.symmetric}, "
            f"their scale is {'not given' if scale is None else 'given'}",
            "give the largest of the parts' scales; of asymmetric weights it does not tell the "
            "zero_point",
        )
    return scale


def _of_columns(
    parts: Sequence[QTensor], stale: Sequence[Tensor]
) -> tuple[tuple[Tensor, slice], ...]:
    """The rows of each part with the columns that it has in the whole."""
    ends = list(accumulate(part.qvalue.shape[1] for part in parts))
    return tuple(
        (rows, slice(begin, end)) for rows, begin, end in zip(stale, [0, *ends], ends, strict=False)
    )


def _side_by_side(parts: Sequence[QTensor], axis: int, *, scale: Tensor) -> QTensor:
    qvalue = torch.cat([part.qvalue.view(torch.uint8) for part in parts], dim=axis).view(
        parts[0].qvalue.dtype
    )
    zero_points = [part.zero_point for part in parts if part.zero_point is not None]
    zero_point = torch.cat(zero_points, dim=axis) if zero_points else None
    return QTensor(qvalue=qvalue, scale=scale, zero_point=zero_point, scheme=parts[0].scheme)

"""Offsets and multipliers of one linear (SignRound), with gradients through its rounded weight.

    scale = stored(range * multiplier),
    qvalue = clip(round(weight / scale + offset) + zero_point)

There is an offset for each weight, and for each scale a multiplier of its range, one for either end
where the range is not symmetric. Gradients pass round() and stored() as if these were not there.
Source: Cheng et al. 2023, arXiv:2309.05516, equations 2 to 5.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantflow.core import affine, groups
from quantflow.core.parallel import Workers
from quantflow.core.qtensor import QTensor, qvalue_dtype
from quantflow.errors import SchemeError

_LEAST = 2.0**-6  # smallest multiplier: a range of zero has no scale
# distance from its point, in steps, of a weight that is not rounded to the nearest
_EDGE = 0.499


@dataclass(frozen=True, kw_only=True)
class Learned:
    """The learned values of one linear.

    Attributes:
        start: weight before the first step, int with scales per channel or per group: its scales
            are the ranges.
        scale_dtype: dtype in which the layout stores scales.
        steps: [O, G, g] float32, the weight in steps of the start's scale; one that was not rounded
            to the nearest point is `_EDGE` from its own.
        offset: [O, G, g] float32.
        high, low: [O, G] float32, the multipliers of either end of the range; `low` is not read
            where the range is symmetric.
    """

    start: QTensor
    scale_dtype: torch.dtype
    steps: Tensor
    offset: Tensor
    high: Tensor
    low: Tensor

    @classmethod
    def of(
        cls, name: str, weight: Tensor, start: QTensor, *, scale_dtype: torch.dtype
    ) -> "Learned":
        """The learned values of a weight before the first step; they stand for `start`, bit by bit.

        A weight that was not rounded to its nearest point is moved to the edge of the values that
        round to the point it has.

        Args:
            name: weight's name, for messages.
            weight: [O, I], any float dtype, finite; not modified.
            start: an algorithm's result for it.
            scale_dtype: dtype in which the layout stores scales.

        Raises:
            SchemeError: the start is float8, or one scale stands for several rows.
        """
        scheme = start.scheme
        if scheme.kind != "int" or scheme.granularity not in ("per_channel", "per_group"):
            raise SchemeError(
                f"{name}: signround with {scheme.kind} {scheme.granularity}",
                "choose integers with scales per channel or group",
            )
        group_size = weight.shape[1] // start.scale.shape[1]
        steps = weight.new_empty(weight.shape, dtype=torch.float32)
        for rows in groups.row_units(weight):
            part = start.rows(rows)
            zero = (
                0
                if part.zero_point is None
                else groups.expand(part.zero_point.float(), weight.shape[1])
            )
            exact = weight[rows].float() / groups.expand(part.scale, weight.shape[1])
            point = part.qvalue.float() - zero  # [R, I]
            nearest = (exact.round() + zero).clamp_(scheme.qmin, scheme.qmax).sub_(zero) == point
            steps[rows] = torch.where(nearest, exact, exact.clamp(point - _EDGE, point + _EDGE))
        split = groups.to_groups(steps, group_size)  # [O, G, g]
        ones = torch.ones_like(start.scale)
        return cls(
            start=start,
            scale_dtype=scale_dtype,
            steps=split,
            offset=torch.zeros_like(split),
            high=ones,
            low=ones.clone(),
        )

    @property
    def units(self) -> list[slice]:
        """Rows that are processed at once."""
        return groups.row_units(self.start.qvalue)

    def rounded(self, rows: slice, *learned: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rounded rows through which gradients flow, all float32.

        Args:
            rows: rows of the weight.
            learned: their offset, high and low.

        Returns:
            qvalue: [R, G, g]; scale: [R, G]; zero_point: [R, G], None when symmetric.
        """
        offset, high, low = learned
        scheme = self.start.scheme
        start = self.start.rows(rows)
        share = high
        if start.zero_point is not None:
            # the range's ends, in steps
            above = scheme.qmax - start.zero_point.float()
            below = scheme.qmin - start.zero_point.float()
            share = (high * above - low * below) / (scheme.qmax - scheme.qmin)
        exact = start.scale * share
        scale = _with_gradient_of(affine.stored(exact.detach(), self.scale_dtype), exact)
        ratio = start.scale / scale
        scaled = self.steps[rows] * ratio[..., None] + offset
        qvalue = _with_gradient_of(scaled.detach().round(), scaled)
        zero_point = None
        if start.zero_point is not None:
            place = scheme.qmin - low * below * ratio
            zero_point = _with_gradient_of(
                place.detach().round().clamp_(scheme.qmin, scheme.qmax), place
            )
            qvalue = qvalue + zero_point[..., None]
        return qvalue.clamp(scheme.qmin, scheme.qmax), scale, zero_point

    def real(self, rows: slice, *learned: Tensor) -> Tensor:
        """Some rows as a loader will see them, [R, I] float32."""
        qvalue, scale, zero_point = self.rounded(rows, *learned)
        points = qvalue if zero_point is None else qvalue - zero_point[..., None]
        return (points * scale[..., None]).flatten(1)

    def learned(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Offset, high and low of some rows, as views."""
        return self.offset[rows], self.high[rows], self.low[rows]

    def step_(self, rows: slice, gradient: Tensor, *, rate: float) -> None:
        """Follow the signs of the gradients by the learned values of some rows.

        Args:
            rows: rows of the weight.
            gradient: gradient by the rounded weights, [R, I].
            rate: length of the step.
        """
        views = self.learned(rows)
        with torch.enable_grad():
            leaves = [view.detach().clone().requires_grad_() for view in views]
            slopes = torch.autograd.grad(
                self.real(rows, *leaves), leaves, gradient, allow_unused=True
            )
        for view, slope, (least, most) in zip(
            views, slopes, ((-0.5, 0.5), (_LEAST, 1.0), (_LEAST, 1.0)), strict=True
        ):
            if slope is not None:  # `low` of a symmetric range has no gradient
                view.sub_(slope.sign_(), alpha=rate).clamp_(least, most)

    def made(self, workers: Workers) -> QTensor:
        """The weight, rounded with its present offsets and multipliers."""
        scheme = self.start.scheme
        qvalue = torch.empty_like(self.start.qvalue)
        scale = torch.empty_like(self.start.scale)
        zero_point = self.start.zero_point
        zero_point = None if zero_point is None else torch.empty_like(zero_point)

        def unit(rows: slice) -> None:
            with torch.no_grad():
                rounded, scale[rows], place = self.rounded(rows, *self.learned(rows))
            qvalue[rows] = rounded.flatten(1).to(qvalue_dtype(scheme))
            if zero_point is not None and place is not None:
                zero_point[rows] = place.to(zero_point.dtype)

        workers.map(unit, self.units)
        return replace(self.start, qvalue=qvalue, scale=scale, zero_point=zero_point)


class _OtherGradient(torch.autograd.Function):
    """A value with the gradient of another tensor.

    A sum and a difference would not keep the value's own bits.
    """

    @staticmethod
    def forward(_ctx: Any, value: Tensor, _instead: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return None, gradients[0]


def _with_gradient_of(value: Tensor, instead: Tensor) -> Tensor:
    found: Tensor = _OtherGradient.apply(value, instead)  # type: ignore[no-untyped-call]
    return found

"""Scales and minima of llama.cpp's block types, fitted to the weight.

A group's scale, and its minimum where the type has them, are fitted by least squares to the
integers that a multiple of its range gives. The best fit over all multiples is taken. Uneven points
reach farther on one side of zero than on the other, so there the largest magnitude is tried at
either end. A block cannot hold just any scales: they are d times small integers. So each scale is
rounded to such an integer, and then each integer is moved by one, up or down, where that lowers the
loss. The largest integer of a block stays, since d follows from it. The loss of a group is
sum_j importance_j * (rounded_j - weight_j)^2. Source: the idea of `make_qkx3_quants` of
github.com/ggml-org/ggml, `ggml-quants.c`.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.core import affine, blocks, groups
from quantflow.core.block_types import BlockType
from quantflow.core.scheme import TensorScheme

_MULTIPLES = tuple(step / 32 for step in range(34, 19, -1))  # multiples of the range: 1.06 to 0.63
# of the three points of a type whose others are none, the middle one takes most of a group
_TERNARY_MULTIPLES = tuple(step / 32 for step in range(34, 3, -1))
# few entries have the largest magnitude in several places
_CODEBOOK_MULTIPLES = tuple(step / 32 for step in range(44, 16, -4))
_ROUNDS = 2  # rounds in which integers of scales move by one


@dataclass(frozen=True, kw_only=True)
class _Groups:
    """Rows of a weight in groups.

    Attributes:
        values: [O, G, g] float32.
        matters: [G, g] float32, positive, the importance of each input.
        scheme: scheme of the weight, with a `block`.
    """

    values: Tensor
    matters: Tensor
    scheme: TensorScheme

    def summed(self, *factors: Tensor) -> Tensor:
        """The importance-weighted sum over each group of a product, [O, G]."""
        product = self.matters
        for factor in factors:
            product = product * factor
        return product.sum(dim=-1)

    def points(self, scale: Tensor, minimum: Tensor) -> Tensor:
        """The nearest qvalues, [O, G, g] float32, for scale and minimum [O, G]."""
        scaled = (self.values + minimum[..., None]).div_(scale[..., None])
        return affine.round_(scaled, None, self.scheme, importance=self.matters)

    def loss(self, scale: Tensor, minimum: Tensor) -> Tensor:
        """The loss of each group, [O, G]."""
        error = (
            self.points(scale, minimum)
            .mul_(scale[..., None])
            .sub_(minimum[..., None])
            .sub_(self.values)
        )
        return self.summed(error.square_())


def positive(importance: Tensor) -> Tensor:
    """Importances [I], at least zero, as positive float32 numbers of at most 1."""
    matters = importance.float()
    matters = matters + matters.mean() * 1e-6 + torch.finfo(torch.float32).tiny
    return matters / matters.amax()


def searched(
    weight: Tensor, importance: Tensor, *, scheme: TensorScheme
) -> tuple[Tensor, Tensor | None]:
    """The scale and the zero point of every group of some rows, [O, G] float32 each.

    The zero point is None for types without minima.

    Args:
        weight: [O, I] float32, finite.
        importance: [I], at least zero.
        scheme: its `block_type` has minima, scales that are multiples of a d, or points of its own.
    """
    kind = scheme.block
    assert kind is not None
    split = groups.to_groups(weight, kind.group_size)  # [O, G, g]
    matters = positive(importance).view(split.shape[1:])
    cut = _Groups(values=split, matters=matters, scheme=scheme)
    scale, minimum = _fitted(cut, kind)
    scale = blocks.stored(scale, kind)
    minimum = blocks.stored_minima(minimum, kind) if kind.minima else minimum
    if kind.scale_bits is not None:
        for _ in range(_ROUNDS):
            scale, minimum = _moved(cut, scale, minimum, kind)
    return scale, minimum / scale if kind.minima else None


def _fitted(cut: _Groups, kind: BlockType) -> tuple[Tensor, Tensor]:
    """The scale and the minimum of each group whose integers lose least, over all multiples."""
    scheme, (low, high) = cut.scheme, (cut.values.amin(dim=-1), cut.values.amax(dim=-1))
    least = torch.full_like(low, torch.inf)
    best_scale, best_minimum = torch.zeros_like(low), torch.zeros_like(low)
    whole = cut.matters.sum(dim=-1).expand_as(low)
    first = cut.summed(cut.values)
    square = cut.summed(cut.values, cut.values)
    longest = torch.where(-low >= high, low, high)
    ends = (scheme.qmin,) if scheme.qmin + scheme.qmax in (-1, 0) else (scheme.qmin, scheme.qmax)
    multiples = _TERNARY_MULTIPLES if len(kind.points) == 3 else _MULTIPLES
    if kind.codebook is not None:  # signs are those of the entries, and scales positive
        multiples, longest, ends = _CODEBOOK_MULTIPLES, longest.abs(), (scheme.qmax,)
    free = kind.scale_bits is None  # a minimum that is a float16 may be negative
    for multiple, end in itertools.product(multiples, ends):
        if kind.minima:
            floor = low if free else low.clamp_max(0)
            step = (high - floor) * (multiple / scheme.qmax)
            minimum = -floor * multiple
        else:
            step = longest * (multiple / end)
            minimum = torch.zeros_like(low)
        points = cut.points(torch.where(step == 0, 1.0, step), minimum)
        mixed, of_points = cut.summed(points, cut.values), cut.summed(points, points)
        scale, minimum = _least_squares(mixed, of_points, None, None, None)
        if kind.minima:
            sums = cut.summed(points)
            with_minimum = _least_squares(mixed, of_points, sums, first, whole)
            fits = (with_minimum[0] > 0) & (with_minimum[1] >= (-torch.inf if free else 0))
            scale = torch.where(fits, with_minimum[0], scale)
            minimum = torch.where(fits, with_minimum[1], minimum)
        loss = (
            square
            - 2 * (scale * mixed - minimum * first)
            + scale.square() * of_points
            + minimum.square() * whole
        )
        if kind.minima:
            loss = loss - 2 * scale * minimum * sums
        better = (loss < least) & (scale != 0)
        least = torch.where(better, loss, least)
        best_scale = torch.where(better, scale, best_scale)
        best_minimum = torch.where(better, minimum, best_minimum)
    return best_scale, best_minimum


def _least_squares(
    mixed: Tensor,
    of_points: Tensor,
    sums: Tensor | None,
    first: Tensor | None,
    whole: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The scale and the minimum with the best fit of scale * q - minimum to x, [O, G] each.

    q are integers, x the group's values; sums run over a group, weighted by importance. Where the
    sums determine no scale, it is 0.

    Args:
        mixed: [O, G], weighted sum of q x.
        of_points: [O, G], weighted sum of q q.
        sums: [O, G], weighted sum of q; None fits a minimum of 0.
        first: [O, G], weighted sum of x.
        whole: [O, G], sum of the importance.
    """
    if sums is None or first is None or whole is None:
        return torch.where(of_points > 0, mixed / of_points, 0.0), torch.zeros_like(mixed)
    spread = whole * of_points - sums.square()
    scale = torch.where(
        spread > 1e-6 * whole * of_points, (whole * mixed - sums * first) / spread, 0.0
    )
    return scale, (scale * sums - first) / whole


def _moved(cut: _Groups, scale: Tensor, minimum: Tensor, kind: BlockType) -> tuple[Tensor, Tensor]:
    """Scales and minima after each has moved by at most one integer, where that lowers the loss."""
    lowest, highest = kind.steps
    d, steps = blocks.steps_of(scale, kind)
    fixed = (steps == (lowest if kind.signed else highest)).flatten(1)  # d follows from these
    unit = d[..., None].expand_as(steps).flatten(1)
    steps = steps.flatten(1)
    minima = torch.zeros_like(steps)
    unit_of_minima = torch.zeros_like(steps)
    minimum_fixed = torch.ones_like(fixed)
    if kind.minima:
        of_minima, integers = blocks.minimum_steps_of(minimum, kind)
        unit_of_minima, minima = (
            of_minima[..., None].expand_as(integers).flatten(1),
            integers.flatten(1),
        )
        minimum_fixed = (minima == highest) | (unit_of_minima == 0)
    best_steps, best_minima, least = steps, minima, cut.loss(scale, minimum)
    distance = 1 if kind.divisor is None else 2  # of two integers
    for up in (-1, 0, 1):
        for more in (-1, 0, 1) if kind.minima else (0,):
            if up == more == 0:
                continue
            new = steps + up * distance
            new_minima = minima + more
            allowed = (
                (new != 0) & (new >= lowest + kind.signed) & (new <= highest) & ~(fixed & (up != 0))
            )
            if not kind.signed:
                allowed &= new > 0
            allowed &= (new_minima >= 0) & (new_minima <= highest) & ~(minimum_fixed & (more != 0))
            new = torch.where(allowed, new, steps)
            new_minima = torch.where(allowed, new_minima, minima)
            loss = cut.loss(new * unit, new_minima * unit_of_minima)
            better = loss < least
            least = torch.where(better, loss, least)
            best_steps = torch.where(better, new, best_steps)
            best_minima = torch.where(better, new_minima, best_minima)
    return best_steps * unit, best_minima * unit_of_minima

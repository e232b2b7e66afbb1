"""The grid that a weight is rounded to: scales and zero points, from the original weight's range.

The range is the weight's own, or, where the importance of each input is known, the multiple of it
that loses least:

- Integers: a clip, a range cut a little short, costs the largest elements something and gives all
  others a finer step.
- Float8: its points are as dense, relative to their size, at any scale but in the last binade, so a
  clip gives no finer step. Wider ranges are tried, up to twice: they move the points between those
  of a binade, so that the elements that count lie near them, and clip nothing.
- Float4: it has so few points that either may help: from two thirds of the range to the 3/2 of it
  that puts its end on 4 instead of 6.
- Scales that are powers of two: the next power on either side is tried.

Symmetric integers of b bits go from -2^(b-1) to 2^(b-1) - 1: the negative side has a point more,
which at 2 bits is two points instead of one. Where the range is searched, the side is chosen too: a
negative scale puts a group's largest magnitude on the longer side where it belongs to a positive
weight. Sources: `quant_tensor_sym` of AutoRound, `auto_round/data_type/int.py`; Q4_0 of llama.cpp.

Linears that share an input share their per-tensor scale, so that an engine may fuse them (q/k/v,
gate/up).
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from quantflow.core import affine, device_scales, groups
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.scale_rules import Rule
from quantflow.core.scheme import Kind, LinearScheme, TensorScheme
from quantflow.errors import InputError
from quantflow.numerics import block_grids, compiled_rounding

# Multiples of the range that a search tries.
_MULTIPLES: Mapping[Kind, tuple[float, ...]] = MappingProxyType(
    {
        "int": tuple(step / 32 for step in range(33, 21, -1)),  # 1.03 to 0.69
        "float": tuple(step / 32 for step in range(33, 65)),  # 1.03 to 2: a binade
    }
)
_FLOAT4 = tuple(step / 32 for step in range(49, 20, -1))  # 1.53 to 0.66
_BINADES = (0.5, 2.0)


def _multiples(scheme: TensorScheme) -> tuple[float, ...]:
    if scheme.scale_format == "e8m0":
        return _BINADES
    return _FLOAT4 if scheme.kind == "float" and scheme.num_bits < 8 else _MULTIPLES[scheme.kind]


@dataclass(frozen=True, kw_only=True)
class TensorRange:
    """The part of some rows of a weight in the one scale that they share with others.

    Attributes:
        low, high: the smallest and the largest value, [] float32 each; -amax and amax when
            symmetric.
        errors: where the scheme's rule searches, the squared error under each candidate, [C]
            float64.
    """

    low: Tensor
    high: Tensor
    errors: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The scale and zero point of one weight, as `QTensor` holds them.

    Attributes:
        scale: [O or 1, G] float32, after rounding to the dtype that its layout stores; negative
            only where `either_sign`.
        zero_point: [O or 1, G] int8, or float32 where the scheme has minima; None when symmetric.
        zero_groups: number of groups of zeros only; their scales are 1, or 1 after rounding with
            the global scale.
        global_scale: [1] float32, one for all weights of a group, so that an engine may fuse them;
            None where the scheme has none.
    """

    scale: Tensor
    zero_point: Tensor | None
    zero_groups: int
    global_scale: Tensor | None = None

    def rows(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point of some rows of the weight, [len(rows) or 1, G] each."""
        if self.scale.shape[0] == 1:
            return self.scale, self.zero_point
        return self.scale[rows], None if self.zero_point is None else self.zero_point[rows]


def either_sign(scheme: LinearScheme) -> bool:
    """Whether a search may choose negative scales for a scheme's weights.

    8 bits keep positive scales, since their longer side is longer by a 128th only. So do schemes
    that quantize inputs too: an engine's integer kernel may read scales as unsigned
    (docs/backends.md names them).
    """
    weights = scheme.weights
    narrow = weights.kind == "int" and weights.code_bits < 8 and weights.symmetric
    return narrow and weights.granularity in ("per_channel", "per_group") and scheme.input is None


def weight_grids(
    weights: Mapping[str, Tensor],
    scheme: TensorScheme,
    *,
    scale_dtype: torch.dtype,
    importance: Tensor | None = None,
    either_sign: bool = False,
    workers: Workers = SEQUENTIAL,
) -> dict[str, Grid]:
    """The grid of every weight of a group.

    Args:
        weights: name -> [O, I], any float dtype; not modified. `groups.row_units` of them are
            converted at a time.
        scheme: per_tensor, per_channel, per_group or per_block.
        scale_dtype: dtype in which the layout stores scales.
        importance: [I], at least zero. Each scale of a scheme that is not per_tensor then comes
            from the multiple of its range that makes sum_j importance_j * (rounded_j - weight_j)^2
            smallest, over all rows of a block. None takes the whole range.
        either_sign: result of `either_sign` for the scheme; not read without importance.
        workers: run units of rows; how many there are changes nothing but the time.

    Raises:
        InputError: a weight is empty, not two-dimensional, or holds NaN or Inf.
        SchemeError: group_size does not divide in_features.
    """
    for name, weight in weights.items():
        if weight.ndim != 2 or weight.numel() == 0:
            raise InputError(
                f"{name}: weight is {list(weight.shape)}, [O, I] is needed",
                "list the layer under `ignore`",
            )
        groups.group_size_for(scheme, weight.shape[1], name=name)
    global_scale = _global_scale(weights, scheme, workers)
    units = [
        (name, rows)
        for name, weight in weights.items()
        for rows in groups.row_units(weight, multiple=scheme.block_rows)
    ]

    def bounds(unit: tuple[str, slice]) -> TensorRange:
        return bounds_of(unit[0], weights[unit[0]][unit[1]], scheme=scheme)

    def grid(unit: tuple[str, slice]) -> Grid:
        name, rows = unit
        weight = weights[name][rows]
        return _unit_grid(
            name,
            weight,
            scheme=scheme,
            scale_dtype=scale_dtype,
            importance=importance,
            either_sign=either_sign,
            global_scale=global_scale,
        )

    if scheme.granularity == "per_tensor" and units:
        ranges = workers.map(bounds, units)
        # one Grid for each weight, so that none shares memory with another
        return {
            name: shared_grid(ranges, scheme=scheme, scale_dtype=scale_dtype) for name in weights
        }
    parts: dict[str, list[Grid]] = {name: [] for name in weights}
    for (name, _), part in zip(units, workers.map(grid, units), strict=True):
        parts[name].append(part)
    return {name: _join_grids(of_rows) for name, of_rows in parts.items()}


def _global_scale(
    weights: Mapping[str, Tensor], scheme: TensorScheme, workers: Workers
) -> Tensor | None:
    """The global scale that all weights share; None where the scheme has none."""
    if scheme.scale_format != "e4m3" or not weights:
        return None
    units = [(name, rows) for name, weight in weights.items() for rows in groups.row_units(weight)]

    def amax(unit: tuple[str, slice]) -> Tensor:
        return bounds_of(unit[0], weights[unit[0]][unit[1]], scheme=scheme).high

    return affine.global_scale_from_amax(torch.stack(workers.map(amax, units)).amax(), scheme)


def bounds_of(name: str, weight: Tensor, *, scheme: TensorScheme) -> TensorRange:
    """The range of some rows of a weight, with the errors that a rule's search needs.

    Args:
        name: weight's name, for messages.
        weight: [O, I], any float dtype.
        scheme: per_tensor, or with a global scale.

    Raises:
        InputError: the weight holds NaN or Inf.
    """
    low, high = _range(name, weight, scheme=scheme)
    rule = scheme.scale_rule
    errors = None
    if rule is not None and rule.value == "OPT":
        errors = device_scales.candidate_errors(
            weight, rule, target=device_scales.target_of(scheme.float8)
        )
    return TensorRange(low=low.min(), high=high.max(), errors=errors)


def shared_grid(
    bounds: Sequence[TensorRange], *, scheme: TensorScheme, scale_dtype: torch.dtype
) -> Grid:
    """The one grid of all rows whose ranges these are, scale [1, 1].

    Args:
        bounds: results of `bounds_of`, at least one. Their order matters only to `errors`, which
            are added up in it.
        scheme: per_tensor.
        scale_dtype: dtype in which the layout stores scales.
    """
    low = torch.stack([part.low for part in bounds]).min().reshape(1, 1)
    high = torch.stack([part.high for part in bounds]).max().reshape(1, 1)
    errors = [part.errors for part in bounds if part.errors is not None]
    if not errors or scheme.scale_rule is None:
        return _grid(low, high, scheme=scheme, scale_dtype=scale_dtype)
    total = functools.reduce(torch.add, errors)  # [C]
    scale = device_scales.scale_from_errors(
        total, scheme.scale_rule, target=device_scales.target_of(scheme.float8)
    )
    return Grid(
        scale=affine.stored_scale(scale.reshape(1, 1), scheme, scale_dtype),
        zero_point=None,
        zero_groups=int((high == 0).sum()),
    )


def _join_grids(parts: Sequence[Grid]) -> Grid:
    """The grid of a weight from those of its units of rows."""
    zero_points = [part.zero_point for part in parts if part.zero_point is not None]
    return Grid(
        scale=torch.cat([part.scale for part in parts]),
        zero_point=torch.cat(zero_points) if zero_points else None,
        zero_groups=sum(part.zero_groups for part in parts),
        global_scale=parts[0].global_scale,
    )


def _range(name: str, weight: Tensor, *, scheme: TensorScheme) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of each group, [O, G] float32 each.

    They are -amax and amax when symmetric.
    """
    # [O, G, g]
    split = groups.to_groups(weight.float(), groups.group_size_for(scheme, weight.shape[1]))
    # amax and amin hand NaN on; torch.aminmax along a dimension is twenty times slower than both.
    if scheme.symmetric:
        high = split.abs().amax(dim=-1)
        low = -high
    else:
        low, high = split.amin(dim=-1), split.amax(dim=-1)
    if not (torch.isfinite(low).all() and torch.isfinite(high).all()):
        raise InputError(
            f"{name}: weight holds NaN or Inf", "the checkpoint is damaged; download it again"
        )
    return low, high


def _unit_grid(
    name: str,
    weight: Tensor,
    *,
    scheme: TensorScheme,
    scale_dtype: torch.dtype,
    importance: Tensor | None,
    either_sign: bool,
    global_scale: Tensor | None,
) -> Grid:
    """The grid of some rows of a weight whose scales are each row's own."""
    weight = weight.float()
    bounds = _range(name, weight, scheme=scheme)
    if scheme.scale_rule is not None:  # the rule sets the scale, whatever the inputs are
        return _ruled_grid(
            weight, bounds[1], scheme.scale_rule, scheme=scheme, scale_dtype=scale_dtype
        )
    if scheme.granularity == "per_block":
        blocks = groups.spans(len(weight), scheme.block_rows)
        # [ceil(O / block_rows), G]
        amax = torch.stack([bounds[1][rows].amax(dim=0) for rows in blocks])
        grid = _grid(-amax, amax, scheme=scheme, scale_dtype=scale_dtype)
        grid = replace(grid, scale=groups.expand_rows(grid.scale, scheme.block_rows, len(weight)))
        amax = groups.expand_rows(amax, scheme.block_rows, len(weight))
        bounds = (-amax, amax)
    else:
        grid = _grid(*bounds, scheme=scheme, scale_dtype=scale_dtype, global_scale=global_scale)
    if importance is None:
        return grid
    if scheme.block is not None and scheme.block.dependent:
        scale, zero_point = block_grids.searched(weight, importance, scheme=scheme)
        return replace(grid, scale=scale, zero_point=zero_point)
    return _search(
        weight,
        bounds,
        grid,
        importance,
        scheme=scheme,
        scale_dtype=scale_dtype,
        either_sign=either_sign,
    )


def _ruled_grid(
    weight: Tensor, amax: Tensor, rule: Rule, *, scheme: TensorScheme, scale_dtype: torch.dtype
) -> Grid:
    """The grid of some rows of a weight [O, I] whose scales per channel follow a rule.

    amax is [O, 1].
    """
    target = device_scales.target_of(scheme.float8)
    scale = device_scales.weight_scale(
        weight, rule, target=target, arithmetic=scheme.scale_arithmetic
    ).reshape(-1, 1)
    return Grid(
        scale=affine.stored_scale(scale, scheme, scale_dtype),
        zero_point=None,
        zero_groups=int((amax == 0).sum()),
    )


def _grid(
    low: Tensor,
    high: Tensor,
    *,
    scheme: TensorScheme,
    scale_dtype: torch.dtype,
    global_scale: Tensor | None = None,
) -> Grid:
    amax = torch.maximum(high, -low)
    zero_groups = int((amax == 0).sum())
    if scheme.symmetric:
        scale = affine.stored_scale(
            affine.scale_from_amax(amax, scheme), scheme, scale_dtype, global_scale=global_scale
        )
        return Grid(
            scale=scale, zero_point=None, zero_groups=zero_groups, global_scale=global_scale
        )
    scale, _ = affine.scale_and_zero_point_from_range(low, high, scheme)
    scale = affine.stored_scale(scale, scheme, scale_dtype)
    # The zero point follows the scale that a loader will see, after its rounding.
    zero_point = affine.zero_point_for(low.clamp_max(0), scale, scheme)
    return Grid(scale=scale, zero_point=zero_point, zero_groups=zero_groups)


def _search(
    weight: Tensor,
    bounds: tuple[Tensor, Tensor],
    whole: Grid,
    importance: Tensor,
    *,
    scheme: TensorScheme,
    scale_dtype: torch.dtype,
    either_sign: bool,
) -> Grid:
    """The best grid over `_multiples` of the range, scale by scale.

    Of equal losses the whole range wins, then the first multiple. The whole range has a positive
    scale; the multiples have the sign that puts the largest magnitude on the longer side.
    """
    split = groups.to_groups(weight, weight.shape[1] // whole.scale.shape[1])  # [O, G, g]
    matters = importance.float().reshape(split.shape[1:])  # [G, g]
    scratch = torch.empty_like(split)
    # A positive scale puts negative values on the longer side. That is right where the smallest
    # value is -amax, and in groups of zeros.
    # [O, G]
    sign = torch.where(split.amin(dim=-1) == bounds[0], 1.0, -1.0) if either_sign else None
    best, least = whole, _loss(split, whole, matters, scratch=scratch, scheme=scheme)
    for multiple in _multiples(scheme):
        ends = (bounds[0] * multiple, bounds[1] * multiple)
        grid = _grid(*ends, scheme=scheme, scale_dtype=scale_dtype, global_scale=whole.global_scale)
        if sign is not None:
            grid = replace(grid, scale=grid.scale * sign)
        loss = _loss(split, grid, matters, scratch=scratch, scheme=scheme)
        better = loss < least
        least = torch.where(better, loss, least)
        zero_point = best.zero_point
        if zero_point is not None and grid.zero_point is not None:
            zero_point = torch.where(better, grid.zero_point, zero_point)
        best = replace(
            best, scale=torch.where(better, grid.scale, best.scale), zero_point=zero_point
        )
    return best


def _losses(
    split: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    matters: Tensor,
    *,
    scheme: TensorScheme,
    out: Tensor,
) -> Tensor:
    """`compiled_rounding.losses` by torch's operators, for any scheme and memory."""
    scale = scale[..., None]
    zero_point = None if zero_point is None else zero_point[..., None]
    error = affine.round_(torch.div(split, scale, out=out), zero_point, scheme)
    if zero_point is not None:
        error -= zero_point
    return error.mul_(scale).sub_(split).square_().mul_(matters)


def _loss(
    split: Tensor, grid: Grid, matters: Tensor, *, scratch: Tensor, scheme: TensorScheme
) -> Tensor:
    """The importance-weighted squared error of each group, [O, G]; of a block, in each of its rows.

    split and scratch are [O, G, g].
    """
    zero_point = None if grid.zero_point is None else grid.zero_point.float()
    rounding_losses = (
        compiled_rounding.losses
        if split.is_contiguous() and compiled_rounding.takes(scheme, split.device)
        else _losses
    )
    loss = rounding_losses(split, grid.scale, zero_point, matters, scheme=scheme, out=scratch).sum(
        dim=-1
    )
    if scheme.block_rows == 1:
        return loss
    blocks = torch.stack(
        [loss[rows].sum(dim=0) for rows in groups.spans(len(loss), scheme.block_rows)]
    )
    return groups.expand_rows(blocks, scheme.block_rows, len(loss))

"""Half-quadratic quantization (HQQ): scales for heavy-tailed weights, from the weights alone.

Minimised, for every scale by itself, is the sum of |error|^p with error = weight - scale * (qvalue
- zero_point) and p = 3/4. A p below 1 prefers many small errors and a few large ones, as
heavy-tailed weights have them, to errors that are all alike. The sum is split in two by a second
set of errors e,

    sum |e|^p + beta/2 * (e - error)^2,

and minimised over one unknown after the other, while beta, the price of a difference between e and
the error, grows:

    e          the error, made smaller by |error|^(p-1) / beta, and zero where that is more
               than the error
    scale      least squares: (weight - e) . d / d . d    with d = qvalue - zero_point
    qvalue     rounding to nearest

Errors count in steps here, so that beta means the same for all weights. Every scale is rounded to
the layout's dtype before it is judged. The scale of round to nearest is judged first, and the best
is kept: no scale has a larger sum than rtn's.

Two things differ from the paper. It fits a float zero point at a fixed scale. Layouts here store
integer zero points or none, and least squares moves a zero point by less than half of one, which
rounds to nothing; so the scale is fitted instead. And its p is 0.7: with 3/4 all powers are square
roots, which are the same bits wherever an element lies, as those of `pow` are not.

The descent begins at the multiple of the range with the smallest sum of squares. The paper begins
at the whole range, where it ends 5 % higher (rows of examples/tiny-llama, 4 bits, symmetric). The
smallest sum of all lies at much smaller scales: it is another 9 % lower, but the sum of squares,
which a layer's output follows, is 80 % higher. Source: Badri and Shaji 2023, "Half-Quadratic
Quantization of Large Machine Learning Models".
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.core import affine, groups
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.result import GroupResult
from quantflow.core.scheme import LinearScheme, TensorScheme
from quantflow.core.support import BLOCK_SCALES, SHARED_SCALE, Supports, integers_only
from quantflow.errors import SchemeError
from quantflow.numerics.grid import weight_grids
from quantflow.numerics.rounding import rounded

NAME: str = "hqq"
NEEDS: tuple[str, ...] = ()
BY_ROW: bool = True
VERSION: int = 1
TO_NEAREST: bool = False
ON_DEVICE: bool = True
SUPPORTS = Supports(
    float8=integers_only(NAME),
    float4=integers_only(NAME, "float4"),
    shared_scale=SHARED_SCALE,
    block_scales=BLOCK_SCALES,
)

# Constants, since they are part of the result. With beta = 1 every e below a step is zero, which is
# least squares for all weights alike; with 6.7, at the end, errors above 0.22 of a step count in
# part.
_ITERATIONS = 20
_BETA = 1.0
_GROWTH = 1.1
# recorded sums are multiples of it, so that adding them up is exact, in any order
_UNIT_OF_SUMS = 2.0**-16


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """Gains on some rows; every figure adds up over rows.

    Attributes:
        changed: number of scales that are not round-to-nearest's.
        iterations: sum of the iterations in which the scales were found.
        before: sum of |error / rtn's scale|^p with rtn's scales.
        after: sum of |error / rtn's scale|^p with the fitted scales.
    """

    changed: int
    iterations: int
    before: float
    after: float


def working_bytes(features: int, rows: int, *, workers: int = 1, in_place: bool = False) -> int:
    """The most memory that `quantize_group` takes, in bytes: a unit for each worker.

    Weights and results are not counted. A unit of N elements takes six float32 of each (its
    weights, d, errors, their sizes, roots and powers), and ten of each scale, at most one per 32
    columns.

    Args:
        features: in_features of the group.
        rows: not read; the signature is every algorithm's.
        workers: number of workers.
        in_place: not read.
    """
    del rows, in_place
    return workers * (
        groups.unit_bytes(features) + 10 * 4 * max(groups.UNIT_ELEMENTS, features) // 32
    )


def quantize_group(
    weights: Mapping[str, Tensor],
    scheme: LinearScheme,
    *,
    statistics: Mapping[str, Tensor],
    scale_dtype: torch.dtype,
    workers: Workers = SEQUENTIAL,
    in_place: bool = False,
) -> dict[str, GroupResult]:
    """Round every weight to the nearest point of a grid whose scales are fitted.

    Args:
        weights: name -> [O, I], any float dtype, the linears that share an input; not modified.
        scheme: its `weights` are int, per channel or per group.
        statistics: not read.
        scale_dtype: dtype in which the layout stores scales.
        workers: run units of rows; how many there are changes nothing but the time.
        in_place: not read.

    Returns:
        name -> the quantized weight; decisions: `zero_groups` (scales that stand for zeros only),
        `changed_groups` (scales that are not rtn's), `iterations` (those in which these were found,
        from 1, added up), `objective_rtn` and `objective` (the sum of |error / rtn's
        scale|^(3/4), with rtn's scales and with these). All of them add up over rows, exactly.

    Raises:
        InputError: a weight is empty or holds NaN or Inf.
        SchemeError: the scheme's weights are float8 or share one scale, or group_size does not
            divide in_features.
    """
    del statistics, in_place  # the signature is every algorithm's
    if scheme.weights.kind != "int":
        raise SchemeError(
            f"scheme {scheme.name}: hqq with kind={scheme.weights.kind!r}", "use rtn for float8"
        )
    if scheme.weights.granularity == "per_tensor":
        raise SchemeError(
            f"scheme {scheme.name}: hqq with one scale per tensor",
            "use rtn, or a scale per channel or group",
        )
    if not weights:
        return {}
    plain = weight_grids(weights, scheme.weights, scale_dtype=scale_dtype, workers=workers)
    first = next(iter(weights.values()))
    alike = torch.ones(first.shape[-1], device=first.device)
    grids = weight_grids(
        weights, scheme.weights, scale_dtype=scale_dtype, importance=alike, workers=workers
    )

    def fit(unit: tuple[str, slice]) -> _Fit:
        name, rows = unit
        # [O, G, g]
        split = groups.to_groups(
            weights[name][rows].float(), weights[name].shape[1] // grids[name].scale.shape[1]
        )
        grid, first = grids[name].rows(rows), plain[name].rows(rows)
        return _fit_(*grid, split, first, scheme=scheme.weights, scale_dtype=scale_dtype)

    units = [(name, rows) for name, weight in weights.items() for rows in groups.row_units(weight)]
    fits: dict[str, list[_Fit]] = {name: [] for name in weights}
    for (name, _), fit_of_unit in zip(units, workers.map(fit, units), strict=True):
        fits[name].append(fit_of_unit)
    return {
        name: GroupResult(
            weight=weight,
            decisions={
                "zero_groups": grids[name].zero_groups,
                "changed_groups": sum(fit_of_unit.changed for fit_of_unit in fits[name]),
                "iterations": sum(fit_of_unit.iterations for fit_of_unit in fits[name]),
                "objective_rtn": sum(fit_of_unit.before for fit_of_unit in fits[name]),
                "objective": sum(fit_of_unit.after for fit_of_unit in fits[name]),
            },
        )
        for name, weight in rounded(weights, grids, scheme.weights, workers=workers).items()
    }


def _fit_(
    scale: Tensor,
    zero_point: Tensor | None,
    split: Tensor,
    first: tuple[Tensor, Tensor | None],
    *,
    scheme: TensorScheme,
    scale_dtype: torch.dtype,
) -> _Fit:
    """Overwrite the grid of some rows with the best one of the descent.

    Args:
        scale: [O, G], start of the descent, overwritten.
        zero_point: [O, G], overwritten, or None.
        split: [O, G, g], the weights.
        first: scale and zero point of round to nearest.
        scheme: int.
        scale_dtype: dtype in which the layout stores scales.
    """
    point, error, size, root, power = (torch.empty_like(split) for _ in range(5))

    def judge(now: Tensor, zero_point: Tensor | None) -> Tensor:
        """Fill in d, the errors in steps, their sizes and fourth roots; return the sum, [O, G]."""
        torch.div(split, now[..., None], out=error)
        zero = None if zero_point is None else zero_point[..., None].float()
        affine.round_(point.copy_(error), zero, scheme)
        if zero is not None:
            point.sub_(zero)
        error.sub_(point)
        torch.sqrt(torch.abs(error, out=size), out=root).sqrt_()
        return torch.mul(root, root, out=power).mul_(root).sum(dim=-1) * _three_quarters(
            now / first[0]
        )

    before = least = judge(*first)
    now = scale.clone()
    begun = zero_point
    best = first[0]
    beta = _BETA
    iterations = torch.zeros(scale.shape, dtype=torch.int64, device=scale.device)
    for iteration in range(1, _ITERATIONS + 1):
        loss = judge(now, begun)
        better = loss < least
        least, best = torch.where(better, loss, least), torch.where(better, now, best)
        iterations[better] = iteration
        # The error less e: all of a small error, |error|^(p-1) / beta of a larger one.
        left = torch.minimum(size, root.reciprocal_().div_(beta), out=size).copysign_(error)
        moved = torch.mul(point, left, out=power).sum(dim=-1)
        # 0 where all points are 0, and then `moved` is 0 too
        length = torch.mul(point, point, out=power).sum(dim=-1).clamp_min_(1)
        now = affine.stored(now * (1 + moved / length), scale_dtype)
        beta *= _GROWTH
    changed = iterations > 0
    scale.copy_(best)
    if zero_point is not None and first[1] is not None:
        zero_point.copy_(torch.where(changed, zero_point, first[1]))
    return _Fit(
        changed=int(changed.sum()),
        iterations=int(iterations.sum()),
        before=_total(before),
        after=_total(least),
    )


def _three_quarters(x: Tensor) -> Tensor:
    """The power x^(3/4)."""
    root = x.sqrt()
    return root * root.sqrt()


def _total(losses: Tensor) -> float:
    """The sum, the same bits for any cut of the rows into units."""
    return float((losses.double() / _UNIT_OF_SUMS).round_().sum()) * _UNIT_OF_SUMS

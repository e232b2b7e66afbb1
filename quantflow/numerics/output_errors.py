"""Output error of a rounded weight over the calibration text, beside that of round to nearest.

    error = sqrt(tr(E H E^T) / tr(W H W^T)) = ||X E^T|| / ||X W^T||,    E = W - Q,    H = X^T X

Each trace is a product with H. Over all rows, those of round to nearest and of the original would
take a good part of GPTQ's own time. So errors are those of `ROWS` rows of a weight, evenly spaced
and the same for all three; for these rows they are exact. Whether *anything* differs from round to
nearest is checked over all rows, up to the first that does.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.core import groups
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.qtensor import QTensor
from quantflow.core.result import JSON
from quantflow.numerics.feedback import Feedback
from quantflow.numerics.grid import Grid, weight_grids
from quantflow.numerics.rounding import rounded
from quantflow.numerics.sensitivity import sampled_rows

ROWS = 32  # rows of a weight whose errors are taken; part of the result
_BLOCK = 256  # columns of H in one product; part of the result too, because it orders the sums


@dataclass(frozen=True, kw_only=True)
class SecondMoment:
    """A symmetric sum of x^T x, of which half is enough; its scale does not matter.

    Attributes:
        upper: [I, I] float32, the sum above the diagonal; the rest is not read.
        diagonal: [I].
        order: [I] int64, the input of each column; None is the order of the inputs.
    """

    upper: Tensor
    diagonal: Tensor
    order: Tensor | None = None

    def powers(self, rows: Tensor) -> Tensor:
        """Value x H x^T of every row x, at least 0, [R] float64.

        rows is [R, I] float32.
        """
        ordered = rows if self.order is None else rows[:, self.order]
        total = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        for span in groups.spans(ordered.shape[1], _BLOCK):
            part = ordered[:, span]
            rest = slice(span.stop, None)
            # the products of pairs of columns, each pair once
            beyond = part @ self.upper[span, span].triu(1).T
            beyond += ordered[:, rest] @ self.upper[span, rest].T
            own = part * self.diagonal[span].float()
            total += (part.double() * (2 * beyond.double() + own.double())).sum(dim=1)
        return total.clamp_min_(0)


def moment_of(feedback: Feedback) -> SecondMoment:
    """The matrix that `feedback_of` factored, without its damping; it is kept above the factor."""
    return SecondMoment(upper=feedback.lower, diagonal=feedback.diagonal, order=feedback.order)


def working_bytes(features: int) -> int:
    """The most memory that comparing one linear takes, in bytes.

    It is that of a unit of rows, or nine float32 of each of `ROWS` rows if that is more: the rows
    and their errors in two ways, all of these side by side and in the moment's order.
    """
    return max(groups.unit_bytes(features), 9 * 4 * ROWS * features)


def compared(
    weights: Mapping[str, Tensor],
    results: Mapping[str, QTensor],
    moment: SecondMoment,
    *,
    scale_dtype: torch.dtype,
    workers: Workers = SEQUENTIAL,
) -> dict[str, dict[str, JSON]]:
    """Output errors of linears that share an input and a scheme, beside those of round to nearest.

    Args:
        weights: name -> [O, I], any float dtype, the algorithm's input; not modified.
        results: name -> the algorithm's output.
        moment: second moment of the shared input.
        scale_dtype: dtype in which the layout stores scales.
        workers: run linears; how many there are changes nothing but the time.

    Returns:
        name -> `output_error` and `output_error_rtn`, defined in this module's docstring, None
        where the output is zero and its error is not; `same_as_rtn`, whether every qvalue, scale
        and zero point is that of round to nearest.
    """
    if not weights:
        return {}
    scheme = next(iter(results.values())).scheme
    shared: dict[str, Grid] = {}
    # Scales shared by several rows come from the whole weight, not from the rows of a part.
    if scheme.granularity in ("per_tensor", "per_block") or scheme.scale_format == "e4m3":
        shared = weight_grids(weights, scheme, scale_dtype=scale_dtype, workers=workers)

    def nearest(name: str, rows: slice | Tensor) -> QTensor:
        part = {name: weights[name][rows]}
        grids = (
            {name: _grid_rows(shared[name], rows)}
            if shared
            else weight_grids(part, scheme, scale_dtype=scale_dtype)
        )
        return rounded(part, grids, scheme)[name]

    def one(name: str) -> dict[str, JSON]:
        weight, result = weights[name], results[name]
        rows = sampled_rows(weight.shape[0], most=ROWS, device=weight.device)
        exact = weight[rows].float()
        errors = [
            weight_rows.dequantize().sub_(exact)
            for weight_rows in (_rows(result, rows), nearest(name, rows))
        ]
        # [3, R]
        power, error, error_rtn = (
            moment.powers(torch.cat([exact, *errors])).reshape(3, -1).sum(dim=1).tolist()
        )
        return {
            "output_error": _ratio(error, power),
            "output_error_rtn": _ratio(error_rtn, power),
            "same_as_rtn": all(
                _equal(_rows(result, part), nearest(name, part))
                for part in groups.row_units(weight)
            ),
        }

    return dict(zip(weights, workers.map(one, weights), strict=True))


def unchanged(decisions_of: Mapping[str, Mapping[str, JSON]]) -> bool:
    """Whether linears were compared and all of them equal round to nearest."""
    comparisons = [
        decisions["same_as_rtn"]
        for decisions in decisions_of.values()
        if "same_as_rtn" in decisions
    ]
    return bool(comparisons) and all(comparisons)


def _ratio(error: float, power: float) -> float | None:
    if error == power == 0:
        return 0.0
    found = math.sqrt(error / power) if power else math.inf
    return found if math.isfinite(found) else None


def _grid_rows(grid: Grid, rows: slice | Tensor) -> Grid:
    if grid.scale.shape[0] == 1:
        return grid
    zero_point = None if grid.zero_point is None else grid.zero_point[rows]
    return Grid(scale=grid.scale[rows], zero_point=zero_point, zero_groups=0)


def _rows(weight: QTensor, rows: slice | Tensor) -> QTensor:
    """Some rows of a quantized weight."""
    grid = _grid_rows(Grid(scale=weight.scale, zero_point=weight.zero_point, zero_groups=0), rows)
    return QTensor(
        # as bytes: torch 2.8 takes no rows of float8
        qvalue=weight.qvalue.view(torch.int8)[rows].view(weight.qvalue.dtype),
        scale=grid.scale,
        zero_point=grid.zero_point,
        scheme=weight.scheme,
    )


def _equal(mine: QTensor, other: QTensor) -> bool:
    """Whether two weights of one scheme are the same bits."""
    if not torch.equal(mine.scale, other.scale) or not torch.equal(
        mine.qvalue.view(torch.uint8), other.qvalue.view(torch.uint8)
    ):
        return False
    return (
        mine.zero_point is None
        or other.zero_point is None
        or torch.equal(mine.zero_point, other.zero_point)
    )

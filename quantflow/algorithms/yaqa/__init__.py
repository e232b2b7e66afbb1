"""YAQA: round so that the model's own output changes least, with feedback over columns and rows.

GPTQ makes the error of one linear's output small and counts every output alike. But the aim is that
the output of the whole model moves least. Near the original model that is its KL divergence

    1/2 sum_t g_t^T E x_t x_t^T E^T g_t  ~  1/2 tr(G E H E^T),
    G = mean over t of g_t g_t^T,    H = sum over t of x_t x_t^T

with x_t the linear's input at token t, g_t the gradient of the model's own loss by its output
(quantflow/measuring/backward.py), and E = W - Q. The outputs of queries and keys, and those written
to the residual stream, are far from alike: an error in one of them can make up for that in another,
as one of a column can for that of another in GPTQ.

Two steps:

1. Feedback on both sides (quantflow/algorithms/yaqa/wavefront.py). With G = (I + M)^T D' (I + M) by
   blocks of rows, as H by columns in GPTQ, rows still to be rounded aim at w plus what the errors
   of rounded rows add to it, and are rounded by GPTQ for that aim. Rows within a block of 8 do not
   make up for each other.
2. Descent (quantflow/algorithms/yaqa/descent.py), in `_SWEEPS` sweeps: scales are fitted to the
   qvalues by least squares, then weights are moved by steps, one at a time, as long as that makes
   tr(G E H E^T) smaller. The best of all sweeps is kept, and the first step's result where none is
   better.

Neighbours that are one entry of a codebook are rounded and moved together
(quantflow/algorithms/yaqa/vectors.py). Values of e2m1 are represented by integers, in halves
(quantflow/algorithms/yaqa/points.py).

Both use damped G and H. G is measured in blocks of at most 2048 outputs
(quantflow/numerics/output_blocks.py). Between blocks it is zero, so their rows are rounded by
themselves, and each block of each linear is a unit that workers run. Sources: Tseng, Sun, De Sa
2025, "Model-Preserving Adaptive Rounding", arXiv:2505.22988, for the objective and the feedback on
both sides; Behdin et al. 2023, "QuantEase", arXiv:2309.01885, for the descent, there with G = 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantflow.algorithms.yaqa import descent, points, vectors, wavefront
from quantflow.algorithms.yaqa.descent import (
    Problem,
    Side,
    apart,
    descend_,
    loss_of,
    of_rows,
    rescaled,
)
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.qtensor import QTensor
from quantflow.core.result import JSON, GroupResult
from quantflow.core.scheme import LinearScheme
from quantflow.core.support import SHARED_SCALE, Refusal, Supports
from quantflow.errors import SchemeError, StatisticsError
from quantflow.numerics import output_blocks, output_errors
from quantflow.numerics.cholesky import mirror_
from quantflow.numerics.feedback import DAMPINGS, feedback_of
from quantflow.numerics.grid import Grid, either_sign, weight_grids
from quantflow.numerics.statistics import COUNT
from quantflow.observers.gradient import GRADIENT_SUM
from quantflow.observers.hessian import HESSIAN_SUM, checked_hessian

NAME: str = "yaqa"
NEEDS: tuple[str, ...] = (HESSIAN_SUM.name, COUNT.name, GRADIENT_SUM.name)
BY_ROW: bool = False
VERSION: int = 4
TO_NEAREST: bool = False
ON_DEVICE: bool = False  # the descent goes from weight to weight, in numpy
SUPPORTS = Supports(
    float8=Refusal(remedy=f"{NAME} chooses between few points; use {{others}} for float8"),
    shared_scale=SHARED_SCALE,
)

# Constants, since they order the sums and so are part of the result.
_ROWS = 8  # rows of a block, rounded side by side
_SWEEPS = 2
# Larger than gptq's: a gradient stands for one draw of a label, and its sum is noisier than the
# inputs'. And G is that of the original model, which the quantized one has left. docs/accuracy.md
# has what other shares give.
_GRADIENT_DAMPINGS = (0.3, 3.0)
_FAR_DAMPINGS = (3.0, 30.0)  # where inputs have 4 bits and scales of powers of two


def working_bytes(features: int, rows: int, *, workers: int = 1, in_place: bool = False) -> int:
    """The most memory that `quantize_group` takes, in bytes.

    Weights, statistics and results are not counted. 4 I^2 for the factor of the group's Hessian.
    For each worker a block of outputs, O of at most 2048: the factor of its G and a part of it (4
    O^2 + 4 O R with R = 8 rows), its qvalues twice, and the memory of either step.

    Args:
        features: I, in_features of the group.
        rows: out_features of the group, all linears together; one may have nearly all of them.
        workers: number of workers.
        in_place: not read: the Hessian is read again after it was factored.
    """
    del in_place
    rows = min(rows, output_blocks.MOST)
    steps = max(
        descent.working_bytes_of(features, rows),
        wavefront.working_bytes_of(features, rows, length=_ROWS),
    )
    unit = 4 * rows * (rows + _ROWS) + 2 * rows * features + steps
    return 4 * features * features + workers * max(unit, output_errors.working_bytes(features))


def quantize_group(
    weights: Mapping[str, Tensor],
    scheme: LinearScheme,
    *,
    statistics: Mapping[str, Tensor],
    scale_dtype: torch.dtype,
    workers: Workers = SEQUENTIAL,
    in_place: bool = False,
) -> dict[str, GroupResult]:
    """Quantize the linears that share an input.

    Args:
        weights: name -> [O, I], any float dtype; not modified.
        scheme: its `weights` are int or e2m1, per channel or per group.
        statistics: `hessian_sum` [I, I], the sum of x^T x over the group's input rows, and `count`
            [], the number of these rows; and for every weight `<name>|gradient_sum` [O, W], the sum
            of g^T g over the gradients of the loss by its output, in blocks.
        scale_dtype: dtype in which the layout stores scales.
        workers: run blocks of outputs; how many there are changes nothing but the time.
        in_place: not read.

    Returns:
        name -> the quantized weight; decisions: those of gptq; `gradient_damping`, the damping of
        G, the largest of its blocks; `sweeps` (how many are in the result, at most), `moved`
        (weights that they changed), and `loss_start` and `loss` (tr(G E H E^T) after the first step
        and in the end, over tr(G W H W^T)).

    Raises:
        SchemeError: the scheme's weights are float8 or share one scale, or group_size does not
            divide in_features.
        InputError: a weight is empty or holds NaN or Inf.
        StatisticsError: a statistic is missing, has another shape, is not finite, or is no sum of
            x^T x.
    """
    del in_place
    if not points.known(scheme.weights):
        raise SchemeError(
            f"scheme {scheme.name}: yaqa with kind={scheme.weights.kind!r}", "use rtn for float8"
        )
    if scheme.weights.granularity == "per_tensor":
        raise SchemeError(
            f"scheme {scheme.name}: yaqa with one scale per tensor",
            "use gptq, or a scale per channel or group",
        )
    if not weights:
        return {}
    hessian_sum, tokens = checked_hessian(statistics, weights, algorithm=NAME)
    gradients = {
        name: _checked_gradient(name, weight.shape[0], statistics)
        for name, weight in weights.items()
    }
    diagonal = hessian_sum.diagonal().double() / max(tokens, 1)
    importance = diagonal + DAMPINGS[0] * diagonal.mean()  # as gptq's
    sign = either_sign(scheme)
    grids = weight_grids(
        weights,
        scheme.weights,
        scale_dtype=scale_dtype,
        importance=importance,
        either_sign=sign,
        workers=workers,
    )
    size = points.unit(scheme.weights)
    in_points = {name: replace(grid, scale=grid.scale / size) for name, grid in grids.items()}
    in_units = vectors.has_units(scheme.weights)
    order = vectors.order_of(hessian_sum.diagonal(), scheme.weights) if in_units else None
    columns = feedback_of(
        hessian_sum,
        name=next(iter(weights)),
        statistic=HESSIAN_SUM.name,
        order=order,
        workers=workers,
    )
    # the factor's lower half goes above the diagonal too, where `round_rows` reads it
    mirror_(columns.lower.T)
    inputs = Side(matrix=hessian_sum.float(), damping=columns.damping)

    def unit(part: tuple[str, slice]) -> _SolvedBlock:
        name, block = part
        members = torch.arange(block.start, block.stop)
        sums = output_blocks.block_of(gradients[name], block).float()
        parts = apart(len(members), _ROWS)
        rows = feedback_of(
            sums,
            name=name,
            statistic=GRADIENT_SUM.name,
            dampings=_dampings(scheme),
            order=torch.cat(parts),
        )
        problem = Problem(
            weight=weights[name][block],
            grid=of_rows(in_points[name], members),
            scheme=scheme.weights,
            scale_dtype=scale_dtype,
            outputs=Side(matrix=sums, damping=rows.damping),
            inputs=inputs,
        )
        first = (vectors if in_units else wavefront).round_rows(
            problem.weight,
            problem.grid,
            scheme=problem.scheme,
            rows=rows,
            parts=parts,
            columns=columns,
        )
        return _descend_block(problem, first, damping=rows.share)

    units = [
        (name, block)
        for name, weight in weights.items()
        for block in output_blocks.blocks(weight.shape[0])
    ]
    blocks: dict[str, list[_SolvedBlock]] = {name: [] for name in weights}
    for (name, _), solved in zip(units, workers.stream(unit, units), strict=True):
        blocks[name].append(solved)
    decisions = {**columns.decisions, "order": "hessian_diagonal", "tokens": tokens}
    joined = {
        name: _merge_blocks(blocks.pop(name), scheme, grids[name], group_decisions=decisions)
        for name in weights
    }
    moment = output_errors.SecondMoment(upper=inputs.matrix, diagonal=inputs.matrix.diagonal())
    results = {name: result.weight for name, result in joined.items()}
    errors = output_errors.compared(
        weights, results, moment, scale_dtype=scale_dtype, workers=workers
    )
    return {
        name: replace(result, decisions={**result.decisions, **errors[name]})
        for name, result in joined.items()
    }


def _dampings(scheme: LinearScheme) -> tuple[float, ...]:
    """Dampings of G, as fractions of its mean diagonal, in the order in which they are tried."""
    inputs = scheme.input
    far = inputs is not None and inputs.code_bits < 8 and inputs.scale_format == "e8m0"
    return _FAR_DAMPINGS if far else _GRADIENT_DAMPINGS


def _checked_gradient(name: str, rows: int, statistics: Mapping[str, Tensor]) -> Tensor:
    gradient_sum = statistics.get(f"{name}|{GRADIENT_SUM.name}")
    if gradient_sum is None:
        raise StatisticsError(f"{name}: statistic gradient_sum is missing", "measure for yaqa")
    wanted = (rows, output_blocks.width(rows))
    if tuple(gradient_sum.shape) != wanted:
        raise StatisticsError(
            f"{name}: gradient_sum is {list(gradient_sum.shape)}, the weight has {rows} rows, in "
            f"blocks {list(wanted)}",
            "measure with this model",
        )
    diagonal = output_blocks.diagonal_of(gradient_sum)
    if not torch.isfinite(diagonal).all() or (diagonal < 0).any():
        raise StatisticsError(
            f"{name}: gradient_sum holds NaN, Inf or a negative diagonal", "measure again"
        )
    return gradient_sum


@dataclass(frozen=True, kw_only=True)
class _SolvedBlock:
    """A rounded block of outputs, with its losses.

    Attributes:
        whole: loss if all qvalues were zero.
        first: loss after the first step.
        least: loss in the end.
    """

    qvalue: Tensor
    scale: Tensor
    zero_point: Tensor | None
    damping: float
    sweeps: int
    moved: int
    whole: float
    first: float
    least: float


def _descend_block(problem: Problem, qvalue: Tensor, *, damping: float) -> _SolvedBlock:
    """The best of the start and the sweeps of descent.

    qvalue is [O, I] int8, modified.
    """
    start = kept = qvalue.clone()
    best = problem
    least = loss_of(problem, qvalue)
    sweeps = 0
    first = least
    for sweep in range(1, _SWEEPS + 1):
        problem = rescaled(problem, qvalue)
        descend_(problem, qvalue)
        loss = loss_of(problem, qvalue)
        if not loss < least:
            break
        best = problem
        kept = qvalue.clone()
        least = loss
        sweeps = sweep
    return _SolvedBlock(
        qvalue=kept,
        scale=best.grid.scale,
        zero_point=best.grid.zero_point,
        damping=damping,
        sweeps=sweeps,
        moved=int((kept != start).sum()),
        whole=loss_of(problem, None),
        first=first,
        least=least,
    )


def _merge_blocks(
    blocks: Sequence[_SolvedBlock],
    scheme: LinearScheme,
    grid: Grid,
    *,
    group_decisions: Mapping[str, JSON],
) -> GroupResult:
    """The result of a linear, merged from those of its blocks."""
    whole = sum(part.whole for part in blocks) or 1.0
    decisions = {
        "gradient_damping": max(part.damping for part in blocks),
        "zero_groups": grid.zero_groups,
        "sweeps": max(part.sweeps for part in blocks),
        "moved": sum(part.moved for part in blocks),
        "loss_start": sum(part.first for part in blocks) / whole,
        "loss": sum(part.least for part in blocks) / whole,
    }
    zero_points = [part.zero_point for part in blocks if part.zero_point is not None]
    weight = QTensor(
        qvalue=points.qvalues(torch.cat([part.qvalue for part in blocks]), scheme.weights),
        scale=torch.cat([part.scale for part in blocks]) * points.unit(scheme.weights),
        zero_point=torch.cat(zero_points) if zero_points else None,
        scheme=scheme.weights,
        global_scale=grid.global_scale,
    )
    return GroupResult(weight=weight, decisions={**group_decisions, **decisions})

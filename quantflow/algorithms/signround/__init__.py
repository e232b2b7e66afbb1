"""SignRound: learned rounding of each weight and learned clips of each range, over a whole layer.

Minimised is the squared error of the decoder layer's output. The quantized layer's input comes from
the quantized layers before it; its target is the output of the original layers. Weights are

    scale = stored(range * multiplier),
    qvalue = clip(round(weight / scale + offset) + zero_point),

with an offset in [-1/2, 1/2] for each weight, 0 at first, and for each scale a multiplier of its
range in [0, 1], 1 at first: one where scales are symmetric, else one for either end of the range.
Both follow the sign of their gradient, with a step of 1/iterations that falls to zero in a straight
line, so an offset can go just as far as its bounds. Gradients pass round() and stored() as if these
were not there. Steps are taken on a few sequences of the text, in turn. Every tenth of the
iterations the error is taken over sequences that stand for all. The iterate with the least error is
kept, which may be the start.

It goes on from another algorithm's result for the layer's linears: its scales are the ranges. A
weight that it did not round to the nearest point (gptq, yaqa) is moved to the nearest value that
does round to its point. From rtn, which moves none, this is the paper's algorithm.

Every sum has one order: within a sequence torch's, on one thread, over sequences that of the
samples. Source: Cheng et al. 2023, "Optimize Weight Rounding via Signed Gradient Descent for the
Quantization of LLMs", arXiv:2309.05516, equations 2 to 5 and algorithm 1.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantflow.algorithms.signround.learned import Learned
from quantflow.core import groups
from quantflow.core.parallel import SEQUENTIAL, Workers
from quantflow.core.qtensor import QTensor
from quantflow.core.result import GroupResult
from quantflow.core.support import BLOCK_SCALES, SHARED_SCALE, Refusal, Supports, integers_only
from quantflow.errors import StatisticsError, UsageError
from quantflow.numerics.sequence_turns import spread, turns
from quantflow.numerics.trained_block import TrainedBlock

NAME: str = "signround"
VERSION: int = 1
SUPPORTS = Supports(
    float8=integers_only(NAME),
    float4=integers_only(NAME, "float4"),
    shared_scale=SHARED_SCALE,
    block_scales=BLOCK_SCALES,
    mixed_inputs=Refusal(remedy=f"leave {NAME} out, or write down: false"),
    chosen_schemes=Refusal(
        remedy=f"choose with gptq, and give the recipe.yaml that it writes `algorithm: {NAME}`"
    ),
    layer_inputs=Refusal(
        remedy="it learns on quantized inputs towards original outputs: leave quantized_inputs out",
    ),
    ranks=Refusal(remedy="quantize with one process, or use gptq"),
)

# Constants, since they are part of the result.
_CHECKS = 10  # times that the error is taken during the iterations
_CHECKED = 32  # sequences over which the error is taken


def working_bytes(weights: int, scales: int, *, widest: int, workers: int = 1) -> int:
    """The most memory that `refine` takes, in bytes.

    The layer, its runs, the weights that it starts from and the results are not counted. Each
    weight takes four float32 (in steps, its offset, its rounded value, its summed gradient) and two
    qvalues (the best ones, and those that take their place); each scale eight; each worker the
    gradients of a sequence, or the units that autograd remembers of some rows.

    Args:
        weights: number of weights of all quantized linears.
        scales: number of their scales.
        widest: largest in_features of any of them.
        workers: number of workers.
    """
    return 18 * weights + 8 * 4 * scales + workers * max(4 * weights, 3 * groups.unit_bytes(widest))


def runs(samples: int, *, iterations: int, sequences: int) -> int:
    """The number of sequences that `refine` runs through the layer, a backward pass counted as two.

    Args:
        samples: sequences of the text.
        iterations: steps of `refine`.
        sequences: sequences of each step.
    """
    return 3 * iterations * min(sequences, samples) + (1 + min(_CHECKS, iterations)) * min(
        _CHECKED, samples
    )


def refine(
    block: TrainedBlock,
    weights: Mapping[str, Tensor],
    starts: Mapping[str, QTensor],
    *,
    scale_dtypes: Mapping[str, torch.dtype],
    iterations: int,
    sequences: int,
    workers: Workers = SEQUENTIAL,
    tell: Callable[[str], object] = str,
) -> dict[str, GroupResult]:
    """Learn the rounding of all linears of a decoder layer together.

    Args:
        block: the layer and its text.
        weights: linear -> [O, I], any float dtype, finite; not modified.
        starts: linear -> another algorithm's result, int, with scales per channel or per group.
        scale_dtypes: linear -> dtype in which the layout stores its scales.
        iterations: steps, at least 1.
        sequences: sequences of the text in each step, at least 1.
        workers: run sequences and units of rows; how many there are changes nothing but the time.
        tell: receives a line of progress before each iteration.

    Returns:
        name -> the quantized weight; decisions: `iterations`, `best_iteration` (0 is the start),
        `block_loss_start` and `block_loss` (squared error of the layer's output over its target's
        squares), `moved` and `rescaled` (qvalues and scales, or zero points, that are not those of
        the start).

    Raises:
        UsageError: iterations or sequences below 1.
        SchemeError: a scheme is float8, or one scale stands for several rows.
        StatisticsError: the block puts out NaN or Inf; its number of samples is 0.
    """
    if iterations < 1 or sequences < 1:
        raise UsageError(
            f"signround: {iterations} iterations of {sequences} sequences",
            "give at least 1 of each",
        )
    if block.samples < 1:
        raise StatisticsError("signround: no calibration sequence", "measure with calibration text")
    linears = {
        name: Learned.of(name, weights[name], start, scale_dtype=scale_dtypes[name])
        for name, start in starts.items()
    }
    values = {
        name: weights[name].new_empty(weights[name].shape, dtype=torch.float32) for name in linears
    }
    for value in values.values():
        value.requires_grad_()
    order = turns(block.samples, sequences)
    checked = spread(block.samples, _CHECKED)
    every = -(-iterations // _CHECKS)
    _round_all(linears, values, workers)
    power, first = _losses(block, values, checked, workers)
    best = {name: linear.start for name, linear in linears.items()}
    least = first
    kept = 0
    for iteration in range(iterations):
        tell(f"iteration {iteration + 1} of {iterations}")
        gradients = _gradients(block, values, order[iteration % len(order)], workers)
        rate = (1 - iteration / iterations) / iterations
        _step_all(linears, gradients, rate=rate, workers=workers)
        del gradients
        _round_all(linears, values, workers)
        if (iteration + 1) % every and iteration + 1 < iterations:
            continue
        _, loss = _losses(block, values, checked, workers)
        if loss < least:
            best = {name: linear.made(workers) for name, linear in linears.items()}
            least = loss
            kept = iteration + 1
    decisions: dict[str, Any] = {"iterations": iterations, "best_iteration": kept}
    decisions |= {"block_loss_start": first / (power or 1.0), "block_loss": least / (power or 1.0)}
    return {
        name: GroupResult(weight=weight, decisions={**decisions, **_changes(weight, starts[name])})
        for name, weight in best.items()
    }


def _step_all(
    linears: Mapping[str, Learned], gradients: Sequence[Tensor], *, rate: float, workers: Workers
) -> None:
    """Take a step in every linear, by the gradients by their weights."""

    def unit(part: tuple[Learned, Tensor, slice]) -> None:
        linear, gradient, rows = part
        linear.step_(rows, gradient[rows], rate=rate)

    each = zip(linears.values(), gradients, strict=True)
    workers.map(
        unit, [(linear, gradient, rows) for linear, gradient in each for rows in linear.units]
    )


def _round_all(
    linears: Mapping[str, Learned], values: Mapping[str, Tensor], workers: Workers
) -> None:
    """Write every linear's rounded weight into `values`."""

    def unit(part: tuple[str, slice]) -> None:
        name, rows = part
        with torch.no_grad():
            values[name][rows] = linears[name].real(rows, *linears[name].learned(rows))

    workers.map(unit, [(name, rows) for name, linear in linears.items() for rows in linear.units])


def _gradients(
    block: TrainedBlock, values: Mapping[str, Tensor], numbers: Sequence[int], workers: Workers
) -> list[Tensor]:
    """Gradients of the squared error of some sequences by every weight, summed in their order."""
    leaves = list(values.values())

    def one(number: int) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            loss = (run(number) - block.target(number)).square().sum()
            # weights that only choose, such as an indexer's, get a gradient of zeros
            return torch.autograd.grad(loss, leaves, materialize_grads=True)

    total: list[Tensor] = []
    with block.running(values) as run:
        for gradients in workers.stream(one, numbers):
            if not total:
                total = list(gradients)
                continue
            for kept, more in zip(total, gradients, strict=True):
                kept += more
    return total


def _losses(
    block: TrainedBlock, values: Mapping[str, Tensor], numbers: Sequence[int], workers: Workers
) -> tuple[float, float]:
    """The sum over some sequences of the target's squares, and that of the squared error."""

    def one(number: int) -> tuple[float, float]:
        with torch.no_grad():
            target = block.target(number)
            return float(target.square().sum(dtype=torch.float64)), float(
                (run(number) - target).square().sum(dtype=torch.float64)
            )

    with block.running(values) as run:
        sums = workers.map(one, numbers)
    power, loss = (sum(parts) for parts in zip(*sums, strict=True))
    if not loss < torch.inf:  # NaN is not below anything
        raise StatisticsError(
            f"{next(iter(values))}: signround: the squared error of its layer's output is {loss}",
            "look at the layers before it, and at the calibration text",
        )
    return power, loss


def _changes(weight: QTensor, start: QTensor) -> dict[str, int]:
    rescaled = weight.scale != start.scale
    if weight.zero_point is not None and start.zero_point is not None:
        rescaled |= weight.zero_point != start.zero_point
    return {"moved": int((weight.qvalue != start.qvalue).sum()), "rescaled": int(rescaled.sum())}

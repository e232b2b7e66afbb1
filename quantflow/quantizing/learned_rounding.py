"""Learned rounding of a whole layer, from its linears as they were quantized one by one.

The layer reads the outputs of the quantized layers before it, and learns to put out what the
original layers would have. Meanwhile the hidden states of both are there
(quantflow/quantizing/layer_by_layer.py), and the layer runs with other weights, its own beside them
(quantflow/models/trained_layer.py).

Of a mixture of experts the router stays as it is. It reads what the quantized layers and the
layer's own quantized attention hand to it, and sends tokens where it will in the artifact; the
target has the experts that the original chose. So a token that is sent elsewhere counts as an
error, and gradients go through the router's weights, though not through its choice.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from quantflow.algorithms import BLOCK_ALGORITHMS, LEARNING, NEAREST
from quantflow.models.trained_layer import running
from quantflow.numerics.trained_block import TrainedBlock
from quantflow.planning.recipe import SignRound
from quantflow.process_memory import give_back_holes
from quantflow.quantizing.open_layer import Execution, LayerText, OpenLayer, RoundedLinear


def learn(
    opened: OpenLayer,
    text: LayerText,
    *,
    rounded: Mapping[str, RoundedLinear],
    fixed: AbstractSet[str],
    learned: SignRound,
    execution: Execution,
) -> dict[str, RoundedLinear]:
    """The layer's linears after learning; the notes of the groups' algorithm stand under `start`.

    Args:
        opened: the layer, all of its weights in memory.
        text: the sequences as they enter the original layer, and as the quantized layers leave
            them.
        rounded: the layer's linears as the groups' algorithm left them.
        fixed: linears that stay so: those of experts that were sent too few tokens, along whose
            gradients every step would be as long as along the others'.
        learned: iterations and sequences of learning.
        execution: workers that run sequences.

    Raises:
        StatisticsError: the layer puts out NaN or Inf.
    """
    plan = opened.plan
    give_back_holes()
    chosen = [name for name in rounded if name not in fixed]
    if not chosen:
        return dict(rounded)
    kept = {name: rounded[name].result.weight.dequantize() for name in rounded if name in fixed}
    block = TrainedBlock(
        samples=len(text.again),
        running=lambda weights: running(
            opened.stream, opened.module, opened.layer, text.again, {**kept, **weights}
        ),
        target=lambda number: opened.stream.alone(text.states[number].hidden),
    )
    results = BLOCK_ALGORITHMS[LEARNING].refine(
        block,
        {name: opened.weight(name) for name in chosen},
        {name: rounded[name].result.weight for name in chosen},
        scale_dtypes={name: rounded[name].scale_dtype for name in chosen},
        iterations=learned.iterations,
        sequences=learned.sequences,
        workers=execution.workers,
        tell=execution.progress.doing,
    )
    relearned = dict(rounded)
    for name, result in results.items():
        start: dict[str, Any] = {"algorithm": plan.algorithm, **rounded[name].result.decisions}
        decisions = {**result.decisions, "start": start}
        nearest = True if plan.algorithm == NEAREST and not plan.clips else start.get("same_as_rtn")
        if nearest is not None:
            changed = bool(result.decisions["moved"] or result.decisions["rescaled"])
            decisions["same_as_rtn"] = bool(nearest) and not changed
        relearned[name] = replace(rounded[name], result=replace(result, decisions=decisions))
    give_back_holes()
    return relearned

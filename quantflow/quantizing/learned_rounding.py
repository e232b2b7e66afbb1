"""Learned rounding of a whole layer, from its linears as they were quantized one by one.

The layer reads the outputs of the quantized layers before it, and learns to put out what the
original layers would have. Meanwhile the hidden states of both are there
(quantflow/quantizing/layer_by_layer.py), and the layer runs with other weights, its own beside them
(quantflow/models/trained_layer.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
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
    learned: SignRound,
    execution: Execution,
) -> dict[str, RoundedLinear]:
    """The layer's linears after learning; the notes of the groups' algorithm stand under `start`.

    Args:
        opened: the layer, all of its weights in memory.
        text: the sequences as they enter the original layer, and as the quantized layers leave
            them.
        rounded: the layer's linears as the groups' algorithm left them.
        learned: iterations and sequences of learning.
        execution: workers that run sequences.

    Raises:
        StatisticsError: the layer puts out NaN or Inf.
    """
    plan = opened.plan
    give_back_holes()
    block = TrainedBlock(
        samples=len(text.again),
        running=partial(running, opened.stream, opened.module, opened.layer, text.again),
        target=lambda number: opened.stream.alone(text.states[number].hidden),
    )
    results = BLOCK_ALGORITHMS[LEARNING].refine(
        block,
        {name: opened.weight(name) for name in rounded},
        {name: linear.result.weight for name, linear in rounded.items()},
        scale_dtypes={name: linear.scale_dtype for name, linear in rounded.items()},
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

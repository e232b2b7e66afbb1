"""Learned rounding in a layer: what its linears became group by group is where the whole layer goes on from.

The layer is given what the quantized layers before it put out, and learns to put out what the original layers would have.
While it does, the hidden states of both are at hand (quantflow/quantization/layer_by_layer.py), and the layer runs with other
weights, its own beside them (quantflow/models/trained_layer.py).
"""

from dataclasses import replace
from functools import partial
from typing import Any

from quantflow.algorithms import BLOCK_ALGORITHMS, LEARNING
from quantflow.models.trained_layer import running
from quantflow.numerics.trained_block import TrainedBlock
from quantflow.process_memory import give_back_holes
from quantflow.quantization.layer_work import LayerWork


def learn(work: LayerWork) -> None:
    """Put what was learned in the place of what the groups' algorithm made, whose decisions stand under `start`.

    Raises:
        StatisticsError: the layer puts out NaN or Inf.
    """
    plan = work.plan
    assert plan.learned is not None  # the caller has looked
    give_back_holes()
    block = TrainedBlock(
        samples=len(work.again),
        running=partial(running, work.stream, work.module, work.layer, work.again),
        target=lambda number: work.states[number].hidden,
    )
    results = BLOCK_ALGORITHMS[LEARNING].refine(
        block,
        {name: work.child(name).weight.detach() for name in work.made},
        {name: made.result.weight for name, made in work.made.items()},
        scale_dtypes={name: made.scale_dtype for name, made in work.made.items()},
        iterations=plan.learned.iterations,
        sequences=plan.learned.sequences,
        workers=work.workers,
        tell=work.progress.doing,
    )
    for name, result in results.items():
        made = work.made[name]
        start: dict[str, Any] = {"algorithm": plan.algorithm, **made.result.decisions}
        decisions = {**result.decisions, "start": start}
        nearest = True if plan.algorithm == "rtn" and not plan.clips else start.get("same_as_rtn")
        if nearest is not None:
            changed = bool(result.decisions["moved"] or result.decisions["rescaled"])
            decisions["same_as_rtn"] = bool(nearest) and not changed
        work.made[name] = replace(made, result=replace(result, decisions=decisions))
    give_back_holes()

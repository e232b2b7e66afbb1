"""What is seen of the inputs of a layer while the calibration text runs through it: Hessians, rows for searches, routing.

A card sees the inputs of its own groups, every sequence's, in sample order (quantflow/distributed/team.py).
"""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantflow.calibration.observe import FEEDING
from quantflow.models.capture import State
from quantflow.models.experts import watch_routing
from quantflow.models.graph import LinearGroup
from quantflow.models.hooks import watch
from quantflow.observers import OBSERVERS
from quantflow.observers.hessian import HessianObserver
from quantflow.observers.rows import RowSample
from quantflow.planning.experts import fed_by
from quantflow.planning.plan import SAMPLE_ROWS
from quantflow.process_memory import give_back_holes
from quantflow.quantization.layer_work import LayerWork


def collect(work: LayerWork) -> dict[int, HessianObserver]:
    """Run the calibration text through the layer; return the Hessians of this card's groups by their numbers.

    The rows, and the statistics of inputs that no measurement has seen, go into `work.statistics`; how many tokens each expert
    got into `work.routed`, where Hessians are collected and so all of the text runs. Sequences run on the workers; their
    inputs are folded here, in order, while the next ones run.
    """
    firsts = {
        number: group.linears[0]
        for number, group in enumerate(work.layer.groups)
        if any(work.plan.schemes[name] is not None for name in group.linears)
    }
    features = {number: work.child(name).weight.shape[1] for number, name in firsts.items()}
    owned = list(filter(work.team.owns, firsts))
    hessians = {number: HessianObserver(features=features[number]) for number in owned if work.plan.needs_hessian}
    others = {number: _observers(work, work.layer.groups[number], features[number]) for number in owned}

    def add(number: int, x: Tensor) -> None:
        seeing: list[Any] = [*others[number], *filter(None, [hessians.get(number)])]
        for observer in seeing:
            observer.update(x)

    routed = _run(work, firsts, features, add)
    if work.plan.needs_hessian:
        work.routed = dict(zip(work.layer.gates, routed.tolist(), strict=True))
    for number, observers in others.items():
        found = {name: tensor for observer in observers for name, tensor in observer.state().items()}
        for linear in work.layer.groups[number].linears:
            work.statistics[linear] = {**work.statistics.get(linear, {}), **found}
    return hessians


def _observers(work: LayerWork, group: LinearGroup, features: int) -> list[Any]:
    """Return what sees an input besides its Hessian; rows only where a search can have a use for them."""
    apart = work.plan.rows_apart if len(work.tokens) > 1 else 1
    each = max(1, SAMPLE_ROWS // max(1, len(work.tokens) // apart))
    observers: list[Any] = [OBSERVERS[name](features=features) for name in work.plan.observed]
    return [*observers, RowSample(features, each=each, apart=apart)] if work.plan.needs_rows and group.folds else observers


def _run(work: LayerWork, firsts: Mapping[int, str], features: Mapping[int, int], add: Callable[[int, Tensor], None]) -> Tensor:
    """Run this card's sequences and hand every card's inputs of its groups to `add`, in sample order.

    Returns:
        How many tokens the router sent to each expert, int64 [E].
    """
    seen = threading.local()  # hooks are the module's, what they see belongs to the sequence that the thread runs

    def remember(number: int, x: Tensor, _y: Tensor) -> None:
        seen.inputs[number] = x

    def routed(tokens: Tensor) -> None:
        seen.routed = tokens

    def unit(state: State) -> tuple[State, Tensor, dict[int, Tensor], Tensor]:
        seen.inputs, seen.routed = {}, nobody
        hidden = work.stream.run(work.module, state)
        inputs, seen.inputs = seen.inputs, {}  # a thread that waits for its next sequence keeps nothing of this one
        return state, hidden, inputs, seen.routed

    watched = {work.layer.relative(name): partial(remember, number) for number, name in firsts.items()}
    total = nobody = torch.zeros(work.layer.experts, dtype=torch.int64)
    feeding = FEEDING[fed_by(work.plan.experts)](work.module)
    with watch(work.module, watched), watch_routing(work.module, routed), feeding:
        arrived = work.workers.stream(unit, work.states, ahead=work.ahead)
        for first in range(0, len(work.tokens), work.team.world):  # of the sequences that all cards run at once
            work.progress.doing(f"sequence {first + 1} of {len(work.tokens)}")
            state, hidden, inputs, tokens = next(arrived, (None, None, {}, nobody))
            total = total + tokens
            work.team.gather(inputs, features, tokens=work.tokens[first : first + work.team.world], add=add)
            if work.keep_outputs and state is not None and hidden is not None:
                state.store.put(state.index, hidden)
            del state, hidden, inputs  # before the next ones are waited for
    give_back_holes()
    return total

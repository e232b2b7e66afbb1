"""Statistics of a layer's inputs while the calibration text runs: Hessians, sampled rows, routing.

A card sees the inputs of its own groups, every sequence's, in sample order
(quantflow/distributed/team.py).
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantflow.measuring.observe import EXPERT_TOKENS
from quantflow.models.capture import State
from quantflow.models.experts import watch_routing
from quantflow.models.graph import LinearGroup
from quantflow.models.hooks import watch
from quantflow.observers import OBSERVERS
from quantflow.observers.hessian import HessianObserver
from quantflow.observers.rows import RowSample
from quantflow.planning.plan import SAMPLE_ROWS, Plan
from quantflow.process_memory import give_back_holes
from quantflow.quantizing.open_layer import Execution, LayerText, OpenLayer


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The statistics of a layer's inputs after the calibration text ran.

    Attributes:
        hessians: group's number -> Hessian, of this card's groups; whoever quantizes a group takes
            its Hessian out.
        statistics: linear's source name -> statistic -> tensor, of the linear's input: sampled
            rows, and statistics that the measurement lacks.
        routed: expert -> tokens that the router sent to it; None where not all of the text ran.
    """

    hessians: dict[int, HessianObserver] = field(default_factory=dict)
    statistics: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    routed: Mapping[str, int] | None = None


def collect_traffic(opened: OpenLayer, text: LayerText, *, execution: Execution) -> Traffic:
    """Run the calibration text through the layer and collect the statistics of its inputs.

    Sequences run on the workers; their inputs are folded here, in order, while the next ones run.
    The layer's outputs become the next hidden states where `text` says so.
    """
    plan = opened.plan
    groups = opened.layer.groups
    firsts = {
        number: group.linears[0]
        for number, group in enumerate(groups)
        if any(plan.schemes[name] is not None for name in group.linears)
    }
    features = {number: opened.weight(name).shape[1] for number, name in firsts.items()}
    owned = list(filter(execution.team.owns, firsts))
    with opened.device.factories():
        hessians = {
            number: HessianObserver(features=features[number])
            for number in owned
            if plan.needs_hessian
            and (plan.searches_hessian or not plan.rounds_by_refit(groups[number]))
        }
        others = {
            number: _observers(plan, text, group=groups[number], features=features[number])
            for number in owned
        }

    def add(number: int, x: Tensor) -> None:
        seeing: list[Any] = [*others[number], *filter(None, [hessians.get(number)])]
        for observer in seeing:
            observer.update(x)

    routed = _run(opened, text, execution=execution, firsts=firsts, features=features, add=add)
    return Traffic(
        hessians=hessians,
        statistics={
            linear: {
                name: tensor for observer in observers for name, tensor in observer.state().items()
            }
            for number, observers in others.items()
            for linear in groups[number].linears
        },
        routed=dict(zip(opened.layer.gates, routed, strict=True))
        if plan.needs_hessian or plan.learns
        else None,
    )


def _observers(plan: Plan, text: LayerText, *, group: LinearGroup, features: int) -> list[Any]:
    """An input's observers besides its Hessian's; rows are sampled where a search uses them."""
    apart = plan.rows_apart if len(text.tokens) > 1 else 1
    each = max(1, SAMPLE_ROWS // max(1, len(text.tokens) // apart))
    observers: list[Any] = [OBSERVERS[name](features=features) for name in plan.observed]
    return (
        [*observers, RowSample(features, each=each, apart=apart)]
        if plan.needs_rows and group.folds
        else observers
    )


def _run(
    opened: OpenLayer,
    text: LayerText,
    *,
    execution: Execution,
    firsts: Mapping[int, str],
    features: Mapping[int, int],
    add: Callable[[int, Tensor], None],
) -> list[int]:
    """Run this card's sequences; `add` gets all cards' inputs of its groups, in sample order.

    Returns:
        Number of tokens of all cards' sequences that the router sent to each expert.
    """
    team = execution.team
    layer = opened.layer
    # Hooks belong to the module, and several threads run sequences through it: each thread keeps
    # the inputs of its own sequence.
    seen = threading.local()

    def remember(number: int, x: Tensor, _y: Tensor) -> None:
        seen.inputs[number] = x

    def routed(tokens: Tensor) -> None:
        seen.routed = tokens

    def unit(module: nn.Module, state: State) -> tuple[State, Tensor, dict[int, Tensor], Tensor]:
        seen.inputs, seen.routed = {}, nobody
        hidden = text.stream.run(module, state)
        # a thread that waits for its next sequence keeps nothing of this one
        inputs, seen.inputs = seen.inputs, {}
        return state, hidden, inputs, seen.routed

    watched = {layer.relative(name): partial(remember, number) for number, name in firsts.items()}
    # a layer that is refitted runs on what enters it once more, and its outputs are put after that
    keeps = text.keep_outputs and not opened.plan.refit
    total = nobody = torch.zeros(layer.experts, dtype=torch.int64, device=opened.device.kind)
    seen_by_experts = EXPERT_TOKENS[opened.plan.fed]
    with (
        text.stream.beside(layer.index, opened.module) as module,
        watch(module, watched),
        watch_routing(module, routed),
        seen_by_experts(module),
    ):
        arrived = execution.workers.stream(
            partial(unit, module), text.states, ahead=execution.ahead
        )
        # One round: every card runs one sequence, then all exchange inputs, in sample order. A card
        # without a sequence left still takes part, with the others' inputs of its groups.
        for first in range(0, len(text.tokens), team.world):
            execution.progress.doing(f"sequence {first + 1} of {len(text.tokens)}")
            state, hidden, inputs, tokens = next(arrived, (None, None, {}, nobody))
            total = total + tokens
            team.gather(inputs, features, add=add, dtype=text.stream.dtype)
            if keeps and state is not None and hidden is not None:
                state.store.put(state.index, hidden)
            del state, hidden, inputs  # before the next ones are waited for
    give_back_holes()
    of_cards = team.exchange(total.tolist()) if layer.experts else []
    return [sum(counts) for counts in zip(*of_cards, strict=True)]

"""Experts that calibration reached too seldom: which they are, and what their policy makes of them.

The policies, and how many tokens are too few, are in quantflow/planning/experts.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quantflow.algorithms import NEAREST
from quantflow.core.scheme import LinearScheme
from quantflow.errors import StatisticsError
from quantflow.measuring.record import Measurement
from quantflow.measuring.routing import routed_key
from quantflow.models.graph import Graph, Layer, LinearGroup
from quantflow.observers.amax import AMAX
from quantflow.observers.min_max import MAX_VAL, MIN_VAL
from quantflow.planning.experts import SHARE_MAX, Policy

_WIDEST: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    AMAX.name: torch.maximum,
    MIN_VAL.name: torch.minimum,
    MAX_VAL.name: torch.maximum,
}


_DAMP = "damp"
_BECAME = {_DAMP: "Hessian damped by its mean diagonal", NEAREST: "rounded to nearest"}


_LISTED = 8  # experts that a message names


Statistics = Mapping[str, Mapping[str, Tensor]]  # linear -> statistic of its input -> tensor


@dataclass(frozen=True, kw_only=True)
class Short:
    """A group of an expert's linears that got too few tokens."""

    group: LinearGroup
    tokens: int
    needed: int


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """A policy's effect on a layer.

    Attributes:
        statistics: statistics of every linear's input, some replaced.
        rounded: linears that are rounded to nearest, whatever the algorithm.
        damped: linears whose Hessian is shrunk.
        decisions: linear -> its note.
        few: linears of experts that the router sent too few tokens, whatever the policy showed
            them. Gradients are those of routed tokens alone, so theirs say little.
        tokens: linear of an expert -> tokens that the router sent to it; empty where nobody
            counted.
    """

    statistics: Statistics
    rounded: frozenset[str]
    damped: frozenset[str]
    decisions: Mapping[str, str]
    few: frozenset[str] = frozenset()
    tokens: Mapping[str, int] = field(default_factory=dict)


def routed_tokens(measurement: Measurement | None, layer: Layer) -> dict[str, int] | None:
    """Expert -> tokens that the router sent to it; None where nobody counted."""
    if measurement is None:
        return None
    keys = {expert: routed_key(gate) for expert, gate in layer.gates.items()}
    if not all(key in measurement.statistics for key in keys.values()):
        return None
    return {expert: int(measurement.statistics[key]) for expert, key in keys.items()}


def short_of_tokens(
    layer: Layer,
    policy: Policy,
    tokens: Mapping[str, int],
    *,
    schemes: Mapping[str, LinearScheme | None],
    shapes: Mapping[str, Sequence[int]],
) -> list[Short]:
    """The groups of the layer's experts that got too few tokens.

    Args:
        layer: the layer.
        policy: the policy, with its least number of tokens.
        tokens: expert -> number of its tokens.
        schemes: linear -> its scheme, None where it is not quantized.
        shapes: source tensor name -> shape.
    """
    found = []
    for group in layer.groups:
        if group.expert is None or all(schemes[name] is None for name in group.linears):
            continue
        needed = policy.needed(shapes[f"{group.linears[0]}.weight"][1])
        if tokens[group.expert] < needed:
            found.append(Short(group=group, tokens=tokens[group.expert], needed=needed))
    return found


def short_in_records(graph: Graph, records: Iterable[Mapping[str, Any]]) -> list[Short]:
    """The groups that got too few tokens, by the records of their quantized layers.

    Args:
        graph: the model's.
        records: record of each layer, in order.
    """
    return [
        Short(group=group, **short[group.linears[0]])
        for layer, record in zip(graph.layers, records, strict=True)
        if (short := record.get("experts", {}).get("short"))
        for group in layer.groups
        if group.linears[0] in short
    ]


def described(shorts: Sequence[Short]) -> str:
    """The experts with too few tokens, in one line; each once, with the linear that lacks most."""
    worst: dict[str | None, Short] = {}
    for short in sorted(shorts, key=lambda short: short.tokens - short.needed):
        worst.setdefault(short.group.expert, short)
    named = [f"{expert} ({short.tokens} of {short.needed})" for expert, short in worst.items()]
    more = f" and {len(named) - _LISTED} more" if len(named) > _LISTED else ""
    experts = f"{len(named)} expert{'' if len(named) == 1 else 's'}"
    return f"{experts} got fewer calibration tokens than needed: {', '.join(named[:_LISTED])}{more}"


def refuse(name: str, shorts: Sequence[Short]) -> None:
    """Refuse undercalibrated experts, where there are any.

    Raises:
        StatisticsError: naming them, with their tokens.
    """
    if shorts:
        raise StatisticsError(
            f"{name}: {described(shorts)}",
            "give more or other calibration text, or say what becomes of them: --experts all, "
            "damp, rtn or share_max, or fewer "
            "--expert-tokens",
        )


def check_before(
    name: str,
    policy: Policy | None,
    graph: Graph,
    measurement: Measurement | None,
    *,
    schemes: Mapping[str, LinearScheme | None],
    shapes: Mapping[str, Sequence[int]],
    observed: str | None = None,
) -> list[Short]:
    """The groups that the measurement's ledger of tokens shows short, before any is quantized.

    Args:
        name: name of the artifact, for the message.
        policy: the policy of its experts.
        graph: the model's.
        measurement: the measurement, or None.
        schemes: linear -> its scheme, None where it is not quantized.
        shapes: source tensor name -> shape.
        observed: the tokens that quantize shows each expert where it observes inputs itself; None
            where statistics are the measurement's.

    Raises:
        StatisticsError: policy `error`, and there are such groups; or static inputs and a
            measurement that does not say how many tokens an expert got, or did not show every
            expert every token where the policy is `all`.
    """
    if policy is None or measurement is None:
        return []
    fed = observed or measurement.meta.get("experts")
    if policy.inputs and policy.name == "all" and fed != "all":
        raise StatisticsError(
            f"{name}: experts all, the measurement showed each expert {fed or 'unknown'} tokens",
            "measure again with --experts all",
        )
    if policy.name == "all" or (fed == "all" and not policy.weights):
        return []
    found = []
    for layer in graph.layers:
        tokens = routed_tokens(measurement, layer)
        # of experts that share one range the tokens of each decide nothing
        if tokens is None and policy.inputs and layer.experts and policy.name != SHARE_MAX:
            raise StatisticsError(
                f"{layer.block}: the measurement does not say how many tokens each expert got",
                "measure with `quantflow measure`, or give --experts share_max: all experts of a "
                "layer then have the widest range among them",
            )
        if tokens:
            found += short_of_tokens(layer, policy, tokens, schemes=schemes, shapes=shapes)
    if policy.name == "error":
        refuse(name, found)
    return found


def of_layer(layer: Layer, shorts: Iterable[Short]) -> list[Short]:
    """The short groups of one layer."""
    experts = set(layer.gates)
    return [short for short in shorts if short.group.expert in experts]


def treat(
    layer: Layer, policy: Policy, statistics: Statistics, shorts: Iterable[Short]
) -> Treatment:
    """The layer's statistics under the policy, and the linears that are rounded to nearest.

    Args:
        layer: the layer.
        policy: a policy other than `error`, unless no group is short.
        statistics: statistics of every linear's input.
        shorts: the groups that got too few tokens.
    """
    replaced: dict[str, Mapping[str, Tensor]] = dict(statistics)
    decisions: dict[str, str] = {}
    short = {name: item for item in shorts for name in item.group.linears}
    widened = (
        [name for group in layer.groups if group.expert for name in group.linears]
        if policy.name == SHARE_MAX
        else short
    )
    if policy.inputs and policy.name in (*_BECAME, SHARE_MAX):
        widest = _widest_of(layer, statistics)
        for name in widened:
            replaced[name] = {**statistics.get(name, {}), **widest[_role(name)]}
            decisions[name] = f"static input of the widest range among {layer.experts} experts"
    became = _BECAME.get(policy.name) if policy.weights else None
    for name, item in short.items() if became else ():
        told = [f"{item.tokens} of {item.needed} tokens: {became}", decisions.get(name)]
        decisions[name] = "; ".join(filter(None, told))
    chosen = {
        of: frozenset(short if policy.weights and policy.name == of else ()) for of in _BECAME
    }
    return Treatment(
        statistics=replaced, rounded=chosen[NEAREST], damped=chosen[_DAMP], decisions=decisions
    )


def left_alone(treatment: Treatment, few: Iterable[Short], *, note: str | None) -> Treatment:
    """The treatment with the linears that were sent too few tokens, and what follows from that.

    Args:
        treatment: the policy's.
        few: their groups, whatever the policy showed them.
        note: what is not done with them; None where nothing follows gradients.
    """
    short = {name: item for item in few for name in item.group.linears}
    decisions = dict(treatment.decisions)
    for name, item in short.items() if note is not None else ():
        told = decisions.get(name) or f"{item.tokens} of {item.needed} tokens"
        decisions[name] = f"{told}; {note}"
    return replace(treatment, few=frozenset(short), decisions=decisions)


def _widest_of(layer: Layer, statistics: Statistics) -> dict[str, dict[str, Tensor]]:
    """Role of a linear in an expert -> the widest of each range among the layer's experts."""
    widest: dict[str, dict[str, Tensor]] = {}
    for group in layer.groups:
        for name in group.linears if group.expert is not None else ():
            role = widest.setdefault(_role(name), {})
            for statistic, value in statistics.get(name, {}).items():
                if statistic in _WIDEST:
                    role[statistic] = (
                        _WIDEST[statistic](role[statistic], value) if statistic in role else value
                    )
    return widest


def _role(name: str) -> str:
    return name.rpartition(".")[2]


def record_of(
    layer: Layer, tokens: Mapping[str, int] | None, *, fed: str | None, shorts: Iterable[Short]
) -> dict[str, Any]:
    """The record's entry on a layer's experts: {"experts", "fed", "tokens", "short"}.

    `tokens` is a list by the experts' numbers; None where nobody counted.
    """
    return {
        "experts": f"{layer.block}.experts",
        "fed": fed,
        "tokens": None if tokens is None else list(tokens.values()),
        "short": {
            short.group.linears[0]: {"tokens": short.tokens, "needed": short.needed}
            for short in shorts
        },
    }

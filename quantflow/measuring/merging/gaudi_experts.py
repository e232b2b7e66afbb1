"""Experts of Gaudi's files that cards hold some of each, put together and dealt to other cards.

With expert parallelism a card holds whole experts, E / W of them in the order of its rank, and only
it measured what lies inside them. So nothing about experts is merged: they are put together, and
every card of the result gets its own again. In the names of vLLM each card counts its experts from
0, so nothing in the files says whether expert 3 of two cards is one expert cut in two, or two
experts; in those of optimum-habana experts have the numbers of the model (see
quantflow/formats/gaudi/experts.py).

    inputs of an operator    the maximum: every card saw every token
    output 0 of an operator  the sum of the cards' maxima, since each saw a summand
    what lies inside, and the experts' weights    their card's
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quantflow.errors import InputError, UsageError
from quantflow.formats.gaudi import experts
from quantflow.formats.gaudi.triple import Node, Triple
from quantflow.measuring.merging.grouping import some
from quantflow.numerics.statistics import bound_of_sum

_SAME_RUN = "give every card of one run once, as the toolkit wrote its files"
_LISTS = ("w13_list", "w2_list")


@dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """One expert of an operator.

    Attributes:
        rank: rank that held it.
        inside: maximum between its linears.
        linears: `w13_list`, `w2_list` or the name of a linear -> its node.
    """

    rank: int
    inside: Tensor
    linears: Mapping[str, Node]


@dataclass(frozen=True, kw_only=True, eq=False)
class Operator:
    """One mixture of all cards.

    Attributes:
        hidden: maximum of its input.
        output: maximum of its output, or a bound.
        bounded: whether it is a bound.
        experts: experts in the model's order.
        listed: whether names are vLLM's, which count a card's experts.
    """

    hidden: Tensor
    output: Tensor
    bounded: bool
    experts: Sequence[Held]
    listed: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Dealt:
    """A card's share of the operators.

    Attributes:
        nodes: operators and experts.
        owners: `<node>|<tensor>` -> rank that measured it.
        bounds: `<node>|<tensor>` that bound what was not measured.
    """

    nodes: dict[str, Node] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)
    bounds: list[str] = field(default_factory=list)


def are_spread(triples: Mapping[int, Triple], *, told: bool | None) -> bool:
    """Whether each of the ranks holds some of the experts.

    Args:
        triples: rank -> its files.
        told: what the user said of vLLM's files; None where nothing was said.

    Raises:
        UsageError: ranks that list other weights under the names of one another, and nothing was
            said; or it was said of files without experts.
    """
    found = [_operators(triple.nodes) for triple in triples.values()]
    if not any(found):
        if told:
            raise UsageError(
                "unify: --expert-parallel, and the files have no experts", "leave it out"
            )
        return False
    if any(not listed for listed in found[0].values()):
        return len({frozenset(_linears(triple.nodes)) for triple in triples.values()}) > 1
    weights = {_weights(triple.nodes) for triple in triples.values()}
    if told is None and len(weights) > 1:
        raise UsageError(
            f"unify: {len(triples)} ranks list {len(_linears(next(iter(triples.values())).nodes))} "
            "weights of experts each under the same names, and the files do not say whether a card "
            "holds some experts or a part of each",
            "tell `quantflow unify`: --expert-parallel (vLLM's -u, --enable-expert-parallel) or "
            "--no-expert-parallel",
        )
    return bool(told) and len(weights) > 1


def gathered(triples: Mapping[int, Triple], *, world: int) -> dict[str, Operator]:
    """The operators of all ranks, with every expert.

    Raises:
        InputError: a rank is missing, holds the experts of another, or saw other tokens than all
            the others; experts that no rank holds, or two do.
    """
    missing = sorted(set(range(world)) - set(triples))
    first = triples[min(triples)]
    if missing:
        count = len(next(iter(_experts(first.nodes).values())))
        raise InputError(
            f"no file of rank {some(missing)} of {world}, which alone held {count} experts of each "
            f"layer, {missing[0] * count} to {missing[0] * count + count - 1} first",
            "give every rank; a card's experts were measured nowhere else",
        )
    _refuse_doubled(triples)
    _refuse_other_tokens(triples)
    return {
        name: _gather(
            name, {rank: triple.nodes for rank, triple in sorted(triples.items())}, listed
        )
        for name, listed in _operators(first.nodes).items()
    }


def without_experts(triple: Triple) -> Triple:
    """The files without operators and experts."""
    left_out = {*_operators(triple.nodes), *_linears(triple.nodes)}
    return replace(
        triple,
        nodes={name: node for name, node in triple.nodes.items() if name not in left_out},
        modules=tuple(name for name in triple.modules if name not in left_out),
    )


def deal(operators: Mapping[str, Operator], *, cards: int, card: int) -> Dealt:
    """What one of so many cards holds.

    Raises:
        UsageError: the experts of an operator do not divide; names it and the numbers.
    """
    dealt = Dealt()
    for name, operator in operators.items():
        count = len(operator.experts)
        if count % cards:
            raise UsageError(
                f"{name}: {count} experts over {cards} cards",
                "use a number of cards that divides them",
            )
        own = range(card * count // cards, (card + 1) * count // cards)
        numbers = own if operator.listed else range(count)
        nothing = torch.zeros(1, 1)
        inside = [operator.experts[n].inside if n in own else nothing for n in numbers]
        dealt.nodes[name] = Node(inputs=(operator.hidden,), outputs=(operator.output, *inside))
        if operator.bounded:
            dealt.bounds.append(f"{name}|output 0")
        for place, number in enumerate(numbers):
            if number not in own:
                continue
            held = operator.experts[number]
            dealt.owners[f"{name}|output {1 + place}"] = held.rank
            for linear, node in held.linears.items():
                spelled = (
                    f"{name}.{linear}.{place}"
                    if operator.listed
                    else f"{name}.experts.{number}.{linear}"
                )
                dealt.nodes[spelled] = node
                dealt.owners.update({f"{spelled}|{key}": held.rank for key in node.tensors})
    return dealt


def _operators(nodes: Mapping[str, Node]) -> dict[str, bool]:
    """Operator -> whether its experts are listed under vLLM's names."""
    found = {}
    for name in _linears(nodes):
        operator = experts.inside_operator(name, nodes)
        assert operator is not None
        found[operator] = experts.listed(name) is not None
    return found


def _linears(nodes: Mapping[str, Node]) -> tuple[str, ...]:
    """Linears of experts that an operator runs."""
    return tuple(name for name in nodes if experts.inside_operator(name, nodes) is not None)


def _experts(nodes: Mapping[str, Node]) -> dict[str, dict[int, dict[str, Node]]]:
    """Operator -> number of an expert -> its linears, by list or by name."""
    found: dict[str, dict[int, dict[str, Node]]] = {}
    for name in _linears(nodes):
        operator = experts.inside_operator(name, nodes)
        assert operator is not None
        entry = experts.listed(name)
        parts = name.split(".")
        number, linear = (entry[2], entry[1]) if entry else (int(parts[-2]), parts[-1])
        found.setdefault(operator, {}).setdefault(number, {})[linear] = nodes[name]
    return found


def _weights(nodes: Mapping[str, Node]) -> tuple[float, ...]:
    """Maxima of the experts' weights, which tell whose they are."""
    return tuple(
        float(node.weight.max())
        for name in sorted(_linears(nodes))
        if (node := nodes[name]).weight is not None
    )


def _refuse_doubled(triples: Mapping[int, Triple]) -> None:
    seen: dict[object, int] = {}
    for rank, triple in sorted(triples.items()):
        held = _weights(triple.nodes)
        numbered = tuple(sorted(name for name in _linears(triple.nodes)))
        other = seen.setdefault((numbered, held), rank)
        if other != rank:
            raise InputError(
                f"rank {rank}: holds the experts of rank {other}, by the maxima of "
                f"{len(held)} weights",
                _SAME_RUN,
            )


def _refuse_other_tokens(triples: Mapping[int, Triple]) -> None:
    """Refuse a rank that saw other inputs in every operator, where all others saw the same.

    Every card's operator is shown every token, so a card alone with its inputs is of another run.
    """
    seen = {
        rank: tuple(float(triple.nodes[name].inputs[0].max()) for name in _operators(triple.nodes))
        for rank, triple in triples.items()
    }
    for rank, values in seen.items():
        others = {other: found for other, found in seen.items() if other != rank}
        alone = len(others) > 1 and len(set(others.values())) == 1
        (common,) = set(others.values()) if alone else ((),)
        if (
            alone
            and len(common) == len(values)
            and all(mine != its for mine, its in zip(values, common, strict=True))
        ):
            raise InputError(
                f"rank {rank}: saw other inputs than the {len(others)} other ranks, which agree, "
                f"in all of {len(values)} mixtures: {values[0]:.9g} for {common[0]:.9g} first",
                "it is of another run or model; " + _SAME_RUN,
            )


def _gather(name: str, ranks: Mapping[int, Mapping[str, Node]], listed: bool) -> Operator:
    found: dict[int, Held] = {}
    counts: dict[int, int] = {}
    for rank, nodes in ranks.items():
        if name not in nodes:
            raise InputError(f"node {name}: on rank {min(ranks)}, not on rank {rank}", _SAME_RUN)
        held, operator = _experts(nodes).get(name, {}), nodes[name]
        inside = operator.outputs[1:]
        counts[rank] = len(held)
        if listed and (
            sorted(held) != list(range(len(inside))) or counts[rank] != counts[min(ranks)]
        ):
            raise InputError(
                f"{name}: on rank {rank} {len(held)} experts and {len(inside)} maxima of what lies "
                f"inside them, on rank {min(ranks)} {counts[min(ranks)]} experts",
                _SAME_RUN,
            )
        for number, linears in held.items():
            whole = rank * len(held) + number if listed else number
            if set(linears) != set(_LISTS) and listed:
                raise InputError(
                    f"{name}: expert {number} on rank {rank} has {', '.join(sorted(linears))}",
                    _SAME_RUN,
                )
            if number >= len(inside):
                raise InputError(
                    f"{name}: expert {number} on rank {rank}, whose operator saw {len(inside)}",
                    _SAME_RUN,
                )
            if whole in found:
                raise InputError(
                    f"{name}: expert {whole} is on ranks {found[whole].rank} and {rank}", _SAME_RUN
                )
            found[whole] = Held(rank=rank, inside=inside[number], linears=linears)
    total = len(found) if listed else max(len(nodes[name].outputs) for nodes in ranks.values()) - 1
    lost = sorted(set(range(total)) - set(found))
    if lost:
        raise InputError(
            f"{name}: experts {some(lost)} of {total} are on no rank",
            "give the card that holds them: they were measured nowhere else",
        )
    outputs = [nodes[name].outputs[0] for nodes in ranks.values()]
    return Operator(
        hidden=torch.stack([nodes[name].inputs[0] for nodes in ranks.values()]).amax(dim=0),
        output=outputs[0]
        if len(outputs) == 1
        else bound_of_sum([value.max().item() for value in outputs]),
        bounded=len(outputs) > 1,
        experts=[found[number] for number in range(total)],
        listed=listed,
    )

"""Gaudi's measurements of many ranks merged into those of fewer, maximum by maximum.

Only statistics are merged; scales are derived again from the merged maxima, never from scales.
Ranks have to have measured the same nodes, with arrays of the same shapes, or the merge is refused
with the node and the rank.

The files do not say how the model was cut. They say enough for maxima: ranks whose weights have the
same maxima, all of them, hold copies, and any other ranks hold parts.

    inputs, weights     the maximum over the group, of copies and of parts
    outputs             the maximum too, but not of parts: there a row-parallel linear's output was
                        seen before the cards' products were added up, so it is bounded by the sum
                        of their maxima: |a + b| <= |a| + |b|
    two outputs         of vLLM's row-parallel linears are the largest summand M of all cards,
                        signs counted, and the sum S (row_parallel.py). All P parts in one rank have
                        S. n of them in each have, signs counted, a largest summand of at most n M
                        and at least the mean of all, S n / P: the larger magnitude bounds it. Where
                        no sum was seen, the first is a summand as above, and stands for both
    per channel         refused between parts, whose channels the files do not tell; the maximum of
                        copies
    experts             put together and dealt to the ranks of the result, where each rank holds
                        some of them (gaudi_experts.py)

One rank is expanded to several with the maxima of the whole, which bound those of its parts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quantflow.errors import InputError, StatisticsError, UnsupportedError, UsageError
from quantflow.formats.gaudi.experts import is_operator
from quantflow.formats.gaudi.row_parallel import is_row_parallel, is_sum
from quantflow.formats.gaudi.triple import MEASUREMENT, Node, Triple
from quantflow.measuring.merging.contributions import Outlier, contributor, outliers
from quantflow.measuring.merging.gaudi_experts import (
    Operator,
    are_spread,
    deal,
    gathered,
    without_experts,
)
from quantflow.measuring.merging.grouping import check_groups, some
from quantflow.numerics.statistics import bound_of_sum

_SAME_RUN = "give the ranks of one run, with one version of the toolkit and one configuration"


@dataclass(kw_only=True)
class MergeAccount:
    """The record of a merge beside its maxima.

    Attributes:
        maxima: `<node>|<tensor>` -> the rank that set its maximum.
        outliers: ranks that saw far more than the others of the group.
        bounds: `<node>|<tensor>` that bound what was not measured.
    """

    maxima: dict[str, int] = field(default_factory=dict)
    outliers: list[Outlier] = field(default_factory=list)
    bounds: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, eq=False)
class Merged:
    """The merge of one group.

    Attributes:
        ranks: numbers of the ranks that were merged, ascending.
        missing: ranks of the group that were not there.
        parts: number of different parts of the model that they hold; 1 where all hold copies.
        expanded: whether one rank was made into several.
    """

    triple: Triple
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    parts: int
    account: MergeAccount
    expanded: bool = False


def unify_triples(
    triples: Mapping[int, Triple],
    groups: Sequence[Sequence[int]],
    *,
    world: int | None = None,
    allow_missing: bool = False,
    expert_parallel: bool | None = None,
) -> list[Merged]:
    """Merge the measurements of each group of ranks.

    Args:
        triples: rank -> its measurement.
        groups: ranks of each group; group i becomes rank i, and where there is one group, rank -1.
        world: number of ranks that measured; None means that all are given.
        allow_missing: ranks may be missing, where every rank holds a copy of the model.
        expert_parallel: whether a rank holds some of the experts, or a part of each; None where the
            files say it, or nobody does.

    Raises:
        UsageError: the groups do not hold every rank exactly once, or differ in size; experts do
            not divide, or it is not known how ranks hold them.
        InputError: scales instead of maxima; ranks with other nodes or modules; a rank is missing
            that is not a copy of another, or all of a group are.
        StatisticsError: arrays of different shapes.
        UnsupportedError: a maximum per channel of ranks that hold parts.
    """
    world = len(triples) if world is None else world
    check_groups(groups, world)
    operators: Mapping[str, Operator] = {}
    if are_spread(triples, told=expert_parallel):
        operators = gathered(triples, world=world)
        triples = {rank: without_experts(triple) for rank, triple in triples.items()}
    first = min(triples)
    for rank, triple in triples.items():
        if triple.mode != MEASUREMENT:
            raise InputError(
                f"rank {rank}: holds scales, and the maximum of scales is the scale of nothing",
                "merge the measurements, and derive scales from them again",
            )
        _refuse_other_nodes((rank, triple), (first, triples[first]))
    holds = _parts(triples)
    _refuse_missing(triples, groups, world=world, holds=holds, allowed=allow_missing)
    sums = _sums(triples, holds=holds)
    merged = []
    for index, group in enumerate(groups):
        members = {rank: triples[rank] for rank in sorted(group) if rank in triples}
        triple, account = _merge(
            members, holds=holds, sums=sums, local_rank=-1 if len(groups) == 1 else index
        )
        missing = tuple(sorted(set(group) - set(members)))
        parts = len({holds[rank] for rank in members})
        one = Merged(
            triple=triple, ranks=tuple(members), missing=missing, parts=parts, account=account
        )
        merged.append(_with_experts(one, operators, cards=len(groups), card=index))
    return merged


def expand_triple(
    triple: Triple, cards: int, *, expert_parallel: bool | None = None
) -> list[Merged]:
    """The files of so many cards, from those of one rank.

    The maxima of the whole bound those of any part, but for the output of a row-parallel linear
    before the sum over cards, of which nothing is known. Experts are dealt with `expert_parallel`;
    else each card has all of them.

    Raises:
        UsageError: fewer than two cards; a mixture of which it is not said how cards hold its
            experts, or whose experts do not divide.
        InputError: scales instead of maxima.
    """
    if cards < 2:
        raise UsageError(f"expand to {cards} ranks", "give 2 or more")
    if triple.mode != MEASUREMENT:
        raise InputError("the files hold scales", "give the files of the measurement")
    operators: Mapping[str, Operator] = gathered({0: triple}, world=1)
    if operators and expert_parallel is None:
        raise UsageError(
            f"expand to {cards} ranks: {len(operators)} mixtures, and it is not said whether a "
            "card is to hold some of the experts or a part of each",
            "give --expert-parallel or --no-expert-parallel",
        )
    if expert_parallel and not operators:
        raise UsageError("unify: --expert-parallel, and the files have no experts", "leave it out")
    dealt = operators if expert_parallel else {}
    rest = without_experts(triple) if expert_parallel else triple
    return [
        _with_experts(
            Merged(
                triple=replace(rest, nodes=_with_one_output(rest.nodes), local_rank=card),
                ranks=(0,),
                missing=(),
                parts=1,
                account=MergeAccount(),
                expanded=True,
            ),
            dealt,
            cards=cards,
            card=card,
        )
        for card in range(cards)
    ]


def _with_experts(
    merged: Merged, operators: Mapping[str, Operator], *, cards: int, card: int
) -> Merged:
    """A merged rank with its share of the experts."""
    if not operators:
        return merged
    dealt = deal(operators, cards=cards, card=card)
    triple, account = merged.triple, merged.account
    modules = (*triple.modules, *sorted(dealt.nodes)) if triple.modules else ()
    return replace(
        merged,
        triple=replace(triple, nodes={**triple.nodes, **dealt.nodes}, modules=modules),
        account=replace(
            account,
            maxima={**account.maxima, **dealt.owners},
            bounds=[*account.bounds, *dealt.bounds],
        ),
    )


def _parts(triples: Mapping[int, Triple]) -> dict[int, int]:
    """Rank -> the part of the model that it holds, from 0; all 0 where every rank holds a copy."""
    seen: dict[object, int] = {}
    part_of_rank = {}
    for rank, triple in sorted(triples.items()):
        weights = [
            node.weight for _, node in sorted(triple.nodes.items()) if node.weight is not None
        ]
        # without weights nobody is a copy
        recognised = tuple(tuple(weight.flatten().tolist()) for weight in weights) or rank
        part_of_rank[rank] = seen.setdefault(recognised, len(seen))
    return part_of_rank


def _sums(triples: Mapping[int, Triple], *, holds: Mapping[int, int]) -> frozenset[str]:
    """Row-parallel linears whose second output is the sum over the ranks' parts."""
    if len(set(holds.values())) == 1:
        return frozenset()
    first = next(iter(triples.values()))
    return frozenset(
        name
        for name in first.nodes
        if is_row_parallel(name)
        and is_sum(triple.nodes[name].outputs for triple in triples.values())
    )


def _with_one_output(nodes: Mapping[str, Node]) -> dict[str, Node]:
    """The nodes of one rank, in which a row-parallel linear added up nothing."""
    return {
        name: replace(node, outputs=(node.outputs[0], node.outputs[0]))
        if is_row_parallel(name) and len(node.outputs) == 2
        else node
        for name, node in nodes.items()
    }


def _refuse_missing(
    triples: Mapping[int, Triple],
    groups: Sequence[Sequence[int]],
    *,
    world: int,
    holds: Mapping[int, int],
    allowed: bool,
) -> None:
    missing = sorted(set(range(world)) - set(triples))
    if not missing:
        return
    if not allowed:
        raise InputError(
            f"no file of rank {some(missing)} of {world}",
            "give every rank, or --allow-missing for copies",
        )
    if set(holds.values()) != {0} or len(triples) == 1:
        why = (
            "one rank alone is there"
            if len(triples) == 1
            else "the others hold parts of the model, not copies"
        )
        raise InputError(
            f"no file of rank {some(missing)} of {world}, and {why}",
            "a part cannot be left out; give every rank",
        )
    for index, group in enumerate(groups):
        if not set(group) & set(triples):
            raise InputError(
                f"group {index} ({some(group)}): none of its ranks is there", "measure them"
            )


def _refuse_other_nodes(one: tuple[int, Triple], other: tuple[int, Triple]) -> None:
    (rank, triple), (first, reference) = one, other
    for what, ours, theirs in (
        ("node", triple.nodes, reference.nodes),
        ("module", triple.modules, reference.modules),
    ):
        differing = sorted(set(ours) ^ set(theirs))
        if differing:
            here, there = (rank, first) if differing[0] in ours else (first, rank)
            raise InputError(
                f"{what} {differing[0]}: on rank {here}, not on rank {there} ({len(differing)} "
                "such)",
                _SAME_RUN,
            )


def _merge(
    members: Mapping[int, Triple],
    *,
    holds: Mapping[int, int],
    sums: frozenset[str],
    local_rank: int,
) -> tuple[Triple, MergeAccount]:
    """Merge the ranks of one group."""
    first = next(iter(members.values()))
    account = MergeAccount()
    held = {rank: holds[rank] for rank in members}
    parts = len(set(holds.values()))
    nodes = {}
    for name in first.nodes:
        seen = {rank: triple.nodes[name] for rank, triple in members.items()}
        _refuse_other_shapes(name, seen, parts=len(set(held.values())))
        node = _merge_node(name, seen, account=account)
        if is_row_parallel(name) or is_operator(node):
            added = name in sums and not is_operator(node)
            node = _added(name, node, seen, held=held, parts=parts, added=added, account=account)
        nodes[name] = node
    samples = [triple.samples for triple in members.values() if triple.samples is not None]
    counted = sum(samples) if len(samples) == len(members) else None
    return Triple(
        nodes=nodes, local_rank=local_rank, samples=counted, modules=first.modules
    ), account


def _refuse_other_shapes(name: str, nodes: Mapping[int, Node], *, parts: int) -> None:
    first = next(iter(nodes.values()))
    for rank, node in nodes.items():
        ours, theirs = (
            {key: list(value.shape) for key, value in part.tensors.items()}
            for part in (first, node)
        )
        if ours != theirs:
            key = min(key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key))
            raise StatisticsError(
                f"{name}: {key} is {theirs.get(key)} on rank {rank}, {ours.get(key)} on rank "
                f"{min(nodes)}",
                _SAME_RUN,
            )
    wide = [key for key, value in first.tensors.items() if value.numel() > 1]
    if wide and parts > 1:
        raise UnsupportedError(
            f"{name}: {wide[0]} has a maximum per channel, and the files do not say which "
            "channels a rank holds",
            "measure with the observer maxabs, or with `quantflow measure`, which writes down "
            "how tensors are split",
        )


def _merge_node(name: str, nodes: Mapping[int, Node], *, account: MergeAccount) -> Node:
    """The maxima of the merged rank, and note in `account` who decided them."""
    merged: dict[str, Tensor] = {}
    for key in next(iter(nodes.values())).tensors:
        seen = {rank: node.tensors[key] for rank, node in nodes.items()}
        largest = {rank: value.max().item() for rank, value in seen.items()}
        merged[key] = torch.stack(list(seen.values())).amax(dim=0)
        account.maxima[f"{name}|{key}"] = contributor(largest)
        account.outliers.extend(outliers(f"{name}|{key}", largest) if len(largest) > 2 else [])
    inputs, outputs = (
        tuple(value for key, value in merged.items() if key.startswith(part))
        for part in ("input", "output")
    )
    return Node(inputs=inputs, outputs=outputs, weight=merged.get("weight"))


def _added(
    name: str,
    merged: Node,
    nodes: Mapping[int, Node],
    *,
    held: Mapping[int, int],
    parts: int,
    added: bool,
    account: MergeAccount,
) -> Node:
    """A node whose output the cards add up, with the outputs of its merged rank.

    Args:
        name: its name.
        merged: its maxima.
        nodes: rank of the group -> its node.
        held: rank of the group -> the part that it holds.
        parts: parts of the whole model.
        added: whether the second output is the sum over all parts.
        account: gets the bounds.
    """
    if not merged.outputs:
        return merged
    count = len(set(held.values()))
    first, *others = merged.outputs
    if count > 1 and added and count == parts:
        first = others[0]
    elif count > 1:
        first = _bound({rank: node.outputs[0] for rank, node in nodes.items()}, held)
        if added:
            mean = bound_of_sum([others[0].item() * count / parts])
            first = torch.maximum(first, mean)
        account.bounds.append(f"{name}|output 0")
    if len(others) == 1 and not added and is_row_parallel(name):
        others = [first]
    return replace(merged, outputs=(first, *others))


def _bound(outputs: Mapping[int, Tensor], held: Mapping[int, int]) -> Tensor:
    """The sum over the parts of the largest that any of its copies saw, [1, 1], rounded up."""
    largest: dict[int, float] = {}
    for rank, value in outputs.items():
        largest[held[rank]] = max(largest.get(held[rank], 0.0), value.max().item())
    return bound_of_sum(largest.values())

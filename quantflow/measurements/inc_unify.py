"""Gaudi's measurements of many ranks merged into those of fewer, maximum by maximum.

Only statistics are merged; scales are derived again from the merged maxima, never from scales. Ranks have to have measured
the same nodes, with arrays of the same shapes, or the merge is refused with the node and the rank.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quantflow.errors import InputError, StatisticsError, UnsupportedError
from quantflow.measurements.inc import MEASUREMENT, Node, Triple
from quantflow.measurements.unify import check_groups

_SAME_RUN = "give the ranks of one run, with one version of the toolkit and one configuration"


def unify_triples(triples: Mapping[int, Triple], groups: Sequence[Sequence[int]]) -> list[Triple]:
    """Merge the measurements of each group of ranks: the elementwise maximum of every array.

    Args:
        triples: rank -> what it measured, every rank from 0 on.
        groups: ranks; group i becomes rank i, and where there is one group, rank -1.

    Raises:
        UsageError: the groups do not hold every rank exactly once, or differ in size.
        InputError: scales instead of maxima; ranks with other nodes or modules.
        StatisticsError: arrays of different shapes.
        UnsupportedError: a maximum per channel: the files do not say whether ranks hold the same channels or a part each.
    """
    check_groups(groups, len(triples))
    for rank, triple in triples.items():
        if triple.mode != MEASUREMENT:
            raise InputError(
                f"rank {rank}: holds scales, and the maximum of scales is the scale of nothing",
                "merge the measurements, and derive scales from them again",
            )
        _refuse_other_nodes(rank, triple, triples[0])
    single = len(groups) == 1
    return [
        _merge({rank: triples[rank] for rank in sorted(group)}, local_rank=-1 if single else index)
        for index, group in enumerate(groups)
    ]


def _refuse_other_nodes(rank: int, triple: Triple, first: Triple) -> None:
    for what, ours, theirs in (("node", triple.nodes, first.nodes), ("module", triple.modules, first.modules)):
        differing = sorted(set(ours) ^ set(theirs))
        if differing:
            where = f"rank {rank}" if differing[0] in ours else "rank 0"
            missing = "rank 0" if differing[0] in ours else f"rank {rank}"
            raise InputError(f"{what} {differing[0]}: on {where}, not on {missing} ({len(differing)} such)", _SAME_RUN)


def _merge(members: Mapping[int, Triple], *, local_rank: int) -> Triple:
    first = next(iter(members.values()))
    samples = [triple.samples for triple in members.values() if triple.samples is not None]
    nodes = {name: _merge_node(name, {rank: triple.nodes[name] for rank, triple in members.items()}) for name in first.nodes}
    return Triple(
        nodes=nodes,
        local_rank=local_rank,
        samples=sum(samples) if len(samples) == len(members) else None,
        modules=first.modules,
    )


def _merge_node(name: str, nodes: Mapping[int, Node]) -> Node:
    first = next(iter(nodes.values()))
    for rank, node in nodes.items():
        ours, theirs = ({key: list(value.shape) for key, value in part.tensors.items()} for part in (first, node))
        if ours != theirs:
            key = min(key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key))
            raise StatisticsError(
                f"{name}: {key} is {theirs.get(key)} on rank {rank}, {ours.get(key)} on rank {min(nodes)}", _SAME_RUN
            )
    wide = [key for key, value in first.tensors.items() if value.numel() > 1]
    if wide and len(nodes) > 1:
        raise UnsupportedError(
            f"{name}: {wide[0]} has a maximum per channel, and the files do not say which channels a rank holds",
            "measure with the observer maxabs, or with `quantflow measure`, which writes down how tensors are split",
        )

    def largest(values: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(values)).amax(dim=0)

    count, outputs = len(first.inputs), len(first.outputs)
    weights = [node.weight for node in nodes.values() if node.weight is not None]
    return Node(
        inputs=tuple(largest([node.inputs[index] for node in nodes.values()]) for index in range(count)),
        outputs=tuple(largest([node.outputs[index] for node in nodes.values()]) for index in range(outputs)),
        weight=largest(weights) if weights else None,
    )

"""Gaudi's ranks merged: the maxima are right, the order does not matter, and ranks that disagree are refused."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.errors import InputError, StatisticsError, UnsupportedError, UsageError
from quantflow.measurements.inc import SCALES, Node, Triple
from quantflow.measurements.inc_unify import unify_triples

Q, QK, EXPERT = "l.0.q_proj", "l.0.matmul_qk", "l.0.experts.3"


def cell(value: float) -> torch.Tensor:
    return torch.tensor([[float(value)]])


def rank(value: float, *, samples: int | None = None, modules=()) -> Triple:
    nodes = {
        Q: Node(inputs=(cell(value),), outputs=(cell(10 - value),), weight=cell(value % 3)),
        QK: Node(inputs=(cell(1), cell(value))),
    }
    return Triple(nodes=nodes, local_rank=0, samples=samples, modules=modules)


def inputs(triple: Triple) -> list[float]:
    return [triple.nodes[Q].inputs[0].item(), triple.nodes[Q].outputs[0].item(), triple.nodes[Q].weight.item()]


EIGHT = {index: rank(index) for index in range(8)}


@pytest.mark.parametrize(
    ("groups", "expected", "local_ranks"),
    [
        ([range(8)], [[7, 10, 2]], [-1]),
        ([range(4), range(4, 8)], [[3, 10, 2], [7, 6, 2]], [0, 1]),
        ([[0, 7], [1, 6], [2, 5], [3, 4]], [[7, 10, 1], [6, 9, 1], [5, 8, 2], [4, 7, 1]], [0, 1, 2, 3]),
        ([[index] for index in range(8)], [[i, 10 - i, i % 3] for i in range(8)], list(range(8))),
    ],
)
def test_eight_cards_in_one_two_four_and_eight_groups(groups, expected, local_ranks):
    found = unify_triples(EIGHT, [list(group) for group in groups])
    assert [inputs(triple) for triple in found] == expected
    assert [triple.local_rank for triple in found] == local_ranks
    assert [triple.nodes[QK].inputs[1].item() for triple in found] == [row[0] for row in expected]


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1e6, width=32), min_size=3, max_size=3))
def test_neither_order_nor_repetition_changes_a_maximum(values):
    found = set()
    for order in itertools.permutations(values):
        (merged,) = unify_triples({i: rank(value) for i, value in enumerate(order)}, [[0, 1, 2]])
        found.add(tuple(inputs(merged)))
    assert len(found) == 1
    assert next(iter(found))[0] == torch.tensor(max(values)).item()


def test_sample_counts_are_added_where_every_rank_has_one():
    assert unify_triples({0: rank(1, samples=3), 1: rank(2, samples=4)}, [[0, 1]])[0].samples == 7
    assert unify_triples({0: rank(1, samples=3), 1: rank(2)}, [[0, 1]])[0].samples is None


@pytest.mark.parametrize("groups", [[[0, 1, 2]], [[0, 1, 2, 2]], [[0, 1], [1, 2], [2, 3]], [[0, 1, 2], [3]], [[0, 1, 2, 9]]])
def test_groups_that_miss_repeat_or_differ_are_refused(groups):
    with pytest.raises(UsageError):
        unify_triples({index: EIGHT[index] for index in range(4)}, groups)


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_node_on_one_rank_alone_is_refused_with_node_and_rank(where):
    ranks = {index: rank(index) for index in range(3)}
    ranks[where] = Triple(nodes={**ranks[where].nodes, EXPERT: Node(inputs=(cell(1),))})
    with pytest.raises(InputError, match=rf"node {EXPERT}: on rank {where}, not on rank {1 if where == 0 else 0}"):
        unify_triples(ranks, [[0, 1, 2]])
    ranks = {index: rank(index) for index in range(3)}
    ranks[where] = Triple(nodes={Q: ranks[where].nodes[Q]})
    with pytest.raises(InputError, match=rf"node {QK}: on rank .*, not on rank {where}"):
        unify_triples(ranks, [[0, 1, 2]])


def test_ranks_that_looked_at_other_modules_are_refused():
    with pytest.raises(InputError, match="module lm_head: on rank 1, not on rank 0"):
        unify_triples({0: rank(1, modules=(Q, QK)), 1: rank(1, modules=(Q, QK, "lm_head"))}, [[0, 1]])


def test_arrays_of_other_shapes_are_refused_with_node_and_rank():
    other = Triple(nodes={**rank(1).nodes, QK: Node(inputs=(cell(1),))})
    with pytest.raises(StatisticsError, match=rf"{QK}: input 1 is None on rank 1"):
        unify_triples({0: rank(0), 1: other}, [[0, 1]])


@pytest.mark.parametrize("part", ["inputs", "outputs", "weight"])
def test_a_maximum_per_channel_is_not_merged_by_guess(part):
    wide = torch.tensor([[1.0], [2.0]])
    parts = {"inputs": (cell(1),), "outputs": (cell(1),), "weight": cell(1)} | {part: wide if part == "weight" else (wide,)}
    ranks = {index: Triple(nodes={Q: Node(**parts)}) for index in range(2)}
    with pytest.raises(UnsupportedError, match=rf"{Q}: .* has a maximum per channel"):
        unify_triples(ranks, [[0, 1]])
    assert unify_triples(ranks, [[0], [1]])[1].nodes[Q].tensors.keys() == ranks[0].nodes[Q].tensors.keys()


def test_scales_are_never_merged():
    scales = Triple(nodes={Q: Node(inputs=(torch.tensor(1.0),), weight=torch.tensor([1.0, 2.0]))}, mode=SCALES)
    with pytest.raises(InputError, match="rank 1: holds scales"):
        unify_triples({0: rank(0), 1: scales}, [[0, 1]])

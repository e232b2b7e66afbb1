"""Gaudi's ranks merged: right maxima in any order; ranks that disagree are refused."""

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.errors import InputError, StatisticsError, UnsupportedError, UsageError
from quantflow.formats.gaudi.triple import SCALES, Node, Triple
from quantflow.measuring.merging.gaudi_files import expand_triple, unify_triples

Q, QK, EXPERT = "l.0.q_proj", "l.0.matmul_qk", "l.0.experts.3"


def cell(value: float) -> torch.Tensor:
    return torch.tensor([[float(value)]])


def rank(value: float, *, samples: int | None = None, modules=()) -> Triple:
    nodes = {
        Q: Node(inputs=(cell(value),), outputs=(cell(10 - value),), weight=cell(value % 3)),
        QK: Node(inputs=(cell(1), cell(value))),
    }
    return Triple(nodes=nodes, local_rank=0, samples=samples, modules=modules)


def merge(triples, groups, **options) -> list[Triple]:
    return [merged.triple for merged in unify_triples(triples, groups, **options)]


def inputs(triple: Triple) -> list[float]:
    return [
        triple.nodes[Q].inputs[0].item(),
        triple.nodes[Q].outputs[0].item(),
        triple.nodes[Q].weight.item(),
    ]


EIGHT = {index: rank(index) for index in range(8)}


@pytest.mark.parametrize(
    ("groups", "expected", "local_ranks"),
    [
        ([range(8)], [[7, 10, 2]], [-1]),
        ([range(4), range(4, 8)], [[3, 10, 2], [7, 6, 2]], [0, 1]),
        (
            [[0, 7], [1, 6], [2, 5], [3, 4]],
            [[7, 10, 1], [6, 9, 1], [5, 8, 2], [4, 7, 1]],
            [0, 1, 2, 3],
        ),
        ([[index] for index in range(8)], [[i, 10 - i, i % 3] for i in range(8)], list(range(8))),
    ],
)
def test_eight_cards_in_one_two_four_and_eight_groups(groups, expected, local_ranks):
    found = merge(EIGHT, [list(group) for group in groups])
    assert [inputs(triple) for triple in found] == expected
    assert [triple.local_rank for triple in found] == local_ranks
    assert [triple.nodes[QK].inputs[1].item() for triple in found] == [row[0] for row in expected]


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1e6, width=32), min_size=3, max_size=3))
def test_neither_order_nor_repetition_changes_a_maximum(values):
    found = set()
    for order in itertools.permutations(values):
        (merged,) = merge({i: rank(value) for i, value in enumerate(order)}, [[0, 1, 2]])
        found.add(tuple(inputs(merged)))
    assert len(found) == 1
    assert next(iter(found))[0] == torch.tensor(max(values)).item()


def test_sample_counts_are_added_where_every_rank_has_one():
    assert merge({0: rank(1, samples=3), 1: rank(2, samples=4)}, [[0, 1]])[0].samples == 7
    assert merge({0: rank(1, samples=3), 1: rank(2)}, [[0, 1]])[0].samples is None


@pytest.mark.parametrize(
    "groups",
    [[[0, 1, 2]], [[0, 1, 2, 2]], [[0, 1], [1, 2], [2, 3]], [[0, 1, 2], [3]], [[0, 1, 2, 9]]],
)
def test_groups_that_miss_repeat_or_differ_are_refused(groups):
    with pytest.raises(UsageError):
        unify_triples({index: EIGHT[index] for index in range(4)}, groups)


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_node_on_one_rank_alone_is_refused_with_node_and_rank(where):
    ranks = {index: rank(index) for index in range(3)}
    ranks[where] = Triple(nodes={**ranks[where].nodes, EXPERT: Node(inputs=(cell(1),))})
    with pytest.raises(
        InputError, match=rf"node {EXPERT}: on rank {where}, not on rank {1 if where == 0 else 0}"
    ):
        unify_triples(ranks, [[0, 1, 2]])
    ranks = {index: rank(index) for index in range(3)}
    ranks[where] = Triple(nodes={Q: ranks[where].nodes[Q]})
    with pytest.raises(InputError, match=rf"node {QK}: on rank .*, not on rank {where}"):
        unify_triples(ranks, [[0, 1, 2]])


def test_ranks_that_looked_at_other_modules_are_refused():
    with pytest.raises(InputError, match="module lm_head: on rank 1, not on rank 0"):
        unify_triples(
            {0: rank(1, modules=(Q, QK)), 1: rank(1, modules=(Q, QK, "lm_head"))}, [[0, 1]]
        )


def test_arrays_of_other_shapes_are_refused_with_node_and_rank():
    other = Triple(nodes={**rank(1).nodes, QK: Node(inputs=(cell(1),))})
    with pytest.raises(StatisticsError, match=rf"{QK}: input 1 is None on rank 1"):
        unify_triples({0: rank(0), 1: other}, [[0, 1]])


@pytest.mark.parametrize("part", ["inputs", "outputs"])
def test_a_maximum_per_channel_is_merged_between_copies_and_refused_between_parts(part):
    """Upstream took the maximum of channel 0 alone, and of equal positions on all cards."""

    def one(first: float, second: float, weight: float) -> Triple:
        wide = (torch.tensor([[first], [second]]),)
        return Triple(
            nodes={
                Q: Node(
                    **{"inputs": (cell(1),), "outputs": (cell(1),), part: wide}, weight=cell(weight)
                )
            }
        )

    (merged,) = merge({0: one(1, 5, 3), 1: one(4, 2, 3)}, [[0, 1]])
    assert getattr(merged.nodes[Q], part)[0].tolist() == [[4], [5]]
    parts = {0: one(1, 5, 3), 1: one(4, 2, 3.5)}
    with pytest.raises(UnsupportedError, match=rf"{Q}: .* has a maximum per channel"):
        unify_triples(parts, [[0, 1]])
    assert merge(parts, [[0], [1]])[1].nodes[Q].tensors.keys() == parts[0].nodes[Q].tensors.keys()


def test_weights_per_channel_of_parts_are_refused():
    ranks = {
        i: Triple(nodes={Q: Node(inputs=(cell(1),), weight=torch.tensor([[1.0], [2.0 + i]]))})
        for i in range(2)
    }
    with pytest.raises(UnsupportedError, match=rf"{Q}: weight has a maximum per channel"):
        unify_triples(ranks, [[0, 1]])


def test_without_weights_nobody_is_taken_for_a_copy():
    wide = torch.tensor([[1.0], [2.0]])
    ranks = {i: Triple(nodes={QK: Node(inputs=(wide, cell(1)))}) for i in range(2)}
    with pytest.raises(UnsupportedError, match="maximum per channel"):
        unify_triples(ranks, [[0, 1]])


DOWN = "l.0.mlp.down_proj"


def summand(weight: float, *outputs: float, node: str = DOWN) -> Triple:
    return Triple(
        nodes={
            node: Node(inputs=(cell(1),), outputs=tuple(map(cell, outputs)), weight=cell(weight))
        }
    )


def test_outputs_that_were_seen_before_the_sum_over_cards_are_bounded_by_the_sum_of_their_maxima():
    """[3, 4] on one card and [4, 3] on the other add up to 7, which neither maximum bounds."""
    found = unify_triples({0: summand(1, 4), 1: summand(2, 4)}, [[0, 1]])[0]
    assert found.triple.nodes[DOWN].outputs[0].item() == 8 and found.parts == 2
    assert found.account.bounds == [f"{DOWN}|output 0"]
    assert found.triple.nodes[DOWN].weight.item() == 2
    column = unify_triples({0: summand(1, 4, node=Q), 1: summand(2, 4, node=Q)}, [[0, 1]])[0]
    assert column.triple.nodes[Q].outputs[0].item() == 4 and not column.account.bounds


def test_copies_of_a_part_are_no_further_summands():
    """Two replicas of two cards: ranks 0 and 2 hold the same part."""
    ranks = {0: summand(1, 4), 1: summand(2, 5), 2: summand(1, 6), 3: summand(2, 1)}
    (found,) = unify_triples(ranks, [[0, 1, 2, 3]])
    assert found.triple.nodes[DOWN].outputs[0].item() == 6 + 5 and found.parts == 2
    of_copies = unify_triples(ranks, [[0, 2], [1, 3]])
    assert [one.triple.nodes[DOWN].outputs[0].item() for one in of_copies] == [6, 5]
    assert [one.parts for one in of_copies] == [1, 1] and not of_copies[0].account.bounds


def test_where_the_sum_itself_was_seen_it_is_taken_for_all_parts_and_the_bound_for_some():
    ranks = {index: summand(index, 4, 5) for index in range(4)}
    (whole,) = merge(ranks, [[0, 1, 2, 3]])
    assert [value.item() for value in whole.nodes[DOWN].outputs] == [5, 5]
    halves = unify_triples(ranks, [[0, 1], [2, 3]])
    assert [value.item() for value in halves[0].triple.nodes[DOWN].outputs] == [8, 5]
    assert halves[0].account.bounds == [f"{DOWN}|output 0"]


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]])
def test_a_sum_of_negative_summands_is_bounded_by_the_share_of_a_card(groups):
    """Summands -5, -5, 1 and 1: the largest with its sign is 1, the sum -8.

    Pairs have -10 and 2, the larger 2, or -4 and -4, whose magnitude twice 1 does not bound.
    """
    ranks = {index: summand(index, 1, 8) for index in range(4)}
    for found in unify_triples(ranks, groups):
        assert [value.item() for value in found.triple.nodes[DOWN].outputs] == [4, 8]


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(-9, 9), min_size=3, max_size=3), min_size=4, max_size=4))
def test_the_bound_of_vllms_first_output_holds_whatever_the_cards_summands_were(summands):
    """Summands of three elements, and what the toolkit writes of them on 4, 2 and 1 cards."""

    def outputs(cards: list[list[int]]) -> tuple[int, int]:
        columns = list(zip(*cards, strict=True))
        return max(abs(max(column)) for column in columns), max(abs(sum(c)) for c in columns)

    measured = outputs(summands)
    ranks = {index: summand(index + 1, *measured) for index in range(4)}
    for groups in ([[0, 1], [2, 3]], [[0, 3], [1, 2]]):
        cards = [
            [sum(pair) for pair in zip(summands[a], summands[b], strict=True)] for a, b in groups
        ]
        for found in merge(ranks, groups):
            first, second = (value.item() for value in found.nodes[DOWN].outputs)
            if measured[1]:  # a sum of zeros looks like memory that nobody wrote
                assert second == measured[1] == outputs(cards)[1]
                assert first >= outputs(cards)[0]
    (whole,) = merge(ranks, [[0, 1, 2, 3]])
    if measured[1]:
        assert [value.item() for value in whole.nodes[DOWN].outputs] == [measured[1]] * 2


@pytest.mark.parametrize("garbage", [(0, 0), (7, 9), (4.6e-41, 4.6e-41), (3e38, 0)])
def test_a_second_output_that_nobody_wrote_is_not_taken_for_the_sum(garbage):
    """Shared experts add nothing up, and vLLM's second output is memory of any value then."""
    node = "model.layers.1.mlp.shared_experts.down_proj"
    ranks = {i: summand(i, 4 + i, value, node=node) for i, value in enumerate(garbage)}
    found = unify_triples(ranks, [[0, 1]])[0]
    assert [value.item() for value in found.triple.nodes[node].outputs] == [9, 9]
    kept = unify_triples(ranks, [[0], [1]])
    assert [one.triple.nodes[node].outputs[1].item() for one in kept] == [4, 5]
    one, two = expand_triple(summand(1, 4, garbage[0], node=node), 2)
    for each in (one, two):
        assert [value.item() for value in each.triple.nodes[node].outputs] == [4, 4]


@settings(max_examples=50)
@given(st.lists(st.floats(0, 2.0**20, width=32), min_size=2, max_size=6))
def test_the_bound_is_not_below_the_exact_sum(values):
    ranks = {index: summand(index + 1, value) for index, value in enumerate(values)}
    (found,) = merge(ranks, [list(ranks)])
    exact = sum(Fraction(value) for value in values)
    assert (
        exact <= Fraction(found.nodes[DOWN].outputs[0].item()) <= exact * (1 + Fraction(1, 2**22))
    )


def test_who_set_a_maximum_and_who_looks_unlike_the_others_is_told():
    (found,) = unify_triples({0: rank(1), 1: rank(1.5), 2: rank(40)}, [[0, 1, 2]])
    assert found.account.maxima[f"{Q}|input 0"] == 2 and found.account.maxima[f"{QK}|input 0"] == 0
    assert {(one.key, one.rank, one.median) for one in found.account.outliers} >= {
        (f"{Q}|input 0", 2, 1.5)
    }
    assert found.ranks == (0, 1, 2) and found.missing == ()


def test_a_missing_card_is_refused_unless_every_card_holds_a_copy_and_somebody_allows_it():
    copies = {0: rank(3), 2: rank(6), 3: rank(0)}  # the weights' maxima are equal
    with pytest.raises(InputError, match="no file of rank 1 of 4; give every rank"):
        unify_triples(copies, [[0, 1], [2, 3]], world=4)
    found = unify_triples(copies, [[0, 1], [2, 3]], world=4, allow_missing=True)
    assert [one.ranks for one in found] == [(0,), (2, 3)] and [one.missing for one in found] == [
        (1,),
        (),
    ]
    parts = {0: rank(1), 2: rank(2), 3: rank(3)}
    with pytest.raises(InputError, match="rank 1 of 4, and the others hold parts of the model"):
        unify_triples(parts, [[0, 1], [2, 3]], world=4, allow_missing=True)
    with pytest.raises(InputError, match="one rank alone is there"):
        unify_triples({3: rank(3)}, [[0, 1, 2, 3]], world=4, allow_missing=True)
    with pytest.raises(InputError, match=r"group 0 \(0, 1\): none of its ranks"):
        unify_triples({2: rank(3), 3: rank(3)}, [[0, 1], [2, 3]], world=4, allow_missing=True)


def test_scales_are_never_merged():
    scales = Triple(
        nodes={Q: Node(inputs=(torch.tensor(1.0),), weight=torch.tensor([1.0, 2.0]))}, mode=SCALES
    )
    with pytest.raises(InputError, match="rank 1: holds scales"):
        unify_triples({0: rank(0), 1: scales}, [[0, 1]])

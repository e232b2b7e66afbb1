"""Experts that cards hold some of each, in Gaudi's files: put together, dealt, wrong sets refused.

The cards are simulated: a card's numbers follow from the numbers of its experts, so that what an
expert has to have on any card is known beforehand.
"""

from dataclasses import replace

import pytest
import torch

from quantflow.errors import InputError, UsageError
from quantflow.formats.gaudi.triple import SCALES, Node, Triple
from quantflow.measuring.merging.gaudi_files import expand_triple, unify_triples

LAYERS, EXPERTS = 3, 256
SHARED = "model.layers.{}.self_attn.o_proj"
QUERIES = "model.layers.{}.self_attn.fused_qkv_a_proj"


def cell(value: float) -> torch.Tensor:
    return torch.tensor([[float(value)]])


def operator(layer: int) -> str:
    return f"model.layers.{layer}.mlp.experts.moe_op"


def hidden(layer: int) -> float:
    return 30.0 + layer


def inside(layer: int, expert: int) -> float:
    return 1 + layer + expert / 8


def weight(layer: int, expert: int, name: str) -> float:
    return 1 + layer / 4 + expert / 1024 + (0.5 if name == "w2_list" else 0)


def card(rank: int, world: int, *, experts: int = EXPERTS, layers: int = LAYERS) -> Triple:
    """One card of a DeepSeek-like model in vLLM's names, which cuts attention as well."""
    own = range(rank * experts // world, (rank + 1) * experts // world)
    nodes = {}
    for layer in range(layers):
        nodes[SHARED.format(layer)] = Node(
            inputs=(cell(2 + rank),), outputs=(cell(4), cell(9)), weight=cell(1 + rank / 64)
        )
        nodes[QUERIES.format(layer)] = Node(inputs=(cell(5 + layer),), weight=cell(7))
        name = operator(layer)
        outputs = [cell(3), *(cell(inside(layer, expert)) for expert in own)]
        nodes[name] = Node(inputs=(cell(hidden(layer)),), outputs=tuple(outputs))
        for local, expert in enumerate(own):
            for part in ("w13_list", "w2_list"):
                nodes[f"{name}.{part}.{local}"] = Node(
                    inputs=(cell(0),), weight=cell(weight(layer, expert, part))
                )
    return Triple(nodes=nodes, local_rank=rank, modules=tuple(nodes))


def cards(world: int, **options) -> dict[int, Triple]:
    return {rank: card(rank, world, **options) for rank in range(world)}


def expected_experts(triple: Triple, *, card: int, of: int, experts: int = EXPERTS) -> None:
    """Each layer's experts are those of the card, each with its own numbers."""
    own = range(card * experts // of, (card + 1) * experts // of)
    for layer in range(LAYERS):
        name = operator(layer)
        node = triple.nodes[name]
        assert node.inputs[0] == hidden(layer)
        assert [value.item() for value in node.outputs[1:]] == [inside(layer, e) for e in own]
        for part in ("w13_list", "w2_list"):
            found = [triple.nodes[f"{name}.{part}.{i}"].weight.item() for i in range(len(own))]
            assert found == [weight(layer, expert, part) for expert in own]
            assert f"{name}.{part}.{len(own)}" not in triple.nodes


def test_sixty_four_cards_become_eight_and_every_expert_keeps_its_own():
    groups = [list(range(first, first + 8)) for first in range(0, 64, 8)]
    merged = unify_triples(cards(64), groups, expert_parallel=True)
    for index, one in enumerate(merged):
        expected_experts(one.triple, card=index, of=8)
        assert sorted(one.triple.modules) == sorted(one.triple.nodes)
        node = one.triple.nodes[SHARED.format(0)]
        assert node.inputs[0] == 2 + groups[index][-1] and node.outputs[0] == 8 * 4
        owner = one.account.maxima[f"{operator(2)}|output 5"]
        assert owner == groups[index][1]  # four experts a card
        # a summand was seen on each of 64 cards
        assert one.triple.nodes[operator(0)].outputs[0] == 64 * 3
        assert f"{operator(0)}|output 0" in one.account.bounds


def test_experts_follow_the_new_cards_whatever_ranks_become_one():
    """The script that this replaces takes neighbours alone; vLLM's older one took any ranks."""
    groups = [[index, index + 8] for index in range(8)]
    merged = unify_triples(cards(16), groups, expert_parallel=True)
    for index, one in enumerate(merged):
        expected_experts(one.triple, card=index, of=8)


def test_one_card_has_all_and_is_expanded_again():
    (whole,) = unify_triples(cards(8), [list(range(8))], expert_parallel=True)
    expected_experts(whole.triple, card=0, of=1)
    again = expand_triple(whole.triple, 16, expert_parallel=True)
    for index, one in enumerate(again):
        expected_experts(one.triple, card=index, of=16)
        assert one.triple.nodes[SHARED.format(1)].inputs[0] == 9 and one.expanded
        assert one.triple.local_rank == index
    (back,) = unify_triples(
        {index: one.triple for index, one in enumerate(again)},
        [list(range(16))],
        expert_parallel=True,
    )
    expected_experts(back.triple, card=0, of=1)
    copies = expand_triple(whole.triple, 2, expert_parallel=False)
    assert all(one.triple.nodes.keys() == whole.triple.nodes.keys() for one in copies)


def test_whether_cards_hold_some_experts_or_parts_has_to_be_said():
    with pytest.raises(UsageError, match="do not say whether a card holds some experts") as error:
        unify_triples(cards(4), [[0, 1, 2, 3]])
    assert "--expert-parallel" in error.value.remedy
    (parts,) = unify_triples(cards(4), [[0, 1, 2, 3]], expert_parallel=False)
    node = parts.triple.nodes[operator(0)]
    # expert 0 of 64 is the largest of the parts'; what the operator put out was a summand
    assert node.outputs[1] == inside(0, 192) and node.outputs[0] == 4 * 3
    copies = {rank: card(0, 1) for rank in range(2)}
    (same,) = unify_triples(copies, [[0, 1]])
    expected_experts(same.triple, card=0, of=1)
    with pytest.raises(UsageError, match="2 ranks: 3 mixtures"):
        expand_triple(card(0, 1), 2)


def test_a_lost_card_is_refused_with_its_experts():
    ranks = cards(64)
    del ranks[17]
    groups = [list(range(first, first + 8)) for first in range(0, 64, 8)]
    for allowed in (False, True):
        with pytest.raises(InputError, match=r"rank 17 of 64, which alone held 4 .*, 68 to 71"):
            unify_triples(ranks, groups, world=64, allow_missing=allowed, expert_parallel=True)


def test_a_doubled_card_is_refused_with_both_numbers():
    ranks = cards(64)
    ranks[40] = replace(ranks[39], local_rank=40)
    with pytest.raises(InputError, match="rank 40: holds the experts of rank 39, by the maxima"):
        unify_triples(ranks, [list(range(64))], expert_parallel=True)


def test_a_card_of_another_run_is_refused():
    ranks = cards(64)
    stranger = {
        name: replace(node, inputs=(node.inputs[0] * 1.5,)) for name, node in ranks[5].nodes.items()
    }
    ranks[5] = replace(ranks[5], nodes=stranger)
    with pytest.raises(InputError, match="rank 5: saw other inputs than the 63 other ranks"):
        unify_triples(ranks, [list(range(64))], expert_parallel=True)


def test_a_card_of_another_model_is_refused():
    ranks = cards(8)
    ranks[3] = card(3, 8, layers=LAYERS + 1)
    with pytest.raises(InputError, match="node model.layers.3.self_attn.*: on rank 3, not on"):
        unify_triples(ranks, [list(range(8))], expert_parallel=True)
    ranks[3] = card(3, 8, experts=128)
    with pytest.raises(InputError, match=r"moe_op: on rank 3 16 experts and 16 .* 32 experts"):
        unify_triples(ranks, [list(range(8))], expert_parallel=True)


def test_numbers_that_do_not_divide_and_files_without_experts_are_refused():
    three = cards(6, experts=6)
    with pytest.raises(UsageError, match=r"moe_op: 6 experts over 4 cards"):
        expand_triple(
            unify_triples(three, [list(range(6))], expert_parallel=True)[0].triple,
            4,
            expert_parallel=True,
        )
    dense = {0: Triple(nodes={QUERIES.format(0): card(0, 1).nodes[QUERIES.format(0)]})}
    for call in (
        lambda: unify_triples(dense, [[0]], expert_parallel=True),
        lambda: expand_triple(dense[0], 2, expert_parallel=True),
    ):
        with pytest.raises(UsageError, match="the files have no experts"):
            call()
    assert len(expand_triple(dense[0], 2)) == 2
    with pytest.raises(InputError, match="hold scales"):
        expand_triple(replace(dense[0], mode=SCALES), 2)
    with pytest.raises(UsageError, match="expand to 1 ranks"):
        expand_triple(dense[0], 1)


BLOCK = "model.layers.0.block_sparse_moe"


def habana(own: range, *, of: int) -> Triple:
    """A card of optimum-habana's Mixtral, whose experts have the numbers of the model."""
    seen = [cell(inside(0, n)) if n in own else cell(0) for n in range(of)]
    nodes = {BLOCK: Node(inputs=(cell(6),), outputs=(cell(3), *seen))}
    for number in own:
        for leaf in ("w1", "w2", "w3"):
            nodes[f"{BLOCK}.experts.{number}.{leaf}"] = Node(
                inputs=(cell(0),), weight=cell(1 + number)
            )
    return Triple(nodes=nodes, modules=tuple(nodes))


def test_experts_with_the_models_numbers_need_no_word_and_every_one_has_to_be_there():
    """The script that this replaces fails at the first expert that another card lacks."""
    ranks = {rank: habana(range(2 * rank, 2 * rank + 2), of=8) for rank in range(4)}
    first, second = unify_triples(ranks, [[0, 1], [2, 3]])
    assert [value.item() for value in second.triple.nodes[BLOCK].outputs[1:]] == [
        0.0 if number < 4 else inside(0, number) for number in range(8)
    ]
    assert f"{BLOCK}.experts.3.w1" in first.triple.nodes
    assert f"{BLOCK}.experts.4.w1" not in first.triple.nodes
    assert second.triple.nodes[f"{BLOCK}.experts.5.w2"].weight == 6
    ranks[2] = habana(range(4, 5), of=8)
    with pytest.raises(InputError, match=rf"{BLOCK}: experts 5 of 8 are on no rank"):
        unify_triples(ranks, [[0, 1, 2, 3]])
    ranks[2] = habana(range(3, 6), of=8)
    with pytest.raises(InputError, match=rf"{BLOCK}: expert 3 is on ranks 1 and 2"):
        unify_triples(ranks, [[0, 1, 2, 3]])

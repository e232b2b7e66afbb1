"""How a router's logits become experts and weights, beside the same formulas in torch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.models.architecture import Form, Routing
from quantflow.models.family import GroupScores, RouterScores
from quantflow.runtime.operations import why_not
from quantflow.runtime.routed_experts import RoutedExperts

pytestmark = pytest.mark.skipif(why_not(16) is not None, reason="no C compiler")
SOFTMAX, SIGMOID, MIXER, OF_CHOSEN = RouterScores
HIDDEN = 24


def weights_of(logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None):
    """The weight of every expert, [N, E], 0 where it is not chosen."""
    experts = RoutedExperts(
        router=lambda x: logits.clone(),
        # an expert puts out its own number's unit vector, so that the sum has the weights
        experts=[
            (
                lambda x: x,
                lambda x, number=number: torch.eye(len(logits[0])).expand(len(x), -1, -1)[
                    :, number
                ],
            )
            for number in range(len(logits[0]))
        ],
        routing=routing,
        form=Form(),
        correction=correction,
    )
    return experts(torch.zeros_like(logits), lambda up: up)


def expected(logits, routing, correction=None):
    """The same in float64."""
    logits = logits.double()
    scores = logits.sigmoid() if routing.scores is SIGMOID else logits.softmax(dim=-1)
    wanted = scores if correction is None else scores + correction
    groups = wanted.view(len(logits), routing.groups, -1)
    if routing.groups > 1:
        counted = 2 if routing.group_scores is GroupScores.BEST_TWO else 1
        best = groups.topk(counted).values.sum(dim=-1).topk(routing.chosen_groups).indices
        inside = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter(1, best, value=True)
        wanted = groups.masked_fill(~inside[..., None], -math.inf).flatten(1)
    numbers = wanted.topk(routing.chosen).indices
    chosen = scores.gather(1, numbers)
    if routing.normalized:
        chosen = chosen / chosen.sum(dim=-1, keepdim=True).clamp(min=routing.least)
    return torch.zeros_like(scores).scatter(1, numbers, chosen * routing.factor)


@settings(max_examples=60)
@given(
    scores=st.sampled_from([SOFTMAX, SIGMOID]),
    shape=st.sampled_from([(8, 1, 1), (8, 4, 2), (12, 3, 1), (96, 8, 4), (5, 1, 1)]),
    chosen=st.integers(1, 4),
    normalized=st.booleans(),
    corrected=st.booleans(),
    group_scores=st.sampled_from(GroupScores),
    seed=st.integers(0, 9),
)
def test_experts_and_weights_are_those_of_the_formulas(
    scores, shape, chosen, normalized, corrected, group_scores, seed
):
    experts, groups, chosen_groups = shape
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, experts, generator=draw) * 3
    correction = torch.randn(experts, generator=draw) if corrected else None
    routing = Routing(
        experts=experts,
        chosen=chosen,
        normalized=normalized,
        factor=2.5,
        scores=scores,
        groups=groups,
        chosen_groups=chosen_groups,
        group_scores=group_scores,
    )
    found = weights_of(logits, routing, correction)
    assert torch.allclose(found.double(), expected(logits, routing, correction), atol=1e-6)


def test_experts_that_are_chosen_one_after_the_other_weigh_what_is_near_them():
    routing = Routing(experts=4, chosen=2, normalized=False, scores=MIXER, near=0.25)
    found = weights_of(torch.tensor([[4.0, 3.5, 1.0, -9.0], [1.0, 0.1, 0.1, 0.9]]), routing)
    first = 1 / (1 + math.exp(-0.5))  # 4 beside 3.5, which is nearer than a quarter of 4
    last = 1 / (1 + math.exp(-0.1))
    # the second choice is alone: nothing else is near it
    wanted = torch.tensor([[first, 1.0, 0, 0], [last, 0, 0, 1.0]])
    assert torch.allclose(found, wanted, atol=1e-6)


def test_sigmoids_that_are_equal_in_float32_leave_the_choice_to_the_logits():
    logits = torch.tensor([[18.0, 19.0, 30.0, 20.0], [-1.0, 0.5, 0.0, -120.0]])
    routing = Routing(experts=4, chosen=2, normalized=False, scores=OF_CHOSEN)
    found = weights_of(logits, routing)
    assert found[0].tolist() == [0, 0, 1, 1]
    assert torch.allclose(found[1], torch.tensor([0, 1 / (1 + math.exp(-0.5)), 0.5, 0]))


def test_weights_that_scale_inputs_multiply_what_an_expert_reads_and_nothing_else():
    logits, x = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 1.0]]), torch.tensor([[4.0], [-2.0]])
    routing = Routing(
        experts=3, chosen=2, normalized=False, scores=OF_CHOSEN, scales_inputs=True, factor=2.0
    )
    experts = RoutedExperts(
        router=lambda _: logits.clone(),
        experts=[(lambda x: x, lambda x, n=number: x + 10.0**n) for number in range(3)],
        routing=routing,
        form=Form(),
    )
    three, one, two = (1 / (1 + math.exp(-logit)) for logit in (3.0, 1.0, 2.0))
    wanted = torch.tensor([[8 * three + 8 * one + 110], [-4 * two - 4 * one + 101]])
    assert torch.allclose(experts(x, lambda up: up), wanted, rtol=1e-6)


def test_a_sum_that_is_nothing_is_no_division_by_nothing():
    routing = Routing(experts=3, chosen=2, normalized=True, scores=SIGMOID, least=1e-20)
    assert weights_of(torch.full((1, 3), -1000.0), routing).abs().max() == 0


@pytest.mark.parametrize("scores", RouterScores)
def test_equal_logits_choose_the_first_experts(scores):
    routing = Routing(experts=6, chosen=2, normalized=False, scores=scores, near=0.02)
    found = weights_of(torch.zeros(3, 6), routing)
    assert (found[:, :2] > 0).all() and (found[:, 2:] == 0).all()


@pytest.mark.parametrize("scores", RouterScores)
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_logits_that_are_no_numbers_choose_experts_that_there_are(scores, value):
    routing = Routing(experts=6, chosen=6, normalized=True, scores=scores, near=0.02)
    assert weights_of(torch.full((3, 6), value), routing).shape == (3, 6)

"""What of a decoder layer runs after it was quantized."""

from types import SimpleNamespace

import torch
from torch import nn

from quantflow.core.parallel import Workers
from quantflow.quantizing.layer import _side_by_side, install_all


def test_a_linear_that_is_not_quantized_runs_from_float32_as_in_the_proof_of_export():
    module = nn.ModuleDict({"up": nn.Linear(8, 4).to(torch.bfloat16).requires_grad_(False)})
    stored = module["up"].weight.clone()
    layer = SimpleNamespace(
        linears=["model.layers.0.up"], relative=lambda name: name.removeprefix("model.layers.0.")
    )
    install_all(module, layer, SimpleNamespace(schemes={"model.layers.0.up": None}), {})
    assert module["up"].weight.dtype == torch.float32
    assert torch.equal(module["up"].weight, stored.float())


def experts_beside(count, *, features=64, chosen=2, host=True):
    """Attention, then two groups of each of `count` experts, then a shared expert."""
    group = SimpleNamespace
    groups = [group(expert=None, linears=["q"])]
    groups += [group(expert=f"experts.{n // 2}", linears=["e"]) for n in range(2 * count)]
    groups += [group(expert=None, linears=["s"])]
    return SimpleNamespace(
        layer=SimpleNamespace(groups=groups, chosen=chosen, experts=count),
        device=SimpleNamespace(is_host=host),
        weight=lambda name: torch.empty(8, features, device="meta"),
    )


def test_many_small_experts_go_side_by_side_and_everything_else_one_by_one():
    owned = range(10)
    alone = [[number] for number in owned]
    turns = [[0], [1, 2, 3, 4, 5, 6, 7, 8], [9]]
    assert _side_by_side(experts_beside(4), owned, workers=Workers(2)) == turns
    assert _side_by_side(experts_beside(4), owned, workers=Workers(4)) == turns
    # of a card's share those that lie together
    mine = [0, 1, 2, 3, 4, 6]
    assert _side_by_side(experts_beside(4), mine, workers=Workers(2)) == [[0], [1, 2, 3, 4, 6]]
    # one worker; too few groups for the workers; wide ones; all chosen, as memory counts them
    for opened, workers in (
        (experts_beside(4), Workers(1)),
        (experts_beside(4), Workers(5)),
        (experts_beside(4, features=4097), Workers(2)),
        (experts_beside(4, chosen=4), Workers(2)),
        (experts_beside(4, host=False), Workers(2)),
    ):
        assert _side_by_side(opened, owned, workers=workers) == alone

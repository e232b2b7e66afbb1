"""A hidden state and a carried value survive being one tensor, in every dtype of a model."""

import pytest
import torch

from quantflow.models.carried import Carried


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("axes", [(6,), (2, 3)], ids=["plain", "several streams"])
@pytest.mark.parametrize("kind", ["int64", "int32", None])
def test_both_come_back(dtype, axes, kind):
    carried = Carried(argument="chosen", output=1, dtype=kind, width=5, hidden=axes)
    hidden = torch.randn(1, 4, *axes).to(dtype)
    value = (
        torch.randn(1, 4, 5).to(dtype)
        if kind is None
        else torch.randint(0, 2**31 - 1, (1, 4, 5)).to(getattr(torch, kind))
    )
    both = carried.joined(hidden, value)
    assert (both.dtype, both.shape[:2]) == (dtype, (1, 4))
    for found, expected in zip(carried.parted(both, numbers=dtype), (hidden, value), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    one = carried.parted(both[:, 1:2], numbers=dtype)  # of some tokens
    assert torch.equal(one[0], hidden[:, 1:2]) and torch.equal(one[1], value[:, 1:2])


def test_numbers_have_the_models_dtype_beside_a_hidden_state_of_another():
    carried = Carried(argument=0, output=1, dtype=None, width=5, hidden=(6,))
    hidden, value = torch.randn(1, 4, 6), torch.randn(1, 4, 5).bfloat16()
    found, again = carried.parted(carried.joined(hidden, value), numbers=torch.bfloat16)
    assert (
        torch.equal(found, hidden) and torch.equal(again, value) and again.dtype == torch.bfloat16
    )


def test_nothing_is_carried_into_the_first_layer():
    carried = Carried(argument=0, output=1, dtype="int64", width=5, hidden=(6,))
    hidden = torch.randn(1, 4, 6)
    found, value = carried.parted(carried.joined(hidden, None), numbers=torch.float32)
    assert torch.equal(found, hidden) and value is None


def test_gradients_flow_through_numbers_and_past_indices():
    hidden, numbers = torch.randn(1, 4, 6), torch.randn(1, 4, 5)
    carried = Carried(argument="more", output=1, dtype=None, width=5, hidden=(6,))
    leaf = carried.joined(hidden, numbers).requires_grad_()
    first, second = carried.parted(leaf, numbers=torch.float32)
    (found,) = torch.autograd.grad(2 * first.sum() + 3 * second.sum(), leaf)
    assert torch.equal(found, torch.tensor([2.0] * 6 + [3.0] * 5).expand(1, 4, 11))
    carried = Carried(argument="more", output=1, dtype="int64", width=5, hidden=(6,))
    leaf = carried.joined(hidden, torch.arange(20).reshape(1, 4, 5)).requires_grad_()
    (found,) = torch.autograd.grad(
        carried.joined(*carried.parted(leaf, numbers=torch.float32)).narrow(-1, 0, 6).sum(), leaf
    )
    assert torch.equal(found, torch.tensor([1.0] * 6 + [0.0] * 5).expand(1, 4, 11))

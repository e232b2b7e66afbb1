"""Stand-ins for embedding and head compute what these compute."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from quantflow.models import stand_ins
from quantflow.models.stand_ins import HeadStandIn, Rows, in_parts
from quantflow.numerics.product import operand, product


def test_the_rows_that_are_held_are_those_of_the_whole_embedding():
    table = torch.arange(40.0).reshape(10, 4)  # [10, 4]
    ids = torch.tensor([1, 4, 9])
    wanted = torch.tensor([[9, 1, 1, 4]])
    assert torch.equal(
        Rows(ids, table[ids], nn.Embedding.from_pretrained(table))(wanted),
        functional.embedding(wanted, table),
    )


def test_paddings_row_is_the_one_that_a_model_may_ask_for_by_itself():
    table = torch.arange(40.0).reshape(10, 4)  # [10, 4]
    ids = torch.tensor([1, 4, 9])
    rows = Rows(ids, table[ids], nn.Embedding.from_pretrained(table), padding=9)
    assert rows.weight.shape == table.shape and torch.equal(rows.weight[9], table[9])


def test_the_head_in_parts_is_the_whole_head(monkeypatch):
    torch.manual_seed(0)
    weight, hidden = torch.randn(11, 8).bfloat16(), torch.randn(1, 3, 8)
    expected = hidden.double() @ weight.double().T
    for rows in (4, 11, 100):
        monkeypatch.setattr(stand_ins, "HEAD_ROWS", rows)
        found = HeadStandIn(weight, dtype=torch.float32)(hidden)
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() < 1e-5


def test_the_gradient_through_the_head_in_parts_is_that_through_the_whole_head(monkeypatch):
    torch.manual_seed(0)
    weight, gradient = torch.randn(11, 8).bfloat16(), torch.randn(1, 3, 11)
    expected = gradient.double() @ weight.double()
    for rows in (4, 11, 100):
        monkeypatch.setattr(stand_ins, "HEAD_ROWS", rows)
        hidden = torch.randn(1, 3, 8, requires_grad=True)
        (found,) = torch.autograd.grad(
            HeadStandIn(weight, dtype=torch.float32)(hidden), hidden, gradient
        )
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("features", "outputs"), [(64, 96), (512, 1376), (1376, 512)])
def test_a_linear_in_parts_of_its_stored_weight_is_the_whole_product_to_the_bit(
    features, outputs, dtype, bias
):
    torch.manual_seed(0)
    linear = nn.Linear(features, outputs, bias=bias).requires_grad_(False)
    linear.weight = nn.Parameter(linear.weight.to(dtype), requires_grad=False)
    x = torch.randn(1, 600, features)  # more tokens than are multiplied at once
    weight = linear.weight.float()
    whole = product(operand(x), weight, linear.bias)
    exact = functional.linear(x.double(), weight.double(), linear.bias.double() if bias else None)
    with in_parts([linear], dtype=torch.float32):
        found = linear(x)
    assert found.dtype == torch.float32 and torch.equal(found, whole)
    assert (found - exact).abs().max() < 1e-5


@pytest.mark.parametrize("shape", [(0, 8), (1, 1, 8), (2, 3, 8)])
def test_a_linear_in_parts_takes_any_number_of_tokens(shape):
    linear = nn.Linear(8, 4).requires_grad_(False)
    linear.weight = nn.Parameter(linear.weight.bfloat16(), requires_grad=False)
    x = torch.ones(shape)
    wanted = functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    with in_parts([linear], dtype=torch.float32):
        found = linear(x)
    assert found.shape == wanted.shape and torch.allclose(found.double(), wanted, atol=1e-6)


@pytest.mark.skipif(
    not operand(torch.ones(1, 1)).is_mkldnn, reason="torch's default keeps nothing of a shape"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linears_of_experts_in_parts_multiply_few_shapes(monkeypatch, dtype):
    shapes = set()

    def noted(left, right, bias):
        shapes.add(left.shape)
        return product(left, right, bias)

    monkeypatch.setattr("quantflow.models.stand_ins.product", noted)
    linear = nn.Linear(8, 4, bias=False).requires_grad_(False)
    linear.weight = nn.Parameter(torch.ones(4, 8, dtype=dtype), requires_grad=False)
    with in_parts([linear], dtype=torch.float32):
        for tokens in range(2, 130):
            assert torch.equal(linear(torch.ones(tokens, 8)), torch.full((tokens, 4), 8.0))
    assert shapes == {(64, 8), (128, 8), (192, 8)}


@pytest.mark.parametrize("tokens", [1, 3, 600])
def test_gradients_flow_through_a_weight_that_needs_no_conversion_as_through_a_linear(tokens):
    torch.manual_seed(0)
    linear, x, slope = (
        nn.Linear(24, 40),
        torch.randn(1, tokens, 24, requires_grad=True),
        torch.randn(1, tokens, 40),
    )
    with in_parts([linear], dtype=torch.float32):
        found = torch.autograd.grad(linear(x), [x, linear.weight, linear.bias], slope)
    # y = x W' + b: g W, g' x, and the sum of g over tokens
    exact, double = slope[0].double(), x.detach()[0].double()
    expected = (exact @ linear.weight.detach().double(), exact.T @ double, exact.sum(0))
    for part, of in zip(found, expected, strict=True):
        assert (
            part.layout == torch.strided
            and (part.reshape(of.shape) - of).abs().max() < 1e-6 * of.abs().max()
        )


def test_a_linear_in_parts_is_seen_by_hooks_and_is_itself_afterwards():
    linear, seen = nn.Linear(8, 4).requires_grad_(False), []
    linear.register_forward_hook(
        lambda _module, args, output: seen.append((args[0].shape, output.shape))
    )
    with pytest.raises(ValueError, match="stop"), in_parts([linear], dtype=torch.float32):
        linear(torch.ones(1, 3, 8))
        raise ValueError("stop")
    assert seen == [((1, 3, 8), (1, 3, 4))]
    assert "forward" not in vars(linear)


@pytest.mark.parametrize(("dtype", "products"), [(torch.bfloat16, 2), (torch.float32, 1)])
def test_a_weight_that_needs_no_conversion_is_multiplied_at_once(monkeypatch, dtype, products):
    linear, calls, original = nn.Linear(8, 300).requires_grad_(False), [], functional.linear
    linear.weight = nn.Parameter(linear.weight.to(dtype), requires_grad=False)
    monkeypatch.setattr(functional, "linear", lambda *args: calls.append(1) or original(*args))
    with in_parts([linear], dtype=torch.float32):
        linear(torch.ones(1, 3, 8))
    assert len(calls) == products

"""Products by way of another library: the same numbers up to rounding, the same bits each time."""

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantflow.core.parallel import Workers
from quantflow.numerics.product import FILLED, filled, operand, product, widened
from quantflow.observers.hessian import HessianObserver

FAST = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def test_a_product_worked_by_hand():
    left, right = (
        torch.tensor([[1.0, 2.0], [3.0, -1.0]]),
        torch.tensor([[10.0, 1.0], [0.5, 4.0], [0.0, -1.0]]),
    )
    wanted = torch.tensor([[13.0, 108.5, -2.0], [30.0, 97.5, 1.0]])
    assert torch.equal(product(operand(left), right, torch.tensor([1.0, 100.0, 0.0])), wanted)
    assert torch.equal(product(operand(left), right), wanted - torch.tensor([1.0, 100.0, 0.0]))


@given(
    rows=st.integers(0, 70),
    columns=st.integers(1, 40),
    outputs=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_whole_numbers_are_multiplied_exactly_whatever_the_shape(rows, columns, outputs, seed):
    generator = torch.Generator().manual_seed(seed)
    left = torch.randint(-50, 50, (rows, columns), generator=generator)
    right = torch.randint(-50, 50, (outputs, columns), generator=generator)
    found = product(operand(left.float()), right.float())
    assert found.layout == torch.strided and numpy.array_equal(
        found.numpy(), left.numpy() @ right.numpy().T
    )


@pytest.mark.parametrize("features", [64, 512, 4096])
def test_sums_are_float32_throughout(features):
    """An error in about the tenth bit, as of bfloat16 or tf32, would be a thousand times larger."""
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(96, features, generator=generator),
        torch.randn(80, features, generator=generator),
    )
    exact = left.double().numpy() @ right.double().numpy().T
    error = product(operand(left), right).double().numpy() - exact
    # of products of size 1; a random walk is far below
    assert (error**2).mean() ** 0.5 < 2**-24 * features


def test_threads_change_no_bit():
    generator = torch.Generator().manual_seed(0)
    lefts = [torch.randn(1, 200, 300, generator=generator) for _ in range(12)]
    right = torch.randn(77, 300, generator=generator)
    with Workers(3) as workers:
        found = workers.map(lambda left: product(operand(left), right), lefts)
    assert all(
        torch.equal(one, product(operand(left), right))
        for left, one in zip(lefts, found, strict=True)
    )


def test_gradients_flow():
    left, right = torch.ones(2, 3, requires_grad=True), torch.arange(12.0).reshape(4, 3)
    (gradient,) = torch.autograd.grad(product(operand(left), right).sum(), left)
    assert torch.equal(gradient, right.sum(dim=0).expand(2, 3))


@pytest.mark.parametrize(
    "x", [torch.ones(2, 3).double(), torch.ones(2, 3).bfloat16(), torch.ones(0, 3)], ids=str
)
def test_what_does_not_fit_stays_as_it_is(x):
    assert operand(x) is x


@pytest.mark.skipif(not FAST, reason="torch multiplies as it would anyhow")
def test_the_other_library_is_taken_where_it_is_faster():
    assert operand(torch.ones(2, 3)).is_mkldnn


@pytest.mark.skipif(not FAST, reason="rows are filled up where operands are copied")
@pytest.mark.parametrize(("rows", "wanted"), [(2, 64), (63, 64), (65, 128)])
def test_rows_are_filled_up_with_zeros(rows, wanted):
    found = filled(torch.ones(rows, 3))
    assert found.shape == (wanted, 3)
    assert torch.equal(found[:rows], torch.ones(rows, 3)) and not found[rows:].any()


@pytest.mark.parametrize("x", [torch.ones(1, 3), torch.ones(128, 3), torch.ones(65, 3).double()])
def test_one_row_and_full_rows_and_what_is_not_copied_are_not_filled_up(x):
    assert filled(x) is x


@pytest.mark.parametrize("features", [40, 256, 1100])
@pytest.mark.parametrize("rows", [2, 9, 63, 65, 130, 511])
def test_rows_that_are_filled_up_keep_their_bits(rows, features):
    generator = torch.Generator().manual_seed(rows)
    left, right = (torch.randn(n, features, generator=generator) for n in (rows, 96))
    found = product(operand(filled(left)), right)[:rows]
    assert torch.equal(found, product(operand(left), right))


@pytest.mark.parametrize("rows", [1, 2, 9, 63, 65, 130, 511])
def test_sums_over_rows_that_are_filled_up_keep_their_bits(rows):
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows))
    observer = HessianObserver(96)
    observer.update(x)
    turned = x.T.contiguous()
    whole = product(operand(turned), turned)
    assert torch.equal(observer.state()["hessian_sum"].tril(), whole.tril())
    assert observer.state()["count"] == rows


@pytest.mark.skipif(not FAST, reason="torch's default keeps nothing of a shape")
def test_a_hessian_of_any_number_of_rows_multiplies_few_shapes(monkeypatch):
    """Each shape would cost half a megabyte, and experts get any number of rows."""
    shapes = set()

    def noted(left, right):
        shapes.add((left.shape, right.shape))
        return product(left, right)

    monkeypatch.setattr("quantflow.observers.hessian.product", noted)
    observer = HessianObserver(32)
    for rows in range(2, 200):
        observer.update(torch.ones(rows, 32))
    assert len(shapes) == 200 // FILLED + 1
    assert torch.equal(
        observer.state()["hessian_sum"], torch.full((32, 32), float(sum(range(2, 200))))
    )


@pytest.fixture(params=["AVX2", "AVX512"])
def cpu(request, monkeypatch):
    """A CPU with or without fast products of bfloat16."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    return request.param


# rows, features, outputs: the last in parts
@pytest.mark.parametrize("shape", [(1, 8, 5), (70, 64, 33), (3, 40, 300_000)])
@pytest.mark.parametrize("biased", [True, False])
def test_linears_in_bfloat16_are_sums_in_float32_that_are_rounded_once(cpu, shape, biased):
    rows, features, outputs = shape
    generator = torch.Generator().manual_seed(1)
    linear = torch.nn.Linear(features, outputs, bias=biased, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(
                torch.randint(-8, 9, parameter.shape, generator=generator)
            )  # sums below 2^24 are exact in any order
    x = torch.randint(-8, 9, (2, rows, features), generator=generator).bfloat16()
    with widened(torch.bfloat16), torch.no_grad():
        found = linear(x)
    exact = x.double() @ linear.weight.double().T + (linear.bias.double() if biased else 0)
    assert found.dtype == torch.bfloat16 and torch.equal(found, exact.bfloat16())


def test_bfloat16_is_widened_inside_the_block_where_it_is_slow_and_nothing_else_is(
    cpu, monkeypatch
):
    seen, linear = [], torch.nn.functional.linear
    monkeypatch.setattr(
        "quantflow.numerics.product._linear",
        lambda *given: (seen.append(given[0].dtype), linear(*given))[1],
    )
    x, weight = torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(3, 4, dtype=torch.bfloat16)
    with widened(torch.bfloat16):
        torch.nn.functional.linear(x, weight)
        torch.nn.functional.linear(x.float(), weight.float())
    with widened(torch.float32):
        torch.nn.functional.linear(x, weight)
    torch.nn.functional.linear(x, weight)  # outside
    assert seen == ([torch.bfloat16] if cpu == "AVX2" else [])


def test_gradients_of_what_is_widened_are_those_of_torch(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    x, weight = (
        torch.randint(-4, 5, shape, generator=generator).bfloat16().requires_grad_()
        for shape in ((6, 16), (12, 16))
    )
    bias = torch.zeros(12, dtype=torch.bfloat16, requires_grad=True)
    slope = torch.randint(-4, 5, (6, 12), generator=generator).bfloat16()
    expected = torch.autograd.grad(
        torch.nn.functional.linear(x, weight, bias), (x, weight, bias), slope
    )
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    with widened(torch.bfloat16):
        found = torch.autograd.grad(
            torch.nn.functional.linear(x, weight, bias), (x, weight, bias), slope
        )
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))

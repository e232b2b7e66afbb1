"""Sums along a dimension whose order is fixed, in the place of torch's own kernel."""

import itertools

import pytest
import torch

from quantflow.core.fixed_order import cumsum, in_fixed_order


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((), 0), ((0,), 0), ((1,), 0), ((2,), -1), ((7, 3), 0), ((2, 64, 3), 1), ((3, 1000), -1)],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_those_of_the_definition(shape, dim, dtype):
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found, expected = cumsum(x, dim), x.double().cumsum(dim)
    assert found.dtype == dtype and found.shape == x.shape
    # one rounding for each of log2(1000) additions, and that of the result
    torch.testing.assert_close(
        found.double(), expected, rtol=12 * torch.finfo(dtype).eps, atol=1e-7
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.bool, torch.uint8])
def test_sums_of_integers_are_exact_int64(dtype):
    x = torch.tensor([1, 1, 0, 1, 1]).to(dtype)
    assert torch.equal(cumsum(x, 0), torch.tensor([1, 2, 2, 3, 4]))


def test_a_result_never_shares_the_memory_of_its_input():
    for x in (torch.rand(1), torch.rand(()), torch.rand(5, 1)):
        assert cumsum(x, x.ndim - 1).data_ptr() != x.data_ptr()


def test_the_order_of_a_sum_is_that_of_the_docstring():
    """Sums of 2^24 and ones: an order that adds the ones first keeps them."""
    x = torch.tensor([2.0**24, 1.0, 1.0, 1.0])
    # s_1 = [x0, x0+x1, x1+x2, x2+x3], s_2[3] = s_1[3] + s_1[1]
    assert cumsum(x, 0).tolist() == [2.0**24, 2.0**24, 2.0**24 + 2, 2.0**24 + 2]


def test_torch_uses_it_in_the_block_and_its_own_kernel_after_it():
    x = torch.rand(3, 999, generator=torch.Generator().manual_seed(1))
    own = x.cumsum(1)
    with in_fixed_order("CPU"):
        inside = x.cumsum(1)
        into, place = torch.empty(0), x.clone()
        torch.cumsum(x, 1, out=into)
        place.cumsum_(1)
        with in_fixed_order("CPU"):
            twice = x.cumsum(1)
        again = x.cumsum(1)
    for found in (inside, into, place, twice, again):
        assert torch.equal(found, cumsum(x, 1))
    assert not torch.equal(inside, own)  # the block had an effect: another order, other bits
    assert torch.equal(x.cumsum(1), own)


def test_gradients_go_back_through_it():
    x = torch.rand(2, 9, dtype=torch.float64, requires_grad=True)
    with in_fixed_order("CPU"):
        (gradient,) = torch.autograd.grad((x.cumsum(1) * torch.arange(1.0, 10.0)).sum(), x)
    expected = list(itertools.accumulate(range(9, 0, -1)))[::-1]
    assert gradient.tolist() == [expected, expected]


def test_an_error_inside_the_block_leaves_torch_as_it_was():
    x = torch.rand(999, generator=torch.Generator().manual_seed(2))
    own = x.cumsum(0)
    with pytest.raises(ZeroDivisionError), in_fixed_order("CPU"):
        raise ZeroDivisionError
    assert torch.equal(x.cumsum(0), own)

"""The factorisation in place: by hand, float64, over its blocks, not positive definite."""

import pytest
import torch

from quantflow.core.parallel import Workers
from quantflow.numerics.cholesky import cholesky_, mirror_, reorder_


def gram(size, *, samples, damping, seed=0):
    x = torch.randn(
        samples, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return x.T @ x / samples + damping * torch.eye(size, dtype=torch.float64)


def test_two_by_two_worked_by_hand():
    # [[2, 0], [1, 3]] squared; what is above the diagonal is not read
    matrix = torch.tensor([[4.0, 99.0], [2.0, 10.0]])
    assert cholesky_(matrix)
    assert matrix.tril().tolist() == [[2.0, 0.0], [1.0, 3.0]]


@pytest.mark.parametrize("size", [1, 255, 256, 257, 700])
def test_the_factor_is_that_of_float64_and_its_square_is_the_matrix(size):
    exact = gram(size, samples=2 * size, damping=0.1)
    matrix = exact.float()
    assert cholesky_(matrix)
    lower = matrix.tril().double()
    assert (lower - torch.linalg.cholesky(exact)).abs().max() < 1e-5
    # The bound of the theory is size * 2^-24 times the diagonal; in practice it is a few units in
    # the last place.
    assert (lower @ lower.T - exact).abs().max() < 16 * 2**-24 * exact.diagonal().max()


@pytest.mark.parametrize("size", [600, 900])
def test_the_number_of_workers_does_not_change_a_bit(size):
    matrix = gram(size, samples=100, damping=0.01).float()
    alone, together = matrix.clone(), matrix.clone()
    with Workers(3) as workers:
        assert cholesky_(together, workers=workers)
    assert cholesky_(alone)
    assert torch.equal(alone.tril(), together.tril())


def test_it_is_done_in_the_memory_of_the_matrix():
    matrix = gram(300, samples=400, damping=0.0).float()
    where = matrix.data_ptr()
    cholesky_(matrix)
    assert matrix.data_ptr() == where


@pytest.mark.parametrize("bad", [3, 299], ids=["first-block", "second-block"])
@pytest.mark.parametrize("value", [-1.0, 0.0, float("nan")])
def test_a_matrix_that_is_not_positive_definite_is_said_to_be_none(bad, value):
    matrix = torch.eye(300)
    matrix[bad, bad] = value
    assert not cholesky_(matrix)


@pytest.mark.parametrize("bad", [None, 3, 299], ids=["positive", "first-block", "second-block"])
def test_what_is_above_the_diagonal_stays_and_makes_the_matrix_whole_again(bad):
    matrix = gram(300, samples=400, damping=0.0).float()
    if bad is not None:
        matrix[bad, bad] = -1.0
    before = matrix.clone()
    assert cholesky_(matrix) == (bad is None)
    assert torch.equal(matrix.triu(1), before.triu(1))
    assert not torch.equal(matrix.tril(-1), before.tril(-1))
    mirror_(matrix)
    matrix.diagonal().copy_(before.diagonal())
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("size", [1, 256, 300])
def test_a_matrix_is_put_in_order_in_its_own_memory(size):
    matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1))
    wanted, where = matrix[order][:, order], matrix.data_ptr()
    with Workers(2) as workers:
        assert reorder_(matrix, order, workers=workers)
    assert torch.equal(matrix, wanted) and matrix.data_ptr() == where


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_matrix_that_is_not_finite_is_said_to_be_none_when_it_is_put_in_order(value):
    matrix = torch.eye(300)
    matrix[299, 2] = value
    assert not reorder_(matrix, torch.arange(300).flip(0))


def test_nothing_has_a_factor():
    assert cholesky_(torch.empty(0, 0))

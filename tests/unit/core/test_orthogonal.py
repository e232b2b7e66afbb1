"""Hadamard rotations: known matrices, their properties, sizes of models, errors."""

import pytest
import torch
from compressed_tensors.transform.utils.hadamard import deterministic_hadamard_matrix
from hypothesis import given, settings
from hypothesis import strategies as st

from quantflow.core.orthogonal import mixed, paley, rotate_columns_, rotate_rows_, rotated, rotation
from quantflow.errors import InputError
from tests.shared import slow_but

# heads and hidden states of published models
MODEL_SIZES = [64, 80, 96, 128, 512, 768, 896, 1536, 2560, 3584]


def matrix(by) -> torch.Tensor:
    return rotated(torch.eye(by.size), by)


def test_size_four_is_sylvesters_matrix_by_hand():
    by = rotation(4, seed=0)
    expected = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2.0
    assert torch.equal(matrix(by), by.signs[:, None] * expected)


@pytest.mark.parametrize("size", [1, 2, 8, 64, 512])
def test_a_power_of_two_is_the_matrix_that_compressed_tensors_has(size):
    by = rotation(size, seed=2)
    theirs = deterministic_hadamard_matrix(size, dtype=torch.float32)
    torch.testing.assert_close(matrix(by), by.signs[:, None] * theirs / size**0.5)


def test_order_twelve_is_a_hadamard_matrix():
    found = paley(12)
    assert set(found.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(found @ found.T, 12 * torch.eye(12))


@pytest.mark.parametrize("order", [4, 8, 12, 20, 24, 28, 32, 36, 44, 48, 60, 68, 76, 84, 108])
def test_every_order_that_paley_makes_has_orthogonal_rows(order):
    found = paley(order)
    assert torch.equal(found @ found.T, order * torch.eye(order))
    assert torch.equal(found.abs(), torch.ones(order, order))


@pytest.mark.parametrize("order", [1, 2, 3, 5, 10, 40, 52, 56, 64, 92])
def test_orders_that_paley_does_not_make_are_none(order):  # 56: 55 and 27 are no primes
    assert paley(order) is None


@pytest.mark.parametrize("size", slow_but(MODEL_SIZES, *MODEL_SIZES[:-2]))
def test_a_rotation_is_orthogonal_and_spreads_every_channel_evenly(size):
    by = rotation(size, seed=1)
    q = matrix(by)
    assert torch.allclose(q @ q.T, torch.eye(size), atol=1e-5)
    assert by.mixes == size
    assert torch.allclose(q.abs(), torch.full((size, size), size**-0.5), atol=1e-6)


@pytest.mark.parametrize(("size", "block"), [(1, 1), (7 * 13 * 2, 2), (5 * 103, 1), (47 * 64, 64)])
def test_a_size_without_a_known_matrix_is_rotated_block_by_block(size, block):
    by = rotation(size, seed=1)
    q = matrix(by)
    assert torch.allclose(q @ q.T, torch.eye(size), atol=1e-5)
    assert by.mixes == block
    assert int((q[0] != 0).sum()) == block


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.sampled_from([2, 12, 24, 64, 96]), st.integers(1, 3))
def test_rows_and_columns_are_rotated_as_by_the_matrix(seed, size, times):
    generator = torch.Generator().manual_seed(seed)
    by, weight = rotation(size, seed=seed), torch.randn(5, times * size, generator=generator)
    q = torch.block_diag(*[matrix(by)] * times)
    torch.testing.assert_close(
        rotate_rows_(torch.empty(weight.shape), weight, by), weight @ q, rtol=1e-4, atol=1e-5
    )
    tall = weight.T.contiguous()
    torch.testing.assert_close(
        rotate_columns_(torch.empty(tall.shape), tall, by), q.T @ tall, rtol=1e-4, atol=1e-5
    )


def test_signs_come_from_the_seed_and_the_place():
    one = rotation(64, seed=3)
    assert torch.equal(one.signs, rotation(64, seed=3).signs)
    assert not torch.equal(one.signs, rotation(64, seed=4).signs)
    assert not torch.equal(one.signs, rotation(64, seed=3, sequence=1).signs)


def test_a_large_matrix_in_pieces_is_the_same_and_its_source_is_left_alone():
    by, weight = (
        rotation(512, seed=0),
        torch.randn(1500, 512, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    )
    before = weight.clone()
    found = rotate_rows_(torch.empty_like(weight), weight, by)
    assert torch.equal(found, rotated(weight, by).to(torch.bfloat16))
    assert torch.equal(weight, before)


def test_no_rows_are_no_rows():
    assert rotated(torch.zeros(0, 8), rotation(8, seed=0)).shape == (0, 8)


def test_errors_name_the_two_sizes():
    with pytest.raises(InputError, match=r"6 channels, it is one of 4"):
        rotated(torch.ones(2, 6), rotation(4, seed=0))
    with pytest.raises(InputError, match=r"size=0"):
        rotation(0, seed=0)


def test_four_mixed_channels_worked_by_hand():
    """Sums and differences over two, the root of four; each four by themselves."""
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 8.0, 0.0]])
    assert mixed(x, 4).tolist() == [[5.0, -1.0, -2.0, 0.0, 4.0, 4.0, -4.0, -4.0]]


@pytest.mark.parametrize("block", [1, 2, 16, 256])
def test_blocks_are_mixed_by_the_matrix_that_compressed_tensors_has(block):
    theirs = deterministic_hadamard_matrix(block, dtype=torch.float64) / block**0.5
    x = torch.randn(2, 3, 3 * block, generator=torch.Generator().manual_seed(0))
    expected = (x.double().unflatten(-1, (3, block)) @ theirs).flatten(-2)
    torch.testing.assert_close(mixed(x, block).double(), expected, rtol=0, atol=2e-6)


@settings(max_examples=30)
@given(st.integers(0, 7), st.integers(1, 5), st.integers(0, 3), st.integers(0, 2**31))
def test_mixing_twice_gives_back_what_was_mixed_and_keeps_lengths(log2, blocks, rows, seed):
    x = torch.randn(rows, blocks << log2, generator=torch.Generator().manual_seed(seed))
    once = mixed(x, 1 << log2)
    torch.testing.assert_close(mixed(once, 1 << log2), x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(once.norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=1e-5)


def test_mixing_keeps_the_dtype_computes_in_float32_and_nan_stays_in_its_block():
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(mixed(x, 32), mixed(x.float(), 32).bfloat16())
    x[1, 5] = torch.nan
    found = mixed(x, 32)
    assert found[1, :32].isnan().all() and found.isnan().sum() == 32


@pytest.mark.parametrize("block", [0, 3, 6, 64, -2])
def test_a_block_that_cannot_mix_the_channels_is_refused(block):
    with pytest.raises(
        InputError,
        match=f"rotation: 96 channels by {block}; mix by a power of two that divides them",
    ):
        mixed(torch.ones(2, 96), block)

"""Blocks of outputs: their cuts by hand, and their parts of a whole sum."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantflow.core import orthogonal
from quantflow.numerics import output_blocks


@pytest.mark.parametrize(
    ("outputs", "width", "count"),
    [
        (0, 0, 0),
        (1, 1, 1),
        (2048, 2048, 1),
        (2049, 1152, 2),  # two of 1024.5, to the next 128
        (4096, 2048, 2),
        (5120, 1792, 3),  # three of 1706.7: 14 heads of 128 each, and 12
        (13824, 2048, 7),  # seven of 1974.9
    ],
)
def test_the_width_of_blocks_worked_by_hand(outputs, width, count):
    assert output_blocks.width(outputs) == width
    assert len(output_blocks.blocks(outputs)) == count
    assert output_blocks.nbytes(outputs) == 4 * outputs * width


@given(outputs=st.integers(1, 50_000))
def test_blocks_hold_every_output_once_and_never_more_than_they_may(outputs):
    parts = output_blocks.blocks(outputs)
    assert [place for part in parts for place in (part.start, part.stop)] == [
        0,
        *(place for part in parts[1:] for place in (part.start, part.start)),
        outputs,
    ]
    assert all(
        0 < part.stop - part.start <= min(output_blocks.width(outputs), 2048) for part in parts
    )
    assert len(parts) == 1 or output_blocks.width(outputs) % 128 == 0


@pytest.fixture
def small(monkeypatch):
    """Blocks of at most 4 outputs, in pairs."""
    monkeypatch.setattr(output_blocks, "MOST", 4)
    monkeypatch.setattr(output_blocks, "ALIGNED", 2)


def held(whole):
    """The blocks of a whole sum, by the definition.

    Row after row, the columns of its own block, then zeros.
    """
    width = output_blocks.width(len(whole))
    rows = torch.zeros(len(whole), width)
    for row in range(len(whole)):
        first = row // width * width
        found = whole[row, first : first + width]
        rows[row, : len(found)] = found
    return rows


@pytest.mark.usefixtures("small")
@given(outputs=st.integers(1, 11), seed=st.integers(0, 99))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sums_of_gradients_that_are_multiplied_are_those_of_the_products(outputs, seed):
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(5, outputs, generator=generator)
    factors = torch.rand(outputs, generator=generator) + 0.5
    found = output_blocks.scale_(held(gradients.T @ gradients), factors)
    products = gradients * factors
    torch.testing.assert_close(found, held(products.T @ products), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("small")
def test_a_block_and_the_diagonal_of_a_sum_worked_by_hand():
    sums = torch.tensor(
        [[1.0, 2, 3, 4], [2, 5, 6, 7], [3, 6, 8, 9], [4, 7, 9, 10], [11, 12, 0, 0], [12, 13, 0, 0]]
    )
    assert output_blocks.block_of(sums, slice(4, 6)).tolist() == [[11, 12], [12, 13]]
    assert output_blocks.diagonal_of(sums).tolist() == [1, 5, 8, 10, 11, 13]
    assert output_blocks.diagonal_of(torch.empty(0, 0)).tolist() == []


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "part", [slice(0, 11), slice(0, 4), slice(2, 5), slice(3, 11), slice(5, 5)]
)
def test_a_part_of_the_outputs_keeps_the_products_that_both_its_blocks_and_the_wholes_have(part):
    x = torch.randn(20, 11, generator=torch.Generator().manual_seed(0))
    whole = x.T @ x
    size, count = output_blocks.width(11), part.stop - part.start
    mask = torch.tensor([[i // size == j // size for j in range(11)] for i in range(11)])
    assert torch.equal(
        output_blocks.cut(held(whole), part),
        held((whole * mask)[part, part]) if count else torch.empty(0, 0),
    )


@pytest.mark.parametrize("size", [2, 4, 8, 16, 12])
@pytest.mark.parametrize("most", [4, 6, 16, 64])
def test_rotated_sums_are_blocks_of_the_whole_product(monkeypatch, size, most):
    """Whole blocks, several to a rotation, and rotations across blocks that do not fit them."""
    monkeypatch.setattr(output_blocks, "MOST", most)
    monkeypatch.setattr(output_blocks, "ALIGNED", 2)
    outputs = 48
    gradients = torch.randn(100, outputs, generator=torch.Generator().manual_seed(0))
    sums = held(gradients.T @ gradients)
    whole = torch.zeros(outputs, outputs)
    for rows in output_blocks.blocks(outputs):
        whole[rows, rows] = output_blocks.block_of(sums, rows)
    by = orthogonal.rotation(size, seed=1)
    dense = orthogonal.rotated(torch.eye(outputs), by)
    kept = sums.clone()
    torch.testing.assert_close(
        output_blocks.rotated(sums, by), held(dense.T @ whole @ dense), rtol=1e-4, atol=1e-3
    )
    assert torch.equal(sums, kept)

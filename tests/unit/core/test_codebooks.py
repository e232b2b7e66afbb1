"""Nearest entries of llama.cpp's codebooks, beside a search through every entry and every sign."""

import itertools

import gguf
import numpy as np
import pytest
import torch

from quantflow.core import blocks, codebooks
from quantflow.core.block_types import BLOCK_TYPES

TYPES = [name for name, kind in BLOCK_TYPES.items() if kind.codebook is not None]


def table_of(name: str) -> np.ndarray:
    """`gguf`'s table, [entries, length]."""
    table = getattr(gguf.quants, name)
    table.init_grid()
    return table.grid.reshape(-1, table.grid.shape[-1]).astype(np.float64)


def least_loss(values: np.ndarray, matters: np.ndarray, name: str) -> float:
    """The loss of 8 values at the best entries with the best signs, by trying all of them."""
    table, book = table_of(name), BLOCK_TYPES[name].codebook
    least: dict[int, float] = {0: 0.0}  # parity of the negatives so far -> loss
    for first in range(0, 8, book.length):
        x, m = values[first : first + book.length], matters[first : first + book.length]
        of_part = {0: np.inf, 1: np.inf}
        for signs in itertools.product((1, -1), repeat=book.length):
            loss = float((m * (x - table * signs) ** 2).sum(axis=1).min())
            parity = signs.count(-1) % 2
            of_part[parity] = min(of_part[parity], loss)
        least = {
            parity: min(least.get(parity ^ own, np.inf) + of_part[own] for own in (0, 1))
            for parity in (0, 1)
        }
    return least[0] if book.even_signs else min(least.values())


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("weighed", [False, True])
def test_no_entry_and_no_signs_lose_less_than_what_is_found(name, weighed):
    kind, generator = BLOCK_TYPES[name], np.random.default_rng(11)
    values = generator.normal(size=(24, 8)) * kind.points[-1] / 2
    matters = np.exp(generator.normal(size=8)) if weighed else np.ones(8)
    importance = torch.from_numpy(matters).float() if weighed else None
    found = codebooks.round_(torch.from_numpy(values).float(), kind, importance).double().numpy()
    losses = (matters * (values - found) ** 2).sum(axis=1)
    best = np.array([least_loss(row, matters, name) for row in values])
    assert np.allclose(losses, best, rtol=1e-5)


@pytest.mark.parametrize("name", ["IQ3_S", "IQ2_S"])
def test_under_a_metric_no_entry_with_the_same_signs_loses_less(name):
    kind, generator, table = BLOCK_TYPES[name], np.random.default_rng(12), table_of(name)
    length = codebooks.unit(kind)
    values = generator.normal(size=(32, length)) * kind.points[-1] / 2
    root = generator.normal(size=(length, length))
    metric = root @ root.T + np.eye(length)
    found = codebooks.round_units(
        torch.from_numpy(values).float(), kind, torch.from_numpy(metric).float()
    )
    for row, points in zip(values, found.double().numpy(), strict=True):
        errors = row - np.vstack([points, table * np.sign(row)])
        losses = np.einsum("ei,ij,ej->e", errors, metric, errors)
        assert losses[0] <= losses.min() * (1 + 1e-5)


@pytest.mark.parametrize("name", TYPES)
def test_a_metric_without_products_is_an_importance(name):
    kind, generator = BLOCK_TYPES[name], torch.Generator().manual_seed(5)
    size = codebooks.unit(kind)
    values = torch.randn(64, size, generator=generator) * kind.points[-1] / 2
    importance = torch.rand(size, generator=generator) + 0.1
    found = codebooks.round_units(values, kind, importance.diag())
    whole = values.reshape(-1, 8)
    matters = importance.repeat(8 // size)
    assert torch.equal(found.view_as(whole), codebooks.round_(whole.clone(), kind, matters))


@pytest.mark.parametrize("name", TYPES)
def test_what_is_found_is_held_and_stays(name):
    kind, generator = BLOCK_TYPES[name], torch.Generator().manual_seed(3)
    found = codebooks.round_(torch.randn(16, 256, generator=generator) * kind.points[-1], kind)
    assert blocks.holds(found.to(torch.int8), kind)
    assert torch.equal(codebooks.round_(found.clone(), kind), found)
    # entries by their numbers are the same again
    table = torch.from_numpy(table_of(name)).float()
    numbers = codebooks.numbers(found.to(torch.int8), kind)
    assert torch.equal(table[numbers.long()].flatten(-2), found.abs())


@pytest.mark.parametrize("name", TYPES)
def test_the_points_of_a_type_are_the_magnitudes_of_its_table(name):
    kind, table = BLOCK_TYPES[name], table_of(name)
    sizes = sorted({int(size) for size in table.flatten()})
    assert kind.points == (*(-size for size in reversed(sizes)), *sizes)
    assert table.shape == (kind.codebook.entries, kind.codebook.length)


@pytest.mark.parametrize("name", TYPES)
def test_more_rows_than_are_compared_at_a_time_are_found_alike(name, monkeypatch):
    kind, generator = BLOCK_TYPES[name], torch.Generator().manual_seed(4)
    values = torch.randn(6, 256, generator=generator) * kind.points[-1] / 2
    whole = codebooks.round_(values.clone(), kind)
    monkeypatch.setattr(codebooks, "_AT_ONCE", 1)
    assert torch.equal(codebooks.round_(values.clone(), kind), whole)

"""Losses of a trial: by hand, on a part of the rows; and its memory."""

import pytest
import torch

from quantflow.core.scheme import preset, with_group_size
from quantflow.numerics.smoothing import Absorber, Fold
from quantflow.numerics.trial import trial, working_bytes
from quantflow.transforms import trial as module


def fold_of(weights, scheme="W8A8", **statistics):
    schemes = {
        name: preset(scheme) if isinstance(scheme, str) else scheme[name] for name in weights
    }
    dtypes = dict.fromkeys(weights, torch.float32)
    return Fold(
        weights=weights,
        schemes=schemes,
        scale_dtypes=dtypes,
        statistics=statistics,
        absorber=Absorber(),
    )


def test_the_loss_of_weights_worked_by_hand():
    """int2 with amax 3, scale 2: 3 -> 1.5 -> 2, clipped to 1 -> 2; 1 -> 0.5 -> 0; errors -1, -1."""
    scheme = with_group_size(preset("W2A16"), 2)
    compared = trial(fold_of({"w": torch.tensor([[3.0, 1.0]])}, {"w": scheme}))
    hessian = torch.tensor([[2.0, 1.0], [1.0, 5.0]])
    assert compared.weight_loss(torch.ones(2), hessian) == 2 + 5 + 2 * 1
    assert compared.weight_power(hessian) == 9 * 2 + 5 + 2 * 3


def test_the_loss_by_rows_is_that_by_the_hessian_where_inputs_stay_as_they_are():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 32, generator=generator), torch.randn(8, 32, generator=generator)
    compared = trial(fold_of({"w": weight}, {"w": with_group_size(preset("W4A16"), 16)}))
    factors = torch.linspace(0.5, 2, 32)
    assert compared.output_loss(factors, x) == pytest.approx(
        compared.weight_loss(factors, x.T @ x), rel=1e-3
    )
    assert compared.power(x) == pytest.approx(compared.weight_power(x.T @ x), rel=1e-5)


def test_each_linear_is_rounded_by_its_own_scheme():
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    schemes = {"a": with_group_size(preset("W4A16"), 16), "b": preset("W8A16")}
    found = trial(fold_of({"a": weight, "b": weight}, schemes)).weights(torch.ones(32))
    assert list(found) == ["a", "b"]
    errors = {name: float((value - weight).square().sum()) for name, value in found.items()}
    assert errors["a"] > 100 * errors["b"]


def test_of_many_rows_blocks_at_equal_distances_stand_for_all(monkeypatch):
    monkeypatch.setattr(module, "ELEMENTS", 0)  # leaves 256 rows
    weights = {
        "a": torch.arange(1024.0)[:, None].expand(1024, 4),
        "b": torch.arange(256.0)[:, None].expand(256, 4),
    }
    parts = trial(fold_of(weights)).parts
    # a fifth of eight blocks, and one at least
    assert [len(part) for part in parts.values()] == [128, 128]
    assert parts["a"][0, 0] == 0
    monkeypatch.setattr(module, "_LEAST", 640)
    parts = trial(fold_of(weights)).parts
    assert parts["a"][::128, 0].tolist() == [0.0, 256.0, 512.0, 768.0]
    assert parts["b"][::128, 0].tolist() == [0.0]


def test_all_rows_take_part_where_they_are_few_and_are_not_copied():
    weight = torch.ones(512, 64)
    assert trial(fold_of({"w": weight})).parts["w"].data_ptr() == weight.data_ptr()


def test_memory_does_not_grow_with_rows_that_take_no_part():
    few, many = (working_bytes(4096, rows, samples=0, workers=1) for rows in (20_000, 2_000_000))
    assert few == many
    assert working_bytes(512, 1024, samples=0, workers=0) == 0  # all rows: no copy of them
    one, two = (working_bytes(512, 1024, samples=100, workers=workers) for workers in (1, 2))
    assert two == 2 * one


def test_a_static_range_is_that_of_other_text_where_it_is_known():
    """Seen: 0 to 10, so the row's 20 is clipped to 10; its own range would have kept it."""
    x, weight = torch.tensor([[20.0, 0.0]]), torch.eye(2)
    own = {"min_val": torch.zeros(2), "max_val": torch.tensor([20.0, 0.0])}
    other = {"seen_min": torch.zeros(2), "seen_max": torch.tensor([10.0, 5.0])}
    losses = [
        trial(fold_of({"w": weight}, "W8A8_STATIC", **own, **more)).output_loss(torch.ones(2), x)
        for more in ({}, other)
    ]
    assert losses[0] < 0.05
    assert losses[1] == pytest.approx(100, rel=0.02)
    smoothed = trial(fold_of({"w": weight}, "W8A8_STATIC", **own, **other)).output_loss(
        torch.tensor([2.0, 1.0]), x
    )
    assert smoothed == pytest.approx(100, rel=0.02)  # 20 / 2 against 10 / 2

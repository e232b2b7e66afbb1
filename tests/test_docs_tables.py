"""docs/recipes.md has the table that the code's own records make.

The records say what the mathematics does.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantflow.algorithms import ALGORITHMS
from quantflow.core.scheme import PRESETS, with_group_size
from quantflow.errors import SchemeError

DOCS = Path(__file__).resolve().parents[1] / "docs"


def make_tables():
    spec = importlib.util.spec_from_file_location("make_tables", DOCS / "make_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_what_goes_with_what_is_not_stale():
    text = (DOCS / "recipes.md").read_text()
    assert text == make_tables().page(text), "run `python docs/make_tables.py`"


def test_every_preset_algorithm_and_transform_stands_in_the_table():
    module = make_tables()
    header, _, *rows = (line for line in module.table().splitlines() if line.startswith("|"))
    assert all(f"`{name}`" in header for name in module.COLUMNS)
    schemes = [
        name for row in rows for name in row.split("|")[1].strip().split(", ") if name in PRESETS
    ]
    assert sorted(schemes) == sorted(PRESETS)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("preset", PRESETS)
def test_an_algorithm_says_of_schemes_what_its_mathematics_does(name, preset):
    scheme, weights = PRESETS[preset], PRESETS[preset].weights
    if weights.group_size is not None and weights.scale_format == "float":
        scheme = with_group_size(scheme, 32)
    _goes(ALGORITHMS[name], scheme)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_integers_that_share_one_scale_are_no_preset_and_are_answered_too(name):
    weights = replace(PRESETS["W8A16"].weights, granularity="per_tensor")
    _goes(ALGORITHMS[name], replace(PRESETS["W8A8"], weights=weights))


def _goes(algorithm, scheme):
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(32, 32, generator=generator), torch.randn(128, 32, generator=generator)
    statistics = {
        "hessian_sum": x.T @ x,
        "count": torch.tensor(128),
        "w|gradient_sum": torch.eye(32),
    }

    def quantize():
        return algorithm.quantize_group(
            {"w": weight}, scheme, statistics=statistics, scale_dtype=torch.float32
        )

    if algorithm.SUPPORTS.scheme(scheme) is None:
        assert torch.isfinite(quantize()["w"].weight.scale).all()
    else:
        with pytest.raises(SchemeError):
            quantize()

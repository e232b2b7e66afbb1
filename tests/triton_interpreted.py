"""Products by Triton's kernels beside the equation, in its interpreter.

`tests/unit/backends/test_triton.py` runs it with TRITON_INTERPRET=1.
"""

import pytest
import torch

from quantflow.backends import BACKENDS
from quantflow.backends.triton import backends
from tests.triton_weights import IDS, WEIGHTS, by_definition, drawn, error


@pytest.fixture
def poisoned(monkeypatch):
    """New memory holds NaN, so that what a kernel does not write is seen."""
    empty = torch.empty

    def filled(*shape, **words):
        made = empty(*shape, **words)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", filled)


@pytest.mark.parametrize("tokens", [1, 17, 64])
@pytest.mark.parametrize(("name", "size", "shape"), WEIGHTS, ids=IDS)
def test_products_are_those_of_the_equation(name, size, shape, tokens, poisoned):
    linear = drawn(name, size, shape, rounded=False)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(1, tokens, shape[1], generator=generator).bfloat16()
    bias = torch.randn(shape[0], generator=generator).bfloat16() if tokens == 17 else None
    backend = BACKENDS[f"triton_{name.lower()[:5]}"]
    found = backend.linear(x, backend.prepare(linear, torch.bfloat16), bias)
    assert found.shape == (1, tokens, shape[0]) and found.dtype == torch.bfloat16
    assert error(found, by_definition(x, linear, bias)) < 3e-3  # the output's own rounding


def test_sums_before_they_are_rounded_are_exact_to_float32():
    from quantflow.backends.triton import w4a16, w8a16

    x = torch.randn(5, 1024, generator=torch.Generator().manual_seed(3)).bfloat16()
    for name, size in (("W4A16_ASYM", 128), ("W8A16", None)):
        linear = drawn(name, size, (40, 1024), rounded=False)
        stored = backends._prepare(linear, torch.bfloat16)
        if size:
            found = w4a16.product(x, stored.codes, stored.scale, stored.zero, block=128)
        else:
            found = w8a16.product(x, stored.codes, stored.scale, block=128)
        assert error(found, by_definition(x, linear, None)) < 1e-6

"""HQQ's own package on a CPU, beside ours.

Its zero points are floats at the scale of the whole range, ours integers with a fitted scale.

The package is looked for in the folder that HQQ_PACKAGE names (an unpacked release of hqq 0.2.8);
without it this is skipped.
"""

import os
from importlib import import_module
from types import ModuleType

import pytest
import torch

from quantflow.algorithms import hqq, rtn
from quantflow.core.scheme import preset

VARIABLE = "HQQ_PACKAGE"
pytestmark = pytest.mark.skipif(
    not os.environ.get(VARIABLE), reason=f"{VARIABLE} names no folder that holds hqq"
)


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(os.environ[VARIABLE])
    return import_module("hqq.core.optimize")


def groups_of(kind: str) -> torch.Tensor:
    """256 groups of 128 values, of the size that weights have."""
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(256, 128, generator=generator)
    if kind == "heavy-tailed":
        values /= torch.randn(3, 256, 128, generator=generator).square().mean(0).sqrt()
    return values * 0.02


@pytest.mark.parametrize("solver", ["optimize_weights_proximal", "optimize_weights_proximal_slow"])
@pytest.mark.parametrize("kind", ["normal", "heavy-tailed"])
def test_its_own_sum_of_powers_is_not_smaller_than_ours(theirs, kind, solver):
    weight = groups_of(kind)
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    inverse = 15 / (high - low)
    q, inverse, zero = getattr(theirs, solver)(weight, inverse, -low * inverse, [0, 15], axis=1)
    package = (weight - (q - zero) / inverse).double().abs().pow(0.7).sum().item()
    found = {}
    for algorithm in (rtn, hqq):
        told = {"statistics": {}, "scale_dtype": torch.bfloat16}
        made = algorithm.quantize_group({"w": weight}, preset("W4A16_ASYM"), **told)["w"].weight
        found[algorithm.__name__] = (weight - made.dequantize()).double().abs().pow(
            0.7
        ).sum().item() / package
    print(f"{kind}, {solver}: sums of |error|^0.7 over the package's: {found}")
    assert found["quantflow.algorithms.hqq"] < 1

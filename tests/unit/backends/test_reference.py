"""The oracle in every flavour of float8, against ml_dtypes' rounding and sums in float64."""

import ml_dtypes
import numpy as np
import pytest
import torch

from quantflow.algorithms.rtn import quantize_group
from quantflow.backends import choose
from quantflow.backends.backend import Case
from quantflow.backends.reference import BACKEND as reference
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import PRESETS, LinearScheme, with_float8, with_group_size

FLAVOURS = {
    "e4m3fn": (ml_dtypes.float8_e4m3fn, 448),
    "e5m2": (ml_dtypes.float8_e5m2, 57344),
    "e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, 240),
    "gaudi2": (ml_dtypes.float8_e4m3fn, 240),
}
SCHEMES = {
    "FP8": PRESETS["FP8"],
    "FP8_DYNAMIC": PRESETS["FP8_DYNAMIC"],
    "FP8_BLOCK": with_group_size(PRESETS["FP8_BLOCK"], 16),
}
CPU = torch.device("cpu")


def rounded(x: np.ndarray, scale: np.ndarray, flavour: str) -> np.ndarray:
    kind, largest = FLAVOURS[flavour]
    return np.clip(x / scale, -largest, largest).astype(kind).astype(np.float64) * scale


def spread(amax: np.ndarray, flavour: str) -> np.ndarray:
    return (amax / np.float32(FLAVOURS[flavour][1])).astype(np.float32)


def expected(x: np.ndarray, weight: np.ndarray, name: str, flavour: str) -> np.ndarray:
    if name == "FP8":
        scales = [spread(np.abs(weight).max(), flavour), spread(np.abs(x).max(), flavour)]
    elif name == "FP8_DYNAMIC":
        scales = [spread(np.abs(part).max(1, keepdims=True), flavour) for part in (weight, x)]
    else:
        # [32, 48]
        blocks = np.abs(weight).reshape(2, 16, 3, 16).max((1, 3)).repeat(16, 0).repeat(16, 1)
        scales = [
            spread(blocks, flavour),
            spread(np.abs(x).reshape(5, 3, 16).max(2).repeat(16, 1), flavour),
        ]
    return rounded(x, scales[1], flavour) @ rounded(weight, scales[0], flavour).T


def nearest(weight: torch.Tensor, scheme: LinearScheme) -> QTensor:
    return quantize_group({"q": weight}, scheme, statistics={}, scale_dtype=torch.float32)[
        "q"
    ].weight


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("name", SCHEMES)
def test_the_reference_computes_every_flavour_at_every_granularity(name, flavour):
    generator = torch.Generator().manual_seed(0)
    weight, x = (
        torch.randn(32, 48, generator=generator),
        torch.randn(5, 48, generator=generator) * 3,
    )
    scheme = with_float8(SCHEMES[name], flavour)
    static = (
        torch.tensor([float(spread(np.abs(x.numpy()).max(), flavour))]) if name == "FP8" else None
    )
    linear = QuantizedLinear(weight=nearest(weight, scheme), scheme=scheme, input_scale=static)
    if flavour in ("e5m2", "e4m3fnuz"):  # whose codes no kernel reads
        assert (
            choose(Case(scheme=scheme, device=CPU, shape=(32, 48), dtype=torch.float32))[0]
            is reference
        )
    found = reference.linear(x, reference.prepare(linear, torch.float32), None)
    np.testing.assert_allclose(
        found.numpy(), expected(x.numpy(), weight.numpy(), name, flavour), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_lose_more_in_e5m2_which_is_why_no_artifact_has_it(name):
    weight = torch.randn(32, 48, generator=torch.Generator().manual_seed(1))
    lost = {}
    for flavour in ("e4m3fn", "e5m2"):
        scheme = with_float8(SCHEMES[name], flavour)
        lost[flavour] = (nearest(weight, scheme).dequantize() - weight).square().sum()
    # a mantissa bit is a factor of 2 of a step, 4 of its square
    assert 3 < lost["e5m2"] / lost["e4m3fn"] < 5

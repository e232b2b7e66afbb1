"""llm-compressor itself, on a CPU: GPTQ's rounding, the search of a range, SmoothQuant's factors, of the same numbers.

Slow and in an environment of its own, which LLM_COMPRESSOR_ENV names; without it every test here is skipped.
"""

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantflow.algorithms import gptq, rtn_mse
from quantflow.core.scheme import LinearScheme, preset, with_group_size
from quantflow.core.smoothing import Absorber, Fold
from quantflow.transforms import smoothquant

pytestmark = pytest.mark.slow

VARIABLE, RELEASE = "LLM_COMPRESSOR_ENV", "0.14.0.1"
SCHEMES = {
    "int4-g32": with_group_size(preset("W4A16"), 32),
    "int4-g32-asym": with_group_size(preset("W4A16_ASYM"), 32),
    "int3-g64": with_group_size(preset("W3A16"), 64),
    "int2-g32-asym": with_group_size(preset("W2A16_ASYM"), 32),
    "int8-channel": preset("W8A16"),
}
ALPHAS = (0.3, 0.5, 0.8)

# Runs in the other environment: every case of every part, from the arrays of one file into another.
THEIRS = """
import json, sys
import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.utils import calculate_qparams
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from llmcompressor.modifiers.transform.smoothquant.base import SmoothQuantModifier
from llmcompressor.observers.mse_quant import _grid_search_mse

torch.set_num_threads(1)
told, arrays = json.loads(sys.argv[1]), np.load(sys.argv[2])
given = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
found = {}
for name, (bits, symmetric, size) in told["schemes"].items():
    grouping = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
    words = {"num_bits": bits, "type": "int", "symmetric": symmetric, **grouping}
    args = QuantizationArgs(**words, actorder="weight" if size else None)
    parts = [given[f"{name}.{part}"][None].clone() for part in ("weight", "hessian", "scale", "zero_point")]
    real, _, fallback = quantize_weight(*parts, None, args)
    assert not fallback.any()
    found[f"{name}.real"] = real[0]
    weight = given[f"{name}.weight"]
    split = weight.reshape(1, weight.shape[0], -1, size or weight.shape[1])
    token = args.model_copy(update={"strategy": QuantizationStrategy.TOKEN})  # as its observer does
    low, high = _grid_search_mse(split, args, token, 11 / 32, 100, 32, 2.0, 0.3)
    found[f"{name}.mse_scale"], point = calculate_qparams(low, high, args)
    found[f"{name}.mse_zero_point"] = point.float()
linear = torch.nn.Linear(*given["smooth.weight"].shape[::-1], bias=False)
linear.weight.data = given["smooth.weight"]
for alpha in told["alphas"]:
    modifier = SmoothQuantModifier(smoothing_strength=alpha)
    found[f"smooth.{alpha}"] = modifier._calculate_smoothing_scales([linear], given["smooth.range"])
np.savez(sys.argv[3], **{name: tensor.detach().numpy() for name, tensor in found.items()})
"""


def caller() -> Callable[..., None]:
    """Return what runs a program of the other environment, or skip and say how to make one."""
    folder = os.environ.get(VARIABLE, "")
    python = Path(folder).absolute() / "bin" / "python"
    how = f"python3 -m venv ENV; ENV/bin/pip install torch==2.13.0 transformers==5.17.0 llmcompressor=={RELEASE}"
    if not folder:
        pytest.skip(f"{VARIABLE} does not name an environment with llmcompressor=={RELEASE}; make one: {how}")
    ask = "from importlib.metadata import version; print(version('llmcompressor'))"
    found = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=False) if python.exists() else None
    if found is None or found.stdout.strip() != RELEASE:
        pytest.skip(f"{VARIABLE}={folder} does not hold llmcompressor=={RELEASE}: {how}")

    def run(program: str, *arguments: object) -> None:
        line = [str(python), "-c", program, *map(str, arguments)]
        result = subprocess.run(line, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[-3000:]

    return run


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(features: int) -> Tensor:
    """Few directions carry most of the energy; channels get smaller one by one, so columns are in order of it."""
    x = random(1024, features // 4, seed=1) @ random(features // 4, features, seed=2) / 8 + random(1024, features, seed=3)
    x /= x.square().mean(0).sqrt()
    return x * torch.logspace(0.5, -0.5, features)


X, WEIGHT = inputs(256), random(48, 256, seed=4) * torch.linspace(0.5, 2.0, 48)[:, None]
STATISTICS = {"hessian_sum": X.T @ X, "count": torch.tensor(len(X))}
RANGE = 2 * X.abs().amax(0)  # theirs is the largest value less the smallest; of symmetric inputs that is twice the largest


def ours(algorithm: Any, scheme: LinearScheme) -> Any:
    made = algorithm.quantize_group({"w": WEIGHT}, scheme, statistics=STATISTICS, scale_dtype=torch.float32)
    return made["w"].weight


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Tensor]:
    """What it makes of the weight with our scales, and which ranges and factors it finds."""
    call, folder, told, given = caller(), tmp_path_factory.mktemp("theirs"), {}, {}
    for name, scheme in SCHEMES.items():
        weight = ours(gptq, scheme)
        points = torch.zeros_like(weight.scale) if weight.zero_point is None else weight.zero_point
        told[name] = (scheme.weights.num_bits, scheme.weights.symmetric, scheme.weights.group_size)
        parts = {"weight": WEIGHT, "hessian": STATISTICS["hessian_sum"], "scale": weight.scale, "zero_point": points}
        given |= {f"{name}.{part}": tensor.numpy() for part, tensor in parts.items()}
    given |= {"smooth.weight": WEIGHT.numpy(), "smooth.range": RANGE.numpy()}
    np.savez(folder / "given.npz", **given)
    call(THEIRS, json.dumps({"schemes": told, "alphas": ALPHAS}), folder / "given.npz", folder / "found.npz")
    found = np.load(folder / "found.npz")
    return {name: torch.from_numpy(found[name]) for name in found.files}


@pytest.mark.parametrize("name", SCHEMES)
def test_gptq_takes_its_decisions_on_the_same_scales(theirs: Mapping[str, Tensor], name: str) -> None:
    """Columns in order of the Hessian's diagonal and groups in place, as its `actorder: weight` has them, damped by 0.01."""
    found, expected = ours(gptq, SCHEMES[name]).dequantize(), theirs[f"{name}.real"]
    step = (found - WEIGHT).abs().amax()
    same = (found - expected).abs() < 1e-3 * step
    print(f"{name}: {int((~same).sum())} of {same.numel()} weights differ")
    assert same.all(dim=1).float().mean() > 0.95  # a tie but for float32's last bits changes what follows in its row
    assert same.float().mean() > 0.999


@pytest.mark.parametrize("name", SCHEMES)
def test_rtn_mse_finds_the_scales_of_its_search_of_the_same_multiples(theirs: Mapping[str, Tensor], name: str) -> None:
    """Its observer tries 32/32 down to 22/32 of each range; we also 33/32, which loses less where scales differ."""
    scheme, mine = SCHEMES[name].weights, ours(rtn_mse, SCHEMES[name])
    scale, point = theirs[f"{name}.mse_scale"], theirs[f"{name}.mse_zero_point"]
    groups = WEIGHT.reshape(*scale.shape, -1)  # [O, G, g]

    def lost(scale: Tensor, point: Tensor) -> Tensor:
        q = (groups / scale[..., None] + point[..., None]).round().clamp(scheme.qmin, scheme.qmax)
        return (groups - scale[..., None] * (q - point[..., None])).square().sum(-1)

    high, low = groups.amax(-1).clamp(min=0), groups.amin(-1).clamp(max=0)
    whole = (2 * torch.maximum(high, -low) if scheme.symmetric else high - low) / (2**scheme.num_bits - 1)
    points = torch.zeros_like(mine.scale) if mine.zero_point is None else mine.zero_point.float()
    differs = (mine.scale / scale - 1).abs() > 1e-5
    print(f"{name}: {int(differs.sum())} of {differs.numel()} scales differ")
    assert 0 < differs.float().mean() < 0.4
    torch.testing.assert_close(mine.scale[differs], whole[differs] * 33 / 32)
    assert (lost(mine.scale, points)[differs] < lost(scale, point)[differs]).all()
    assert torch.equal(points[~differs], point[~differs])


@pytest.mark.parametrize("alpha", ALPHAS)
def test_smoothquants_factors_are_its_but_for_one_number(theirs: Mapping[str, Tensor], alpha: float) -> None:
    """It takes ranges where the paper takes maxima, of inputs and weights: all factors have 2^(2 alpha - 1) in common."""
    scheme = preset("W8A8")
    fold = Fold(
        weights={"w": WEIGHT},
        schemes={"w": scheme},
        scale_dtypes={"w": torch.float32},
        statistics={"channel_amax": RANGE / 2},
        absorber=Absorber(norm_weight=torch.ones(len(RANGE))),
    )
    smoothing = smoothquant.solve(fold, options={"alpha": alpha, "linears": True}).smoothing
    assert smoothing is not None
    torch.testing.assert_close(smoothing.factors * 2 ** (2 * alpha - 1), theirs[f"smooth.{alpha}"])

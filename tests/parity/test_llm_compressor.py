"""llm-compressor itself, on a CPU, of the same numbers.

Compared are GPTQ's rounding, a search of ranges, and SmoothQuant's and AWQ's factors.

Slow and in an environment of its own, which LLM_COMPRESSOR_ENV names; without it every test here is
skipped.
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
from quantflow.numerics.grid import either_sign
from quantflow.numerics.smoothing import Absorber, Fold
from quantflow.transforms import awq, smoothquant

pytestmark = pytest.mark.slow

VARIABLE, RELEASE = "LLM_COMPRESSOR_ENV", "0.14.0.1"
SCHEMES = {
    "int4-g32": with_group_size(preset("W4A16"), 32),
    "int4-g32-asym": with_group_size(preset("W4A16_ASYM"), 32),
    "int3-g64": with_group_size(preset("W3A16"), 64),
    "int2-g32-asym": with_group_size(preset("W2A16_ASYM"), 32),
    "int8-channel": preset("W8A16"),
    "float8-channel": preset("FP8_DYNAMIC"),
}
INTEGERS = [name for name, scheme in SCHEMES.items() if scheme.weights.kind == "int"]
ALPHAS = (0.3, 0.5, 0.8)

# Runs in the other environment: every case of every part, from the arrays of one file into another.
THEIRS = """
import json, sys
import numpy as np
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
    disable_quantization,
    initialize_module_for_quantization,
)
from compressed_tensors.quantization.utils import calculate_qparams
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.awq.mappings import ResolvedMapping
from llmcompressor.modifiers.transform.smoothquant.base import SmoothQuantModifier
from llmcompressor.observers.mse_quant import _grid_search_mse

torch.set_num_threads(1)
told, arrays = json.loads(sys.argv[1]), np.load(sys.argv[2])
given = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
found = {}
for name, (kind, bits, symmetric, size) in told["schemes"].items():
    grouping = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
    words = {"num_bits": bits, "type": kind, "symmetric": symmetric, **grouping}
    args = QuantizationArgs(**words, actorder="weight" if size else None)
    parts = [
        given[f"{name}.{part}"][None].clone()
        for part in ("weight", "hessian", "scale", "zero_point")
    ]
    real, _, fallback = quantize_weight(*parts, None, args)
    assert not fallback.any()
    found[f"{name}.real"] = real[0]
    if kind == "float":
        continue
    weight = given[f"{name}.turned"]
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


class Linears(torch.nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.linears = torch.nn.ModuleList(
            torch.nn.Linear(*weight.shape[::-1], bias=False) for weight in weights
        )
        for linear, weight in zip(self.linears, weights):
            linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)

    def forward(self, x):
        return torch.cat([linear(x) for linear in self.linears], dim=-1)


class Search(AWQModifier):
    def _run_samples(self, module):
        return [module(given["awq.x"])]


for duo, steps in (
    (False, 21),
    (True, 22),
):  # alpha by 0.05; with weights it tries no factors first
    parent = Linears([given["awq.q"], given["awq.k"]])
    layers = list(parent.linears)
    outputs, weights = [parent(given["awq.x"])], {layer: layer.weight.clone() for layer in layers}
    args = QuantizationArgs(
        num_bits=4, type="int", symmetric=False, strategy="group", group_size=32
    )
    for layer in layers:
        initialize_module_for_quantization(
            layer, QuantizationScheme(targets=["Linear"], weights=args)
        )
        layer.weight_observer = None
        disable_quantization(
            layer
        )  # while it searches, as its modifier does: weights are rounded by the search
    x = given["awq.x"].abs()
    search = Search(duo_scaling=duo, n_grid=steps)
    search._smooth_activation_stats["norm"] = [x.sum(0), torch.tensor(len(x))]
    about = {
        "smooth_name": "norm",
        "smooth_layer": parent,
        "balance_layers": layers,
        "balance_names": ["q", "k"],
    }
    mapping = ResolvedMapping(**about, parent=parent, parent_name="")
    found[f"awq.{duo}"] = search._compute_best_scale(mapping, outputs, weights)
    found[f"awq.{duo}.reduction"] = torch.tensor(search._error_metrics[0]["reduction"])
np.savez(sys.argv[3], **{name: tensor.detach().numpy() for name, tensor in found.items()})
"""


def caller() -> Callable[..., None]:
    """Runner of a program in the other environment.

    Without one the test is skipped; the message says how to make it.
    """
    folder = os.environ.get(VARIABLE, "")
    python = Path(folder).absolute() / "bin" / "python"
    how = (
        "python3 -m venv ENV; ENV/bin/pip install torch==2.13.0 transformers==5.17.0 "
        f"llmcompressor=={RELEASE}"
    )
    if not folder:
        pytest.skip(
            f"{VARIABLE} does not name an environment with llmcompressor=={RELEASE}; make one: "
            f"{how}"
        )
    ask = "from importlib.metadata import version; print(version('llmcompressor'))"
    found = (
        subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=False)
        if python.exists()
        else None
    )
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
    """Few directions carry most of the energy; channels shrink, so columns are in its order."""
    x = random(1024, features // 4, seed=1) @ random(features // 4, features, seed=2) / 8 + random(
        1024, features, seed=3
    )
    x /= x.square().mean(0).sqrt()
    return x * torch.logspace(0.5, -0.5, features)


X, WEIGHT = inputs(256), random(48, 256, seed=4) * torch.linspace(0.5, 2.0, 48)[:, None]
STATISTICS = {"hessian_sum": X.T @ X, "count": torch.tensor(len(X))}
PAIR = {"q": WEIGHT, "k": random(16, 256, seed=5)}
# theirs is the largest value less the smallest; of symmetric inputs that is twice the largest
RANGE = 2 * X.abs().amax(0)


def ours(algorithm: Any, scheme: LinearScheme) -> Any:
    made = algorithm.quantize_group(
        {"w": WEIGHT}, scheme, statistics=STATISTICS, scale_dtype=torch.float32
    )
    return made["w"].weight


def fold_of(weights: Mapping[str, Tensor], scheme: LinearScheme, **statistics: Tensor) -> Fold:
    return Fold(
        weights=weights,
        schemes=dict.fromkeys(weights, scheme),
        scale_dtypes=dict.fromkeys(weights, torch.float32),
        statistics=statistics,
        absorber=Absorber(norm_weight=torch.ones(X.shape[1])),
    )


def turned(scheme: LinearScheme) -> Tensor:
    """The weight with the largest magnitude of each of its groups below zero.

    That is the longer side. The weight is unchanged where groups may not turn.
    """
    if not either_sign(scheme):
        return WEIGHT
    # [O, G, g]
    groups = WEIGHT.reshape(len(WEIGHT), -1, scheme.weights.group_size or WEIGHT.shape[1])
    above = groups.amax(-1, keepdim=True) > -groups.amin(-1, keepdim=True)
    return torch.where(above, -groups, groups).reshape(WEIGHT.shape)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Tensor]:
    """What it makes of the weight with our scales, and which ranges and factors it finds."""
    call, folder, told, given = caller(), tmp_path_factory.mktemp("theirs"), {}, {}
    for name, scheme in SCHEMES.items():
        weight = ours(gptq, scheme)
        points = torch.zeros_like(weight.scale) if weight.zero_point is None else weight.zero_point
        told[name] = (
            scheme.weights.kind,
            scheme.weights.num_bits,
            scheme.weights.symmetric,
            scheme.weights.group_size,
        )
        parts = {
            "weight": WEIGHT,
            "hessian": STATISTICS["hessian_sum"],
            "scale": weight.scale,
            "zero_point": points,
        }
        parts["turned"] = turned(scheme)
        given |= {f"{name}.{part}": tensor.numpy() for part, tensor in parts.items()}
    given |= {
        "awq.x": X.numpy(),
        **{f"awq.{name}": weight.numpy() for name, weight in PAIR.items()},
    }
    given |= {"smooth.weight": WEIGHT.numpy(), "smooth.range": RANGE.numpy()}
    np.savez(folder / "given.npz", **given)
    call(
        THEIRS,
        json.dumps({"schemes": told, "alphas": ALPHAS}),
        folder / "given.npz",
        folder / "found.npz",
    )
    found = np.load(folder / "found.npz")
    return {name: torch.from_numpy(found[name]) for name in found.files}


@pytest.mark.parametrize("name", SCHEMES)
def test_gptq_takes_its_decisions_on_the_same_scales(
    theirs: Mapping[str, Tensor], name: str
) -> None:
    """Columns in order of the Hessian's diagonal and groups in place, damped by 0.01.

    Its `actorder: weight` has them so.
    """
    found, expected = ours(gptq, SCHEMES[name]).dequantize(), theirs[f"{name}.real"]
    step = (found - WEIGHT).abs().amax()
    same = (found - expected).abs() < 1e-3 * step
    print(f"{name}: {int((~same).sum())} of {same.numel()} weights differ")
    # a tie but for float32's last bits changes what follows in its row
    assert same.all(dim=1).float().mean() > 0.95
    assert same.float().mean() > 0.999


@pytest.mark.parametrize("name", INTEGERS)
def test_rtn_mse_finds_the_scales_of_its_search_of_the_same_multiples(
    theirs: Mapping[str, Tensor], name: str
) -> None:
    """Its observer tries 32/32 down to 22/32 of each range; we also try 33/32.

    That loses less where scales differ.

    Its scales are positive: it is given groups that we turn turned. Of these we also try the whole
    range as it is.
    """
    scheme, mine = SCHEMES[name].weights, ours(rtn_mse, SCHEMES[name])
    scale, point = theirs[f"{name}.mse_scale"], theirs[f"{name}.mse_zero_point"]
    given = turned(SCHEMES[name]).reshape(*scale.shape, -1)  # [O, G, g]
    groups = WEIGHT.reshape(*scale.shape, -1)
    scale = torch.where((given == groups).all(-1), scale, -scale)

    def lost(scale: Tensor, point: Tensor) -> Tensor:
        q = (groups / scale[..., None] + point[..., None]).round().clamp(scheme.qmin, scheme.qmax)
        return (groups - scale[..., None] * (q - point[..., None])).square().sum(-1)

    high, low = groups.amax(-1).clamp(min=0), groups.amin(-1).clamp(max=0)
    whole = (2 * torch.maximum(high, -low) if scheme.symmetric else high - low) / (
        2**scheme.num_bits - 1
    )
    points = torch.zeros_like(mine.scale) if mine.zero_point is None else mine.zero_point.float()
    differs = (mine.scale / scale - 1).abs() > 1e-5
    print(f"{name}: {int(differs.sum())} of {differs.numel()} scales differ")
    assert 0 < differs.float().mean() < 0.4
    unturned = differs & (scale < 0) & (mine.scale > 0)
    torch.testing.assert_close(mine.scale[unturned], whole[unturned])
    wider = differs & ~unturned
    torch.testing.assert_close(mine.scale[wider], (scale.sign() * whole)[wider] * 33 / 32)
    assert (lost(mine.scale, points)[differs] < lost(scale, point)[differs]).all()
    assert torch.equal(points[~differs], point[~differs])


@pytest.mark.parametrize("alpha", ALPHAS)
def test_smoothquants_factors_are_its_but_for_one_number(
    theirs: Mapping[str, Tensor], alpha: float
) -> None:
    """It takes ranges where the paper takes maxima, of inputs and weights.

    All factors have 2^(2 alpha - 1) in common.
    """
    fold = fold_of({"w": WEIGHT}, preset("W8A8"), channel_amax=RANGE / 2)
    smoothing = smoothquant.solve(fold, options={"alpha": alpha, "linears": True}).smoothing
    assert smoothing is not None
    torch.testing.assert_close(smoothing.factors * 2 ** (2 * alpha - 1), theirs[f"smooth.{alpha}"])


@pytest.mark.parametrize("duo", [False, True], ids=["inputs", "inputs-and-weights"])
def test_awqs_search_takes_its_step(theirs: Mapping[str, Tensor], duo: bool) -> None:
    """Alphas by 0.05, zero points in groups of 32, the outputs of two linears of one input."""
    statistics = {"abs_sum": X.abs().double().sum(0), **STATISTICS}
    fold = fold_of(PAIR, SCHEMES["int4-g32-asym"], **statistics)
    found = awq.solve(fold, options={"duo": duo, "clip": False, "linears": True})
    assert found.smoothing is not None and found.decisions["duo"] == duo
    torch.testing.assert_close(
        found.smoothing.factors, theirs[f"awq.{duo}"].reshape(-1).float(), rtol=1e-4, atol=0
    )
    reduction = found.decisions["error"] / found.decisions["error_before"]
    print(f"alpha {found.decisions['alpha']}, error {reduction:.3f} of that without")
    assert 0 < found.decisions["alpha"] < 0.95  # a step that both have tried, and its neighbours
    assert reduction == pytest.approx(float(theirs[f"awq.{duo}.reduction"]), rel=1e-4)

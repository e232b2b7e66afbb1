"""Intel's extension for PyTorch (IPEX) computes from our GPTQ and AWQ tensors what the weights say.

It has an environment of its own, which IPEX_ENV names (intel-extension-for-pytorch 2.8 with torch
2.8); without it the test is skipped. This release takes checkpoints in GPTQ's and AWQ's layouts;
the one with `packed_weight` (quantflow/formats/ipex.py) is that of an older one, 2.1.
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import named
from quantflow.formats import LAYOUTS
from quantflow.formats.weight_layout import integers

ENVIRONMENT = os.environ.get("IPEX_ENV") or None
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, sys, torch
import intel_extension_for_pytorch as ipex
from safetensors.torch import load_file, save_file
from intel_extension_for_pytorch.quantization import (
    WoqLowpMode,
    WoqWeightDtype,
    get_weight_only_quant_qconfig_mapping,
)
from intel_extension_for_pytorch.utils.weight_only_quantization import (
    _convert_woq_with_low_precision_checkpoint,
)

folder, (method, ordered, rows, columns) = sys.argv[1], json.loads(sys.argv[2])
tensors, x = load_file(f"{folder}/packed.safetensors"), load_file(f"{folder}/x.safetensors")["x"]
model = torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=False)).eval()
mapping = get_weight_only_quant_qconfig_mapping(
    weight_dtype=WoqWeightDtype.INT4, lowp_mode=WoqLowpMode.NONE
)
told = {"quant_method": method, **({"desc_act": ordered} if method == "gptq" else {})}
made = _convert_woq_with_low_precision_checkpoint(model, mapping, tensors, told)
assert type(made[0]).__name__ == "WeightOnlyQuantizedLinear", made
with torch.no_grad():
    save_file({"y": made(x).float().contiguous()}, f"{folder}/y.safetensors")
"""
# A linear of every kind beside the reference's product.
BACKEND = """
import torch
from quantflow.backends import ipex
from quantflow.backends.backend import Case
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import preset, with_group_size

draw = torch.Generator().manual_seed(11)
for name, size in (("W4A16", 32), ("W4A16", 128), ("W4A16_ASYM", 64)):
    for dtype, allowed in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        scheme = with_group_size(preset(name), size)
        qvalue = torch.randint(-8, 8, (64, 256), generator=draw).to(torch.int8)
        scale = torch.rand(64, 256 // size, generator=draw) * 0.1 + 0.01
        zero = (
            None
            if name == "W4A16"
            else torch.randint(-8, 8, scale.shape, generator=draw).to(torch.int8)
        )
        weight = QTensor(qvalue=qvalue, scale=scale, zero_point=zero, scheme=scheme.weights)
        linear = QuantizedLinear(weight=weight, scheme=scheme)
        case = Case(scheme=scheme, device=torch.device("cpu"), shape=(64, 256), dtype=dtype)
        assert ipex.BACKEND.why_not(case) is None, ipex.BACKEND.why_not(case)
        x, bias = (
            torch.randn(2, 3, 256, generator=draw).to(dtype),
            torch.randn(64, generator=draw).to(dtype),
        )
        y = ipex.BACKEND.linear(x, ipex.BACKEND.prepare(linear, dtype), bias)
        expected = x.float() @ linear.dequantize().T + bias.float()
        error = float((y.float() - expected).abs().max() / expected.abs().max())
        print(name, size, dtype, error)
        assert y.dtype == dtype and y.shape == expected.shape and error < allowed, (
            name,
            size,
            dtype,
            error,
        )
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        ENVIRONMENT is None, reason="IPEX_ENV names no environment with intel-extension-for-pytorch"
    ),
]
ROWS, COLUMNS = 64, 256


@pytest.mark.proof(
    formats="awq, gptq",
    direction="written",
    programs={"intel-extension-for-pytorch": "intel-extension-for-pytorch"},
    compared="products with 4-bit weights that it loaded as a low-precision checkpoint: within "
    "1e-5 of float32's largest",
    environment="IPEX_ENV",
)
@pytest.mark.parametrize(
    ("layout", "symmetric", "ordered"),
    [("gptq", True, False), ("gptq", False, False), ("gptq", False, True), ("awq", False, False)],
    ids=["gptq", "gptq with zero points", "gptq with desc_act", "awq"],
)
def test_the_extension_computes_from_our_tensors_what_the_weights_say(
    tmp_path, layout, symmetric, ordered
):
    found = named(integers(4, 32, symmetric=symmetric, where="a test"), None, "pack-quantized")
    generator, weights = torch.Generator().manual_seed(5), found.weights
    qvalue = torch.randint(-8, 8, (ROWS, COLUMNS), generator=generator).to(torch.int8)
    scale = 2.0 ** torch.randint(-6, -2, (ROWS, COLUMNS // 32), generator=generator)
    zero_point = (
        None if symmetric else torch.randint(-7, 8, scale.shape, generator=generator).to(torch.int8)
    )
    weight = QTensor(qvalue=qvalue, scale=scale, zero_point=zero_point, scheme=weights)
    linear = QuantizedLinear(weight=weight, scheme=found)
    packed = LAYOUTS[layout]
    if ordered:
        group_of = torch.arange(COLUMNS // 32).repeat_interleave(32)[
            torch.randperm(COLUMNS, generator=generator)
        ]
        linear, packed = (
            replace(linear, order=torch.argsort(group_of, stable=True)),
            packed.with_order(),
        )
    save_file(
        packed.encode("0", linear, scale_dtype=torch.float16), tmp_path / "packed.safetensors"
    )
    x = torch.randn(7, COLUMNS, generator=generator)
    save_file({"x": x}, tmp_path / "x.safetensors")
    line = [str(Path(str(ENVIRONMENT)).absolute() / "bin" / "python"), "-c", SCRIPT, str(tmp_path)]
    asked = json.dumps([layout, ordered, ROWS, COLUMNS])
    done = subprocess.run([*line, asked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = x @ linear.dequantize().T
    error = float(
        (load_file(tmp_path / "y.safetensors")["y"] - expected).abs().max() / expected.abs().max()
    )
    print(f"{layout}: largest difference {error:.2e} of the largest output")
    assert error < 1e-5


def in_environment(*words, cwd="."):
    """The output of its Python, which imports quantflow from this repository."""
    line = [str(Path(str(ENVIRONMENT)).absolute() / "bin" / "python"), *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        line, capture_output=True, text=True, check=False, env=environment, cwd=cwd
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_backend_computes_what_the_weights_say():
    print(in_environment("-c", BACKEND))


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM"])
def test_an_artifact_runs_on_the_extension_and_writes_the_tokens_of_the_reference(tmp_path, scheme):
    """The whole of quantflow beside the extension's torch: rounded, exported, proved, run."""
    asked = ["quantize", ROOT / "examples/tiny-llama", "-o", tmp_path / "a", "--scheme", scheme]
    in_environment("-m", "quantflow", *map(str, asked), "--algorithm", "rtn", "-q")
    asked = ["generate", tmp_path / "a", "--prompt", "def main(", "--max-new-tokens", "24", "-q"]
    texts = {
        backend: in_environment("-m", "quantflow", *map(str, asked), "--backend", backend)
        for backend in ("ipex", "reference")
    }
    assert len(texts["ipex"]) > 20 and texts["ipex"] == texts["reference"]

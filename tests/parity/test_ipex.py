"""Intel's extension for PyTorch (IPEX) computes from our GPTQ and AWQ tensors what the weights say.

It has an environment of its own, which IPEX_ENV names (intel-extension-for-pytorch 2.8 with torch 2.8); without it the test is
skipped. This release takes checkpoints in GPTQ's and AWQ's layouts; the one with `packed_weight` (quantflow/formats/ipex.py) is
that of an older one, 2.1.
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
SCRIPT = """
import json, sys, torch
import intel_extension_for_pytorch as ipex
from safetensors.torch import load_file, save_file
from intel_extension_for_pytorch.quantization import WoqLowpMode, WoqWeightDtype, get_weight_only_quant_qconfig_mapping
from intel_extension_for_pytorch.utils.weight_only_quantization import _convert_woq_with_low_precision_checkpoint

folder, (method, ordered, rows, columns) = sys.argv[1], json.loads(sys.argv[2])
tensors, x = load_file(f"{folder}/packed.safetensors"), load_file(f"{folder}/x.safetensors")["x"]
model = torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=False)).eval()
mapping = get_weight_only_quant_qconfig_mapping(weight_dtype=WoqWeightDtype.INT4, lowp_mode=WoqLowpMode.NONE)
told = {"quant_method": method, **({"desc_act": ordered} if method == "gptq" else {})}
made = _convert_woq_with_low_precision_checkpoint(model, mapping, tensors, told)
assert type(made[0]).__name__ == "WeightOnlyQuantizedLinear", made
with torch.no_grad():
    save_file({"y": made(x).float().contiguous()}, f"{folder}/y.safetensors")
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(ENVIRONMENT is None, reason="IPEX_ENV names no environment with intel-extension-for-pytorch"),
]
ROWS, COLUMNS = 64, 256


@pytest.mark.proof(
    formats="awq, gptq",
    direction="written",
    programs={"intel-extension-for-pytorch": "intel-extension-for-pytorch"},
    compared="products with 4-bit weights that it loaded as a low-precision checkpoint: within 1e-5 of float32's largest",
    environment="IPEX_ENV",
)
@pytest.mark.parametrize(
    ("layout", "symmetric", "ordered"),
    [("gptq", True, False), ("gptq", False, False), ("gptq", False, True), ("awq", False, False)],
    ids=["gptq", "gptq with zero points", "gptq with desc_act", "awq"],
)
def test_the_extension_computes_from_our_tensors_what_the_weights_say(tmp_path, layout, symmetric, ordered):
    found = named(integers(4, 32, symmetric=symmetric, where="a test"), None, "pack-quantized")
    generator, weights = torch.Generator().manual_seed(5), found.weights
    qvalue = torch.randint(-8, 8, (ROWS, COLUMNS), generator=generator).to(torch.int8)
    scale = 2.0 ** torch.randint(-6, -2, (ROWS, COLUMNS // 32), generator=generator)
    zero_point = None if symmetric else torch.randint(-7, 8, scale.shape, generator=generator).to(torch.int8)
    weight = QTensor(qvalue=qvalue, scale=scale, zero_point=zero_point, scheme=weights)
    linear = QuantizedLinear(weight=weight, scheme=found)
    packed = LAYOUTS[layout]
    if ordered:
        group_of = torch.arange(COLUMNS // 32).repeat_interleave(32)[torch.randperm(COLUMNS, generator=generator)]
        linear, packed = replace(linear, order=torch.argsort(group_of, stable=True)), packed.with_order()
    save_file(packed.encode("0", linear, scale_dtype=torch.float16), tmp_path / "packed.safetensors")
    x = torch.randn(7, COLUMNS, generator=generator)
    save_file({"x": x}, tmp_path / "x.safetensors")
    line = [str(Path(str(ENVIRONMENT)).absolute() / "bin" / "python"), "-c", SCRIPT, str(tmp_path)]
    asked = json.dumps([layout, ordered, ROWS, COLUMNS])
    done = subprocess.run([*line, asked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = x @ linear.dequantize().T
    error = float((load_file(tmp_path / "y.safetensors")["y"] - expected).abs().max() / expected.abs().max())
    print(f"{layout}: largest difference {error:.2e} of the largest output")
    assert error < 1e-5

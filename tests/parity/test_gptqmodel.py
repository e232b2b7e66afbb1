"""GPTQModel unpacks what we pack: its own dequantization of GPTQ's and AWQ's layouts, bit for bit.

It has an environment of its own, which GPTQMODEL_ENV names (gptqmodel 7.7); without it the tests
are skipped. Version 1 is converted by its own function first.
"""

import json
import os
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.core.scheme import named
from quantflow.formats import LAYOUTS
from quantflow.formats.gptq.layout import GPTQLayout
from quantflow.formats.weight_layout import integers

ENVIRONMENT = os.environ.get("GPTQMODEL_ENV") or None
GPTQ = """
import json, sys, torch
from safetensors.torch import load_file, save_file
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

rows, tensors, found = json.loads(sys.argv[1]), load_file("packed.safetensors"), {}
for name, (bits, size, symmetric, first, ordered) in rows.items():
    module = TorchLinear(
        bits=bits,
        group_size=size,
        sym=symmetric,
        desc_act=ordered,
        in_features=96,
        out_features=64,
        bias=False,
        pack_dtype=torch.int32,
        register_buffers=True,
    )
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        assert getattr(module, part).shape == tensors[f"{name}.{part}"].shape
        setattr(module, part, tensors[f"{name}.{part}"])
    if first:
        convert_gptq_v1_to_v2_format_module(module, bits=bits, pack_dtype=torch.int32)
    found[name] = module.dequantize_weight().T.float().contiguous()
save_file(found, "theirs.safetensors")
"""
AWQ = """
import json, sys
from safetensors.torch import load_file, save_file
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
rows, tensors, found = json.loads(sys.argv[1]), load_file("packed.safetensors"), {}
for name, (bits, size, *_) in rows.items():
    parts = [tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales")]
    found[name] = dequantize_gemm(*parts, bits, 96 if size == -1 else size).T.float().contiguous()
save_file(found, "theirs.safetensors")
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        ENVIRONMENT is None, reason="GPTQMODEL_ENV names no environment with gptqmodel"
    ),
]


def random_linear(bits: int, size: int, *, symmetric: bool, ordered: bool) -> QuantizedLinear:
    """[64, 96]; scales are exact in float16, zero points above the lowest code.

    Version 1 does not hold the lowest code.
    """
    found = named(integers(bits, size, symmetric=symmetric, where="a test"), None, "pack-quantized")
    generator, weights = torch.Generator().manual_seed(bits), found.weights
    scale = 2.0 ** torch.randint(-9, 3, (64, 1 if size == -1 else 96 // size), generator=generator)
    qvalue = torch.randint(weights.qmin, weights.qmax + 1, (64, 96), generator=generator).to(
        torch.int8
    )
    zero_point = torch.randint(
        weights.qmin + 1, weights.qmax + 1, scale.shape, generator=generator
    ).to(torch.int8)
    weight = QTensor(
        qvalue=qvalue, scale=scale, zero_point=None if symmetric else zero_point, scheme=weights
    )
    linear = QuantizedLinear(weight=weight, scheme=found)
    return replace(linear, order=torch.randperm(96, generator=generator)) if ordered else linear


def theirs(
    script: str, rows: dict[str, list], tensors: dict[str, torch.Tensor], folder: Path
) -> dict[str, torch.Tensor]:
    save_file(tensors, folder / "packed.safetensors")
    command = [str(Path(str(ENVIRONMENT)) / "bin" / "python"), "-c", script, json.dumps(rows)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return load_file(folder / "theirs.safetensors")


@pytest.mark.proof(
    formats="gptq, gptq_v2",
    direction="written",
    programs={"GPTQModel": "gptqmodel"},
    compared="its own dequantization, bit for bit: 2, 3, 4, 8 bits, symmetric or not, per group "
    "and row, `desc_act`",
    environment="GPTQMODEL_ENV",
)
def test_gptq_of_all_bits_versions_and_orders(tmp_path):
    rows, tensors, ours = {}, {}, {}
    for bits, size, symmetric, first, ordered in product(
        (2, 3, 4, 8), (-1, 32), (True, False), (True, False), (False, True)
    ):
        if ordered and size == -1:
            continue
        name = f"b{bits}-g{size}-{symmetric}-{first}-{ordered}"
        linear = random_linear(bits, size, symmetric=symmetric, ordered=ordered)
        layout = GPTQLayout(stored_less=int(first), reordered=ordered)
        tensors |= layout.encode(name, linear, scale_dtype=torch.float16)
        rows[name], ours[name] = [bits, size, symmetric, first, ordered], linear.dequantize()
    found = theirs(GPTQ, rows, tensors, tmp_path)
    assert len(found) == 48
    assert [name for name in ours if not torch.equal(found[name], ours[name])] == []


@pytest.mark.proof(
    formats="awq",
    direction="written",
    programs={"GPTQModel": "gptqmodel"},
    compared="its copy of AutoAWQ's unpacking, bit for bit, symmetric or not, per group and row",
    environment="GPTQMODEL_ENV",
)
def test_awq(tmp_path):
    rows, tensors, ours = {}, {}, {}
    for size, symmetric in product((-1, 32), (True, False)):
        name = f"g{size}-{symmetric}"
        linear = random_linear(4, size, symmetric=symmetric, ordered=False)
        tensors |= LAYOUTS["awq"].encode(name, linear, scale_dtype=torch.float16)
        rows[name], ours[name] = [4, size], linear.dequantize()
    found = theirs(AWQ, rows, tensors, tmp_path)
    assert [name for name in ours if not torch.equal(found[name], ours[name])] == []

"""Stock transformers on folders in GPTQ's, AWQ's and FP8's layouts.

GPTQModel's own act-order folder runs here too. For GPTQ and AWQ transformers needs optimum and
gptqmodel, which have an environment of their own, named by GPTQMODEL_ENV (transformers 5.23,
optimum 2.3, gptqmodel 7.6 or 7.7); without it those tests are skipped. FP8 it dequantizes by itself
without a GPU.
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantflow.core.scheme import named, preset, with_group_size, with_scale_rounding
from quantflow.formats.weight_layout import integers
from quantflow.runtime.artifact import open_folder
from quantflow.runtime.decoding import generate
from quantflow.runtime.load import load

ENVIRONMENT = os.environ.get("GPTQMODEL_ENV") or None
SETTINGS = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GPTQMODEL_CPU_WORKERS": "2"}
PROMPT = list(range(30, 46))
NEW = 12
TEXTS = """
import json, sys, torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AwqConfig, GPTQConfig

prompt, new, *folders = json.loads(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
ids = torch.tensor([prompt])
for folder in folders:
    kind = AutoConfig.from_pretrained(folder).quantization_config["quant_method"]
    torch_alone = (
        AwqConfig(backend="torch_awq") if kind == "awq" else GPTQConfig(bits=4, backend="torch")
    )  # on every CPU
    told = {
        "dtype": torch.float32,
        "device_map": "cpu",
        "output_loading_info": True,
        "quantization_config": torch_alone,
    }
    model, report = AutoModelForCausalLM.from_pretrained(folder, **told)
    assert not any(report.values()), report
    with torch.no_grad():
        logits = model(ids).logits.float()
    asked = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": new,
        "do_sample": False,
        "eos_token_id": None,
    }
    tokens = model.generate(ids, **asked)[0, len(prompt) :]
    save_file(
        {"logits": logits.contiguous(), "tokens": tokens.contiguous()}, f"{folder}.safetensors"
    )
"""
QUANTIZE = """
import sys
from gptqmodel import GPTQModel, QuantizeConfig
model, output = sys.argv[1:]
chosen = QuantizeConfig(bits=4, group_size=32, sym=True, desc_act=True, act_group_aware=False)
loaded = GPTQModel.load(model, chosen, device="cpu")
rows = [{"input_ids": list(range(5 + i, 69 + i)), "attention_mask": [1] * 64} for i in range(8)]
loaded.quantize(rows, batch_size=1)
loaded.save(output)
"""
NEEDS_GPTQMODEL = pytest.mark.skipif(
    ENVIRONMENT is None, reason="GPTQMODEL_ENV names no environment with gptqmodel"
)


def theirs(script: str, *words: str | Path, folder: Path) -> None:
    """Run a script in its environment; it writes logs where it stands."""
    line = [str(Path(str(ENVIRONMENT)) / "bin" / "python"), "-c", script, *map(str, words)]
    surroundings = {**os.environ, **SETTINGS, "PYTHONPATH": ""}
    done = subprocess.run(
        line, env=surroundings, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def assert_computes_what_transformers_does(
    model: Path, folder: Path, *, products: torch.dtype = torch.float32
) -> None:
    """Compare logits and greedy tokens.

    gptqmodel makes its weights in float16, and multiplies in the dtype of `products`. Nothing else
    differs from float32.
    """
    expected, ids = load_file(f"{folder}.safetensors"), torch.tensor([PROMPT])
    loaded = load(folder, decoder="lean")
    rounded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for name in loaded.artifact.linears:
        weight = loaded.artifact.decode(name).dequantize().half().to(products).T.contiguous()
        linear = rounded.get_submodule(name)
        # Llama's linears have no bias
        linear.forward = lambda x, weight=weight: (x.to(weight.dtype) @ weight).float()
    with torch.no_grad():
        torch.testing.assert_close(rounded(ids).logits, expected["logits"], rtol=0, atol=1e-4)
    loaded.decoder.begin(rows=1, capacity=64)
    torch.testing.assert_close(
        loaded.decoder.forward(ids, last_only=False), expected["logits"], rtol=0, atol=5e-3
    )
    found = generate(loaded.decoder, ids, max_new_tokens=NEW)[0, len(PROMPT) :]
    assert found.tolist() == expected["tokens"].tolist()


@pytest.mark.proof(
    formats="awq, gptq, gptq_v2",
    direction="written",
    programs={"transformers": "transformers", "optimum": "optimum", "GPTQModel": "gptqmodel"},
    compared="logits within 1e-4 of the weights in float16 and, of AWQ, products in float16, as "
    "GPTQModel's kernels for "
    "every CPU have them; within 5e-3 of the lean decoder; the same greedy tokens; with "
    "`desc_act` too",
    environment="GPTQMODEL_ENV",
)
@pytest.mark.slow
@NEEDS_GPTQMODEL
def test_transformers_computes_from_gptq_and_awq_folders_what_the_lean_decoder_does(
    llama, tmp_path, write_foreign
):
    cases = {
        "gptq": ("gptq", True, False),
        "gptq-act-order": ("gptq", True, True),
        "gptq-zero-points": ("gptq", False, True),
        "gptq_v2": ("gptq_v2", False, False),
        "awq": ("awq", False, False),
    }
    for name, (layout, symmetric, ordered) in cases.items():
        found = named(integers(4, 32, symmetric=symmetric, where="a test"), None, "pack-quantized")
        write_foreign(tmp_path / name, llama, layout, found, ordered=ordered)
    theirs(
        TEXTS, json.dumps(PROMPT), str(NEW), *(tmp_path / name for name in cases), folder=tmp_path
    )
    for name in cases:
        # what gptqmodel 7.6 has for every CPU
        products = torch.float16 if name == "awq" else torch.float32
        assert_computes_what_transformers_does(llama, tmp_path / name, products=products)


@pytest.mark.proof(
    formats="gptq",
    direction="read",
    programs={"transformers": "transformers", "optimum": "optimum", "GPTQModel": "gptqmodel"},
    compared="logits within 1e-4 and greedy tokens, of a folder with `desc_act` that GPTQModel "
    "quantized",
    environment="GPTQMODEL_ENV",
)
@pytest.mark.slow
@NEEDS_GPTQMODEL
def test_a_folder_that_gptqmodel_wrote_in_act_order_runs_with_its_tokens(llama, tmp_path):
    theirs(QUANTIZE, llama, tmp_path / "f", folder=tmp_path)
    table = json.loads((tmp_path / "f" / "config.json").read_text())["quantization_config"]
    assert table["desc_act"] and table["bits"] == 4
    order = load_file(tmp_path / "f" / "model.safetensors")["model.layers.0.mlp.down_proj.g_idx"]
    assert order.diff().lt(0).any()
    theirs(TEXTS, json.dumps(PROMPT), str(NEW), tmp_path / "f", folder=tmp_path)
    assert_computes_what_transformers_does(llama, tmp_path / "f")


@pytest.mark.proof(
    formats="fp8",
    direction="written",
    programs={"transformers": "transformers"},
    compared="every weight of blocks, bit for bit, dequantized: it multiplies FP8 on a GPU alone",
)
@pytest.mark.filterwarnings("ignore")  # it says that there is no GPU
def test_transformers_has_the_weights_of_an_fp8_folder_bit_for_bit(llama, tmp_path, write_foreign):
    weights = write_foreign(tmp_path / "f", llama, "fp8", with_group_size(preset("FP8_BLOCK"), 32))
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "f", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    found = dict(model.named_parameters())
    assert len(weights) == 14
    assert [
        name for name, weight in weights.items() if not torch.equal(found[name].float(), weight)
    ] == []


@pytest.mark.filterwarnings("ignore")  # it says that there is no GPU
@pytest.mark.parametrize("stored", [torch.float32, torch.float8_e8m0fnu, torch.uint8])
def test_transformers_has_the_weights_of_scales_that_are_powers_of_two(
    llama, tmp_path, write_foreign, stored
):
    """DeepSeek-V3.2 stores such scales as float32, V4 as exponents; transformers reads both."""
    scheme = with_scale_rounding(with_group_size(preset("FP8_BLOCK"), 32), "pow2")
    inputs = replace(scheme.input, scale_rounding="pow2")
    weights = write_foreign(tmp_path / "f", llama, "fp8", replace(scheme, input=inputs))
    path = tmp_path / "f" / "model.safetensors"
    tensors = {
        name: tensor.to(torch.float8_e8m0fnu).view(torch.uint8).view(stored)
        if name.endswith("weight_scale_inv") and stored != torch.float32
        else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    found = dict(
        AutoModelForCausalLM.from_pretrained(tmp_path / "f", dtype=torch.float32).named_parameters()
    )
    artifact = open_folder(tmp_path / "f")
    assert set(artifact.linears) == {name.removesuffix(".weight") for name in weights}
    for name, weight in weights.items():
        ours = artifact.decode(name.removesuffix(".weight"))
        assert torch.equal(found[name].float(), weight), name
        assert torch.equal(ours.dequantize(), weight), name
        assert ours.scheme.input.rounds_at_run_time

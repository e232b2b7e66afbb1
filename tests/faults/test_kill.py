"""`quantflow run` killed at any moment: the same command continues, and what it makes is byte-identical.

A process that imports torch and transformers takes 2 to 6 seconds to start, and `export` starts a second one for its proof;
most of the time here is that, and most kills land there unless they are aimed at the work between.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stages import measure, quantize
from stages._config import Calibration, Quantize
from stages._progress import Progress

QUIET = Progress(quiet=True)
NAMES = ("int4", "int8")
PATIENCE = 900.0  # seconds; a test that waits longer is stuck


@dataclass(frozen=True, kw_only=True)
class Reference:
    """An uninterrupted run.

    Attributes:
        command: what is killed and repeated; takes the output folder.
        seconds: how long it took.
        files: sha256 of every file of both artifacts, and their digests.
    """

    command: Callable[[Path], list[str]]
    seconds: float
    files: dict[str, Any]


def artifacts_of(folder: Path) -> dict[str, Any]:
    manifests = {name: json.loads((folder / "4-export" / name / "quantflow.json").read_text()) for name in NAMES}
    return {name: {"digest": manifest["digest"], "files": manifest["files"]} for name, manifest in manifests.items()}


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(command: list[str]) -> None:
    process = start(command)
    _, messages = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, messages


@pytest.fixture(scope="module", autouse=True)
def default_interrupt() -> Iterator[None]:
    """Let children be interrupted although this process may run in a background that ignores SIGINT."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture(scope="module")
def recipe(llama: Path, text_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "gate.json").write_text(
        json.dumps({"thresholds": {"ppl_ratio": 1e9, "mean_kld": 1e9, "kld_p999": 1e9, "top1_agreement": 0.0}})
    )
    content = {
        "model": str(llama),
        "calibration": {"source": str(text_files["calibration"]), "samples": 12, "sequence_length": 64},
        "quantize": [
            {"name": "int4", "scheme": "W4A16", "algorithm": "gptq", "group_size": 32},
            {"name": "int8", "scheme": "W8A8", "transforms": [{"smoothquant": {"alpha": 0.5}}]},
        ],
        "validate": {
            "text": str(text_files["heldout"]),
            "tokens": 256,
            "sequence_length": 64,
            "gate": str(folder / "gate.json"),
        },
    }
    (folder / "recipe.yaml").write_text(json.dumps(content))  # JSON is YAML
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def reference(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    def command(output: Path) -> list[str]:
        return [sys.executable, "-m", "stages.cli", "run", str(recipe), "-o", str(output), "-q"]

    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    begin = time.monotonic()
    finish(command(folder))
    return Reference(command=command, seconds=time.monotonic() - begin, files=artifacts_of(folder))


def kill_and_continue(reference: Reference, folder: Path, *, kills: int, seed: int) -> int:
    """Kill so many runs, each at a random moment; return how many had not finished by then.

    A run that finished first must have made the right artifacts; the next one begins in an empty folder.
    """
    generator, landed = random.Random(seed), 0
    for _ in range(kills):
        process = start(reference.command(folder))
        try:
            _, messages = process.communicate(timeout=generator.uniform(0.0, reference.seconds))
        except subprocess.TimeoutExpired:
            process.kill()  # SIGKILL, to this process alone: a proof that it has started becomes an orphan
            process.communicate(timeout=PATIENCE)
            landed += 1
        else:
            assert process.returncode == 0, messages
            assert artifacts_of(folder) == reference.files
            shutil.rmtree(folder)
    finish(reference.command(folder))
    assert artifacts_of(folder) == reference.files
    return landed


def test_what_five_killed_runs_leave_behind_continues_to_the_same_bytes(reference: Reference, tmp_path: Path) -> None:
    landed = kill_and_continue(reference, tmp_path / "run", kills=5, seed=7)
    print(f"{landed} of 5 kills landed before completion; an uninterrupted run takes {reference.seconds:.1f} s")
    assert landed >= 2


@pytest.mark.slow
def test_what_twenty_killed_runs_leave_behind_continues_to_the_same_bytes(reference: Reference, tmp_path: Path) -> None:
    landed = kill_and_continue(reference, tmp_path / "run", kills=20, seed=11)
    print(f"{landed} of 20 kills landed before completion; an uninterrupted run takes {reference.seconds:.1f} s")
    assert landed >= 8


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    begin = time.monotonic()
    while not path.exists():
        assert process.poll() is None, "the run ended before it wrote the file"
        assert time.monotonic() - begin < PATIENCE
        time.sleep(0.005)


def test_a_terminated_and_an_interrupted_run_say_so_and_continue(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "stages.cli", "run", str(recipe), "-o", str(folder), "-q"]
    moments = [
        (signal.SIGTERM, 143, "terminated", folder / "1-measure" / "rank-000-of-001" / "DONE.json"),
        (signal.SIGINT, 130, "interrupted", folder / "2-quantize" / "int4" / "DONE.json"),
    ]
    for number, code, word, sign in moments:
        process = start(command)
        wait_for(sign, process)
        process.send_signal(number)
        _, messages = process.communicate(timeout=PATIENCE)
        assert process.returncode == code
        said = [line for line in messages.splitlines() if line]  # click ends the terminal's ^C with an empty line
        assert said == [f"error: {word}", "  fix: the same command continues where this one stopped"]
        assert not (folder / "report.html").exists()
    leftovers = [path.name for path in folder.rglob(".*") if path.name.endswith((".tmp", ".old"))]
    assert leftovers == []
    measured = (folder / "1-measure" / "rank-000-of-001" / "DONE.json").stat().st_mtime_ns
    finish(command)
    assert (folder / "1-measure" / "rank-000-of-001" / "DONE.json").stat().st_mtime_ns == measured
    assert sorted(artifacts_of(folder)) == sorted(NAMES)


def test_a_terminated_measurement_ends_its_ranks_and_continues(llama: Path, tmp_path: Path) -> None:
    folder, text = tmp_path / "measured", tmp_path / "tokens.jsonl"
    rows = [{"input_ids": [0, *((seed * 31 + i * i) % 300 + 2 for i in range(63))]} for seed in range(600)]
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))  # enough for seconds of work
    calibration = ["--calibration", str(text), "--samples", "600", "--sequence-length", "64", "--ranks", "2"]
    command = [sys.executable, "-m", "stages.cli", "measure", str(llama), "-o", str(folder), *calibration]
    process = start(command)
    locks = [folder / f".rank-00{rank}-of-002.lock" for rank in (0, 1)]
    for lock in locks:
        wait_for(lock, process)  # the ranks have begun
    process.send_signal(signal.SIGTERM)
    _, messages = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143, messages
    processes = subprocess.run(["ps", "-A", "-o", "args"], capture_output=True, text=True, check=True).stdout
    assert str(folder) not in processes  # neither torchrun nor a rank is left, holding its folder
    print(f"{len(list(folder.glob('*/DONE.json')))} of 2 ranks had finished when the signal reached them")
    finish(command)
    assert sorted(path.parent.name for path in folder.glob("*/DONE.json")) == ["rank-000-of-002", "rank-001-of-002"]


def test_a_damaged_layer_of_an_unfinished_folder_is_made_again(
    llama: Path, text_files: dict[str, Path], tmp_path: Path
) -> None:
    calibration = Calibration(source=str(text_files["calibration"]), samples=4, sequence_length=64)
    measured = measure.run(measure.Job(model=llama, output=tmp_path / "measured", calibration=calibration), QUIET)
    entry = Quantize(name="x", scheme="W4A16", algorithm="gptq", group_size=32)
    job = quantize.Job(model=llama, output=tmp_path / "quantized", entry=entry, measurement=measured)
    quantize.run(job, QUIET)
    first, second = (tmp_path / "quantized" / "layers" / f"0000{index}.safetensors" for index in (0, 1))
    canary = tmp_path / "quantized" / "canary.json"
    expected = [path.read_bytes() for path in (first, second, canary)]
    untouched = second.stat().st_ino

    (tmp_path / "quantized" / "DONE.json").unlink()
    canary.unlink()
    damaged = bytearray(expected[0])
    damaged[-1] ^= 1
    first.write_bytes(damaged)
    quantize.run(job, QUIET)
    assert [path.read_bytes() for path in (first, second, canary)] == expected
    assert second.stat().st_ino == untouched  # read back, not written again


def test_a_damaged_record_of_a_layer_makes_the_layer_again(llama: Path, tmp_path: Path) -> None:
    job = quantize.Job(model=llama, output=tmp_path / "quantized", entry=Quantize(name="x", scheme="W8A16"))
    quantize.run(job, QUIET)
    record = tmp_path / "quantized" / "layers" / "00001.json"
    expected = record.read_bytes()
    (tmp_path / "quantized" / "DONE.json").unlink()
    record.write_bytes(expected[: len(expected) // 2])
    quantize.run(job, QUIET)
    assert record.read_bytes() == expected


def test_a_layer_of_other_inputs_is_made_again(llama: Path, tmp_path: Path) -> None:
    """The folder is unfinished, so nothing is refused; the state key differs, so nothing is used."""
    for group_size in (32, 64):
        (tmp_path / "quantized" / "DONE.json").unlink(missing_ok=True)
        entry = Quantize(name="x", scheme="W4A16", algorithm="rtn", group_size=group_size)
        quantize.run(quantize.Job(model=llama, output=tmp_path / "quantized", entry=entry), QUIET)
    quantize.run(quantize.Job(model=llama, output=tmp_path / "fresh", entry=entry), QUIET)
    found, expected = (
        [path.read_bytes() for path in sorted((tmp_path / name / "layers").iterdir())] for name in ("quantized", "fresh")
    )
    assert found == expected

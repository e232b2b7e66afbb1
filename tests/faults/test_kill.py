"""Real processes that are signalled, ranks included, and state on disk that is damaged.

The same command continues.
"""

import fcntl
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.planning.recipe import Calibration, Quantize
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.reporting.progress_line import ProgressLine

SEQUENCES = 200  # enough for seconds of work
QUIET = ProgressLine(quiet=True)
PATIENCE = 900.0  # seconds; a test that waits longer is stuck


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(command: list[str]) -> None:
    process = start(command)
    _, messages = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, messages


@pytest.fixture(scope="module", autouse=True)
def default_interrupt() -> Iterator[None]:
    """Let children be interrupted.

    This process may run in a background that ignores SIGINT.
    """
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    begin = time.monotonic()
    while not path.exists():
        assert process.poll() is None, "the run ended before it wrote the file"
        assert time.monotonic() - begin < PATIENCE
        time.sleep(0.005)


@pytest.mark.slow
def test_an_interrupted_run_says_so_and_continues(commands, tmp_path: Path) -> None:
    command = commands("run")
    arguments = [str(argument) for argument in command.arguments(tmp_path)]
    process = start([sys.executable, "-m", "quantflow", *arguments, "-q"])
    wait_for(tmp_path / "out" / "1-measure" / "rank-000-of-001" / "DONE.json", process)
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    said = [line for line in messages.splitlines() if line]
    assert said == [
        "error: interrupted",
        "  fix: the same command continues where this one stopped",
    ]
    assert not (tmp_path / "out" / "report.html").exists()
    measured = (tmp_path / "out" / "1-measure" / "rank-000-of-001" / "DONE.json").stat().st_mtime_ns
    command.check_continues(tmp_path)
    assert (
        tmp_path / "out" / "1-measure" / "rank-000-of-001" / "DONE.json"
    ).stat().st_mtime_ns == measured


def terminate_ranks(llama: Path, work: Path) -> list[str]:
    """Start a measurement of two ranks, and terminate it; its command.

    Nobody is left who holds a folder.
    """
    folder, text = work / "measured", work / "tokens.jsonl"
    rows = [
        {"input_ids": [0, *((seed * 31 + i * i) % 300 + 2 for i in range(63))]}
        for seed in range(SEQUENCES)
    ]
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    calibration = [
        "--calibration",
        str(text),
        "--samples",
        str(SEQUENCES),
        "--sequence-length",
        "64",
    ]
    calibration += ["--stats", "amax", "--ranks", "2"]
    command = [
        sys.executable,
        "-m",
        "quantflow",
        "measure",
        str(llama),
        "-o",
        str(folder),
        *calibration,
    ]
    process = start(command)
    locks = [folder / f".rank-00{rank}-of-002.lock" for rank in (0, 1)]
    for lock in locks:
        wait_for(lock, process)  # the ranks have begun
    process.send_signal(signal.SIGTERM)
    _, messages = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143, messages
    processes = subprocess.run(
        ["ps", "-A", "-o", "args"], capture_output=True, text=True, check=True
    ).stdout
    assert str(folder) not in processes  # neither torchrun nor a rank
    for lock in locks:
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print(
        f"{len(list(folder.glob('*/DONE.json')))} of 2 ranks had finished when the signal "
        "reached them"
    )
    return command


@pytest.mark.slow
def test_a_terminated_measurement_ends_its_ranks(llama: Path, tmp_path: Path) -> None:
    terminate_ranks(llama, tmp_path)


@pytest.mark.slow
def test_a_terminated_measurement_of_ranks_continues(llama: Path, tmp_path: Path) -> None:
    finish(terminate_ranks(llama, tmp_path))
    ranks = sorted(path.parent.name for path in (tmp_path / "measured").glob("*/DONE.json"))
    assert ranks == ["rank-000-of-002", "rank-001-of-002"]


def test_a_damaged_layer_of_an_unfinished_folder_is_made_again(
    llama: Path, text_files: dict[str, Path], tmp_path: Path
) -> None:
    calibration = Calibration(source=str(text_files["calibration"]), samples=4, sequence_length=64)
    measured = measure.run(
        MeasureJob(model=llama, output=tmp_path / "measured", calibration=calibration),
        QUIET,
    )
    entry = Quantize(name="x", scheme="W4A16", algorithm="gptq", group_size=32)
    job = QuantizeJob(model=llama, output=tmp_path / "quantized", entry=entry, measurement=measured)
    quantize.run(job, QUIET)
    first, second = (
        tmp_path / "quantized" / "layers" / f"0000{index}.safetensors" for index in (0, 1)
    )
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
    job = QuantizeJob(
        model=llama, output=tmp_path / "quantized", entry=Quantize(name="x", scheme="W8A16")
    )
    quantize.run(job, QUIET)
    record = tmp_path / "quantized" / "layers" / "00001.json"
    expected = record.read_bytes()
    (tmp_path / "quantized" / "DONE.json").unlink()
    record.write_bytes(expected[: len(expected) // 2])
    quantize.run(job, QUIET)
    assert record.read_bytes() == expected


def test_a_layer_of_other_inputs_is_made_again(llama: Path, tmp_path: Path) -> None:
    """Nothing is refused, for the folder is unfinished; nothing is used, for its key differs."""
    for group_size in (32, 64):
        (tmp_path / "quantized" / "DONE.json").unlink(missing_ok=True)
        entry = Quantize(name="x", scheme="W4A16", algorithm="rtn", group_size=group_size)
        quantize.run(QuantizeJob(model=llama, output=tmp_path / "quantized", entry=entry), QUIET)
    quantize.run(QuantizeJob(model=llama, output=tmp_path / "fresh", entry=entry), QUIET)
    found, expected = (
        [path.read_bytes() for path in sorted((tmp_path / name / "layers").iterdir())]
        for name in ("quantized", "fresh")
    )
    assert found == expected

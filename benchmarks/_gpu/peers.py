"""Other programs on the same device, where an environment of theirs is there."""

import json
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from _synthetic import make_calibration

from _gpu.record import Found, Place
from _gpu.stages import artifact, calibrated, large_checkpoint, on_device, quantflow, timed

SCRIPTS = Path(__file__).parents[1] / "peers"
SEED = 0
VLLM_NEW = 128


def peers(place: Place, found: Found) -> None:
    """Time llm-compressor and GPTQModel beside measure and gptq, then vLLM's decoding.

    The time runs from import to the saved folder.
    """
    compressor, gptqmodel = (_python(place, name, found) for name in ("llmcompressor", "gptqmodel"))
    if compressor is not None or gptqmodel is not None:
        _rounding(place, found, compressor=compressor, gptqmodel=gptqmodel)
    vllm = _python(place, "vllm", found)
    if vllm is not None:
        _decoding(place, found, vllm)


def _rounding(
    place: Place, found: Found, *, compressor: Path | None, gptqmodel: Path | None
) -> None:
    """Let all of them measure and round the same checkpoint and tokens."""
    amounts = place.amounts
    model, calibration = large_checkpoint(place, amounts.depths[-1])
    length = [
        "--samples",
        str(amounts.large_samples),
        "--sequence-length",
        str(amounts.large_tokens),
    ]
    measured, made = place.work / "measured", place.work / "artifact"
    words = [
        "measure",
        model,
        "-o",
        measured,
        "--for",
        "W4A16:gptq",
        "--calibration",
        calibration,
        *length,
        "-q",
    ]
    ours, _ = timed(*words, *on_device(place, "measure", found))
    words = [
        "quantize",
        model,
        "-o",
        place.work / "quantized",
        "--scheme",
        "W4A16",
        "--algorithm",
        "gptq",
    ]
    more, _ = timed(
        *words,
        "--measurement",
        measured,
        "--export",
        made,
        "-q",
        *on_device(place, "quantize", found),
    )
    ours += more
    found.figure(f"quantflow, {amounts.depths[-1]} layers", ours, "s")
    programs = {  # llm-compressor's sequential path takes the accelerator that torch finds
        "llm-compressor": (compressor, "llmcompressor_gptq.py", ()),
        "GPTQModel": (gptqmodel, "gptqmodel_gptq.py", ("--device", place.device)),
    }
    for name, (python, script, options) in programs.items():
        if python is None:
            continue
        command = [python, SCRIPTS / script, model, calibration, place.work / name, *options]
        seconds = _run(command, found, name)
        if seconds is not None:
            found.figure(f"{name}, {amounts.depths[-1]} layers", seconds, "s")
            found.bar(
                f"quantflow beside {name}",
                promised=f"less than {seconds:.0f} s",
                found=f"{ours:.0f} s",
                met=ours < seconds,
            )


def autoround(place: Place, found: Found) -> float | None:
    """Seconds of AutoRound's default at W4A16 on the example model.

    None where it is not installed or fails.
    """
    python = _python(place, "autoround", found)
    if python is None:
        return None
    calibration, output = place.work / "calibration.jsonl", place.work / "autoround"
    make_calibration(
        calibration, samples=place.amounts.samples, tokens=place.amounts.tokens, seed=SEED
    )
    output.mkdir(exist_ok=True)
    settings = {
        "bits": 4,
        "group_size": 128,
        "symmetric": True,
        "iterations": 200,
        "device": place.device,
    }
    script = SCRIPTS / "accuracy_autoround.py"
    seconds = _run(
        [python, script, "quantize", place.model, calibration, output, json.dumps(settings)],
        found,
        "AutoRound",
    )
    if seconds is not None:
        found.figure(f"AutoRound, {' '.join(calibrated(place))}", seconds, "s")
    return seconds


def _decoding(place: Place, found: Found, python: Path) -> None:
    """Let vLLM and `generate` continue one prompt with an artifact of the example model."""
    made = artifact(place, "W4A16")
    words = [
        "--prompt",
        "def main():",
        "--max-new-tokens",
        str(VLLM_NEW),
        "--ignore-eos",
        "--json",
        "-q",
    ]
    words += ["--repeat", "3", "--device", place.kind, "--dtype", "bfloat16"]
    batches = json.loads(quantflow("generate", made, *words))["timing"]["batches"]
    found.figure(
        "quantflow, one sequence",
        statistics.median(batch["tokens_per_second"] for batch in batches),
        "tokens/s",
    )
    told = place.work / "vllm.json"
    if (
        _run([python, SCRIPTS / "gpu_vllm.py", made, told, str(VLLM_NEW)], found, "vLLM")
        is not None
    ):
        answer = json.loads(told.read_text())
        found.figure(
            f"vLLM {answer['version']}, one sequence", answer["tokens_per_second"], "tokens/s"
        )


def _python(place: Place, name: str, found: Found) -> Path | None:
    """The interpreter of a peer's environment, or None and a line that says it is not there."""
    python = place.peers / name / "bin" / "python"
    if python.exists():
        return python
    found.absent(name, "not installed below artifacts/peers")
    return None


def _run(command: Sequence[str | Path], found: Found, name: str) -> float | None:
    """Seconds of another program's whole process.

    None, and a line that says so, where it fails.
    """
    begin = time.perf_counter()
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode == 0:
        return seconds
    found.absent(name, f"exit {done.returncode}: {' '.join(done.stderr.split())[-300:]}")
    return None

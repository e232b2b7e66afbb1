"""The stages on the device beside the same stages on the CPU.

Compared are statistics, integers, divergences, tokens, bits and memory.

Every command is `python -m quantflow`, as a user gives it. Where a verb has no `--device` yet its
check says so.
"""

import functools
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _report import gb
from _synthetic import make_calibration, make_checkpoint
from _watch import kill_tree
from safetensors.torch import load_file

from _gpu.record import Found, Place

STATISTICS = "amax,channel_amax,min_max,mean_abs,histogram,hessian"
# kernels in float32 differ by the order of their sums: how far a statistic may be from the CPU's
OF_NORM = 1e-4
PROMPTS = ("def main():", "class Stack:\n    def push(self", "import os\n")
GATE_FAILED = 4  # of validate: its document is there all the same
WHOLE_LAYERS = 32  # of the 7 B shape
LARGE_BAR = 600.0  # seconds of measure and gptq of all of them, 32 sequences of 2048 tokens
SEED = 0
EXAMPLE_LAYERS = 4
RANKS = 2


class Failed(Exception):
    """A command that had to succeed did not; the text has the end of what it said."""


def quantflow(*words: str | Path, codes: Sequence[int] = (0,)) -> str:
    """Run quantflow and return what it printed on stdout.

    Raises:
        Failed: another exit status than these.
    """
    command = [sys.executable, "-m", "quantflow", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stderr)
    if done.returncode not in codes:
        said = " ".join(done.stderr.split())[-400:]
        raise Failed(f"quantflow {words[0]}: exit {done.returncode}: {said}")
    return done.stdout


def timed(*words: str | Path, codes: Sequence[int] = (0,)) -> tuple[float, str]:
    """Return the seconds of a command, imports included, and what it printed."""
    begin = time.perf_counter()
    said = quantflow(*words, codes=codes)
    return time.perf_counter() - begin, said


@functools.cache
def takes(verb: str, option: str) -> bool:
    """Return whether a verb has an option."""
    return option in quantflow(verb, "--help").replace(",", " ").split()


def on_device(place: Place, verb: str, found: Found) -> list[str]:
    """Options that let a verb run on the device.

    None, and a line that says so, where it has none.
    """
    if takes(verb, "--device"):
        return ["--device", place.device]
    found.absent(
        f"`{verb}` on the device", f"`quantflow {verb}` has no --device; it ran on the CPU"
    )
    return []


def calibrated(place: Place) -> list[str]:
    """Return the options of measure that say how much of the shipped text it runs."""
    return ["--samples", str(place.amounts.samples), "--sequence-length", str(place.amounts.tokens)]


def artifact(place: Place, scheme: str) -> Path:
    """Return an artifact of the example model, rounded to nearest, made unless it is there."""
    folder = place.shared / scheme
    if not (folder / "quantflow.json").exists():
        quantflow(
            "quantize", place.model, "-o", folder, "--scheme", scheme, "--algorithm", "rtn", "-q"
        )
    return folder


# The statistics.


def measure(place: Place, found: Found) -> None:
    """Measure on the device and on the CPU, and compare every statistic."""
    words = ["measure", place.model, "--stats", STATISTICS, *calibrated(place), "-q"]
    device = on_device(place, "measure", found)
    for name, options in (("device", device), ("CPU", [])):
        seconds, _ = timed(*words, "-o", place.work / name, *options)
        found.figure(f"seconds on the {name}, imports included", seconds, "s")
    ours, theirs = (load_file(statistics_of(place.work / name)) for name in ("device", "CPU"))
    found.claim(
        "the same statistics",
        promised="all names",
        found=f"{len(ours)}",
        met=ours.keys() == theirs.keys(),
    )
    worst: dict[str, float] = {}
    counted = 0
    for name, expected in theirs.items():
        kind = name.rpartition("|")[2]
        # where a value lies at an edge it may fall on the other side: only the sums are equal
        if "count" in kind:
            counted += int(ours[name].sum() != expected.sum())
            continue
        worst[kind] = max(worst.get(kind, 0.0), apart(ours[name], expected))
    for kind, difference in sorted(worst.items()):
        found.figure(f"{kind}: largest difference", difference, "of its norm")
    found.claim(
        "counts sum up to the CPU's", promised="all", found=f"{counted} do not", met=counted == 0
    )
    largest = max(worst.values())
    found.claim(
        "statistics are the CPU's",
        promised=f"{OF_NORM:g} of their norm",
        found=f"{largest:.2g}",
        met=largest <= OF_NORM,
    )
    if place.on_gpu:
        seconds, _ = timed(*words, "-o", place.work / "bfloat16", *device, "--dtype", "bfloat16")
        found.figure("seconds on the device in bfloat16", seconds, "s")
        half = load_file(statistics_of(place.work / "bfloat16"))
        sums = [apart(half[name], theirs[name]) for name in theirs if name.endswith("hessian_sum")]
        found.figure("Hessians in bfloat16: largest difference", max(sums), "of its norm")


def statistics_of(folder: Path) -> Path:
    """Return the file of a measurement by one rank."""
    return folder / "rank-000-of-001" / "statistics.safetensors"


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the norm of the difference, in units of the norm."""
    difference = (ours.double() - theirs.double()).norm()
    return float(difference / theirs.double().norm().clamp(min=1e-30))


# The integers.


def quantize(place: Place, found: Found) -> None:
    """Round by gptq on the device and on the CPU from one measurement, and validate both."""
    measured = place.work / "measured"
    device = on_device(place, "quantize", found)
    seconds, _ = timed(
        *("measure", place.model, "-o", measured, "--for", "W4A16:gptq", *calibrated(place), "-q"),
        *(on_device(place, "measure", found)),
    )
    found.figure("measure", seconds, "s")
    words = [
        "quantize",
        place.model,
        "--scheme",
        "W4A16",
        "--algorithm",
        "gptq",
        "--measurement",
        measured,
        "--no-export",
        "-q",
    ]
    runs = {"CPU": []} | ({"device": device} if device else {})
    for name, options in runs.items():
        seconds, _ = timed(*words, "-o", place.work / name, *options)
        found.figure(f"gptq on the {name}, imports included", seconds, "s")
        quantflow("export", place.work / name, "-o", place.work / f"{name}-artifact", "-q")
    results = {name: judged(place, place.work / f"{name}-artifact", name, []) for name in runs}
    for name, result in results.items():
        found.figure(f"mean KLD of the artifact made on the {name}", kld(result), "nats")
    if "device" not in runs:
        found.absent("the device's integers beside the CPU's", "quantize has no --device")
        return
    share = equal_integers(place.work / "device", place.work / "CPU")
    found.figure("integers that are the CPU's", share)
    told_apart(found, "the artifacts are as near to the source", results["device"], results["CPU"])


def equal_integers(ours: Path, theirs: Path) -> float:
    """Return the share of integers of 4 bits that are equal in two quantize folders.

    Raises:
        Failed: the folders hold none.
    """
    same = count = 0
    for path in sorted((theirs / "layers").glob("*.safetensors")):
        left, right = load_file(ours / "layers" / path.name), load_file(path)
        for name, words in right.items():
            if name.endswith(".weight_packed"):
                # two integers a byte
                apart = left[name].view(torch.uint8) ^ words.view(torch.uint8)
                same += int((apart & 15 == 0).sum()) + int((apart >> 4 == 0).sum())
                count += 2 * apart.numel()
    if not count:
        raise Failed(f"{theirs.name}: no layer holds integers of 4 bits")
    return same / count


# The divergence.


def validate(place: Place, found: Found) -> None:
    """Validate artifacts on the device and on the CPU."""
    device = on_device(place, "validate", found)
    for scheme in ("W4A16", "FP8_DYNAMIC"):
        made = artifact(place, scheme)
        results = {}
        for name, options in (("device", device), ("CPU", [])):
            begin = time.perf_counter()
            results[name] = judged(place, made, f"{scheme}-{name}", options)
            found.figure(
                f"{scheme}: seconds on the {name}, imports included",
                time.perf_counter() - begin,
                "s",
            )
        found.figure(f"{scheme}: mean KLD on the CPU", kld(results["CPU"]), "nats")
        told_apart(found, f"{scheme}: the CPU's divergence", results["device"], results["CPU"])
    half = judged(place, made, f"{scheme}-bfloat16", [*device, "--dtype", "bfloat16"])
    found.figure(f"{scheme}: mean KLD in bfloat16", kld(half), "nats")
    found.figure(
        f"{scheme}: noise floor in bfloat16", half["noise_floor"]["mean_kld"]["value"], "nats"
    )


def judged(place: Place, made: Path, name: str, options: Sequence[str]) -> dict[str, Any]:
    """Return validation.json of an artifact; what the gate says of so few tokens is not asked."""
    report = place.work / f"report-{name}"
    words = [
        "--tokens",
        str(place.amounts.evaluated),
        "--sequence-length",
        str(min(512, place.amounts.evaluated // 2)),
    ]
    quantflow(
        *("validate", made, "--baseline", place.model, "--report", report, *words, *options, "-q"),
        codes=(0, GATE_FAILED),
    )
    return dict(json.loads((report / "validation.json").read_text()))


def kld(result: dict[str, Any]) -> float:
    """Return the mean divergence of a validation, nats."""
    return float(result["metrics"]["mean_kld"]["value"])


def told_apart(found: Found, what: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Claim that two divergences differ by no more than the CPU's noise.

    The CPU's validation states that noise.
    """
    noise, difference = (
        float(theirs["noise_floor"]["mean_kld"]["value"]),
        abs(kld(ours) - kld(theirs)),
    )
    found.claim(
        what,
        promised=f"within its noise, {noise:.2g} nats",
        found=f"{difference:.2g} nats",
        met=difference <= noise,
    )


# The tokens.


def generate(place: Place, found: Found) -> None:
    """Continue prompts greedily on the device and on the CPU."""
    made = artifact(place, "W4A16")
    words = [
        "generate",
        made,
        "--max-new-tokens",
        str(place.amounts.new),
        "--ignore-eos",
        "--exact",
        "--json",
        "-q",
    ]
    words += [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    expected = texts(quantflow(*words, "--decoder", "transformers", "--backend", "reference"))
    answers = json.loads(quantflow(*words, "--device", place.kind, "--dtype", "float32"))
    found.figure("decoder", answers["decoder"]["name"])
    for reason in answers["decoder"]["reasons"]:
        found.absent("a faster decoder", reason)
    same = sum(ours == theirs for ours, theirs in zip(texts(answers), expected, strict=True))
    found.claim(
        "the CPU's tokens, in float32",
        promised=f"{len(expected)}",
        found=f"{same}",
        met=same == len(expected),
    )
    half = json.loads(quantflow(*words, "--device", place.kind, "--dtype", "bfloat16"))
    for name, document in (("float32", answers), ("bfloat16", half)):
        found.figure(
            f"tokens per second in {name}, one sequence", document["timing"]["tokens_per_second"]
        )
    agreeing = [leading(ours, theirs) for ours, theirs in zip(texts(half), expected, strict=True)]
    found.figure("tokens before the first that differs, in bfloat16", ", ".join(map(str, agreeing)))


def texts(document: str | dict[str, Any]) -> list[list[int]]:
    """Return the tokens of each text of a document by `generate --json`."""
    values = json.loads(document) if isinstance(document, str) else document
    return [output["tokens"] for output in values["outputs"]]


def leading(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return how many tokens at the beginning are equal."""
    return next(
        (at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
        len(theirs),
    )


# The bits.


def same_bits(place: Place, found: Found) -> None:
    """Compare the bytes of equal runs.

    Two are plain, a third is killed and resumed, and one has two ranks.
    """
    measuring = ["measure", place.model, "--stats", "amax,hessian", *calibrated(place), "-q"]
    measuring += on_device(place, "measure", found)
    again(found, "measure", measuring, place.work, files="rank-*/statistics.safetensors")
    measured = place.work / "measured"
    quantflow(
        "measure", place.model, "-o", measured, "--for", "W4A16:gptq", *calibrated(place), "-q"
    )
    rounding = [
        "quantize",
        place.model,
        "--scheme",
        "W4A16",
        "--algorithm",
        "gptq",
        "--measurement",
        measured,
        "-q",
    ]
    there = ["--no-export", *on_device(place, "quantize", found)]
    again(found, "quantize", [*rounding, *there], place.work, files="layers/*.safetensors")
    two_ranks(place, found, rounding, first=place.work / "quantize-first")


def two_ranks(place: Place, found: Found, rounding: Sequence[str | Path], *, first: Path) -> None:
    """Let two ranks, with a device each, quantize together and measure together.

    In measuring each has half of every linear.

    Args:
        place: where; on the CPU the ranks share it.
        found: what is found.
        rounding: the command that wrote `first`, without `--device` and `-o`.
        first: what one process quantized.
    """
    if place.on_gpu and (count := torch.cuda.device_count()) < RANKS:
        found.absent(f"{RANKS} ranks with a device each", f"torch finds {count}")
        return
    device = ["--device", place.kind] if place.on_gpu else []  # each takes the one of its number
    shards, joined = place.work / "shards", place.work / "joined"
    quantflow(*rounding, "-o", shards, "--ranks", str(RANKS), *device)
    quantflow("unify", "-m", shards, "-o", joined, "-q")
    ours, theirs = (bytes_of(folder, "layers/*.safetensors") for folder in (joined, first))
    found.claim(
        f"quantize by {RANKS} ranks, unified",
        promised="the bytes of one process",
        found=told(ours, theirs),
        met=ours == theirs,
    )
    cut, whole, alone = (place.work / name for name in ("cut", "whole", "alone"))
    measuring = ["measure", place.model, "--stats", "amax,mean_abs", *calibrated(place), "-q"]
    quantflow(*measuring, "-o", cut, "--ranks", str(RANKS), "--tp", str(RANKS), *device)
    quantflow("unify", "-m", cut, "-o", whole, "-q")
    quantflow(*measuring, "-o", alone)
    together, expected = (load_file(statistics_of(folder)) for folder in (whole, alone))
    found.claim(
        f"measure by {RANKS} ranks that share the model: statistics",
        promised="all names",
        found=f"{len(together)}",
        met=together.keys() == expected.keys(),
    )
    largest = max(
        apart(together[name], tensor) for name, tensor in expected.items() if name in together
    )
    found.claim(
        f"measure by {RANKS} ranks that share the model, unified, and one process on the CPU",
        promised=f"{OF_NORM:g} of the norm",
        found=f"{largest:.2g}",
        met=largest <= OF_NORM,
    )


def again(found: Found, verb: str, words: Sequence[str | Path], work: Path, *, files: str) -> None:
    """Claim that a command that was killed leaves the same files.

    It runs twice, and once more with SIGKILL after its first layer.
    """
    folders = [work / f"{verb}-{turn}" for turn in ("first", "second", "resumed")]
    for folder in folders[:2]:
        quantflow(*words, "-o", folder)
    first, second = (bytes_of(folder, files) for folder in folders[:2])
    found.claim(
        f"{verb}, run twice",
        promised="the same bytes",
        found=told(first, second),
        met=first == second,
    )
    layers = killed_after_a_layer([*words, "-o", folders[2]], folders[2])
    if layers is None:
        found.absent(f"{verb}, killed and resumed", "it ended before it could be killed")
        return
    quantflow(*words, "-o", folders[2])
    third = bytes_of(folders[2], files)
    found.claim(
        f"{verb}, killed after layer {layers} of {EXAMPLE_LAYERS} and resumed",
        promised="the same bytes",
        found=told(first, third),
        met=first == third,
    )


def killed_after_a_layer(words: Sequence[str | Path], folder: Path) -> int | None:
    """Run a command, kill it when a layer is finished, and count the finished layers.

    None where it ended by itself.
    """
    command = [sys.executable, "-m", "quantflow", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=sys.stderr)
    while process.poll() is None:
        layers = len(list(folder.glob("**/layers/[0-9]*.json")))
        if 0 < layers < EXAMPLE_LAYERS:
            kill_tree(process.pid)
            process.kill()
            process.wait()
            return layers
        time.sleep(0.002)
    return None


def bytes_of(folder: Path, files: str) -> dict[str, str]:
    """Return the sha256 of files below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob(files)
    }


def told(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """Return how many files are the same, in words."""
    same = sum(theirs.get(name) == digest for name, digest in ours.items())
    return f"{same} of {len(ours)} files"


# A checkpoint of a large model's layers.


def large_checkpoint(place: Place, depth: int) -> tuple[Path, Path]:
    """Return a checkpoint of so many layers and its calibration, made unless they are there."""
    amounts = place.amounts
    model, calibration = place.shared / f"large-{depth}", place.shared / "large-calibration.jsonl"
    make_checkpoint(model, replace(amounts.large, layers=depth), seed=SEED, tokenizer=place.model)
    make_calibration(
        calibration, samples=amounts.large_samples, tokens=amounts.large_tokens, seed=SEED
    )
    return model, calibration


def large(place: Place, found: Found) -> None:
    """Measure and round checkpoints of two depths; the difference is what a layer takes."""
    amounts = place.amounts
    shape, (few, more) = amounts.large, amounts.depths
    found.figure("hidden, intermediate features", f"{shape.hidden}, {shape.intermediate}")
    found.figure("calibration", f"{amounts.large_samples} x {amounts.large_tokens}", "tokens")
    measuring, rounding = (on_device(place, verb, found) for verb in ("measure", "quantize"))
    length = [
        "--samples",
        str(amounts.large_samples),
        "--sequence-length",
        str(amounts.large_tokens),
    ]
    seconds: dict[int, float] = {}
    for depth in (few, more):
        model, calibration = large_checkpoint(place, depth)
        measured = place.work / f"measured-{depth}"
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
        ]
        first, _ = timed(*words, "-q", *measuring)
        words = [
            "quantize",
            model,
            "-o",
            place.work / f"quantized-{depth}",
            "--scheme",
            "W4A16",
            "--algorithm",
            "gptq",
        ]
        second, _ = timed(*words, "--measurement", measured, "--no-export", "-q", *rounding)
        found.figure(f"measure, {depth} layers, imports included", first, "s")
        found.figure(f"quantize, {depth} layers, imports included", second, "s")
        seconds[depth] = first + second
    each = (seconds[more] - seconds[few]) / (more - few)
    found.figure("one more layer, both stages", each, "s")
    probed = quantflow(
        "plan",
        model,
        "--for",
        "W4A16:gptq",
        *length,
        *on_device(place, "plan", found),
        "--probe",
        "--json",
    )
    planned = sum(
        stage["seconds"]
        for stage in json.loads(probed)["stages"]
        if stage["stage"] in ("measure", "quantize")
    )
    found.figure(
        f"both stages, {more} layers: seconds, planned, and taken with imports",
        f"{planned:.1f}, {seconds[more]:.1f}",
    )
    whole = seconds[few] + (WHOLE_LAYERS - few) * each
    found.bar(
        f"measure and gptq of {WHOLE_LAYERS} such layers, computed from {few} and {more} of them",
        promised=f"{LARGE_BAR:.0f} s",
        found=f"{whole:.0f} s",
        met=whole <= LARGE_BAR,
    )


# The memory.


def memory(place: Place, found: Found) -> None:
    """Run stages and compare the memory that they took with what `plan` says."""
    device = ["--device", place.device] if takes("plan", "--device") else []
    plan = json.loads(
        quantflow("plan", place.model, "--for", "W4A16:gptq", *calibrated(place), *device, "--json")
    )
    stages = {stage["stage"]: stage for stage in plan["stages"]}
    measured = place.work / "measured"
    runs = {
        "measure": [
            "measure",
            place.model,
            "-o",
            measured,
            "--for",
            "W4A16:gptq",
            *calibrated(place),
            "-q",
        ],
        "quantize": [
            *(
                "quantize",
                place.model,
                "-o",
                place.work / "quantized",
                "--scheme",
                "W4A16",
                "--algorithm",
                "gptq",
            ),
            *("--measurement", measured, "--no-export", "-q"),
        ],
    }
    for verb, words in runs.items():
        peak = peak_of(words)
        found.figure(
            f"{verb} on the CPU: memory of the host, planned and taken",
            both(stages[verb]["peak_memory"], peak),
        )
    if not place.on_gpu:
        found.absent("memory of the device", "there is no GPU")
        return
    taken = peak_on_device(place)
    for verb, peak in taken.items():
        planned = stages[verb].get("device_memory")
        if planned is None:
            found.figure(f"{verb}: memory of the device", gb(peak))
            found.absent(
                f"{verb}: memory of the device beside its plan", "`plan` says nothing of it"
            )
            continue
        found.figure(f"{verb}: memory of the device, planned and taken", both(planned, peak))
        found.claim(
            f"{verb}: memory of the device",
            promised=f"at most {gb(planned)}",
            found=gb(peak),
            met=peak <= planned,
        )


def peak_of(words: Sequence[str | Path]) -> int:
    """Run a command of quantflow and return the largest resident set of its processes, bytes.

    Raises:
        Failed: it does not exit with 0.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "quantflow", *map(str, words)], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise Failed(f"quantflow {words[0]}: exit {process.returncode}")
    return usage.ru_maxrss * 1024


def both(planned: float, taken: float) -> str:
    """Return a plan and what was taken, in words."""
    return f"{gb(planned)}, {gb(taken)}"


def peak_on_device(place: Place) -> dict[str, int]:
    """Return the most bytes that each stage had on the device, run in this process."""
    import quantflow as stages
    from quantflow.planning.recipe import Calibration, Compute, Measure, Quantize

    compute, amounts = Compute(device=place.device), place.amounts
    entry = Quantize(name="int4", scheme="W4A16", algorithm="gptq")
    calibration = Calibration(samples=amounts.samples, sequence_length=amounts.tokens)
    taken: dict[str, int] = {}
    torch.cuda.init()  # type: ignore[no-untyped-call]  # what is reset does not do so itself
    torch.cuda.reset_peak_memory_stats(place.device)
    measured = stages.measure(
        place.model,
        place.work / "measured-there",
        calibration=calibration,
        options=Measure(),
        entries=[entry],
        compute=compute,
    )
    taken["measure"] = torch.cuda.max_memory_allocated(place.device)
    torch.cuda.reset_peak_memory_stats(place.device)
    stages.quantize(
        place.model,
        place.work / "quantized-there",
        entry=entry,
        measurement=measured.folder,
        compute=compute,
    )
    taken["quantize"] = torch.cuda.max_memory_allocated(place.device)
    return taken


# The best algorithm.


def best(place: Place, found: Found) -> None:
    """Quantize by best; AutoRound with its own defaults on the same number of tokens beside it."""
    from _gpu.peers import autoround

    measured, quantized, made = (
        place.work / name for name in ("measured", "quantized", "artifact")
    )
    # Where quantize runs on the CPU alone, gradients go back there too.
    there = ["--device", place.device] if takes("quantize", "--device") else []
    first, _ = timed(
        "measure",
        place.model,
        "-o",
        measured,
        "--for",
        "W4A16:best",
        *calibrated(place),
        *there,
        "-q",
    )
    found.figure("measure, gradients among it", first, "s")
    words = [
        "quantize",
        place.model,
        "-o",
        quantized,
        "--scheme",
        "W4A16",
        "--algorithm",
        "best",
        "--measurement",
        measured,
    ]
    second, _ = timed(*words, "--no-export", "-q", *on_device(place, "quantize", found))
    found.figure("quantize by best", second, "s")
    quantflow("export", quantized, "-o", made, "-q")
    found.figure("mean KLD", kld(judged(place, made, "best", [])), "nats")
    theirs = autoround(place, found)
    if theirs is not None:
        ours = first + second
        found.bar(
            "best beside AutoRound",
            promised=f"less than {theirs:.0f} s",
            found=f"{ours:.0f} s",
            met=ours < theirs,
        )

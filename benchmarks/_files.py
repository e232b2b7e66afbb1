"""Part a: schemes that need no forward pass, file to file.

`cat` and `cp` of the same files stand beside them in the same run.
"""

import os
import shutil
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import _quantflow
from _quantflow import Commands
from _report import Bar, bars, gb, rate, table
from _watch import Run, evict, run

SCHEMES = {"FP8_DYNAMIC": "float8, a scale per row", "W4A16": "4 bits, a scale per 128 inputs"}
MEMORY_BAR = 4e9
RATIO_BAR, RATE_BAR = 0.5, 0.5e9
PLAN_BAR, OUTPUT_BAR = 0.15, 0.02


def files(commands: Commands, *, work: Path) -> tuple[dict[str, Any], list[Bar]]:
    """Time reading, copying and quantizing the same files; print the tables.

    Args:
        commands: of quantflow, on the checkpoint.
        work: a folder for outputs, each deleted before the next.

    Returns:
        The figures and the bars.
    """
    work.mkdir(parents=True, exist_ok=True)
    weights = sorted(commands.model.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in weights)
    disk = _disk(weights, work)
    found = {scheme: _scheme(commands, scheme, work) for scheme in SCHEMES}
    _print_rates(size, disk, found)
    judged = [
        bar for scheme, figures in found.items() for bar in _judge(scheme, figures, size, disk)
    ]
    print("\n" + bars(judged))
    schemes = {
        scheme: {key: value for key, value in figures.items() if key != "rows"}
        for scheme, figures in found.items()
    }
    return {"input": size, "disk": disk, "schemes": schemes}, judged


def _disk(weights: list[Path], work: Path) -> dict[str, Any]:
    """Time `cat` and `cp` of the weights, each from the disk where the page cache forgets them."""
    cold = evict(weights)
    state = "forgets the weights before each program" if cold else "holds on to some of the weights"
    print(f"page cache: {state}", flush=True)
    begin = time.monotonic()
    with open(os.devnull, "wb") as nowhere:
        subprocess.run(["cat", *weights], stdout=nowhere, check=True)
    cat = time.monotonic() - begin
    copy = work / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    evict(weights)
    begin = time.monotonic()
    subprocess.run(["cp", *weights, copy], check=True)
    cp = time.monotonic() - begin
    subprocess.run(["sync", *copy.iterdir()], check=True)
    synced = time.monotonic() - begin
    shutil.rmtree(copy)
    return {"cold": cold, "cat": cat, "cp": cp, "cp and sync": synced}


def _scheme(commands: Commands, scheme: str, work: Path) -> dict[str, Any]:
    """Plan, quantize, export and verify one scheme, then delete what was made."""
    quantized, artifact = work / "quantized", work / "artifact"
    for folder in (quantized, artifact):
        shutil.rmtree(folder, ignore_errors=True)
    planned = commands.plan(f"{scheme}:rtn", work)
    timed = {
        "quantize": commands.quantize(quantized, scheme=scheme, algorithm="rtn"),
        "export": commands.export(quantized, artifact),
        "verify": commands.verify(artifact),
    }
    evict(sorted(commands.model.glob("*.safetensors")))
    steps: dict[str, Run] = {}
    for name, command in timed.items():
        steps[name] = run(command, log=work / f"{scheme}-{name}.log", folder=work)
        print(f"{scheme} {name}: {steps[name].seconds:.1f} s, {gb(steps[name].rss)}", flush=True)
    output = _quantflow.artifact_bytes(artifact)
    for folder in (quantized, artifact):
        shutil.rmtree(folder)
    compared = {name: steps[name] for name in ("quantize", "export")}
    return {
        "steps": {name: step.figures() for name, step in steps.items()},
        "output": output,
        "planned": asdict(planned),
        "plan_errors": _quantflow.plan_errors(planned, compared, output),
        "rows": _quantflow.plan_rows(planned, compared, output),
    }


def _print_rates(size: int, disk: dict[str, Any], found: dict[str, dict[str, Any]]) -> None:
    copies = (disk["cp"], disk["cp and sync"])
    rows = [
        (
            name,
            f"{disk[name]:.1f}",
            rate(size, disk[name]),
            *(f"{each / disk[name]:.2f}x" for each in copies),
            "",
            "",
            "",
            "",
        )
        for name in ("cat", "cp", "cp and sync")
    ]
    for scheme, figures in found.items():
        steps = figures["steps"]
        parts = {name: [steps[name]] for name in steps} | {
            "quantize + export": [steps["quantize"], steps["export"]]
        }
        for name, runs in parts.items():
            seconds = sum(each["seconds"] for each in runs)
            memory = (gb(max(each[key] for each in runs)) for key in ("rss", "anon", "file"))
            ratios = (f"{each / seconds:.2f}x" for each in copies)
            cpu = f"{sum(each['cpu'] for each in runs):.0f}"
            rows.append(
                (f"{scheme} {name}", f"{seconds:.1f}", rate(size, seconds), *ratios, cpu, *memory)
            )
    columns = (
        "program",
        "seconds",
        "input",
        "of cp",
        "of cp and sync",
        "CPU seconds",
        "peak RSS",
        "RssAnon",
        "RssFile",
    )
    print(f"\n{gb(size)} of weights\n\n{table(columns, rows)}")
    lines = [
        (f"{scheme} {row[0]}", *row[1:])
        for scheme, figures in found.items()
        for row in figures["rows"]
    ]
    print("\n" + table(_quantflow.PLAN_COLUMNS, lines))


def _judge(scheme: str, figures: dict[str, Any], size: int, disk: dict[str, Any]) -> list[Bar]:
    peak = max(step["rss"] for step in figures["steps"].values())
    judged = [
        Bar(
            what=f"{scheme}: peak RSS",
            promised=f"< {gb(MEMORY_BAR)}",
            found=gb(peak),
            met=peak < MEMORY_BAR,
        )
    ]
    if scheme == "FP8_DYNAMIC":
        seconds = figures["steps"]["quantize"]["seconds"]
        ratio, fast = disk["cp and sync"] / seconds, not disk["cold"] and size / seconds >= RATE_BAR
        judged.append(
            Bar(
                what=f"{scheme}: quantize, both synced",
                promised=f">= {RATIO_BAR}x of cp (or {RATE_BAR / 1e9} GB/s where cp reads the "
                "page cache)",
                found=f"{ratio:.2f}x, {rate(size, seconds)}",
                met=ratio >= RATIO_BAR or fast,
            )
        )
    return judged + plan_bars(scheme, figures["plan_errors"])


def plan_bars(what: str, errors: dict[str, list[float]]) -> list[Bar]:
    """The bars on the plan: 15 % on memory and disk, 2 % on output bytes, of each comparison."""
    limits = {"memory": PLAN_BAR, "disk": PLAN_BAR, "output": OUTPUT_BAR}
    return [
        Bar(
            what=f"{what}: plan of {name}",
            promised=f"within {limit:.0%}",
            found=f"{_quantflow.worst(errors[name]):+.1%} at worst",
            met=abs(_quantflow.worst(errors[name])) <= limit,
        )
        for name, limit in limits.items()
        if errors[name]
    ]

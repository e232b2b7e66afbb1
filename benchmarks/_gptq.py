"""Part b: measure, GPTQ for as many layers as fit in the time, kill -9, resume.

The finished layers must not be touched.
"""

import hashlib
import itertools
import re
import shutil
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import _quantflow
from _files import MEMORY_BAR, plan_bars
from _quantflow import Commands
from _report import Bar, bars, gb, table
from _watch import Run, run

SAMPLES, TOKENS = 8, 256


def gptq(
    commands: Commands,
    calibration: Path,
    *,
    layers: int,
    work: Path,
    minutes: float,
    kill_after: int | None,
    finish: bool,
    needs: str | None,
) -> tuple[dict[str, Any], list[Bar]]:
    """Run the part and print its tables.

    Args:
        commands: of quantflow, on the checkpoint.
        calibration: .jsonl with `input_ids`.
        layers: how many the checkpoint has.
        work: a folder for outputs; what an earlier run left there is deleted.
        minutes: after how long the first run of quantize is killed, though not before one layer is
            finished.
        kill_after: kill it as soon as that many layers are finished instead.
        finish: resume to the end, export and verify, instead of resuming for one more layer.
        needs: the schemes to measure for (`measure --for`); None collects every default statistic.

    Returns:
        The figures and the bars.
    """
    measured, quantized, artifact = work / "measured", work / "quantized", work / "artifact"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    planned = commands.plan("W4A16:gptq", work, samples=SAMPLES, tokens=TOKENS, needs=needs)
    steps = {
        "measure": _step("measure", commands.measure(measured, calibration, needs=needs), work)
    }
    command = (
        *commands.quantize(quantized, scheme="W4A16", algorithm="gptq"),
        "--measurement",
        measured,
    )
    folder = quantized / "layers"

    def time_is_up(seconds: float) -> bool:
        count = len(finished(folder))
        return (
            count >= kill_after if kill_after is not None else count > 0 and seconds > 60 * minutes
        )

    steps["quantize, killed"] = _step("quantize, killed", command, work, until=time_is_up)
    before = _identity(folder)
    print(f"killed after {len(before) // 2} of {layers} layers", flush=True)
    one_more = min(len(finished(folder)) + 1, layers)
    until = (
        None if finish or one_more == layers else lambda _seconds: len(finished(folder)) >= one_more
    )
    steps["quantize, resumed"] = _step("quantize, resumed", command, work, until=until)
    after = _identity(folder)
    untouched = {name: after.get(name) == before[name] for name in before}
    seconds = _layer_seconds(folder, len(before) // 2)
    output = 0
    if len(finished(folder)) == layers and (quantized / "DONE.json").exists():
        steps["export"] = _step("export", commands.export(quantized, artifact), work)
        steps["verify"] = _step("verify", commands.verify(artifact), work)
        output = _quantflow.artifact_bytes(artifact)
    figures = _figures(planned, steps, seconds, output)
    figures |= {
        "layers": layers,
        "killed_after": len(before) // 2,
        "finished": len(after) // 2,
        "untouched": untouched,
    }
    judged = _print(figures, steps)
    shutil.rmtree(work)
    return {key: value for key, value in figures.items() if key != "rows"}, judged


def finished(folder: Path) -> list[str]:
    """Return the layers that have both their files, by name."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return sorted(
        name[:5]
        for name in names
        if re.fullmatch(r"\d{5}\.json", name) and f"{name[:5]}.safetensors" in names
    )


def _step(
    name: str,
    command: tuple[str | Path, ...],
    work: Path,
    until: Callable[[float], bool] | None = None,
) -> Run:
    done = run(command, log=work / f"{name.replace(', ', '-')}.log", folder=work, until=until)
    print(f"{name}: {done.seconds:.1f} s, {gb(done.rss)}", flush=True)
    return done


def _identity(folder: Path) -> dict[str, list[int | str]]:
    """Return inode, modification time in ns and sha256 of every file of a finished layer."""
    found: dict[str, list[int | str]] = {}
    for layer in finished(folder):
        for path in (folder / f"{layer}.json", folder / f"{layer}.safetensors"):
            status = path.stat()
            with path.open("rb") as file:
                found[path.name] = [
                    status.st_ino,
                    status.st_mtime_ns,
                    hashlib.file_digest(file, "sha256").hexdigest(),
                ]
    return found


def _layer_seconds(folder: Path, killed_after: int) -> list[float]:
    """Seconds between one layer's record and the next, without the pair around the kill."""
    times = [(folder / f"{layer}.json").stat().st_mtime for layer in finished(folder)]
    gaps = [right - left for left, right in itertools.pairwise(times)]
    return [gap for index, gap in enumerate(gaps, start=1) if index != killed_after]


def _figures(
    planned: _quantflow.Planned, steps: dict[str, Run], seconds: list[float], output: int
) -> dict[str, Any]:
    """Set the plan against both runs of quantize together.

    Disk and output are compared only where it came to the end.
    """
    killed, resumed = steps["quantize, killed"], steps["quantize, resumed"]
    both = replace(
        resumed,
        rss=max(killed.rss, resumed.rss),
        disk=killed.disk + resumed.disk,
        seconds=killed.seconds + resumed.seconds,
    )
    compared = {"measure": steps["measure"], "quantize": both}
    if "export" in steps:
        compared["export"] = steps["export"]
    else:
        disk, times = (
            {key: value[key] for key in ("measure",) if key in value}
            for value in (planned.disk, planned.seconds)
        )
        planned = replace(planned, disk=disk, seconds=times, output=None)
    return {
        "steps": {name: step.figures() for name, step in steps.items()},
        "layer_seconds": seconds,
        "output": output,
        "planned": asdict(planned),
        "plan_errors": _quantflow.plan_errors(planned, compared, output),
        "rows": _quantflow.plan_rows(planned, compared, output),
    }


def _print(figures: dict[str, Any], steps: dict[str, Run]) -> list[Bar]:
    rows = [
        (
            name,
            f"{step.seconds:.1f}",
            f"{step.cpu:.0f}",
            gb(step.rss),
            gb(step.anon),
            gb(step.file),
            gb(step.disk),
        )
        for name, step in steps.items()
    ]
    print(
        "\n"
        + table(("stage", "seconds", "CPU seconds", "peak RSS", "RssAnon", "RssFile", "disk"), rows)
    )
    if figures["layer_seconds"]:
        median = statistics.median(figures["layer_seconds"])
        print(f"\nseconds per layer: {median:.1f} (median of {len(figures['layer_seconds'])})")
    print("\n" + table(_quantflow.PLAN_COLUMNS, figures["rows"]))
    peak = max(step.rss for step in steps.values())
    untouched = figures["untouched"].values()
    judged = [
        Bar(
            what="W4A16 gptq: peak RSS",
            promised=f"< {gb(MEMORY_BAR)}",
            found=gb(peak),
            met=peak < MEMORY_BAR,
        ),
        Bar(
            what="W4A16 gptq: files of finished layers untouched by kill and resume (inode, "
            "mtime, sha256)",
            promised="all",
            found=f"{sum(untouched)} of {len(untouched)}",
            met=len(untouched) > 0 and all(untouched),
        ),
    ]
    judged += plan_bars("W4A16 gptq", figures["plan_errors"])
    print("\n" + bars(judged))
    return judged

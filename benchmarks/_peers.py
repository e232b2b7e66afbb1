"""Part c: quantflow beside llm-compressor and GPTQModel on the same checkpoint, tokens and machine.

Every program is a fresh process, from import to the saved folder; the checkpoint is read into the
page cache before each, so that all start from the same state. Programs of one task take turns, run
after run.
"""

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _quantflow import Commands, artifact_bytes
from _report import Bar, bars, gb, table
from _watch import Run, run

TASKS = ("FP8_DYNAMIC", "W4A16 rtn", "W4A16 gptq")
SCRIPTS = Path(__file__).parent / "peers"
TIME_BAR, MEMORY_BAR = 0.8, 0.5


@dataclass(frozen=True, kw_only=True)
class Program:
    """One way to do a task: commands that run one after another, and what the environment needs."""

    task: str
    name: str
    commands: tuple[tuple[str | Path, ...], ...]
    environment: tuple[tuple[str, str], ...] = ()


def compare(
    commands: Commands,
    calibration: Path,
    *,
    work: Path,
    peers: Path,
    runs: int,
    only: Sequence[str],
) -> tuple[dict[str, Any], list[Bar]]:
    """Run every program that is installed and print the tables.

    Args:
        commands: of quantflow, on the checkpoint.
        calibration: .jsonl with `input_ids`.
        work: a folder for outputs, each deleted before the next run.
        peers: holds an environment per peer, `llmcompressor` and `gptqmodel`.
        runs: how often; the medians are reported.
        only: tasks or names of programs, by a part of their text; none means all.

    Returns:
        The figures by task and program, and the bars.
    """
    programs = [
        program
        for program in _programs(commands, calibration, work, peers)
        if _wanted(program, only)
    ]
    for program in [program for program in programs if not Path(program.commands[0][0]).exists()]:
        print(f"{program.task}, {program.name}: not installed below {peers}, left out", flush=True)
        programs.remove(program)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {task: {} for task in TASKS}
    for turn in range(runs):
        for program in programs:
            figures = _run(program, commands.model, work)
            found[program.task].setdefault(program.name, []).append(figures)
            print(
                f"run {turn + 1} of {runs}: {program.task}, {program.name}: "
                f"{figures['seconds']:.1f} s, {gb(figures['rss'])}",
                flush=True,
            )
    medians = {
        task: {name: _median(turns) for name, turns in names.items()}
        for task, names in found.items()
        if names
    }
    rows = [
        (
            f"{task}: {name}",
            f"{m['seconds']:.1f}",
            f"{m['cpu']:.0f}",
            gb(m["rss"]),
            gb(m["anon"]),
            gb(m["file"]),
            gb(m["output"]),
        )
        for task, names in medians.items()
        for name, m in names.items()
    ]
    print(
        "\n"
        + table(
            ("program", "seconds", "CPU seconds", "peak RSS", "RssAnon", "RssFile", "output"), rows
        )
    )
    judged = [bar for task, names in medians.items() for bar in _judge(task, names)]
    if judged:
        print("\n" + bars(judged))
    return {"runs": found, "medians": medians}, judged


def _programs(ours: Commands, calibration: Path, work: Path, peers: Path) -> list[Program]:
    model = ours.model
    compressor, gptqmodel = peers / "llmcompressor/bin/python", peers / "gptqmodel/bin/python"
    quantized, artifact, measured = work / "quantized", work / "artifact", work / "measured"
    offline = (("HF_HUB_OFFLINE", "1"),)
    programs = []
    for scheme, task in (("FP8_DYNAMIC", TASKS[0]), ("W4A16", TASKS[1])):
        quantize = ours.quantize(quantized, scheme=scheme, algorithm="rtn", artifact=artifact)
        programs.append(Program(task=task, name="quantflow", commands=(quantize,)))
        for name, workers in (
            ("llm-compressor model_free", "1"),
            ("llm-compressor model_free, 2 workers", "2"),
        ):
            command = (
                compressor,
                SCRIPTS / "llmcompressor_model_free.py",
                model,
                scheme,
                artifact,
                "--workers",
                workers,
            )
            programs.append(Program(task=task, name=name, commands=(command,), environment=offline))
    measure = ours.measure(measured, calibration, needs="W4A16:gptq")
    quantize = ours.quantize(quantized, scheme="W4A16", algorithm="gptq", artifact=artifact)
    stages = (measure, (*quantize, "--measurement", measured))
    sequential = (compressor, SCRIPTS / "llmcompressor_gptq.py", model, calibration, artifact)
    spilled = (*sequential, "--offload", work / "offload")
    theirs = (gptqmodel, SCRIPTS / "gptqmodel_gptq.py", model, calibration, artifact)
    pool = (*offline, ("GPTQMODEL_CPU_WORKERS", "2"))  # on two cores it refuses to start without
    return [
        *programs,
        Program(task=TASKS[2], name="quantflow", commands=stages),
        Program(
            task=TASKS[2],
            name="llm-compressor sequential",
            commands=(sequential,),
            environment=offline,
        ),
        Program(
            task=TASKS[2],
            name="llm-compressor sequential, on disk",
            commands=(spilled,),
            environment=offline,
        ),
        Program(task=TASKS[2], name="GPTQModel", commands=(theirs,), environment=pool),
    ]


def _wanted(program: Program, only: Sequence[str]) -> bool:
    text = f"{program.task}: {program.name}"
    return not only or any(word in text for word in only)


def _run(program: Program, model: Path, work: Path) -> dict[str, Any]:
    """Run the commands of a program on a warm checkpoint; seconds add up, memory is the largest."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    _warm(model)
    log = work.with_name(
        f"{work.name}-{program.task}-{program.name}.log".replace(" ", "-").replace(",", "")
    )
    log.unlink(missing_ok=True)
    steps: list[Run] = [
        run(command, log=log, folder=work, environment=dict(program.environment), where=work)
        for command in program.commands
    ]
    output = artifact_bytes(work / "artifact")
    shutil.rmtree(work)
    return {
        "seconds": sum(step.seconds for step in steps),
        "cpu": sum(step.cpu for step in steps),
        **{
            key: max(step.figures()[key] for step in steps)
            for key in ("rss", "anon", "file", "disk")
        },
        "output": output,
        "steps": [step.figures() for step in steps],
    }


def _warm(model: Path) -> None:
    """Read the weights once, so that every program finds them in the page cache."""
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def _median(turns: list[dict[str, Any]]) -> dict[str, float]:
    return {
        key: statistics.median(turn[key] for turn in turns) for key in turns[0] if key != "steps"
    }


def _judge(task: str, names: dict[str, dict[str, float]]) -> list[Bar]:
    """Compare quantflow with the best peer, in time and in memory each."""
    theirs = [figures for name, figures in names.items() if name != "quantflow"]
    if "quantflow" not in names or not theirs:
        return []
    judged = []
    for key, what, limit in (("seconds", "time", TIME_BAR), ("rss", "peak RSS", MEMORY_BAR)):
        ratio = names["quantflow"][key] / min(figures[key] for figures in theirs)
        judged.append(
            Bar(
                what=f"{task}: {what}",
                promised=f"<= {limit}x the better peer",
                found=f"{ratio:.2f}x",
                met=ratio <= limit,
            )
        )
    return judged

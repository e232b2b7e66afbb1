"""quantflow on a checkpoint larger than memory, beside its peers.

Shown are its speed, its size, and how close it comes to its plan.

    python benchmarks/large_checkpoint.py files gptq      # a synthetic Llama of 28 GB
    python benchmarks/large_checkpoint.py peers --size 2GB --peers DIR

README.md says what is run.

Needs an environment in which quantflow is installed, /usr/bin/time and Linux. Exits 1 when a bar is
missed.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import _files
import _gptq
import _peers
from _alone import alone
from _quantflow import Commands
from _report import Bar, gb, machine, write_results
from _synthetic import SHAPES, Shape, is_made, make_calibration, make_checkpoint
from _watch import Failed, need_tools

from quantflow import __version__

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("files", "gptq", "peers")
# the default size, and what is taken with less than so much free disk
LARGE, SMALLER, LARGE_FREE = "28GB", "14GB", 60e9
COPIES = 1.0  # outputs lie beside the checkpoint one at a time; `cp` of it is the largest
MARGIN = 1e9
BUSY = 0.7  # load average above which seconds mean little
SEED = 0


def main(arguments: Sequence[str]) -> int:
    """Run the parts that were asked for; the exit code.

    It is 5 where another benchmark holds the work folder.
    """
    return alone(_run, _arguments(arguments))


def _run(given: argparse.Namespace) -> int:
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    before = machine(work)
    if before["load"] > BUSY:
        print(
            f"load average {before['load']:.1f}: the machine is not idle, seconds will be too many",
            flush=True,
        )
    size = given.size or _default_size(work)
    shape, model = SHAPES[size], work / f"llama-{size}"
    try:
        need_tools()
        _need_disk(model, shape)
        print(
            f"checkpoint: {size}, {asdict(shape)}, seed {SEED}: {gb(shape.bytes)} in bf16",
            flush=True,
        )
        make_checkpoint(model, shape, seed=SEED, tokenizer=ROOT / "examples" / "tiny-llama")
        calibration = work / "calibration.jsonl"
        make_calibration(calibration, samples=_gptq.SAMPLES, tokens=_gptq.TOKENS, seed=SEED)
        judged = [
            bar
            for part in given.parts
            for bar in _part(part, given, shape, model, calibration, before)
        ]
    except Failed as error:
        print(error, file=sys.stderr)
        return 2
    if not given.keep:
        shutil.rmtree(model)
        model.with_name(model.name + ".json").unlink()
    missed = [bar.what for bar in judged if not bar.met]
    print(
        f"\n{len(judged) - len(missed)} of {len(judged)} bars met"
        + "".join(f"\nMISSED: {what}" for what in missed)
    )
    return 1 if missed else 0


def _part(
    part: str,
    given: argparse.Namespace,
    shape: Shape,
    model: Path,
    calibration: Path,
    before: dict[str, Any],
) -> list[Bar]:
    """Run one part and write its figures down."""
    print(f"\n## {part}\n", flush=True)
    work = given.work.resolve() / part
    commands = Commands(
        model=model, limits=("--max-memory", given.max_memory) if given.max_memory else ()
    )
    figures: dict[str, Any]
    if part == "files":
        figures, judged = _files.files(commands, work=work)
    elif part == "gptq":
        figures, judged = _gptq.gptq(
            commands,
            calibration,
            layers=shape.layers,
            work=work,
            minutes=given.minutes,
            kill_after=given.kill_after,
            finish=given.finish,
            needs=given.measure_for,
        )
    else:
        figures, judged = _peers.compare(
            commands,
            calibration,
            work=work,
            peers=given.peers.resolve(),
            runs=given.runs,
            only=given.only,
        )
    if given.results is not None:
        about = {
            "machine": machine(model),
            "shape": asdict(shape),
            "bytes": shape.bytes,
            "seed": SEED,
            "limits": commands.limits,
        }
        versions = {name: version(name) for name in ("torch", "transformers")}
        about["versions"] = {"quantflow": __version__, **versions}
        write_results(given.results, about, part, figures, judged)
    return judged


def _default_size(work: Path) -> str:
    free = shutil.disk_usage(work).free
    if free >= LARGE_FREE or is_made(work / f"llama-{LARGE}", SHAPES[LARGE], seed=SEED):
        return LARGE
    print(f"{gb(free)} are free, {LARGE} wants {gb(LARGE_FREE)}: running {SMALLER}", flush=True)
    return SMALLER


def _need_disk(model: Path, shape: Shape) -> None:
    """Refuse to begin what would fill the disk."""
    copies = COPIES + (0 if is_made(model, shape, seed=SEED) else 1)
    needed, free = copies * shape.bytes + MARGIN, shutil.disk_usage(model.parent).free
    print(f"disk: needs {gb(needed)} free, {gb(free)} are", flush=True)
    if free < needed:
        raise Failed(
            f"{model.parent}: {gb(free)} free, {gb(needed)} needed; free some, or take a smaller "
            "--size"
        )


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: files gptq)"
    )
    parser.add_argument(
        "--size",
        choices=SHAPES,
        help=f"default {LARGE}; {SMALLER} with less than {gb(LARGE_FREE)} free",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "artifacts" / "large_checkpoint",
        help="where everything goes",
    )
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint for the next time")
    parser.add_argument(
        "--max-memory", metavar="SIZE", help="given to quantflow's stages (default: what is free)"
    )
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="JSON; parts in it that are not run stay"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        help="gptq: when the first run is killed (default 30)",
    )
    parser.add_argument(
        "--kill-after", type=int, metavar="LAYERS", help="gptq: kill after so many layers instead"
    )
    parser.add_argument(
        "--finish", action="store_true", help="gptq: resume to the end, export and verify"
    )
    parser.add_argument(
        "--measure-for",
        metavar="SCHEMES",
        help="gptq: `measure --for`; default: every default statistic",
    )
    parser.add_argument(
        "--peers",
        type=Path,
        default=ROOT / "artifacts" / "peers",
        help="peers: a folder of environments",
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=1,
        help="peers: of each program, medians are reported (default 1)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="peers: tasks or programs that contain it",
    )
    given = parser.parse_args(arguments)
    given.parts = given.parts or ["files", "gptq"]
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return given


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

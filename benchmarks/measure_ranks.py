"""`quantflow measure` by two ranks next to one: the ratio of their wall times on this machine.

    python benchmarks/measure_ranks.py
    python benchmarks/measure_ranks.py --samples 4 --tokens 64 --runs 1    a try, a minute

The default is 50 MB of random weights and 32 sequences of 512 tokens.

One rank, two that share the sequences (dp) and two that share the model (tp) take turns; medians of
`--runs`. Needs the environment that quantflow is installed in, GNU time and Linux.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from _alone import alone
from _synthetic import SHAPES, make_calibration, make_checkpoint
from _watch import Failed, Run, need_tools, run

ROOT = Path(__file__).resolve().parents[1]
WORLDS = {
    "1 rank": [],
    "2 ranks, dp": ["--ranks", "2"],
    "2 ranks, tp": ["--ranks", "2", "--tp", "2"],
}
SEED = 0


def main(arguments: Sequence[str]) -> int:
    """Measure in turns and print the medians; the exit code.

    It is 5 where another benchmark holds the work folder.
    """
    return alone(_run, _arguments(arguments))


def _run(given: argparse.Namespace) -> int:
    work = given.work.resolve()
    model, calibration = work / f"llama-{given.size}", work / "calibration.jsonl"
    taken: dict[str, list[Run]] = {name: [] for name in WORLDS}
    try:
        need_tools()
        make_checkpoint(
            model, SHAPES[given.size], seed=SEED, tokenizer=ROOT / "examples" / "tiny-llama"
        )
        make_calibration(calibration, samples=given.samples, tokens=given.tokens, seed=SEED)
        for number in range(given.runs):
            for name, options in WORLDS.items():
                shutil.rmtree(work / "measured", ignore_errors=True)
                command = [
                    sys.executable,
                    "-m",
                    "quantflow",
                    "measure",
                    str(model),
                    "-o",
                    str(work / "measured"),
                    "-q",
                ]
                command += ["--calibration", str(calibration), "--samples", str(given.samples)]
                command += ["--sequence-length", str(given.tokens), *options]
                taken[name].append(run(command, log=work / "measure.log"))
                print(f"run {number + 1}, {name}: {taken[name][-1].seconds:.1f} s", flush=True)
    except Failed as error:
        print(error, file=sys.stderr)
        return 2
    one = median(each.seconds for each in taken["1 rank"])
    print(f"\n{given.size}, {given.samples} x {given.tokens} tokens, medians of {given.runs}\n")
    print("| | seconds | of 1 rank | CPU seconds | largest process | all processes, anonymous |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, runs in taken.items():
        seconds, cpu, rss, anon = (
            median(getattr(each, key) for each in runs) for key in ("seconds", "cpu", "rss", "anon")
        )
        print(
            f"| {name} | {seconds:.1f} | {seconds / one:.2f} | {cpu:.1f} | {rss / 1e6:.0f} MB | "
            f"{anon / 1e6:.0f} MB |"
        )
    if not given.keep:
        shutil.rmtree(work)
    return 0


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=sorted(SHAPES), default="50MB")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("artifacts/measure_ranks"))
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

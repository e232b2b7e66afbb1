"""quantflow's runtime beside its peers: prefill and decode in turns.

The peers are llama.cpp, OpenVINO GenAI, ONNX Runtime GenAI, IPEX and transformers.

    python benchmarks/runtime.py                          the 1.1 B checkpoint
    python benchmarks/runtime.py --size example           the example model
    python benchmarks/runtime.py --size gpt-oss-3B --batches 1           a mixture in MXFP4
    python benchmarks/runtime.py --size 50MB --rounds 1 --batches 1      a try, minutes

Needs an environment in which quantflow is installed, and one below --peers for each peer that is to
take part.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _alone import alone
from _mixture import MIXTURES, make_mixture
from _report import Bar, bars, gb, machine, table
from _runtimes import Ended, Program, programs_of, wanted
from _synthetic import SHAPES, TOKENIZER_IDS, make_checkpoint

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "tiny-llama"
SEED = 0
# seconds before a question: threads of the program asked before wait for work by spinning, on these
# cores
PAUSE = 0.3
BUSY = 0.7  # load average above which seconds mean little
# What a program is compared with, and by how much: decode and prefill at batch 1, decode at batch
# 8. None is not judged.
BARS = (
    ("decode, 1 at once", "quantflow 4-bit", "OpenVINO int4", 1.15),
    ("decode, 1 at once", "quantflow 4-bit", "llama.cpp Q4_0", 1.7),
    ("decode, 1 at once", "quantflow 4-bit", "memory limit", 0.77),
    ("decode, 1 at once", "quantflow W8A8", "OpenVINO int8", 1.0),
    ("decode, 1 at once", "quantflow W8A8", "memory limit", 0.85),
    ("decode, 1 at once", "quantflow FP8_DYNAMIC", "OpenVINO int8", 0.8),
    ("prefill, 1 at once", "quantflow W8A8", "OpenVINO int8", 1.3),
    ("prefill, 1 at once", "quantflow 4-bit", "OpenVINO int4", 1.3),
    ("decode, 8 at once", "quantflow 4-bit", "OpenVINO int4", 1.2),
    ("decode, 8 at once", "quantflow 4-bit", "llama.cpp Q4_0", 1.2),
    *(
        (f"{what}, 1 at once", f"quantflow MXFP4 {inputs}", "llama.cpp MXFP4", 1.2)
        for inputs in ("exact", "rounded")
        for what in ("decode", "prefill")
    ),
)


def main(arguments: Sequence[str]) -> int:
    """Run every installed program; the exit code.

    It is 5 where another benchmark holds the work folder.
    """
    return alone(_run, _arguments(arguments))


def _run(given: argparse.Namespace) -> int:
    # what another size left must not be taken for this one's
    work = given.work.resolve() / given.size
    work.mkdir(parents=True, exist_ok=True)
    model = EXAMPLE if given.size == "example" else work / "model"
    if given.size in MIXTURES:
        make_mixture(model, MIXTURES[given.size], seed=SEED, tokenizer=EXAMPLE)
    elif model != EXAMPLE:
        make_checkpoint(model, SHAPES[given.size], seed=SEED, tokenizer=EXAMPLE)
    about = machine(work) | {"threads": given.threads, "size": given.size, "rounds": given.rounds}
    if about["load"] > BUSY:
        print(
            f"load average {about['load']:.1f}: the machine is not idle, seconds will be too many",
            flush=True,
        )
    programs = [
        program for program in programs_of(given, model, work) if wanted(program, given.only)
    ]
    try:
        for program in list(programs):
            try:
                program.start(given.threads, work / f"{program.name.replace(' ', '-')}.log")
            except Ended as error:
                print(f"{error}; left out", flush=True)
                programs.remove(program)
                continue
            print(
                f"{program.name}: {program.ready['version']}, "
                f"{gb(program.ready['weight_bytes'])} a token",
                flush=True,
            )
        reads = _rounds(programs, given)
    finally:
        for program in programs:
            program.stop()
    judged = _report(programs, reads, given.batches)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(
            json.dumps(about | _results(programs, reads, judged), indent=2, sort_keys=True) + "\n"
        )
    return 1 if any(not bar.met for bar in judged) else 0


def _rounds(programs: Sequence[Program], given: argparse.Namespace) -> list[float]:
    """Let the programs take turns; return the bytes per second of a plain read in each round."""
    draw, reads = random.Random(SEED), []
    reader = next(
        (program for program in programs if program.script == "runtime_quantflow.py"), None
    )
    size = max(program.ready["weight_bytes"] for program in programs)
    # the first is not counted: caches fill, memory is reserved
    for turn in range(given.rounds + 1):
        if reader is not None:
            reads.append(size / reader.ask({"read": size})["seconds"])
        # another one begins each round: the first follows the read and the last one's most rows
        begins = turn % len(programs)
        for batch in given.batches:
            for program in [*programs[begins:], *programs[:begins]]:
                rows = [
                    draw.choices(TOKENIZER_IDS[: given.vocabulary], k=given.prompt)
                    for _ in range(batch)
                ]
                time.sleep(PAUSE)
                answer = program.ask({"rows": rows, "new": given.new})
                if turn:
                    decode = batch / statistics.median(answer["steps"])
                    program.found.setdefault(("decode", batch), []).append(decode)
                    program.found.setdefault(("prefill", batch), []).append(
                        batch * given.prompt / answer["first"]
                    )
        print(f"round {turn} of {given.rounds}", flush=True)
    return reads[1:]


def _report(
    programs: Sequence[Program], reads: Sequence[float], batches: Sequence[int]
) -> list[Bar]:
    """Print a table per batch size and the bars; return the bars."""
    speed = statistics.median(reads) if reads else None
    if speed is not None:
        print(f"\na plain read of the weights: {speed / 1e9:.1f} GB/s")
    medians: dict[tuple[str, str], float] = {}
    for batch in batches:
        rows = []
        for program in programs:
            prefill, decode = (
                statistics.median(program.found[(what, batch)]) for what in ("prefill", "decode")
            )
            medians[f"prefill, {batch} at once", program.name] = prefill
            medians[f"decode, {batch} at once", program.name] = decode
            # sequences of a batch share some of a mixture's experts
            shared = batch > 1 and "share" in program.settings
            limit = (
                None if speed is None or shared else batch * speed / program.ready["weight_bytes"]
            )
            if limit is not None:
                medians[f"decode, {batch} at once", f"memory limit of {program.name}"] = limit
            lowest, highest = (
                min(program.found["decode", batch]),
                max(program.found["decode", batch]),
            )
            share = "" if limit is None else f"{decode / limit:.0%}"
            rows.append(
                (
                    program.name,
                    f"{prefill:.0f}",
                    f"{decode:.1f}",
                    f"{lowest:.1f} to {highest:.1f}",
                    share,
                )
            )
        print(f"\n{batch} at once\n")
        print(
            table(
                (
                    "program",
                    "prefill tokens/s",
                    "decode tokens/s",
                    "lowest to highest",
                    "of the memory limit",
                ),
                rows,
            )
        )
    judged = [bar for bar in (_judge(medians, *line) for line in BARS) if bar is not None]
    if judged:
        print("\n" + bars(judged))
    return judged


def _judge(
    medians: dict[tuple[str, str], float], what: str, ours: str, theirs: str, least: float
) -> Bar | None:
    """A bar, or None where a side of it was not run.

    Of 4 bits the default program counts.
    """
    names = ("quantflow W4A16",) if ours == "quantflow 4-bit" else (ours,)
    found = []
    for name in names:
        other = f"memory limit of {name}" if theirs == "memory limit" else theirs
        if (what, name) in medians and (what, other) in medians:
            found.append((medians[what, name] / medians[what, other], name))
    if not found:
        return None
    ratio, name = max(found)
    return Bar(
        what=f"{what}: {name} to {theirs}",
        promised=f"{least:.2f}x",
        found=f"{ratio:.2f}x",
        met=ratio >= least,
    )


def _results(
    programs: Sequence[Program], reads: Sequence[float], judged: Sequence[Bar]
) -> dict[str, Any]:
    found = {
        program.name: program.ready
        | {f"{what} at {batch}": values for (what, batch), values in program.found.items()}
        for program in programs
    }
    return {
        "programs": found,
        "read_bytes_per_second": list(reads),
        "bars": [vars(bar) for bar in judged],
    }


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size",
        choices=[*SHAPES, *MIXTURES, "example"],
        default="2GB",
        help="of the checkpoint (default 2GB, 1.1 B weights); gpt-oss-*: a mixture in MXFP4",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "artifacts" / "runtime",
        help="where everything is made and kept",
    )
    parser.add_argument(
        "--peers", type=Path, default=ROOT / "artifacts" / "peers", help="a folder of environments"
    )
    parser.add_argument("--threads", type=int, default=2, help="of every program (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="medians are reported (default 5)")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 8], help="sequences at once (default 1 8)"
    )
    parser.add_argument(
        "--prompt", type=int, default=256, help="tokens of each prompt (default 256)"
    )
    parser.add_argument("--new", type=int, default=32, help="tokens added to each (default 32)")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=["float32", "bfloat16"],
        help="quantflow's (default bfloat16)",
    )
    parser.add_argument("--kv-cache", default="auto", help="quantflow's (default: the dtype)")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="programs whose name contains it"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    given = parser.parse_args(arguments)
    sizes = {**SHAPES, **MIXTURES}
    held = TOKENIZER_IDS.stop if given.size == "example" else sizes[given.size].vocab
    given.vocabulary = min(len(TOKENIZER_IDS), held - TOKENIZER_IDS.start)
    return given


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

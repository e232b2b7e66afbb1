"""Runtimes on cores that other programs use: tokens per second beside an idle machine.

    python benchmarks/busy.py                             the 500 MB checkpoint, and its peers
    python benchmarks/busy.py --size example --rounds 3   the example model, a minute
    python benchmarks/busy.py --only "quantflow W4A16"

A neighbour is a process that counts for ever. The programs answer in turns, alone, beside as many
neighbours as cores, and beside four times as many. Needs an idle machine, an environment in which
quantflow is installed, and one below --peers for each peer that is to take part.
"""

import argparse
import contextlib
import copy
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _alone import alone
from _quantflow import QUANTFLOW
from _report import Bar, bars, machine, table
from _runtimes import ROOT, Ended, Program, programs_of, wanted
from _synthetic import SHAPES, TOKENIZER_IDS, make_checkpoint

EXAMPLE = ROOT / "examples" / "tiny-llama"
SEED = 0
PAUSE = 0.3  # seconds before a question: threads of the program asked before may still spin
SCHEMES = ("quantflow W4A16", "quantflow W8A8")
PEERS = ("llama.cpp Q4_0", "OpenVINO int4")
# share of the idle speed that is asked for, by neighbours per core
LEAST = {1: 0.4, 4: 0.15}


class Served(Program):
    """A server, asked over HTTP; `found` counts tokens of whole answers."""

    def start(self, threads: int, log: Path) -> None:
        """Start it and wait for its health."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.settings["port"] = free.getsockname()[1]
        command = [*QUANTFLOW, "serve", self.settings["artifact"], "--threads", threads]
        command += ["--port", self.settings["port"], "--dtype", self.settings["dtype"], "-q"]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                list(map(str, command)),
                env={**os.environ, **self.environment},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
            )
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(self._url("health"), timeout=5).close()
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise Ended(f"{self.name} does not answer: see {log}")

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Seconds of each token of one answer, their mean."""
        body = {
            "prompt": question["rows"][0],
            "max_tokens": question["new"],
            "temperature": 0,
            "logit_bias": {"1": -100},  # no end token
        }
        request = urllib.request.Request(
            self._url("v1/completions"),
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        begin = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as answer:
            count = json.load(answer)["usage"]["completion_tokens"]
        mean = (time.perf_counter() - begin) / count
        return {"first": mean, "steps": [mean] * (count - 1)}

    def stop(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def _url(self, route: str) -> str:
        return f"http://127.0.0.1:{self.settings['port']}/{route}"


class Ranks(Program):
    """Ranks that share a decoder, started for each question by `bench`."""

    def start(self, threads: int, log: Path) -> None:
        """Nothing runs between two questions."""
        del threads, log

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Seconds of each token, by `bench --ranks`."""
        words = ["bench", self.settings["artifact"], "--ranks", self.settings["ranks"], "--json"]
        words += ["--input-tokens", len(question["rows"][0]), "--new-tokens", question["new"]]
        words += ["--dtype", self.settings["dtype"], "--runs", 1, "--warmups", 1, "-q"]
        done = subprocess.run(
            [*QUANTFLOW, *map(str, words)],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=True,
        )
        batch = json.loads(done.stdout)["batches"][0]
        step = batch["decode_token"]["average"]
        return {"first": step, "steps": [step] * (question["new"] - 1)}

    def stop(self) -> None:
        """Nothing runs."""


def main(arguments: Sequence[str]) -> int:
    """Run every installed program; the exit code.

    It is 5 where another benchmark holds the work folder.
    """
    return alone(_run, _arguments(arguments))


def _run(given: argparse.Namespace) -> int:
    work = given.work.resolve() / given.size
    work.mkdir(parents=True, exist_ok=True)
    model = EXAMPLE if given.size == "example" else work / "model"
    if model != EXAMPLE:
        make_checkpoint(model, SHAPES[given.size], seed=SEED, tokenizer=EXAMPLE)
    about = machine(work) | {"size": given.size, "rounds": given.rounds, "new": given.new}
    programs = _all(given, model, work)
    started: list[Program] = []
    try:
        for program in programs:
            threads = program.settings.get("threads", given.threads)
            program.settings["threads"] = threads
            try:
                program.start(threads, work / f"busy-{program.name.replace(' ', '-')}.log")
                started.append(program)
            except Ended as error:
                print(f"{error}; left out", flush=True)
        _rounds(started, given)
    finally:
        for program in started:
            program.stop()
    judged = _report(started, given)
    if given.json is not None:
        found = {
            program.name: {str(many): values for (_, many), values in program.found.items()}
            for program in started
        }
        given.json.write_text(json.dumps(about | {"tokens per second": found}, indent=2) + "\n")
    return 1 if any(not bar.met for bar in judged) else 0


def _all(given: argparse.Namespace, model: Path, work: Path) -> list[Program]:
    """The programs, and ours on one thread, served and in ranks."""
    only = [*SCHEMES, *PEERS]
    base = programs_of(
        argparse.Namespace(**{**vars(given), "only": only, "batches": [1]}), model, work
    )
    found = [program for program in base if program.name in only]
    ours = next(program for program in found if program.name == SCHEMES[0])
    alone = copy.deepcopy(ours)
    alone.name += ", 1 thread"
    alone.settings["threads"] = 1
    found.append(alone)
    about = {"artifact": ours.settings["artifact"], "dtype": given.dtype, "ranks": given.threads}
    for kind, name in ((Served, "serve"), (Ranks, f"{given.threads} ranks")):
        found.append(
            kind(name=f"{ours.name}, {name}", python=ours.python, script="", settings=dict(about))
        )
    return [program for program in found if wanted(program, given.only)]


def _rounds(programs: Sequence[Program], given: argparse.Namespace) -> None:
    """Ask every program in every situation, in turns."""
    draw, cores = random.Random(SEED), len(os.sched_getaffinity(0))
    prompts = TOKENIZER_IDS[: given.vocabulary]
    for turn in range(given.rounds + 1):  # the first is not counted
        for many in (0, *LEAST):
            with neighbours(many * cores):
                for program in programs:
                    question = {"rows": [draw.choices(prompts, k=given.prompt)], "new": given.new}
                    time.sleep(PAUSE)
                    steps = program.ask(question)["steps"]
                    if turn:
                        # the mean, since a median leaves out the tokens that wait longest
                        rate = 1 / statistics.mean(steps)
                        program.found.setdefault(("decode", many), []).append(rate)
        print(f"round {turn} of {given.rounds}", flush=True)


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Run so many processes that count for ever, at the usual priority."""
    running = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], stdin=subprocess.DEVNULL)
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def _report(programs: Sequence[Program], given: argparse.Namespace) -> list[Bar]:
    """Print tokens per second by situation, and the bars of the default program."""
    rows, judged = [], []
    for program in programs:
        idle, *busy = (statistics.median(program.found["decode", many]) for many in (0, *LEAST))
        row = [program.name, f"{idle:.1f}"]
        for rate, (many, least) in zip(busy, LEAST.items(), strict=True):
            row.append(f"{rate:.1f} ({rate / idle:.2f})")
            if program.name in SCHEMES or program.name.endswith(("serve", "ranks")):
                judged.append(
                    Bar(
                        what=f"{program.name}, {many} neighbours per core, of its idle speed",
                        promised=f"{least:.2f}x",
                        found=f"{rate / idle:.2f}x",
                        met=rate / idle >= least,
                    )
                )
        rows.append(tuple(row))
    print(f"\ntokens per second (of idle), {given.threads} threads\n")
    heads = ("program", "idle", *(f"{many} neighbours per core" for many in LEAST))
    print(table(heads, rows))
    print("\n" + bars(judged))
    return judged


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=[*SHAPES, "example"], default="500MB")
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "artifacts" / "runtime",
        help="where everything is made and kept (default that of runtime.py)",
    )
    parser.add_argument("--peers", type=Path, default=ROOT / "artifacts" / "peers")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help=f"default {cores}, the cores")
    parser.add_argument("--rounds", type=int, default=5, help="medians are reported (default 5)")
    parser.add_argument("--prompt", type=int, default=32, help="tokens (default 32)")
    parser.add_argument("--new", type=int, default=32, help="tokens (default 32)")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--kv-cache", default="auto", help="quantflow's (default: the dtype)")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    given = parser.parse_args(arguments)
    held = TOKENIZER_IDS.stop if given.size == "example" else SHAPES[given.size].vocab
    given.vocabulary = min(len(TOKENIZER_IDS), held - TOKENIZER_IDS.start)
    return given


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

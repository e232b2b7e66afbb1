"""Everything that quantflow does on a GPU, checked by one command.

It installs nothing and ends within ten minutes.

    python benchmarks/gpu.py              # the GPU that torch finds, else the CPU in its place
    python benchmarks/gpu.py --device cpu --size smallest
    python benchmarks/gpu.py --only products graph --budget 120
    python benchmarks/gpu.py --list

Each check is a process of its own with a limit of its own: one that fails, hangs or dies leaves
what it had found, and the others. The results file and its page are whole after every check. Checks
come in the order of their importance; those that the time is too short for are listed with that
reason. On the CPU the same code runs with less to do, and speeds are not judged.

Needs an environment with quantflow's dependencies; quantflow itself is read from this repository.
Exits 1 when a check failed, was ended, or found that a claim or a bar does not hold.
"""

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from _gpu.page import page
from _gpu.record import SIZES, Found, Outcome, Place, read_found, read_place, write_whole

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a clone needs no installation
BUDGET = 570.0  # seconds of all checks
SHARE = 1 / 3  # of a check's limit that has to be left for it to begin
POLL = 0.05  # seconds between two looks at a check's process
NOT_REACHED = "the script ended before it"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check.

    Attributes:
        name: on the command line and in the table.
        asks: what it finds out, in a sentence.
        function: `module:function` of a function of (Place, Found).
        limit: seconds after which it is ended.
    """

    name: str
    asks: str
    function: str
    limit: float


CHECKS = (
    Check(
        name="environment",
        asks="The device, its driver and the libraries.",
        function="_gpu.environment:environment",
        limit=60,
    ),
    Check(
        name="measure",
        asks="`measure` of the example model on the device finds the statistics that it finds on "
        "the CPU.",
        function="_gpu.stages:measure",
        limit=90,
    ),
    Check(
        name="products",
        asks="Each kernel computes what the equation says, and how fast it is beside cuBLAS and "
        "a plain read of the weight.",
        function="_gpu.products:products",
        limit=90,
    ),
    Check(
        name="validate",
        asks="`validate` on the device finds the divergence that it finds on the CPU, within the "
        "noise that it states.",
        function="_gpu.stages:validate",
        limit=120,
    ),
    Check(
        name="generate",
        asks="`generate` on the device writes the tokens that it writes on the CPU.",
        function="_gpu.stages:generate",
        limit=90,
    ),
    Check(
        name="graph",
        asks="Decode steps that are replayed as a CUDA graph have the bits of steps that are not.",
        function="_gpu.speed:graph",
        limit=60,
    ),
    Check(
        name="quantize",
        asks="`quantize` W4A16 by gptq on the device makes an artifact as near to the source as "
        "the CPU's.",
        function="_gpu.stages:quantize",
        limit=120,
    ),
    Check(
        name="large decoder",
        asks="Prefill and decode of the largest random model, made on the device layer by layer.",
        function="_gpu.speed:large",
        limit=120,
    ),
    Check(
        name="large checkpoint",
        asks="Measuring and rounding by gptq a few layers of a large checkpoint, and what one "
        "more layer takes.",
        function="_gpu.stages:large",
        limit=180,
    ),
    Check(
        name="same bits",
        asks="The same command makes the same bits again on one device, killed and resumed, and "
        "on two by ranks.",
        function="_gpu.stages:same_bits",
        limit=150,
    ),
    Check(
        name="small decoder",
        asks="Prefill and decode of the smaller random model.",
        function="_gpu.speed:small",
        limit=60,
    ),
    Check(
        name="memory",
        asks="The memory that stages take beside what `plan` says.",
        function="_gpu.stages:memory",
        limit=90,
    ),
    Check(
        name="best",
        asks="`quantize` W4A16 by best, and AutoRound beside it.",
        function="_gpu.stages:best",
        limit=240,
    ),
    Check(
        name="peers",
        asks="llm-compressor and GPTQModel on the large checkpoint, vLLM on an artifact of the "
        "example model.",
        function="_gpu.peers:peers",
        limit=240,
    ),
)


def main(arguments: Sequence[str]) -> int:
    """Run the checks that were asked for and return the exit code."""
    given = _arguments(arguments)
    if given.check is not None:
        return _one(given.check, given.place)
    if given.list:
        print(
            "\n".join(f"{check.name:<18} {check.limit:>4.0f} s  {check.asks}" for check in CHECKS)
        )
        return 0
    # here: the process of a check needs nothing of quantflow's before the check does
    from _alone import alone

    return alone(_all, given)


def _all(given: argparse.Namespace) -> int:
    device, name = _device(given.device)
    size = given.size or ("cpu" if device == "cpu" else "full")
    work = given.work.resolve()
    place = Place(
        device=device,
        size=size,
        model=ROOT / "examples" / "tiny-llama",
        work=work,
        shared=work / "shared",
        peers=given.peers.resolve(),
    )
    checks = [check for check in CHECKS if not given.only or check.name in given.only]
    checks = [replace(check, limit=check.limit * given.patience) for check in checks]
    budget = given.budget * given.patience
    words = ["python benchmarks/gpu.py", *_told(given)]
    about = {
        "device": device,
        "name": name,
        "size": size,
        "command": " ".join(words),
        "budget": budget,
    }
    about["date"] = datetime.date.today().isoformat()

    def keep(outcomes: Sequence[Outcome], seconds: float) -> None:
        results = {
            **about,
            "seconds": round(seconds, 1),
            "checks": [asdict(outcome) for outcome in outcomes],
        }
        write_whole(given.json, json.dumps(results, indent=1, sort_keys=True) + "\n")
        write_whole(given.page, page(results))

    outcomes = run(
        checks, place, budget=budget, keep=keep, say=_say, earlier=_earlier(given.json, about)
    )
    missed = [line for outcome in outcomes for line in outcome.missed]
    print(f"\n{given.page.read_text()}")
    for line in missed:
        _say(f"MISSED: {line}")
    return 1 if missed else 0


def run(
    checks: Sequence[Check],
    place: Place,
    *,
    budget: float,
    keep: Callable[[Sequence[Outcome], float], None],
    say: Callable[[str], None],
    earlier: dict[str, float],
) -> list[Outcome]:
    """Run checks one after the other.

    Args:
        checks: in the order of their importance.
        place: `work` gets a folder for each.
        budget: seconds of all of them; the last is ended when they are over.
        keep: is given the outcomes of all checks, and the seconds so far, before the first check
            and after each.
        say: is told how far it is.
        earlier: seconds that a check took before, for the time that is told.

    Returns:
        An outcome for each check.
    """
    began = time.monotonic()
    outcomes = [
        Outcome(name=check.name, asks=check.asks, state="not run", reason=NOT_REACHED)
        for check in checks
    ]
    keep(outcomes, 0.0)
    for index, check in enumerate(checks):
        gone = time.monotonic() - began
        left = budget - gone
        if left < check.limit * SHARE:
            outcomes[index].reason = (
                f"{max(left, 0.0):.0f} s of {budget:.0f} were left, "
                f"and it may take {check.limit:.0f}"
            )
        else:
            coming = sum(earlier.get(later.name, later.limit) for later in checks[index:])
            about = "about" if all(later.name in earlier for later in checks[index:]) else "at most"
            say(
                f"{index + 1} of {len(checks)}, {check.name}: {gone:.0f} s gone, {about} "
                f"{min(coming, left):.0f} s to go"
            )
            outcomes[index] = run_one(check, place, limit=min(check.limit, left))
        told = outcomes[index]
        say(f"{check.name}: {told.state}{f', {told.reason}' if told.reason else ''}")
        keep(outcomes, time.monotonic() - began)
    return outcomes


def run_one(check: Check, place: Place, *, limit: float) -> Outcome:
    """Run a check in a process of its own.

    Past the limit that process ends with all that it started.
    """
    work = place.work / check.name.replace(" ", "-")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    place.shared.mkdir(parents=True, exist_ok=True)
    told, log = work / "place.json", work / "log"
    replace(place, work=work).write(told)
    begin = time.monotonic()
    command = [sys.executable, __file__, "--check", check.function, "--place", str(told)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env=environment(),
            start_new_session=True,
            cwd=work,
        )
        try:
            in_time = _exits(process.pid, within=limit)
        finally:
            _end(process)
    state, reason = "done", ""
    if not in_time:
        state, reason = "ended", f"it was not done after {limit:.0f} s"
    elif process.returncode != 0:
        state, reason = "failed", f"exit {process.returncode}: {_last_line(log)}"
    seconds = round(time.monotonic() - begin, 1)
    found = read_found(work / "found.jsonl")
    return Outcome(
        name=check.name, asks=check.asks, state=state, seconds=seconds, reason=reason, found=found
    )


def environment() -> dict[str, str]:
    """The variables of a process that reads quantflow from this repository offline."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
    }


def _one(function: str, told: Path) -> int:
    """Run a check in this process."""
    place = read_place(told)
    module, _, name = function.partition(":")
    getattr(import_module(module), name)(
        place, Found(place.work / "found.jsonl", on_gpu=place.on_gpu)
    )
    return 0


def _exits(pid: int, *, within: float) -> bool:
    """Whether a process exits within so many seconds.

    It stays a zombie, so that nothing else gets its number.
    """
    deadline = time.monotonic() + within
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a check's process and its process group.

    The group holds what the check started, also what it left behind.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:500].replace(str(ROOT), ".") if lines else "it said nothing"


def _device(asked: str | None) -> tuple[str, str]:
    """Return the device, as torch names it, and what its maker calls it."""
    import torch

    if asked == "cpu" or (asked is None and not torch.cuda.is_available()):
        return "cpu", "the CPU"
    index = torch.device(asked or "cuda").index or 0
    return f"cuda:{index}", torch.cuda.get_device_name(index)


def _earlier(path: Path, about: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of checks in a results file of the same device and size."""
    try:
        results = json.loads(path.read_text())
        same = all(results[key] == about[key] for key in ("device", "name", "size"))
        return {
            check["name"]: check["seconds"]
            for check in results["checks"]
            if same and check["state"] == "done"
        }
    except (FileNotFoundError, json.JSONDecodeError, KeyError):
        return {}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _told(given: argparse.Namespace) -> list[str]:
    """Return the options that change what is run, as they were given."""
    words = [
        f"--{name} {value}"
        for name in ("device", "size")
        if (value := getattr(given, name)) is not None
    ]
    words += [f"--budget {given.budget:g}"] if given.budget != BUDGET else []
    words += [f"--patience {given.patience:g}"] if given.patience != 1 else []
    return words + (
        ["--only " + " ".join(f"'{name}'" if " " in name else name for name in given.only)]
        if given.only
        else []
    )


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [check.name for check in CHECKS]
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        help="cuda, cuda:N or cpu (default: cuda where torch finds one)",
    )
    parser.add_argument(
        "--size",
        choices=list(SIZES),
        help="how much is done (default: full on a GPU, cpu on the CPU)",
    )
    parser.add_argument(
        "--only", nargs="+", choices=names, default=[], metavar="CHECK", help="; ".join(names)
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET, help=f"seconds of all checks (default {BUDGET:.0f})"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        help="every limit and the budget times this, on a busy machine (default 1)",
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "artifacts" / "gpu", help="where everything is made"
    )
    parser.add_argument(
        "--peers", type=Path, default=ROOT / "artifacts" / "peers", help="a folder of environments"
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="the results (default: docs/gpu-results.json, with --only below --work)",
    )
    parser.add_argument(
        "--page", type=Path, help="the results as a page (default: beside --json, as .md)"
    )
    parser.add_argument("--list", action="store_true", help="list the checks")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.json = given.json or (given.work if given.only else ROOT / "docs") / "gpu-results.json"
    given.page = given.page or given.json.with_suffix(".md")
    return given


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The fuzzing campaign: every target with so many inputs.

They run in processes of 2 GiB with 10 s of the processor for each input.

    python tests/fuzz/campaign.py ARTIFACT MEASUREMENT --inputs 100000 --seed 0
                                       [--seconds S] [--only NAME,...]

prints a line per target: inputs, seconds, and what was found, each with the number that makes it
again. Both folders are small ones: what `export` wrote, and a rank of `measure`. Exit 1 where
anything was found.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from types import FrameType

from isolated import MEMORY, SECONDS, isolated
from targets import Target, targets

from quantflow.errors import QuantflowError

BATCH = 1000  # inputs of a process
PROMISED = (2, 3, 5, 6, 7)
LATE = f"more than {SECONDS:g} s"
AGAIN = "read again"


class Late(BaseException):
    """An input took more than its time; no reader can swallow it."""


def late(_number: int, _frame: FrameType | None) -> None:
    raise Late


def answer(target: Target, data: bytes, folder: Path) -> str | None:
    """The broken promise of a reader with an input; None where it keeps its promise."""
    # of the processor: others may keep the machine busy
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        target.read(data, folder)
    except QuantflowError as error:
        return None if error.exit_code in PROMISED else f"exit code {error.exit_code}"
    except Late:
        return LATE
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        return f"{type(error).__name__}: {str(error)[:60]!r} at {place}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def batch(target: Target, first: int, count: int, *, seed: int, kept: Path | None) -> int:
    """Read inputs in this process and print what was found; return how much."""
    found = 0
    signal.signal(signal.SIGPROF, late)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        for number in range(first, first + count):
            data = target.input(random.Random(seed * 1_000_003 + number))
            said = answer(target, data, folder)
            # a machine without memory charges a process for the kernel's search for some
            if said == LATE:
                print(f"{AGAIN}\t{number}", flush=True)
                said = answer(target, data, folder)
            if said is None:
                continue
            found += 1
            print(f"{number}\t{said}", flush=True)
            if kept is not None:
                (kept / f"{number}.input").write_bytes(data)
    return min(found, 1)


def run(
    name: str,
    target: Target,
    *,
    inputs: int,
    seconds: float,
    seed: int,
    kept: Path | None = None,
    size: int = BATCH,
) -> tuple[int, Counter[str]]:
    """Return how many inputs a target got, and what it did other than promised, and how often."""
    found: Counter[str] = Counter()
    end = time.monotonic() + seconds
    for first in range(0, inputs, size):
        if time.monotonic() > end:
            return first, found
        count = min(size, inputs - first)
        outcome = isolated(
            lambda first=first, count=count: batch(target, first, count, seed=seed, kept=kept),
            seconds=SECONDS * count,
            memory=MEMORY,
        )
        lines = [line.partition("\t") for line in outcome.said.splitlines()]
        if outcome.code not in (0, 1) or "Traceback" in outcome.said:
            print(
                f"  {name} {first}..{first + count}: process ended with {outcome.code}: "
                f"{outcome.said[-2000:]}",
                flush=True,
            )
            found[f"process ended with {outcome.code}"] += 1
        for number, _, said in lines:
            if number == AGAIN:
                print(f"  {name} {said}: {LATE}, read again", flush=True)
            if not number.isdecimal():  # of a library that says what it ignores
                continue
            if found[said] == 0:
                print(f"  {name} {number}: {said}", flush=True)
            found[said] += 1
    return inputs, found


def main() -> int:
    """Run the campaign of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("measurement", type=Path)
    parser.add_argument("--inputs", type=int, default=10_000, help="of each target")
    parser.add_argument(
        "--seconds",
        type=float,
        default=1e9,
        help="of each target; a batch that has begun is finished",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", type=lambda text: text.split(","), help="these targets; a comma between them"
    )
    parser.add_argument("--kept", type=Path)
    parser.add_argument("--batch", type=int, default=BATCH, help="inputs of a process")
    options = parser.parse_args()
    if options.kept is not None:
        options.kept.mkdir(parents=True, exist_ok=True)
    whole = 0
    for name, target in targets(options.artifact, options.measurement).items():
        if options.only is None or name in options.only:
            begin = time.monotonic()
            count, found = run(
                name,
                target,
                inputs=options.inputs,
                seconds=options.seconds,
                seed=options.seed,
                kept=options.kept,
                size=options.batch,
            )
            whole += sum(found.values())
            print(
                f"{name}\t{count} inputs\t{time.monotonic() - begin:.0f} s\t{len(found)} findings",
                flush=True,
            )
    return 1 if whole else 0


if __name__ == "__main__":
    sys.exit(main())

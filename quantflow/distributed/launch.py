"""Several processes for one stage: torchrun starts them, their messages come through, and none outlives its parent.

Each writes a folder of its own, whose name says which of how many it is.
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from quantflow.errors import GateError, InputError, IntegrityError, QuantflowError, ResourceError, UnsupportedError, UsageError
from quantflow.progress import Progress

AGAIN = "the same command continues with what is missing"
LOST = "another rank ended, or cannot be reached"  # what a rank says that ends because of it
_PR_SET_PDEATHSIG = 1
_SPOKEN_FOR = "QUANTFLOW_LAUNCHED"  # in the environment of ranks whose messages the process that started them passes on
_BY_EXIT_CODE = {kind.exit_code: kind for kind in (UsageError, GateError, ResourceError, UnsupportedError, IntegrityError)}
_RANK = re.compile(r"rank\s*: (\d+) \(local_rank")
_EXIT_CODE = re.compile(r"exitcode\s*: (-?\d+) \(pid")


def launched_rank() -> tuple[int, int] | None:
    """Return (rank, world size) when torchrun started this process, else None."""
    launched = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    return (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if launched else None


def launched_environment(threads: int | None = None) -> dict[str, str]:
    """Return the environment of ranks that this process starts and speaks for; None leaves the number of threads to them."""
    return {**os.environ, _SPOKEN_FOR: "1", **({} if threads is None else {"OMP_NUM_THREADS": str(threads)})}


def speaks() -> bool:
    """Return whether this process tells what is done and keeps the log: it is no rank, or the first of somebody's torchrun."""
    rank = launched_rank()
    return rank is None or (rank[0] == 0 and _SPOKEN_FOR not in os.environ)


def rank_folder(output: Path, rank: int, world: int) -> Path:
    """Return the folder of one rank."""
    return output / f"rank-{rank:03d}-of-{world:03d}"


def refuse_other_world(output: Path, world: int) -> None:
    """Refuse to measure into a folder that holds ranks of another number: unify takes those of one measurement alone.

    Raises:
        UsageError: naming such a folder.
    """
    for path in sorted(output.glob("rank-*-of-*")):
        if path.name.rpartition("-")[2] != f"{world:03d}":
            raise UsageError(f"{path}: is not one of {world} ranks", "give another -o, or remove that folder")


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, so that a killed run leaves nobody who holds a lock."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def launch(
    arguments: Sequence[str],
    *,
    ranks: int,
    progress: Progress,
    speaks: bool = False,
    threads: int | None = None,
    again: str = AGAIN,
) -> None:
    """Run `quantflow <arguments>` in `ranks` processes under torchrun and wait for all of them.

    Args:
        arguments: the command line.
        ranks: how many.
        progress: tells what they tell.
        speaks: what they write to stdout is this process's output; otherwise nobody sees it.
        threads: of each; None leaves it to them.
        again: what is said of the same command line after a failure.

    Raises:
        QuantflowError: a rank failed; the class, and so the exit code, is that of the rank's own error.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--max-restarts=0", "--monitor-interval=0.5", "--shutdown-timeout=5"]
    command += ["-m", "quantflow.stages.cli", *arguments]
    cause, remedy = f"{arguments[0]}: torchrun failed", "run the same command with --ranks 1 to see why"
    ends: dict[int, int] = {}  # rank -> exit code, as torchrun reports them: at last the one that failed first
    rank: int | None = None
    own = True  # whether the rank that wrote last failed by itself
    with subprocess.Popen(
        command,
        env=launched_environment(threads),
        stdout=None if speaks else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    ) as process:
        assert process.stderr is not None  # it is a pipe
        try:
            for line in process.stderr:
                text = line.rstrip("\n")
                if text.startswith("error: "):
                    own = LOST not in text and text != "error: terminated"  # what torchrun ends the others with
                    cause = text.removeprefix("error: ") if own else cause
                elif text.startswith("  fix: "):
                    remedy = text.removeprefix("  fix: ") if own else remedy
                elif text.startswith((f"{arguments[0]}: ", f"{arguments[0]} ")):
                    progress.say(text)
                elif found := _RANK.search(text):
                    rank = int(found[1])
                elif (found := _EXIT_CODE.search(text)) and rank is not None:
                    ends.pop(rank, None)
                    ends[rank] = int(found[1])
        except BaseException:
            process.kill()  # and its ranks with it, see die_with_parent
            raise
    if process.returncode:
        raise _failure(ends, ranks=ranks, cause=cause, remedy=remedy, again=again)


def _failure(ends: Mapping[int, int], *, ranks: int, cause: str, remedy: str, again: str = AGAIN) -> QuantflowError:
    """Return the error that tells which rank ended the others.

    Args:
        ends: rank -> exit code, the one that failed first at last; a negative one is a signal.
        ranks: how many there were.
        cause: what a rank wrote before it ended.
        remedy: likewise.
        again: of the same command line.
    """
    for rank, code in ends.items():
        if code < 0 and -code != signal.SIGTERM:  # torchrun ends the others with that one
            told = f"rank {rank} of {ranks} was ended by {signal.Signals(-code).name}"
            return ResourceError(told, f"look whether memory ended, or who stopped it; {again}")
    *_, (first, code) = [(None, InputError.exit_code), *ends.items()]
    who = f"a rank of {ranks}" if first is None else f"rank {first} of {ranks}"
    return _BY_EXIT_CODE.get(code, InputError)(f"{who} failed: {cause}", f"{remedy}; {again}")

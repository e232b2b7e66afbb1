"""Several processes for one stage: torchrun starts them, their messages come through, and none outlives its parent.

Each writes a folder of its own, whose name says which of how many it is.
"""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from quantflow.distributed.job_file import encode
from quantflow.errors import GateError, InputError, IntegrityError, QuantflowError, ResourceError, UnsupportedError, UsageError
from quantflow.progress import Progress

JOB, RESULT = "job.json", "result.json"  # of the private folder that ranks are started with
FOREVER = 1e9  # seconds: JSON has no word for infinity
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
    safe = {"PYTHONSAFEPATH": "1"}  # a folder that a rank is started in runs no code
    return {**os.environ, **safe, _SPOKEN_FOR: "1", **({} if threads is None else {"OMP_NUM_THREADS": str(threads)})}


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
    verb: str,
    job: Any,
    *,
    ranks: int,
    progress: Progress,
    stream: Callable[[str], None] | None = None,
    threads: int | None = None,
    again: str = AGAIN,
) -> Any:
    """Do a stage's job in `ranks` processes under torchrun, wait for all of them, and return what the first one returned.

    Each runs `quantflow.stages.rank` with the job as a file of a private folder, which is removed at the end.

    Args:
        verb: of the command line, for messages.
        job: a record, whose module has the function that does it (quantflow.api.run_rank).
        ranks: how many.
        progress: tells what they tell.
        stream: takes what the first rank writes to stdout, piece by piece; None lets nobody see it.
        threads: of each; None leaves it to them.
        again: what is said of the same command line after a failure.

    Raises:
        QuantflowError: a rank failed; the class, and so the exit code, is that of the rank's own error.
    """
    with tempfile.TemporaryDirectory(prefix="quantflow-ranks-") as folder:
        order = {"job": encode(job), "patience": min(progress.patience, FOREVER)}
        (Path(folder) / JOB).write_text(json.dumps(order))
        _run_ranks(verb, folder, ranks=ranks, progress=progress, stream=stream, threads=threads, again=again)
        result = Path(folder) / RESULT
        return json.loads(result.read_text()) if result.is_file() else None


def _run_ranks(
    verb: str,
    folder: str,
    *,
    ranks: int,
    progress: Progress,
    stream: Callable[[str], None] | None,
    threads: int | None,
    again: str,
) -> None:
    """Start torchrun, pass on what the ranks say, and raise what ended them."""
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--max-restarts=0", "--monitor-interval=0.5", "--shutdown-timeout=5"]
    command += ["-m", "quantflow.stages.rank", folder]
    cause, remedy = f"{verb}: torchrun failed", "run the same command with --ranks 1 to see why"
    ends: dict[int, int] = {}  # rank -> exit code, as torchrun reports them: at last the one that failed first
    rank: int | None = None
    own = True  # whether the rank that wrote last failed by itself
    with subprocess.Popen(
        command,
        env=launched_environment(threads),
        stdout=subprocess.DEVNULL if stream is None else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    ) as process:
        assert process.stderr is not None  # it is a pipe
        reader = threading.Thread(target=_pass_on, args=(process.stdout, stream), daemon=True)
        reader.start()
        try:
            for line in process.stderr:
                text = line.rstrip("\n")
                if text.startswith("error: "):
                    own = LOST not in text and text != "error: terminated"  # what torchrun ends the others with
                    cause = text.removeprefix("error: ") if own else cause
                elif text.startswith("  fix: "):
                    remedy = text.removeprefix("  fix: ") if own else remedy
                elif text.startswith((f"{verb}: ", f"{verb} ")):
                    progress.say(text)
                elif found := _RANK.search(text):
                    rank = int(found[1])
                elif (found := _EXIT_CODE.search(text)) and rank is not None:
                    ends.pop(rank, None)
                    ends[rank] = int(found[1])
            reader.join()
        except BaseException:
            process.kill()  # and its ranks with it, see die_with_parent
            raise
    if process.returncode:
        raise _failure(ends, ranks=ranks, cause=cause, remedy=remedy, again=again)


def _pass_on(pipe: IO[str] | None, stream: Callable[[str], None] | None) -> None:
    """Hand what a rank writes to `stream` as soon as it is there."""
    while pipe is not None and stream is not None and (piece := pipe.read(1)):
        stream(piece)


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

"""Several processes for one stage: started here, heard here, and none outlives its parent.

Each writes a folder of its own, whose name has its rank and the number of ranks. The ranks of one
machine meet in a file of a private folder and talk over the loopback interface: no port of theirs
can be reached from another machine. Ranks that somebody's torchrun started meet at its address,
which every machine that reaches it can write to; `require_trust` asks for consent.
"""

import ctypes
import functools
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from quantflow import child_process
from quantflow.distributed.job_file import encode
from quantflow.errors import (
    GateError,
    InputError,
    IntegrityError,
    QuantflowError,
    ResourceError,
    UnsupportedError,
    UsageError,
)
from quantflow.files.rank_folders import MOST_RANKS
from quantflow.progress import Progress
from quantflow.reporting.signals import Interrupted

# Names in the private folder that ranks are started with.
JOB, RESULT, STORE = "job.json", "result.json", "store"
FOREVER = 1e9  # seconds: JSON has no word for infinity
AGAIN = "the same command continues with what is missing"
LOST = "another rank ended, or cannot be reached"  # error of a rank that ends for it
_PR_SET_PDEATHSIG = 1
_NUMBER = re.compile("[0-9]{1,9}")
_GRACE = 5.0  # seconds in which a rank that was asked to end does so
# Environment variable with the private folder of ranks that `launch` started and speaks for.
_LAUNCHED = "QUANTFLOW_LAUNCHED"
_TRUST = (
    "give --trust-network where nobody else reaches that port; on one machine use --ranks N instead"
)
_BY_EXIT_CODE = {
    kind.exit_code: kind
    for kind in (UsageError, GateError, ResourceError, UnsupportedError, IntegrityError)
}


class Job(Protocol):
    """A frozen record that says what is to be done, and does it.

    A class with `STREAMS = True` hands on text while it runs: its `run` takes `stream` as well.
    """

    def run(self, progress: Progress) -> object:
        """Do it; plain data of the first rank reaches the process that started the ranks."""


@dataclass(frozen=True, kw_only=True)
class _OutputLine:
    """A line that a rank wrote to stderr."""

    rank: int
    line: str


@dataclass(frozen=True, kw_only=True)
class _RankExit:
    """A rank ended with an exit code; a negative one is a signal."""

    rank: int
    code: int


@dataclass(kw_only=True)
class _Failure:
    """A rank's error, as it wrote it.

    Attributes:
        cause, remedy: the two lines of its error.
    """

    cause: str = "it said nothing"
    remedy: str = "run the same command with --ranks 1 to see why"


@dataclass(frozen=True, kw_only=True)
class _WriteFailure:
    """A rank's output that cannot be handed on: nobody reads it, or a disk is full."""

    error: BaseException


Lines = queue.SimpleQueue[_OutputLine | _RankExit | _WriteFailure]


def launched_rank() -> tuple[int, int] | None:
    """(rank, world size) when `launch` or a torchrun started this process, else None.

    Raises:
        UsageError: RANK or WORLD_SIZE is missing beside the other, or no number in range.
    """
    values = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE")]
    if values == [None, None]:
        return None
    variables = " ".join(
        f"{name}={value or ''}" for name, value in zip(("RANK", "WORLD_SIZE"), values, strict=True)
    )
    remedy = "start ranks with torchrun or --ranks, or unset both variables"
    if not all(value is not None and _NUMBER.fullmatch(value) for value in values):
        raise UsageError(f"{variables}: not two numbers", remedy)
    rank, world = (int(str(value)) for value in values)
    if not rank < world <= MOST_RANKS:
        raise UsageError(f"{variables}: not a rank of a world of 1 to {MOST_RANKS}", remedy)
    return rank, world


def is_rank() -> bool:
    """Whether this process has the variables of a rank, right or wrong."""
    return "RANK" in os.environ


def own_device(name: str) -> str:
    """The device of this process; ranks that share a machine take the GPU of their number there.

    Args:
        name: value of `--device`.

    Raises:
        UsageError: one GPU by its number for several ranks, or LOCAL_RANK is no number.
    """
    launched = launched_rank()
    if launched is None or launched[1] == 1 or name == "cpu":
        return name
    if ":" in name:
        raise UsageError(
            f"{launched[1]} ranks with --device {name}, which they would share",
            f"give --device {name.split(':')[0]}",
        )
    local = os.environ.get("LOCAL_RANK", str(launched[0]))
    if not _NUMBER.fullmatch(local):
        raise UsageError(
            f"LOCAL_RANK={local}: not a number", "start ranks with torchrun or --ranks, or unset it"
        )
    return f"{name}:{int(local)}"


def launched_folder() -> Path | None:
    """The private folder of ranks that `launch` started; None for every other process."""
    folder = os.environ.get(_LAUNCHED)
    return None if folder is None else Path(folder)


def launched_environment(
    folder: str,
    *,
    rank: int,
    world: int,
    threads: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """The environment of a rank that this process starts and speaks for.

    Args:
        folder: the private folder of these ranks.
        rank: number of the rank.
        world: number of ranks.
        threads: number of threads of each; None takes OMP_NUM_THREADS, or 1.
        environment: environment of this process.
    """
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    variables |= {
        _LAUNCHED: folder,
        "OMP_NUM_THREADS": str(threads or environment.get("OMP_NUM_THREADS", 1)),
    }
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        # `=` asks NCCL for exactly this name, not for names that begin so.
        variables |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
    return child_process.environment(**variables)


def require_trust(verb: str, *, trusted: bool) -> None:
    """Refuse to join the ranks of somebody's torchrun without the user's consent to its network.

    Its store listens on every interface, whatever address it was given, and believes whoever writes
    to it.

    Raises:
        UsageError: no consent, or no address to meet at.
    """
    if launched_rank() is None or launched_folder() is not None:
        return
    address, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not address or not _NUMBER.fullmatch(port) or not 0 < int(port) < 1 << 16:
        cause = f"{verb}: MASTER_ADDR={address} MASTER_PORT={port}: no address where ranks can meet"
        raise UsageError(
            cause, "start ranks with torchrun or --ranks, or unset RANK and WORLD_SIZE"
        )
    if not trusted:
        cause = (
            f"{verb}: torchrun's store at {address}:{port} is open to everybody who reaches this "
            "machine"
        )
        raise UsageError(cause, _TRUST)


def store_address() -> tuple[str, int, bool]:
    """Address and port where ranks of somebody else meet, and whether torchrun serves there.

    `require_trust` has looked at both.
    """
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), served


def speaks() -> bool:
    """Whether this process reports and keeps the log: no rank, or the first of a torchrun."""
    rank = launched_rank()
    return rank is None or (rank[0] == 0 and launched_folder() is None)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies: a killed run then holds no lock."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def launch(
    verb: str,
    job: Job,
    *,
    ranks: int,
    progress: Progress,
    stream: Callable[[str], None] | None = None,
    threads: int | None = None,
    cores: Sequence[Collection[int]] | None = None,
    again: str = AGAIN,
    serving: bool = False,
) -> Any:
    """Do a stage's job in `ranks` processes and wait for all of them.

    Each runs `quantflow.distributed.rank` with the job as a file of a private folder, which is
    removed at the end. When one fails the others are ended.

    Args:
        verb: verb of the command line, for messages.
        job: the record that each rank gets and runs.
        ranks: number of ranks.
        progress: listener for the lines of the ranks.
        stream: receiver of the first rank's stdout, piece by piece; None lets nobody see it.
        threads: number of threads of each; None takes OMP_NUM_THREADS, or 1.
        cores: cores of each rank, which then has a thread for each of them; None leaves them to the
            system.
        again: advice for the same command line after a failure.
        serving: the job ends at a signal. A signal goes to the first rank, which ends in order and
            lets the others end; all its lines are handed on.

    Returns:
        The result of the first rank.

    Raises:
        Interrupted: a signal came while the first rank did not serve yet.
        QuantflowError: a rank failed; the class, and so the exit code, is that of the rank's own
            error.
        BaseException: what `stream` raised.
    """
    with tempfile.TemporaryDirectory(prefix="quantflow-ranks-") as folder:
        order = {"job": encode(job), "patience": min(progress.patience, FOREVER)}
        (Path(folder) / JOB).write_text(json.dumps(order))
        said: Lines = queue.SimpleQueue()
        started: list[subprocess.Popen[str]] = []
        start = functools.partial(_start, folder, apart=serving)
        try:
            for rank in range(ranks):
                bound = None if cores is None else cores[rank]
                count = threads if bound is None else len(bound)
                environment = launched_environment(folder, rank=rank, world=ranks, threads=count)
                started.append(
                    start(environment, shown=stream is not None and rank == 0, cores=bound)
                )
            if ranks > 1:  # each imports torch and transformers before it says anything
                progress.say(f"{verb}: {ranks} ranks start, which may take half a minute")
            for rank, process in enumerate(started):
                _watch(rank, process, said, stream)
            if not serving:
                _wait(verb, started, said, progress, again=again)
            else:
                with _signals_for(started[0]):
                    _wait(verb, started, said, progress, again=again, shown=0)
        finally:
            # After an error here, such as Ctrl-C, ranks still run; otherwise all have ended.
            _end(started, signal.SIGKILL)
        result = Path(folder) / RESULT
        return json.loads(result.read_text()) if result.is_file() else None


@contextmanager
def _signals_for(first: "subprocess.Popen[str]") -> Iterator[None]:
    """Pass SIGINT and SIGTERM on to the first rank until the block ends.

    Raises:
        Interrupted: the block failed after a signal.
    """
    if threading.current_thread() is not threading.main_thread():  # Python handles none elsewhere
        yield
        return
    arrived: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        arrived.append(number)
        if first.poll() is None:
            first.send_signal(signal.SIGTERM)

    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield
    except QuantflowError:
        if arrived:
            raise Interrupted(arrived[0]) from None
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _start(
    folder: str,
    environment: dict[str, str],
    *,
    shown: bool,
    cores: Collection[int] | None,
    apart: bool,
) -> subprocess.Popen[str]:
    """Start a rank, on some cores.

    Args:
        folder: private folder of the ranks.
        environment: its environment.
        shown: keep its stdout.
        cores: its cores; None: all.
        apart: Ctrl-C in a terminal does not reach it.
    """

    def prepare() -> None:
        die_with_parent()
        if cores is not None:
            os.sched_setaffinity(0, cores)

    return subprocess.Popen(
        child_process.python_module("quantflow.distributed.rank", [folder]),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=prepare,
        start_new_session=apart,
    )


def _watch(
    rank: int, process: subprocess.Popen[str], said: Lines, stream: Callable[[str], None] | None
) -> None:
    """Start threads that queue a rank's lines and its end, and pass its stdout to the stream."""
    readers = [threading.Thread(target=_listen, args=(rank, process.stderr, said), daemon=True)]
    if process.stdout is not None:
        readers.append(
            threading.Thread(target=_pass_on, args=(process.stdout, stream, said), daemon=True)
        )
    waiter = threading.Thread(target=_await, args=(rank, process, readers, said), daemon=True)
    for thread in (*readers, waiter):
        thread.start()


def _listen(rank: int, pipe: IO[str], said: Lines) -> None:
    """Put a rank's stderr into the queue, line by line."""
    with pipe:
        for line in pipe:
            said.put(_OutputLine(rank=rank, line=line.rstrip("\n")))


def _pass_on(pipe: IO[str], stream: Callable[[str], None], said: Lines) -> None:
    """Hand a rank's stdout to `stream` as it comes; an error of `stream` goes into the queue."""
    try:
        with pipe:
            while piece := pipe.read(1):
                stream(piece)
    except BaseException as error:  # raised in a thread: the queue carries it to the caller
        said.put(_WriteFailure(error=error))


def _await(
    rank: int, process: subprocess.Popen[str], readers: Sequence[threading.Thread], said: Lines
) -> None:
    """Put the end of a rank into the queue, after its last line."""
    code = process.wait()
    for reader in readers:
        reader.join(_GRACE)  # a process that a killed rank leaves may hold the pipe open
    said.put(_RankExit(rank=rank, code=code))


def _wait(
    verb: str,
    started: Sequence[subprocess.Popen[str]],
    said: Lines,
    progress: Progress,
    *,
    again: str,
    shown: int | None = None,
) -> None:
    """Pass on the ranks' lines until all have ended; when one fails, end the others.

    All lines of the rank `shown` are passed on, of others those that begin with the verb.

    Raises:
        QuantflowError: a rank failed.
    """
    failures = [_Failure() for _ in started]
    ends: dict[int, int] = {}
    while len(ends) < len(started):
        match said.get():
            case _OutputLine(rank=rank, line=line) if line.startswith("error: "):
                failures[rank].cause = line.removeprefix("error: ")
            case _OutputLine(rank=rank, line=line) if line.startswith("  fix: "):
                failures[rank].remedy = line.removeprefix("  fix: ")
            case _OutputLine(rank=rank, line=line) if rank == shown or line.startswith(
                (f"{verb}: ", f"{verb} ")
            ):
                progress.say(line)
            case _WriteFailure(error=error):
                raise error
            case _RankExit(rank=rank, code=code):
                ends[rank] = code
                if code:
                    # A rank that lost its connection fails before the rank that broke it is heard:
                    # that one gets some seconds to say why.
                    _end(
                        started,
                        signal.SIGTERM,
                        after=_GRACE if _others_fault(code, failures[rank]) else 0.0,
                    )
    first = _first(ends, failures)
    if first is not None:
        raise _error(first, ends[first], failures[first], ranks=len(started), again=again)


def _others_fault(code: int, failure: _Failure) -> bool:
    """Whether a rank ended because of another one: it lost its connection, or was asked to end."""
    return code == -signal.SIGTERM or LOST in failure.cause or failure.cause == "terminated"


def _first(ends: Mapping[int, int], failures: Sequence[_Failure]) -> int | None:
    """The first rank in time that failed by itself, else one that failed; None without failure.

    Args:
        ends: rank -> exit code, in the order of their ends.
        failures: error and fix lines of each rank.
    """
    failed = [rank for rank, code in ends.items() if code]
    own = [rank for rank in failed if not _others_fault(ends[rank], failures[rank])]
    return next(iter([*own, *failed]), None)


def _error(rank: int, code: int, failure: _Failure, *, ranks: int, again: str) -> QuantflowError:
    """The error of the rank that ended the others."""
    if code < 0:
        cause = f"rank {rank} of {ranks} was ended by {signal.Signals(-code).name}"
        return ResourceError(cause, f"look whether memory ended, or who stopped it; {again}")
    kind = _BY_EXIT_CODE.get(code, InputError)
    return kind(f"rank {rank} of {ranks} failed: {failure.cause}", f"{failure.remedy}; {again}")


def _end(
    started: Sequence[subprocess.Popen[str]], sign: signal.Signals, *, after: float = 0.0
) -> None:
    """Send a signal to the ranks that still run, `after` seconds from now.

    Ranks that stay for some seconds more are killed.
    """
    if after:
        timer = threading.Timer(after, _end, (started, sign))
        timer.daemon = True
        timer.start()
        return
    running = [process for process in started if process.poll() is None]
    for process in running:
        process.send_signal(sign)
    if running and sign != signal.SIGKILL:
        _end(started, signal.SIGKILL, after=_GRACE)

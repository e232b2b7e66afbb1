"""A function run in a fork of this process.

One that crashes, leaks or never ends takes nothing with it.
"""

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any


class ForkError(Exception):
    """A fork that ended without a result."""


def in_fork(run: Callable[[], Any], *, seconds: float, debug: bool = False) -> Any:
    """The value of `run`, which runs in a fork and has to go through JSON.

    The fork has the modules that are imported already.

    Args:
        run: nothing that it changes is seen here.
        seconds: after so many it is killed.
        debug: let it write to stdout and stderr.

    Raises:
        ForkError: it raised, it was killed, or it took too long; the message says which.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _as_child(run, writing, debug=debug)
    os.close(writing)
    try:
        told = _all_of(reading, until=time.monotonic() + seconds)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if told is None:
        raise ForkError(f"not done after {seconds:.0f} s")
    if not told:
        raise ForkError(
            f"ended by signal {os.WTERMSIG(status)}"
            if os.WIFSIGNALED(status)
            else "ended without a result"
        )
    answer = json.loads(told)
    if "error" in answer:
        raise ForkError(answer["error"])
    return answer["result"]


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"


def _as_child(run: Callable[[], Any], writing: int, *, debug: bool) -> None:
    """Run it, send its value, and end the process.

    Nothing runs that this process would do at its end.
    """
    if not debug:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    try:
        answer = {"result": run()}
    except BaseException as error:  # whatever it is, the other process says so
        if debug:
            traceback.print_exc()
        answer = {"error": first_line(error)}
    with os.fdopen(writing, "w") as pipe:
        pipe.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)


def _all_of(reading: int, *, until: float) -> str | None:
    """Return all that comes through a pipe up to its end; None where that is not there in time."""
    parts = []
    while (left := until - time.monotonic()) > 0:
        if not select.select([reading], [], [], left)[0]:
            return None
        part = os.read(reading, 1 << 16)
        if not part:
            return b"".join(parts).decode()
        parts.append(part)
    return None

"""Work in a process of its own, of limited memory and time.

A crash, a hang or an explosion is an outcome.
"""

import math
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

SECONDS = 10.0  # of the processor
# times as long a process may take by the clock: others keep the machine busy, or it sleeps
PATIENCE = 12
MEMORY = 2 << 30  # bytes of address space beyond what the process has
PROMISED = (0, 2, 3, 5, 6, 7)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a process ended.

    Attributes:
        code: its exit code, minus the signal that ended it; None: it was still running after its
            time.
        said: what it wrote to stdout and stderr.
        seconds: how long it ran.
    """

    code: int | None
    said: str
    seconds: float

    @property
    def kept(self) -> bool:
        """Whether the promise was kept.

        It is a promised code, a sentence for it, and nothing raw for a terminal.
        """
        raw = any(ord(c) < 32 and c not in "\n\t" or 127 <= ord(c) < 160 for c in self.said)
        bug = (
            "a bug in quantflow" in self.said or "Traceback" in self.said or "panicked" in self.said
        )
        return self.code in PROMISED and not raw and not bug


def isolated(
    work: Callable[[], int],
    *,
    seconds: float = SECONDS,
    clock: float | None = None,
    memory: int | None = MEMORY,
) -> Outcome:
    """Return how `work`, which returns an exit code, ends in a fork of this process.

    Args:
        work: runs in the fork.
        seconds: of the processor; what takes more ends with SIGXCPU.
        clock: seconds after which it is killed, PATIENCE times as many unless they are given.
        memory: bytes of address space beyond what this process has; None is no limit.
    """
    reader, writer = os.pipe()
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            sys.stdout, sys.stderr = (
                os.fdopen(1, "w", errors="replace", closefd=False),
                os.fdopen(2, "w", errors="replace", closefd=False),
            )
            if memory is not None:
                with open("/proc/self/statm") as file:
                    size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
                resource.setrlimit(resource.RLIMIT_AS, (size + memory, size + memory))
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds) + 1))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:  # whatever they say, this fork never returns into its parent's code
                os._exit(code)
    os.close(writer)
    said, end = bytearray(), begin + (PATIENCE * seconds if clock is None else clock)
    while (left := end - time.monotonic()) > 0 and select.select([reader], [], [], left)[0]:
        piece = os.read(reader, 1 << 16)
        if not piece:  # it closed what it writes to, so it is about to end
            break
        said += piece[: max(0, (1 << 20) - len(said))]
    os.close(reader)
    status = _ended(child, end)
    if status is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    code = None if status is None else os.waitstatus_to_exitcode(status)
    return Outcome(code=code, said=said.decode(errors="replace"), seconds=time.monotonic() - begin)


def _ended(child: int, end: float) -> int | None:
    """The status that a process ended with.

    None where it still runs at `end`, a reading of the monotonic clock.
    """
    while True:
        number, status = os.waitpid(child, os.WNOHANG)
        if number == child:
            return status
        if time.monotonic() >= end:
            return None
        time.sleep(0.001)

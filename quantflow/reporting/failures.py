"""The end of a process: an error as two lines on stderr, and its exit code.

    error: <which tensor or file>: <the two values that disagree>
      fix: <what to do>

A process that started ranks reads these lines of theirs (quantflow/distributed/launch.py).
"""

import contextlib
import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple

from quantflow.errors import QuantflowError, first_line
from quantflow.plain_text import plain
from quantflow.reporting.signals import Interrupted
from quantflow.reporting.streams import NobodyReads

CONTINUES = "the same command continues where this one stopped"
MORE_MEMORY = "give --max-memory what this machine has, or free some; the same command continues"
# torch and Python raise RuntimeError where the system refuses: the words, and the system's number.
REFUSED = {
    "can't allocate memory": errno.ENOMEM,
    os.strerror(errno.ENOMEM): errno.ENOMEM,
    os.strerror(errno.EMFILE): errno.EMFILE,
    "can't start new thread": errno.EAGAIN,
}


class Failure(NamedTuple):
    """The failure of a command.

    Attributes:
        cause: the line after `error:`.
        remedy: the line after `fix:`.
        exit_code: one of the codes in quantflow/errors.py.
    """

    cause: str
    remedy: str
    exit_code: int


def exit_code_of(work: Callable[[], object], *, debug: bool = False) -> int:
    """Exit code of some work, whose failure is written to stderr as two lines.

    Args:
        work: the work.
        debug: show the traceback of an error as well.
    """
    try:
        work()
    except NobodyReads:
        return 0
    except BaseException as error:  # the outermost edge; what has no exit code is raised again
        failure = failure_of(error)
        if failure is None:
            raise
        return report(failure, debug=debug)
    return 0


def failure_of(error: BaseException) -> Failure | None:
    """Cause, remedy and exit code of an error; None for what no process should answer."""
    match error:
        case QuantflowError():
            return Failure(error.cause, error.remedy, error.exit_code)
        case Interrupted():
            word = "terminated" if error.number == signal.SIGTERM else "interrupted"
            return Failure(word, CONTINUES, 128 + error.number)
        case KeyboardInterrupt():
            return Failure("interrupted", CONTINUES, 130)
        case SystemExit():  # click's answer to a broken pipe; stdout raises NobodyReads
            broken = error.__context__
            if not isinstance(broken, OSError):
                broken = OSError(errno.EPIPE, os.strerror(errno.EPIPE))
            return _of_system(broken)
        case OSError():
            return _of_system(error)
        case MemoryError():
            detail = f": {error}" if str(error) else ""
            return Failure(f"out of memory{detail}", MORE_MEMORY, 5)
        case Exception():
            return _of_defect(error)
    if type(error).__name__ == "PanicException":  # Rust's class, which cannot be imported
        return Failure(f"tokenizer: {error}", "give the model its own tokenizer files", 3)
    return None


def report(failure: Failure, *, debug: bool = False) -> int:
    """Write a failure to stderr, and return its exit code."""
    if debug:
        print(plain(traceback.format_exc()), file=sys.stderr, end="", flush=True)
    for label, text in (("error", failure.cause), ("  fix", failure.remedy)):
        print(plain(f"{label}: {' '.join(text.splitlines())}"), file=sys.stderr, flush=True)
    return failure.exit_code


def end_at_once(code: int) -> None:
    """End this process with an exit code, without the interpreter's own shutdown; 0 returns.

    torch's process group is still open where a rank's work failed (quantflow/distributed/team.py).
    The interpreter would take it down while threads of it run, for which the C++ runtime aborts the
    process: the parent of the rank would see SIGABRT in the place of the code.
    """
    if code == 0:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, NobodyReads):
            stream.flush()
    os._exit(code)


def _of_defect(error: Exception) -> Failure:
    """Failure of an exception that nobody expected: a refusal by the system, or a bug of ours."""
    for words, number in REFUSED.items() if isinstance(error, RuntimeError) else ():
        if words in str(error):
            refusal = OSError(number, f"{os.strerror(number)} ({first_line(error)})")
            return _of_system(refusal)
    cause = f"a bug in quantflow: {type(error).__name__}: {error}"
    return Failure(cause, "report it with --debug", 1)


def _of_system(error: OSError) -> Failure:
    """Failure of a call that the operating system refused."""
    cause = f"{error.filename or 'system'}: {error.strerror or error}"
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return Failure(cause, "free some space; the same command continues", 5)
        case errno.EFBIG:
            cause = f"{cause}: more than `ulimit -f` allows"
            return Failure(cause, "raise that limit; the same command continues", 5)
        case errno.EMFILE | errno.ENFILE:
            cause = f"{cause}: more than `ulimit -n` allows"
            return Failure(cause, "raise that limit; the same command continues", 5)
        case errno.EAGAIN | errno.EPIPE:
            cause = f"{cause}: a process cannot be started, or has ended"
            remedy = "look at `ulimit -u` and at memory; the same command continues"
            return Failure(cause, remedy, 5)
        case errno.ENOMEM:
            return Failure(cause, MORE_MEMORY, 5)
        case errno.EIO:
            cause = f"{cause}: the disk or file system failed"
            return Failure(cause, "check the device; the same command continues", 3)
        case errno.ENOENT | errno.ESTALE:
            remedy = "bring the file back, or check the path; the same command continues"
            return Failure(cause, remedy, 3)
        case errno.EROFS:
            return Failure(cause, "choose another -o, or mount the file system writable", 3)
    return Failure(cause, "check the path and its permissions", 3)

"""What people get of every verb: results, progress, and an error's two lines and exit code."""

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from quantflow.distributed.launch import is_rank, speaks
from quantflow.errors import QuantflowError, first_line
from quantflow.plain_text import one_line, plain
from quantflow.stages.cli.environment import bars_wanted
from quantflow.stages.cli.progress_line import PATIENCE, ProgressLine
from quantflow.stages.cli.signals import Interrupted, Signals
from quantflow.stages.cli.streams import NobodyReads

CONTINUES = "the same command continues where this one stopped"
MORE_MEMORY = "give --max-memory what this machine has, or free some; the same command continues"
# torch and Python raise RuntimeError where the system refuses: what they say of it, and its number.
REFUSED = {
    "can't allocate memory": errno.ENOMEM,
    os.strerror(errno.ENOMEM): errno.ENOMEM,
    os.strerror(errno.EMFILE): errno.EMFILE,
    "can't start new thread": errno.EAGAIN,
}


@dataclass(frozen=True)
class Invocation:
    """One command line, which its verb finds in click's context.

    Attributes:
        arguments: what stands after `quantflow`.
        signals: SIGINT and SIGTERM while it runs.
    """

    arguments: tuple[str, ...] = ()
    signals: Signals = field(default_factory=Signals)


@contextlib.contextmanager
def reporting(shared: Mapping[str, Any], output: Path) -> Iterator[ProgressLine]:
    """Yield the progress of a verb that writes `output`: as `common`'s options say, with a log file `<output>.log` beside it.

    A rank has no log: what it says reaches the one of the process that started it. Of ranks that
    somebody's torchrun started the first keeps one.
    """
    given = click.get_current_context().find_object(Invocation) or Invocation()
    progress = ProgressLine(
        quiet=shared["quiet"],
        patience=0.0 if shared["verbose"] else PATIENCE,
        bars=bars_wanted(),
        signals=given.signals,
    )
    if not speaks():
        yield progress
        return
    path = output.absolute()
    with progress.logging(
        path.with_name(f"{path.name}.log"), shlex.join(["quantflow", *given.arguments])
    ) as logging:
        yield logging


def show(result: Any, *, as_json: bool, text: str) -> None:
    """Print the result to stdout: the JSON document, or the text, with what would move a terminal's cursor spelled out."""
    with contextlib.suppress(NobodyReads):  # what the verb says with its exit code still counts
        click.echo(
            json.dumps(result, indent=1, sort_keys=True, default=str) if as_json else plain(text)
        )


def show_call(words: Mapping[str, Any], *, as_json: bool) -> None:
    """Print what a function of `quantflow.api` would be called with: the resolved settings of a dry run."""
    plain = {name: _plain(value) for name, value in words.items()}
    show(plain, as_json=as_json, text=outline(plain))


def _plain(value: Any) -> Any:
    """Return records as mappings, also inside lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned text: the first three columns to the left, numbers to the right."""
    cells = [tuple(map(one_line, row)) for row in (columns, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = []
    for row in cells:
        padded = [
            text.ljust(w) if i < 3 else text.rjust(w)
            for i, (text, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def outline(value: Any, indent: str = "") -> str:
    """Return nested data as indented lines for people; long lists are cut, equal tables in a row are shown once."""
    if isinstance(value, dict):
        lines = []
        for _, run in itertools.groupby(
            value.items(), key=lambda pair: json.dumps(pair[1], default=str)
        ):
            keys, items = zip(*run, strict=True)
            nested = isinstance(items[0], dict | list) and items[0]
            # equal tables in a row, such as the schemes of all linears, are shown once
            if nested and len(keys) > 2:
                keys, items = (f"{keys[0]} to {keys[-1]} ({len(keys)} alike)",), items[:1]
            for key, item in zip(keys, items, strict=True):
                lines.append(
                    f"{indent}{one_line(str(key))}:"
                    + (f"\n{outline(item, indent + '  ')}" if nested else f" {one_line(str(item))}")
                )
        return "\n".join(lines)
    if isinstance(value, list):
        shown = [f"{indent}- {outline(item, indent + '  ').lstrip()}" for item in value[:20]]
        return "\n".join(
            shown + ([f"{indent}... {len(value) - 20} more"] if len(value) > 20 else [])
        )
    return f"{indent}{one_line(str(value))}"


def exit_code(group: click.Group, arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; a user's mistake is two lines on stderr, never a traceback.

    The verbs find its `Invocation` in click's context.
    """
    for word in arguments:  # they reach records that are UTF-8, hours later
        try:
            word.encode()
        except UnicodeEncodeError:
            return _fail(f"{word!a}: not UTF-8", "rename it, or give another", 2, debug=False)
    invocation = Invocation(tuple(arguments))

    def command() -> None:
        with invocation.signals.installed():
            group.main(
                args=list(arguments), prog_name="quantflow", standalone_mode=False, obj=invocation
            )

    return exit_code_of(command, debug="--debug" in arguments)


def exit_code_of(work: Callable[[], object], *, debug: bool = False) -> int:
    """Do some work and return the exit code that its end has; a user's mistake is two lines on stderr.

    Args:
        work: what is done.
        debug: show the traceback of an error as well.
    """
    try:
        work()
    except QuantflowError as error:
        return _fail(error.cause, error.remedy, error.exit_code, debug=debug)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
    except click.ClickException as error:
        usage = (
            error.ctx.command_path
            if isinstance(error, click.UsageError) and error.ctx
            else "quantflow"
        )
        return _fail(
            error.format_message().replace("\n", " "), f"see `{usage} --help`", 2, debug=debug
        )
    except Interrupted as error:
        word = "terminated" if error.number == signal.SIGTERM else "interrupted"
        return _fail(word, CONTINUES, 128 + error.number, debug=debug)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", CONTINUES, 130, debug=debug)
    except NobodyReads:
        return 0
    except (
        SystemExit
    ) as error:  # click's answer to a broken pipe: of a process, since stdout raises NobodyReads
        broken = (
            error.__context__
            if isinstance(error.__context__, OSError)
            else OSError(errno.EPIPE, os.strerror(errno.EPIPE))
        )
        return _fail(*_system(broken), debug=debug)
    except OSError as error:
        return _fail(*_system(error), debug=debug)
    except MemoryError as error:
        return _fail(
            f"out of memory{f': {error}' if str(error) else ''}", MORE_MEMORY, 5, debug=debug
        )
    except Exception as error:  # the outermost edge: whatever is left is a defect of quantflow
        for words, number in REFUSED.items() if isinstance(error, RuntimeError) else ():
            if words in str(error):
                return _fail(
                    *_system(OSError(number, f"{os.strerror(number)} ({first_line(error)})")),
                    debug=debug,
                )
        return _fail(
            f"a bug in quantflow: {type(error).__name__}: {error}",
            "report it with --debug",
            1,
            debug=debug,
        )
    except BaseException as error:
        if (
            type(error).__name__ != "PanicException"
        ):  # of Rust, whose class cannot be imported: a tokenizer met what it cannot read
            raise
        return _fail(
            f"tokenizer: {error}", "give the model its own tokenizer files", 3, debug=debug
        )
    return 0


def end_failed_rank(code: int) -> None:
    """End this process at once with its exit code, where it is a rank whose work failed; return otherwise.

    torch's process group is still open then (quantflow/distributed/team.py). The interpreter would
    take it down while threads of it run, for which the C++ runtime aborts the process: who started
    the rank would see SIGABRT in the place of the code.
    """
    if code == 0 or not is_rank():
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, NobodyReads):
            stream.flush()
    os._exit(code)


def _system(error: OSError) -> tuple[str, str, int]:
    """Return the cause, the remedy and the exit code of what the operating system refused."""
    cause = f"{error.filename or 'system'}: {error.strerror or error}"
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return cause, "free some space; the same command continues", 5
        case errno.EFBIG:
            return (
                f"{cause}: more than `ulimit -f` allows",
                "raise that limit; the same command continues",
                5,
            )
        case errno.EMFILE | errno.ENFILE:
            return (
                f"{cause}: more than `ulimit -n` allows",
                "raise that limit; the same command continues",
                5,
            )
        case errno.EAGAIN | errno.EPIPE:
            ended = f"{cause}: a process cannot be started, or has ended"
            return ended, "look at `ulimit -u` and at memory; the same command continues", 5
        case errno.ENOMEM:
            return cause, MORE_MEMORY, 5
        case errno.EIO:
            return (
                f"{cause}: the disk or file system failed",
                "check the device; the same command continues",
                3,
            )
        case errno.ENOENT | errno.ESTALE:
            return cause, "bring the file back, or check the path; the same command continues", 3
        case errno.EROFS:
            return cause, "choose another -o, or mount the file system writable", 3
    return cause, "check the path and its permissions", 3


def _fail(cause: str, remedy: str, code: int, *, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    click.echo(f"error: {plain(' '.join(cause.splitlines()))}", err=True)
    click.echo(f"  fix: {plain(' '.join(remedy.splitlines()))}", err=True)
    return code

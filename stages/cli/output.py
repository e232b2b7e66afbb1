"""The output of every verb: results, progress, and an error's two lines and exit code."""

import contextlib
import dataclasses
import itertools
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from quantflow.distributed.launch import speaks
from quantflow.errors import UsageError
from quantflow.plain_text import one_line, plain
from quantflow.reporting.failures import Failure, exit_code_of, report
from quantflow.reporting.progress_line import PATIENCE, ProgressLine
from quantflow.reporting.signals import Signals
from quantflow.reporting.streams import NobodyReads
from quantflow.stages.cli.environment import bars_wanted


@dataclass(frozen=True)
class Invocation:
    """One command line, which its verb finds in click's context.

    Attributes:
        arguments: words after `quantflow`.
        signals: handler of SIGINT and SIGTERM while it runs.
    """

    arguments: tuple[str, ...] = ()
    signals: Signals = field(default_factory=Signals)


@contextlib.contextmanager
def reporting(shared: Mapping[str, Any], output: Path) -> Iterator[ProgressLine]:
    """Yield the progress of a verb that writes `output`, as the options of `common` say.

    A log file `<output>.log` stands beside it.

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
    """Print the result to stdout: the JSON document, or the text.

    Characters that would move a terminal's cursor are spelled out.
    """
    with contextlib.suppress(NobodyReads):  # what the verb says with its exit code still counts
        click.echo(
            json.dumps(result, indent=1, sort_keys=True, default=str) if as_json else plain(text)
        )


def write_piece(text: str, *, dim: bool = False) -> None:
    """Print a piece of a text that a model makes to stdout, without a line's end.

    A file gets it as it is; on a terminal characters that would steer it are spelled out.
    """
    if sys.stdout.isatty():
        click.echo(click.style(plain(text), dim=True) if dim else plain(text), nl=False)
    else:
        click.echo(text, nl=False, color=True)  # click would take escapes out


def then(*words: object, shared: Mapping[str, Any]) -> None:
    """Print the command that usually comes next to stderr, so that stdout holds the result alone.

    Args:
        words: the words after `quantflow`; in capitals what the user has to choose.
        shared: the options of `common`.
    """
    command = shlex.join(["quantflow", *map(str, words)])
    note(f"next: {command}", as_json=shared["as_json"], quiet=shared["quiet"])


def note(text: str, *, as_json: bool = False, quiet: bool = False) -> None:
    """Print one line to stderr about how the command line is read; nothing beside --json or -q."""
    if not (as_json or quiet):
        click.echo(one_line(text), err=True)


def show_job(job: Any, *, as_json: bool, **others: Any) -> None:
    """Print the fields of a job, the resolved settings of a dry run; `others` follow it by name."""
    fields = {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
    settings = {name: _plain(value) for name, value in {**fields, **others}.items()}
    show(settings, as_json=as_json, text=outline(settings))


def _plain(value: Any) -> Any:
    """Records as mappings, also inside lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned text: the first three columns to the left, numbers to the right."""
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
    """Nested data as indented lines for people.

    Long lists are cut, and equal tables in a row are shown once.
    """
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
    """Run a command line and return its exit code.

    A user's mistake is two lines on stderr, never a traceback.

    The verbs find its `Invocation` in click's context.
    """
    for word in arguments:  # they reach records that are UTF-8, hours later
        try:
            word.encode()
        except UnicodeEncodeError:
            return report(Failure(f"{word!a}: not UTF-8", "rename it, or give another", 2))
    invocation = Invocation(tuple(arguments))

    def command() -> None:
        with invocation.signals.installed():
            group.main(
                args=list(arguments), prog_name="quantflow", standalone_mode=False, obj=invocation
            )

    return exit_code_of(_of_click(command), debug="--debug" in arguments)


def _of_click(work: Callable[[], object]) -> Callable[[], object]:
    """Work whose errors of click are ours: a usage error, help that was asked for, an abort."""

    def command() -> None:
        try:
            work()
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(plain(error.format_message()))
        except click.Abort as error:
            raise KeyboardInterrupt from error
        except click.ClickException as error:
            named = isinstance(error, click.UsageError) and error.ctx
            usage = error.ctx.command_path if named else "quantflow"  # type: ignore[attr-defined]
            cause = error.format_message().replace("\n", " ")
            raise UsageError(cause, f"see `{usage} --help`") from error

    return command

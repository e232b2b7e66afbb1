"""The verb `chat`: a conversation in the terminal, with an artifact or with a server.

Reads    the artifact, or a server's answers; lines of stdin
Writes   nothing
Resumes  nothing
Fails    2 no chat template, a conversation that is too long; 3 a template or a server that refuses;
         5 a server that is not there; 7 the artifact is damaged, or signed by another
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from quantflow.errors import QuantflowError
from quantflow.reporting.progress_line import ProgressLine
from quantflow.reporting.signals import Interrupted
from quantflow.runtime.chat_job import ChatJob
from quantflow.stages.cli.environment import bars_wanted
from quantflow.stages.cli.options import DEBUG, QUIET, job_settings, job_values

HELP = (
    "/system TEXT sets the system message, /reset begins anew, /exit ends; Ctrl-C stops an answer"
)


@click.command("chat")
@click.argument("artifact", required=False)
@job_settings("chat", ChatJob)
@QUIET
@DEBUG
def command(artifact: str | None, quiet: bool, debug: bool, **options: Any) -> None:
    """Talk with ARTIFACT, or with a server by --url. A line that begins with / is a command.

    ARTIFACT is a folder, a name on the hub (org/name), or a GGUF file.

    \b
    Example: quantflow chat work/4-export
             quantflow chat org/name --revision v1
             quantflow chat --url http://127.0.0.1:8000 --system "Answer in one sentence."
    """
    del debug  # `exit_code` reads it
    job = ChatJob(
        artifact=None if artifact is None else Path(artifact),
        **job_values("chat", ChatJob, options),
    )
    partner = job.partner(ProgressLine(quiet=quiet, bars=bars_wanted()))
    try:
        if not quiet:
            click.echo(f"{partner.name}. {HELP}.", err=True)
        _talk(partner, job.system, quiet=quiet)
    finally:
        partner.close()


def _talk(partner: Any, system: str | None, *, quiet: bool) -> None:
    """Answer line after line until there are no more."""
    history: list[dict[str, str]] = []
    for line in _lines():
        word, _, rest = line.partition(" ")
        if word in ("/exit", "/quit"):
            return
        if word == "/reset":
            history.clear()
        elif word == "/system":
            system = rest.strip() or None
        elif line.startswith("/"):
            click.echo(HELP, err=True)
        else:
            before = [] if system is None else [{"role": "system", "content": system}]
            messages = [*before, *history, {"role": "user", "content": line}]
            text = _answer(partner, messages, quiet=quiet)
            if text is not None:
                history += [messages[-1], {"role": "assistant", "content": text}]


def _answer(partner: Any, messages: list[dict[str, str]], *, quiet: bool) -> str | None:
    """Print an answer as it grows, and return it; None where there is none."""
    begin, first, pieces = time.monotonic(), None, []
    try:
        with contextlib.closing(partner.answer(messages)) as answer:
            for piece in answer:
                first = first or time.monotonic()
                pieces.append(piece)
                click.echo(piece, nl=False)
    except Interrupted:
        if not sys.stdin.isatty():
            raise
    except QuantflowError as error:
        if not sys.stdin.isatty():
            raise
        click.echo(f"error: {error.cause}\n  fix: {error.remedy}", err=True)
        return None
    click.echo()
    if partner.tokens > 1 and first is not None and not quiet:
        rate = (partner.tokens - 1) / max(1e-9, time.monotonic() - first)
        click.echo(
            f"{partner.tokens} tokens, {rate:.1f} tokens/s, first after {first - begin:.2f} s",
            err=True,
        )
    return "".join(pieces)


def _lines() -> Iterator[str]:
    """Yield the typed lines, or those of a file, without empty ones."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 arrows and history in `input`
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line:
            yield line

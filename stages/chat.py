"""The verb `chat`: a conversation in the terminal, with an artifact or with a server.

Reads    the artifact, or a server's answers; lines of stdin
Writes   nothing
Resumes  nothing
Fails    2 no chat template, a message that is too long; 3 a template or a server that refuses, an
         answer that is none of OpenAI's; 5 a server that is not there, or goes away; 7 the artifact
         is damaged, or signed by another
"""

import contextlib
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import click

from quantflow import cpu_threads
from quantflow.errors import QuantflowError
from quantflow.reporting.progress_line import ProgressLine
from quantflow.reporting.signals import Interrupted
from quantflow.runtime.chat_job import ChatJob
from quantflow.runtime.partner import Conversation, Partner, TextPiece
from quantflow.stages.cli.environment import bars_wanted
from quantflow.stages.cli.options import DEBUG, QUIET, THREADS, job_settings, job_values
from quantflow.stages.cli.output import note, write_piece

HELP = (
    "/system TEXT sets the system message, /reset begins anew, /exit ends; Ctrl-C stops an answer"
)


@click.command("chat")
@click.argument("artifact", required=False)
@job_settings("chat", ChatJob)
@THREADS
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
        note(f"{partner.name}. {HELP}.", quiet=quiet)
        if job.url is None:
            note(cpu_threads.line(), quiet=quiet)
        _talk(partner, job, quiet=quiet)
    finally:
        partner.close()


def _talk(partner: Partner, job: ChatJob, *, quiet: bool) -> None:
    """Answer line after line until there are no more."""
    conversation = Conversation(
        partner, system=job.system, tell=lambda line: note(line, quiet=quiet)
    )
    for line in _lines():
        word, _, rest = line.partition(" ")
        if word in ("/exit", "/quit"):
            return
        if word == "/reset":
            conversation.reset()
        elif word == "/system":
            conversation.system = rest.strip() or None
        elif line.startswith("/"):
            note(HELP)
        else:
            _answer(partner, conversation.ask(line), quiet=quiet, reasoning=job.reasoning)


def _answer(
    partner: Partner, pieces: Generator[TextPiece, None, None], *, quiet: bool, reasoning: bool
) -> None:
    """Print an answer as it grows."""
    begin, first, dim = time.monotonic(), None, False
    try:
        with contextlib.closing(pieces):
            for piece in pieces:
                first = first or time.monotonic()
                if piece.reasoning and not (reasoning and sys.stdout.isatty()):
                    continue  # a file gets the answer alone
                if dim and not piece.reasoning:
                    write_piece("\n\n")
                write_piece(piece.text, dim=piece.reasoning)
                dim = piece.reasoning
    except Interrupted:
        if not sys.stdin.isatty():
            raise
    except QuantflowError as error:
        if not sys.stdin.isatty():
            raise
        note(f"error: {error.cause}")
        note(f"  fix: {error.remedy}")
        return
    write_piece("\n")
    if partner.tokens > 1 and first is not None:
        rate = (partner.tokens - 1) / max(1e-9, time.monotonic() - first)
        note(
            f"{partner.tokens} tokens, {rate:.1f} tokens/s, first after {first - begin:.2f} s",
            quiet=quiet,
        )


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

"""The command line and its verbs.

A verb is a file of quantflow/stages, which is imported when somebody asks for it.
"""

import sys
from importlib import import_module

import click

from quantflow import __version__, process_memory
from quantflow.distributed.rank import end_failed_rank
from quantflow.reporting.streams import guard
from quantflow.stages.cli.output import exit_code

VERBS = (
    *(
        "run",
        "plan",
        "measure",
        "quantize",
        "unify",
        "export",
        "validate",
        "gate",
        "generate",
        "serve",
        "chat",
        "bench",
    ),
    *("inspect", "verify", "sign", "push", "diff", "compare", "calibration"),
)


class VerbGroup(click.Group):
    """A group whose commands are `command` in quantflow/stages/<verb>.py."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the verbs."""
        del ctx
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a verb, None where there is no such verb."""
        del ctx
        if cmd_name not in VERBS:
            return None
        command: click.Command = import_module(f"quantflow.stages.{cmd_name}").command
        return command


@click.group(
    cls=VerbGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="quantflow")
def cli() -> None:
    """Turn a Hugging Face causal LM into a proven FP8, INT8 or INT4 artifact.

    \b
    measure -> quantize -> export -> validate, and unify where several ranks work; all of them:
      quantflow run tiny-llama
    """


def main() -> int:
    """Run the command line of this process and return its exit code."""
    guard()
    process_memory.search_seldom()
    process_memory.give_back_freed()
    process_memory.take_huge_pages()
    code = exit_code(cli, sys.argv[1:])
    end_failed_rank(code)
    process_memory.end_quickly()
    return code

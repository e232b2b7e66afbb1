"""The verb `serve`: HTTP with TGI's routes and OpenAI's, until a signal comes.

Reads    the artifact, more of them with --model, a chat template, a key file; the environment
         variables that TGI reads
Writes   nothing
Resumes  nothing
Fails    2 limits that contradict each other or the model, 3 no tokenizer or a file that cannot be
         read, 5 the port is taken, 6 the packages of the extra serve are missing, 7 the artifact
         is damaged or signed by another, 1 the engine died
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from quantflow.errors import UsageError
from quantflow.reporting.progress_line import ProgressLine
from quantflow.server import serve, vllm_command
from quantflow.server.settings import ServeJob
from quantflow.stages.cli.environment import (
    bars_wanted,
    quant_config_variable,
    set_defaults,
    unread_variables,
)
from quantflow.stages.cli.options import DEBUG, QUIET, THREADS, job_settings, job_values, origins
from quantflow.stages.cli.other_programs import FLOAT8_VARIABLES, SERVE, SERVE_VARIABLES
from quantflow.stages.cli.output import show
from quantflow.stages.cli.spelling import spelled

OLD_NAMES = {
    "max_input_length": "max_input_tokens",
    "max_prefill_total_tokens": "max_batch_prefill_tokens",
}


@click.command("serve", cls=spelled(SERVE, variables=SERVE_VARIABLES))
@click.argument("artifact")
@job_settings("serve", ServeJob)
@click.option(
    "--max-input-length",
    type=int,
    metavar="N",
    envvar="MAX_INPUT_LENGTH",
    help="TGI's older --max-input-tokens.",
)
@click.option(
    "--max-prefill-total-tokens",
    type=int,
    metavar="N",
    help="Another name of --max-batch-prefill-tokens.",
)
@click.option("--dry-run", is_flag=True, help="Print the command of --engine vllm.")
@THREADS
@QUIET
@DEBUG
@click.pass_context
def command(
    context: click.Context,
    /,
    artifact: str,
    dry_run: bool,
    quiet: bool,
    debug: bool,
    **options: Any,
) -> None:
    """Answer HTTP with ARTIFACT, as TGI and OpenAI's API do.

    ARTIFACT is a folder, a name on the hub (org/name), or a GGUF file. Requests run together.
    docs/serving.md has every route.

    \b
    Example: quantflow serve work/4-export
             quantflow serve org/name --revision v1
             curl 127.0.0.1:8000/generate --json '{"inputs": "def main("}'
    """
    del debug  # `exit_code` reads it
    progress = ProgressLine(quiet=quiet, bars=bars_wanted())
    for line in unread_variables():
        progress.say(line)
    found = origins("serve", ServeJob, context)
    for old, new in OLD_NAMES.items():
        value = options.pop(old)
        if value is None:
            continue
        flags = [f"--{name.replace('_', '-')}" for name in (old, new)]
        if new in found:
            raise UsageError(
                f"{flags[0]} {value} beside {flags[1]} {options[new]}", "give one of them"
            )
        progress.say(f"{flags[0]} is read as {flags[1]}")
        options[new], found[new] = value, flags[0]
    job = job_from(artifact, options, found)
    if job.on_gaudi and quant_config_variable() is not None:
        for line in set_defaults(FLOAT8_VARIABLES):
            progress.say(line)
    if dry_run and job.engine != "vllm":
        raise UsageError(
            f"--dry-run with --engine {job.engine}",
            "leave it out: the limits are printed when it starts",
        )
    if dry_run:
        show(None, as_json=False, text=shlex.join(vllm_command(job, progress=progress)))
    else:
        serve(job, progress=progress)


def job_from(artifact: str, options: Mapping[str, Any], found: Mapping[str, str]) -> ServeJob:
    """The job of a command line.

    Args:
        artifact: folder of the artifact.
        options: values by the names of their parameters.
        found: origin of each value.

    Raises:
        UsageError: values outside their ranges, or options that do not go together.
    """
    return ServeJob(
        artifact=Path(artifact), origins=found, **job_values("serve", ServeJob, options)
    )

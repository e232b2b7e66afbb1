"""The verb `calibration`: text looked at before it is used, or continued by the model.

Reads    the text, and the tokenizer of the model; `continue` the model and prompts
Writes   nothing; `continue` a file of token ids
Resumes  nothing
Fails    2 numbers that cannot be decoded; 3 text, prompts or tokenizer that cannot be read; what
         generating raises
"""

from pathlib import Path
from typing import Any

import click

from quantflow.measuring.continue_job import ContinueJob
from quantflow.reporting.progress_line import ProgressLine
from quantflow.stages.cli.environment import bars_wanted
from quantflow.stages.cli.options import QUIET, THREADS, job_settings, job_values, offline
from quantflow.stages.cli.output import outline, show


@click.group("calibration")
def command() -> None:
    """Look at calibration text before it is used, or have a model continue prompts to such text."""


@command.command("inspect")
@click.argument("file")
@click.option("--tokenizer", metavar="MODEL", required=True, help="Folder of the model.")
@click.option("--sequence-length", type=int, default=2048, show_default=True)
@offline
def inspect(file: str, tokenizer: str, sequence_length: int, as_json: bool, **_shared: Any) -> None:
    """Count tokens, padding, BOS, duplicates and what truncation drops.

    \b
    Example: quantflow calibration inspect text.jsonl --tokenizer ./llama
    """
    from quantflow.measuring.text_inspection import inspect_text  # here: it imports torch

    summary = inspect_text(file, tokenizer=Path(tokenizer), sequence_length=sequence_length)
    show(summary, as_json=as_json, text=outline(summary))


@command.command("continue")
@click.argument("model")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    required=True,
    help="File that is written, .safetensors.",
)
@job_settings("continue", ContinueJob)
@THREADS
@QUIET
@offline
def continued(model: str, output: Path, as_json: bool, quiet: bool, **options: Any) -> None:
    """Have MODEL continue prompts, and write the token ids for `measure --calibration`.

    \b
    Example: quantflow calibration continue ./llama --prompts text.jsonl --chat -o said.safetensors
             quantflow measure ./llama -o work/1-measure --calibration said.safetensors
    """
    job = ContinueJob(
        model=Path(model), output=output, **job_values("continue", ContinueJob, options)
    )
    result = job.run(ProgressLine(quiet=quiet, bars=bars_wanted()))
    counts = (
        f"{result['prompt_tokens']} prompt tokens and {result['new_tokens']} new ones in "
        f"{result['sequences']} sequences"
    )
    show(result, as_json=as_json, text=f"{result['file']}: {counts}")

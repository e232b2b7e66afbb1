"""Calibration text, looked at before it is used, as a verb.

Reads    the text, and the tokenizer of the model
Writes   nothing
Resumes  nothing
Fails    3 text or tokenizer that cannot be read
"""

from typing import Any

import click

from quantflow import api
from quantflow.stages.cli.options import offline
from quantflow.stages.cli.output import outline, show


@click.group("calibration")
def command() -> None:
    """Look at calibration text before it is used."""


@command.command("inspect")
@click.argument("file")
@click.option("--tokenizer", metavar="MODEL", required=True, help="The folder of the model.")
@click.option("--sequence-length", type=int, default=2048, show_default=True)
@offline
def inspect(file: str, tokenizer: str, sequence_length: int, as_json: bool, **_shared: Any) -> None:
    """Count tokens, padding, BOS, duplicates and what truncation drops.

    \b
    Example: quantflow calibration inspect text.jsonl --tokenizer ./llama
    """
    summary = api.inspect_calibration(file, tokenizer=tokenizer, sequence_length=sequence_length)
    show(summary, as_json=as_json, text=outline(summary))

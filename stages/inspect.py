"""The verb `inspect`: the kind and content of a folder; it reads no weight with --no-verify.

It imports torch for --backends, and for folders of other programs and GGUF files alone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from quantflow.files.inspect import summarize
from quantflow.files.manifest import MANIFEST_NAME
from quantflow.files.verify import verify
from quantflow.reporting.progress_line import ProgressLine
from quantflow.stages.cli.environment import bars_wanted
from quantflow.stages.cli.options import NO_VERIFY, offline
from quantflow.stages.cli.output import outline, show, table


@click.command("inspect")
@click.argument("path")
@click.option(
    "--backends",
    is_flag=True,
    help="Backend that would run each linear of an artifact here, and why the others would not.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Dtype of the activations for --backends.",
)
@NO_VERIFY
@offline
def command(
    path: str, backends: bool, dtype: str, no_verify: bool, as_json: bool, **_shared: Any
) -> None:
    """Show the content of a model, measurement, artifact, other program's folder, or GGUF file.

    An artifact is verified first. Every tensor of another program's folder and of a GGUF file is
    read; a damaged one is refused with its name.

    \b
    Example: quantflow inspect work/4-export
             quantflow inspect ./llama-gptq --json
             quantflow inspect model.Q4_K_M.gguf
             quantflow inspect work/4-export --backends --dtype bfloat16
    """
    if not no_verify and (Path(path) / MANIFEST_NAME).exists():
        verify(Path(path))
    if backends:
        from quantflow.runtime.backend_choice import (
            backends as chosen_backends,  # here: imports torch
        )

        rows = chosen_backends(Path(path), dtype=dtype)
        show(rows, as_json=as_json, text=_backends_text(rows))
        return
    place = Path(path)
    summary = {} if place.is_file() else summarize(place)
    if place.is_file() or (summary["kind"] == "checkpoint" and summary["quant_method"] is not None):
        progress = ProgressLine(quiet=as_json, bars=bars_wanted())
        from quantflow.runtime.inspection import describe  # here: it imports torch

        summary = describe(place, verify=not no_verify, progress=progress)
    show(summary, as_json=as_json, text=outline(summary))


def _backends_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table, and every reason once."""
    cells = [
        (r["first"], r["scheme"], r["backend"], "x".join(map(str, r["shape"])), str(r["count"]))
        for r in rows
    ]
    lines = [table(("first linear", "scheme", "backend", "shape", "linears"), cells)]
    for scheme, reasons in {r["scheme"]: r["why_not"] for r in rows}.items():
        lines += [
            f"\n{scheme}, not run by",
            *(f"  {name}: {reason}" for name, reason in reasons.items()),
        ]
    return "\n".join(lines)

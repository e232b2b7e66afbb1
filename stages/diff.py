"""Two manifests field by field, as a verb. Imports no torch."""

from pathlib import Path
from typing import Any

import click

from quantflow.artifact.diff import diff
from quantflow.artifact.manifest import read_manifest
from quantflow.artifact.verify import verify
from quantflow.stages.cli.options import NO_VERIFY, offline
from quantflow.stages.cli.output import show, table


@click.command("diff")
@click.argument("left")
@click.argument("right")
@NO_VERIFY
@offline
def command(left: str, right: str, no_verify: bool, as_json: bool, **_shared: Any) -> None:
    """Compare the manifests of two artifacts.

    Prints every field that differs; exits 0 whether any does or not, 7 where one of them is damaged.

    \b
    Example: quantflow diff work/old work/new
    """
    for folder in () if no_verify else (left, right):
        verify(Path(folder))
    differences = diff(read_manifest(Path(left)), read_manifest(Path(right)))
    rows = [(item.path, str(item.left), str(item.right)) for item in differences]
    text = table(("field", left, right), rows) if rows else "no difference"
    show([{"path": path, "left": a, "right": b} for path, a, b in rows], as_json=as_json, text=text)

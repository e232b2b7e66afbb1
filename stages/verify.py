"""Every byte of an artifact against its manifest, as a verb; exit 7 where one differs. Imports no torch."""

from pathlib import Path
from typing import Any

import click

from quantflow.artifact.verify import verify
from quantflow.stages.cli.options import offline
from quantflow.stages.cli.output import outline, show


@click.command("verify")
@click.argument("artifact")
@offline
def command(artifact: str, as_json: bool, **_shared: Any) -> None:
    """Check every byte of ARTIFACT against its manifest.

    Exits 7 and names the file where one differs.

    \b
    Example: quantflow verify work/4-export
    """
    report = verify(Path(artifact))
    show(report, as_json=as_json, text=f"intact: {outline(report)}")

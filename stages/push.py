"""The verb `push`: an artifact goes to the hub.

Reads    the artifact, which is verified first, and its validation where there is one
Writes   a repository on the hub, in one commit; nothing on this machine
Resumes  contents that the hub has already are not sent again
Fails    2 a name that cannot be, a repository with other files, or a public one without --public;
         3 no token, or the hub refuses or cannot be reached; 7 the artifact is damaged
"""

from pathlib import Path
from typing import Any

import click

from quantflow.plain_text import one_line
from quantflow.publishing.job import PushJob, PushResult
from quantflow.reporting.progress_line import ProgressLine
from quantflow.stages.cli.environment import bars_wanted
from quantflow.stages.cli.options import QUIET, offline
from quantflow.stages.cli.output import show
from quantflow.units import size


@click.command("push")
@click.argument("artifact")
@click.argument("name", metavar="ORG/NAME")
@click.option("--revision", metavar="BRANCH", help="Branch; it is created where it is missing.")
@click.option("--public", is_flag=True, help="Everybody can see it (default: private).")
@click.option(
    "--base-model",
    metavar="ORG/NAME",
    help="The source's name on the hub, where the manifest has no such name.",
)
@click.option(
    "--validation",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Validation for the card (default: <artifact>-validation, where it exists).",
)
@click.option("--force", is_flag=True, help="Remove files that the repository has beside it.")
@click.option("--dry-run", is_flag=True, help="List files and bytes; the hub is not asked.")
@QUIET
@offline
def command(
    artifact: str,
    name: str,
    revision: str | None,
    public: bool,
    base_model: str | None,
    validation: Path | None,
    force: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    **_shared: Any,
) -> None:
    """Upload ARTIFACT to the hub as ORG/NAME, private without --public, in one commit.

    \b
    Example: quantflow push llama-w4a16 org/llama-w4a16 --dry-run
             quantflow push llama-w4a16 org/llama-w4a16
             quantflow push llama-w4a16 org/llama-w4a16 --public --revision v2
    """
    job = PushJob(
        artifact=Path(artifact),
        repository=name,
        revision=revision,
        public=public,
        base_model=base_model,
        validation=validation,
        force=force,
    )
    if dry_run:
        result = job.plan()
        show(result.as_json(), as_json=as_json, text=_planned(job, result))
        return
    result = job.run(ProgressLine(quiet=quiet or as_json, bars=bars_wanted()))
    show(result.as_json(), as_json=as_json, text=_pushed(job, result))


def _planned(job: PushJob, result: PushResult) -> str:
    """Files with their bytes, and what the card lacks."""
    seen = "public" if result.public else "private"
    return "\n".join(
        [
            *(f"{nbytes:>17,}  {one_line(file)}" for file, nbytes in sorted(result.files.items())),
            f"{len(result.files)} files, {size(result.nbytes)}, to {result.address}, {seen}",
            *(f"note: {text}" for text in result.notes),
        ]
    )


def _pushed(job: PushJob, result: PushResult) -> str:
    at = "" if job.revision is None else f" --revision {job.revision}"
    return (
        f"{result.address}\n"
        f"commit {result.commit}: {len(result.files)} files, {size(result.nbytes)}\n"
        f'run it:  quantflow generate {job.repository}{at} --prompt "..."'
    )

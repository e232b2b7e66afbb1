"""The verb `gate`: verdicts of validations that were made elsewhere. No model, no torch.

Reads    validation.json, and that of an older artifact
Writes   JUnit XML where it is asked for
Resumes  nothing: it takes a second
Fails    3 a file that cannot be read, or two that are not of one model and text; 4 the gate, or a
         regression
"""

from pathlib import Path
from typing import Any

import click

from quantflow.stages.cli.options import offline, recipe_flags, recipe_settings
from quantflow.stages.cli.output import show, table
from quantflow.validating.job import GateJob, ValidateResult


@click.command("gate")
@click.argument("validation")
@click.option(
    "--previous",
    metavar="FILE",
    help="An older artifact's validation.json; exits 4 where this artifact is worse.",
)
@recipe_settings("gate")
@click.option(
    "--junit",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="File of the verdicts as JUnit XML.",
)
@offline
def command(
    validation: str, previous: str | None, junit: Path | None, as_json: bool, **shared: Any
) -> None:
    """Judge VALIDATION, a validation.json or its folder, without the model; exit 4 as validate.

    \b
    Example: quantflow gate new-validation --previous old-validation --gate limits.yaml \\
               --junit gate.xml
    """
    from quantflow.validating import tables  # here: it imports numpy

    flags, _ = recipe_flags("gate", shared)
    result = GateJob(
        validation=Path(validation),
        previous=None if previous is None else Path(previous),
        gate=flags.get("validate.gate"),
        allow_inconclusive=flags.get("validate.allow_inconclusive"),
    ).run()
    show(result.values, as_json=as_json, text=verdicts(result))
    if junit is not None:
        tables.write_junit(junit, result)
    result.raise_for_verdict(allow_inconclusive=bool(result.values["allow_inconclusive"]))


def verdicts(result: ValidateResult) -> str:
    """Tables of a validation: verdict, older artifact, tasks, and the places of the loss."""
    from quantflow.validating import tables  # here: it imports numpy

    shown = (
        tables.verdicts([result]),
        tables.regressions(result),
        tables.tasks(result),
        tables.diagnosis(result),
    )
    texts = [table(*each) for each in shown if each is not None]
    return "\n\n".join([*texts, *filter(None, [tables.mend_hint(result)])])

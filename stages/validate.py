"""The verb `validate`, stage 5.

Reads    the artifact, its source, an evaluation text; an older artifact or its validation
Writes   <report>/validation.json and report.html, and <report>.log; JUnit XML, tasks, a mend's
         recipe where they are asked for
Resumes  a validation of the same inputs is left alone; one that was stopped goes on with its layer
Fails    3 unusable text, or text that was calibrated on; 4 the gate; 5 too little memory or disk;
         7 a damaged artifact
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from quantflow.errors import UsageError
from quantflow.planning.recipe import recipe_from
from quantflow.stages.cli.options import FOLDER, common, recipe_data, recipe_flags, recipe_settings
from quantflow.stages.cli.other_programs import VALIDATE, VALIDATE_VALUES
from quantflow.stages.cli.output import reporting, show, show_job
from quantflow.stages.cli.spelling import spelled
from quantflow.stages.gate import verdicts
from quantflow.validating.job import ValidateJob


@click.command("validate", cls=spelled(VALIDATE, values=VALIDATE_VALUES))
@click.argument("artifact")
@click.option("--baseline", metavar="DIR", required=True, help="Source model of the artifact.")
@recipe_settings("validate", "validate")
@click.option(
    "--expect", type=click.Choice(["pass", "fail"]), default="pass", help="Verdict that exits 0."
)
@click.option(
    "--previous",
    metavar="DIR|FILE",
    type=click.Path(path_type=Path),
    help="An older artifact or its validation.json; exits 4 where ARTIFACT is worse.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="File of lm-eval's own document of the tasks; the source's is "
    "<report>/tasks-baseline.json.",
)
@click.option(
    "--junit",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="File of the verdicts as JUnit XML.",
)
@click.option(
    "--report",
    metavar="DIR",
    type=FOLDER,
    help="Folder of the report (default: <artifact>-validation).",
)
@common
def command(
    artifact: str,
    baseline: str,
    settings: tuple[str, ...],
    recipe: str | None,
    report: Path | None,
    **shared: Any,
) -> None:
    """Stage 5: compare ARTIFACT with its source; a gate decides.

    A failed or inconclusive gate exits 4, and so does an artifact that is worse than --previous by
    more than the gate allows.

    \b
    Example: quantflow validate work/4-export --baseline ./llama --text heldout.jsonl
             quantflow validate new --baseline ./llama --previous old --junit validation.xml
             quantflow validate new --baseline ./llama --tasks lambada_openai,piqa --limit 200
             quantflow validate new --baseline ./llama --diagnose 100
    """
    from quantflow.validating import tables  # here: it imports numpy

    flags, _ = recipe_flags("validate", shared)
    values = recipe_from(recipe_data(recipe, settings, {"model": baseline, **flags}))
    job = ValidateJob(
        artifact=Path(artifact),
        baseline=Path(baseline),
        options=values.validate,
        report=report,
        expect=shared["expect"],
        previous=shared["previous"],
        seed=values.seed,
        revision=values.revision,
        resources=values.resources,
        compute=values.compute,
        force=shared["force"],
    )
    folder = job.folder
    job = replace(job, report=folder)
    if shared["output"] is not None and not values.validate.tasks:
        raise UsageError(f"{shared['output']}: no tasks are asked", "name some with --tasks")
    if shared["dry_run"]:
        show_job(job, as_json=shared["as_json"])
        return
    with reporting(shared, folder) as progress:
        result = job.run(progress)
    show(
        result.values,
        as_json=shared["as_json"],
        text=f"{verdicts(result)}\nreport: {folder / 'report.html'}",
    )
    if shared["output"] is not None:
        tables.write_tasks(shared["output"], result)
    if shared["junit"] is not None:
        tables.write_junit(shared["junit"], result)
    result.raise_for_verdict(allow_inconclusive=values.validate.allow_inconclusive)

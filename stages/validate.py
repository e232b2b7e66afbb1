"""The verb `validate`, stage 5.

Reads    the artifact, its source, an evaluation text; an older artifact or its validation; without
         a source a model and tasks alone
Writes   <report>/validation.json and report.html, of a model alone scores.json, and <report>.log;
         JUnit XML, tasks, a mend's recipe where they are asked for
Resumes  a validation of the same inputs is left alone; one that was stopped goes on with its layer
Fails    3 unusable text, or text that was calibrated on; 4 the gate; 5 too little memory or disk;
         7 a damaged artifact
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from quantflow.errors import UsageError
from quantflow.files import disk
from quantflow.planning.recipe import Recipe, recipe_from
from quantflow.stages.cli.options import FOLDER, common, recipe_data, recipe_flags, recipe_settings
from quantflow.stages.cli.other_programs import VALIDATE, VALIDATE_VALUES
from quantflow.stages.cli.output import reporting, show, show_job, table
from quantflow.stages.cli.spelling import spelled
from quantflow.stages.gate import verdicts
from quantflow.validating.job import ScoreJob, ValidateJob


@click.command("validate", cls=spelled(VALIDATE, values=VALIDATE_VALUES))
@click.argument("artifact")
@click.option(
    "--baseline",
    metavar="MODEL",
    help="Source model of the artifact; without one ARTIFACT answers --tasks alone.",
)
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
    baseline: str | None,
    settings: tuple[str, ...],
    recipe: str | None,
    report: Path | None,
    **shared: Any,
) -> None:
    """Stage 5: compare ARTIFACT with its source; a gate decides.

    A failed or inconclusive gate exits 4, and so does an artifact that is worse than --previous by
    more than the gate allows. Without --baseline ARTIFACT, which may be any model, is scored by
    --tasks alone.

    \b
    Example: quantflow validate work/4-export --baseline ./llama --text heldout.jsonl
             quantflow validate new --baseline ./llama --previous old --junit validation.xml
             quantflow validate new --baseline ./llama --tasks lambada_openai,piqa --limit 200
             quantflow validate new --baseline ./llama --diagnose 100
             quantflow validate ./llama --tasks piqa --dtype bfloat16 -o eval.json
    """
    from quantflow.validating import tables  # here: it imports numpy

    flags, _ = recipe_flags("validate", shared)
    values = recipe_from(recipe_data(recipe, settings, {"model": baseline or artifact, **flags}))
    if baseline is None:
        _score(artifact, report, values, shared)
        return
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


def _score(artifact: str, report: Path | None, values: Recipe, shared: Mapping[str, Any]) -> None:
    """Score a model alone.

    Raises:
        UsageError: no task, or an option that compares.
    """
    for name in ("previous", "junit"):
        if shared[name] is not None:
            raise UsageError(
                f"validate {artifact}: --{name} without a baseline", "give --baseline MODEL"
            )
    job = ScoreJob(
        model=Path(artifact),
        options=values.validate,
        report=report,
        revision=values.revision,
        resources=values.resources,
        compute=values.compute,
        force=shared["force"],
    )
    if shared["dry_run"]:
        show_job(job, as_json=shared["as_json"])
        return
    folder = job.folder
    with reporting(shared, folder) as progress:
        result = job.run(progress)
    scores = table(
        ("task", "metric", "documents", "score", "standard error"),
        [
            (name, one["metric"], str(one["samples"]), f"{one['score']:.4f}", _error(one))
            for name, one in result["scores"].items()
        ],
    )
    show(result, as_json=shared["as_json"], text=f"{scores}\nscores: {folder / 'scores.json'}")
    if shared["output"] is not None:
        disk.write_atomic(shared["output"], (folder / "tasks.json").read_bytes())


def _error(score: Mapping[str, Any]) -> str:
    return "" if score["standard_error"] is None else f"{score['standard_error']:.4f}"

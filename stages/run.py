"""All stages of a recipe as a verb, in a folder of its own, each resumed where it stopped.

Reads    the recipe, its model and its texts
Writes   artifacts/<recipe>/1-measure/                   rank-RRR-of-WWW
                            2-quantize/<name>/
                            3-unify/                     only with several ranks
                            4-export/<name>/             the artifacts
                            5-validate/<name>/           and texts.json, how each artifact continues one prompt
                            report.html                  all of them together
Resumes  every stage as the verb of its name does
Fails    as the stages; 4 where a verdict is not the expected one
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from quantflow import api
from quantflow.errors import UsageError
from quantflow.files.rank_folders import rank_folder
from quantflow.planning.recipe import Recipe, recipe_from
from quantflow.progress import Progress
from quantflow.shipped import find_config
from quantflow.stages.cli.options import FOLDER, common, recipe_data, recipe_flags, recipe_settings
from quantflow.stages.cli.output import outline, reporting, show, table
from quantflow.stages.cli.quant_config_layer import tell_unread
from quantflow.stages.run_summary import StageTimes, texts, write_texts


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """One recipe, and where its results go."""

    recipe: Recipe
    name: str
    folder: Path


@click.command("run")
@click.argument("recipe_names", metavar="RECIPE...", nargs=-1, required=True)
@click.option(
    "-o", "--output", metavar="DIR", type=FOLDER, help="Default: artifacts/<recipe>; of one recipe."
)
@recipe_settings("run")
@common
def command(
    recipe_names: tuple[str, ...], output: Path | None, settings: tuple[str, ...], **shared: Any
) -> None:
    """Run all stages of each RECIPE, resumed where they stopped.

    RECIPE is a file, or the name of a shipped one; docs/recipes.md has every key.

    \b
    Example: quantflow run tiny-llama --set quantize.0.group_size=64
    """
    if shared["recipe"] is not None:
        raise UsageError(
            f"run: --recipe {shared['recipe']} beside RECIPE {' '.join(recipe_names)}",
            "give the recipe once",
        )
    if output is not None and len(recipe_names) > 1:
        raise UsageError(
            f"run: -o {output} of {len(recipe_names)} recipes",
            "leave out -o, or run one recipe at a time",
        )
    tell_unread("run")
    flags, _ = recipe_flags("run", shared)
    jobs = []
    for path in [find_config("recipes", name) for name in recipe_names]:
        recipe = recipe_from(recipe_data(str(path), settings, flags))
        jobs.append(
            RunJob(recipe=recipe, name=path.stem, folder=Path(output or f"artifacts/{path.stem}"))
        )
    if shared["dry_run"]:
        values = [dataclasses.asdict(job.recipe) for job in jobs]
        text = "\n".join(
            f"{job.folder}\n{outline(of_job)}" for job, of_job in zip(jobs, values, strict=True)
        )
        show(values if len(jobs) > 1 else values[0], as_json=shared["as_json"], text=text)
        return
    results = []
    for job in jobs:
        with reporting(shared, job.folder) as progress:
            of_job = run(job, progress)
        results += of_job
        if not shared["as_json"]:
            said = texts(job.folder, [entry.name for entry in job.recipe.quantize])
            table_of_job = table(*api.verdict_table(of_job))
            show(
                {},
                as_json=False,
                text=f"{table_of_job}\nreport: {job.folder / 'report.html'}{said}",
            )
    if shared["as_json"]:
        show([result.values for result in results], as_json=True, text="")
    for result in results:
        result.raise_for_verdict(allow_inconclusive=bool(result.values["allow_inconclusive"]))


def run(job: RunJob, progress: Progress) -> list[api.ValidateResult]:
    """Run every stage and return the validation of each artifact, in the recipe's order."""
    folder = job.folder
    if not job.recipe.quantize:
        raise UsageError(f"{job.name}: quantize is empty", "add at least one artifact")
    recipe = api.resolve(job.recipe, progress=progress)
    for entry in recipe.quantize:
        api.check_export(
            folder / "2-quantize" / entry.name,
            folder / "4-export" / entry.name,
            options=recipe.export,
        )
    times = StageTimes()
    measurement = _measure(recipe, folder, times, progress)
    results = {}
    shared: dict[str, Any] = {"resources": recipe.resources, "force": True, "progress": progress}
    for entry in recipe.quantize:
        with times.timing("quantize", entry.name):
            quantized = api.quantize(
                recipe.model,
                folder / "2-quantize" / entry.name,
                artifact=entry,
                measurement=measurement,
                seed=recipe.seed,
                revision=recipe.revision,
                compute=recipe.compute,
                **shared,
            )
        with times.timing("export", entry.name):
            artifact = api.export(
                quantized.folder,
                folder / "4-export" / entry.name,
                options=recipe.export,
                model=recipe.model,
                **shared,
            )
        with times.timing("validate", entry.name):
            results[artifact.folder] = api.validate(
                artifact.folder,
                recipe.model,
                options=recipe.validate,
                report=folder / "5-validate" / entry.name,
                expect=entry.expect,
                seed=recipe.seed,
                compute=recipe.compute,
                **shared,
            )
    api.write_report(folder / "report.html", results)
    write_texts(recipe, folder, times, progress)
    progress.say(times.table())
    return list(results.values())


def _measure(recipe: Recipe, folder: Path, times: StageTimes, progress: Progress) -> Path:
    """Measure, unify where there are several ranks, and return the measurement of one."""
    with times.timing("measure"):
        measured = api.measure(
            recipe.model,
            folder / "1-measure",
            calibration=recipe.calibration,
            measuring=recipe.measure,
            artifacts=recipe.quantize,
            seed=recipe.seed,
            resources=recipe.resources,
            compute=recipe.compute,
            force=True,
            progress=progress,
        )
    if recipe.measure.ranks == 1:
        return rank_folder(measured.folder, 0, 1)
    groups = recipe.unify.groups or ()
    with times.timing("unify"):
        return api.unify(
            measured.folder, folder / "3-unify", groups=groups, force=True, progress=progress
        ).folder

"""The verb `run`: all stages of a recipe in a folder of its own, each resumed where it stopped.

Reads    the recipe, its model and its texts
Writes   artifacts/<recipe>/1-measure/                   rank-RRR-of-WWW
                            2-quantize/<name>/
                            3-unify/                     only with several ranks
                            4-export/<name>/             the artifacts
                            5-validate/<name>/           and texts.json, continuations of one prompt
                            report.html                  all artifacts together
Resumes  every stage as the verb of its name does
Fails    as the stages; 4 where a verdict is not the expected one
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from quantflow.errors import UsageError
from quantflow.exporting.job import ExportJob
from quantflow.files.rank_folders import rank_folder
from quantflow.measuring.job import MeasureJob
from quantflow.planning.recipe import Recipe, recipe_from
from quantflow.progress import Progress
from quantflow.quantizing.job import QuantizeJob
from quantflow.shipped import find_config
from quantflow.stages.cli.options import FOLDER, common, recipe_data, recipe_flags, recipe_settings
from quantflow.stages.cli.output import outline, reporting, show, table
from quantflow.stages.cli.quant_config_layer import tell_unread
from quantflow.stages.run_summary import StageTimes, texts, write_texts
from quantflow.unifying.job import UnifyJob
from quantflow.validating.job import ValidateJob, ValidateResult


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """One recipe, and the folder of its results."""

    recipe: Recipe
    name: str
    folder: Path


@click.command("run")
@click.argument("recipe_names", metavar="RECIPE...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    type=FOLDER,
    help="Folder of one recipe's results (default: artifacts/<recipe>).",
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
    from quantflow.validating import tables  # here: it imports torch

    results = []
    for job in jobs:
        with reporting(shared, job.folder) as progress:
            of_job = run(job, progress)
        results += of_job
        if not shared["as_json"]:
            said = texts(job.folder, [entry.name for entry in job.recipe.quantize])
            table_of_job = table(*tables.verdicts(of_job))
            show(
                {},
                as_json=False,
                text=f"{table_of_job}\nreport: {job.folder / 'report.html'}{said}",
            )
    if shared["as_json"]:
        show([result.values for result in results], as_json=True, text="")
    for result in results:
        result.raise_for_verdict(allow_inconclusive=bool(result.values["allow_inconclusive"]))


def run(job: RunJob, progress: Progress) -> list[ValidateResult]:
    """Run every stage and return the validation of each artifact, in the recipe's order."""
    from quantflow.validating import tables  # here: it imports torch, as the next
    from quantflow.validating.recipe_check import resolved

    folder = job.folder
    if not job.recipe.quantize:
        raise UsageError(f"{job.name}: quantize is empty", "add at least one artifact")
    recipe = resolved(job.recipe, progress)
    model = Path(recipe.model)
    exports = {
        entry.name: ExportJob(
            source=folder / "2-quantize" / entry.name,
            output=folder / "4-export" / entry.name,
            options=recipe.export,
            model=model,
            resources=recipe.resources,
            force=True,
        )
        for entry in recipe.quantize
    }
    for export in exports.values():
        export.check()
    times = StageTimes()
    measurement = _measure(recipe, folder, times, progress)
    results = {}
    for entry in recipe.quantize:
        export = exports[entry.name]
        with times.timing("quantize", entry.name):
            QuantizeJob(
                model=model,
                output=export.source,
                entry=entry,
                measurement=measurement,
                seed=recipe.seed,
                revision=recipe.revision,
                resources=recipe.resources,
                compute=recipe.compute,
                force=True,
            ).run(progress)
        with times.timing("export", entry.name):
            artifact = export.run(progress).folder
        with times.timing("validate", entry.name):
            results[artifact] = ValidateJob(
                artifact=artifact,
                baseline=model,
                options=recipe.validate,
                report=folder / "5-validate" / entry.name,
                expect=entry.expect,
                seed=recipe.seed,
                resources=recipe.resources,
                compute=recipe.compute,
                force=True,
            ).run(progress)
    tables.write_report(folder / "report.html", results)
    write_texts(recipe, folder, times, progress)
    progress.say(times.table())
    return list(results.values())


def _measure(recipe: Recipe, folder: Path, times: StageTimes, progress: Progress) -> Path:
    """Measure, unify where there are several ranks, and return the measurement of one."""
    with times.timing("measure"):
        measured = MeasureJob(
            model=Path(recipe.model),
            output=folder / "1-measure",
            calibration=recipe.calibration,
            options=recipe.measure,
            entries=tuple(recipe.quantize),
            seed=recipe.seed,
            resources=recipe.resources,
            compute=recipe.compute,
            force=True,
        ).run(progress)
    if recipe.measure.ranks == 1:
        return rank_folder(measured.folder, 0, 1)
    with times.timing("unify"):
        unify = UnifyJob(
            measurement=measured.folder,
            output=folder / "3-unify",
            groups=tuple(recipe.unify.groups or ()),
            force=True,
        )
        return unify.run(progress).folder

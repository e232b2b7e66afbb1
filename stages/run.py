"""All stages of a recipe, in a folder of its own, each resumed where it stopped.

artifacts/<recipe>/1-measure/                   rank-RRR-of-WWW
                   2-quantize/<name>/
                   3-unify/                     only with several ranks
                   4-export/<name>/             the artifacts
                   5-validate/<name>/           and texts.json, how each artifact continues one prompt
                   report.html                  all of them together
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantflow.artifact.canonical import file_digest
from quantflow.artifact.manifest import read_manifest
from quantflow.calibration import measure
from quantflow.distributed.launch import rank_folder
from quantflow.errors import UsageError
from quantflow.exporting import export
from quantflow.models.graph import graph_for
from quantflow.models.load import open_source
from quantflow.planning.plan import resolve
from quantflow.planning.recipe import Recipe
from quantflow.planning.requirements import statistics_for
from quantflow.quantization import quantize, unify
from quantflow.stages.cli.progress_line import ProgressLine
from quantflow.stages.run_summary import StageTimes, write_texts
from quantflow.validation import validate
from quantflow.validation.report import Row, parts_of, write_report


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """One recipe, and where its results go."""

    recipe: Recipe
    name: str
    folder: Path


def run(job: RunJob, progress: ProgressLine) -> list[dict[str, Any]]:
    """Run every stage and return the validation of each artifact, in the recipe's order."""
    recipe, folder = job.recipe, job.folder
    if not recipe.quantize:
        raise UsageError(f"{job.name}: quantize is empty", "add at least one artifact")
    _check(recipe)
    times = StageTimes()
    measurement = _measure(job, times, progress)
    results = []
    for entry in recipe.quantize:
        with times.timing("quantize", entry.name):
            quantized = quantize.run(
                quantize.QuantizeJob(
                    model=Path(recipe.model),
                    output=folder / "2-quantize" / entry.name,
                    entry=entry,
                    measurement=measurement,
                    seed=recipe.seed,
                    revision=recipe.revision,
                    replace=True,
                    resources=recipe.resources,
                ),
                progress,
            )
        with times.timing("export", entry.name):
            artifact = export.run(
                export.job_from(
                    recipe, quantized=quantized, output=folder / "4-export" / entry.name, model=recipe.model, force=True
                ),
                progress,
            )
        with times.timing("validate", entry.name):
            results.append(_validate(job, entry.name, entry.expect, artifact, progress))
    _report(folder, [entry.name for entry in recipe.quantize], results)
    write_texts(recipe, folder, times, progress)
    progress.say(times.table())
    return results


def _check(recipe: Recipe) -> None:
    """Find mistakes in every entry before the first batch runs."""
    source = open_source(recipe.model)
    shapes = {name: info.shape for name, info in source.checkpoint.infos.items()}
    for entry in recipe.quantize:
        resolve(entry, graph_for(source.config), shapes)
    for key, path in (("calibration.source", recipe.calibration.source), ("validate.text", recipe.validate.text)):
        if path is None:
            raise UsageError(f"recipe: {key} is missing", "name a text file")
        file_digest(Path(path))


def _measure(job: RunJob, times: StageTimes, progress: ProgressLine) -> Path:
    recipe, folder = job.recipe, job.folder
    stats = recipe.measure.stats
    if stats is None:
        stats = statistics_for(recipe.quantize)
    experts = _fed(recipe, stats)
    first = folder / "1-measure"
    calibration = recipe.calibration
    with times.timing("measure"):
        measure.run(
            measure.MeasureJob(
                model=Path(recipe.model),
                output=first,
                calibration=calibration,
                seed=recipe.seed,
                ranks=recipe.measure.ranks,
                tp=recipe.measure.tp,
                dp=recipe.measure.dp,
                stats=stats,
                experts=experts,
                replace=True,
                resources=recipe.resources,
            ),
            progress,
        )
    if recipe.measure.ranks == 1:
        return rank_folder(first, 0, 1)
    groups = recipe.unify.groups or ()
    job_unify = unify.UnifyJob(measurement=first, output=folder / "3-unify", groups=groups, replace=True)
    with times.timing("unify"):
        return unify.run(job_unify, progress)


def _fed(recipe: Recipe, stats: Sequence[str]) -> str | None:
    """Return which tokens the experts of a mixture are shown: all where an artifact asks for it and reads statistics."""
    if recipe.measure.experts is not None or not stats or not graph_for(open_source(recipe.model).config).sparse:
        return recipe.measure.experts
    return "all" if any(entry.experts == "all" for entry in recipe.quantize) else None


def _validate(job: RunJob, name: str, expect: str, artifact: Path, progress: ProgressLine) -> dict[str, Any]:
    return validate.run(
        validate.ValidateJob(
            artifact=artifact,
            baseline=Path(job.recipe.model),
            report=job.folder / "5-validate" / name,
            options=job.recipe.validate,
            expect=expect,
            noise=job.folder / "5-validate" / "noise.json",
            seed=job.recipe.seed,
            replace=True,
            resources=job.recipe.resources,
        ),
        progress,
    )


def _report(folder: Path, names: Sequence[str], results: Sequence[dict[str, Any]]) -> None:
    rows = [
        Row(result=result, layers=parts_of(read_manifest(folder / "4-export" / name)))
        for name, result in zip(names, results, strict=True)
    ]
    write_report(folder / "report.html", rows)

"""The verb `measure`, stage 1.

Reads    the model, a calibration text
Writes   <o>/rank-RRR-of-WWW/, and <o>.log
Resumes  finished ranks of the same inputs are left alone
Fails    2 an option or a recipe's key; 3 unusable model or text; 5 too little memory or disk; 6 an
         unknown family
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from quantflow.distributed.launch import launched_rank, speaks
from quantflow.errors import UsageError
from quantflow.measuring.job import MeasureJob
from quantflow.planning.plan_job import entries
from quantflow.planning.recipe import Quantize, recipe_from
from quantflow.stages.cli.options import (
    FOLDER,
    QUANT_CONFIG,
    TRUST_NETWORK,
    common,
    recipe_data,
    recipe_flags,
    recipe_settings,
)
from quantflow.stages.cli.other_programs import MEASURE
from quantflow.stages.cli.output import reporting, show, show_job, then
from quantflow.stages.cli.quant_config_layer import given_config, measure_beneath, output_beneath
from quantflow.stages.cli.spelling import spelled


@click.command("measure", cls=spelled(MEASURE))
@click.argument("model")
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    type=FOLDER,
    help="Folder of the ranks (default: the dump_stats_path of a QUANT_CONFIG).",
)
@recipe_settings("measure", "calibration")
@click.option(
    "--for",
    "schemes",
    metavar="SCHEMES",
    help="Artifacts to measure for, such as W4A16:gptq,W4A16@4.25,FP8 (default: all but @).",
)
@TRUST_NETWORK
@QUANT_CONFIG
@common
def command(
    model: str,
    output: Path | None,
    schemes: str | None,
    settings: tuple[str, ...],
    recipe: str | None,
    **shared: Any,
) -> None:
    """Stage 1: run calibration text through MODEL, keep statistics.

    MODEL is a folder, a name on the hub (org/name), or a GGUF file. Without --for the statistics
    serve every scheme and its default algorithm; best, yaqa and mixed precision need --for.

    \b
    Example: quantflow measure ./llama -o work/1-measure --calibration text.jsonl --ranks 8 --tp 4
             QUANT_CONFIG=maxabs_measure.json quantflow measure ./llama --calibration text.jsonl
    """
    config = given_config("measure", shared["quant_config"], quiet=shared["quiet"])
    flags, _ = recipe_flags("measure", shared)
    if shared["stats"] is not None and schemes is not None:
        raise UsageError(
            f"measure: --stats {shared['stats']} beside --for {schemes}", "give one of them"
        )
    data = recipe_data(recipe, settings, {"model": model, **flags})
    if schemes is None:
        data = measure_beneath(data, config)
    values = recipe_from(data)
    measuring, artifacts = values.measure, values.quantize
    if schemes is not None:
        artifacts = entries(schemes)
        measuring = replace(measuring, stats=None)
    job = MeasureJob(
        model=Path(model),
        output=output_beneath(output, config),
        calibration=values.calibration,
        options=measuring,
        entries=tuple(artifacts),
        seed=values.seed,
        revision=values.revision,
        resources=values.resources,
        compute=values.compute,
        trust_network=shared["trust_network"],
        force=shared["force"],
    )
    if shared["dry_run"]:
        show_job(job, as_json=shared["as_json"])
        return
    with reporting(shared, job.output) as progress:
        result = job.run(progress)
    if speaks():
        show({"folder": str(result.folder)}, as_json=shared["as_json"], text=str(result.folder))
        if max(measuring.ranks, (launched_rank() or (0, 1))[1]) > 1:
            then("unify", "-m", result.folder, "-o", "DIR", shared=shared)
            return
        first = artifacts[0] if artifacts else Quantize(name="any", scheme="W4A16")
        scheme = ["--scheme", first.scheme if isinstance(first.scheme, str) else "SCHEME"]
        words = [*scheme, *(["--algorithm", first.algorithm] if first.algorithm else [])]
        measured = ["--measurement", result.folder]
        then("quantize", model, "-o", "DIR", *words, *measured, shared=shared)

"""The verb `export`, stage 4.

Reads    a finished quantize folder and its model; formats inc and imatrix a measurement,
         format gguf a model or an artifact
Writes   <o>, which appears at once, and <o>.log
Resumes  a finished result of the same inputs is left alone; an unfinished one starts again
Fails    2 an unknown format; 3 unfinished, foreign or ununified input; 5 the folder is held; 7 the
         proof disagrees
"""

from pathlib import Path
from typing import Any

import click

from quantflow.distributed.launch import speaks
from quantflow.exporting.job import ExportJob
from quantflow.planning.recipe import Export, recipe_from
from quantflow.stages.cli.options import (
    FOLDER,
    QUANT_CONFIG,
    common,
    recipe_data,
    recipe_flags,
    recipe_settings,
)
from quantflow.stages.cli.other_programs import EXPORT, EXPORT_VALUES
from quantflow.stages.cli.output import reporting, show, show_job, then
from quantflow.stages.cli.quant_config_layer import given_config
from quantflow.stages.cli.spelling import spelled


@click.command("export", cls=spelled(EXPORT, values=EXPORT_VALUES))
@click.argument("quantized", metavar="QUANTIZED|MEASUREMENT|MODEL")
@click.option(
    "-o", "--output", metavar="DIR", type=FOLDER, required=True, help="Folder of the artifact."
)
@click.option("--model", metavar="DIR", help="Source model (default: where quantize read it).")
@recipe_settings("export", "export")
@click.option(
    "--keep-orig",
    is_flag=True,
    help="Keep Gaudi's own measurement beside the files that format inc writes.",
)
@QUANT_CONFIG
@common
def command(
    quantized: str,
    output: Path,
    model: str | None,
    settings: tuple[str, ...],
    recipe: str | None,
    **shared: Any,
) -> None:
    """Stage 4: write an artifact and prove it in a fresh process.

    QUANTIZED is the folder of quantize, or of unify after it. Of a MEASUREMENT format inc writes
    Gaudi's files, and format imatrix llama.cpp's importance matrix. Format gguf writes llama.cpp's
    file of a MODEL, or of an artifact's dequantized weights. Of a MODEL without --format the
    tensors are written as they are, in files of --shard-size.

    \b
    Example: quantflow export work/2-quantize -o work/4-export
             quantflow export work/1-measure -o work/gaudi --format inc --device gaudi2
             quantflow export work/1-measure -o work/imatrix --format imatrix --model ./llama
             quantflow export ./llama -o work/gguf --format gguf --dtype bf16
             quantflow export ./llama -o small-files --shard-size 500MB
    """
    config = given_config("export", shared["quant_config"], quiet=shared["quiet"])
    flags, _ = recipe_flags("export", shared)
    values = recipe_from(recipe_data(recipe, settings, {"model": model or "unused", **flags}))
    job = ExportJob(
        source=Path(quantized),
        output=output,
        options=values.export,
        model=None if model is None else Path(model),
        revision=values.revision,
        quant_config=config,
        keep_originals=shared["keep_orig"],
        resources=values.resources,
        force=shared["force"],
    )
    if shared["dry_run"]:
        show_job(job, as_json=shared["as_json"])
        return
    with reporting(shared, output) as progress:
        folder = job.run(progress).folder
    if speaks():
        show({"folder": str(folder)}, as_json=shared["as_json"], text=str(folder))
        if job.options.format == Export().format and (folder / "quantflow.json").is_file():
            then("validate", folder, "--baseline", model or "MODEL", shared=shared)

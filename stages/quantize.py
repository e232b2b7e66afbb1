"""Stage 2 as a verb; with text it measures first, with --export it exports then.

Reads    the model, a measurement where the artifact needs one; with --calibration the text instead
Writes   <o>/layers/ and its records, and <o>.log; with --export the artifact as well
Resumes  a finished result of the same inputs is left alone, a stopped one goes on with its layer
Fails    2 an option or a recipe's key; 3 unusable model or measurement; 5 too little memory or disk; 6 an unknown family
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantflow import api
from quantflow.distributed.launch import speaks
from quantflow.errors import UsageError, nearest
from quantflow.planning.recipe import Measure, Recipe, recipe_from
from quantflow.stages.cli.options import (
    FOLDER,
    QUANT_CONFIG,
    TRUST_NETWORK,
    common,
    overlay,
    recipe_data,
    recipe_flags,
    recipe_settings,
)
from quantflow.stages.cli.output import reporting, show, show_call, table
from quantflow.stages.cli.quant_config_layer import entry_beneath, given_config, measurement_beneath

if TYPE_CHECKING:
    from quantflow.formats.gaudi.quant_config import GivenConfig


@click.command("quantize")
@click.argument("model")
@click.option("-o", "--output", metavar="DIR", type=FOLDER, required=True, help="Where the quantized layers go.")
@recipe_settings("quantize", "quantize")
@click.option("--measurement", metavar="DIR", help="The folder of measure or unify; for FP8 also Gaudi's own files.")
@click.option("--name", help="Which entry of the recipe (default: the first).")
@click.option(
    "--ranks", type=int, default=1, help="Processes (default 1); each writes a slice of each linear, unify joins them."
)
@click.option(
    "--export", "artifact", metavar="DIR", type=FOLDER, help="Then write the artifact there and prove it, as export does."
)
@TRUST_NETWORK
@QUANT_CONFIG
@common
def command(model: str, output: Path, artifact: Path | None, settings: tuple[str, ...], **shared: Any) -> None:
    """Stage 2: choose qvalues and scales for MODEL, layer by layer.

    Without --measurement only algorithms that read no statistics run, such as those of FP8_DYNAMIC and W8A16.

    \b
    Example: quantflow quantize ./llama -o work/2-quantize --scheme W4A16 --measurement work/1-measure
             quantflow quantize ./llama -o work/2-quantize --scheme FP8_DYNAMIC --export work/llama-fp8
             quantflow quantize ./llama -o work/2 --scheme W4A16 --calibration text.jsonl --measurement work/1
             quantflow quantize ./llama -o work/w4a16 --scheme W4A16 --measurement work/1-measure --head W8A16
             quantflow quantize ./llama -o work/mixed --target-bpw 4.25 --measurement work/1-measure
             quantflow quantize ./llama -o work/fp8 --scheme FP8 --kv-cache FP8 --measurement work/1-measure
             quantflow quantize ./llama -o work/shards --scheme FP8_DYNAMIC --ranks 4
             quantflow quantize ./llama -o work/shards --scheme W4A16 --measurement work/1-measure --ranks 4
    """
    _check_options(artifact, shared)
    measures = shared["calibration"] is not None
    proved, bounds = None, (shared["max_memory"], shared["disk_offload"])
    if artifact is not None and not shared["dry_run"] and not any(bounds):  # first, so that both start at once
        proved = click.get_current_context().with_resource(api.proving(canary=measures))
    config = given_config("quantize", shared["quant_config"], quiet=shared["quiet"])
    values, position, measurement = _recipe(model, settings, config, shared)
    quantizing: dict[str, Any] = {
        "model": model,
        "output": output,
        "artifact": values.quantize[position],
        "measurement": measurement,
        "ranks": shared["ranks"],
        "seed": values.seed,
        "revision": values.revision,
        "resources": values.resources,
        "trust_network": shared["trust_network"],
        "force": shared["force"],
    }
    exporting: dict[str, Any] = {}
    if artifact is not None:
        exporting = {"quantized": output, "output": artifact, "options": values.export, "model": model}
        api.check_export(**exporting)  # before hours of quantizing, not after them
        exporting |= {"resources": values.resources, "revision": values.revision, "force": shared["force"]}
    if shared["dry_run"]:
        show_call({**quantizing, **({"export": exporting} if exporting else {})}, as_json=shared["as_json"])
        return
    if measures:
        _measure(values, quantizing, shared)
    with reporting(shared, output) as progress:
        quantized = api.quantize(**quantizing, progress=progress)
    folder = quantized.folder
    if artifact is not None:
        with reporting(shared, artifact) as progress:
            folder = api.export(**exporting, proved=proved, progress=progress).folder
    if speaks():
        text = f"{_choice(quantized)}{folder}"
        show({"folder": str(folder)}, as_json=shared["as_json"], text=text)


def _check_options(artifact: Path | None, shared: dict[str, Any]) -> None:
    """Refuse options that do not go together, before anything is read.

    Raises:
        UsageError: naming them.
    """
    if artifact is not None and shared["ranks"] != 1:
        raise UsageError(f"quantize: --export with --ranks {shared['ranks']}", "join the shards with unify, then export")
    if shared["calibration"] is not None and (shared["measurement"] is None or shared["ranks"] != 1):
        cause = f"quantize: --calibration {shared['calibration']}"
        if shared["measurement"] is None:
            raise UsageError(f"{cause} without --measurement", "name the folder that the measurement goes to")
        raise UsageError(f"{cause} with --ranks {shared['ranks']}", "measure first, then give --measurement alone")


def _recipe(
    model: str, settings: tuple[str, ...], config: "GivenConfig | None", shared: dict[str, Any]
) -> tuple[Recipe, int, Path | None]:
    """Return the recipe under --set and the flags, the position of the artifact in it, and the measurement that is read.

    Raises:
        UsageError: no scheme is given, or the recipe has no such artifact.
    """
    whole, flags = recipe_flags("quantize", shared)
    name, scheme = shared["name"], shared["scheme"]
    if shared["recipe"] is not None:
        data = recipe_data(shared["recipe"], settings, {"model": model, **whole})
    else:
        if scheme is not None:
            entry = {"name": name or scheme.lower(), "scheme": scheme}
        elif shared["target_bpw"] is not None or shared["max_kld"] is not None:
            entry = {"name": name or "mixed", "scheme": "W4A16"}
        elif config is not None:
            entry = {"name": name or "fp8", "scheme": "FP8"}
        else:
            remedy = "give --scheme, for example --scheme W4A16, or --target-bpw, or --recipe"
            raise UsageError("quantize: no scheme", remedy)
        data = recipe_data(None, settings, {"model": model, **whole}, otherwise={"quantize": [entry]})
    names = [item.name for item in recipe_from(data).quantize]
    if name not in (None, *names) or not names:
        raise UsageError(f"quantize: no entry {name or ''!r} in the recipe", nearest(name or "", names))
    position = 0 if name is None else names.index(name)
    entry = overlay(dict(data["quantize"][position]), flags)
    measurement = measurement_beneath(shared["measurement"], entry, config)
    data["quantize"][position] = entry_beneath(entry, config, model=Path(model), measurement=measurement)
    return recipe_from(data), position, measurement


def _measure(values: Recipe, quantizing: dict[str, Any], shared: dict[str, Any]) -> None:
    """Measure what an artifact needs, in this process, into the folder that quantize reads."""
    words = {name: quantizing[name] for name in ("model", "revision", "seed", "resources", "force")}
    with reporting(shared, quantizing["measurement"]) as progress:
        api.measure(
            **words,
            output=quantizing["measurement"],
            calibration=values.calibration,
            measuring=Measure(stats=values.measure.stats, experts=values.measure.experts),
            artifacts=[quantizing["artifact"]],
            progress=progress,
        )


def _choice(result: api.QuantizeResult) -> str:
    """Return the table of the schemes that were chosen, and where the rest of it is; nothing where none were."""
    if not result.chosen:
        return ""
    choice = result.choice()
    return f"{table(choice.columns, choice.rows)}\nrecipe: {choice.recipe}\nPareto curve: {choice.plot}\n"

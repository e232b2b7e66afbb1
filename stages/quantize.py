"""The verb `quantize`: from a model to an artifact, or stage 2 by itself.

    -o OUT                      OUT is the artifact; OUT.work has 1-measure and 2-quantize
    -o OUT --no-export          OUT is the folder of quantized layers, which `export` takes
    -o OUT --measurement DIR    the same, from a finished measurement; --calibration makes it first
    -o OUT --ranks N            OUT has a shard of each rank, which `unify` joins
    -o OUT --export ARTIFACT    OUT is the folder of quantized layers; ARTIFACT is written after it
    ... --dequantize            MODEL is quantized; its weights go to OUT.work/0-dequantized first
    ... --adapter LORA          an adapter of MODEL; both together go to OUT.work/0-merged first

In every form a needed measurement that is not given is made in OUT.work/1-measure. Statistics that
a given one lacks are measured beside it.

Reads    the model, a measurement where the artifact needs one; a text where it measures
Writes   as above, and a log beside each
Resumes  each stage: a finished one is left alone, a stopped one goes on with its layer
Fails    2 an option or a recipe's key; 3 unusable model or measurement; 5 too little memory or
         disk; 6 an unknown family
"""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantflow.distributed.launch import speaks
from quantflow.errors import UsageError, nearest
from quantflow.exporting.artifact_job import ArtifactJob, work_folder
from quantflow.exporting.job import ExportJob
from quantflow.measuring.job import MeasureJob
from quantflow.planning.plan_job import entries
from quantflow.planning.recipe import Measure, Recipe, recipe_from
from quantflow.progress import SILENT
from quantflow.quantizing.job import QuantizeJob, QuantizeResult
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
from quantflow.stages.cli.other_programs import QUANTIZE
from quantflow.stages.cli.output import note, reporting, show, show_job, table, then
from quantflow.stages.cli.quant_config_layer import entry_beneath, given_config, measurement_beneath
from quantflow.stages.cli.spelling import spelled

if TYPE_CHECKING:
    from quantflow.formats.gaudi.quant_config import GivenConfig


@click.command("quantize", cls=spelled(QUANTIZE))
@click.argument("model")
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    type=FOLDER,
    required=True,
    help="Folder of the artifact, or of its layers, see above.",
)
@click.option("--for", "planned", hidden=True)  # plan's word for --scheme and --algorithm
@recipe_settings("quantize", "quantize")
@click.option(
    "--measurement",
    metavar="DIR",
    help="Folder of measure or unify; for FP8 also Gaudi's own files.",
)
@click.option("--name", help="Entry of the recipe (default: the first).")
@click.option(
    "--ranks",
    type=int,
    default=1,
    help="Processes (default 1); each writes a slice of each linear, unify joins them.",
)
@click.option(
    "--export",
    "artifact",
    metavar="DIR",
    type=FOLDER,
    help="Folder of the artifact; the layers go to -o.",
)
@click.option("--no-export", is_flag=True, help="Write the layers to -o, and no artifact.")
@click.option(
    "--dequantize",
    is_flag=True,
    help="MODEL is quantized; its dequantized weights go to DIR.work first.",
)
@click.option(
    "--adapter",
    metavar="LORA",
    type=FOLDER,
    help="PEFT adapter of MODEL; both together go to DIR.work first.",
)
@TRUST_NETWORK
@QUANT_CONFIG
@common
def command(
    model: str, output: Path, artifact: Path | None, settings: tuple[str, ...], **shared: Any
) -> None:
    """Quantize MODEL: measure, round its linears, write the artifact and prove it.

    With -o alone DIR is the artifact. The stages before it write into DIR.work, where the same
    command goes on. With --measurement, --ranks, --export or --no-export DIR has the quantized
    layers of stage 2, which export takes.

    \b
    Example: quantflow quantize ./llama -o llama-w4a16 --scheme W4A16
             quantflow quantize org/name -o llama-fp8 --scheme FP8_DYNAMIC
             quantflow quantize ./llama -o llama-w4a16 --scheme W4A16 --calibration text.jsonl
             quantflow quantize ./llama -o llama-w4a16 --scheme W4A16 --head W8A16
             quantflow quantize ./llama -o llama-fp8 --scheme FP8 --kv-cache FP8
             quantflow quantize ./llama -o llama-mixed --target-bpw 4.25
             quantflow quantize ./llama -o llama-gguf --scheme Q4_K_M --target-bpw 4.25
             quantflow quantize ./llama -o 2-quantize --scheme W4A16 --measurement 1-measure
             quantflow quantize ./llama -o shards --scheme W4A16 --measurement 1-measure --ranks 4
             quantflow quantize ./llama-gptq -o llama-fp8 --scheme FP8_DYNAMIC --dequantize
             quantflow quantize ./llama -o tuned-w4a16 --scheme W4A16 --adapter ./lora
    """
    _read_planned(shared)
    if shared["dequantize"] and not shared["dry_run"]:
        model = _dequantized(model, output, settings, shared)
    if shared["adapter"] is not None and not shared["dry_run"]:
        model = _merged(model, output, settings, shared)
    config = given_config("quantize", shared["quant_config"], quiet=shared["quiet"])
    values, position, measurement = _recipe(model, settings, config, shared)
    _check_options(artifact, shared)
    if (
        measurement is None
        and artifact is None
        and not shared["no_export"]
        and shared["ranks"] == 1
    ):
        _one_command(model, output, values, position, shared)
        return
    prover = None if artifact is None else _proving(shared)
    job = QuantizeJob(
        model=Path(model),
        output=output,
        entry=values.quantize[position],
        measurement=measurement,
        ranks=shared["ranks"],
        seed=values.seed,
        revision=values.revision,
        resources=values.resources,
        compute=values.compute,
        trust_network=shared["trust_network"],
        force=shared["force"],
    )
    opened, measures = None, measurement is not None and shared["calibration"] is not None
    if (measures or measurement is None) and shared["ranks"] == 1:
        # what the model or the entry refuses is said before hours of measuring
        with nullcontext(SILENT) if shared["dry_run"] else reporting(shared, output) as progress:
            opened = job.open(progress)
        if measurement is None:
            measures = opened.needs_measurement
            if measures:
                job = replace(job, measurement=work_folder(output) / "1-measure")
    export = None if artifact is None else _export(artifact, values, job, shared)
    if shared["dry_run"]:
        show_job(job, as_json=shared["as_json"], **({} if export is None else {"export": export}))
        return
    if measures:
        _measure(values, job, shared)
    with reporting(shared, output) as progress:
        quantized = job.run(progress, opened=opened)
    folder = quantized.folder
    if export is not None:
        with reporting(shared, export.output) as progress:
            folder = export.run(progress, prover=prover).folder
    if speaks():
        text = f"{_choice(quantized)}{folder}"
        show({"folder": str(folder)}, as_json=shared["as_json"], text=text)
        if artifact is not None:
            then("validate", folder, "--baseline", model, shared=shared)
        elif shared["ranks"] > 1:
            then("unify", "-m", folder, "-o", "DIR", shared=shared)
        else:
            then("export", folder, "-o", "DIR", shared=shared)


def _read_planned(shared: dict[str, Any]) -> None:
    """Put the artifact that `--for W4A16:gptq` names in place of --scheme and what goes with it.

    Raises:
        UsageError: --for names several artifacts, or says what another option says too.
    """
    planned = shared.pop("planned")
    if planned is None:
        return
    first, *others = entries(planned)
    if others:
        raise UsageError(
            f"quantize: --for {planned} names {1 + len(others)} artifacts, quantize makes one",
            f"give --scheme {first.scheme}, or `quantflow run` a recipe that has all of them",
        )
    words = {"scheme": first.scheme, "algorithm": first.algorithm, "target_bpw": first.target_bpw}
    named = {key: value for key, value in words.items() if value is not None}
    for key in named:
        if shared[key] is not None:
            flag = f"--{key.replace('_', '-')}"
            raise UsageError(f"quantize: --for {planned} beside {flag}", "leave --for out")
    shared |= named
    flags = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in named.items())
    quiet = shared["quiet"] or not speaks()
    note(f"quantize: --for {planned} is read as {flags}", as_json=shared["as_json"], quiet=quiet)


def _export(artifact: Path, values: Recipe, job: QuantizeJob, shared: dict[str, Any]) -> ExportJob:
    """The export after the layers, whose mistakes are seen before hours of quantizing."""
    export = ExportJob(
        source=job.output,
        output=artifact,
        options=values.export,
        model=job.model,
        resources=values.resources,
        revision=values.revision,
        force=shared["force"],
    )
    export.check()
    return export


def _dequantized(
    model: str, output: Path, settings: tuple[str, ...], shared: dict[str, Any]
) -> str:
    """Write the model's dequantized weights beside the output, and return their folder."""
    from quantflow.exporting.dequantized_export import dequantized

    folder = work_folder(output) / "0-dequantized"
    whole, _ = recipe_flags("quantize", shared)
    values = recipe_from(recipe_data(shared["recipe"], settings, {"model": model, **whole}))
    with reporting(shared, folder) as progress:
        job = ExportJob(
            source=Path(model),
            output=folder,
            revision=values.revision,
            resources=values.resources,
            force=True,
        )
        return str(dequantized(job, progress))


def _merged(model: str, output: Path, settings: tuple[str, ...], shared: dict[str, Any]) -> str:
    """Write the model with the adapter in its weights beside the output; return the folder."""
    from quantflow.exporting.merged_adapter import MergedAdapterJob

    folder = work_folder(output) / "0-merged"
    whole, _ = recipe_flags("quantize", shared)
    values = recipe_from(recipe_data(shared["recipe"], settings, {"model": model, **whole}))
    with reporting(shared, folder) as progress:
        job = MergedAdapterJob(
            source=Path(model),
            adapter=shared["adapter"],
            output=folder,
            revision=values.revision,
        )
        return str(job.run(progress))


def _one_command(
    model: str, output: Path, values: Recipe, position: int, shared: dict[str, Any]
) -> None:
    """Make the artifact, and say what to do with it."""
    job = ArtifactJob(
        model=Path(model),
        output=output,
        entry=values.quantize[position],
        calibration=values.calibration,
        measure=_of_one_rank(values.measure),
        export=values.export,
        seed=values.seed,
        revision=values.revision,
        resources=values.resources,
        compute=values.compute,
        force=shared["force"],
    )
    if shared["dry_run"]:
        show_job(job, as_json=shared["as_json"])
        return
    prover = _proving(shared)
    with reporting(shared, output) as progress:
        made = job.run(progress, prover=prover)
    work = job.work
    revision = "" if values.revision is None else f" --revision {values.revision}"
    text = (
        f"{_choice(made.quantized)}{made.folder}\n"
        f"compare it:  quantflow validate {made.folder} --baseline {model}{revision}\n"
        f'run it:      quantflow generate {made.folder} --prompt "..."\n'
        f"{work} is where this command would go on; it may be removed"
    )
    show({"folder": str(made.folder), "work": str(work)}, as_json=shared["as_json"], text=text)


def _proving(shared: dict[str, Any]) -> Any:
    """Start the process of the proof, so that both processes start at once.

    Where memory is bounded it starts when it is needed.
    """
    if shared["dry_run"] or shared["max_memory"] or shared["disk_offload"]:
        return None
    from quantflow.exporting.proof import proving  # here: it is not always needed

    return click.get_current_context().with_resource(proving())


def _check_options(artifact: Path | None, shared: dict[str, Any]) -> None:
    """Refuse options that do not go together, before anything is read.

    Raises:
        UsageError: naming them.
    """
    if artifact is not None and shared["no_export"]:
        raise UsageError(f"quantize: --export {artifact} beside --no-export", "leave one out")
    if artifact is not None and shared["ranks"] != 1:
        raise UsageError(
            f"quantize: --export with --ranks {shared['ranks']}",
            "join the shards with unify, then export",
        )
    if shared["calibration"] is not None and shared["ranks"] != 1:
        cause = f"quantize: --calibration {shared['calibration']} with --ranks {shared['ranks']}"
        raise UsageError(cause, "measure first, then give --measurement alone")


def _recipe(
    model: str, settings: tuple[str, ...], config: "GivenConfig | None", shared: dict[str, Any]
) -> tuple[Recipe, int, Path | None]:
    """The recipe under --set and the flags, the position of the entry, and the measurement.

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
        data = recipe_data(
            None, settings, {"model": model, **whole}, otherwise={"quantize": [entry]}
        )
    names = [item.name for item in recipe_from(data).quantize]
    if name not in (None, *names) or not names:
        raise UsageError(
            f"quantize: no entry {name or ''!r} in the recipe", nearest(name or "", names)
        )
    position = 0 if name is None else names.index(name)
    entry = overlay(dict(data["quantize"][position]), flags)
    measurement = measurement_beneath(shared["measurement"], entry, config)
    data["quantize"][position] = entry_beneath(
        entry, config, model=Path(model), measurement=measurement
    )
    return recipe_from(data), position, measurement


def _of_one_rank(measure: Measure) -> Measure:
    """Statistics and experts' tokens of a recipe's measurement; one command has one rank."""
    return Measure(stats=measure.stats, experts=measure.experts)


def _measure(values: Recipe, job: QuantizeJob, shared: dict[str, Any]) -> None:
    """Measure what an artifact needs, in this process, into the folder that quantize reads."""
    assert job.measurement is not None
    measure = MeasureJob(
        model=job.model,
        output=job.measurement,
        calibration=values.calibration,
        options=_of_one_rank(values.measure),
        entries=(job.entry,),
        seed=job.seed,
        revision=job.revision,
        resources=job.resources,
        compute=job.compute,
        force=job.force,
    )
    with reporting(shared, measure.output) as progress:
        measure.run(progress)


def _choice(result: QuantizeResult) -> str:
    """The table of the chosen schemes, and the files of the rest; empty where none were chosen."""
    if not result.chosen:
        return ""
    choice = result.choice()
    return (
        f"{table(choice.columns, choice.rows)}\nrecipe: {choice.recipe}\nPareto curve: "
        f"{choice.plot}\n"
    )

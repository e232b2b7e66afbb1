"""The command line: one function per verb, each of which builds a job, runs its stage and prints the result.

Heavy modules are imported inside the verbs, so that `--help`, `inspect`, `verify` and `diff` start without torch.
Longer than 300 lines because every verb stands here, once, with its help text.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantflow import process_memory
from quantflow.stages.cli.bench_flags import timing
from quantflow.stages.cli.flags import bounded, head_from, headed, limits, quant_configured, transforms_from
from quantflow.stages.cli.generate_flags import generating
from quantflow.stages.cli.output import common, exit_code, offline, outline, overlay, reporting, show, table

if TYPE_CHECKING:
    from quantflow.planning.recipe import Recipe


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="quantflow")
def cli() -> None:
    """Turn a Hugging Face causal LM into a proven FP8, INT8 or INT4 artifact.

    \b
    measure -> quantize -> unify -> export -> validate, or all of them:
      quantflow run tiny-llama
    """


@cli.command()
@click.argument("recipe_name", metavar="RECIPE")
@click.option("-o", "--output", metavar="DIR", help="Default: artifacts/<recipe>.")
@bounded
@common
def run(recipe_name: str, output: str | None, settings: tuple[str, ...], **shared: Any) -> None:
    """All stages of RECIPE (a file, or the name of a shipped one), resumed where they stopped.

    \b
    Example: quantflow run tiny-llama --set quantize.0.group_size=64
    """
    from quantflow.errors import UsageError
    from quantflow.shipped import find_config
    from quantflow.stages import run as stage
    from quantflow.stages.cli.quant_config_layer import tell_unread
    from quantflow.stages.run_summary import texts
    from quantflow.validation.report import COLUMNS, cells
    from quantflow.validation.validate import raise_for_verdict

    if shared["recipe"] is not None:
        raise UsageError(f"run: --recipe {shared['recipe']} beside RECIPE {recipe_name}", "give the recipe once")
    tell_unread("run")
    path = find_config("recipes", recipe_name)
    recipe = _recipe(str(path), settings, limits(shared))
    folder = Path(output or f"artifacts/{path.stem}")
    if shared["dry_run"]:
        show(dataclasses.asdict(recipe), as_json=shared["as_json"], text=f"{folder}\n{recipe}")
        return
    with reporting(shared, folder) as progress:
        results = stage.run(stage.RunJob(recipe=recipe, name=path.stem, folder=folder), progress)
    text = f"{table(COLUMNS, [cells(result) for result in results])}\nreport: {folder / 'report.html'}"
    text += texts(folder, [str(result["artifact"]) for result in results])
    show(results, as_json=shared["as_json"], text=text)
    for result in results:
        raise_for_verdict(result, allow_inconclusive=recipe.validate.allow_inconclusive)


@cli.command()
@click.argument("subject", metavar="RECIPE|MODEL")
@click.option("--for", "schemes", metavar="SCHEMES", help="Artifacts of MODEL, such as W4A16:gptq,FP8 (default: all schemes).")
@click.option("--samples", type=int, help="Calibration sequences (default 128).")
@click.option("--sequence-length", type=int, help="Tokens of each (default min(2048, the model's)).")
@headed
@click.option("--probe", is_flag=True, help="Read, run and round parts of one layer to say how long everything takes.")
@click.option("-o", "--output", metavar="DIR", default="artifacts", help="On the disk that will be written.")
@bounded
@offline
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="Change one value of the recipe.")
def plan(subject: str, output: str, as_json: bool, settings: tuple[str, ...], **shared: Any) -> None:
    """Say what a run needs and makes: memory, disk, bytes, bits per weight, schemes. Reads no weight without --probe.

    \b
    Example: quantflow plan ./llama --for W4A16:gptq,FP8_DYNAMIC --max-memory 4GiB
    """
    from quantflow.core.scheme import PRESETS
    from quantflow.errors import UsageError
    from quantflow.planning import forecast as stage
    from quantflow.planning.recipe import apply_settings, read_yaml, recipe_from
    from quantflow.shipped import find_config
    from quantflow.stages.cli.plan_text import text

    whole = not Path(subject).is_dir()
    if whole and shared["schemes"] is not None:
        raise UsageError(f"plan: --for {shared['schemes']} beside recipe {subject}", "give the folder of a model with --for")
    if whole:
        data = read_yaml(find_config("recipes", subject))
    else:
        data = {"model": subject, "quantize": _entries(",".join(PRESETS) if shared["schemes"] is None else shared["schemes"])}
    flags = {"calibration.samples": shared["samples"], "calibration.sequence_length": shared["sequence_length"]}
    data = overlay(apply_settings(data, settings), {**flags, **limits(shared)})
    for entry in data.get("quantize", ()):
        overlay(entry, {"head": head_from(shared["head"])})
    values = recipe_from(data)
    job = stage.PlanJob(recipe=values, measured=whole, folder=Path(output))
    if shared["probe"]:
        from quantflow.planning.probe import probe

        job = dataclasses.replace(job, probe=probe)
    result = stage.run(job)
    show(result, as_json=as_json, text=text(result))


@cli.command()
@click.argument("model")
@click.option("-o", "--output", metavar="DIR", help="Where the ranks go (default: the dump_stats_path of a QUANT_CONFIG).")
@click.option("--calibration", metavar="FILE", help=".txt, .jsonl or .safetensors with calibration text or tokens.")
@click.option("--samples", type=int, help="Sequences at most (default 128).")
@click.option("--sequence-length", type=int, help="Tokens per sequence at most (default min(2048, the model's)).")
@click.option("--pack", is_flag=True, default=None, help="Join documents instead of cutting each.")
@click.option("--seed", type=int, help="Of the choice of documents (default 0).")
@click.option(
    "--for", "schemes", metavar="SCHEMES", help="What these need, such as W4A16:gptq,W4A16@4.25,FP8 (default: all but @)."
)
@click.option("--stats", metavar="NAMES", help="Observers of each linear's input, comma-separated.")
@click.option("--experts", metavar="FED", help="Tokens that each expert of a mixture is shown: routed to it (default), or all.")
@click.option("--ranks", type=int, help="Processes (default 1); started with torchrun unless it started this one.")
@click.option("--tp", type=int, help="Ranks that share a model, each with a slice of every linear (default 1).")
@click.option("--dp", type=int, help="Replicas of the model, which share the sequences (default: ranks / tp).")
@quant_configured
@bounded
@common
def measure(model: str, output: str | None, settings: tuple[str, ...], recipe: str | None, **shared: Any) -> None:
    """Stage 1: run calibration text through MODEL and keep statistics.

    \b
    Example: quantflow measure ./llama -o work/1-measure --calibration text.jsonl --samples 128 --ranks 8 --tp 4
             QUANT_CONFIG=maxabs_measure.json quantflow measure ./llama --calibration text.jsonl
    """
    from quantflow.stages.cli.quant_config_layer import given, measure_beneath, output_beneath

    found = given("measure", shared["quant_config"], quiet=shared["quiet"])
    flags = {
        **limits(shared),
        "model": model,
        "calibration.source": shared["calibration"],
        "calibration.samples": shared["samples"],
        "calibration.sequence_length": shared["sequence_length"],
        "calibration.pack": shared["pack"],
        "seed": shared["seed"],
        "measure.ranks": shared["ranks"],
        "measure.tp": shared["tp"],
        "measure.dp": shared["dp"],
        "measure.stats": _statistics(shared["stats"], shared["schemes"]),
        "measure.experts": shared["experts"],
    }
    values = _recipe(recipe, settings, flags, beneath=lambda data: measure_beneath(data, found))
    from quantflow.calibration import measure as stage

    job = stage.MeasureJob(
        model=Path(model),
        output=Path(output_beneath(output, found)),
        calibration=values.calibration,
        seed=values.seed,
        ranks=values.measure.ranks,
        tp=values.measure.tp,
        dp=values.measure.dp,
        stats=_chosen(values, stage.DEFAULT_STATS),
        experts=values.measure.experts,
        replace=shared["force"],
        resources=values.resources,
    )
    _run(stage, job, shared)


@cli.command()
@click.argument("model")
@click.option("-o", "--output", metavar="DIR", required=True, help="Where the quantized layers go.")
@click.option(
    "--scheme", help="FP8, FP8_DYNAMIC, FP8_BLOCK, W8A8, W8A8_STATIC, W8A16, W4A8, or W6A16 to W2A16 and these _ASYM."
)
@click.option("--algorithm", help="rtn, rtn_mse, hqq, gptq, yaqa, signround or best (default: the scheme's).")
@click.option("--group-size", type=int, help="Input features per scale (default: the scheme's).")
@click.option("--tune", type=int, metavar="STEPS", help="Then tune all scales end to end (default: 32 for best; 0: not).")
@click.option("--target-bpw", type=float, metavar="BITS", help="Choose schemes for so many bits per weight, such as 4.25.")
@click.option("--max-kld", type=float, metavar="NATS", help="Choose schemes for so much mean KL divergence, such as 0.02.")
@click.option(
    "--smoothquant",
    metavar="ALPHA",
    help="Smooth with this alpha, 0.5 is usual; auto searches one per input, as best does; none: not at all.",
)
@click.option("--ignore", multiple=True, metavar="PATTERN", help="Leave these linears alone: a name, or re:...")
@headed
@click.option("--kv-cache", metavar="SCHEME", help="Keys and values in FP8 or INT8, with a measured scale; FP8:per_head.")
@click.option("--measurement", metavar="DIR", help="What stage 1 or unify wrote; for FP8 also Gaudi's own files.")
@click.option(
    "--calibration", metavar="FILE", help="Measure first, as stage 1 with this text, into the folder of --measurement."
)
@click.option(
    "--quantized-inputs/--original-inputs",
    default=None,
    help="Calibrate a layer on what the quantized layers before it put out, or the original ones.",
)
@click.option("--experts", metavar="POLICY", help="For experts short of tokens: error (default), all, damp, rtn or share_max.")
@click.option("--expert-tokens", type=int, help="How many it needs (default: two per input feature; 100 for static inputs).")
@click.option("--name", help="Which entry of the recipe (default: the first).")
@click.option(
    "--ranks", type=int, default=1, help="Processes (default 1); each writes a slice of each linear, unify joins them."
)
@click.option("--seed", type=int, help="Of the canary where no measurement is given (default 0).")
@click.option("--export", "artifact", metavar="DIR", help="Then write the artifact there and prove it, as export does.")
@quant_configured
@bounded
@common
def quantize(model: str, output: str, settings: tuple[str, ...], recipe: str | None, **shared: Any) -> None:
    """Stage 2: choose integers or float8 values and scales for MODEL, layer by layer.

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
    from quantflow.errors import UsageError
    from quantflow.exporting.proof import CANARY, proving

    artifact = shared["artifact"]
    if artifact is not None and shared["ranks"] != 1:
        raise UsageError(f"quantize: --export with --ranks {shared['ranks']}", "join the shards with unify, then export")
    if shared["calibration"] is not None and (shared["measurement"] is None or shared["ranks"] != 1):
        cause = f"quantize: --calibration {shared['calibration']}"
        if shared["measurement"] is None:
            raise UsageError(f"{cause} without --measurement", "name the folder that the measurement goes to")
        raise UsageError(f"{cause} with --ranks {shared['ranks']}", "measure first, then give --measurement alone")
    proved, bounds = None, (shared["max_memory"], shared["disk_offload"])
    if artifact is not None and not shared["dry_run"] and not any(bounds):  # first, so that both import torch at once
        expected = [] if shared["calibration"] is None else [CANARY]
        proved = click.get_current_context().with_resource(proving(*expected))
    from quantflow.errors import nearest
    from quantflow.planning.recipe import apply_settings, kv_cache_flag, read_yaml, recipe_from
    from quantflow.quantization import quantize as stage
    from quantflow.shipped import find_config
    from quantflow.stages.cli.quant_config_layer import entry_beneath, given, measurement_beneath

    found = given("quantize", shared["quant_config"], quiet=shared["quiet"])
    flags = {
        "scheme": shared["scheme"],
        "algorithm": shared["algorithm"],
        "group_size": shared["group_size"],
        "tune.steps": shared["tune"],
        "transforms": transforms_from(shared["smoothquant"]),
        "ignore": list(shared["ignore"]) or None,
        "head": head_from(shared["head"]),
        "kv_cache": kv_cache_flag(shared["kv_cache"]),
        "quantized_inputs": shared["quantized_inputs"],
        "target_bpw": shared["target_bpw"],
        "max_kld": shared["max_kld"],
        "experts": shared["experts"],
        "expert_tokens": shared["expert_tokens"],
    }
    name, scheme = shared["name"], shared["scheme"]
    if recipe is not None:
        data = read_yaml(find_config("recipes", recipe))
    elif scheme is not None:
        data = {"quantize": [{"name": name or scheme.lower(), "scheme": scheme}]}
    elif shared["target_bpw"] is not None or shared["max_kld"] is not None:
        data = {"quantize": [{"name": name or "mixed", "scheme": "W4A16"}]}
    elif found is not None:
        data = {"quantize": [{"name": name or "fp8", "scheme": "FP8"}]}
    else:
        raise UsageError("quantize: no scheme", "give --scheme, for example --scheme W4A16, or --target-bpw, or --recipe")
    data = overlay(apply_settings(data, settings), {"model": model, "seed": shared["seed"], **limits(shared)})
    data = overlay(data, {"calibration.source": shared["calibration"]})
    names = [entry.name for entry in recipe_from(data).quantize]
    if name not in (None, *names) or not names:
        raise UsageError(f"quantize: no entry {name or ''!r} in the recipe", nearest(name or "", names))
    position = 0 if name is None else names.index(name)
    entry = overlay(dict(data["quantize"][position]), flags)
    measurement = measurement_beneath(shared["measurement"], entry, found)
    data["quantize"][position] = entry_beneath(entry, found, model=Path(model), measurement=measurement)
    values = recipe_from(data)
    job = stage.QuantizeJob(
        model=Path(model),
        output=Path(output),
        entry=values.quantize[position],
        measurement=measurement,
        seed=values.seed,
        revision=values.revision,
        replace=shared["force"],
        resources=values.resources,
        ranks=shared["ranks"],
    )
    then: list[tuple[Callable[..., Path], Any]] = []
    if artifact is not None:
        from quantflow.exporting import export as exporting

        made = exporting.job_from(values, quantized=job.output, output=artifact, model=model, force=job.replace)
        exporting.check(made)  # before hours of quantizing, not after them
        then = [(partial(exporting.run, proved=proved), made)]
    if shared["calibration"] is not None and not shared["dry_run"]:
        _measure_first(values, job, shared)
    _run(stage, job, shared, report=_choice if job.entry.mixed else None, then=then)


@cli.command()
@click.option("-g", "--groups", multiple=True, metavar="RANKS", help="Ranks that become one: 0123, 0,1,2 or 0-7; repeat it.")
@click.option("--ranks", type=int, metavar="R", help="R groups of neighbouring ranks, instead of -g.")
@click.option("--expand", type=int, metavar="N", help="Make N tensor-parallel ranks of one, instead of merging.")
@click.option(
    "-m",
    "--measurement",
    "--measurements",
    "measurement",
    metavar="DIR",
    required=True,
    help="What `measure` or `quantize` wrote with --ranks N, or Gaudi's own files.",
)
@click.option("-o", "--output", "--out", "output", metavar="DIR", required=True, help="Where the merged ranks go.")
@click.option("--model", metavar="DIR", help="What quantized shards were made from (default: where quantize read it).")
@click.option("--allow-missing", is_flag=True, help="Go on without replicas that are missing; the result says which.")
@click.argument("more_groups", metavar="[RANKS]...", nargs=-1)
@common
def unify(
    groups: tuple[str, ...],
    more_groups: tuple[str, ...],
    measurement: str,
    output: str,
    settings: tuple[str, ...],
    recipe: str | None,
    **shared: Any,
) -> None:
    """Stage 3: merge what several ranks measured, or join what they quantized, each of them once, and say how.

    \b
    Example: quantflow unify -g 0123 4567 -m work/1-measure -o work/3-unify     eight ranks into two
             quantflow unify --ranks 2 -m work/1-measure -o work/3-unify         the same
             quantflow unify --expand 4 -m work/1-measure -o work/3-unify        one rank into four
             quantflow unify -m work/shards -o work/2-quantize                   the shards of `quantize --ranks`
             quantflow unify -g 0123 4567 -m hqt_output -o work/3-unify          Gaudi's files of eight cards
    """
    from quantflow.quantization import unify as stage

    given = [*groups, *more_groups]
    values = _recipe(recipe, settings, {"model": "unused", "unify.groups": given or None})
    counted = shared["ranks"] is not None or shared["expand"] is not None  # flags win over what the recipe says
    job = stage.UnifyJob(
        measurement=Path(measurement),
        output=Path(output),
        groups=tuple(given) if counted else values.unify.groups or (),
        ranks=shared["ranks"],
        allow_missing=shared["allow_missing"],
        expand=shared["expand"],
        replace=shared["force"],
        model=Path(shared["model"]) if shared["model"] else None,
    )
    if shared["dry_run"]:
        show(dataclasses.asdict(job), as_json=shared["as_json"], text=str(job))
        return
    with reporting(shared, job.output) as progress:
        result = stage.summary(stage.run(job, progress))
    show(result, as_json=shared["as_json"], text=f"{table(*stage.report(result))}\n{result['folder']}")


@cli.command()
@click.argument("quantized", metavar="QUANTIZED|MEASUREMENT|MODEL")
@click.option("-o", "--output", metavar="DIR", required=True, help="The artifact's folder.")
@click.option("--model", metavar="DIR", help="The source (default: where quantize read it).")
@click.option(
    "--format", "layout", help="compressed-tensors (default), inc: Gaudi's files of a measurement, or gguf: for llama.cpp."
)
@click.option("--shard-size", metavar="SIZE", help="Largest weight file (default 4GiB).")
@click.option("--device", help="Of format inc: gaudi2, gaudi3, or cpu for its emulation.")
@click.option("--scale-method", metavar="NAME", help="Of format inc (default maxabs_hw).")
@click.option("--dtype", help="Of format gguf: bf16, f16 or f32 (default: the model's).")
@click.option("--keep-orig", is_flag=True, help="Of format inc: keep what Gaudi measured beside what is written for it.")
@quant_configured
@bounded
@common
def export(
    quantized: str, output: str, model: str | None, settings: tuple[str, ...], recipe: str | None, **shared: Any
) -> None:
    """Stage 4: write QUANTIZED as an artifact and prove it in a fresh process; or MEASUREMENT or MODEL for other runtimes.

    Format inc makes Gaudi's files of a MEASUREMENT; format gguf makes llama.cpp's of a MODEL, or of an artifact's
    dequantized weights.

    \b
    Example: quantflow export work/2-quantize -o work/4-export
             quantflow export work/1-measure -o work/gaudi --format inc --device gaudi2
             quantflow export ./llama -o work/gguf --format gguf --dtype bf16
    """
    from quantflow.exporting import export as stage
    from quantflow.stages.cli.quant_config_layer import given

    found = given("export", shared["quant_config"], quiet=shared["quiet"])
    keys = {"format": "layout", **{key: key for key in ("shard_size", "device", "scale_method", "dtype")}}
    flags = {"model": model or "unused", **{f"export.{key}": shared[name] for key, name in keys.items()}, **limits(shared)}
    values = _recipe(recipe, settings, flags)
    if values.export.format == "inc":
        from quantflow.exporting import gaudi_export

        chosen: Any = {"output": output, "model": model, "options": values.export, "found": found, "force": shared["force"]}
        _run(gaudi_export, gaudi_export.job_from(quantized, **chosen, keep_originals=shared["keep_orig"]), shared)
        return
    if values.export.format == "gguf":
        from quantflow.exporting import gguf_export

        made = gguf_export.job_from(quantized, output=output, model=model, recipe=values, force=shared["force"])
        _run(gguf_export, made, shared)
        return
    _run(stage, stage.job_from(values, quantized=quantized, output=output, model=model, force=shared["force"]), shared)


@cli.command()
@click.argument("artifact")
@click.option("--baseline", metavar="DIR", required=True, help="The model that the artifact was made from.")
@click.option("--text", metavar="FILE", help="Evaluation text, not the calibration text.")
@click.option("--tokens", type=int, help="Tokens of it (default 32768).")
@click.option("--sequence-length", type=int, help="Tokens per window (default 512).")
@click.option("--gate", help="auto (default), a shipped gate or a file.")
@click.option("--allow-inconclusive", is_flag=True, default=None, help="Exit 0 when the gate cannot decide; recorded.")
@click.option("--expect", type=click.Choice(["pass", "fail"]), default="pass", help="Which verdict exits 0.")
@click.option("--report", metavar="DIR", help="Default: <artifact>-validation.")
@bounded
@common
def validate(
    artifact: str, baseline: str, settings: tuple[str, ...], recipe: str | None, report: str | None, **shared: Any
) -> None:
    """Stage 5: compare ARTIFACT with its source and let a gate decide; a failed gate exits 4.

    \b
    Example: quantflow validate work/4-export --baseline ./llama --text heldout.jsonl
    """
    from quantflow.validation import validate as stage
    from quantflow.validation.report import COLUMNS, cells

    keys = ("text", "tokens", "sequence_length", "gate", "allow_inconclusive")
    flags = {"model": baseline, **{f"validate.{key}": shared[key] for key in keys}, **limits(shared)}
    values = _recipe(recipe, settings, flags)
    job = stage.ValidateJob(
        artifact=Path(artifact),
        baseline=Path(baseline),
        report=Path(report or f"{artifact.rstrip('/')}-validation"),
        options=values.validate,
        expect=shared["expect"],
        seed=values.seed,
        replace=shared["force"],
        resources=values.resources,
    )
    if shared["dry_run"]:
        show(dataclasses.asdict(job), as_json=shared["as_json"], text=str(job))
        return
    with reporting(shared, job.report) as progress:
        result = stage.run(job, progress)
    text = f"{table(COLUMNS, [cells(result)])}\nreport: {job.report / 'report.html'}"
    show(result, as_json=shared["as_json"], text=text)
    stage.raise_for_verdict(result, allow_inconclusive=values.validate.allow_inconclusive)


@cli.command()
@click.argument("artifact")
@generating
@click.option("--backend", default="auto", show_default=True, help="auto, reference, a kernel by name, or several: a,b,auto.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda", "hpu"]), default="cpu", show_default=True)
@click.option("--decoder", default="auto", show_default=True, help="lean, transformers, or auto: lean where it can.")
@click.option(
    "--kv-cache",
    metavar="KIND",
    default="auto",
    help="float32, bfloat16, float8 or int8 (default: the artifact's, else --dtype).",
)
@click.option("--pack", is_flag=True, help="Keep the weights as kernels want them in ARTIFACT-packed, and load from there.")
@click.option("--disk-offload", is_flag=True, help="Keep one layer in memory at a time and read the next from disk.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@offline
def generate(artifact: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Continue prompts with the thin runtime, which verifies ARTIFACT first; docs/generate.md has every way.

    \b
    Example: quantflow generate work/4-export --prompt "def main():" --max-new-tokens 32
             quantflow generate work/4-export --prompts questions.jsonl --column question --chat --batch-size 8 --json
             quantflow generate work/4-export --prompt "def main():" --num-beams 4 --num-return-sequences 2
    """
    from quantflow.runtime import generation as stage
    from quantflow.stages.cli.environment import bars_wanted
    from quantflow.stages.cli.generate_job import job_from
    from quantflow.stages.cli.progress_line import ProgressLine

    del options["debug"]
    pieces: list[str] = []

    def stream(text: str) -> None:
        pieces.append(text)
        if not as_json:
            click.echo(text, nl=False)

    result = stage.run(job_from(artifact, options), stream, ProgressLine(quiet=quiet, bars=bars_wanted()))
    if result is None:  # rank 0 has it
        return
    texts = "" if pieces else "\n\n".join(output["prompt"] + output["text"] for output in result["outputs"])
    show(result, as_json=as_json, text=texts)
    stage.raise_for_difference(result)


@cli.command()
@click.argument("artifact", required=False)
@timing
@click.option("--kernels", is_flag=True, help="Time the backends on one linear each, our own and torch's, beside a plain read.")
@click.option("--scheme", "schemes", metavar="NAMES", default="W4A16,W4A8,W8A8,W8A16,FP8_DYNAMIC", help="For --kernels.")
@click.option("--shape", "shapes", metavar="OUTxIN,...", default="2048x2048,5632x2048,2048x5632", help="For --kernels.")
@click.option("--tokens", metavar="N,...", default="1,8,256", help="For --kernels: rows of the input.")
@click.option("--rounds", type=int, default=7, help="For --kernels: timed calls of each; medians are printed.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Default: float32; with --kernels bfloat16.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@offline
def bench(artifact: str | None, kernels: bool, as_json: bool, quiet: bool, **options: Any) -> None:
    """Time ARTIFACT as `generate` runs it: first and next token, per batch size; or with --kernels the linears alone.

    \b
    Example: quantflow bench work/4-export -b 1 -b 8 --input-tokens 256 --new-tokens 32
             quantflow bench --kernels --scheme W4A16,W4A8 --shape 4096x4096 --tokens 1,256
    """
    from quantflow.errors import UsageError
    from quantflow.evaluation import latency
    from quantflow.stages import bench as stage
    from quantflow.stages.cli.bench_flags import values
    from quantflow.stages.cli.environment import bars_wanted
    from quantflow.stages.cli.progress_line import ProgressLine

    if artifact is not None and kernels:
        raise UsageError(f"bench: --kernels beside an artifact, {artifact}", "give one of them")
    if artifact is not None:
        job = latency.BenchJob(artifact=Path(artifact), **values(options))
        timed = latency.run(job, ProgressLine(quiet=quiet, bars=bars_wanted()))
        if timed is not None:  # otherwise rank 0 has it
            show(timed, as_json=as_json, text=latency.text(timed))
        return
    if not kernels:
        raise UsageError("bench: nothing to time", "give an artifact, or --kernels")
    counts = [count for count in options["tokens"].split(",") if count]
    if not all(count.isdecimal() for count in counts):
        raise UsageError(f"bench: tokens {options['tokens']!r}", "write numbers, such as 1,8,256")
    linears = stage.KernelJob(
        schemes=tuple(name for name in options["schemes"].split(",") if name),
        shapes=tuple(shape for shape in options["shapes"].split(",") if shape),
        tokens=tuple(map(int, counts)),
        dtype=options["dtype"] or "bfloat16",
        rounds=options["rounds"],
    )
    result = stage.run_kernels(linears)
    show(result, as_json=as_json, text=stage.text(result))


@cli.command()
@click.argument("path")
@click.option("--backends", is_flag=True, help="Of an artifact: what would run each linear here, and why the others would not.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True, help="For --backends."
)
@offline
def inspect(path: str, backends: bool, dtype: str, as_json: bool, **_shared: Any) -> None:
    """Say what PATH is and what it holds: a model, a measurement or an artifact. Reads no weight.

    \b
    Example: quantflow inspect work/4-export
             quantflow inspect work/4-export --backends --dtype bfloat16
    """
    if backends:
        from quantflow.runtime import backend_choice

        rows = backend_choice.backends(Path(path), dtype=dtype)
        show(rows, as_json=as_json, text=_backends_text(rows))
        return
    from quantflow.artifact.inspect import summarize

    summary = summarize(Path(path))
    show(summary, as_json=as_json, text=outline(summary))


@cli.command()
@click.argument("artifact")
@offline
def verify(artifact: str, as_json: bool, **_shared: Any) -> None:
    """Check every byte of ARTIFACT against its manifest; exits 7 and names the file where one differs.

    \b
    Example: quantflow verify work/4-export
    """
    from quantflow.artifact.verify import verify as check

    report = check(Path(artifact))
    show(report, as_json=as_json, text=f"intact: {outline(report)}")


@cli.command()
@click.argument("left")
@click.argument("right")
@offline
def diff(left: str, right: str, as_json: bool, **_shared: Any) -> None:
    """Compare the manifests of two artifacts field by field; exits 0 whether they differ or not.

    \b
    Example: quantflow diff work/old work/new
    """
    from quantflow.artifact.diff import diff as compare
    from quantflow.artifact.manifest import read_manifest

    found = compare(read_manifest(Path(left)), read_manifest(Path(right)))
    rows = [(item.path, str(item.left), str(item.right)) for item in found]
    text = table(("field", left, right), rows) if rows else "no difference"
    show([{"path": path, "left": a, "right": b} for path, a, b in rows], as_json=as_json, text=text)


@cli.group()
def calibration() -> None:
    """Look at calibration text before it is used."""


@calibration.command("inspect")
@click.argument("file")
@click.option("--tokenizer", metavar="MODEL", required=True, help="The folder of the model.")
@click.option("--sequence-length", type=int, default=2048, show_default=True)
@offline
def calibration_inspect(file: str, tokenizer: str, sequence_length: int, as_json: bool, **_shared: Any) -> None:
    """Count tokens, padding, BOS, duplicates and what truncation drops.

    \b
    Example: quantflow calibration inspect text.jsonl --tokenizer ./llama
    """
    from quantflow.calibration.text import inspect_calibration, read_documents
    from quantflow.models.load import load_tokenizer

    words = load_tokenizer(tokenizer)
    summary = inspect_calibration(read_documents(file, words), words, sequence_length=sequence_length)
    show(summary, as_json=as_json, text=outline(summary))


def _recipe(
    path: str | None,
    settings: tuple[str, ...],
    flags: dict[str, Any],
    *,
    beneath: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> "Recipe":
    """Return the recipe file (or none) under --set under the flags; `beneath` fills in what none of them says."""
    from quantflow.planning.recipe import apply_settings, read_yaml, recipe_from
    from quantflow.shipped import find_config

    data = read_yaml(find_config("recipes", path)) if path else {}
    return recipe_from(beneath(overlay(apply_settings(data, settings), flags)))


def _measure_first(values: "Recipe", job: Any, shared: dict[str, Any]) -> None:
    """Measure what a quantize job needs, in this process, into the folder that it reads."""
    from quantflow.calibration import measure
    from quantflow.planning.requirements import statistics_for

    given = values.measure.stats
    todo = measure.MeasureJob(
        model=job.model,
        output=job.measurement,
        calibration=values.calibration,
        seed=values.seed,
        stats=statistics_for([job.entry]) if given is None else given,
        experts=values.measure.experts,
        replace=job.replace,
        resources=values.resources,
    )
    with reporting(shared, todo.output) as progress:
        measure.run(todo, progress)


def _entries(schemes: str) -> list[dict[str, Any]]:
    """Return the artifacts that --for names, as a recipe spells them."""
    from quantflow.planning.requirements import entries_of

    entries = entries_of(schemes)
    keys = ("name", "scheme", "algorithm", "target_bpw")
    return [{key: getattr(entry, key) for key in keys} for entry in entries]


def _statistics(names: str | None, schemes: str | None) -> list[str] | None:
    """Return the observers that --stats names or that the schemes of --for need; None where neither is given."""
    from quantflow.errors import UsageError
    from quantflow.planning.requirements import entries_of, statistics_for

    if names is not None and schemes is not None:
        raise UsageError(f"measure: --stats {names} beside --for {schemes}", "give one of them")
    if schemes is not None:
        return list(statistics_for(entries_of(schemes)))
    return None if names is None else [name for name in names.split(",") if name]


def _chosen(recipe: "Recipe", everything: tuple[str, ...]) -> tuple[str, ...]:
    """Return the observers of a measurement: those named, what the recipe's artifacts need, or everything."""
    from quantflow.planning.requirements import statistics_for

    if recipe.measure.stats is not None:
        return recipe.measure.stats
    return statistics_for(recipe.quantize) if recipe.quantize else everything


def _choice(folder: Path) -> str:
    """Return the table of the schemes that were chosen, and where the rest of it is."""
    from quantflow.artifact.canonical import read_json
    from quantflow.quantization.mixed_precision.choose import COLUMNS, PLOT, RECIPE, RECORD, rows

    chosen = table(COLUMNS, rows(read_json(folder / RECORD)))
    return f"{chosen}\nrecipe: {folder / RECIPE}\nPareto curve: {folder / PLOT}\n"


def _run(
    stage: Any,
    job: Any,
    shared: dict[str, Any],
    *,
    report: Callable[[Path], str] | None = None,
    then: Sequence[tuple[Callable[..., Path], Any]] = (),
) -> None:
    """Run a stage, and what is done `then`, and print the last folder after what `report` says of the first; one rank does."""
    from quantflow.distributed.launch import speaks

    steps = [(stage.run, job), *then]
    if shared["dry_run"]:
        jobs = [dataclasses.asdict(todo) for _, todo in steps]
        show(jobs if then else jobs[0], as_json=shared["as_json"], text="\n".join(str(todo) for _, todo in steps))
        return
    for run_part, todo in steps:
        with reporting(shared, todo.output) as progress:
            folder = run_part(todo, progress)
    if speaks():
        told = "" if report is None else report(job.output)
        show({"folder": str(folder)}, as_json=shared["as_json"], text=f"{told}{folder}")


def _backends_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a table, and every reason once."""
    cells = [(r["first"], r["scheme"], r["backend"], "x".join(map(str, r["shape"])), str(r["count"])) for r in rows]
    lines = [table(("first linear", "scheme", "backend", "shape", "linears"), cells)]
    for scheme, reasons in {r["scheme"]: r["why_not"] for r in rows}.items():
        lines += [f"\n{scheme}, not run by", *(f"  {name}: {reason}" for name, reason in reasons.items())]
    return "\n".join(lines)


def main() -> int:
    """Run the command line of this process and return its exit code."""
    process_memory.give_back_freed()
    code = exit_code(cli, sys.argv[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())

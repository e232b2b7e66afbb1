"""The stages as functions: what `import quantflow` offers, and all that the command line calls.

    from quantflow import Calibration, Quantize, export, measure, quantize, validate

    measured = measure("llama", "work/1-measure", calibration=Calibration(source="text.jsonl", samples=64))
    int4 = Quantize(name="int4", scheme="W4A16")
    quantized = quantize("llama", "work/2-quantize", artifact=int4, measurement=measured.folder)
    artifact = export(quantized.folder, "work/4-export")
    result = validate(artifact.folder, "llama", options=Validate(text="heldout.jsonl", tokens=4096))

A function takes folders, and the records of a recipe (quantflow.planning.recipe), whose fields are
the recipe's keys and the command line's options. It resumes what an earlier call left unfinished,
leaves alone what is up to date, tells a `Progress` how far it is, returns a record, and raises
`QuantflowError`: its class is the command line's exit code (quantflow.errors).

What a function needs is imported when it is called, so `import quantflow` costs nothing.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantflow.files.outputs import beside, output_folder
from quantflow.planning.recipe import (
    Calibration,
    Compute,
    Export,
    Measure,
    Quantize,
    Recipe,
    Resources,
    Validate,
)
from quantflow.progress import SILENT, Progress

if TYPE_CHECKING:
    from quantflow.benching.bench_job import BenchJob, KernelJob
    from quantflow.exporting.proof import Prover
    from quantflow.formats.gaudi.quant_config import GivenConfig
    from quantflow.measuring.continue_job import ContinueJob
    from quantflow.runtime.chat_job import ChatJob
    from quantflow.runtime.conversation import Partner
    from quantflow.runtime.generate_job import GenerateJob

Folder = str | Path
# a folder, a name on the hub (org/name), or a GGUF file: quantflow.sources.models
Model = str | Path
_ENGINES = {  # of the jobs that ranks get
    "MeasureJob": "quantflow.measuring.measure",
    "QuantizeJob": "quantflow.quantizing.quantize",
    "GenerateJob": "quantflow.runtime.generation",
    "BenchJob": "quantflow.benching.latency",
    "AnswersJob": "quantflow.validating.task_answers",
}


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What a stage left.

    Attributes:
        folder: where its result is.
    """

    folder: Path


@dataclass(frozen=True, kw_only=True)
class SchemeChoice:
    """Which schemes were chosen for the linears of an artifact.

    Attributes:
        columns, rows: a table for people, a row per scheme.
        recipe: the file that names them all, as a recipe does.
        plot: the picture of bits per weight against divergence.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    recipe: Path
    plot: Path


@dataclass(frozen=True, kw_only=True)
class QuantizeResult(StageResult):
    """What quantize left.

    Attributes:
        chosen: schemes were chosen, and `choice` says which.
    """

    chosen: bool

    def choice(self) -> SchemeChoice:
        """Return which schemes were chosen, from the folder.

        Raises:
            InputError: none were.
        """
        from quantflow.files.canonical import read_json
        from quantflow.quantizing.mixed_precision.choose import COLUMNS, PLOT, RECIPE, RECORD, rows

        table = rows(read_json(self.folder / RECORD))
        return SchemeChoice(
            columns=COLUMNS, rows=table, recipe=self.folder / RECIPE, plot=self.folder / PLOT
        )


@dataclass(frozen=True, kw_only=True)
class ArtifactResult(StageResult):
    """What make_artifact left: `folder` is the artifact's.

    Attributes:
        quantized: of the stage before it.
    """

    quantized: QuantizeResult


@dataclass(frozen=True, kw_only=True)
class UnifyResult(StageResult):
    """What unify left.

    Attributes:
        summary: which statistics were merged by which rule, or which shards were joined; plain
            data.
    """

    summary: Mapping[str, Any]

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """Return the columns and the rows of a table for people."""
        from quantflow.unifying.unify import report

        return report(dict(self.summary))


@dataclass(frozen=True, kw_only=True)
class ValidateResult(StageResult):
    """What validate found; `folder` holds validation.json and report.html.

    Attributes:
        outcome: pass, fail or inconclusive.
        values: the content of validation.json.
    """

    outcome: str
    values: Mapping[str, Any]

    def raise_for_verdict(self, *, allow_inconclusive: bool = False) -> None:
        """Do nothing where the outcome is the expected one.

        Raises:
            GateError: the gate failed, could not decide, or passed although a failure was expected.
        """
        from quantflow.validating.verdict import raise_for_verdict

        raise_for_verdict(self.values, allow_inconclusive=allow_inconclusive)


def measure(
    model: Model,
    output: Folder,
    *,
    calibration: Calibration = Calibration(),
    measuring: Measure = Measure(),
    artifacts: Sequence[Quantize] = (),
    seed: int = 0,
    revision: str | None = None,
    resources: Resources = Resources(),
    compute: Compute = Compute(),
    trust_network: bool = False,
    force: bool = False,
    progress: Progress = SILENT,
) -> StageResult:
    """Run calibration text through a model and keep statistics.

    Args:
        model: the source.
        output: gets a folder per rank.
        calibration: which text, and how much of it; no source is the shipped text.
        measuring: ranks, and which statistics; `stats` None takes what `artifacts` need, or what
            every scheme needs.
        artifacts: what will be quantized.
        seed: of the choice of documents.
        revision: of a model on the hub.
        resources: limits of memory and disk; no bit of the result depends on them.
        compute: the device that runs the layers, and in which dtype.
        trust_network: the ranks may meet at the address of somebody's torchrun, which others may
            reach.
        force: redo a finished result that was made from other inputs, instead of refusing.
        progress: is told how far it is.

    Raises:
        QuantflowError: an input, a limit or the model is refused; nothing finished is lost.
    """
    from quantflow.measuring.measure import DEFAULT_STATS, MeasureJob, run
    from quantflow.planning.requirements import statistics_for

    stats = measuring.stats
    if stats is None:
        stats = statistics_for(artifacts) if artifacts else DEFAULT_STATS
    job = MeasureJob(
        model=model_folder(model, revision=revision, progress=progress),
        output=output_folder(output, reads={"the model": model}),
        calibration=_calibration(calibration, progress),
        seed=seed,
        ranks=measuring.ranks,
        tp=measuring.tp,
        dp=measuring.dp,
        stats=stats,
        experts=measuring.experts,
        replace=force,
        resources=resources,
        compute=compute,
        trust_network=trust_network,
    )
    return StageResult(folder=run(job, progress))


def quantize(
    model: Model,
    output: Folder,
    *,
    artifact: Quantize,
    measurement: Folder | None = None,
    ranks: int = 1,
    seed: int = 0,
    revision: str | None = None,
    resources: Resources = Resources(),
    compute: Compute = Compute(),
    trust_network: bool = False,
    force: bool = False,
    progress: Progress = SILENT,
) -> QuantizeResult:
    """Choose integers or float8 values and scales for a model, layer by layer or file to file.

    Args:
        model: the source.
        output: the quantize folder; with several ranks a folder per rank, which `unify` joins.
        artifact: scheme, algorithm, and all else that a recipe says of one artifact.
        measurement: of one rank, or Gaudi's files; None where the artifact needs no statistics.
            Statistics that it lacks are measured, on its own tokens, into a folder beside it:
            `1-measure` -> `1-measure-with-gradient`.
        ranks: processes that share the work.
        seed: of the canary where no measurement is given.
        revision: of a model on the hub; of any other, a word for the manifest.
        resources: limits of memory and disk; no bit of the result depends on them.
        compute: the device that runs layers, in float32, and rounds weights; and the dtype of what
            a measurement lacks.
        trust_network: the ranks may meet at the address of somebody's torchrun, which others may
            reach.
        force: redo a finished result that was made from other inputs, instead of refusing.
        progress: is told how far it is.

    Raises:
        QuantflowError: an input, a limit or the model is refused; nothing finished is lost.
    """
    from quantflow.quantizing.missing_statistics import completed
    from quantflow.quantizing.quantize import QuantizeJob, run

    folder, where = (
        model_folder(model, revision=revision, progress=progress),
        output_folder(output, reads={"the model": model, "the measurement": measurement}),
    )
    if measurement is not None:
        measurement = completed(
            Path(measurement),
            artifact,
            model=folder,
            resources=resources,
            compute=compute,
            progress=progress,
        )
    job = QuantizeJob(
        model=folder,
        output=where,
        entry=artifact,
        measurement=None if measurement is None else Path(measurement),
        seed=seed,
        revision=revision,
        replace=force,
        resources=resources,
        compute=compute,
        ranks=ranks,
        trust_network=trust_network,
    )
    return QuantizeResult(folder=run(job, progress), chosen=artifact.mixed)


def make_artifact(
    model: Model,
    output: Folder,
    *,
    artifact: Quantize,
    calibration: Calibration = Calibration(),
    measuring: Measure = Measure(),
    options: Export = Export(),
    seed: int = 0,
    revision: str | None = None,
    resources: Resources = Resources(),
    compute: Compute = Compute(),
    force: bool = False,
    progress: Progress = SILENT,
    prover: "Prover | None" = None,
) -> ArtifactResult:
    """Measure what an artifact needs, quantize, export and prove it: three stages, each resumed where it stopped.

    What the first two write is beside the artifact: `llama-w4a16` has `llama-w4a16.work/1-measure`
    and `.../2-quantize`.

    Args:
        model: the source.
        output: the folder of the artifact.
        artifact: scheme, algorithm, and all else that a recipe says of one artifact.
        calibration: which text, and how much of it; no source is the shipped text.
        measuring: which statistics, and what experts are shown; of one rank.
        options: format and size of a weight file.
        seed: of the choice of documents.
        revision: of a model on the hub; of any other, a word for the manifest.
        resources: limits of memory and disk; no bit of the result depends on them.
        compute: the device that runs layers and rounds weights.
        force: redo an artifact that was made from other inputs, instead of refusing.
        progress: is told how far it is.
        prover: as of `export`.

    Raises:
        QuantflowError: an input, a limit or the model is refused; nothing finished is lost.
    """
    from quantflow.exporting.proof import CANARY
    from quantflow.quantizing.missing_statistics import needs_measurement

    work = work_folder(output)
    check_export(work / "2-quantize", output, options=options)
    folder = model_folder(model, revision=revision, progress=progress)
    shared: dict[str, Any] = {"revision": revision, "resources": resources, "progress": progress}
    measurement = None
    if needs_measurement(artifact, folder):
        if prover is not None:
            prover.expect(CANARY)
        measured = measure(
            folder,
            work / "1-measure",
            calibration=calibration,
            measuring=measuring,
            compute=compute,
            artifacts=[artifact],
            seed=seed,
            force=True,
            **shared,
        )
        measurement = measured.folder
    quantized = quantize(
        folder,
        work / "2-quantize",
        artifact=artifact,
        measurement=measurement,
        seed=seed,
        compute=compute,
        force=True,
        **shared,
    )
    made = export(
        quantized.folder,
        output,
        options=options,
        model=folder,
        force=force,
        prover=prover,
        **shared,
    )
    return ArtifactResult(folder=made.folder, quantized=quantized)


def needs_measurement(
    model: Model, artifact: Quantize, *, revision: str | None = None, progress: Progress = SILENT
) -> bool:
    """Return whether an artifact cannot be made from a model's weights alone; a model on the hub is downloaded.

    Raises:
        QuantflowError: the model is refused, or the artifact does not fit it.
    """
    from quantflow.quantizing import missing_statistics

    return missing_statistics.needs_measurement(
        artifact, model_folder(model, revision=revision, progress=progress)
    )


def work_folder(output: Folder) -> Path:
    """Return where `make_artifact` keeps the stages before the artifact: beside it, `llama-w4a16.work`."""
    return beside(output, ".work")


def unify(
    measurement: Folder,
    output: Folder,
    *,
    groups: Sequence[str] = (),
    ranks: int | None = None,
    expand: int | None = None,
    allow_missing: bool = False,
    model: Folder | None = None,
    force: bool = False,
    progress: Progress = SILENT,
) -> UnifyResult:
    """Merge what several ranks measured, expand one to several, or join what several ranks quantized.

    Args:
        measurement: the folder that holds the ranks; or Gaudi's files, as a folder or
            folder/prefix.
        output: gets a folder per group; shards of one group become the folder itself.
        groups: ranks that become one, `0123` or `0,1,2` or `0-7`; empty means all of them.
        ranks: so many groups of neighbouring ranks instead.
        expand: make so many ranks of one instead.
        allow_missing: go on without replicas that are missing as a whole; the result says which.
        model: what quantized shards were made from; None reads where quantize read it.
        force: redo a finished result that was made from other inputs, instead of refusing.
        progress: is told how far it is.

    Raises:
        QuantflowError: ranks that are missing, twice, foreign or damaged; groups that no card would
            hold.
    """
    from quantflow.unifying.unify import UnifyJob, run, summary

    job = UnifyJob(
        measurement=Path(measurement),
        output=output_folder(output, reads={"the measurement": measurement, "the model": model}),
        groups=tuple(groups),
        ranks=ranks,
        expand=expand,
        allow_missing=allow_missing,
        model=None if model is None else Path(model),
        replace=force,
    )
    folder = run(job, progress)
    return UnifyResult(folder=folder, summary=summary(folder))


def export(
    quantized: Folder,
    output: Folder,
    *,
    options: Export = Export(),
    model: Model | None = None,
    revision: str | None = None,
    quant_config: "GivenConfig | None" = None,
    keep_originals: bool = False,
    resources: Resources = Resources(),
    force: bool = False,
    progress: Progress = SILENT,
    prover: "Prover | None" = None,
) -> StageResult:
    """Write an artifact and prove it in a fresh process; or write a measurement or a model for another runtime.

    Args:
        quantized: a finished quantize folder, or an artifact of `make_artifact`, whose quantize
            folder is beside it; format inc takes a measurement, format gguf a model or an artifact.
        output: the folder of the artifact.
        options: format, size of a weight file, and what only some formats know.
        model: the source; None reads where quantize read it.
        revision: of a model on the hub.
        quant_config: Gaudi's, for format inc.
        keep_originals: for format inc, keep what Gaudi measured beside what is written for it.
        resources: limits of memory and disk.
        force: redo an artifact that was made from other inputs, instead of refusing.
        progress: is told how far it is.
        prover: a process that `quantflow.exporting.proof.proving` has started already; None starts
            one.

    Raises:
        QuantflowError: an input that cannot be used, a proof that does not hold; then nothing is
            published.
    """
    from quantflow.exporting import ExportRequest, exporter

    chosen = exporter(options.format)
    request = ExportRequest(
        source=model_folder(quantized, revision=revision, progress=progress)
        if chosen.takes_model
        else _layers(Path(quantized), options.format),
        output=output_folder(output, reads={"what is exported": quantized, "the model": model}),
        options=options,
        model=None
        if model is None
        else Path(model)
        if chosen.takes_model
        else model_folder(model, revision=revision, progress=progress),
        quant_config=quant_config,
        keep_originals=keep_originals,
        resources=resources,
        replace=force,
    )
    return StageResult(folder=chosen.run(chosen.job(request), progress, prover=prover))


def _layers(quantized: Path, format: str) -> Path:
    """Return the quantize folder beside an artifact of `make_artifact`, for an artifact's own format; else the folder."""
    from quantflow.files.manifest import MANIFEST_NAME
    from quantflow.formats import DEFAULT

    layers = work_folder(quantized) / "2-quantize"
    return (
        layers
        if format == DEFAULT and (quantized / MANIFEST_NAME).is_file() and layers.is_dir()
        else quantized
    )


def check_export(
    quantized: Folder, output: Folder, *, options: Export, model: Folder | None = None
) -> None:
    """Refuse what can be seen of an export before there is anything quantized.

    Args:
        quantized: where the quantize folder will be.
        output: the folder of the artifact.
        options: as of `export`.
        model: the source.

    Raises:
        UsageError: another format than an artifact's, or one folder for both.
    """
    from quantflow.exporting import EXPORTERS, ExportRequest
    from quantflow.exporting.export import check
    from quantflow.formats import DEFAULT

    source, folder = (
        None if model is None else Path(model),
        output_folder(output, reads={"the model": model}),
    )
    request = ExportRequest(source=Path(quantized), output=folder, options=options, model=source)
    check(EXPORTERS[DEFAULT].job(request))


def proving() -> AbstractContextManager["Prover"]:
    """Start the fresh process that proves an artifact before there is one, so that it imports what it needs meanwhile.

    Returns:
        A context manager; `export` takes what it yields as `prover`. The process ends with it.
    """
    from quantflow.exporting import proof

    return proof.proving()


def validate(
    artifact: Folder,
    baseline: Model,
    *,
    options: Validate = Validate(),
    report: Folder | None = None,
    expect: str = "pass",
    previous: Folder | None = None,
    cache: Folder | None = None,
    seed: int = 0,
    revision: str | None = None,
    resources: Resources = Resources(),
    compute: Compute = Compute(),
    force: bool = False,
    progress: Progress = SILENT,
) -> ValidateResult:
    """Compare an artifact with its source and let a gate decide; the verdict is in the result.

    Args:
        artifact: its folder.
        baseline: the model that it was made from.
        options: text, tokens and gate; no text is the shipped one.
        report: gets validation.json and report.html; None is `<artifact>-validation`.
        expect: `fail` where a failing gate is the expected outcome.
        previous: an older artifact of the model, or its validation.json: the newer one is compared
            with it.
        cache: a folder for what validations of one model over one text share: the noise floor, and
            what the baseline's layers put out; None is `validation-cache` beside the report.
        seed: of the resampling.
        revision: of a baseline on the hub.
        resources: limits of memory and disk.
        compute: the device that runs both models, and in which dtype.
        force: redo a finished validation that was made from other inputs, instead of refusing.
        progress: is told how far it is.

    Raises:
        QuantflowError: an input that cannot be used. A gate that fails raises nothing here:
            `raise_for_verdict` does.
    """
    from quantflow.validating.validate import ValidateJob, run

    given = beside(artifact, "-validation") if report is None else report
    folder = output_folder(
        given, flag="--report", reads={"the artifact": artifact, "the baseline": baseline}
    )
    job = ValidateJob(
        artifact=Path(artifact),
        baseline=model_folder(baseline, revision=revision, progress=progress),
        report=folder,
        options=_evaluated(options, progress),
        expect=expect,
        previous=None if previous is None else Path(previous),
        cache=None if cache is None else Path(cache),
        seed=seed,
        replace=force,
        resources=resources,
        compute=compute,
    )
    values = run(job, progress)
    return ValidateResult(folder=folder, outcome=str(values["outcome"]), values=values)


def gate(
    validation: Folder,
    *,
    previous: Folder | None = None,
    gate: str | None = None,
    allow_inconclusive: bool | None = None,
) -> ValidateResult:
    """Judge a validation once more from its validation.json, and beside that of an older artifact; loads no model.

    Args:
        validation: validation.json, or the folder that holds it.
        previous: the same of an older artifact of the model.
        gate: a shipped gate or a file; None is what the validation recorded.
        allow_inconclusive: None is what the validation recorded.

    Raises:
        QuantflowError: a file that cannot be read, or validations of different models or texts.
    """
    from quantflow.validating.recorded import GateJob, run

    path = Path(validation)
    job = GateJob(
        validation=path,
        previous=None if previous is None else Path(previous),
        gate=gate,
        allow_inconclusive=allow_inconclusive,
    )
    values = run(job)
    return ValidateResult(
        folder=path if path.is_dir() else path.parent, outcome=str(values["outcome"]), values=values
    )


def task_table(result: ValidateResult) -> tuple[Sequence[str], Sequence[Sequence[str]]] | None:
    """Return the columns and the rows of what both models scored in tasks, where there were any."""
    from quantflow.validating.task_table import COLUMNS, cells

    return (COLUMNS, cells(result.values["tasks"])) if "tasks" in result.values else None


def diagnosis_table(result: ValidateResult) -> tuple[Sequence[str], Sequence[Sequence[str]]] | None:
    """Return the columns and the rows of the linears that cost an artifact most, where a diagnosis was asked for."""
    from quantflow.validating.diagnosis_table import COLUMNS, cells

    return (COLUMNS, cells(result.values["diagnosis"])) if "diagnosis" in result.values else None


def mend_hint(result: ValidateResult) -> str | None:
    """Return what would mend an artifact, a sentence, where a diagnosis was asked for."""
    from quantflow.validating.diagnosis_table import hint

    return hint(result.values) if "diagnosis" in result.values else None


def write_tasks(path: Folder, result: ValidateResult) -> None:
    """Copy lm-eval's own document of an artifact's tasks out of a validation.

    Args:
        path: of the file that is written.
        result: of a validation with tasks.
    """
    from quantflow.files import disk

    disk.write_atomic(Path(path), (result.folder / "tasks.json").read_bytes())


def write_junit(path: Folder, result: ValidateResult) -> None:
    """Write a validation as JUnit XML: a test per metric of the gate, and per metric beside an older artifact."""
    from quantflow.validating import junit

    junit.write_junit(Path(path), result.values)


def regression_table(
    result: ValidateResult,
) -> tuple[Sequence[str], Sequence[Sequence[str]]] | None:
    """Return the columns and the rows of the comparison with an older artifact, where there was one."""
    from quantflow.validating.regression import COLUMNS, cells

    return (COLUMNS, cells(result.values)) if "regression" in result.values else None


def verdict_table(
    results: Sequence[ValidateResult],
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return the columns and the rows of a table for people: size, divergence and verdict of each artifact."""
    from quantflow.validating.report import COLUMNS, cells

    return COLUMNS, [cells(result.values) for result in results]


def write_report(path: Folder, results: Mapping[Path, ValidateResult]) -> None:
    """Write one HTML page about several artifacts.

    Args:
        path: of the page.
        results: the validation of each artifact, by its folder.
    """
    from quantflow.files.manifest import read_manifest
    from quantflow.validating import report

    rows = [
        report.row_of(result.values, read_manifest(artifact))
        for artifact, result in results.items()
    ]
    report.write_report(Path(path), rows)


def resolve(recipe: Recipe, *, progress: Progress = SILENT) -> Recipe:
    """Return a recipe with what its model decides filled in, after every mistake that can be seen was looked for.

    `model` becomes its folder, texts become files. `measure.experts` null becomes `all` where the
    model has experts, an artifact asks for all tokens and statistics are read.

    Raises:
        QuantflowError: an entry does not fit the model, a text is missing.
    """
    import dataclasses

    from quantflow.measuring.merging.grouping import parse_groups
    from quantflow.measuring.text import read_documents
    from quantflow.measuring.text_sources import text_digest
    from quantflow.models.load import open_source
    from quantflow.models.open import graph_for
    from quantflow.models.tokenizer import load_tokenizer
    from quantflow.planning import plan as planning
    from quantflow.planning.requirements import statistics_for
    from quantflow.validating.gate import check_gate
    from quantflow.validating.validate import check_compute
    from quantflow.validating.windows import evaluation_sequences

    recipe = dataclasses.replace(
        recipe, model=str(model_folder(recipe.model, revision=recipe.revision, progress=progress))
    )
    source = open_source(recipe.model)
    graph = graph_for(source.config)
    shapes = {name: info.shape for name, info in source.checkpoint.infos.items()}
    for entry in recipe.quantize:
        planning.resolve(entry, graph, shapes)
    calibration, evaluated = (
        _calibration(recipe.calibration, progress),
        _evaluated(recipe.validate, progress),
    )
    recipe = dataclasses.replace(recipe, calibration=calibration, validate=evaluated)
    for path in (calibration.source, evaluated.text):
        text_digest(Path(str(path)))
    check_gate(recipe.validate.gate)
    check_compute(recipe.validate, recipe.compute)
    documents = read_documents(str(recipe.validate.text), load_tokenizer(recipe.model))
    evaluation_sequences(
        documents, tokens=recipe.validate.tokens, sequence_length=recipe.validate.sequence_length
    )
    parse_groups(
        recipe.unify.groups or [",".join(map(str, range(recipe.measure.ranks)))],
        world=recipe.measure.ranks,
    )
    stats = (
        statistics_for(recipe.quantize) if recipe.measure.stats is None else recipe.measure.stats
    )
    asked = any(entry.experts == "all" for entry in recipe.quantize)
    if recipe.measure.experts is not None or not (stats and graph.sparse and asked):
        return recipe
    return dataclasses.replace(recipe, measure=dataclasses.replace(recipe.measure, experts="all"))


def entries(schemes: str | None) -> tuple[Quantize, ...]:
    """Return the artifacts that `W4A16:gptq,W4A16@4.25,FP8` means; None is one of every scheme.

    Raises:
        UsageError: a scheme is unknown, one stands twice, or what follows @ is no number.
    """
    from quantflow.core.scheme import PRESETS
    from quantflow.planning.requirements import entries_of

    return entries_of(",".join(PRESETS) if schemes is None else schemes)


def has_groups(scheme: str) -> bool:
    """Return whether a scheme's weights have a scale per group of inputs.

    Raises:
        SchemeError: no preset has that name.
    """
    from quantflow.core.scheme import preset

    return preset(scheme).weights.granularity == "per_group"


def plan(
    recipe: Recipe,
    *,
    measured: bool = True,
    folder: Folder = ".",
    probe: bool = False,
    progress: Progress = SILENT,
) -> Mapping[str, Any]:
    """Return what a run needs and makes, as plain data: memory, disk, bytes, bits per weight, schemes.

    Args:
        recipe: its model, artifacts, calibration, validation and limits.
        measured: artifacts that need no statistics get a measurement as well, as `run` gives it to
            all.
        folder: on the disk that will be written.
        probe: read, run and round parts of one layer, to say how long everything takes.
        progress: is told what is downloaded.

    Raises:
        QuantflowError: the model or the recipe is refused.
    """
    import dataclasses

    from quantflow.planning.forecast import PlanJob, run

    recipe = dataclasses.replace(
        recipe, model=str(model_folder(recipe.model, revision=recipe.revision, progress=progress))
    )
    job = PlanJob(recipe=recipe, measured=measured, folder=Path(folder))
    if probe:
        from quantflow.planning.probe import probe as measure_rates

        job = dataclasses.replace(job, probe=measure_rates)
    return run(job)


def generate(
    job: "GenerateJob",
    *,
    stream: Callable[[str], None] = lambda _: None,
    progress: Progress = SILENT,
) -> Mapping[str, Any] | None:
    """Continue prompts with an artifact or a model; see `quantflow.runtime.generation`.

    Args:
        job: the artifact, the prompts, and how they are continued.
        stream: takes the text of a single sequence piece by piece, its prompt first.
        progress: is told how far it is.

    Returns:
        Texts, tokens and times, as plain data. None on a rank that is not the first.
    """
    from quantflow.runtime.generation import run

    folder = model_folder(job.artifact, revision=job.revision, progress=progress)
    return run(replace(job, artifact=folder), stream, progress)


def conversation(job: "ChatJob", *, progress: Progress = SILENT) -> "Partner":
    """Return who answers in a conversation: an artifact that is loaded here, or a server.

    Args:
        job: who is talked with.
        progress: is told what is downloaded.

    Raises:
        QuantflowError: the artifact cannot be loaded or has no chat template; the server does not
            answer.
    """
    from quantflow.runtime.conversation import partner_of

    if job.artifact is not None:
        job = replace(
            job, artifact=model_folder(job.artifact, revision=job.revision, progress=progress)
        )
    return partner_of(job)


def sample_text(
    artifact: Folder,
    *,
    model: Folder,
    text: Folder,
    prompt_tokens: int,
    new_tokens: int,
    disk_offload: bool = False,
) -> tuple[str, str]:
    """Return the beginning of a text file and how an artifact continues it, by the most likely token each time.

    Args:
        artifact: its folder.
        model: the source, whose tokenizer reads the text.
        text: a file as calibration takes them.
        prompt_tokens: of its first document, at most.
        new_tokens: that are added.
        disk_offload: read the weights from disk for every token.

    Raises:
        QuantflowError: an artifact that cannot be run here, or a text without tokens.
    """
    from quantflow.errors import InputError
    from quantflow.measuring.text import read_documents
    from quantflow.models.tokenizer import load_tokenizer
    from quantflow.runtime.generate_job import GenerateJob
    from quantflow.runtime.generation import run

    tokenizer = load_tokenizer(model)
    document = next((tokens for tokens in read_documents(Path(text), tokenizer) if tokens), None)
    if document is None:
        raise InputError(f"{text}: no document has a token", "give another text")
    prompt = str(tokenizer.decode(document[:prompt_tokens], skip_special_tokens=True))
    job = GenerateJob(
        artifact=Path(artifact),
        prompts=(prompt,),
        max_new_tokens=new_tokens,
        ignore_eos=True,
        disk_offload=disk_offload,
    )
    result = run(job, lambda _: None)
    return prompt, "" if result is None else str(result["outputs"][0]["text"])


def bench(job: "BenchJob", *, progress: Progress = SILENT) -> Mapping[str, Any] | None:
    """Time an artifact or a model as `generate` runs it; see `quantflow.benching.latency`.

    Returns:
        Seconds of the first and the next tokens per batch size, as plain data. None on a rank that
        is not the first.
    """
    from quantflow.benching.latency import run

    folder = model_folder(job.artifact, revision=job.revision, progress=progress)
    baseline = None if job.baseline is None else model_folder(job.baseline, progress=progress)
    return run(replace(job, artifact=folder, baseline=baseline), progress)


def run_rank(order: Folder, *, progress: Progress, stream: Callable[[str], None]) -> None:
    """Do this rank's part of a job that `quantflow.distributed.launch.launch` started; the first rank writes the result.

    Args:
        order: the private folder with the job.
        progress: is told how far it is.
        stream: takes the text that `generate` makes, on the first rank.

    Raises:
        QuantflowError: as the stage.
    """
    from quantflow.distributed.job_file import decode
    from quantflow.distributed.launch import JOB, RESULT, launched_rank
    from quantflow.files.canonical import read_json

    job = decode(read_json(Path(order) / JOB)["job"])
    engine = import_module(_ENGINES[type(job).__name__])
    result = engine.run(
        job,
        progress=progress,
        **({"stream": stream} if type(job).__name__ == "GenerateJob" else {}),
    )
    rank = launched_rank()
    if isinstance(result, dict) and rank is not None and rank[0] == 0:
        (Path(order) / RESULT).write_text(json.dumps(result))


def bench_kernels(job: "KernelJob") -> Mapping[str, Any]:
    """Time every backend on linears of some schemes and shapes, beside a plain read of as many bytes.

    Raises:
        UsageError: an unknown scheme, shape or count.
    """
    from quantflow.benching.kernel_speed import run

    return run(job)


def backends(artifact: Folder, *, dtype: str) -> Sequence[Mapping[str, Any]]:
    """Return what would run each linear of an artifact here, and why the other backends would not; alike ones as one row.

    Args:
        artifact: its folder.
        dtype: of the inputs, float32 or bfloat16.

    Raises:
        InputError: the folder is not an artifact.
    """
    from quantflow.runtime import backend_choice

    return backend_choice.backends(Path(artifact), dtype=dtype)


def describe(
    path: Folder, *, verify: bool = True, progress: Progress = SILENT
) -> Mapping[str, Any]:
    """Return what a folder that another program quantized holds, or a GGUF file: schemes, linears, bytes, as plain data.

    Args:
        path: of the folder or the file.
        verify: decode every tensor, so that what is damaged is refused with its name; else headers
            alone are read.
        progress: is told how far it is.

    Raises:
        QuantflowError: it is neither, or damaged.
    """
    from quantflow.runtime import inspection

    place = Path(path)
    one = inspection.describe_file if place.is_file() else inspection.describe_folder
    return one(place, verify=verify, progress=progress)


def diff_values(
    left: Model,
    right: Model,
    *,
    text: Folder | None = None,
    tokens: int = 4096,
    progress: Progress = SILENT,
) -> Mapping[str, Any]:
    """Compare two folders tensor by tensor by their values, in whatever layouts; see `quantflow.validating.folder_diff`.

    Args:
        left: an artifact, another program's folder, or a model.
        right: the same.
        text: a file as calibration takes them: both run on it, and how far their predictions are
            apart is in the result.
        tokens: of the text, at most.
        progress: is told how far it is.

    Raises:
        QuantflowError: a folder or the text cannot be read.
    """
    from quantflow.measuring.text_sources import text_path
    from quantflow.validating.folder_diff import FolderDiffJob, run

    job = FolderDiffJob(
        left=model_folder(left, progress=progress),
        right=model_folder(right, progress=progress),
        text=None if text is None else text_path(str(text), progress),
        tokens=tokens,
    )
    return run(job, progress)


def dequantized(
    model: Model,
    output: Folder,
    *,
    revision: str | None = None,
    resources: Resources = Resources(),
    progress: Progress = SILENT,
) -> Path:
    """Write the weights of a quantized model, dequantized exactly, as a model that can be quantized; return its folder.

    Args:
        model: an artifact, or a folder that another program quantized.
        output: the folder; one that was made from the same files is left alone, another one
            replaced.
        revision: of a model on the hub.
        resources: limits of memory and disk.
        progress: is told how far it is.

    Raises:
        UsageError: the model is not quantized.
        QuantflowError: it cannot be read.
    """
    from quantflow.exporting import dequantized_export

    job = dequantized_export.DequantizedExportJob(
        source=model_folder(model, revision=revision, progress=progress),
        output=output_folder(output, reads={"the model": model}),
        dtype=None,
        replace=True,
        resources=resources,
    )
    return dequantized_export.run(job, progress)


def merged(
    model: Model,
    adapter: Folder,
    output: Folder,
    *,
    revision: str | None = None,
    progress: Progress = SILENT,
) -> Path:
    """Write a model with a LoRA adapter in its weights, as a model that can be quantized; return its folder.

    Args:
        model: one that is not quantized.
        adapter: a folder in PEFT's files.
        output: the folder; one that was made from the same files is left alone, another one
            replaced.
        revision: of a model on the hub.
        progress: is told how far it is.

    Raises:
        QuantflowError: one of them cannot be read, or they do not belong together.
    """
    from quantflow.exporting import merged_adapter

    job = merged_adapter.MergedAdapterJob(
        source=model_folder(model, revision=revision, progress=progress),
        adapter=Path(adapter),
        output=output_folder(output, reads={"the model": model, "the adapter": adapter}),
    )
    return merged_adapter.run(job, progress)


def continue_prompts(job: "ContinueJob", *, progress: Progress = SILENT) -> Mapping[str, Any]:
    """Have a model continue prompts, and write the token ids that generating them runs, a calibration text for `measure`.

    Returns:
        `file`, `sequences`, `prompt_tokens`, `new_tokens`.

    Raises:
        QuantflowError: the model or the prompts cannot be read, or not be decoded.
    """
    from quantflow.measuring.continued import run

    return run(replace(job, model=model_folder(job.model, progress=progress)), progress)


def inspect_calibration(
    file: Folder, *, tokenizer: Folder, sequence_length: int
) -> Mapping[str, Any]:
    """Return the tokens, padding, BOS, duplicates and truncation of a calibration text, as plain data.

    Args:
        file: a text as `Calibration.source` names it.
        tokenizer: the folder of the model.
        sequence_length: tokens; what is longer is truncated.

    Raises:
        InputError: text or tokenizer cannot be read.
    """
    from quantflow.measuring.text import inspect_calibration as inspect
    from quantflow.measuring.text import read_documents
    from quantflow.measuring.text_sources import text_path
    from quantflow.models.tokenizer import load_tokenizer

    words, path = (
        load_tokenizer(model_folder(tokenizer, progress=SILENT)),
        text_path(str(file), SILENT),
    )
    return inspect(read_documents(path, words), words, sequence_length=sequence_length)


def names_model(text: str) -> bool:
    """Return whether a word names a model and not a recipe."""
    from quantflow.sources import models

    return models.names_model(text)


def model_folder(model: Model, *, revision: str | None = None, progress: Progress = SILENT) -> Path:
    """Return the folder of a model or an artifact: one on the hub is downloaded, a GGUF file imported once.

    Args:
        model: a folder, a name on the hub (org/name), or a GGUF file.
        revision: of a model on the hub.
        progress: is told what is downloaded or made.

    Raises:
        QuantflowError: there is no such model, or it cannot be used.
    """
    path = Path(model)
    if path.is_dir():  # needs nothing imported
        return path
    from quantflow.sources import models

    return models.model_folder(model, revision=revision, progress=progress)


def _calibration(calibration: Calibration, progress: Progress) -> Calibration:
    """Return a calibration whose source is a file or a folder."""
    import dataclasses

    from quantflow.measuring.text_sources import text_path
    from quantflow.shipped import CALIBRATION

    source = CALIBRATION if calibration.source is None else text_path(calibration.source, progress)
    return dataclasses.replace(calibration, source=str(source))


def _evaluated(options: Validate, progress: Progress) -> Validate:
    """Return a validation whose text is a file or a folder."""
    import dataclasses

    from quantflow.measuring.text_sources import text_path
    from quantflow.shipped import EVALUATION

    text = EVALUATION if options.text is None else text_path(options.text, progress)
    return dataclasses.replace(options, text=str(text))


def read_quant_config(
    name: str, *, verb: str, quiet: bool = False
) -> "tuple[GivenConfig, list[str]]":
    """Return a QUANT_CONFIG, a file or a shipped one by its name, and its keys that mean nothing to a verb.

    Raises:
        UsageError: there is no such file, its mode belongs to another verb, a value is wrong.
        InputError: it cannot be read.
    """
    from quantflow.formats.gaudi import quant_config

    path = quant_config.find_quant_config(name)
    config = quant_config.read_quant_config(path)
    quant_config.require_mode(config, verb)
    given = quant_config.GivenConfig(config=config, path=path, quiet=quiet)
    return given, quant_config.without_meaning(config, verb)


def under_quant_config(
    entry: Mapping[str, Any], given: "GivenConfig", *, model: Folder, measurement: Path | None
) -> tuple[dict[str, Any], list[str]]:
    """Return an entry of a recipe with what a QUANT_CONFIG says about FP8 where the entry says nothing, and notes about it.

    Raises:
        InputError: the model or the measurement cannot be opened.
        UnsupportedError: its family is not known.
    """
    from quantflow.quantizing import quant_config_defaults

    return quant_config_defaults.under_quant_config(
        entry, given.config, model=Path(model), measurement=measurement
    )


def quant_config_measurement(given: "GivenConfig") -> Path:
    """Return the measurement that a QUANT_CONFIG's dump_stats_path names: Gaudi's files, or a folder of ours.

    Raises:
        UsageError: both are there.
        InputError: neither is there.
    """
    from quantflow.quantizing import quant_config_defaults

    return quant_config_defaults.quant_config_measurement(given.config)

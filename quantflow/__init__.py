"""quantflow turns a Hugging Face causal LM into a proven FP8, INT8 or INT4 artifact.

    from quantflow import Calibration, Quantize, export, measure, quantize, validate

    measured = measure("llama", "work/1-measure", calibration=Calibration(source="text.jsonl"))
    int4 = Quantize(name="int4", scheme="W4A16")
    quantized = quantize("llama", "work/2-quantize", entry=int4, measurement=measured.folder)
    artifact = export(quantized.folder, "work/4-export")
    result = validate(artifact.folder, "llama")

A stage is a frozen record, its job, whose fields are its settings: `measure(model, output, ...)` is
`MeasureJob(model=model, output=output, ...).run()`. A job resumes what an earlier run left
unfinished, leaves alone what is up to date, tells a `Progress` how far it is, returns a record, and
raises `QuantflowError`, whose class is the command line's exit code (quantflow.errors).

Everything follows one equation: `real = scale * (qvalue - zero_point)`. Names are imported on first
use, so `import quantflow` costs nothing. It says how long threads of torch wait for each other,
where the environment does not (quantflow.cpu_threads).
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantflow import cpu_threads

if TYPE_CHECKING:
    from quantflow.exporting.artifact_job import ArtifactResult
    from quantflow.exporting.job import ExportResult
    from quantflow.measuring.job import MeasureResult
    from quantflow.planning.recipe import Quantize, Recipe
    from quantflow.quantizing.job import QuantizeResult
    from quantflow.unifying.job import UnifyResult
    from quantflow.validating.job import ValidateResult

__version__ = "0.1.0"
cpu_threads.sleep_soon()  # before anything imports torch
_HOMES = {
    "ALGORITHMS": "quantflow.algorithms",
    "ArtifactJob": "quantflow.exporting.artifact_job",
    "BACKENDS": "quantflow.backends",
    "BenchJob": "quantflow.benching.bench_job",
    "Calibration": "quantflow.planning.recipe",
    "Compute": "quantflow.planning.recipe",
    "Export": "quantflow.planning.recipe",
    "ExportJob": "quantflow.exporting.job",
    "FORMATS": "quantflow.formats",
    "GateJob": "quantflow.validating.job",
    "GenerateJob": "quantflow.runtime.generate_job",
    "LinearScheme": "quantflow.core.scheme",
    "Measure": "quantflow.planning.recipe",
    "MeasureJob": "quantflow.measuring.job",
    "OBSERVERS": "quantflow.observers",
    "PRESETS": "quantflow.core.scheme",
    "PlanJob": "quantflow.planning.plan_job",
    "Progress": "quantflow.progress",
    "QTensor": "quantflow.core.qtensor",
    "QuantLinear": "quantflow.runtime.linear",
    "QuantflowError": "quantflow.errors",
    "Quantize": "quantflow.planning.recipe",
    "QuantizeJob": "quantflow.quantizing.job",
    "Recipe": "quantflow.planning.recipe",
    "Resources": "quantflow.planning.recipe",
    "ServeJob": "quantflow.server.settings",
    "TensorScheme": "quantflow.core.scheme",
    "UnifyJob": "quantflow.unifying.job",
    "Validate": "quantflow.planning.recipe",
    "ValidateJob": "quantflow.validating.job",
    "load": "quantflow.runtime.load",
    "pipeline": "quantflow.runtime.text_pipeline",
    "preset": "quantflow.core.scheme",
    "verify": "quantflow.files.verify",
}
_STAGES = ("measure", "quantize", "unify", "export", "validate", "make_artifact")
_OTHERS = ("bench", "gate", "generate", "plan", "serve")
__all__ = sorted([*_HOMES, *_STAGES, *_OTHERS])


def measure(model: str | Path, output: str | Path, **job: Any) -> "MeasureResult":
    """Run calibration text through a model and keep statistics: the fields of `MeasureJob`."""
    result: MeasureResult = _run("MeasureJob", job, model=model, output=output)
    return result


def quantize(
    model: str | Path, output: str | Path, *, entry: "Quantize", **job: Any
) -> "QuantizeResult":
    """Choose qvalues and scales for a model: the fields of `QuantizeJob`."""
    result: QuantizeResult = _run(
        "QuantizeJob", {"entry": entry, **job}, model=model, output=output
    )
    return result


def unify(measurement: str | Path, output: str | Path, **job: Any) -> "UnifyResult":
    """Merge ranks that measured, or join ranks that quantized: the fields of `UnifyJob`."""
    result: UnifyResult = _run("UnifyJob", job, measurement=measurement, output=output)
    return result


def export(source: str | Path, output: str | Path, **job: Any) -> "ExportResult":
    """Write an artifact and prove it in a fresh process: the fields of `ExportJob`."""
    result: ExportResult = _run("ExportJob", job, source=source, output=output)
    return result


def validate(artifact: str | Path, baseline: str | Path, **job: Any) -> "ValidateResult":
    """Compare an artifact with its source and let a gate decide: the fields of `ValidateJob`."""
    result: ValidateResult = _run("ValidateJob", job, artifact=artifact, baseline=baseline)
    return result


def make_artifact(
    model: str | Path, output: str | Path, *, entry: "Quantize", **job: Any
) -> "ArtifactResult":
    """Measure, quantize, export and prove in one call: the fields of `ArtifactJob`."""
    result: ArtifactResult = _run(
        "ArtifactJob", {"entry": entry, **job}, model=model, output=output
    )
    return result


def gate(validation: str | Path, **job: Any) -> "ValidateResult":
    """Judge a validation once more, from its validation.json: the fields of `GateJob`."""
    result: ValidateResult = _run("GateJob", job, validation=validation)
    return result


def plan(recipe: "Recipe", **job: Any) -> dict[str, Any]:
    """What a run needs and makes, before it runs: the fields of `PlanJob`."""
    result: dict[str, Any] = _run("PlanJob", {"recipe": recipe, **job})
    return result


def generate(artifact: str | Path, **job: Any) -> dict[str, Any] | None:
    """Continue prompts with an artifact or a model: the fields of `GenerateJob`."""
    result: dict[str, Any] | None = _run("GenerateJob", job, artifact=artifact)
    return result


def bench(artifact: str | Path, **job: Any) -> dict[str, Any] | None:
    """Time an artifact or a model as `generate` runs it: the fields of `BenchJob`."""
    result: dict[str, Any] | None = _run("BenchJob", job, artifact=artifact)
    return result


def serve(artifact: str | Path, **job: Any) -> None:
    """Serve an artifact or a model over HTTP until the process ends: the fields of `ServeJob`."""
    _run("ServeJob", job, artifact=artifact)


def _run(name: str, job: dict[str, Any], **paths: str | Path) -> Any:
    """Run a job that is given by its fields; `progress`, `prover` and `stream` go to its `run`."""
    running = {key: job.pop(key) for key in ("progress", "prover", "stream") if key in job}
    record = __getattr__(name)
    return record(**{key: Path(path) for key, path in paths.items()}, **job).run(**running)


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'quantflow' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

"""Stage 2, quantize: choose qvalues and scales, one decoder layer at a time.

Reads    the model folder; a measurement of one rank, when the scheme, transforms or algorithm need statistics
Writes   <o>/layers/<index>.safetensors and .json, canary.safetensors, canary.json, quantize.json, DONE.json
Resumes  layer by layer: a finished layer whose state key and hash hold is read back instead of quantized again
Fails    2 the recipe does not fit the model, 3 unusable model or measurement, 5 the folder is held, 6 unsupported family
"""

import hashlib
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

from quantflow.algorithms import ALGORITHMS
from quantflow.artifact.canonical import canonical_json, digest_of, file_digest, read_json
from quantflow.artifact.safetensors_header import read_header
from quantflow.errors import InputError, UsageError
from quantflow.measurements.record import Measurement, read_measurement
from quantflow.models.capture import LayerStream, State
from quantflow.models.graph import Graph, Layer, graph_for
from quantflow.models.load import Source, fingerprint, materialize_, open_source
from stages import _workspace
from stages._config import Quantize
from stages._layer import FORMAT, LayerWork, install, quantize_layer
from stages._plan import Plan, resolve
from stages._progress import Progress

VERSION = 1  # of what this stage computes; part of every state key
CANARY_TOKENS = 64
PARTS = ("layers", "canary.safetensors", "canary.json", "quantize.json")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One artifact to be quantized.

    Attributes:
        model: the source folder.
        measurement: the folder of a measurement of one rank, or None.
        replace: redo a finished result that was made from other inputs, instead of refusing.
    """

    model: Path
    output: Path
    entry: Quantize
    measurement: Path | None = None
    seed: int = 0
    revision: str | None = None
    replace: bool = False


def run(job: Job, progress: Progress) -> Path:
    """Quantize the model and return the finished folder; a folder that is up to date is left alone."""
    source = open_source(job.model)
    graph = graph_for(source.config)
    shapes = {name: info.shape for name, (_, info) in source.checkpoint.tensors.items()}
    plan = resolve(job.entry, graph, shapes)
    measurement = _measurement(job, plan, source)
    inputs = _inputs(job, plan, source, measurement)
    with _workspace.locked(job.output), single_threaded(), torch.no_grad():
        if _workspace.is_up_to_date(job.output, inputs):
            progress.say(f"quantize {job.entry.name}: up to date")
            return job.output
        _workspace.refuse_other_result(job.output, inputs, force=job.replace, parts=PARTS)
        (job.output / "layers").mkdir(parents=True, exist_ok=True)
        for path in (job.output / "layers").iterdir():  # of a model with more layers, or of a write that was cut off
            if path.stem not in {f"{layer.index:05d}" for layer in graph.layers}:
                path.unlink()
        (job.output / _workspace.DONE).unlink(missing_ok=True)
        _quantize(job, plan, source, graph, measurement, digest_of(inputs), progress)
        _workspace.write_atomic(job.output / "quantize.json", canonical_json(_summary(job, plan, measurement)))
        _workspace.finish(job.output, stage="quantize", inputs=inputs)
    return job.output


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run torch on one thread: GEMM, Cholesky and reductions give other bits on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def tools() -> dict[str, str]:
    """Return what else decides the bits: library versions and the instruction set."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def tensor_hash(tensor: Tensor) -> str:
    """Return the sha256 of a tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _measurement(job: Job, plan: Plan, source: Source) -> Measurement | None:
    if job.measurement is None:
        if plan.needs_measurement:
            raise UsageError(
                f"{plan.name}: {job.entry.scheme} with {plan.algorithm} needs {', '.join(sorted(plan.needs))}, none is given",
                "run `quantflow measure` and give its folder with --measurement",
            )
        return None
    folder = job.measurement
    if not (folder / "measurement.json").exists():
        ranks = sorted(folder.glob("rank-*-of-*"))
        if len(ranks) > 1:
            raise InputError(f"{folder}: holds {len(ranks)} ranks, quantize reads one", "run `quantflow unify` on it first")
        folder = ranks[0] if ranks else folder
    if _workspace.done(folder) is None and _workspace.done(folder.parent) is None:
        raise InputError(f"{folder}: is unfinished or missing (no DONE.json)", "run `quantflow measure`; it continues")
    measurement = read_measurement(folder)
    expected, found = fingerprint(source.checkpoint), measurement.meta["model"]["fingerprint"]
    if expected != found:
        raise InputError(
            f"{folder}: measured on model {found[:16]}, {job.model} is {expected[:16]}",
            "measure this model, or give the measurement that belongs to it",
        )
    if measurement.meta["mesh"]["world"] != 1:
        raise InputError(f"{folder}: one of {measurement.meta['mesh']['world']} ranks", "run `quantflow unify` first")
    return measurement


def _inputs(job: Job, plan: Plan, source: Source, measurement: Measurement | None) -> dict[str, Any]:
    return {
        "model": fingerprint(source.checkpoint),
        "recipe": _recipe(job.entry),
        "plan": plan.as_json(),
        "measurement": None if measurement is None else measurement.meta["digest"],
        "seed": job.seed,
        "revision": job.revision,
        "versions": {"quantize": VERSION, plan.algorithm: ALGORITHMS[plan.algorithm].VERSION},
        "tools": tools(),
    }


def _recipe(entry: Quantize) -> dict[str, Any]:
    """Return the recipe's words about this artifact; what is expected of it is validate's affair."""
    return {key: value for key, value in asdict(entry).items() if key != "expect"}


def _summary(job: Job, plan: Plan, measurement: Measurement | None) -> dict[str, Any]:
    """Return what export needs to know besides the layers."""
    about = None
    if measurement is not None:
        meta = measurement.meta
        hashes = [tensor_hash(sequence[:CANARY_TOKENS]) for sequence in measurement.sequences]
        about = {key: meta[key] for key in ("digest", "calibration", "mesh", "dtype", "seed", "counts")}
        about["sequence_heads"] = hashes
    return {
        "source": {"folder": str(job.model), "name": job.model.resolve().name, "revision": job.revision},
        "recipe": {**_recipe(job.entry), "seed": job.seed},
        "plan": plan.as_json(),
        "measurement": about,
    }


def _quantize(
    job: Job,
    plan: Plan,
    source: Source,
    graph: Graph,
    measurement: Measurement | None,
    key: str,
    progress: Progress,
) -> None:
    """Bring every layer's file up to date and carry the canary, and the calibration where needed, through the model."""
    stream = LayerStream(source, graph)
    tokens = _canary_tokens(source, measurement, job.seed)
    (canary,) = stream.begin([tokens])
    states: list[State] = []
    if plan.needs_hessian and measurement is not None:
        states = stream.begin(measurement.sequences)
    hashes = []
    for layer in progress.steps(graph.layers, stage=f"quantize {plan.name}", unit="layer"):
        with stream.layer(layer.index) as module, _linears_restored(module):
            path = job.output / "layers" / f"{layer.index:05d}.safetensors"
            layer_key = digest_of([key, layer.index])
            if _finished(path, layer_key):
                _read_back(module, layer, plan, path)
            else:
                work = LayerWork(
                    stream=stream,
                    module=module,
                    layer=layer,
                    plan=plan,
                    stored=source.read([name for name in source.names if name.startswith(f"{layer.prefix}.")]),
                    statistics={} if measurement is None else _input_statistics(measurement, layer),
                    canary=canary,
                )
                quantize_layer(work, states=states)
                _write_layer(path, work, layer_key)
            stream.advance(module, [canary])
            stream.advance(module, states if layer is not graph.layers[-1] else [])
            hashes.append(tensor_hash(canary.hidden))
    logits = stream.finish(canary.hidden)
    _save(job.output / "canary.safetensors", {"tokens": tokens, "logits": logits})
    _workspace.write_atomic(job.output / "canary.json", canonical_json({"layers": hashes, "logits": tensor_hash(logits)}))


def _canary_tokens(source: Source, measurement: Measurement | None, seed: int) -> Tensor:
    """Return the token ids [S] that prove the artifact: the head of the first calibration sequence, or seeded ones."""
    if measurement is not None:
        return measurement.sequences[0][:CANARY_TOKENS]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(source.config.vocab_size, (CANARY_TOKENS,), generator=generator)


def _input_statistics(measurement: Measurement, layer: Layer) -> dict[str, Mapping[str, Tensor]]:
    """Return, per linear of the layer, the statistics of its input."""
    found: dict[str, dict[str, Tensor]] = {name: {} for name in layer.linears}
    for key, tensor in measurement.statistics.items():
        name, site, statistic = key.split("|")
        if site == "input" and name in found:
            found[name][statistic] = tensor
    return dict(found)


def _finished(path: Path, key: str) -> bool:
    """Return whether a layer's file is complete, undamaged and made from the same inputs."""
    record = path.with_suffix(".json")
    if not path.is_file() or not record.is_file():
        return False
    try:
        state = read_json(record)
    except InputError:  # a damaged record is redone, never used
        return False
    return bool(state.get("key") == key and state.get("sha256") == file_digest(path))


def _write_layer(path: Path, work: LayerWork, key: str) -> None:
    _save(path, work.tensors)
    record = {
        "key": key,
        "sha256": file_digest(path),
        "errors": work.errors,
        "decisions": work.decisions,
        "changed": sorted(set(work.changed)),
    }
    _workspace.write_atomic(path.with_suffix(".json"), canonical_json(record))


def _read_back(module: nn.Module, layer: Layer, plan: Plan, path: Path) -> None:
    """Put a finished layer's tensors into its module."""
    read_header(path)
    tensors = safetensors.torch.load(path.read_bytes())
    biases = {f"{name}.bias" for name in layer.linears}
    for name in layer.linears:
        scheme = plan.schemes[name]
        if scheme is not None:
            parts = {key: tensors.pop(key) for key in FORMAT.tensor_names(name, scheme)}
            install(module, layer.relative(name), FORMAT.decode(name, parts, scheme))
    rest = {layer.relative(name): tensor for name, tensor in tensors.items() if name not in biases}
    materialize_(module, rest, dtype=torch.float32)


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    contiguous = {name: tensors[name].contiguous() for name in sorted(tensors)}
    temporary.write_bytes(safetensors.torch.save(contiguous))
    _workspace.commit_file(temporary, path)


@contextmanager
def _linears_restored(module: nn.Module) -> Iterator[None]:
    """Undo, at the end, every replacement of a linear inside the block: the model's skeleton is used again."""
    originals = {name: child for name, child in module.named_modules() if isinstance(child, nn.Linear)}
    try:
        yield
    finally:
        for name, child in originals.items():
            module.set_submodule(name, child)

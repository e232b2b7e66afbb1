"""Stage 1, measure: run the calibration text through the model and remember what each tensor looked like.

Reads    the model folder and a calibration file
Writes   <o>/rank-RRR-of-WWW/: statistics.safetensors, calibration.safetensors, measurement.json, DONE.json
Resumes  a finished rank is left alone, an unfinished one starts again; the folder of a rank appears at once
Fails    3 unusable model or text, 5 the folder is held, 6 unsupported family

With N ranks torchrun starts N processes; rank r measures every N-th sequence, and unify merges them.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from quantflow.artifact.canonical import file_digest
from quantflow.errors import UsageError
from quantflow.measurements.record import LAYOUT_VERSION, Measurement, write_measurement
from quantflow.models.calibration import hash_sequences, read_documents, select
from quantflow.models.capture import KVRecorder, LayerStream, watch
from quantflow.models.graph import Graph, Layer, graph_for
from quantflow.models.load import Source, fingerprint, load_tokenizer, open_source
from quantflow.observers import OBSERVERS
from stages import _workspace
from stages._config import Calibration, launched_rank, nearest
from stages._progress import Progress
from stages._ranks import die_with_parent, launch
from stages.quantize import single_threaded, tools

VERSION = 1
PARTS = ("statistics.safetensors", "calibration.safetensors", "measurement.json")
DEFAULT_STATS = ("amax", "channel_amax", "min_max", "mean_abs", "histogram")
TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One measurement.

    Attributes:
        stats: observers of every linear's input; outputs, weights, K and V get amax.
        replace: redo a finished result that was made from other inputs, instead of refusing.
        arguments: the command line after `quantflow`, which torchrun's processes get again.
    """

    model: Path
    output: Path
    calibration: Calibration
    seed: int = 0
    ranks: int = 1
    stats: tuple[str, ...] = DEFAULT_STATS
    replace: bool = False
    arguments: tuple[str, ...] = field(default=())


def run(job: Job, progress: Progress) -> Path:
    """Measure and return the folder that holds the ranks; finished ranks are left alone."""
    for name in job.stats:
        if name not in OBSERVERS:
            raise UsageError(f"statistic {name!r} is unknown", nearest(name, list(OBSERVERS)))
    if job.ranks < 1:
        raise UsageError(f"ranks={job.ranks}", "give 1 or more")
    launched = launched_rank()
    if launched is not None:
        _join(job, progress, rank=launched[0], world=launched[1])
    elif job.ranks > 1:
        _launch(job, progress)
    else:
        _measure_rank(job, progress, rank=0, world=1)
    return job.output


def rank_folder(output: Path, rank: int, world: int) -> Path:
    """Return the folder of one rank."""
    return output / f"rank-{rank:03d}-of-{world:03d}"


def _launch(job: Job, progress: Progress) -> None:
    """Start torchrun with one process per rank, after the mistakes that every rank would stumble over were looked for."""
    source = open_source(job.model)
    graph_for(source.config)
    inputs = _inputs(job, source, world=job.ranks)
    folders = [rank_folder(job.output, rank, job.ranks) for rank in range(job.ranks)]
    if all(_workspace.is_up_to_date(folder, {**inputs, "rank": rank}) for rank, folder in enumerate(folders)):
        progress.say("measure: up to date")
        return
    for rank, folder in enumerate(folders):
        _workspace.refuse_other_result(folder, {**inputs, "rank": rank}, force=job.replace, parts=PARTS)
    calibration_sequences(job.calibration, job.model, source, seed=job.seed, world=job.ranks)
    launch(job.arguments, ranks=job.ranks, progress=progress)


def _join(job: Job, progress: Progress, *, rank: int, world: int) -> None:
    """Measure one rank under torchrun; ranks wait for each other at the end."""
    die_with_parent()
    distributed.init_process_group("gloo", timeout=TIMEOUT)
    try:
        _measure_rank(job, Progress(quiet=progress.quiet or rank > 0), rank=rank, world=world)
        distributed.monitored_barrier(timeout=timedelta(hours=24), wait_all_ranks=True)
    finally:
        distributed.destroy_process_group()


def _inputs(job: Job, source: Source, *, world: int) -> dict[str, Any]:
    if job.calibration.source is None:
        raise UsageError("calibration: no source", "give --calibration FILE or the recipe's calibration.source")
    tokenizer = {
        name: file_digest(source.checkpoint.folder / name)
        for name in source.checkpoint.files
        if name.startswith(("tokenizer", "special_tokens", "chat_template", "vocab", "merges"))
    }
    return {
        "model": fingerprint(source.checkpoint),
        "tokenizer": tokenizer,
        "calibration": {**asdict(job.calibration), "source": file_digest(Path(job.calibration.source))},
        "seed": job.seed,
        "stats": list(job.stats),
        "world": world,
        "version": VERSION,
        "tools": tools(),
    }


def _measure_rank(job: Job, progress: Progress, *, rank: int, world: int) -> None:
    source = open_source(job.model)
    graph = graph_for(source.config)
    folder = rank_folder(job.output, rank, world)
    inputs = {**_inputs(job, source, world=world), "rank": rank}
    with _workspace.locked(folder), single_threaded(), torch.no_grad():
        if _workspace.is_up_to_date(folder, inputs):
            progress.say("measure: up to date")
            return
        _workspace.refuse_other_result(folder, inputs, force=job.replace, parts=PARTS)
        sequences = calibration_sequences(job.calibration, job.model, source, seed=job.seed, world=world)
        mine = list(range(rank, len(sequences), world))
        statistics = _statistics(
            LayerStream(source, graph), graph, [sequences[i] for i in mine], stats=job.stats, progress=progress
        )
        meta = _meta(job, source, graph, sequences, mine, rank=rank, world=world)
        with _workspace.publish(folder, stage="measure", inputs=inputs) as temporary:
            measurement = Measurement(meta=meta, statistics=statistics, sequences=[sequences[i] for i in mine], indices=mine)
            write_measurement(temporary, measurement)


def calibration_sequences(calibration: Calibration, model: Path, source: Source, *, seed: int, world: int = 1) -> list[Tensor]:
    """Return the token ids of the calibration set, in sample order, int64 [S] each."""
    limit = int(getattr(source.config, "max_position_embeddings", 2048))
    length = calibration.sequence_length or min(2048, limit)
    if length > limit:
        raise UsageError(f"calibration: sequence_length={length}, the model has {limit} positions", f"use at most {limit}")
    tokenizer = load_tokenizer(model)
    documents = read_documents(Path(str(calibration.source)), tokenizer)
    sequences = select(documents, samples=calibration.samples, sequence_length=length, seed=seed, pack=calibration.pack)
    if len(sequences) < world:
        raise UsageError(f"measure: {len(sequences)} sequences for {world} ranks", "use fewer ranks or more samples")
    return sequences


def _statistics(
    stream: LayerStream, graph: Graph, sequences: Sequence[Tensor], *, stats: Sequence[str], progress: Progress
) -> dict[str, Tensor]:
    """Return every statistic of every layer, by `<source name>|<site>|<statistic>`."""
    states = stream.begin(sequences)
    found: dict[str, Tensor] = {}
    for layer in progress.steps(graph.layers, stage="measure", unit="layer"):
        with stream.layer(layer.index) as module, ExitStack() as stack:
            observers = _observe(module, layer, stats, stack)
            cache = KVRecorder(_kv_callback(observers, layer.attention))
            stream.advance(module, states, cache=cache)
        for site, kinds in observers.items():
            for observer in kinds:
                found |= {f"{site}|{name}": tensor for name, tensor in observer.state().items()}
        for group in layer.groups:  # linears of a group see one input: observed once, recorded under each name
            shared = f"{group.linears[0]}|input|"
            for key in [key for key in found if key.startswith(shared)]:
                found |= {f"{name}|input|{key.removeprefix(shared)}": found[key] for name in group.linears[1:]}
    return found


def _observe(module: nn.Module, layer: Layer, stats: Sequence[str], stack: ExitStack) -> dict[str, list[Any]]:
    """Attach observers to a layer until `stack` closes; `<source name>|<site>` -> observers."""
    observers: dict[str, list[Any]] = {}
    for group in layer.groups:
        for name in group.linears:
            linear: Any = module.get_submodule(layer.relative(name))
            weight = linear.weight
            observers[f"{name}|output"] = [OBSERVERS["amax"](features=weight.shape[0])]
            observers[f"{name}|weight"] = [OBSERVERS["amax"](features=weight.shape[1])]
            observers[f"{name}|weight"][0].update(weight)
            if name == group.linears[0]:
                observers[f"{name}|input"] = [OBSERVERS[kind](features=weight.shape[1]) for kind in stats]
            callback = _linear_callback(observers.get(f"{name}|input", []), observers[f"{name}|output"])
            stack.enter_context(watch(module, {layer.relative(name): callback}))
    return observers


def _linear_callback(inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[Tensor, Tensor], None]:
    def observe(x: Tensor, y: Tensor) -> None:
        for observer in inputs:
            observer.update(x)
        for observer in outputs:
            observer.update(y)

    return observe


def _kv_callback(observers: dict[str, list[Any]], attention: str) -> Callable[[int, Tensor, Tensor], None]:
    def observe(_index: int, key: Tensor, value: Tensor) -> None:
        for site, tensor in (("k_cache", key), ("v_cache", value)):
            kinds = observers.setdefault(f"{attention}|{site}", [OBSERVERS["amax"](features=tensor.shape[-1])])
            kinds[0].update(tensor)

    return observe


def _meta(
    job: Job, source: Source, graph: Graph, sequences: Sequence[Tensor], mine: Sequence[int], *, rank: int, world: int
) -> dict[str, Any]:
    shapes = {name: list(info.shape) for name, info in source.checkpoint.infos.items()}
    linears = {
        name: {"kind": "replicated", "axis": None, "offset": 0, "full_shape": shapes[f"{name}.weight"]}
        for name in graph.linears
    }
    heads = getattr(source.config, "num_key_value_heads", source.config.num_attention_heads)
    width = getattr(source.config, "head_dim", None) or source.config.hidden_size // source.config.num_attention_heads
    for layer in graph.layers:
        linears[layer.attention] = {"kind": "replicated", "axis": None, "offset": 0, "full_shape": [heads, width]}
    return {
        "layout_version": LAYOUT_VERSION,
        "kind": "measurement",
        "model": {
            "name": job.model.resolve().name,
            "fingerprint": fingerprint(source.checkpoint),
            "family": graph.family.model_type,
        },
        "mesh": {"rank": rank, "world": world, "tp": 1, "dp": world, "ep": 1},
        "dtype": "float32",
        "seed": job.seed,
        "calibration": {
            "hash": hash_sequences(sequences),
            "samples": len(sequences),
            "tokens": sum(len(s) for s in sequences),
            "sequence_length": max(len(s) for s in sequences),
        },
        "observers": list(job.stats),
        "tensors": linears,
        "counts": {"samples": len(mine), "tokens": sum(len(sequences[i]) for i in mine)},
        "tools": tools(),
    }

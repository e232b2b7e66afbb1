"""Stage 1, measure: run the calibration text through the model and take statistics of each tensor.

Reads    the model folder and a calibration file
Writes   <o>/rank-RRR-of-WWW/: statistics.safetensors, calibration.safetensors, measurement.json,
         DONE.json
Resumes  at the layer where it stopped, from .rank-RRR-of-WWW.work beside the rank; the folder of a
         rank appears at once
Fails    3 unusable model or text, 5 memory, disk or a held folder, 6 unsupported family

With N ranks N processes are started, and unify merges their measurements; or the ranks are those of
an outer torchrun, over several machines. Each measures every N-th sequence (dp), or with `tp` a
slice of every linear (quantflow/measuring/replicas.py). Memory is that of one decoder layer in
float32, whatever the depth of the model (quantflow/measuring/observe.py). For a mixture of experts
the tokens that the router sends to each are counted too, whatever statistics are wanted. Where none
is, and quantize counts the tokens while it collects Hessians (`counts_in_measure`), no layer runs.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from quantflow import process_memory
from quantflow.accelerators import kind_of
from quantflow.core.determinism import single_threaded, tools
from quantflow.core.device import HOST, Device, open_device
from quantflow.core.dtypes import RUNNING
from quantflow.core.parallel import Workers
from quantflow.distributed.launch import (
    die_with_parent,
    launch,
    launched_folder,
    launched_rank,
    own_device,
    require_trust,
)
from quantflow.distributed.sharding import placements, runs_on_shares
from quantflow.distributed.team import HOST_BACKEND, MEETING, backend_of, meet
from quantflow.errors import UnsupportedError, UsageError
from quantflow.files import disk, stage_folder
from quantflow.files.canonical import digest_of, file_digest
from quantflow.files.digests import NAME as HASHES
from quantflow.files.digests import Digests
from quantflow.files.origin import origin_of
from quantflow.files.outputs import output_folder
from quantflow.files.rank_folders import rank_folder, refuse_other_world
from quantflow.measuring import replicas, synthetic
from quantflow.measuring.job import MeasureJob
from quantflow.measuring.observe import Observation, products_of
from quantflow.measuring.record import (
    CALIBRATION_NAME,
    LAYOUT_VERSION,
    Measurement,
    write_measurement,
)
from quantflow.measuring.replicas import Replica
from quantflow.measuring.text import Text, hash_sequences, read_text, select
from quantflow.measuring.text_sources import text_digest, with_calibration_text
from quantflow.models import layer_store
from quantflow.models.graph import Graph, text_config
from quantflow.models.identity import identify
from quantflow.models.load import Source, open_source, reading_ahead
from quantflow.models.open import graph_for, refuse_not_finite
from quantflow.models.token_ids import refuse_beyond
from quantflow.models.tokenizer import load_tokenizer
from quantflow.numerics.fixed_tree import sequences_of
from quantflow.observers import DEFAULT, observer_named, of_gradients
from quantflow.planning.device_memory import allow_on_device, measure_on_device
from quantflow.planning.experts import ROUTED
from quantflow.planning.recipe import Calibration
from quantflow.planning.requirements import counts_in_measure, statistics_for
from quantflow.planning.resources import account, allow_measure
from quantflow.planning.sizes import model_size
from quantflow.progress import Progress
from quantflow.sources.models import model_folder

VERSION = 5
PARTS = ("statistics.safetensors", "calibration.safetensors", "measurement.json")
DEFAULT_STATS = DEFAULT
UNCOUNTED = "uncounted"  # among the inputs of a mixture's measurement without a layer that ran


def run(job: MeasureJob, progress: Progress) -> Path:
    """Measure; the result is the folder of the ranks. Finished ranks are left alone."""
    for name in _stats(job):
        observer_named(name)
    launched = launched_rank()
    require_trust("measure", trusted=job.trust_network)
    if launched is not None and job.options.ranks not in (1, launched[1]):
        raise UsageError(
            f"measure: ranks={job.options.ranks}, torchrun started {launched[1]}",
            "leave --ranks out under torchrun",
        )
    world = job.options.ranks if launched is None else launched[1]
    _sizes(job, world)
    _check_compute(job, world=world)
    refuse_other_world(job.output, world)
    if job.calibration.synthetic and launched_folder() is None:
        if launched is not None:
            raise UsageError(
                f"measure: synthetic={job.calibration.synthetic} under torchrun",
                f"let one process write the text, `measure --synthetic {job.calibration.synthetic} "
                f"--stats amax`, and give all ranks its {synthetic.NAME}/{CALIBRATION_NAME} as "
                "--calibration",
            )
        job = _with_synthetic(job, progress)
    if launched is not None:
        _join(job, progress, rank=launched[0], world=launched[1])
    elif job.options.ranks > 1:
        _launch(job, progress)
    else:
        _measure_rank(job, progress, rank=0, world=1)
    return job.output


def _with_synthetic(job: MeasureJob, progress: Progress) -> MeasureJob:
    """The job whose text is the given one and what the model writes, which is written now."""
    source = open_source(job.model)
    _check_fit(job, graph_for(source.config), tp=_sizes(job, job.options.ranks)[1])
    _, sequences = calibration_sequences(job.calibration, job.model, source, seed=job.seed)
    every = _inputs(job, source, Digests(job.output / HASHES), world=job.options.ranks)
    inputs = {
        **{name: every[name] for name in ("model", "tokenizer", "calibration", "seed", "tools")},
        **_device(job).key(),
    }
    with torch.no_grad(), _device(job).deterministic():
        return synthetic.with_written(job, source, sequences, inputs=inputs, progress=progress)


def settled(job: MeasureJob, progress: Progress) -> MeasureJob:
    """The job with a folder or a file for every name; settling again changes nothing.

    Raises:
        QuantflowError: there is no such model or text; the output lies in the model.
    """
    return replace(
        job,
        model=model_folder(job.model, revision=job.revision, progress=progress),
        output=output_folder(job.output, reads={"the model": job.model}),
        calibration=with_calibration_text(job.calibration, progress),
    )


def _sizes(job: MeasureJob, world: int) -> tuple[int, int]:
    """The number of replicas, and of the cards that share each."""
    return replicas.sizes(world, job.options.tp, job.options.dp, job.options.ep)


def _ep(job: MeasureJob) -> int:
    """The number of cards that experts are spread over."""
    return job.options.ep or 1


def _stats(job: MeasureJob) -> tuple[str, ...]:
    """The observers of every linear's input.

    Outputs, weights, keys and values get amax; keys and values per head too.
    """
    if job.options.stats is not None:
        return tuple(job.options.stats)
    return tuple(statistics_for(job.entries)) if job.entries else DEFAULT_STATS


def _counts(job: MeasureJob, graph: Graph) -> bool:
    """Whether the tokens of experts are counted; wherever layers run they are."""
    return graph.sparse and (bool(_stats(job)) or counts_in_measure(job.entries))


def _is_up_to_date(folder: Path, inputs: Mapping[str, Any]) -> bool:
    """Whether a folder holds the measurement, or the same with a count that is not asked for."""
    counted = {name: value for name, value in inputs.items() if name != UNCOUNTED}
    return any(stage_folder.is_up_to_date(folder, each) for each in (inputs, counted))


def _launch(job: MeasureJob, progress: Progress) -> None:
    """Start one process per rank, after mistakes that every rank would make are refused once."""
    source = open_source(job.model)
    dp, tp = _sizes(job, job.options.ranks)
    _check_fit(job, graph_for(source.config), tp=tp)
    # a model that cannot be cut is refused here, once
    _placements(job, source, cards=tp, rank=0)
    disk.make_folder(job.output)
    inputs = _inputs(job, source, Digests(job.output / HASHES), world=job.options.ranks)
    folders = [
        rank_folder(job.output, rank, job.options.ranks) for rank in range(job.options.ranks)
    ]
    if all(_is_up_to_date(folder, {**inputs, "rank": rank}) for rank, folder in enumerate(folders)):
        progress.say("measure: up to date")
        return
    for rank, folder in enumerate(folders):
        stage_folder.refuse_other_result(
            folder, {**inputs, "rank": rank}, force=job.force, parts=PARTS
        )
    calibration_sequences(job.calibration, job.model, source, seed=job.seed, replicas=dp)
    launch("measure", job, ranks=job.options.ranks, progress=progress)


def _join(job: MeasureJob, progress: Progress, *, rank: int, world: int) -> None:
    """Measure one rank of several; ranks wait for each other at the end."""
    die_with_parent()
    shares = _sizes(job, world)[1] > 1
    device = _device(job) if shares else HOST  # others send each other no tensor
    with device.current(), meet(MEETING, device):
        try:
            # gloo alone has the monitored barrier
            everybody = None if device.is_host else distributed.new_group(backend=HOST_BACKEND)
            _measure_rank(job, progress.hushed() if rank else progress, rank=rank, world=world)
            distributed.monitored_barrier(
                everybody, timeout=timedelta(hours=24), wait_all_ranks=True
            )
        finally:
            distributed.destroy_process_group()


def _check_fit(job: MeasureJob, graph: Graph, *, tp: int) -> None:
    """Refuse what does not go with a model's experts, or with several cards.

    Raises:
        UsageError: `experts` or `ep` is given and there are none, or gradients on several cards.
    """
    gradients = ", ".join(name for name in _stats(job) if of_gradients(name))
    if gradients and tp > 1:
        raise UsageError(
            f"measure: statistic {gradients} with {'tp' if _ep(job) == 1 else 'ep'}={tp}",
            "gradients go through a model that is whole: measure it with --tp 1, on any number "
            "of ranks",
        )
    if job.options.experts is not None and not graph.sparse:
        raise UsageError(
            f"measure: experts={job.options.experts}, a {graph.family.model_type} has no experts",
            "leave --experts out",
        )
    if _ep(job) > 1 and not graph.sparse:
        raise UsageError(
            f"measure: --ep {_ep(job)}, a {graph.family.model_type} has no experts",
            "use --tp or --dp",
        )


def _device(job: MeasureJob) -> Device:
    """The device of this process, one of several where there are several ranks."""
    return open_device(own_device(job.compute.device))


def _check_compute(job: MeasureJob, *, world: int) -> None:
    """Refuse what does not go with a device, or with layers that run in bfloat16.

    Raises:
        UsageError: several ranks on one device by its number.
        UnsupportedError: no such device; ranks that share a model on devices between which torch
            moves nothing; gradients of layers that run in bfloat16.
    """
    device = _device(job)
    name = job.compute.device
    if world > 1 and ":" in name:
        raise UsageError(
            f"measure: {world} ranks with --device {name}, which they would share",
            f"give --device {kind_of(name)}: each rank takes the GPU of its number",
        )
    if world > 1 and not device.is_host and launched_rank() is None:
        open_device(f"{job.compute.device}:{world - 1}")  # there is one for each
    if _sizes(job, world)[1] > 1 and backend_of(device) is None:
        raise UnsupportedError(
            f"measure: ranks that share a model with --device {name}, whose sums torch "
            f"{torch.__version__} cannot make there",
            "use --dp, each of whose ranks runs whole layers, or a torch that is built with NCCL",
        )
    gradients = ", ".join(name for name in _stats(job) if of_gradients(name))
    if gradients and RUNNING[job.compute.model_dtype] != torch.float32:
        raise UnsupportedError(
            f"measure: statistic {gradients} with --dtype {job.compute.model_dtype}, gradients "
            "go back through layers in float32",
            "leave --dtype out, or name statistics without it, and schemes without @, yaqa and "
            "best",
        )


def _inputs(job: MeasureJob, source: Source, digests: Digests, *, world: int) -> dict[str, Any]:
    tokenizer = {
        name: file_digest(source.checkpoint.folder / name)
        for name in source.checkpoint.files
        if name.startswith(("tokenizer", "special_tokens", "chat_template", "vocab", "merges"))
    }
    device = _device(job)
    products = products_of(_stats(job), device)
    graph = graph_for(source.config)
    return {
        "model": identify(source.checkpoint, digests),
        "tokenizer": tokenizer,
        "calibration": {
            **{
                name: value
                for name, value in asdict(job.calibration).items()
                if value or name != "synthetic"
            },
            "pack": job.calibration.packs,
            "source": text_digest(Path(str(job.calibration.source))),
        },
        "seed": job.seed,
        "stats": list(_stats(job)),
        "world": world,
        "tp": _sizes(job, world)[1],
        **({} if job.options.experts is None else {"experts": job.options.experts}),
        **({} if _ep(job) == 1 else {"ep": _ep(job)}),
        **device.key(),
        **({} if job.compute.model_dtype == "float32" else {"dtype": job.compute.model_dtype}),
        **({} if products == torch.float32 else {"products": str(products)}),
        **({UNCOUNTED: True} if graph.sparse and not _counts(job, graph) else {}),
        "version": VERSION,
        "tools": tools(),
    }


def _measure_rank(job: MeasureJob, progress: Progress, *, rank: int, world: int) -> None:
    began = time.monotonic()
    device = _device(job)
    source = open_source(job.model)
    graph = graph_for(source.config)
    _check_fit(job, graph, tp=_sizes(job, world)[1])
    folder = rank_folder(job.output, rank, world)
    work = folder.parent / f".{folder.name}.work"
    # before anything is written beside a foreign folder
    stage_folder.refuse_other_result(folder, {}, force=True, parts=PARTS)
    disk.make_folder(job.output)
    hashes = job.output / HASHES
    # one rank alone writes what all of them share
    digests = Digests(None if rank else hashes, also=[hashes])
    inputs = {**_inputs(job, source, digests, world=world), "rank": rank}
    replica = _replica_of(job, source, rank=rank, world=world)
    with stage_folder.locked(folder), single_threaded(), device.deterministic(), torch.no_grad():
        finished = _is_up_to_date(folder, inputs)
        if replica.all(finished):  # otherwise a finished card helps the others to their sums
            disk.remove_tree(work)  # the resume state
            progress.say("measure: up to date")
            return
        if not finished:
            stage_folder.refuse_other_result(folder, inputs, force=job.force, parts=PARTS)
        text, sequences = calibration_sequences(
            job.calibration, job.model, source, seed=job.seed, replicas=replica.count
        )
        mine = sequences_of(replica.index, replicas=replica.count, samples=len(sequences))
        sizes = model_size(source.checkpoint.infos, source.config, graph)
        lengths = [len(sequences[i]) for i in mine]
        allowance = allow_measure(
            job.resources,
            sizes,
            lengths=lengths,
            stats=_stats(job),
            counts=_counts(job, graph),
            folder=folder,
        )
        dtype = RUNNING[job.compute.model_dtype]
        need = measure_on_device(sizes, lengths=lengths, stats=_stats(job), dtype=dtype)
        on_device = allow_on_device(need, job.resources, device)
        for note in (*source.checkpoint.notes, text.note, _short(job.calibration, sequences)):
            if note is not None:
                progress.say(f"measure: {note}")
        process_memory.reset_peak()
        device.begin_peak()
        refuse_not_finite(source.checkpoint, graph)
        layer_store.begin(
            work,
            inputs,
            say=lambda text: progress.say(f"measure: unfinished with {text}; it begins again"),
        )
        statistics: Mapping[str, Tensor] = {}
        if _stats(job) or _counts(job, graph):
            # Sequences that run at once would add up over the cards in an order of their own on
            # each; a device is parallel inside.
            count = allowance.workers if replica.cards == 1 and device.is_host else 1
            with Workers(count) as workers, reading_ahead(source, device) as read:
                observation = Observation(
                    stats=_stats(job),
                    indices=mine,
                    seed=job.seed,
                    source=read,
                    graph=graph,
                    folder=work,
                    key=digest_of(inputs),
                    progress=progress,
                    workers=workers,
                    allowance=allowance,
                    replica=replica,
                    experts=job.options.experts or ROUTED,
                    device=device,
                    dtype=dtype,
                )
                statistics = observation.statistics([sequences[i] for i in mine])
        if not finished:
            meta = _meta(
                job,
                source,
                graph,
                sequences,
                mine,
                left_out=text.left_out,
                model=inputs["model"],
                rank=rank,
                replica=replica,
            )
            written: dict[str, str] = {}
            with stage_folder.publish(
                folder, stage="measure", inputs=inputs, hashes=written
            ) as temporary:
                measurement = Measurement(
                    meta=meta,
                    statistics=statistics,
                    sequences=[sequences[i] for i in mine],
                    indices=mine,
                )
                written |= write_measurement(temporary, measurement)
        replica.wait()  # as long as one card is not finished, the others have to be able to help it
        disk.remove_tree(work)  # the resume state
        progress.say(
            f"measure: {sum(map(len, sequences)):,} tokens in {len(sequences)} sequences, "
            f"{len(graph.layers)} layers, {', '.join(_stats(job)) or 'no statistics'}; "
            f"{time.monotonic() - began:.0f} s"
        )
        for line in account("measure", allowance, folder, on_device=on_device, device=device):
            progress.note(line)


def _replica_of(job: MeasureJob, source: Source, *, rank: int, world: int) -> Replica:
    dp, tp = _sizes(job, world)
    held = _placements(job, source, cards=tp, rank=rank)
    mesh = replicas.meshed(world, tp, device=_device(job))
    return Replica(
        index=rank // tp,
        count=dp,
        cards=tp,
        card=rank % tp,
        placements=held,
        mesh=mesh,
        among_zeros=mesh is not None and not runs_on_shares(source.config, held, cards=tp),
    )


def _placements(
    job: MeasureJob, source: Source, *, cards: int, rank: int
) -> dict[str, dict[str, Any]]:
    """The part of every tensor that a rank holds.

    With `ep` all that is no expert's is whole on every card.
    """
    tp = cards if _ep(job) == 1 else 1
    shapes = _shapes(source)
    return placements(source.config, shapes, tp=tp, rank=rank, ep=_ep(job))


def _shapes(source: Source) -> dict[str, tuple[int, ...]]:
    return {name: info.shape for name, info in source.checkpoint.infos.items()}


def calibration_sequences(
    calibration: Calibration, model: Path, source: Source, *, seed: int, replicas: int = 1
) -> tuple[Text, list[Tensor]]:
    """The calibration text, and the token ids of its set in sample order, int64 [S] each."""
    limit = int(getattr(text_config(source.config), "max_position_embeddings", None) or 2048)
    limit = limit if limit > 0 else 2048  # XLNet's -1 is no limit
    length = calibration.sequence_length or min(calibration.usual_length, limit)
    if length > limit:
        raise UsageError(
            f"calibration: sequence_length={length}, the model has {limit} positions",
            f"use at most {limit}",
        )
    tokenizer = load_tokenizer(model)
    source_path = Path(str(calibration.source))
    text = read_text(source_path, tokenizer)
    documents = text.documents
    if source_path.name == CALIBRATION_NAME:  # what another measurement ran, in its order
        sequences = select(
            documents, samples=calibration.samples, sequence_length=length, seed=None
        )
    else:
        sequences = select(
            documents,
            samples=calibration.samples,
            sequence_length=length,
            seed=seed,
            pack=calibration.packs,
        )
    refuse_beyond(
        sequences, getattr(source.config, "vocab_size", None), where=str(calibration.source)
    )
    if len(sequences) < replicas:
        raise UsageError(
            f"measure: {len(sequences)} sequences for {replicas} ranks",
            "use fewer ranks or more samples",
        )
    return text, sequences


def _short(calibration: Calibration, sequences: Sequence[Tensor]) -> str | None:
    """A sentence where the text has less than half of the wanted tokens; else None."""
    length = calibration.sequence_length or max(map(len, sequences))
    available = sum(map(len, sequences))
    asked = calibration.samples * length
    if 2 * available >= asked:
        return None
    shortest = min(map(len, sequences))
    remedy = (
        "give more text"
        if calibration.packs
        else "give more or longer documents, or --pack, which joins them"
    )
    counts = (
        f"{len(sequences)} of {calibration.samples} sequences, the shortest of {shortest} tokens"
    )
    return f"the text has {available:,} of the {asked:,} tokens asked for ({counts}); {remedy}"


def _meta(
    job: MeasureJob,
    source: Source,
    graph: Graph,
    sequences: Sequence[Tensor],
    mine: Sequence[int],
    *,
    left_out: int,
    model: str,
    rank: int,
    replica: Replica,
) -> dict[str, Any]:
    names = (*graph.linears, *graph.attentions)
    origin = origin_of(job.model)
    return {
        "layout_version": LAYOUT_VERSION,
        "kind": "measurement",
        "model": {
            "name": origin.name,
            **({} if origin.revision is None else {"revision": origin.revision}),
            "fingerprint": model,
            "family": graph.family.model_type,
        },
        "mesh": {
            "rank": rank,
            "world": replica.cards * replica.count,
            "tp": replica.cards,
            "dp": replica.count,
            "ep": _ep(job),
        },
        "dtype": job.compute.model_dtype,
        **_device(job).key(),
        "seed": job.seed,
        "calibration": {
            "hash": hash_sequences(sequences),
            "samples": len(sequences),
            "tokens": sum(len(s) for s in sequences),
            "sequence_length": max(len(s) for s in sequences),
            **({"left_out": left_out} if left_out else {}),
            **({"synthetic": job.calibration.synthetic} if job.calibration.synthetic else {}),
        },
        "observers": list(_stats(job)),
        **({"experts": job.options.experts or ROUTED} if graph.sparse else {}),
        "tensors": {name: replica.placements[name] for name in names},
        "counts": {"samples": len(mine), "tokens": sum(len(sequences[i]) for i in mine)},
        "tools": tools(),
    }

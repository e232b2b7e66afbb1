"""`quantflow bench ARTIFACT|MODEL`: seconds of the first and of each next token, per batch size.

Reads    the artifact; files of prompts
Writes   the trace of --profile, a file in --results-dir
Resumes  nothing
Fails    2 counts that cannot be decoded, 3 prompts that cannot be read, 5 no batch fits into
         memory, 7 the artifact is damaged; what loading raises
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from quantflow import cpu_threads, process_memory
from quantflow.accelerators import GPUS, is_gpu, kind_of
from quantflow.benching import server_speed
from quantflow.benching.bench_job import PERCENTILES, BenchJob
from quantflow.benching.energy import package_joules
from quantflow.benching.generation_speed import (
    Spread,
    TimedRun,
    random_prompts,
    spread,
    time_generation,
    time_run,
)
from quantflow.core.device import Device
from quantflow.distributed.binding import cores_of
from quantflow.distributed.launch import launch, launched_rank
from quantflow.errors import InputError, ResourceError, UsageError
from quantflow.files.disk import link_or_copy, make_folder, remove, write_file
from quantflow.progress import Progress
from quantflow.runtime.artifact import is_model
from quantflow.runtime.attention_choice import attention_of
from quantflow.runtime.decoding import Beams, Draft, Lookup, Method
from quantflow.runtime.lean import LeanDecoder
from quantflow.runtime.load import Loaded, load
from quantflow.runtime.prompt_files import encode, read_prompts
from quantflow.runtime.ranks import processes as rank_processes
from quantflow.runtime.shapes import shapes_of
from quantflow.sources.models import model_folder

# Fields of the job that stand beside the settings in a result, or do not influence its times.
NOT_SETTINGS = ("artifact", "baseline", "draft", "profile", "results_dir")


def run(job: BenchJob, progress: Progress) -> dict[str, Any] | None:
    """Time every batch size.

    Returns:
        Settings, the machine's share, and a record per batch size. None on a rank that is not the
        first.
    """
    if job.url is None:
        job = _with_folders(job, progress)
    counts = (*job.batch_sizes, *job.input_tokens, job.new_tokens, job.runs)
    if not job.batch_sizes or not job.input_tokens or min(counts) < 1 or job.warmups < 0:
        lengths = ", ".join(map(str, job.input_tokens))
        raise UsageError(
            f"bench: batch sizes {list(job.batch_sizes)}, {lengths} + {job.new_tokens} tokens, "
            f"{job.runs} runs",
            "use 1 or more of each",
        )
    if job.column is not None and job.source is None:
        raise UsageError(f"bench: --column {job.column} without --prompts", "give --prompts")
    if job.url is not None:
        return _kept(job, _of_server(job, job.url, progress))
    if job.profile is not None and job.profile_skip >= job.new_tokens:
        raise UsageError(
            f"profile_skip={job.profile_skip} of {job.new_tokens} new tokens leaves nothing to "
            "trace",
            "skip fewer tokens",
        )
    without = {
        "the transformers decoder": job.decoder == "transformers",
        f"device {job.device}": job.device != "cpu",
    }
    without |= {
        "a baseline": job.baseline is not None,
        "torch_compile": job.torch_compile,
        "attention": bool(job.attention),
        "static shapes": job.shapes.fixed,
    }
    world = rank_processes.world_of("bench", job.ranks, trusted=job.trust_network, without=without)
    if rank_processes.starts(world):
        job.signature.check(job.artifact)  # once more in each rank, which loads what it checked
        return rank_processes.start("bench", job, world=world, progress=progress, bind=job.bind)
    if job.baseline is not None and launched_rank() is None:
        return _kept(job, _beside(job, job.baseline, progress))
    with (
        rank_processes.bound("bench", asked=job.bind),
        rank_processes.joined("bench", world) as communicator,
    ):
        begin = time.perf_counter()
        loaded = load(
            job.artifact,
            backend=job.backend,
            dtype=getattr(torch, job.dtype),
            decoder=job.decoder,
            kv_cache=job.kv_cache,
            crops=job.draft is not None or job.lookup is not None,
            pack=job.pack,
            exact=job.exact,
            rounded_inputs=job.rounded_inputs,
            compiled=job.torch_compile,
            attention=attention_of(job.attention),
            shapes=job.shapes,
            device=job.device,
            communicator=communicator,
            require_signature=job.signature.trusted,
        )
        load_seconds, threads = time.perf_counter() - begin, torch.get_num_threads()
        batches = rank_processes.drive(
            loaded, communicator, lambda led: _timed(job, led, progress, alone=communicator is None)
        )
        peaks = [process_memory.usage().peak]
        if communicator is not None:
            peaks = communicator.gather(torch.tensor(peaks)).flatten().tolist()
    if batches is None:
        return None
    result = {
        "artifact": str(job.artifact),
        "settings": {key: value for key, value in asdict(job).items() if key not in NOT_SETTINGS},
        "ranks": world,
        "method": _called(job),
        "decoder": loaded.name,
        "reasons": list(loaded.reasons),
        "shapes": shapes_of(loaded.decoder),
        "backends": sorted(set(loaded.backends.values())),
        "rounded_inputs": loaded.rounded_inputs,
        "threads": threads,
        "load_seconds": load_seconds,
        "percentiles": _order(job),
        "weight_bytes": sum(info.nbytes for info in loaded.artifact.checkpoint.infos.values()),
        "memory": {
            "peak_bytes": max(peaks),
            "rank_peak_bytes": peaks,
            "kv_cache_bytes": _cache_bytes(loaded),
            "device_peak_bytes": Device(kind=loaded.artifact.device).peak_bytes(),
        },
        "profile": None if job.profile is None else str(job.profile),
        "batches": batches,
    }
    return _kept(job, result)


def _of_server(job: BenchJob, url: str, progress: Progress) -> dict[str, Any]:
    """The result for a running server, which says nothing of its memory and threads."""
    server_speed.check(job)
    server = server_speed.Server(url)
    return {
        "artifact": server.model(),
        "url": url,
        "settings": {key: value for key, value in asdict(job).items() if key not in NOT_SETTINGS},
        "method": _called(job),
        "percentiles": _order(job),
        "batches": [
            _record(
                job,
                server_speed.timed(job, server, rows=rows, length=length, progress=progress),
                [None] * job.runs,
                rows=rows,
                length=length,
            )
            for length in job.input_tokens
            for rows in job.batch_sizes
        ],
    }


def _order(job: BenchJob) -> str:
    return (
        "of sorted times"
        if job.ordered
        else "of times in the order of the runs, as text-generation-benchmark"
    )


def _with_folders(job: BenchJob, progress: Progress) -> BenchJob:
    """The job with a folder for every model; again the same of its own."""
    folder = model_folder(job.artifact, revision=job.revision, progress=progress)
    if job.baseline is None:
        return replace(job, artifact=folder)
    return replace(job, artifact=folder, baseline=model_folder(job.baseline, progress=progress))


def _kept(job: BenchJob, result: dict[str, Any]) -> dict[str, Any]:
    """The result, with its file in the folder that is asked for: whole, or not there."""
    if job.results_dir is None:
        return result
    make_folder(job.results_dir)
    temporary = job.results_dir / f".bench-{os.getpid()}.tmp"
    for number in count(1):
        path = job.results_dir / f"bench-{number:04}.json"
        if path.exists():
            continue
        kept = {**result, "results_file": str(path)}
        try:
            write_file(temporary, (json.dumps(kept, indent=2, default=str) + "\n").encode())
            link_or_copy(temporary, path)
        except FileExistsError:  # a run beside this one took the number
            continue
        finally:
            remove(temporary)
        return kept
    raise AssertionError("there is always a next number")


def _beside(job: BenchJob, baseline: Path, progress: Progress) -> dict[str, Any]:
    """The results for the artifact and for the baseline, and their ratios.

    Each is timed in a process of its own.
    """
    result, base = (
        launch(
            "bench",
            replace(
                job,
                artifact=folder,
                baseline=None,
                profile=profile,
                results_dir=None,
                # a baseline that is not quantized has no inputs to round
                rounded_inputs=job.rounded_inputs and not is_model(folder),
            ),
            ranks=1,
            progress=progress,
            threads=torch.get_num_threads(),
            cores=cores_of(1) if job.bind else None,
            again="run the same command again",
        )
        for folder, profile in ((job.artifact, job.profile), (baseline, None))
    )
    return {**result, "baseline": base, "ratios": ratios(result, base)}


def ratios(result: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """How many times as good a result is as another one: above 1 is faster, or smaller.

    Returns:
        `memory` and `weights`, ratios of bytes; `batches`, for each that fits on both sides the
        length, the size, `first_token` (ratio of seconds) and `next_token` (ratio of tokens per
        second), None where no further token was made.
    """
    batches = []
    for ours, theirs in zip(result["batches"], base["batches"], strict=True):
        if "failed" in ours or "failed" in theirs:
            continue
        rates = [batch["decode_per_second"] for batch in (ours, theirs)]
        batches.append(
            {
                "input_tokens": ours["input_tokens"],
                "batch_size": ours["batch_size"],
                "first_token": theirs["first_token"]["average"] / ours["first_token"]["average"],
                "next_token": None if None in rates else rates[0]["average"] / rates[1]["average"],
            }
        )
    return {
        "batches": batches,
        "memory": base["memory"]["peak_bytes"] / result["memory"]["peak_bytes"],
        "weights": base["weight_bytes"] / result["weight_bytes"],
    }


def _timed(
    job: BenchJob, loaded: Loaded, progress: Progress, *, alone: bool
) -> list[dict[str, Any]]:
    """A record per length and batch size; the trace that was asked for is written.

    Where no other rank takes part, `alone`, a batch that does not fit into memory ends nothing but
    itself.
    """
    positions = loaded.decoder.positions
    longest = max(job.input_tokens)
    if positions is not None and longest + job.new_tokens > positions:
        raise UsageError(
            f"{longest} prompt tokens + {job.new_tokens} new ones: the model has {positions} "
            "positions",
            "ask for one new token or more, and for fewer than that together",
        )
    progress.say(f"bench: {cpu_threads.line()}")
    texts = _texts(job, loaded)
    method = _method(job)
    batches = []
    for length in job.input_tokens:
        for rows in job.batch_sizes:
            try:
                batches.append(
                    _batch(job, loaded, texts, method, rows=rows, length=length, progress=progress)
                )
            except (MemoryError, RuntimeError) as error:
                if not alone or not (
                    isinstance(error, torch.OutOfMemoryError) or process_memory.ran_out(error)
                ):
                    raise
                batches.append(
                    {
                        "input_tokens": length,
                        "batch_size": rows,
                        "failed": "it does not fit into memory",
                    }
                )
    if all("failed" in batch for batch in batches):
        raise ResourceError(
            "bench: no batch fits into memory", "give a smaller -b, or fewer --input-tokens"
        )
    if job.profile is not None:
        _profile(job, loaded, texts, job.profile)
    return batches


def _texts(job: BenchJob, loaded: Loaded) -> list[list[int]]:
    """The tokens of the job's own texts; none for random ones.

    Raises:
        InputError: texts without a tokenizer, or a file that holds none.
    """
    prompts = [
        *job.prompts,
        *(read_prompts(job.source, column=job.column) if job.source is not None else ()),
    ]
    if not prompts:
        return []
    if loaded.tokenizer is None:
        raise InputError(
            f"{job.artifact}: texts, and no tokenizer",
            "add its tokenizer files, or leave out the prompts",
        )
    return encode(prompts, loaded.tokenizer, limit=max(job.input_tokens), chat=False)


def _method(job: BenchJob) -> Method | None:
    """The method to generate by, with what it needs loaded."""
    if job.beams is not None:
        return Beams(count=job.beams)
    if job.lookup is not None:
        return Lookup(tokens=job.lookup)
    if job.draft is None:
        return None
    dtype: torch.dtype = getattr(torch, job.dtype)
    draft = load(
        job.draft,
        decoder="auto",
        backend=job.backend,
        dtype=dtype,
        device=job.device,
        crops=True,
        exact=job.exact,
    )
    return Draft(decoder=draft.decoder, tokens=job.draft_tokens)


def _called(job: BenchJob) -> str:
    """The method to generate by, in words."""
    how = "the likeliest token" if job.sampling is None else "drawn tokens"
    if job.beams is not None:
        return f"{job.beams} beams" if job.sampling is None else f"{job.beams} beams, drawn"
    if job.lookup is not None:
        return f"{how}, {job.lookup} proposed by the text"
    return how if job.draft is None else f"{how}, {job.draft_tokens} proposed by {job.draft}"


def _batch(
    job: BenchJob,
    loaded: Loaded,
    texts: Sequence[Sequence[int]],
    method: Method | None,
    *,
    rows: int,
    length: int,
    progress: Progress,
) -> dict[str, Any]:
    ends = () if job.ignore_eos else loaded.eos_token_ids
    runs, joules = [], []
    stage = (
        f"bench {rows} at once"
        if len(job.input_tokens) == 1
        else f"bench {rows} at once, {length} tokens"
    )
    for index in progress.steps(range(job.warmups + job.runs), stage=stage, unit="run"):
        prompts = _prompts(job, loaded, texts, rows=rows, length=length, index=index)
        before = package_joules()
        if method is None and job.sampling is None:
            timed = time_run(loaded.decoder, prompts, new_tokens=job.new_tokens, ends=ends)
        else:
            drawn = None if job.sampling is None else replace(job.sampling, seed=job.seed + index)
            arguments: dict[str, Any] = {
                "new_tokens": job.new_tokens,
                "method": method,
                "sampling": drawn,
                "ends": ends,
            }
            timed = time_generation(loaded.decoder, prompts, **arguments)
        if index >= job.warmups:
            runs.append(timed)
            joules.append(None if before is None else before.since())
    return _record(job, runs, joules, rows=rows, length=length)


def _record(
    job: BenchJob,
    runs: Sequence[TimedRun],
    joules: Sequence[float | None],
    *,
    rows: int,
    length: int,
) -> dict[str, Any]:
    """The record of a batch size and a length."""
    steps = [seconds for run in runs for seconds in run.step_seconds]
    decode = [sum(run.step_seconds) for run in runs if run.step_seconds]
    per_token = [sum(run.step_seconds) / len(run.step_seconds) for run in runs if run.step_seconds]
    produced, energy = sum(run.produced for run in runs), _total(joules)
    return {
        "input_tokens": length,
        "batch_size": rows,
        "requested": sum(run.requested for run in runs),
        "produced": produced,
        "seconds": sum(run.seconds for run in runs),
        "joules": energy,
        "produced_per_joule": None if not energy else produced / energy,
        "first_token": _spread(job, [run.first_seconds for run in runs]),
        "next_token": _spread(job, steps),
        "decode_token": _spread(job, per_token),
        "decode_total": _spread(job, decode),
        "prompt_tokens_per_second": _spread(
            job, [rows * length / run.first_seconds for run in runs]
        ),
        "prefill_per_second": _spread(job, [rows / run.first_seconds for run in runs]),
        "decode_per_second": _spread(job, [rows / seconds for seconds in per_token]),
        "produced_per_second": produced / sum(run.seconds for run in runs),
        "requested_per_second": sum(run.requested for run in runs)
        / sum(run.seconds for run in runs),
    }


def _total(joules: Sequence[float | None]) -> float | None:
    """The sum; None where a part of it is not known."""
    counted = [value for value in joules if value is not None]
    return sum(counted) if len(counted) == len(joules) else None


def _spread(job: BenchJob, values: Sequence[float]) -> dict[str, float] | None:
    measured: Spread | None = spread(values, ordered=job.ordered)
    if measured is None:
        return None
    shares = {f"p{p}": value for p, value in zip(PERCENTILES, measured.percentiles, strict=True)}
    return {
        "average": measured.average,
        "lowest": measured.lowest,
        "highest": measured.highest,
        **shares,
    }


def _profile(job: BenchJob, loaded: Loaded, texts: Sequence[Sequence[int]], path: Path) -> TimedRun:
    """Write a trace of one run of the first length and batch size, Python functions included."""
    rows, length = job.batch_sizes[0], job.input_tokens[0]
    prompts = _prompts(job, loaded, texts, rows=rows, length=length, index=job.warmups + job.runs)
    tokens = min(job.new_tokens, job.profile_skip + job.profile_tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = kind_of(job.device)
    skipped = (
        schedule(wait=job.profile_skip - 1, warmup=1, active=job.profile_tokens, repeat=1)
        if job.profile_skip
        else None
    )
    with profile(
        activities=[
            ProfilerActivity.CPU,
            *([getattr(ProfilerActivity, GPUS[kind])] if is_gpu(kind) else []),
        ],
        schedule=skipped,
        on_trace_ready=lambda trace: trace.export_chrome_trace(str(path)),
        record_shapes=job.profile_shapes,
        with_stack=True,
    ) as trace:

        @contextmanager
        def span(name: str) -> Iterator[None]:
            with record_function(name):
                yield
            if skipped is not None:
                trace.step()

        return time_run(loaded.decoder, prompts, new_tokens=tokens, span=span)


def _prompts(
    job: BenchJob,
    loaded: Loaded,
    texts: Sequence[Sequence[int]],
    *,
    rows: int,
    length: int,
    index: int,
) -> Tensor:
    """Prompts of a run, [rows, length] int64.

    Random prompts are others in each run, so that nothing that was computed before can answer them.
    Texts are taken in turn, each cut at the length or repeated up to it.
    """
    if not texts:
        return random_prompts(
            rows, length, vocab_size=loaded.decoder.vocab_size, seed=job.seed + index
        )
    return torch.tensor([list(islice(cycle(text), length)) for text in islice(cycle(texts), rows)])


def _cache_bytes(loaded: Loaded) -> int | None:
    decoder = loaded.decoder
    return (
        decoder.cache.nbytes
        if isinstance(decoder, LeanDecoder) and decoder.cache is not None
        else None
    )

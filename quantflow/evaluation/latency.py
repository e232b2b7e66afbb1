"""`quantflow bench ARTIFACT|MODEL`: first and next token, per batch size, in the tables that people compare.

Reads    the artifact
Writes   the trace of --profile
Resumes  nothing
Fails    2 counts that cannot be decoded, 7 the artifact is damaged; what loading raises
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from quantflow.distributed.launch import launch, launched_rank
from quantflow.errors import UsageError
from quantflow.evaluation.bench_job import PERCENTILES, BenchJob
from quantflow.evaluation.generation_speed import Spread, TimedRun, random_prompts, spread, time_run
from quantflow.process_memory import usage
from quantflow.progress import Progress
from quantflow.runtime import rank_processes
from quantflow.runtime.lean import LeanDecoder
from quantflow.runtime.load import Loaded, load


def run(job: BenchJob, progress: Progress) -> dict[str, Any] | None:
    """Time every batch size and return settings, the machine's share, and a record per batch size.

    Returns:
        None on a rank that is not the first.
    """
    job.signature.check(job.artifact)
    counts = (*job.batch_sizes, job.input_tokens, job.new_tokens, job.runs)
    if not job.batch_sizes or min(counts) < 1 or job.warmups < 0:
        raise UsageError(
            f"bench: batch sizes {list(job.batch_sizes)}, {job.input_tokens} + {job.new_tokens} tokens, {job.runs} runs",
            "use 1 or more of each",
        )
    without = {"the transformers decoder": job.decoder == "transformers", f"device {job.device}": job.device != "cpu"}
    without |= {"a baseline": job.baseline is not None}
    world = rank_processes.world_of("bench", job.ranks, trusted=job.trust_network, without=without)
    if rank_processes.starts(world):
        return rank_processes.start("bench", job, world=world, progress=progress)
    if job.baseline is not None and launched_rank() is None:
        return _beside(job, job.baseline, progress)
    with rank_processes.joined("bench", world) as wire:
        begin = time.perf_counter()
        loaded = load(
            job.artifact,
            backend=job.backend,
            dtype=getattr(torch, job.dtype),
            decoder=job.decoder,
            kv_cache=job.kv_cache,
            pack=job.pack,
            exact=job.exact,
            device=job.device,
            wire=wire,
        )
        load_seconds = time.perf_counter() - begin
        batches = rank_processes.drive(loaded, wire, lambda led: _timed(job, led, progress))
        peaks = [usage().peak]
        if wire is not None:
            peaks = wire.gather(torch.tensor(peaks)).flatten().tolist()
    if batches is None:
        return None
    return {
        "artifact": str(job.artifact),
        "settings": {key: value for key, value in asdict(job).items() if key not in ("artifact", "baseline", "profile")},
        "ranks": world,
        "decoder": loaded.name,
        "reasons": list(loaded.reasons),
        "backends": sorted(set(loaded.backends.values())),
        "threads": torch.get_num_threads(),
        "load_seconds": load_seconds,
        "percentiles": "of sorted times" if job.ordered else "of times in the order of the runs, as text-generation-benchmark",
        "weight_bytes": sum(info.nbytes for info in loaded.artifact.checkpoint.infos.values()),
        "memory": {"peak_bytes": max(peaks), "rank_peak_bytes": peaks, "kv_cache_bytes": _cache_bytes(loaded)},
        "profile": None if job.profile is None else str(job.profile),
        "batches": batches,
    }


def _beside(job: BenchJob, baseline: Path, progress: Progress) -> dict[str, Any]:
    """Return the result for the artifact with that for the baseline in it, each of a process of its own, and their ratios."""
    found, base = (
        launch(
            "bench",
            replace(job, artifact=folder, baseline=None, profile=profile),
            ranks=1,
            progress=progress,
            threads=torch.get_num_threads(),
            again="run the same command again",
        )
        for folder, profile in ((job.artifact, job.profile), (baseline, None))
    )
    return {**found, "baseline": base, "ratios": ratios(found, base)}


def ratios(found: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many times as good a result is as another one: above 1 is faster, or smaller.

    Returns:
        `memory` and `weights`, of bytes; `batches`, for each the size, `first_token` of seconds and `next_token` of tokens per
        second, None where no further token was made.
    """
    batches = []
    for ours, theirs in zip(found["batches"], base["batches"], strict=True):
        rates = [batch["decode_per_second"] for batch in (ours, theirs)]
        batches.append(
            {
                "batch_size": ours["batch_size"],
                "first_token": theirs["first_token"]["average"] / ours["first_token"]["average"],
                "next_token": None if None in rates else rates[0]["average"] / rates[1]["average"],
            }
        )
    return {
        "batches": batches,
        "memory": base["memory"]["peak_bytes"] / found["memory"]["peak_bytes"],
        "weights": base["weight_bytes"] / found["weight_bytes"],
    }


def _timed(job: BenchJob, loaded: Loaded, progress: Progress) -> list[dict[str, Any]]:
    """Return a record per batch size, and write the trace that was asked for."""
    batches = [_batch(job, loaded, rows, progress) for rows in job.batch_sizes]
    if job.profile is not None:
        _profile(job, loaded, job.profile)
    return batches


def _batch(job: BenchJob, loaded: Loaded, rows: int, progress: Progress) -> dict[str, Any]:
    ends = () if job.ignore_eos else loaded.eos_token_ids
    runs = []
    for index in progress.steps(range(job.warmups + job.runs), stage=f"bench {rows} at once", unit="run"):
        found = time_run(loaded.decoder, _prompts(job, loaded, rows, index), new_tokens=job.new_tokens, ends=ends)
        if index >= job.warmups:
            runs.append(found)
    steps = [seconds for run in runs for seconds in run.step_seconds]
    decode = [sum(run.step_seconds) for run in runs if run.step_seconds]
    per_token = [sum(run.step_seconds) / len(run.step_seconds) for run in runs if run.step_seconds]
    return {
        "batch_size": rows,
        "requested": sum(run.requested for run in runs),
        "produced": sum(run.produced for run in runs),
        "seconds": sum(run.seconds for run in runs),
        "first_token": _spread(job, [run.first_seconds for run in runs]),
        "next_token": _spread(job, steps),
        "decode_token": _spread(job, per_token),
        "decode_total": _spread(job, decode),
        "prompt_tokens_per_second": _spread(job, [rows * job.input_tokens / run.first_seconds for run in runs]),
        "prefill_per_second": _spread(job, [rows / run.first_seconds for run in runs]),
        "decode_per_second": _spread(job, [rows / seconds for seconds in per_token]),
        "produced_per_second": sum(run.produced for run in runs) / sum(run.seconds for run in runs),
        "requested_per_second": sum(run.requested for run in runs) / sum(run.seconds for run in runs),
    }


def _spread(job: BenchJob, values: Sequence[float]) -> dict[str, float] | None:
    found: Spread | None = spread(values, ordered=job.ordered)
    if found is None:
        return None
    shares = {f"p{p}": value for p, value in zip(PERCENTILES, found.percentiles, strict=True)}
    return {"average": found.average, "lowest": found.lowest, "highest": found.highest, **shares}


def _profile(job: BenchJob, loaded: Loaded, path: Path) -> TimedRun:
    """Write a trace of one run of the first batch size, the functions of Python in it."""
    prompts = _prompts(job, loaded, job.batch_sizes[0], job.warmups + job.runs)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if job.device == "cuda" else [])]
    with profile(activities=activities, with_stack=True) as trace:
        found = time_run(loaded.decoder, prompts, new_tokens=min(job.new_tokens, 8), span=record_function)
    path.parent.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(path))
    return found


def _prompts(job: BenchJob, loaded: Loaded, rows: int, index: int) -> torch.Tensor:
    """Return the prompts of a run; each run has others, so that nothing that was computed before can answer it."""
    return random_prompts(rows, job.input_tokens, vocab_size=loaded.decoder.vocab_size, seed=job.seed + index)


def _cache_bytes(loaded: Loaded) -> int | None:
    decoder = loaded.decoder
    return decoder.cache.nbytes if isinstance(decoder, LeanDecoder) and decoder.cache is not None else None

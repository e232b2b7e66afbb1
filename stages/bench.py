"""The verb `bench`: timings, and the tables that people compare.

Reads    the artifact, files of prompts; nothing with --kernels
Writes   the trace of --profile, a file in --results-dir
Resumes  nothing
Fails    2 counts that cannot be decoded, an unknown scheme, shape or dtype, groups that do not
         divide the shape; 3 prompts that cannot be read; 5 no batch fits into memory; 7 the
         artifact is damaged; what loading raises
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from quantflow.benching.bench_job import PERCENTILES, BenchJob, KernelJob
from quantflow.errors import UsageError
from quantflow.reporting.progress_line import ProgressLine
from quantflow.stages.cli.environment import bars_wanted
from quantflow.stages.cli.options import QUIET, THREADS, job_settings, job_values, offline
from quantflow.stages.cli.other_programs import BENCH
from quantflow.stages.cli.output import show, table
from quantflow.stages.cli.spelling import spelled


@click.command("bench", cls=spelled(BENCH, texts="--prompt"))
@click.argument("artifact", required=False)
@job_settings("bench", BenchJob, KernelJob)
@click.option(
    "--kernels",
    is_flag=True,
    help="Time each backend, our own and torch's, on one linear, beside a plain read.",
)
@THREADS
@QUIET
@offline
def command(
    artifact: str | None, kernels: bool, as_json: bool, quiet: bool, **options: Any
) -> None:
    """Time ARTIFACT, or a model that is not quantized: first and next token, per batch size.

    ARTIFACT is a folder, a name on the hub (org/name), or a GGUF file, and runs as in `generate`.
    --baseline times a model beside it; --kernels times linears alone; --url times a server.

    \b
    Example: quantflow bench work/4-export -b 1 -b 8 --input-tokens 256 --new-tokens 32
             quantflow bench work/4-export --baseline examples/tiny-llama --dtype bfloat16
             quantflow bench work/4-export --prompts book.txt -b 1 8 --results-dir results
             quantflow bench model.Q4_0.gguf -b 1
             quantflow bench work/4-export --num-beams 4
             quantflow bench --url http://127.0.0.1:8000 -b 1 8 --input-tokens 256
             quantflow bench --kernels --scheme W4A16,W4A8 --shape 4096x4096 --tokens 1,256
    """
    if artifact is not None and kernels:
        raise UsageError(f"bench: --kernels beside an artifact, {artifact}", "give one of them")
    url = options["url"]
    if url is not None and kernels:
        raise UsageError(f"bench: --kernels beside --url {url}", "give one of them")
    if artifact is None and not kernels and url is None:
        raise UsageError("bench: nothing to time", "give an artifact, --url, or --kernels")
    if kernels:
        result = KernelJob(**job_values("bench", KernelJob, options)).run()
        show(result, as_json=as_json, text=kernel_text(result))
        return
    job = BenchJob(artifact=Path(artifact or "."), **job_values("bench", BenchJob, options))
    timed = job.run(ProgressLine(quiet=quiet, bars=bars_wanted()))
    if timed is not None:  # otherwise rank 0 has it
        show(timed, as_json=as_json, text=latency_text(timed))


def kernel_text(result: Mapping[str, Any]) -> str:
    """The result of `bench --kernels` as a table for people."""
    lines = [
        f"{result['dtype']}, {result['threads']} threads, medians of {result['rounds']} calls, "
        "weights from memory"
    ]
    if result["why_not"] is not None:
        lines.append(f"our own kernels cannot run: {result['why_not']}")
    rows = [_kernel_row(timing) for timing in result["timings"]]
    columns = (
        "shape",
        "scheme",
        "backend",
        "tokens",
        "microseconds",
        "GB/s",
        "plain read",
        "of it",
        "products/s",
    )
    return "\n".join([*lines, "", table(columns, rows)])


def _kernel_row(timing: Mapping[str, Any]) -> Sequence[str]:
    speed, read = timing["bytes_per_second"], timing["read_bytes_per_second"]
    return (
        f"{timing['out_features']}x{timing['in_features']}",
        timing["scheme"],
        timing["backend"],
        str(timing["tokens"]),
        f"{timing['seconds'] * 1e6:.0f}",
        f"{speed / 1e9:.1f}",
        "" if read is None else f"{read / 1e9:.1f}",
        "" if read is None else f"{speed / read:.0%}",
        f"{timing['products_per_second'] / 1e9:.0f}e9",
    )


def latency_text(result: Mapping[str, Any]) -> str:
    """The result of `bench ARTIFACT`: a summary per batch size, and TGI's benchmark tables."""
    head = _served(result) if "url" in result else _loaded(result)
    if "results_file" in result:
        head.append(f"result: {result['results_file']}")
    parts = ["\n".join(head)]
    for length in dict.fromkeys(batch["input_tokens"] for batch in result["batches"]):
        batches = [batch for batch in result["batches"] if batch["input_tokens"] == length]
        parts += [_summary(result, batch) for batch in batches]
        parts += [_parameters(result, length), _latencies(batches), _rates(batches)]
    if "baseline" in result:
        parts.append(baseline_text(result))
    return "\n\n".join(parts)


def _served(result: Mapping[str, Any]) -> list[str]:
    """The first lines about a server."""
    return [
        f"{result['artifact']} at {result['url']}: {result['method']}, over HTTP",
        f"percentiles {result['percentiles']}",
    ]


def _loaded(result: Mapping[str, Any]) -> list[str]:
    """The first lines about a model that bench loaded."""
    there, rounded = result["memory"].get("device_peak_bytes"), result["rounded_inputs"]
    head = [
        f"{result['artifact']}: {result['decoder']} decoder, "
        f"{', '.join(result['backends']) or 'no quantized linear'}, "
        f"{_workers(result)}, {result['method']}, loaded in {result['load_seconds']:.2f} s, "
        f"peak memory {result['memory']['peak_bytes'] / 2**30:.2f} GiB"
        + ("" if there is None else f", of the device {there / 2**30:.2f} GiB"),
        *result["reasons"],
        *([f"inputs of {rounded} linears are rounded to int8"] if rounded else []),
        f"percentiles {result['percentiles']}",
    ]
    if result["profile"] is not None:
        head.append(f"trace: {result['profile']}")
    return head


def baseline_text(result: Mapping[str, Any]) -> str:
    """An artifact beside its model; a ratio above 1 is faster, or smaller."""
    found, base, ratios = result, result["baseline"], result["ratios"]
    rows: list[Sequence[Any]] = []
    several = len({batch["input_tokens"] for batch in found["batches"]}) > 1
    sides = [
        {(batch["input_tokens"], batch["batch_size"]): batch for batch in side["batches"]}
        for side in (found, base)
    ]
    for of in ratios["batches"]:
        length, size = of["input_tokens"], of["batch_size"]
        what = f"{size} at once, {length} tokens" if several else f"{size} at once"
        firsts = [side[length, size]["first_token"]["average"] for side in sides]
        rows.append(
            (
                f"first token, {what}",
                *(f"{second * 1e3:.1f} ms" for second in firsts),
                f"{of['first_token']:.2f}",
            )
        )
        if of["next_token"] is not None:
            rates = [side[length, size]["decode_per_second"]["average"] for side in sides]
            rows.append(
                (
                    f"tokens per second, {what}",
                    *(f"{rate:.1f}" for rate in rates),
                    f"{of['next_token']:.2f}",
                )
            )
    for name, key, sizes in (
        ("peak memory", "memory", [side["memory"]["peak_bytes"] for side in (found, base)]),
        ("weights", "weights", [side["weight_bytes"] for side in (found, base)]),
    ):
        rows.append((name, *(f"{size / 2**20:.1f} MiB" for size in sizes), f"{ratios[key]:.2f}"))
    rows.append(("decoder", found["decoder"], base["decoder"], ""))
    return _markdown(("", str(found["artifact"]), str(base["artifact"]), "Ratio"), rows)


def _workers(result: Mapping[str, Any]) -> str:
    """The number of threads that computed, and of ranks."""
    ranks = result["ranks"]
    return (
        f"{result['threads']} threads"
        if ranks == 1
        else f"{ranks} ranks of {result['threads']} threads"
    )


def _summary(result: Mapping[str, Any], batch: Mapping[str, Any]) -> str:
    """The lines of IPEX's run.py with --token-latency; P50 and the rest are ours."""
    head = f"---- Prompt size: {batch['input_tokens']}, batch size: {batch['batch_size']}"
    if "failed" in batch:
        return f"{head}\n{batch['failed']}"
    first, following = batch["first_token"], batch["next_token"]
    lines = [
        head,
        " ---------- Summary: ----------",
        f"Inference latency: {batch['seconds'] / result['settings']['runs']:.3f} sec.",
        f"First token average latency: {first['average']:.3f} sec.",
    ]
    if following is not None:
        lines.append(f"Average 2... latency: {following['average']:.3f} sec.")
        lines += [f"P{p} 2... latency: {following[f'p{p}']:.3f} sec." for p in PERCENTILES]
    return "\n".join(
        [
            *lines,
            f"Tokens: {batch['requested']} requested, {batch['produced']} produced",
            f"Throughput: {batch['produced_per_second']:.2f} produced tokens/second, "
            f"{batch['requested_per_second']:.2f} requested",
            *(
                []
                if not batch["joules"]
                else [
                    f"Energy: {batch['joules']:.1f} J, {batch['produced_per_joule']:.2f} tokens/J"
                ]
            ),
        ]
    )


def _parameters(result: Mapping[str, Any], length: int) -> str:
    settings = result["settings"]
    drawn = {name: settings[name] for name in ("temperature", "top_k", "top_p")}
    unset = ("Typical P", "Repetition Penalty", "Frequency Penalty")
    rows = [
        ("Model", result["artifact"]),
        ("Sequence Length", length),
        ("Decode Length", settings["new_tokens"]),
        ("Top N Tokens", None),
        ("N Runs", settings["runs"]),
        ("Warmups", settings["warmups"]),
        *((name.replace("_", " ").title(), value) for name, value in drawn.items()),
        *((name, None) for name in unset),
        ("Watermark", False),
        ("Do Sample", settings["temperature"] != 0 and drawn != dict.fromkeys(drawn)),
    ]
    return _markdown(("Parameter", "Value"), rows)


def _latencies(batches: Sequence[Mapping[str, Any]]) -> str:
    names = {
        "Prefill": "first_token",
        "Decode (token)": "decode_token",
        "Decode (total)": "decode_total",
    }
    shares = [f"p{p}" for p in PERCENTILES]
    columns = ("average", "lowest", "highest", *shares)
    rows = _stepwise(
        batches,
        names,
        lambda spread: [f"{spread[column] * 1e3:.2f} ms" for column in columns],
        width=len(columns),
    )
    return _markdown(("Step", "Batch Size", "Average", "Lowest", "Highest", *shares), rows)


def _rates(batches: Sequence[Mapping[str, Any]]) -> str:
    names = {"Prefill": "prefill_per_second", "Decode": "decode_per_second"}
    columns = ("average", "lowest", "highest")
    rows = _stepwise(
        batches,
        names,
        lambda spread: [f"{spread[column]:.2f} tokens/secs" for column in columns],
        width=len(columns),
    )
    return _markdown(("Step", "Batch Size", "Average", "Lowest", "Highest"), rows)


def _stepwise(
    batches: Sequence[Mapping[str, Any]], names: Mapping[str, str], cells: Any, *, width: int
) -> list[tuple[Any, ...]]:
    """A row per step and batch size, or the reason why a batch has none.

    A step's name stands in its first row only.
    """
    rows: list[tuple[Any, ...]] = []
    for name, key in names.items():
        first = name
        for batch in batches:
            failed, spread = batch.get("failed"), batch.get(key)
            if failed is None and spread is None:
                continue
            rows.append(
                (
                    first,
                    batch["batch_size"],
                    *(cells(spread) if failed is None else (failed, *[""] * (width - 1))),
                )
            )
            first = ""
    return rows


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table whose columns are as wide as their cells."""
    lines = [tuple(columns), *(tuple(map(str, row)) for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    shown = [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    ]
    return "\n".join(
        [shown[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *shown[1:]]
    )

"""Timings as a verb.

Reads    nothing
Writes   nothing
Resumes  nothing
Fails    2 unknown scheme, shape or dtype; groups that do not divide the shape
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quantflow.backends import kernels, native
from quantflow.core.scheme import preset
from quantflow.errors import UsageError
from quantflow.evaluation.kernel_speed import kernel_timings
from quantflow.stages.cli.output import table


@dataclass(frozen=True, kw_only=True)
class KernelJob:
    """Every backend on linears of these schemes and shapes.

    Attributes:
        schemes: names of presets with dynamic inputs or none.
        shapes: as `OUTxIN`.
        tokens: rows of the input, each timed.
        dtype: of the inputs.
        rounds: timed calls of each.
    """

    schemes: tuple[str, ...]
    shapes: tuple[str, ...]
    tokens: tuple[int, ...]
    dtype: str = "bfloat16"
    rounds: int = 7


def run_kernels(job: KernelJob) -> dict[str, Any]:
    """Return the machine's share of the result (threads, why our own kernels cannot run) and a row per timing."""
    if job.rounds < 1 or min(job.tokens, default=0) < 1:
        raise UsageError(f"bench: {job.rounds} rounds of {list(job.tokens)} tokens", "use 1 or more of each")
    schemes, shapes = [preset(name) for name in job.schemes], [_shape(text) for text in job.shapes]
    for scheme in schemes:
        if scheme.input is not None and not scheme.input.dynamic:
            raise UsageError(f"bench: scheme {scheme.name} has a static input", "time a scheme with dynamic inputs or none")
    dtype = getattr(torch, job.dtype)
    rows = []
    for shape in shapes:
        for scheme in schemes:
            for timing in kernel_timings(scheme, shape, tokens=job.tokens, dtype=dtype, rounds=job.rounds):
                read = timing.read_seconds
                row = dataclasses.asdict(timing)
                row["bytes_per_second"] = timing.weight_bytes / timing.seconds
                row["read_bytes_per_second"] = None if read is None else timing.weight_bytes / read
                row["products_per_second"] = timing.tokens * timing.out_features * timing.in_features / timing.seconds
                rows.append(row)
    return {
        "threads": torch.get_num_threads(),
        "dtype": job.dtype,
        "rounds": job.rounds,
        "why_not": native.why_not(kernels.SOURCE, needs=kernels.NEEDS),
        "timings": rows,
    }


def text(result: Mapping[str, Any]) -> str:
    """Return the result of `run_kernels` as a table for people."""
    lines = [f"{result['dtype']}, {result['threads']} threads, medians of {result['rounds']} calls, weights from memory"]
    if result["why_not"] is not None:
        lines.append(f"our own kernels cannot run: {result['why_not']}")
    rows = [_row(timing) for timing in result["timings"]]
    columns = ("shape", "scheme", "backend", "tokens", "microseconds", "GB/s", "plain read", "of it", "products/s")
    return "\n".join([*lines, "", table(columns, rows)])


def _row(timing: Mapping[str, Any]) -> Sequence[str]:
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


def _shape(text: str) -> tuple[int, int]:
    """Return (out_features, in_features) of `OUTxIN`.

    Raises:
        UsageError: it is not two positive numbers.
    """
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"bench: shape {text!r}", "write out_features x in_features, such as 5632x2048")
    return int(parts[0]), int(parts[1])

"""Seconds of the backends for one linear, beside a plain read of as many bytes.

Before every timed call a buffer larger than any cache is read, so that the weight comes from
memory, as it does when a model decodes. Backends and the plain read take turns; medians are
reported.
"""

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantflow import cpu_threads
from quantflow.algorithms import rtn
from quantflow.backends import BACKENDS, kernels, native
from quantflow.backends.backend import Case
from quantflow.benching.bench_job import KernelJob
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme, preset
from quantflow.errors import UsageError

_CACHE_BYTES = 128 << 20  # read to push everything else out
_CPU = torch.device("cpu")
_READ = Path(__file__).with_name("read.c")


@dataclass(frozen=True, kw_only=True)
class KernelTiming:
    """One backend, one linear, one number of tokens.

    Attributes:
        backend, scheme: their names.
        out_features, in_features: the linear's shape.
        tokens: rows of the input.
        weight_bytes: bytes of the weight as the backend holds it, scales included.
        seconds: median of the calls.
        read_seconds: median of plain reads of weight_bytes; None where our own kernels cannot be
            had.
    """

    backend: str
    scheme: str
    out_features: int
    in_features: int
    tokens: int
    weight_bytes: int
    seconds: float
    read_seconds: float | None


def run(job: KernelJob) -> dict[str, Any]:
    """The timings as rows, and what they depend on.

    Returns:
        `threads`, `dtype`, `rounds`, `why_not` (why our own kernels cannot run; None when they can)
        and `timings`, a row per timing.
    """
    if job.rounds < 1 or min(job.tokens, default=0) < 1:
        raise UsageError(
            f"bench: {job.rounds} rounds of {list(job.tokens)} tokens", "use 1 or more of each"
        )
    if job.dtype == "float16":
        raise UsageError(
            "bench: --kernels in float16, which no kernel computes in", "use float32 or bfloat16"
        )
    schemes, shapes = [preset(name) for name in job.schemes], [_shape(text) for text in job.shapes]
    for scheme in schemes:
        if scheme.input is not None and scheme.input.measured:
            raise UsageError(
                f"bench: scheme {scheme.name} has a static input",
                "time a scheme with dynamic inputs or none",
            )
    cpu_threads.tell_torch()
    dtype = getattr(torch, job.dtype)
    rows = []
    for shape in shapes:
        for scheme in schemes:
            for timing in kernel_timings(
                scheme, shape, tokens=job.tokens, dtype=dtype, rounds=job.rounds
            ):
                read = timing.read_seconds
                row = asdict(timing)
                row["bytes_per_second"] = timing.weight_bytes / timing.seconds
                row["read_bytes_per_second"] = None if read is None else timing.weight_bytes / read
                row["products_per_second"] = (
                    timing.tokens * timing.out_features * timing.in_features / timing.seconds
                )
                rows.append(row)
    return {
        "threads": torch.get_num_threads(),
        "dtype": job.dtype,
        "rounds": job.rounds,
        "why_not": native.why_not(kernels.SOURCE, cpu_flags=kernels.CPU_FLAGS),
        "timings": rows,
    }


def kernel_timings(
    scheme: LinearScheme,
    shape: tuple[int, int],
    *,
    tokens: Sequence[int],
    dtype: torch.dtype,
    rounds: int,
    seed: int = 0,
) -> Iterator[KernelTiming]:
    """Yield the timings of every backend that can run such a linear on the CPU.

    Args:
        scheme: scheme without a static input, whose scale only calibration knows.
        shape: (out_features, in_features); the weight is random.
        tokens: rows of the input, each number timed.
        dtype: dtype of the inputs.
        rounds: timed calls of each backend.
        seed: seed of weight and inputs.

    Raises:
        SchemeError: the scheme has a static input, or its groups do not divide in_features.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) / shape[1] ** 0.5
    rounded = rtn.quantize_group(
        {"weight": weight}, scheme, statistics={}, scale_dtype=torch.bfloat16
    )
    linear = QuantizedLinear(weight=rounded["weight"].weight, scheme=scheme)
    able = {
        n: b
        for n, b in BACKENDS.items()
        if b.why_not(Case(scheme=scheme, device=_CPU, shape=shape, dtype=dtype)) is None
    }
    prepared = {name: backend.prepare(linear, dtype) for name, backend in able.items()}
    sizes = {name: weight_bytes(value) for name, value in prepared.items()}
    reads = native.why_not(_READ, cpu_flags=kernels.CPU_FLAGS) is None
    cache = torch.zeros(_CACHE_BYTES // 8, dtype=torch.int64)
    plain = torch.zeros(max(sizes.values()), dtype=torch.uint8)
    for count in tokens:
        x = torch.randn(count, shape[1], generator=generator).to(dtype)
        calls: dict[str, Callable[[], object]] = {}
        for name, backend in able.items():
            calls[name] = partial(backend.linear, x, prepared[name], None)
            if reads:
                calls[f"read {name}"] = partial(read, plain[: sizes[name]])
        taken = _medians(calls, cache, rounds=rounds)
        for name in able:
            yield KernelTiming(
                backend=name,
                scheme=scheme.name,
                out_features=shape[0],
                in_features=shape[1],
                tokens=count,
                weight_bytes=sizes[name],
                seconds=taken[name],
                read_seconds=taken.get(f"read {name}"),
            )


def read(data: Tensor) -> int:
    """Read a contiguous tensor once, as fast as memory allows: the bound of a kernel.

    Returns:
        A sum that means nothing; it keeps the compiler from leaving the reads out.

    Raises:
        UnsupportedError: the library of our own kernels cannot be had.
    """
    function = native.library(_READ).quantflow_read
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
    return int(function(data.data_ptr(), data.nbytes))


def weight_bytes(prepared: Any) -> int:
    """The bytes of all tensors in what a backend prepared: a record, a tuple, a table, a tensor."""
    if isinstance(prepared, Tensor):
        return prepared.nbytes
    if is_dataclass(prepared):
        prepared = {field.name: getattr(prepared, field.name) for field in fields(prepared)}
    parts = (
        prepared.values()
        if isinstance(prepared, dict)
        else prepared
        if isinstance(prepared, tuple)
        else ()
    )
    return sum(map(weight_bytes, parts))


def _medians(
    calls: dict[str, Callable[[], object]], cache: Tensor, *, rounds: int
) -> dict[str, float]:
    """The median seconds of each call; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            cache.sum()
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(taken[1:]) for name, taken in seconds.items()}


def _shape(text: str) -> tuple[int, int]:
    """The shape (out_features, in_features) that `OUTxIN` names.

    Raises:
        UsageError: it is not two positive numbers.
    """
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(
            f"bench: shape {text!r}", "write out_features x in_features, such as 5632x2048"
        )
    return int(parts[0]), int(parts[1])

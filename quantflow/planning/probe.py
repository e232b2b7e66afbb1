"""A probe: read one layer, run a sequence through it, round a piece of it, and time each.

Sizes are capped, so that the probe takes seconds whatever the model; `quantflow.planning.durations` extrapolates.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantflow import process_memory
from quantflow.algorithms import ALGORITHMS, NEAREST
from quantflow.artifact.checkpoint import Checkpoint
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme
from quantflow.models.capture import LayerStream
from quantflow.models.configuration import load_config
from quantflow.models.graph import Graph, text_config
from quantflow.models.load import Source
from quantflow.numerics import output_blocks
from quantflow.numerics.statistics import COUNT
from quantflow.observers import OBSERVERS
from quantflow.observers.gradient import GRADIENT_SUM, GradientObserver
from quantflow.observers.hessian import HESSIAN_SUM, HessianObserver
from quantflow.planning.durations import Rounding, Speed
from quantflow.planning.plan import Plan
from quantflow.planning.sizes import FORMAT

TOKENS = 256
ROWS, COLUMNS = 512, 1024  # of the pieces that GPTQ is timed on, at most; twice of each at the largest
WRITTEN = 32 << 20  # bytes


@torch.no_grad()
def probe(checkpoint: Checkpoint, graph: Graph, plans: Sequence[Plan], *, length: int, folder: Path) -> Speed:
    """Return the rates of this machine on the first layer of a model.

    Args:
        checkpoint: the opened model.
        graph: its linears.
        plans: one per artifact.
        length: tokens of a calibration sequence; at most TOKENS are run.
        folder: on the disk that will be written; a nameless file is written there and gone.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _probe(checkpoint, graph, plans, length=length, folder=folder)
    finally:
        torch.set_num_threads(threads)


def _probe(checkpoint: Checkpoint, graph: Graph, plans: Sequence[Plan], *, length: int, folder: Path) -> Speed:
    source = Source(checkpoint=checkpoint, config=load_config(checkpoint))
    stream = LayerStream(source, graph)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(text_config(source.config).vocab_size, (min(length, TOKENS),), generator=generator)
    (state,) = stream.begin([tokens])
    layer = graph.layers[0]
    stored = sum(info.nbytes for name, info in checkpoint.infos.items() if name.startswith(f"{layer.prefix}."))
    begin = time.perf_counter()
    with stream.layer(0) as module:
        reading = time.perf_counter() - begin
        running = _seconds(lambda: stream.run(module, state))
    weight = source.read([f"{layer.linears[0]}.weight"])[f"{layer.linears[0]}.weight"]
    x = torch.randn(1, len(tokens), weight.shape[1], generator=generator)
    observed = {name: _seconds(lambda name=name: _observe(name, x)) / x.numel() for name in OBSERVERS}  # type: ignore[misc]
    data = os.urandom(WRITTEN)
    return Speed(
        cores=process_memory.usable_cores(),
        read=reading / stored,
        written=_seconds(lambda: _write(folder, data)) / WRITTEN,
        hashed=_seconds(lambda: hashlib.sha256(data).digest()) / WRITTEN,
        token=running / len(tokens),
        observed=observed,
        hessian=observed[HessianObserver.NAME] / weight.shape[1],
        gradient=observed[GradientObserver.NAME] / output_blocks.width(weight.shape[1]),
        rounded={plan.name: _rounded(plan, weight) for plan in plans},
        gptq={plan.name: _gptq(plan, weight) for plan in plans if HESSIAN_SUM.name in ALGORITHMS[plan.algorithm].NEEDS},
    )


def _seconds(call: Callable[[], Any]) -> float:
    """Return the seconds of a call, after one that warms up."""
    call()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _observe(name: str, x: Tensor) -> None:
    OBSERVERS[name](features=x.shape[-1]).update(x)


def _write(folder: Path, data: bytes) -> None:
    while not folder.is_dir():
        folder = folder.absolute().parent
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _scheme(plan: Plan) -> LinearScheme:
    return next(scheme for scheme in plan.schemes.values() if scheme is not None)


def _rounded(plan: Plan, weight: Tensor) -> float:
    """Return the seconds per weight of encoding and of rounding, to nearest where the plan's algorithm reads statistics."""
    scheme, piece = _scheme(plan), weight[:ROWS].contiguous()
    algorithm = ALGORITHMS[NEAREST if ALGORITHMS[plan.algorithm].NEEDS else plan.algorithm]
    dtype = FORMAT.scale_dtype(scheme, weight.dtype)

    def round_piece() -> None:
        result = algorithm.quantize_group({"w": piece}, scheme, statistics={}, scale_dtype=dtype)["w"]
        if scheme.input is None or not scheme.input.measured:
            FORMAT.encode("w", QuantizedLinear(weight=result.weight, scheme=scheme), scale_dtype=dtype)

    return _seconds(round_piece) / piece.numel()


def _gptq(plan: Plan, weight: Tensor) -> Rounding:
    """Return what rounding with a Hessian takes: three pieces for three unknowns."""
    scheme = _scheme(plan)
    group = scheme.weights.group_size or 1
    rows, columns = min(ROWS, weight.shape[0] // 2), min(2 * COLUMNS, weight.shape[1])
    half = max(group, columns // 2 // group * group)
    columns = columns // group * group
    if half == columns or rows == 0:  # too small for its columns to be told apart
        return Rounding(cubic=0.0, linear=_one(plan, weight, rows or 1, columns) / ((rows or 1) * columns), square=0.0)
    small, wide, tall = (_one(plan, weight, r, c) for r, c in ((rows, half), (rows, columns), (2 * rows, columns)))
    equations = torch.tensor(
        [[float(c**3), float(r * c), float(r * c * c)] for r, c in ((rows, half), (rows, columns), (2 * rows, columns))],
        dtype=torch.float64,
    )
    scale = equations.amax(0)  # the unknowns differ by many orders of magnitude
    solved = torch.linalg.solve(equations / scale, torch.tensor([small, wide, tall], dtype=torch.float64)) / scale
    cubic, linear, square = (max(0.0, value) for value in solved.tolist())
    return Rounding(cubic=cubic, linear=linear, square=square)


def _one(plan: Plan, weight: Tensor, rows: int, columns: int) -> float:
    scheme = _scheme(plan)
    piece = weight[:rows, :columns].contiguous()
    x = torch.randn(2 * columns, columns, generator=torch.Generator().manual_seed(1))
    statistics = {HESSIAN_SUM.name: x.T @ x, COUNT.name: torch.tensor(2 * columns), f"w|{GRADIENT_SUM.name}": torch.eye(rows)}
    dtype = FORMAT.scale_dtype(scheme, weight.dtype)
    begin = time.perf_counter()
    ALGORITHMS[plan.algorithm].quantize_group({"w": piece}, scheme, statistics=statistics, scale_dtype=dtype)
    return time.perf_counter() - begin

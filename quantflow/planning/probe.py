"""A probe: it times the reading of one layer, a sequence through it, and the rounding of a piece.

It runs on the device that will do the work. Sizes are capped, so that the probe takes seconds
whatever the model; `quantflow.planning.durations` extrapolates. Transfers to a device and back
count for the work that needs them.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantflow import cpu_threads
from quantflow.algorithms import ALGORITHMS, NEAREST
from quantflow.core.device import HOST, Device, fetched
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme
from quantflow.files.checkpoint import Checkpoint
from quantflow.models.capture import LayerStream
from quantflow.models.configuration import load_config
from quantflow.models.graph import Graph, text_config
from quantflow.models.load import Source
from quantflow.numerics import output_blocks
from quantflow.numerics.statistics import COUNT
from quantflow.observers import OBSERVERS
from quantflow.observers.gradient import GRADIENT_SUM, GradientObserver
from quantflow.observers.hessian import HESSIAN_SUM, HessianObserver
from quantflow.planning.durations import GptqSpeed, Speed
from quantflow.planning.plan import Plan
from quantflow.planning.sizes import FORMAT

TOKENS = 256
# Rows and columns of the pieces on which GPTQ is timed, at most; the largest piece has twice each.
ROWS, COLUMNS = 512, 1024
# A device's pieces are so many times as large: in small ones its latencies would count too much.
ON_DEVICE = 8
WRITTEN = 32 << 20  # bytes


@torch.no_grad()
def probe(
    checkpoint: Checkpoint,
    graph: Graph,
    plans: Sequence[Plan],
    *,
    length: int,
    folder: Path,
    device: Device = HOST,
    dtype: torch.dtype = torch.float32,
    narrow: Collection[str] = (),
) -> Speed:
    """Rates of this machine, and of its device, on the first layer of a model.

    Args:
        checkpoint: opened checkpoint of the model.
        graph: linears of the model.
        plans: plans of the artifacts.
        length: tokens of a calibration sequence; at most TOKENS are run, and on a device ON_DEVICE
            times as many.
        folder: folder on the disk that will be written; an unnamed file is written there and
            removed.
        device: device that will run layers.
        dtype: dtype in which measure and validate run layers.
        narrow: artifacts whose calibration text runs in bfloat16; that of others is float32.

    Raises:
        ResourceError: the memory of the device ran out.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with device.current(), device.deterministic():
            return _probe(
                checkpoint,
                graph,
                plans,
                length=length,
                folder=folder,
                device=device,
                dtype=dtype,
                narrow=narrow,
            )
    finally:
        torch.set_num_threads(threads)


def _probe(
    checkpoint: Checkpoint,
    graph: Graph,
    plans: Sequence[Plan],
    *,
    length: int,
    folder: Path,
    device: Device,
    dtype: torch.dtype,
    narrow: Collection[str],
) -> Speed:
    source = Source(checkpoint=checkpoint, config=load_config(checkpoint))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        text_config(source.config).vocab_size,
        (min(length, TOKENS * _times(device)),),
        generator=generator,
    )
    layer = next(layer for layer in graph.layers if layer.groups)
    stored = sum(
        info.nbytes
        for name, info in checkpoint.infos.items()
        if name.startswith(f"{layer.prefix}.")
    )
    reading, running = _layer(source, graph, tokens, device=device, dtype=torch.float32)
    ran = {torch.float32: running}  # dtype -> seconds of a sequence
    for other in {dtype, *([torch.bfloat16] if narrow else [])} - {*ran}:
        _, ran[other] = _layer(source, graph, tokens, device=device, dtype=other)
    weight = source.read([f"{layer.linears[0]}.weight"])[f"{layer.linears[0]}.weight"]
    x = device.put(torch.randn(1, len(tokens), weight.shape[1], generator=generator))
    observed = {
        name: _seconds(lambda name=name: _observe(name, x, device), device) / x.numel()  # type: ignore[misc]
        for name in OBSERVERS
    }
    data = os.urandom(WRITTEN)
    cores = cpu_threads.usable_cores()
    return Speed(
        cores=cores,
        units=cores if device.is_host else 1,
        ahead=not device.is_host,
        read=reading / stored,
        written=_seconds(lambda: _write(folder, data)) / WRITTEN,
        hashed=_seconds(lambda: hashlib.sha256(data).digest()) / WRITTEN,
        token=running / len(tokens),
        run=ran[dtype] / len(tokens),
        observed=observed,
        hessian=observed[HessianObserver.NAME] / weight.shape[1],
        narrow=_narrow(narrow, ran, x, device),
        gradient=observed[GradientObserver.NAME] / output_blocks.width(weight.shape[1]),
        rounded={plan.name: _rounded(plan, weight, device) for plan in plans},
        gptq={
            plan.name: _gptq(plan, weight, device)
            for plan in plans
            if HESSIAN_SUM.name in ALGORITHMS[plan.algorithm].NEEDS
        },
    )


def _narrow(
    names: Collection[str], ran: Mapping[torch.dtype, float], x: Tensor, device: Device
) -> dict[str, tuple[float, float]]:
    """`Speed.narrow`: a token through a layer, and its Hessians, where text is bfloat16.

    Args:
        names: artifacts whose calibration text is.
        ran: dtype -> seconds of a sequence through a layer.
        x: [1, S, K], an input of a linear in float32.
        device: device that runs layers.
    """
    if not names:
        return {}
    half = x.to(torch.bfloat16)
    hessian = _seconds(lambda: _observe(HessianObserver.NAME, half, device), device)
    token = ran[torch.bfloat16] / x.shape[1]
    return dict.fromkeys(names, (token, hessian / x.numel() / x.shape[2]))


def _layer(
    source: Source, graph: Graph, tokens: Tensor, *, device: Device, dtype: torch.dtype
) -> tuple[float, float]:
    """Seconds of reading the first layer that runs, and of a sequence through it and back."""
    stream = LayerStream(source, graph, dtype=dtype, device=device)
    (state,) = stream.begin([tokens])
    device.wait()
    begin = time.perf_counter()
    index = next(layer.index for layer in graph.layers if layer.groups)
    with stream.layer(index) as module:
        device.wait()
        reading = time.perf_counter() - begin
        return reading, _seconds(lambda: device.fetch(stream.run(module, state)), device)


def _times(device: Device) -> int:
    """Factor by which a device's pieces are larger than a core's."""
    return 1 if device.is_host else ON_DEVICE


def _seconds(call: Callable[[], Any], device: Device = HOST) -> float:
    """Seconds of a call until the device is done, after one call that warms up."""
    call()
    device.wait()
    begin = time.perf_counter()
    call()
    device.wait()
    return time.perf_counter() - begin


def _observe(name: str, x: Tensor, device: Device) -> None:
    with device.factories():
        observer = OBSERVERS[name](features=x.shape[-1])
    observer.update(x)


def _write(folder: Path, data: bytes) -> None:
    while not folder.is_dir():
        folder = folder.absolute().parent
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _scheme(plan: Plan) -> LinearScheme:
    return next(scheme for scheme in plan.schemes.values() if scheme is not None)


def _rounded(plan: Plan, weight: Tensor, device: Device) -> float:
    """Seconds per weight of rounding and encoding, to nearest where statistics are read."""
    scheme = _scheme(plan)
    algorithm = ALGORITHMS[NEAREST if ALGORITHMS[plan.algorithm].NEEDS else plan.algorithm]
    dtype = FORMAT.scale_dtype(scheme, weight.dtype)
    there = device if algorithm.ON_DEVICE else HOST
    piece = weight[: ROWS * _times(there)].contiguous()

    def round_piece() -> None:
        result = algorithm.quantize_group(
            {"w": there.put(piece)}, scheme, statistics={}, scale_dtype=dtype
        )["w"]
        if scheme.input is None or not scheme.input.measured:
            fetched(
                FORMAT.encode(
                    "w", QuantizedLinear(weight=result.weight, scheme=scheme), scale_dtype=dtype
                ),
                there,
            )

    return _seconds(round_piece, there) / piece.numel()


def _gptq(plan: Plan, weight: Tensor, device: Device) -> GptqSpeed:
    """Rates of rounding with a Hessian: three pieces are timed for three unknowns."""
    scheme = _scheme(plan)
    group = scheme.weights.group_size or 1
    there = device if ALGORITHMS[plan.algorithm].ON_DEVICE else HOST
    rows = min(ROWS * _times(there), weight.shape[0] // 2)
    columns = min(2 * COLUMNS * _times(there), weight.shape[1])
    half = max(group, columns // 2 // group * group)
    columns = columns // group * group
    if half == columns or rows == 0:  # the weight is too small for three different pieces
        return GptqSpeed(
            cubic=0.0,
            linear=_one(plan, weight, rows or 1, columns, there) / ((rows or 1) * columns),
            square=0.0,
        )
    if not there.is_host:
        _one(plan, weight, rows, half, there)  # its libraries begin with their first call
    small, wide, tall = (
        _one(plan, weight, r, c, there)
        for r, c in ((rows, half), (rows, columns), (2 * rows, columns))
    )
    equations = torch.tensor(
        [
            [float(c**3), float(r * c), float(r * c * c)]
            for r, c in ((rows, half), (rows, columns), (2 * rows, columns))
        ],
        dtype=torch.float64,
    )
    scale = equations.amax(0)  # the unknowns differ by many orders of magnitude
    solved = (
        torch.linalg.solve(
            equations / scale, torch.tensor([small, wide, tall], dtype=torch.float64)
        )
        / scale
    )
    cubic, linear, square = (max(0.0, value) for value in solved.tolist())
    return GptqSpeed(cubic=cubic, linear=linear, square=square)


def _one(plan: Plan, weight: Tensor, rows: int, columns: int, there: Device) -> float:
    scheme = _scheme(plan)
    algorithm = ALGORITHMS[plan.algorithm]
    piece = there.put(weight[:rows, :columns].contiguous())
    x = there.put(torch.randn(2 * columns, columns, generator=torch.Generator().manual_seed(1)))
    statistics = {HESSIAN_SUM.name: x.T @ x}
    statistics |= {
        COUNT.name: torch.tensor(2 * columns),
        f"w|{GRADIENT_SUM.name}": there.put(torch.eye(rows)),
    }
    dtype = FORMAT.scale_dtype(scheme, weight.dtype)
    there.wait()
    begin = time.perf_counter()
    algorithm.quantize_group({"w": piece}, scheme, statistics=statistics, scale_dtype=dtype)
    there.wait()
    return time.perf_counter() - begin

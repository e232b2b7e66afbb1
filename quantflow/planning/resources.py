"""The grant of memory and disk: what a stage needs against what the machine and the user allow.

A stage that needs more than is allowed is refused before it reads anything. It asks once:

    size = model_size(source.checkpoint.infos, source.config, graph)
    allowance = allow_quantize(job.resources, size, plan, lengths=[512, 512], folder=job.output)

and uses the answer: `Workers(allowance.workers)`, `ahead=allowance.in_flight`. An allowance never
changes a bit of a result: it only says how many independent units run at once. When memory is short
the second worker goes first; what is left is what the stage cannot do without. Hidden states wait
on disk in any case: the system's file cache keeps those that fit.

The needs come from the formulas of `quantflow.planning.cost`, which `quantflow plan` prints. A
limit holds for each process of a stage by itself.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantflow import cpu_threads, process_memory
from quantflow.core.device import HOST, Device
from quantflow.errors import ResourceError
from quantflow.files.disk import free_bytes
from quantflow.planning.cost import (
    MemoryNeed,
    need_export,
    need_files,
    need_layers,
    need_measure,
    need_validate,
)
from quantflow.planning.head import HeadPlan
from quantflow.planning.plan import Plan
from quantflow.planning.recipe import Resources
from quantflow.planning.sizes import ModelSize
from quantflow.units import parse_size
from quantflow.units import size as text_of

OFFLOAD_SHARE = 10  # disk_offload leaves a tenth of the memory


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What a stage may use.

    Attributes:
        workers: units that run at once, at least 1.
        in_flight: units that have begun or finished but are not yet taken.
        peak_bytes: expected peak memory of the process.
        disk_bytes: expected bytes that the stage writes, scratch files included.
        result_bytes: the part of `disk_bytes` that stays.
    """

    workers: int
    in_flight: int
    peak_bytes: int
    disk_bytes: int
    result_bytes: int = 0


def allow_measure(
    resources: Resources,
    model: ModelSize,
    *,
    lengths: Sequence[int],
    stats: Sequence[str],
    counts: bool,
    folder: Path,
) -> Allowance:
    """Allowance of measure for sequences of these lengths; see `need_measure`.

    Raises:
        ResourceError: the stage does not fit; the message gives what is needed and what there is.
    """
    return grant(
        need_measure(model, lengths=lengths, stats=stats, counts=counts), resources, folder=folder
    )


def allow_quantize(
    resources: Resources, model: ModelSize, plan: Plan, *, lengths: Sequence[int], folder: Path
) -> Allowance:
    """Allowance of quantize, on the path that the plan takes.

    Raises:
        ResourceError: the stage does not fit; the message gives what is needed and what there is.
    """
    need = (
        need_files(model, plan) if plan.file_to_file else need_layers(model, plan, lengths=lengths)
    )
    return grant(need, resources, folder=folder)


def allow_export(
    resources: Resources, model: ModelSize, plan: Plan, *, shard_size: int, folder: Path
) -> Allowance:
    """Allowance of export and its proof.

    Raises:
        ResourceError: the stage does not fit; the message gives what is needed and what there is.
    """
    return grant(need_export(model, plan, shard_size=shard_size), resources, folder=folder)


def allow_validate(
    resources: Resources,
    model: ModelSize,
    *,
    lengths: Sequence[int],
    folder: Path,
    models: int = 3,
    head: HeadPlan | None = None,
) -> Allowance:
    """Allowance of validate for windows of these lengths.

    Args:
        resources: limits of the user.
        model: sizes of the model.
        lengths: tokens of each window.
        folder: folder that validate writes.
        models: number of models that run: baseline, candidate, noise.
        head: plan of the candidate's head; None leaves it as it is.

    Raises:
        ResourceError: the stage does not fit; the message gives what is needed and what there is.
    """
    return grant(
        need_validate(model, lengths=lengths, models=models, head=head), resources, folder=folder
    )


def grant(
    need: MemoryNeed, resources: Resources, *, folder: Path, base: int | None = None
) -> Allowance:
    """The largest allowance that fits: all workers, or as many as there is memory for.

    Args:
        need: memory and disk that the stage takes.
        resources: limits of the user.
        folder: folder that the stage writes; files of an earlier attempt count as written.
        base: bytes of the process before the stage; None takes what it has, or will have once it
            has imported everything.

    Raises:
        ResourceError: not even one worker fits, or the disk is too small.
    """
    resident = max(process_memory.usage().resident, need.base) if base is None else base
    limit, why = memory_limit(resources, resident=resident)
    least = need.peak(base=resident, workers=1)
    if least > limit:
        raise ResourceError(
            f"{need.stage}: needs {least} bytes of memory ({text_of(least)}), {why} is {limit} "
            f"({text_of(limit)})",
            _remedy(resources, least),
        )
    check_disk(need, resources, folder=folder)
    workers = next(
        n
        for n in range(cpu_threads.usable_cores(), 0, -1)
        if need.peak(base=resident, workers=n) <= limit
    )
    return Allowance(
        workers=workers,
        in_flight=workers,
        peak_bytes=need.peak(base=resident, workers=workers),
        disk_bytes=need.result + need.scratch,
        result_bytes=need.result,
    )


def memory_limit(resources: Resources, *, resident: int) -> tuple[int, str]:
    """Bytes to which this process may grow, and the words for what limits them.

    Args:
        resources: limits of the user.
        resident: bytes that the process already has.
    """
    free = resident + process_memory.available_bytes()
    limit, why = free, "what is free on this machine"
    if resources.max_memory is not None:
        limit, why = parse_size(resources.max_memory), f"--max-memory {resources.max_memory}"
    elif resources.disk_offload:
        limit, why = (
            process_memory.total_bytes() // OFFLOAD_SHARE,
            "the tenth of memory that --disk-offload leaves",
        )
    return (limit, why) if limit <= free else (free, "what is free on this machine")


def check_disk(need: MemoryNeed, resources: Resources, *, folder: Path) -> None:
    """Refuse a stage whose files would not fit.

    Raises:
        ResourceError: the files exceed --max-disk, or the free space beside what an earlier attempt
            wrote.
    """
    wanted = need.result + need.scratch
    if resources.max_disk is not None and wanted > parse_size(resources.max_disk):
        raise ResourceError(
            f"{need.stage}: writes {wanted} bytes ({text_of(wanted)}), --max-disk is "
            f"{resources.max_disk}",
            f"give --max-disk {round_up(wanted)} or more, or a scheme of fewer bits",
        )
    # the result, and the hidden folders beside it from which an interrupted stage resumes
    earlier = [folder, *folder.parent.glob(f".{folder.name}.*")]
    missing = max(0, wanted - sum(map(written_bytes, earlier)))
    free = free_bytes(folder)
    if missing > free:
        raise ResourceError(
            f"{folder}: {need.stage} writes {missing} bytes ({text_of(missing)}), {free} "
            f"({text_of(free)}) are free",
            f"free {round_up(missing - free)} on that disk, or choose another -o",
        )


def written_bytes(folder: Path) -> int:
    """Bytes of the files below a folder; 0 where there is no folder."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            total += os.lstat(os.path.join(root, name)).st_size
    return total


def compare(stage: str, *, planned: int, used: int, what: str = "memory") -> str:
    """One line on how good the plan was: `measure memory: planned 3.10 GB, used 2.90 GB, -6 %`."""
    change = f"{(used - planned) / planned:+.0%}".replace("%", " %") if planned else "not planned"
    return f"{stage} {what}: planned {text_of(planned)}, used {text_of(used)}, {change}"


def account(
    stage: str,
    allowance: Allowance,
    folder: Path,
    *,
    on_device: int | None = None,
    device: Device = HOST,
) -> Iterator[str]:
    """Lines that compare a finished stage's memory, device memory and disk with the plan.

    Args:
        stage: name of the stage.
        allowance: what was planned.
        folder: folder that the stage wrote.
        on_device: bytes of tensors that were planned on the device; None where layers ran on the
            CPU.
        device: device that ran the layers.
    """
    yield compare(stage, planned=allowance.peak_bytes, used=process_memory.usage().peak)
    if on_device is not None and (used := device.peak_bytes()) is not None:
        yield compare(stage, planned=on_device, used=used, what=f"memory of {device.name}")
    yield compare(stage, planned=allowance.result_bytes, used=written_bytes(folder), what="disk")


def round_up(count: int) -> str:
    """A size of at least `count` bytes as a flag takes it: `3.2GB`, `640MB`."""
    if count >= 10**9:
        return f"{-(-count // 10**8) / 10:.1f}GB"
    return f"{-(-count // 10**6)}MB"


def _remedy(resources: Resources, least: int) -> str:
    if process_memory.usage().resident + process_memory.available_bytes() < least:
        return f"end other programs, or use a machine with {text_of(least)} of free memory"
    return f"give --max-memory {round_up(least)} or more" + (
        " instead of --disk-offload" if resources.disk_offload else ""
    )

"""What each stage needs, what the machine and the user allow, and the refusal when the first exceeds the second.

A stage asks once, before it reads anything:

    size = model_size(source.checkpoint.infos, source.config, graph)                            # quantflow.planning.sizes
    allowance = allow_measure(job.resources, size, lengths=[512, 512], stats=job.stats, folder=job.output)
    allowance = allow_quantize(job.resources, size, plan, lengths=[512, 512], folder=job.output)      # either path
    allowance = allow_export(job.resources, size, plan, shard_size=4 << 30, folder=job.output)
    allowance = allow_validate(job.resources, size, lengths=[512, 512], folder=job.report, models=3)

and uses what it was given: `Workers(allowance.workers)`, `ahead=allowance.in_flight`. Nothing of it
changes a bit of a result: it only says how many independent units run at once. When memory is short
the second worker goes; what is left is what the stage cannot do without. Hidden states wait on disk
whatever there is: the system's file cache has those that fit.

What is needed comes from the formulas of `quantflow.planning.cost`, which `quantflow plan` prints.
A limit holds for each process of a stage by itself.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantflow import process_memory
from quantflow.core.device import HOST, Device
from quantflow.errors import ResourceError
from quantflow.files.disk import free_bytes
from quantflow.planning.cost import (
    Need,
    need_export,
    need_files,
    need_layers,
    need_measure,
    need_validate,
)
from quantflow.planning.head import HeadPlan
from quantflow.planning.plan import Plan
from quantflow.planning.recipe import Resources, parse_size
from quantflow.planning.sizes import ModelSize
from quantflow.units import size as text_of

OFFLOAD_SHARE = 10  # disk_offload leaves a tenth of the memory


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What a stage may use.

    Attributes:
        workers: units that run at once, at least 1.
        in_flight: units that may be begun or finished but not yet taken.
        peak_bytes: what the memory of the process is expected to come to.
        disk_bytes: what the stage is expected to write, scratch files included.
        result_bytes: of these, what stays.
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
    folder: Path,
) -> Allowance:
    """Return what measure may use for sequences of these lengths; see `need_measure`.

    Raises:
        ResourceError: it does not fit; the message says what is needed and what there is.
    """
    return grant(need_measure(model, lengths=lengths, stats=stats), resources, folder=folder)


def allow_quantize(
    resources: Resources, model: ModelSize, plan: Plan, *, lengths: Sequence[int], folder: Path
) -> Allowance:
    """Return what quantize may use, on the path that the plan takes.

    Raises:
        ResourceError: it does not fit; the message says what is needed and what there is.
    """
    need = (
        need_files(model, plan) if plan.file_to_file else need_layers(model, plan, lengths=lengths)
    )
    return grant(need, resources, folder=folder)


def allow_export(
    resources: Resources, model: ModelSize, plan: Plan, *, shard_size: int, folder: Path
) -> Allowance:
    """Return what export and its proof may use.

    Raises:
        ResourceError: it does not fit; the message says what is needed and what there is.
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
    """Return what validate may use for windows of these lengths and that many models (baseline, candidate, noise).

    The candidate's head is quantized where `head` says so.

    Raises:
        ResourceError: it does not fit; the message says what is needed and what there is.
    """
    return grant(
        need_validate(model, lengths=lengths, models=models, head=head), resources, folder=folder
    )


def grant(need: Need, resources: Resources, *, folder: Path, base: int | None = None) -> Allowance:
    """Return the most that fits: all workers, or as many as there is memory for.

    Args:
        need: what the stage takes.
        resources: the limits.
        folder: where it writes; what is there of an earlier attempt counts as written.
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
        for n in range(process_memory.usable_cores(), 0, -1)
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
    """Return how large this process may grow, in bytes, and what says so.

    Args:
        resources: the user's limits.
        resident: bytes that the process has already.
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


def check_disk(need: Need, resources: Resources, *, folder: Path) -> None:
    """Refuse a stage whose files would not fit.

    Raises:
        ResourceError: they exceed --max-disk, or what is free beside what an earlier attempt has
            written.
    """
    wanted = need.result + need.scratch
    if resources.max_disk is not None and wanted > parse_size(resources.max_disk):
        raise ResourceError(
            f"{need.stage}: writes {wanted} bytes ({text_of(wanted)}), --max-disk is "
            f"{resources.max_disk}",
            f"give --max-disk {round_up(wanted)} or more, or a scheme of fewer bits",
        )
    # the result, and what stages keep beside it to go on from
    earlier = [folder, *folder.parent.glob(f".{folder.name}.*")]
    missing, free = max(0, wanted - sum(map(written_bytes, earlier))), free_bytes(folder)
    if missing > free:
        raise ResourceError(
            f"{folder}: {need.stage} writes {missing} bytes ({text_of(missing)}), {free} "
            f"({text_of(free)}) are free",
            f"free {round_up(missing - free)} on that disk, or choose another -o",
        )


def written_bytes(folder: Path) -> int:
    """Return the bytes of the files below a folder, 0 where there is none."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            total += os.lstat(os.path.join(root, name)).st_size
    return total


def compare(stage: str, *, planned: int, used: int, what: str = "memory") -> str:
    """Return one line that says how good the plan was: `measure memory: planned 3.10 GB, used 2.90 GB, -6 %`."""
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
    """Yield what a finished stage used beside what was planned: memory, that of a device, and the bytes of its folder.

    Args:
        stage: its name.
        allowance: what was planned.
        folder: what it wrote.
        on_device: bytes of tensors that were planned on the device; None where layers ran on the
            CPU.
        device: where they ran.
    """
    yield compare(stage, planned=allowance.peak_bytes, used=process_memory.usage().peak)
    if on_device is not None and (used := device.peak_bytes()) is not None:
        yield compare(stage, planned=on_device, used=used, what=f"memory of {device.name}")
    yield compare(stage, planned=allowance.result_bytes, used=written_bytes(folder), what="disk")


def round_up(count: int) -> str:
    """Return a size that a flag takes and that is no less than `count` bytes: `3.2GB`, `640MB`."""
    if count >= 10**9:
        return f"{-(-count // 10**8) / 10:.1f}GB"
    return f"{-(-count // 10**6)}MB"


def _remedy(resources: Resources, least: int) -> str:
    if process_memory.usage().resident + process_memory.available_bytes() < least:
        return f"end other programs, or use a machine with {text_of(least)} of free memory"
    return f"give --max-memory {round_up(least)} or more" + (
        " instead of --disk-offload" if resources.disk_offload else ""
    )

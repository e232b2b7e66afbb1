"""The quantized head's file in the stage's folder: written, read back, or removed."""

from pathlib import Path
from typing import Any

from quantflow.core.parallel import Workers
from quantflow.core.qtensor import QuantizedLinear
from quantflow.files import disk
from quantflow.files.canonical import digest_of, read_json
from quantflow.files.checkpoint import Checkpoint
from quantflow.files.safetensors_header import read_header
from quantflow.formats import DEFAULT, FORMATS
from quantflow.models.layer_store import finished
from quantflow.models.reading import read_tensor
from quantflow.planning.head import FILE, RECORD, HeadPlan
from quantflow.planning.plan import OUTSIDE, Plan
from quantflow.progress import Progress
from quantflow.quantizing.file_to_file import commit, write_block
from quantflow.quantizing.weight_rows import head_block


def bring_up_to_date(
    output: Path,
    plan: Plan,
    checkpoint: Checkpoint,
    *,
    key: str,
    workers: Workers,
    progress: Progress,
) -> None:
    """Quantize the head that a plan names, unless its file is finished.

    The head of a rotated model is the rotated one, which lies outside the layers (`OUTSIDE`).

    Args:
        output: the stage's folder; of a rotated model with what lies outside its layers.
        plan: a plan with or without a head.
        checkpoint: the source.
        key: digest of everything that the result depends on.
        workers: threads that run units of rows.
        progress: listener, called when the head is done.

    Raises:
        InputError: the weight holds NaN or Inf, or its file ends early.
    """
    if plan.head is None:
        return
    file, info = checkpoint.tensors[plan.head.tensor]
    path = checkpoint.folder / file
    if plan.rotation is not None:
        path = output / OUTSIDE
        info = read_header(path)[0][plan.head.tensor]
    block = head_block(plan.head, path, info)
    head_key = digest_of([key, block.key])
    if finished(output / FILE, head_key) is not None:
        return
    for _ in progress.steps(
        [block], stage=f"quantize {plan.name}", unit="head", nbytes=lambda _: info.nbytes
    ):
        commit(*write_block(output, block, key=lambda: head_key, workers=workers))


def read_head(folder: Path, head: HeadPlan | None) -> QuantizedLinear | None:
    """The quantized head of a folder, None where there is none.

    Raises:
        InputError: its file is damaged.
    """
    if head is None:
        return None
    path = folder / FILE
    tensors = {name: read_tensor(path, info) for name, info in read_header(path)[0].items()}
    linear: QuantizedLinear = FORMATS[DEFAULT].decode(head.linear, tensors, head.scheme)
    return linear


def remove_others(folder: Path, plan: Plan) -> None:
    """Remove what an unfinished result of another plan left beside its layers."""
    disk.remove(folder / OUTSIDE)
    for path in (
        (folder / FILE, folder / RECORD, disk.temporary_for(folder / FILE))
        if plan.head is None
        else ()
    ):
        disk.remove(path)


def record_of(folder: Path) -> dict[str, Any]:
    """The head's record in a finished folder; empty where the head is as it was."""
    path = folder / RECORD
    found: dict[str, Any] = read_json(path) if path.is_file() else {}
    return found


def hashes(folder: Path) -> dict[str, str]:
    """The sha256 of the head's file, by its name in the folder; empty without a head."""
    record = record_of(folder)
    return {FILE: str(record["sha256"])} if record else {}

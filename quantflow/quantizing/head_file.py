"""The files of a quantized head and of MTP layers in the stage's folder.

They are written, read back, or removed.
"""

from functools import partial
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
from quantflow.planning.mtp import FILE as MTP_FILE
from quantflow.planning.mtp import RECORD as MTP_RECORD
from quantflow.planning.plan import OUTSIDE, Plan
from quantflow.progress import Progress
from quantflow.quantizing.file_to_file import commit, write_block
from quantflow.quantizing.weight_rows import FileBlock, head_block, mtp_block


def bring_up_to_date(
    output: Path,
    plan: Plan,
    checkpoint: Checkpoint,
    *,
    key: str,
    workers: Workers,
    progress: Progress,
) -> None:
    """Quantize the head and the MTP layers that a plan names, unless their files are finished.

    The head of a rotated model is the rotated one, which lies outside the layers (`OUTSIDE`).

    Args:
        output: the stage's folder; of a rotated model with what lies outside its layers.
        plan: a plan with or without them.
        checkpoint: the source.
        key: digest of everything that the result depends on.
        workers: threads that run units of rows.
        progress: listener, called when one is done.

    Raises:
        InputError: a weight holds NaN or Inf, or its file ends early.
    """
    blocks: dict[str, FileBlock] = {}
    if plan.head is not None:
        file, info = checkpoint.tensors[plan.head.tensor]
        path = checkpoint.folder / file
        if plan.rotation is not None:
            path = output / OUTSIDE
            info = read_header(path)[0][f"{plan.head.linear}.weight"]
        blocks["head"] = head_block(plan.head, path, info)
    if plan.mtp is not None:
        blocks["MTP file"] = mtp_block(plan.mtp, checkpoint)
    keys = {unit: digest_of([key, block.key]) for unit, block in blocks.items()}
    for unit, block in blocks.items():
        if finished(output / block.path, keys[unit]) is not None:
            continue
        for _ in progress.steps([block], stage=f"quantize {plan.name}", unit=unit, nbytes=_nbytes):
            commit(
                *write_block(output, block, key=partial(keys.__getitem__, unit), workers=workers)
            )


def _nbytes(block: FileBlock) -> int:
    """The bytes that are read of a block."""
    return sum(info.nbytes for _, info in block.tensors)


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
    for part, file, record in ((plan.head, FILE, RECORD), (plan.mtp, MTP_FILE, MTP_RECORD)):
        if part is None:
            for path in (folder / file, folder / record, disk.temporary_for(folder / file)):
                disk.remove(path)


def record_of(folder: Path) -> dict[str, Any]:
    """The head's record in a finished folder; empty where the head is as it was."""
    return _record(folder / RECORD)


def mtp_record_of(folder: Path) -> dict[str, Any]:
    """The record of MTP layers in a finished folder; empty where they are as they were."""
    return _record(folder / MTP_RECORD)


def hashes(folder: Path) -> dict[str, str]:
    """The sha256 of the files, by their names in the folder; empty where there is none."""
    records = {FILE: record_of(folder), MTP_FILE: mtp_record_of(folder)}
    return {file: str(record["sha256"]) for file, record in records.items() if record}


def _record(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(path) if path.is_file() else {}
    return found

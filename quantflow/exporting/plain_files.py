"""Files of a model folder that is no artifact: weights, index, config.json and side files."""

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantflow.core.dtypes import DTYPES
from quantflow.errors import IntegrityError
from quantflow.files import disk
from quantflow.files.canonical import readable_json
from quantflow.files.checkpoint import CONFIG, INDEX, SINGLE, Checkpoint, open_checkpoint
from quantflow.files.safetensors_header import TensorInfo
from quantflow.files.safetensors_writer import Spec, Writer
from quantflow.files.side_files import side_files_of
from quantflow.models.model_tensors import STORED
from quantflow.models.reading import bytes_of, read_tensor
from quantflow.models.unused import unused_words
from quantflow.progress import Progress

# endings of a module's tensors that are not stored as floating-point numbers
_QUANTIZED = (".weight", ".weight_packed", ".qweight", "_blocks")


def write_model(
    folder: Path,
    specs: Mapping[str, Spec],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    limit: int,
    stage: str,
    progress: Progress,
    unused_of: Checkpoint | None = None,
) -> dict[str, Spec]:
    """Write weight files, and their index where there are several.

    One tensor is in memory at a time.

    Args:
        folder: folder of the files.
        specs: tensor name -> dtype, as safetensors names it, and shape; in the order of the files.
        tensors: pairs of name and tensor in the order of `specs`.
        limit: largest number of bytes of a file, unless one tensor has more.
        stage: name of the work in progress.
        progress: receiver of progress.
        unused_of: checkpoint whose unused tensors are copied behind the others.

    Returns:
        `specs` of everything that was written.
    """
    unused = {} if unused_of is None else _plain_unused(unused_of)
    if unused_of is not None and unused_of.unused and not unused:
        progress.say(f"{stage}: {unused_words(unused_of, done='quantized, left out')}")
    specs = {**specs, **{name: (info.dtype, info.shape) for name, (_, info) in unused.items()}}
    tensors = chain(tensors, ((name, read_tensor(*place)) for name, place in unused.items()))
    shards, names, source = _shards(specs, limit=limit), [SINGLE], iter(tensors)
    if len(shards) > 1:
        names = [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            for number in range(1, len(shards) + 1)
        ]
    for name, shard in zip(names, progress.steps(shards, stage=stage, unit="file"), strict=True):
        with Writer(folder / name, {tensor: specs[tensor] for tensor in shard}) as writer:
            for _ in shard:
                key, values = next(source)
                writer.write(key, bytes_of(values))
    if len(shards) > 1:
        where = {
            tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard
        }
        disk.write_file(folder / INDEX, readable_json({"metadata": {}, "weight_map": where}))
    return specs


def _plain_unused(checkpoint: Checkpoint) -> dict[str, tuple[Path, TensorInfo]]:
    """The places of a checkpoint's unused tensors; none where some are quantized.

    The result is not quantized as the checkpoint is, so nobody could read those, and no engine
    runs a part of a layer.
    """
    if any(
        one.info.dtype not in STORED and name.endswith(_QUANTIZED)
        for name, one in checkpoint.unused.items()
    ):
        return {}
    return {
        name: (checkpoint.folder / one.file, one.info) for name, one in checkpoint.unused.items()
    }


def write_beside(
    folder: Path, source: Checkpoint, config: Mapping[str, Any], *, stage: str, progress: Progress
) -> None:
    """Write config.json, and copy the side files of the folder that the model came from.

    Args:
        folder: folder of the result.
        source: folder that the model came from.
        config: content of config.json.
        stage: name of the work in progress.
        progress: receiver of a line on what stays behind.
    """
    disk.write_file(folder / CONFIG, readable_json(dict(config)))
    beside = side_files_of(source)
    for name in beside.copied:
        disk.make_folder((folder / name).parent)
        disk.copy(source.folder / name, folder / name)
    if left := str(beside):
        progress.say(f"{stage}: left behind: {left}")


def require_headers(folder: Path, specs: Mapping[str, Spec]) -> None:
    """Read the headers again.

    Raises:
        IntegrityError: they are not `specs`.
    """
    found = {name: (info.dtype, info.shape) for name, info in open_checkpoint(folder).infos.items()}
    if found != dict(specs):
        name = min(set(found.items()) ^ set(specs.items()))[0]
        raise IntegrityError(
            f"{name}: the files' headers are not what was written",
            "export again, and check the disk",
        )


def require_written(
    folder: Path, specs: Mapping[str, Spec], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Read headers and tensors again; one tensor is in memory at a time.

    Args:
        folder: folder that `write_model` wrote.
        specs: tensor name -> dtype and shape.
        tensors: pairs of name and tensor, as they were written; some of the folder's, or all.

    Raises:
        IntegrityError: a header is not `specs`, or a tensor has other bytes.
    """
    require_headers(folder, specs)
    located = open_checkpoint(folder).tensors
    for name, expected in tensors:
        file, info = located[name]
        if bytes_of(read_tensor(folder / file, info)) != bytes_of(expected):
            raise IntegrityError(
                f"{name}: {file} holds other values than were written",
                "export again, and check the disk",
            )


def _shards(specs: Mapping[str, Spec], *, limit: int) -> list[list[str]]:
    """The tensors of each file."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, (dtype, shape) in specs.items():
        nbytes = torch.Size(shape).numel() * DTYPES[dtype].itemsize
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards

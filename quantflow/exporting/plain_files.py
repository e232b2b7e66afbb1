"""Files of a model folder that is no artifact: weights, index, config.json and side files."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantflow.core.dtypes import DTYPES
from quantflow.errors import IntegrityError
from quantflow.files import disk
from quantflow.files.canonical import readable_json
from quantflow.files.checkpoint import CONFIG, INDEX, SINGLE, Checkpoint, open_checkpoint
from quantflow.files.safetensors_writer import Spec, Writer
from quantflow.files.side_files import side_files_of
from quantflow.models.reading import bytes_of
from quantflow.progress import Progress


def write_model(
    folder: Path,
    specs: Mapping[str, Spec],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    limit: int,
    stage: str,
    progress: Progress,
) -> None:
    """Write weight files, and their index where there are several.

    One tensor is in memory at a time.

    Args:
        folder: folder of the files.
        specs: tensor name -> dtype, as safetensors names it, and shape; in the order of the files.
        tensors: pairs of name and tensor in the order of `specs`.
        limit: largest number of bytes of a file, unless one tensor has more.
        stage: name of the work in progress.
        progress: receiver of progress.
    """
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

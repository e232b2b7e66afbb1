"""The artifact's weight files: the tensors of each, and their bytes, linked or copied in pieces.

What fits into one file of the largest size becomes model.safetensors. Otherwise the layers' files,
as quantize wrote them, are the shards: hard links, which cost neither time nor room. What lies
outside the layers is packed into shards of its own, before them, and a layer that exceeds the
largest size is packed into several.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from quantflow.core.dtypes import DTYPES
from quantflow.files import disk
from quantflow.files.canonical import readable_json
from quantflow.files.checkpoint import INDEX, SINGLE
from quantflow.files.safetensors_header import TensorInfo
from quantflow.files.safetensors_writer import Writer
from quantflow.models.reading import NOT_FINITE, bytes_of, check_finite, not_finite, read_into
from quantflow.planning.sizes import ONE_FILE

# of a tensor that are in memory at once: the second look at them is the cache's
COPY_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor and the file that holds it now.

    Attributes:
        path: path of the file.
        info: its place there.
        read: the model reads it; of any other tensor NaN and Inf are copied too.
    """

    path: Path
    info: TensorInfo
    read: bool = True


@dataclass(frozen=True, kw_only=True)
class WeightFile:
    """A file of the artifact.

    Attributes:
        tensors: tensors of the file.
        link: target of the link; None when the tensors are copied.
    """

    tensors: tuple[Stored, ...]
    link: Path | None = None


def shards_for(
    outside: Sequence[Stored], layers: Sequence[Sequence[Stored]], *, limit: int
) -> tuple[WeightFile, ...]:
    """The files of the artifact, in order.

    Args:
        outside: tensors outside the layers.
        layers: content of every layer's file.
        limit: largest number of bytes of tensors in one file; a single tensor may exceed it.

    Returns:
        One file for all where they are few; otherwise files for what lies outside, and the layers'
        own files.
    """
    everything = [*outside, *(stored for layer in layers for stored in layer)]
    if _nbytes(everything) <= min(limit, ONE_FILE):
        return (WeightFile(tensors=tuple(everything)),)
    shards = _packed(outside, limit=limit)
    for layer in layers:
        whole = WeightFile(tensors=tuple(layer), link=layer[0].path)
        shards += [whole] if _nbytes(layer) <= limit else _packed(layer, limit=limit)
    return tuple(shards)


def shard_names(shards: Sequence[WeightFile]) -> tuple[str, ...]:
    """The names of the files."""
    if len(shards) == 1:
        return (SINGLE,)
    return tuple(
        f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))
    )


def write_shards(folder: Path, shards: Sequence[WeightFile]) -> list[str]:
    """Write the files, and an index where there are several.

    Returns:
        The tensors with NaN or Inf that the model does not read.

    Raises:
        InputError: a tensor holds NaN or Inf, or its file ends early.
        OSError: the file system failed.
    """
    names = shard_names(shards)
    not_finite_names: list[str] = []
    for name, shard in zip(names, shards, strict=True):
        if shard.link is not None:
            disk.link_or_copy(shard.link, folder / name)
            continue
        with Writer(
            folder / name, {t.info.name: (t.info.dtype, t.info.shape) for t in shard.tensors}
        ) as writer:
            for stored in shard.tensors:
                if not _copy(writer, stored):
                    not_finite_names.append(stored.info.name)
    if len(names) > 1:
        where = {
            t.info.name: name
            for name, shard in zip(names, shards, strict=True)
            for t in shard.tensors
        }
        total = sum(_nbytes(shard.tensors) for shard in shards)
        disk.write_file(
            folder / INDEX, readable_json({"metadata": {"total_size": total}, "weight_map": where})
        )
    return not_finite_names


def linked(shards: Sequence[WeightFile]) -> Mapping[str, Path]:
    """The names of the files that are links -> their targets."""
    return {
        name: s.link
        for name, s in zip(shard_names(shards), shards, strict=True)
        if s.link is not None
    }


def _packed(tensors: Sequence[Stored], *, limit: int) -> list[WeightFile]:
    shards: list[WeightFile] = []
    current: list[Stored] = []
    for stored in tensors:
        if current and _nbytes(current) + stored.info.nbytes > limit:
            shards.append(WeightFile(tensors=tuple(current)))
            current = []
        current.append(stored)
    return [*shards, WeightFile(tensors=tuple(current))] if current else shards


def _nbytes(tensors: Sequence[Stored]) -> int:
    return sum(stored.info.nbytes for stored in tensors)


def _copy(writer: Writer, stored: Stored) -> bool:
    """Copy a tensor; whether all of it is finite, which is required where the model reads it."""
    info, finite = stored.info, True
    dtype = DTYPES.get(info.dtype, torch.uint8)  # one that torch does not know is copied as bytes
    for start in range(0, info.nbytes, COPY_BYTES):
        count = min(COPY_BYTES, info.nbytes - start)
        piece = torch.empty(count // dtype.itemsize, dtype=dtype)
        read_into(stored.path, piece, info.offset + start, name=info.name)
        if dtype.is_floating_point and stored.read:
            check_finite(piece, name=info.name, path=stored.path)
        elif dtype in NOT_FINITE:
            finite = finite and not not_finite(piece)
        writer.write(info.name, bytes_of(piece), offset_bytes=start)
    return finite

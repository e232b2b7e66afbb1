"""A GGUF file as a Hugging Face folder, made once and kept.

    <cache>/<name of the file>-<16 digits of its sha256>/
        model.safetensors, config.json, tokenizer files with the chat template, DONE.json

1. Matrices in blocks of few bits are dequantized to bfloat16, some rows at a time. What is stored
   plainly keeps its dtype; a vector gets the matrices' dtype where that holds it exactly.
2. The rows that llama.cpp rotates pairwise go back to where transformers has them.
3. DONE.json names the file and its hash, which manifests record as the source's name and revision.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from quantflow.core.dtypes import DTYPES, NAMES
from quantflow.errors import InputError, UnsupportedError
from quantflow.files import disk, stage_folder
from quantflow.files.canonical import readable_json
from quantflow.files.checkpoint import CONFIG, SINGLE
from quantflow.files.digests import NAME as HASHES
from quantflow.files.digests import Digests
from quantflow.files.origin import IMPORT
from quantflow.files.safetensors_header import TensorInfo
from quantflow.files.safetensors_writer import Writer
from quantflow.formats.llama_cpp.blocks import read_rows, readable
from quantflow.formats.llama_cpp.configuration import config_from
from quantflow.formats.llama_cpp.gguf import Header, part_of, read_header
from quantflow.formats.llama_cpp.metadata import ROPE_FACTORS
from quantflow.formats.llama_cpp.tensors import Place, places, row_order, rows_at_once, source_names
from quantflow.formats.llama_cpp.tokenizer_files import special_ids, write_tokenizer
from quantflow.models.reading import bytes_of
from quantflow.progress import Progress

VERSION = 1
BLOCKS = torch.bfloat16  # dtype of what was stored in blocks
PIECE = 1 << 22  # elements that are dequantized at once


def import_gguf(path: Path, cache: Path, progress: Progress) -> Path:
    """The folder of a GGUF file; it is made where it is not there yet.

    Args:
        path: the GGUF file.
        cache: folder of such folders.
        progress: receiver of a line on what is made.

    Raises:
        InputError: the file cannot be read, is damaged, holds NaN or Inf, or lacks a tensor.
        UnsupportedError: an architecture, a field, a type of tensor or a tokenizer that is not
            read.
        ResourceError: another process makes the folder at this moment.
        OSError: the file system failed.
    """
    disk.make_folder(cache)
    digests = Digests(cache / HASHES)
    header = read_header(path, types=readable())
    sha256 = digests.of(path)
    folder = cache / f"{path.stem}-{sha256[:16]}"
    inputs = {"name": path.name, "sha256": sha256, "version": VERSION}
    with stage_folder.locked(folder):
        if _is_there(folder, inputs, digests):
            return folder
        progress.say(f"source: {path.name} becomes a folder of safetensors, {folder}")
        with stage_folder.publish(folder, stage=IMPORT, inputs=inputs) as temporary:
            _write(path, header, temporary, progress)
    return folder


def _is_there(folder: Path, inputs: dict[str, Any], digests: Digests) -> bool:
    """Whether the folder was made from this file and is unchanged.

    Hashes of files that did not change are not computed again.
    """
    record = stage_folder.done(folder)
    if record is None or record["inputs"] != inputs:
        return False
    files = {folder / name: entry["sha256"] for name, entry in record["files"].items()}
    return all(path.is_file() and digests.of(path) == sha256 for path, sha256 in files.items())


def _write(path: Path, header: Header, folder: Path, progress: Progress) -> None:
    """Write config.json, the tokenizer's files and the weights."""
    if (part := part_of(header.metadata, path)) is not None:
        cause = f"{path}: {part} files of a model"
        raise UnsupportedError(
            cause, "merge them first: llama-gguf-split --merge FIRST-FILE MERGED-FILE"
        )
    factors = header.tensors.get(ROPE_FACTORS)
    rope_factors = None if factors is None else read_rows(path, factors, 0, factors.shape[0])
    config = config_from(header, path, factors=rope_factors)
    config |= special_ids(header.metadata, path)
    matrix = NAMES[_matrix_dtype(header)]
    config["dtype"] = str(DTYPES[matrix]).removeprefix("torch.")
    write_tokenizer(header.metadata, folder, path, context=config["max_position_embeddings"])
    disk.write_file(folder / CONFIG, readable_json(config))
    settings = (
        SimpleNamespace(num_key_value_heads=None, **config)
        if "num_key_value_heads" not in config
        else None
    )
    tensors = _tensors(header, settings or SimpleNamespace(**config), path)
    specs = {place.source: (_stored_as(path, info, matrix), place.shape) for place, info in tensors}
    with Writer(folder / SINGLE, specs) as writer:
        steps = progress.steps(
            tensors, stage="source", unit="tensor", nbytes=lambda item: item[1].nbytes
        )
        for place, info in steps:
            _copy(path, info, place, writer, DTYPES[specs[place.source][0]])


def _matrix_dtype(header: Header) -> torch.dtype:
    """Dtype of the file's matrices: BLOCKS where any is in blocks, else the widest."""
    kinds = {info.dtype for info in header.tensors.values() if len(info.shape) > 1}
    if kinds - DTYPES.keys():
        return BLOCKS
    return max(
        (DTYPES[kind] for kind in kinds),
        key=lambda dtype: (dtype.itemsize, str(dtype)),
        default=BLOCKS,
    )


def _tensors(header: Header, config: Any, path: Path) -> list[tuple[Place, TensorInfo]]:
    """Every tensor of the checkpoint with the file's tensor that it is.

    Raises:
        InputError: one is missing, belongs nowhere, or has another shape than the file's fields
            say.
    """
    names = source_names(config)
    there = {name: info for name, info in header.tensors.items() if name != ROPE_FACTORS}
    for name in there:
        if name not in names:
            raise InputError(
                f"{path}: tensor {name!r} has no place in a {config.model_type}",
                "give another file of this model",
            )
    shapes = {names[name]: info.shape for name, info in there.items()}
    return [(place, there[place.name]) for place in places(config, shapes)]


def _stored_as(path: Path, info: TensorInfo, matrix: str) -> str:
    """Dtype of a tensor in the folder."""
    if info.dtype not in DTYPES:
        return NAMES[BLOCKS]
    if len(info.shape) == 1 and info.dtype == "F32" and matrix != "F32":
        values = read_rows(path, info, 0, info.shape[0])
        return matrix if torch.equal(values.to(DTYPES[matrix]).float(), values) else info.dtype
    return info.dtype


def _copy(path: Path, info: TensorInfo, place: Place, writer: Writer, dtype: torch.dtype) -> None:
    """Write a tensor, some rows at a time, each row to its place in the checkpoint."""
    order, columns = row_order(place), info.shape[1] if len(info.shape) > 1 else 1
    rows = info.shape[0]
    step = rows_at_once(place) if place.order != "stored" else max(1, PIECE // columns)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        values = read_rows(path, info, start, stop).to(dtype)
        to = order[start:stop]
        low = int(to.min())
        moved: Tensor = torch.empty_like(values)
        moved[to - low] = values
        writer.write(place.source, bytes_of(moved), offset_bytes=low * columns * dtype.itemsize)

"""Contents of a folder that another program quantized, or of a GGUF file.

They say who wrote it, how it is quantized, and whether its tensors are whole. Every quantized
linear is decoded, so that a damaged one is refused with the tensor's name, as when it runs; without
`verify` only headers and config.json are read.

Damage that leaves every number in its range shows in no hash, since such a folder has none. One
kind shows all the same: where the codes of a weight with zero points stand in another order than
the zero points (nibbles swapped, outputs permuted), the mean code of a group no longer follows its
zero point (quantflow/runtime/code_order.py).
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantflow.core.scheme import LinearScheme, TensorScheme
from quantflow.errors import InputError, UnsupportedError
from quantflow.files.checkpoint import open_checkpoint
from quantflow.formats import layout_of
from quantflow.formats.llama_cpp import blocks, gguf
from quantflow.formats.programs import program_of
from quantflow.models.reading import read_tensors
from quantflow.progress import Progress
from quantflow.runtime.artifact import Artifact, open_folder

_ELEMENTS = 1 << 22  # elements of a GGUF file's tensor that are read at once
_KEYS = ("general.name", "general.architecture", "general.quantized_by", "general.file_type")


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """The properties that linears of one table share."""

    scheme: LinearScheme
    ordered: bool | None  # None: not read


def describe(path: Path, *, verify: bool = True, progress: Progress) -> dict[str, Any]:
    """A folder that another program quantized, or a GGUF file: schemes, linears, bytes.

    Args:
        path: the folder or the file.
        verify: decode every tensor, so that a damaged one is refused with its name; else headers
            alone are read.
        progress: hears how far it is.

    Raises:
        QuantflowError: it is neither, or damaged.
    """
    one = describe_file if path.is_file() else describe_folder
    return one(path, verify=verify, progress=progress)


def describe_folder(folder: Path, *, verify: bool, progress: Progress) -> dict[str, Any]:
    """The contents of a folder that another program quantized, as plain data.

    Args:
        folder: folder with a `quantization_config`, in its config.json or where older programs put
            it.
        verify: read every tensor.
        progress: shows how far the reading is.

    Returns:
        `kind`, `program` (None where nothing says it), `quant_method`, `configuration` (the file
        and the key that say how the folder is quantized), `format` (a key of
        `quantflow.formats.LAYOUTS`; None: not read), `runs` (a sentence where this version does not
        run it, else None), `quantized` (a table for each scheme: its bits, group, whether
        symmetric, inputs, act-order, which linears and their bytes), `left` (matrices that are not
        quantized), `bits_per_weight` of the quantized linears, `bytes`, `verified` (number of
        linears that were decoded).

    Raises:
        InputError: the folder, a header or a tensor is damaged; it names the tensor.
    """
    checkpoint = open_checkpoint(folder)
    table = checkpoint.config.get("quantization_config")
    if not isinstance(table, dict):
        raise InputError(
            f"{folder}: no quantization_config", "give a folder that another program quantized"
        )
    description: dict[str, Any] = {
        "kind": "quantized by another program",
        "program": program_of(table, checkpoint.files),
        "quant_method": table.get("quant_method"),
        "configuration": checkpoint.quantized_by,
        "model_type": checkpoint.config.get("model_type"),
        "architectures": checkpoint.config.get("architectures"),
        "bytes": sum(info.nbytes for info in checkpoint.infos.values()),
        "shards": list(checkpoint.shards),
    }
    try:
        artifact = open_folder(folder, backend="reference")
    except UnsupportedError as error:
        return description | {"format": None, "runs": f"no: {error.cause}"}
    name = layout_of(table, checkpoint.infos).name
    return (
        description
        | {"format": name, "runs": None}
        | _linears(artifact, verify=verify, progress=progress)
    )


def describe_file(path: Path, *, verify: bool, progress: Progress) -> dict[str, Any]:
    """The contents of a GGUF file, as plain data: tensors, bytes and names of each type.

    Where the file is one of several, `part` says which, `1 of 3`; the numbers are those of this
    file alone.

    Raises:
        InputError: the file is damaged or truncated; it names the tensor where one is.
        UnsupportedError: a version or a type that is not read here.
    """
    header = gguf.read_header(path, types=blocks.readable())
    infos, part = header.tensors, gguf.part_of(header.metadata, path)
    if verify:
        for info in progress.steps(
            list(infos.values()), stage="inspect", unit="tensor", nbytes=lambda info: info.nbytes
        ):
            rows = max(1, _ELEMENTS // max(1, torch.Size(info.shape[1:]).numel()))
            for start in range(0, info.shape[0], rows):
                blocks.read_rows(path, info, start, min(info.shape[0], start + rows))
    types: dict[str, dict[str, Any]] = {}
    for info in infos.values():
        row = types.setdefault(info.dtype, {"tensors": 0, "bytes": 0, "names": []})
        row["tensors"] += 1
        row["bytes"] += info.nbytes
        row["names"].append(info.name)
    matrices = [info for info in infos.values() if len(info.shape) > 1]
    weights = sum(torch.Size(info.shape).numel() for info in matrices)
    return {
        "kind": gguf.NAME,
        **({} if part is None else {"part": str(part)}),
        **{
            key.rpartition(".")[2]: header.metadata[key][1]
            for key in _KEYS
            if key in header.metadata
        },
        "types": {name: row | {"names": patterns_of(row["names"])} for name, row in types.items()},
        "bits_per_weight": 8 * sum(info.nbytes for info in matrices) / weights if weights else None,
        "tensors": len(infos),
        "bytes": sum(info.nbytes for info in infos.values()),
        "verified": len(infos) if verify else 0,
    }


def _linears(artifact: Artifact, *, verify: bool, progress: Progress) -> dict[str, Any]:
    """The part of `describe_folder` that comes from the linears."""
    infos, kinds, owned = artifact.checkpoint.infos, dict[_Kind, list[str]](), dict[str, int]()
    for name in (
        progress.steps(list(artifact.linears), stage="inspect", unit="linear")
        if verify
        else artifact.linears
    ):
        placement = artifact.linears[name]
        linear = artifact.decode(name) if verify else None
        ordered = placement.reordered if linear is None else linear.order is not None
        kind = _Kind(
            scheme=placement.scheme, ordered=None if linear is None and ordered else ordered
        )
        kinds.setdefault(kind, []).append(name)
        owned[name] = sum(
            infos[key].nbytes for key in artifact.layout.tensor_names(name, placement.scheme)
        )
    plain = [
        name for name in artifact.names if name.removesuffix(".weight") not in artifact.linears
    ]
    if verify:
        for name in plain:
            read_tensors(artifact.checkpoint, [name])
        artifact.kv_scales()
    weights = sum(
        placement.shape[0] * placement.shape[1] for placement in artifact.linears.values()
    )
    return {
        "quantized": [
            {**words_of(kind.scheme), "act_order": kind.ordered, "linears": len(names)}
            | {"which": patterns_of(names), "bytes": sum(owned[name] for name in names)}
            for kind, names in kinds.items()
        ],
        "left": patterns_of(name for name in plain if len(infos[name].shape) == 2),
        **(
            {}
            if artifact.kv_cache is None
            else {"kv_cache": f"{artifact.kv_cache.kind}{artifact.kv_cache.num_bits}"}
        ),
        "bits_per_weight": 8 * sum(owned.values()) / weights,
        "verified": len(artifact.linears) if verify else 0,
    }


def words_of(scheme: LinearScheme) -> dict[str, Any]:
    """A scheme as a table shows it, as plain data."""

    def one(part: TensorScheme) -> str:
        powers = ", scales up to powers of two" if part.rounds_at_run_time else ""
        return f"{part.kind}{part.num_bits} {part.granularity}{powers}"

    weights, inputs = scheme.weights, scheme.input
    return {
        "scheme": scheme.name,
        "weights": f"{weights.kind}{weights.num_bits}",
        "bits": weights.num_bits,
        "granularity": weights.granularity,
        "group_size": weights.group_size,
        "symmetric": weights.symmetric,
        "inputs": None
        if inputs is None
        else f"{one(inputs)}{', measured' if inputs.measured else ''}",
    }


def patterns_of(names: Iterable[str]) -> dict[str, int]:
    """The counts of names, with `*` for numbers between dots."""
    return dict(Counter(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names))

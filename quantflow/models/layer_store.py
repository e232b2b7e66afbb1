"""The resume state of a stage: one finished layer after another, each under the key of its inputs.

    layers/00012.safetensors    tensors of a finished layer
    layers/00012.json           {"key", "sha256", ...}, written after it
    .inputs.json                inputs of the unfinished result, to name a difference from others
    ../.<folder>.hidden/        hidden states that enter the next layer, removed at the end
    ../.<folder>.tune/          layers whose scales are not tuned yet, and the progress of tuning
                                (quantflow/quantizing/tuning.py), removed at the end

A layer whose key or hash does not hold is made again, never used.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from torch import Tensor

from quantflow.core.dtypes import NAMES
from quantflow.errors import InputError
from quantflow.files import disk, stage_folder
from quantflow.files.canonical import canonical_json, digest_of, file_digest, read_json
from quantflow.files.safetensors_writer import Writer
from quantflow.files.schema import check
from quantflow.models.graph import Graph
from quantflow.models.hidden import HiddenStates
from quantflow.models.reading import bytes_of

_NOWHERE = -1  # there is no layer whose input was kept


def begin(folder: Path, inputs: Mapping[str, Any], *, say: Callable[[str], None]) -> None:
    """Note the inputs of an unfinished result, and report how an earlier attempt's differ.

    The first difference is reported.
    """
    disk.make_folder(folder / "layers")
    disk.remove(folder / stage_folder.DONE)
    path = folder / ".inputs.json"
    content = canonical_json(inputs)
    if path.is_file():
        try:
            difference = stage_folder.difference(read_json(path), json.loads(content))
        except InputError:  # cut off while it was written
            difference = None
        if difference is None:
            return
        key, old, new = difference
        say(f"{key} = {stage_folder.short(old)}, now {stage_folder.short(new)}")
    disk.write_atomic(path, content)


def scratch(folder: Path) -> Path:
    """The private folder beside a stage's folder for hidden states."""
    return folder.parent / f".{folder.name}.hidden"


def untuned(folder: Path) -> Path:
    """The private folder beside a stage's folder for layers that are still to be tuned."""
    return folder.parent / f".{folder.name}.tune"


def remove_scratch(folder: Path) -> None:
    """Remove the private folders and their content."""
    for path in (scratch(folder), untuned(folder)):
        if path.is_dir():
            disk.remove_tree(path)


def restart(
    folder: Path, key: str, graph: Graph, hidden: HiddenStates, *, limit: int | None = None
) -> int:
    """The layer to go on with.

    It is the latest one whose input was kept and before which every layer is finished.

    Args:
        folder: folder of the stage.
        key: digest of everything that the result depends on.
        graph: graph of the model.
        hidden: store that takes up the input of that layer.
        limit: latest layer that may be returned; None is the last.
    """
    count = 0
    most = len(graph.layers) if limit is None else limit
    while count < most and finished(layer_path(folder, count), digest_of([key, count])) is not None:
        count += 1
    for index in range(min(count, len(graph.layers) - 1), -1, -1):
        if hidden.restore(index, key=key):
            return index
    return 0


def restart_together(
    folder: Path,
    key: str,
    graph: Graph,
    *,
    opened: Callable[[], HiddenStates],
    span: Callable[[int], tuple[int, int]],
) -> tuple[int, HiddenStates]:
    """The layer to go on with, the same on every rank, and the hidden states that enter it.

    Args:
        folder: folder of the stage.
        key: digest of everything that the result depends on.
        graph: graph of the model.
        opened: returns hidden states without a generation.
        span: returns the least and the greatest of the ranks' values.
    """
    limit: int | None = None
    while True:
        hidden = opened()
        start = 0
        if limit != _NOWHERE:
            start = restart(folder, key, graph, hidden, limit=limit)
        limit, most = span(start if hidden.restored else _NOWHERE)
        if limit == most:
            return start, hidden


def layer_path(folder: Path, index: int) -> Path:
    """The file of one layer."""
    return folder / "layers" / f"{index:05d}.safetensors"


def finished(path: Path, key: str) -> dict[str, Any] | None:
    """A layer's record when its file is complete, undamaged and of the same key; else None."""
    record = path.with_suffix(".json")
    if not path.is_file() or not record.is_file():
        return None
    try:
        state: dict[str, Any] = read_json(record)
        if state["key"] != key or state["sha256"] != file_digest(path):
            return None
    except (InputError, KeyError, TypeError):  # a damaged record is made again
        return None
    return state


class _Record(TypedDict):
    key: str
    sha256: str
    changed: list[str]
    errors: dict[str, dict[str, Any]]
    decisions: dict[str, dict[str, Any]]
    values: NotRequired[dict[str, str]]


def records(folder: Path) -> list[dict[str, Any]]:
    """The records of all layers of a finished folder, in order.

    Raises:
        InputError: a record cannot be read, or is none.
    """
    paths = sorted((folder / "layers").glob("*.json"))
    states = [read_json(path) for path in paths]
    for path, state in zip(paths, states, strict=True):
        check(state, _Record, where=str(path), remedy="quantize the model again")
    return states


def record(folder: Path, index: int) -> dict[str, Any]:
    """The record of a finished layer."""
    found: dict[str, Any] = read_json(layer_path(folder, index).with_suffix(".json"))
    return found


def hashes(folder: Path, graph: Graph) -> dict[str, str]:
    """The sha256 of every layer's file, from its record, by its name in the folder."""
    return {
        f"layers/{layer.index:05d}.safetensors": str(record(folder, layer.index)["sha256"])
        for layer in graph.layers
    }


def write_layer(path: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """Write a layer's file, then its record, whose sha256 is added here."""
    save(path, tensors)
    disk.write_atomic(
        path.with_suffix(".json"), canonical_json({**record, "sha256": file_digest(path)})
    )


def save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as a safetensors file that is absent, old or complete under its name."""
    temporary = disk.temporary_for(path)
    specs = {name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    with Writer(temporary, specs) as writer:
        for name, tensor in tensors.items():
            writer.write(name, bytes_of(tensor))
    disk.replace(temporary, path)


def remove_others(folder: Path, indices: Iterable[int]) -> None:
    """Remove files from `layers` that belong to no layer.

    They are of a model with more layers, or of a write that was cut off.
    """
    disk.make_folder(folder / "layers")
    kept = {layer_path(folder, index).stem for index in indices}
    for path in sorted((folder / "layers").iterdir()):
        if path.stem not in kept:
            disk.remove(path)

"""Measurements of Gaudi's toolkit, and the scales that it derived, as files.

They are read strictly, and written so that equal content has equal bytes. One rank has three files
(see file_names.py). The npz is what the toolkit reads back, the json says the same to people, the
mod_list names every module that was looked at:

    {"GlobalRank": null, "LocalRank": 3, "Mode": "DynamicRange", "NumSamples"?: 16,
     "Nodes": {module path: {"inputs": [[C, 1], ...], "outputs"?: [...],
                             "params"?: {"weight": [C, 1]}}}}

1. In a measurement every array holds absolute maxima, [1, 1] of a whole tensor or [C, 1] per
   channel.
2. In a file of scales (Mode "Scale") inputs and outputs are numbers. The weight is a number, or
   {"0": [O], "1": [I]} of output and input channels.
3. `input` and `output` are accepted for `inputs` and `outputs`, and one array for a list of one.
4. The second output of a row-parallel linear may be memory that nobody wrote (row_parallel.py): it
   is 0 where it is not finite.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantflow.errors import InputError, StatisticsError
from quantflow.files import disk
from quantflow.files.canonical import read_json, readable_json
from quantflow.formats.gaudi.file_names import FileName, TripleFiles
from quantflow.formats.gaudi.restricted_npz import npz_bytes, read_npz
from quantflow.formats.gaudi.row_parallel import is_row_parallel, without_garbage

MEASUREMENT, SCALES = "DynamicRange", "Scale"
_ALIASES: Mapping[Any, str] = {"input": "inputs", "output": "outputs"}
_AGAIN = "measure again, or copy the files again from where they were written"


@dataclass(frozen=True, kw_only=True, eq=False)
class Node:
    """One module.

    Attributes:
        inputs, outputs: values of each tensor, float32: [C, 1] in a measurement; [] or per channel
            [C] among scales.
        weight: value of the weight, float32: [C, 1] in a measurement; [] or [O] among scales.
        weight_inputs: scale of each input channel [I], where scales are per channel.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...] = ()
    weight: Tensor | None = None
    weight_inputs: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every value with the words that name it: `input 0`, `output 1`, `weight`."""
        named = {f"input {index}": value for index, value in enumerate(self.inputs)}
        named |= {f"output {index}": value for index, value in enumerate(self.outputs)}
        named |= {} if self.weight is None else {"weight": self.weight}
        return named | (
            {} if self.weight_inputs is None else {"weight of input channels": self.weight_inputs}
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Triple:
    """One rank's files.

    Attributes:
        nodes: module path -> measured or derived values.
        mode: MEASUREMENT or SCALES.
        local_rank: number of the rank; None for a single process, -1 for a merge of all ranks into
            one.
        samples: NumSamples; None where the toolkit did not keep it.
        modules: the mod_list; empty where there is none.
    """

    nodes: Mapping[str, Node]
    mode: str = MEASUREMENT
    local_rank: int | None = None
    samples: int | None = None
    modules: tuple[str, ...] = field(default=())


def read_triple(files: TripleFiles) -> Triple:
    """Read one rank's files.

    The npz counts; a json beside it has to say the same, or one of the two was changed.

    Raises:
        InputError: a file is damaged, its pickle asks for more than arrays, or the files contradict
            each other or their names.
        StatisticsError: a value is NaN, infinite or negative, or a scale is not positive; the node
            is named.
    """
    triples = []
    if files.npz is not None:
        triples.append((files.npz, _parse(read_npz(files.npz), files.npz)))
    if files.json is not None:
        # the toolkit writes NaN as Python does; the node that has it is named
        triples.append((files.json, _parse(read_json(files.json, constants=True), files.json)))
    (path, triple), *others = triples
    for other_path, other in others:
        _refuse_disagreement(path, triple, other_path, other)
    rank = files.name.rank
    if triple.local_rank not in (None, -1, rank):
        raise InputError(
            f"{path}: LocalRank is {triple.local_rank}, the name says {rank}",
            "give the file its own name",
        )
    modules = () if files.mod_list is None else _modules(files.mod_list)
    strangers = sorted(set(triple.nodes) - set(modules)) if modules else []
    if strangers:
        raise InputError(
            f"{path}: node {strangers[0]} is not in {files.mod_list} ({len(strangers)} such)",
            "the two were written by different versions of the toolkit; measure again with one",
        )
    return Triple(
        nodes=triple.nodes,
        mode=triple.mode,
        local_rank=triple.local_rank,
        samples=triple.samples,
        modules=modules,
    )


def write_triple(folder: Path, name: FileName, triple: Triple) -> None:
    """Write the npz, the json and, where modules are known, the mod_list into an existing folder.

    Raises:
        OSError: a file cannot be written.
        StatisticsError: a value is not what its mode allows.
    """
    for node, content in triple.nodes.items():
        _check_values(node, content, mode=triple.mode, name=name.stem)
    table: dict[str, Any] = {
        "GlobalRank": None,
        "LocalRank": triple.local_rank,
        "Mode": triple.mode,
    }
    if triple.samples is not None:
        table["NumSamples"] = triple.samples
    arrays = {node: _table(content, arrays=True) for node, content in sorted(triple.nodes.items())}
    lists = {node: _table(content, arrays=False) for node, content in triple.nodes.items()}
    disk.write_file(folder / f"{name.stem}.npz", npz_bytes(table | {"Nodes": arrays}))
    disk.write_file(folder / f"{name.stem}.json", readable_json(table | {"Nodes": lists}))
    if triple.modules:
        disk.write_file(folder / f"{name.stem}_mod_list.json", readable_json(list(triple.modules)))


def _table(node: Node, *, arrays: bool) -> dict[str, Any]:
    """A node in the toolkit's words.

    An npz has arrays and numbered channels, a json lists and text.
    """

    def spelled(value: Tensor) -> Any:
        return value.numpy() if arrays else value.tolist()

    table: dict[str, Any] = {"inputs": [spelled(value) for value in node.inputs]}
    if node.outputs:
        table["outputs"] = [spelled(value) for value in node.outputs]
    if node.weight is not None:
        weight = spelled(node.weight)
        table["params"] = {"weight": weight}
        if node.weight_inputs is not None:
            first, second = (0, 1) if arrays else ("0", "1")
            table["params"] = {"weight": {first: weight, second: spelled(node.weight_inputs)}}
    return table


def _parse(value: Any, path: Path) -> Triple:
    if not isinstance(value, dict) or not isinstance(value.get("Nodes"), dict):
        raise InputError(f"{path}: no table with Nodes", "give a file that Gaudi's toolkit wrote")
    mode = value.get("Mode")
    if mode not in (MEASUREMENT, SCALES):
        raise InputError(
            f"{path}: Mode is {mode!r}, {MEASUREMENT} or {SCALES} is needed",
            "give a file with maxima or scales",
        )
    nodes = {}
    for name, content in value["Nodes"].items():
        node = _node(content, mode=mode, where=f"{path}: {name}")
        if mode == MEASUREMENT and is_row_parallel(name):
            node = replace(node, outputs=without_garbage(node.outputs))
        nodes[name] = node
        _check_values(name, nodes[name], mode=mode, name=str(path))
    for key in ("LocalRank", "NumSamples"):
        if value.get(key) is not None and type(value[key]) is not int:
            raise InputError(f"{path}: {key} is {value[key]!r}, a whole number is needed", _AGAIN)
    return Triple(
        nodes=nodes, mode=mode, local_rank=value.get("LocalRank"), samples=value.get("NumSamples")
    )


def _node(content: Any, *, mode: str, where: str) -> Node:
    if not isinstance(content, dict):
        raise InputError(f"{where}: {type(content).__name__} instead of a table", _AGAIN)
    parts = {_ALIASES.get(key, key): item for key, item in content.items()}
    if set(parts) - {"inputs", "outputs", "params"} or len(parts) < len(content):
        raise InputError(
            f"{where}: holds {sorted(map(str, content))}, inputs, outputs and params are known",
            _AGAIN,
        )
    params = parts.get("params") or {}
    if not isinstance(params, dict) or set(params) - {"weight"}:
        held = sorted(map(str, params)) if isinstance(params, dict) else str(params)[:60]
        raise InputError(f"{where}: params are {held}, weight is known", _AGAIN)
    weight, weight_inputs = params.get("weight"), None
    if isinstance(weight, dict):
        weight = {str(key): item for key, item in weight.items()}
        if set(weight) != {"0", "1"} or mode != SCALES:
            raise InputError(
                f"{where}: weight is a table of {sorted(weight)}, scales have 0 and 1", _AGAIN
            )
        weight, weight_inputs = weight["0"], _scale(weight["1"], f"{where}: weight")
    one = _maxima if mode == MEASUREMENT else _scale
    return Node(
        inputs=_list(parts.get("inputs"), mode=mode, where=f"{where}: inputs"),
        outputs=_list(parts.get("outputs"), mode=mode, where=f"{where}: outputs"),
        weight=None if weight is None else one(weight, f"{where}: weight"),
        weight_inputs=weight_inputs,
    )


def _list(value: Any, *, mode: str, where: str) -> tuple[Tensor, ...]:
    """Tensors of a list, or the one tensor that stands where a list should."""
    one, alone = (_maxima, 2) if mode == MEASUREMENT else (_scale, 0)
    if value is None:
        return ()
    if _depth(value) == alone:
        return (one(value, where),)
    if not isinstance(value, list | np.ndarray) or not _depth(value):
        raise InputError(f"{where}: {value!r} is no list of numbers", _AGAIN)
    return tuple(one(item, where) for item in value)


def _depth(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.ndim
    if isinstance(value, list):
        return 1 + (_depth(value[0]) if value else 0)
    return 0


def _maxima(value: Any, where: str) -> Tensor:
    """Absolute maxima, [C, 1]."""
    array = _numbers(value, where)
    if array.ndim != 2 or array.shape[1] != 1 or not len(array):
        raise InputError(
            f"{where}: an array {list(array.shape)}, [1, 1] or [C, 1] is needed", _AGAIN
        )
    return torch.from_numpy(array)


def _scale(value: Any, where: str) -> Tensor:
    """A scale [], or those of channels [C]."""
    array = _numbers(value, where)
    if not array.size:
        raise InputError(f"{where}: an empty array", _AGAIN)
    return torch.from_numpy(array.reshape(() if array.size == 1 else -1))


def _numbers(value: Any, where: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    try:
        array = np.array(value, dtype=np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"{where}: not an array of numbers ({error})", _AGAIN) from error
    with np.errstate(over="ignore"):  # too large for float32 is infinite, and refused with its name
        return array.astype(np.float32)


def _check_values(node: str, content: Node, *, mode: str, name: str) -> None:
    for what, value in content.tensors.items():
        bad = ~torch.isfinite(value) | (value < 0 if mode == MEASUREMENT else value <= 0)
        if bad.any():
            expected = (
                "a maximum is finite and not negative"
                if mode == MEASUREMENT
                else "a scale is finite and positive"
            )
            raise StatisticsError(
                f"{name}: {node}: {what} holds {value[bad].flatten()[0].item()}; {expected}", _AGAIN
            )


def _modules(path: Path) -> tuple[str, ...]:
    value = read_json(path)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InputError(f"{path}: not a list of module paths", _AGAIN)
    return tuple(value)


def _refuse_disagreement(path: Path, triple: Triple, other_path: Path, other: Triple) -> None:
    both = f"{path} and {other_path.name}"
    heads = [(one.mode, one.local_rank) for one in (triple, other)]
    if heads[0] != heads[1]:
        raise InputError(
            f"{both}: Mode and LocalRank are {heads[0]} and {heads[1]}",
            "remove the one that is wrong",
        )
    for node in sorted({*triple.nodes, *other.nodes}):
        if node not in triple.nodes or node not in other.nodes:
            raise InputError(
                f"{both}: node {node} is in one of them alone", "remove the one that is wrong"
            )
        ours, theirs = triple.nodes[node].tensors, other.nodes[node].tensors
        differing = [
            key for key in {**ours, **theirs} if not _equal(ours.get(key), theirs.get(key))
        ]
        if differing:
            raise InputError(
                f"{both}: {node}: {differing[0]} differs", "remove the one that is wrong"
            )


def _equal(left: Tensor | None, right: Tensor | None) -> bool:
    return left is not None and right is not None and torch.equal(left, right)

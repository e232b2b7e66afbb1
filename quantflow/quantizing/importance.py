"""The importance of every linear's inputs by an importance matrix of llama.cpp's.

It stands in the place of a measurement: rtn_mse weighs the error of each column by it. What an
algorithm needs beyond mean squares (gptq: products of inputs) no such matrix has.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from quantflow.algorithms import rtn_mse
from quantflow.errors import InputError, UsageError
from quantflow.files.checkpoint import Checkpoint
from quantflow.formats.llama_cpp.experts import file_tensors
from quantflow.formats.llama_cpp.imatrix import Entry, InputsPlace, read_imatrix, rows_of
from quantflow.models.configuration import load_config
from quantflow.planning.plan import Plan
from quantflow.quantizing.static_inputs import UNKNOWN_INPUT, LinearInput

_OTHER = "give the file that was made with this model"


def refuse_unread(plan: Plan, *, imatrix: str, measured: bool) -> None:
    """Refuse a plan that would not read an importance matrix.

    Raises:
        UsageError: another algorithm than rtn_mse; a measurement, or what needs one.
    """
    if plan.method != rtn_mse.NAME:
        raise UsageError(
            f"{plan.name}: imatrix {imatrix} with {plan.method}, which does not read it",
            "use --algorithm rtn_mse, or leave --imatrix out: gptq, good and best measure more",
        )
    if measured or not plan.file_to_file:
        raise UsageError(
            f"{plan.name}: imatrix {imatrix} beside a measurement, what needs one, or ranks",
            "leave out --measurement, transforms, static inputs, --kv-cache and --ranks, or "
            "--imatrix",
        )


def with_importance(
    inputs: Mapping[str, LinearInput], plan: Plan, *, path: Path, checkpoint: Checkpoint
) -> dict[str, LinearInput]:
    """The inputs of the linears of the layers that a plan quantizes, with their importance.

    The head and the layers that predict further tokens are rounded without.

    Args:
        inputs: linear -> its input, so far as it is known.
        plan: resolved plan.
        path: the importance matrix.
        checkpoint: the model.

    Raises:
        InputError: the file is none, an entry is of no tensor of the model or has another size, or
            a linear that is quantized has none.
        UnsupportedError: a family without names of llama.cpp's.
    """
    matrix = read_imatrix(path)
    shapes = {name: tuple(info.shape) for name, info in checkpoint.infos.items()}
    tensors = file_tensors(load_config(checkpoint), shapes)
    foreign = sorted(matrix.entries.keys() - {tensor.name for tensor in tensors})
    if foreign:
        raise InputError(
            f"{path}: an entry of {foreign[0]} and {len(foreign) - 1} more that this model does "
            "not have",
            _OTHER,
        )
    rows = rows_of(tensors)
    quantized = [name for name, scheme in plan.schemes.items() if scheme and name in rows]
    missing = sorted({rows[name].entry for name in quantized} - matrix.entries.keys())
    if missing:
        raise InputError(
            f"{path}: no entry of {missing[0]} and {len(missing) - 1} more that are quantized",
            f"{_OTHER}, or ignore these linears",
        )
    found = dict(inputs)
    for name in quantized:
        importance = _importance(path, matrix.entries[rows[name].entry], rows[name])
        found[name] = replace(found.get(name, UNKNOWN_INPUT), importance=importance)
    return found


def _importance(path: Path, entry: Entry, row: InputsPlace) -> Tensor:
    """The importance of a linear's inputs, [I].

    Raises:
        InputError: the entry has another size than the model's tensor.
    """
    means = entry.mean_squares()
    if means.numel() != row.matrices * row.features:
        raise InputError(
            f"{path}: {row.entry} has {means.numel()} values, the model's tensor reads "
            f"{row.matrices} x {row.features}",
            _OTHER,
        )
    return means.view(row.matrices, row.features)[row.index]

"""The values of a quantized weight: decoded from files some rows at a time, and one hash for them before and after packing."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from quantflow.artifact.canonical import digest_of
from quantflow.artifact.safetensors_header import TensorInfo
from quantflow.core.dtypes import DTYPES
from quantflow.core.qtensor import QuantizedLinear
from quantflow.core.scheme import LinearScheme
from quantflow.formats import DEFAULT, FORMATS
from quantflow.models.reading import bytes_of, read_into, read_tensor

FORMAT = FORMATS[DEFAULT]
Stored = Mapping[str, tuple[Path, TensorInfo]]  # full name of a tensor -> the file that holds it, and where


class ValuesDigest:
    """The sha256 of a quantized linear's values, added row by row; where the rows are cut makes no difference."""

    def __init__(self) -> None:
        """Begin with no rows."""
        self._parts = {name: hashlib.sha256() for name in ("qvalue", "scale", "zero_point")}
        self._begun = False

    def update(self, linear: QuantizedLinear) -> None:
        """Add the rows that follow; what they have in common with the first ones counts once."""
        shared = linear.scheme.weights.granularity == "per_tensor"
        for name in ("qvalue", "scale", "zero_point"):
            tensor: Tensor | None = getattr(linear.weight, name)
            if tensor is not None and (name == "qvalue" or not (shared and self._begun)):
                self._parts[name].update(bytes_of(tensor))
        if not self._begun:
            inputs = {"input_scale": linear.input_scale, "input_zero_point": linear.input_zero_point}
            self._parts |= {name: hashlib.sha256(bytes_of(value)) for name, value in inputs.items() if value is not None}
        self._begun = True

    def hexdigest(self) -> str:
        """Return 64 hexadecimal digits."""
        return digest_of({name: digest.hexdigest() for name, digest in self._parts.items()})


def decoded_rows(name: str, scheme: LinearScheme, stored: Stored, *, first: int, count: int, columns: int) -> QuantizedLinear:
    """Return some rows of a quantized linear, with what they share with the others.

    Args:
        name: the linear.
        scheme: of the linear.
        stored: its tensors.
        first: the first row, a multiple of the layout's ROW_MULTIPLE.
        count: how many, a multiple of it too unless they are the last.
        columns: of the weight.

    Raises:
        InputError: a file ends early, or holds values that the scheme does not.
    """
    spans = FORMAT.row_spans(name, scheme, first=first, count=count)
    parts = {key: _rows(*stored[key], *span) for key, span in spans.items()}
    for key in FORMAT.tensor_names(name, scheme):
        if key not in spans:
            parts[key] = read_tensor(*stored[key])
    if f"{name}.weight_shape" in stored:
        parts[f"{name}.weight_shape"] = torch.tensor([count, columns])
    linear: QuantizedLinear = FORMAT.decode(name, parts, scheme)
    return linear


def _rows(path: Path, info: TensorInfo, first: int, count: int) -> Tensor:
    """Read rows of a tensor as stored."""
    part = torch.empty(count, *info.shape[1:], dtype=DTYPES[info.dtype])
    read_into(path, part, info.offset + first * part[0].nbytes, name=info.name)
    return part

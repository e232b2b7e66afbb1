"""The values of a quantized weight: decoded from files some rows at a time, and one hash for them before and after packing."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from quantflow.artifact.canonical import digest_of
from quantflow.artifact.safetensors_header import TensorInfo
from quantflow.core.qtensor import QTensor
from quantflow.core.scheme import LinearScheme
from quantflow.formats import FORMATS
from quantflow.models.reading import DTYPES, bytes_of, read_into

FORMAT = FORMATS["compressed-tensors"]
Stored = Mapping[str, tuple[Path, TensorInfo]]  # full name of a tensor -> the file that holds it, and where


class ValuesDigest:
    """The sha256 of a quantized weight's values, added row by row; where the rows are cut makes no difference."""

    def __init__(self) -> None:
        """Begin with no rows."""
        self._parts = {name: hashlib.sha256() for name in ("qvalue", "scale", "zero_point")}

    def update(self, weight: QTensor) -> None:
        """Add the rows that follow."""
        for name, digest in self._parts.items():
            tensor: Tensor | None = getattr(weight, name)
            if tensor is not None:
                digest.update(bytes_of(tensor))

    def hexdigest(self) -> str:
        """Return 64 hexadecimal digits."""
        return digest_of({name: digest.hexdigest() for name, digest in self._parts.items()})


def decoded_rows(name: str, scheme: LinearScheme, stored: Stored, *, first: int, count: int, columns: int) -> QTensor:
    """Return some rows of a quantized linear.

    Args:
        name: the linear.
        scheme: per_channel or per_group weights.
        stored: its tensors.
        first: the first row, a multiple of the layout's ROW_MULTIPLE.
        count: how many, a multiple of it too unless they are the last.
        columns: of the weight.

    Raises:
        InputError: a file ends early, or holds values that the scheme does not.
    """
    spans = FORMAT.row_spans(name, scheme, first=first, count=count)
    parts = {key: _rows(*stored[key], *span) for key, span in spans.items()}
    if f"{name}.weight_shape" in stored:
        parts[f"{name}.weight_shape"] = torch.tensor([count, columns])
    weight: QTensor = FORMAT.decode(name, parts, scheme).weight
    return weight


def _rows(path: Path, info: TensorInfo, first: int, count: int) -> Tensor:
    """Read rows of a tensor as stored."""
    part = torch.empty(count, *info.shape[1:], dtype=DTYPES[info.dtype])
    read_into(path, part, info.offset + first * part[0].nbytes, name=info.name)
    return part

"""Tensors that a GGUF file stores in blocks of few bits, as real numbers.

llama.cpp's own package, `gguf`, knows each type. It is imported when a file is read: other sources
do not need it. A block is a number of neighbouring elements of a row. Rows are read and dequantized
by themselves, so that memory holds some rows only.
"""

import functools
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantflow.core.dtypes import DTYPES
from quantflow.errors import UnsupportedError
from quantflow.files.safetensors_header import TensorInfo
from quantflow.formats.llama_cpp.gguf import PLAIN, Type
from quantflow.models.reading import check_finite, read_into


@functools.cache
def readable() -> Mapping[int, Type]:
    """Every type that can be read: number -> type. F32, F16 and BF16 come first."""
    types = dict(PLAIN)
    for kind, (elements, nbytes) in _package().GGML_QUANT_SIZES.items():
        if elements > 1 and _dequantizes(kind, nbytes):
            types[int(kind)] = Type(name=kind.name, elements=elements, nbytes=nbytes)
    return types


def _package() -> Any:
    """The package `gguf`.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        return import_module("gguf")
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"a GGUF file is read with the package gguf: {error}", "pip install gguf"
        ) from error


def _dequantizes(kind: Any, nbytes: int) -> bool:
    """Whether `gguf` dequantizes a type, of GGMLQuantizationType; it has no list of these."""
    try:
        _package().dequantize(np.zeros((1, nbytes), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def read_rows(path: Path, info: TensorInfo, start: int, stop: int) -> Tensor:
    """Rows of a tensor: in its own dtype where it is stored plainly, else dequantized, float32.

    Args:
        path: the file.
        info: tensor of a header that was read with the types of `readable`.
        start: first row, of its first dimension.
        stop: last row + 1.

    Returns:
        [stop - start, ...], finite.

    Raises:
        InputError: the file ends early, or a value is NaN or Inf.
    """
    width = info.nbytes // info.shape[0]
    shape = (stop - start, *info.shape[1:])
    if info.dtype in DTYPES:
        rows = torch.empty(shape, dtype=DTYPES[info.dtype])
        read_into(path, rows, info.offset + start * width, name=info.name)
    else:
        stored = torch.empty((stop - start, width), dtype=torch.uint8)
        read_into(path, stored, info.offset + start * width, name=info.name)
        # what is not finite is refused below, with the tensor's name
        with np.errstate(all="ignore"):
            values = _package().dequantize(
                stored.numpy(), _package().GGMLQuantizationType[info.dtype]
            )
        rows = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(shape)
    check_finite(rows, name=info.name, path=path)
    return rows

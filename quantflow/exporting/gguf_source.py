"""The weights for a GGUF file: a model's own files, or an artifact, some rows at a time."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantflow.core.dtypes import DTYPES, NAMES
from quantflow.core.qtensor import QTensor
from quantflow.errors import InputError, UnsupportedError
from quantflow.exporting.quantized_source import identity_of
from quantflow.files.checkpoint import CONFIG, Checkpoint
from quantflow.files.digests import Digests
from quantflow.files.manifest import MANIFEST_NAME
from quantflow.formats import DEFAULT, FORMATS
from quantflow.formats.llama_cpp.encoding import block_type_of
from quantflow.formats.llama_cpp.file_plan import FileSource
from quantflow.models.configuration import load_config
from quantflow.models.identity import identify
from quantflow.models.open import open_files
from quantflow.models.reading import check_finite, read_into, read_tensor
from quantflow.models.unused import unused_words
from quantflow.quantizing.weight_rows import decoded_rows
from quantflow.runtime.artifact import Artifact, is_model, open_artifact, open_folder

FORMAT = FORMATS[DEFAULT]
WORKING = 24 << 20  # bytes: a piece's qvalues as read and unpacked, and rows beside it
Read = Callable[[str, int, int], Tensor]


@dataclass(frozen=True, kw_only=True)
class GGUFWeights(FileSource):
    """Every tensor of a source, and how it is read.

    Attributes:
        identity: the model's fingerprint or the artifact's digest.
        read: function of (name, first row, last row + 1) to these rows, floating and finite.
        scheme: scheme of the artifact's recipe, None of another program's folder; rows that it does
            not fit have other types in `blocks`.
        read_quantized: function like `read` for the weights in `blocks`.
        working_bytes: bytes that `read` holds at most.
        left_out: sentence about tensors that no module has; None without any.
        quantized_inputs: linears that quantize their inputs.
        kv_cache: whether keys and values are quantized.
    """

    identity: str
    read: Read
    scheme: str | None = None
    read_quantized: Callable[[str, int, int], QTensor] | None = None
    working_bytes: int = 0
    left_out: str | None = None
    quantized_inputs: int = 0
    kv_cache: bool = False


def open_weights(folder: Path) -> GGUFWeights:
    """Open a model, an artifact, whose hashes are compared, or what another program quantized.

    Raises:
        InputError: it cannot be used.
        UnsupportedError: an unknown family or layout version.
        IntegrityError: an artifact's file differs from its hash.
    """
    if (folder / MANIFEST_NAME).exists():
        return _of_artifact(open_artifact(folder))
    if (folder / CONFIG).is_file() and not is_model(folder):
        return _of_artifact(open_folder(folder))  # another program quantized it
    checkpoint = open_files(folder).checkpoint
    config = load_config(checkpoint)

    def read(name: str, start: int, stop: int) -> Tensor:
        return _rows(checkpoint, name, start, stop)

    return GGUFWeights(
        folder=folder,
        config=config,
        identity=identify(checkpoint, Digests()),
        shapes={name: info.shape for name, info in checkpoint.infos.items()},
        dtypes={name: info.dtype for name, info in checkpoint.infos.items()},
        read=read,
        left_out=unused_words(checkpoint, done="left out"),
    )


def _of_artifact(artifact: Artifact) -> GGUFWeights:
    infos = artifact.checkpoint.infos
    decode = functools.lru_cache(maxsize=1)(artifact.decode)

    def quantized(linear: str, start: int, stop: int) -> QTensor:
        if artifact.manifest:
            return _quantized(artifact, linear, start, stop)
        return decode(linear).weight.rows(slice(start, stop))  # layouts differ in what rows are

    def read(name: str, start: int, stop: int) -> Tensor:
        linear = name.removesuffix(".weight")
        if name == linear or linear not in artifact.linears:
            return _rows(artifact.checkpoint, name, start, stop)
        return quantized(linear, start, stop).dequantize()

    def read_quantized(name: str, start: int, stop: int) -> QTensor:
        return quantized(name.removesuffix(".weight"), start, stop)

    for name, placement in artifact.linears.items():
        if placement.scheme.rotation is not None:
            raise UnsupportedError(
                f"{name}: its inputs are mixed in blocks of {placement.scheme.rotation}, which "
                "llama.cpp does not do",
                "quantize with hadamard: {down: false}",
            )
    shapes = {name: infos[name].shape for name in artifact.names if name in infos}
    dtypes = {name: infos[name].dtype for name in shapes}
    for linear, placement in artifact.linears.items():
        shapes[f"{linear}.weight"], dtypes[f"{linear}.weight"] = (
            placement.shape,
            NAMES[torch.float32],
        )
    return GGUFWeights(
        folder=artifact.checkpoint.folder,
        config=artifact.config,
        identity=identity_of(artifact),
        left_out=unused_words(artifact.checkpoint, done="left out"),
        shapes=shapes,
        dtypes=dtypes,
        read=read,
        blocks={
            f"{linear}.weight": kind
            for linear, placement in artifact.linears.items()
            if (kind := block_type_of(placement.scheme.weights)) is not None
        },
        scheme=artifact.manifest["recipe"]["scheme"] if artifact.manifest else None,
        read_quantized=read_quantized,
        working_bytes=WORKING,
        quantized_inputs=sum(
            placement.scheme.input is not None for placement in artifact.linears.values()
        ),
        kv_cache=artifact.kv_cache is not None,
    )


def _quantized(artifact: Artifact, name: str, start: int, stop: int) -> QTensor:
    """Rows of a quantized linear.

    Raises:
        InputError: as `decoded_rows`, or the linear has another shape than the model's.
    """
    scheme, (rows, columns) = artifact.linears[name].scheme, artifact.linears[name].shape
    tensors = {key: artifact.checkpoint.tensors[key] for key in FORMAT.tensor_names(name, scheme)}
    key = f"{name}.weight" if f"{name}.weight" in tensors else f"{name}.weight_packed"
    if tensors[key][1].shape[0] != rows:
        raise InputError(
            f"{key}: {tensors[key][1].shape[0]} rows, the model needs {rows}",
            "check that config.json belongs to these weights",
        )
    stored = {
        key: (artifact.checkpoint.folder / file, info) for key, (file, info) in tensors.items()
    }
    multiple = FORMAT.row_multiple(scheme)  # rows that are decoded by themselves
    first, last = start // multiple * multiple, min(rows, -(-stop // multiple) * multiple)
    linear = decoded_rows(name, scheme, stored, first=first, count=last - first, columns=columns)
    return linear.weight.rows(slice(start - first, stop - first))


def _rows(checkpoint: Checkpoint, name: str, start: int, stop: int) -> Tensor:
    """Read rows of a tensor.

    Raises:
        InputError: the file ends early, a value is NaN or Inf, or the tensor holds no floating
            numbers.
    """
    file, info = checkpoint.tensors[name]
    dtype = DTYPES.get(info.dtype)
    if dtype is None or not dtype.is_floating_point or dtype.itemsize < 2:
        raise InputError(
            f"{name}: {info.dtype} in {file}, floating numbers of 16 bits or more are needed",
            "check the model",
        )
    path = checkpoint.folder / file
    if info.strides is not None:  # an expert's share of a tensor of all
        return read_tensor(path, info)[start:stop]
    rows = torch.empty((stop - start, *info.shape[1:]), dtype=dtype)
    read_into(path, rows, info.offset + start * (info.nbytes // info.shape[0]), name=name)
    check_finite(rows, name=name, path=path)
    return rows

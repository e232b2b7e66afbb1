"""Stage 4 for readers of the source: an artifact's dequantized weights in its source's form.

Reads    what `quantflow export` wrote
Writes   <o>: config.json, weights, side files and DONE.json; the whole folder appears at once
Resumes  a finished result of the same inputs is left alone
Fails    2 a folder that is no artifact, an unknown dtype, one that does not hold a tensor,
         3 unusable input, 5 the folder is held or the disk is full, 6 inputs that are mixed on
         their way, 7 a file differs from its hash, or from what was written

Every tensor of floating numbers gets the dtype, and config.json names it. Those that the model's
own code keeps in float32 beside narrower ones stay so. A weight that its source keeps transposed,
or with those of other experts in one tensor, is put there again. Weights alone are written: inputs
and caches are no longer rounded. One tensor of the result is in memory at a time. Before the folder
appears every tensor is read again and compared.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantflow.core.cast import cast
from quantflow.core.dtypes import DTYPES, NAMES
from quantflow.errors import UnsupportedError, UsageError, nearest
from quantflow.exporting.job import ExportJob
from quantflow.exporting.plain_files import require_written, write_beside, write_model
from quantflow.exporting.quantized_source import identity_of, require_quantized
from quantflow.files import stage_folder
from quantflow.files.outputs import output_folder
from quantflow.files.safetensors_header import SplitTensor
from quantflow.files.safetensors_writer import Spec
from quantflow.models.open import graph_for, words_in_float32
from quantflow.models.reading import read_tensor
from quantflow.progress import Progress
from quantflow.runtime.artifact import Artifact, open_folder
from quantflow.sources.models import model_folder
from quantflow.units import parse_size

VERSION = 2
CHOICES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
_DEFAULT = "bf16"
_EXACT = "f32"  # holds every product of a scale and a code
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def run(job: ExportJob, progress: Progress) -> Path:
    """Write the folder and return it; one that is up to date is left alone."""
    if job.model is not None:
        cause = f"export: --model {job.model} beside format {job.options.format}"
        raise UsageError(cause, "leave --model out, the artifact is all that is read")
    dtype = job.options.dtype or _DEFAULT
    if dtype not in CHOICES:
        cause = f"export: dtype {dtype!r} of format dequantized is unknown"
        raise UsageError(cause, nearest(dtype, list(CHOICES)))
    require_quantized(job.source, job.output, product="format dequantized")
    return write_dequantized(job, progress, dtype=dtype)


def dequantized(job: ExportJob, progress: Progress) -> Path:
    """Write the weights of a quantized model, exactly, as a model that can be quantized."""
    reads = {"the model": job.source}
    source = model_folder(job.source, revision=job.revision, progress=progress)
    job = replace(job, source=source, output=output_folder(job.output, reads=reads))
    require_quantized(job.source, job.output, product="format dequantized")
    return write_dequantized(job, progress, dtype=None)


def write_dequantized(job: ExportJob, progress: Progress, *, dtype: str | None) -> Path:
    """Write the weights of a model, those that are quantized dequantized; return the folder.

    Args:
        job: job with the model and the folder.
        progress: receiver of progress.
        dtype: dtype of the result, a key of `CHOICES`; None is one that holds the weights that were
            quantized exactly, and the other weights keep theirs.
    """
    with stage_folder.locked(job.output):
        artifact = open_folder(job.source)
        identity = identity_of(artifact)
        chosen = dtype or _exact(artifact)
        made_from = {"artifact": identity, "dtype": chosen, "version": VERSION}
        if not artifact.linears:  # a model as it is, in files of another size
            made_from |= {"dtype": dtype, "shard_size": job.options.shard_size}
        if stage_folder.is_up_to_date(job.output, made_from):
            progress.say(f"export {job.output.name}: up to date")
            return job.output
        stage_folder.refuse_other_result(job.output, made_from, force=job.force)
        _refuse_rotations(artifact)
        limit = parse_size(job.options.shard_size)
        with stage_folder.publish(job.output, stage="export", inputs=made_from) as folder:
            config = {
                key: value
                for key, value in artifact.checkpoint.config.items()
                if key != "quantization_config"
            }
            split = _split(artifact)
            specs = _specs(artifact, split, CHOICES[chosen], others=dtype is not None)
            said = config if dtype is None else _with_dtype(config, CHOICES[chosen])
            written = write_model(
                folder,
                specs,
                _tensors(artifact, split, specs),
                limit=limit,
                stage=f"export {job.output.name}",
                progress=progress,
                unused_of=artifact.checkpoint,
            )
            stage = f"export {job.output.name}"
            write_beside(folder, artifact.checkpoint, said, stage=stage, progress=progress)
            progress.say(f"export {job.output.name}: comparing what was written")
            require_written(folder, written, _tensors(artifact, split, specs))
    rounded = sum(placement.scheme.input is not None for placement in artifact.linears.values())
    if rounded:
        progress.say(
            f"export {job.output.name}: weights alone; the inputs of {rounded} linears are no "
            "longer rounded"
        )
    return job.output


def _exact(artifact: Artifact) -> str:
    """A dtype that holds every weight as it is.

    Weights of e2m1, whose scales are powers of two, fit bfloat16.
    """
    schemes = [placement.scheme.weights for placement in artifact.linears.values()]
    return (
        _DEFAULT
        if all((one.scale_format, one.num_bits) == ("e8m0", 4) for one in schemes)
        else _EXACT
    )


def _refuse_rotations(artifact: Artifact) -> None:
    for name, placement in artifact.linears.items():
        if placement.scheme.rotation is not None:
            cause = (
                f"{name}: its inputs are mixed in blocks of {placement.scheme.rotation}, which "
                "its source's code does not do"
            )
            raise UnsupportedError(cause, "quantize with hadamard: {down: false}")


def _with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The content of config.json with a dtype, also where it names one for a part of the model."""
    word = str(dtype).removeprefix("torch.")
    keys = ("dtype", "torch_dtype")

    def changed(table: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: word
            if key in keys and isinstance(value, str)
            else changed(value)
            if isinstance(value, dict)
            else value
            for key, value in table.items()
        }

    said = changed(config)
    if not any(isinstance(said.get(key), str) for key in keys):
        said["dtype"] = word
    return said


def _tensors(
    artifact: Artifact, split: Mapping[str, SplitTensor], specs: Mapping[str, Spec]
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the result.

    Raises:
        UsageError: a tensor that its dtype does not hold.
    """
    for name, spec in specs.items():
        yield name, _tensor(artifact, split, name, *spec)


def _split(artifact: Artifact) -> dict[str, SplitTensor]:
    """The tensors that the model's own code reads whole, and the folder has in parts.

    Transposed ones are among them.
    """
    names, whole, shapes = set(artifact.names), set[str](), dict[str, tuple[int, ...]]()
    if artifact.manifest:
        shapes = {
            entry["name"]: tuple(entry["shape"]) for entry in artifact.manifest["ledger"]["tensors"]
        }
    else:  # another program's folder has what is not quantized as the model's code reads it
        whole = {name for name in names if name.removesuffix(".weight") not in artifact.linears}
    return {
        name: split.of(shapes.get(name, split.shape)) or split
        for name, split in graph_for(artifact.config).split.items()
        if name not in whole and names.issuperset(part.name for part in split.parts)
    }


def _kept_wide(artifact: Artifact, dtype: torch.dtype) -> frozenset[str]:
    """The tensors in float32 that transformers runs in float32 though the model has the dtype."""
    wide = [name for name, info in artifact.checkpoint.infos.items() if info.dtype == "F32"]
    if dtype == torch.float32 or not wide:
        return frozenset()
    patterns = [
        re.compile(word)
        for word in words_in_float32(artifact.config, float16=dtype == torch.float16)
    ]
    return frozenset(name for name in wide if any(one.search(name) for one in patterns))


def _specs(
    artifact: Artifact, split: Mapping[str, SplitTensor], dtype: torch.dtype, *, others: bool
) -> dict[str, Spec]:
    """Dtype, as safetensors names it, and shape of every tensor of the result.

    Args:
        artifact: the source.
        split: tensors that the artifact has in parts.
        dtype: dtype of the weights that were quantized.
        others: whether the other floating tensors get it too.
    """
    inside = {part.name: name for name, whole in split.items() for part in whole.parts}
    kept = _kept_wide(artifact, dtype) if others else frozenset()
    specs: dict[str, Spec] = {}
    for name in artifact.names:
        linear = name.removesuffix(".weight")
        quantized = linear in artifact.linears and name != linear
        info = None if quantized else artifact.checkpoint.infos[name]
        kind, shape = (
            (NAMES[dtype], artifact.linears[linear].shape)
            if info is None
            else (info.dtype, info.shape)
        )
        if others and kind in _FLOATS and name not in kept:
            kind = NAMES[dtype]
        whole = inside.get(name)
        if whole is None:
            specs[name] = (kind, shape)
        elif whole not in specs or info is None:
            specs[whole] = (kind, split[whole].shape)
    return specs


def _tensor(
    artifact: Artifact,
    split: Mapping[str, SplitTensor],
    name: str,
    dtype: str,
    shape: tuple[int, ...],
) -> Tensor:
    """A tensor of the result."""
    if name not in split:
        return _in_dtype(name, _read(artifact, name), DTYPES[dtype])
    whole = torch.empty(shape, dtype=DTYPES[dtype])
    for part in split[name].parts:
        values = _in_dtype(part.name, _read(artifact, part.name), whole.dtype)
        whole.as_strided(part.shape, part.strides, part.start).copy_(values)
    return whole


def _in_dtype(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    return values if values.dtype == dtype else cast(name, values, dtype)


def _read(artifact: Artifact, name: str) -> Tensor:
    linear = name.removesuffix(".weight")
    if linear in artifact.linears and name != linear:
        return artifact.decode(linear).dequantize()
    file, info = artifact.checkpoint.tensors[name]
    return read_tensor(artifact.checkpoint.folder / file, info)

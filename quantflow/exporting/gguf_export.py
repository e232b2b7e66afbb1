"""Stage 4 for llama.cpp: a model or an artifact as one GGUF file.

Reads    a model folder with its tokenizer, what `quantflow export` wrote, or a folder that another
         program quantized
Writes   <o>: model-<dtype or type>.gguf and DONE.json; the whole folder appears at once
Resumes  a finished result of the same inputs is left alone
Fails    2 a dtype that does not hold a tensor, 3 unusable input, 5 the folder is held or the disk
         is full, 6 a family, tokenizer or rotary embedding that is not written, 7 the file is not
         what was written

Linears of an artifact that was quantized to llama.cpp's types stay in their blocks, to the bit, and
so do those of MXFP4, beside which everything else keeps its dtype. Its other matrices are rounded
to nearest onto the scales of least squared error. Types are those of
quantflow/formats/llama_cpp/file_plan.py. The experts of a layer are one tensor. A piece of a tensor
is in memory at a time.
Before the folder appears the file is read again: its header, and every tensor against the source.
"""

from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from quantflow.algorithms import rtn_mse
from quantflow.core.block_types import BLOCK_TYPES
from quantflow.core.cast import Cast
from quantflow.core.dtypes import DTYPES
from quantflow.core.qtensor import QTensor
from quantflow.core.scheme import MIXTURES, preset
from quantflow.errors import IntegrityError, UsageError, nearest
from quantflow.exporting.gguf_source import GGUFWeights, open_weights
from quantflow.exporting.job import ExportJob
from quantflow.files import stage_folder
from quantflow.files.manifest import MANIFEST_NAME
from quantflow.files.safetensors_header import TensorInfo
from quantflow.formats.llama_cpp import gguf
from quantflow.formats.llama_cpp.encoding import encode
from quantflow.formats.llama_cpp.experts import file_tensors
from quantflow.formats.llama_cpp.file_plan import GGUFPlan, planned
from quantflow.formats.llama_cpp.metadata import metadata
from quantflow.formats.llama_cpp.tensors import Place, row_order, rows_at_once
from quantflow.models.reading import bytes_of, read_into
from quantflow.planning.cost import BUFFERS, LIBRARIES, MemoryNeed
from quantflow.planning.resources import grant
from quantflow.progress import Progress

VERSION = 2
CHOICES = {"bf16": "BF16", "f16": "F16", "f32": "F32"}
PIECE_BYTES = 8 << 20  # of a tensor, as the source stores it
_BITS = {"F32": torch.int32, "F16": torch.int16, "BF16": torch.int16}


def run(job: ExportJob, progress: Progress) -> Path:
    """Write the file and return its folder; one that is up to date is left alone."""
    if job.model is not None:
        cause = f"export: --model {job.model} beside format {job.options.format}"
        raise UsageError(cause, "give the model's folder instead of QUANTIZED")
    if job.options.dtype not in (None, *CHOICES):
        raise UsageError(
            f"export: dtype {job.options.dtype!r} of format gguf is unknown",
            nearest(str(job.options.dtype), list(CHOICES)),
        )
    if (job.source / "quantize.json").exists() and not (job.source / MANIFEST_NAME).exists():
        cause = (
            f"{job.source}: is what quantize wrote; format gguf is made from a model or an artifact"
        )
        raise UsageError(
            cause, "run `quantflow export` without --format gguf first, and give what it wrote"
        )
    with stage_folder.locked(job.output):
        weights = open_weights(job.source)
        kind = (
            CHOICES[job.options.dtype]
            if job.options.dtype
            else _kind_in_blocks(weights) or _own_dtype(weights)
        )
        plan = planned(weights, kind)
        header = sha256(plan.layout.header).hexdigest()
        made_from = {
            "dtype": MIXTURES.get(kind, kind),
            "header": header,
            "model": weights.identity,
            "version": VERSION,
        }
        if stage_folder.is_up_to_date(job.output, made_from):
            progress.say(f"export {job.output.name}: up to date")
            return job.output
        stage_folder.refuse_other_result(job.output, made_from, force=job.force)
        rounding = max((rounding_bytes(plan, name) for name in plan.rounded), default=0)
        peaks = ((LIBRARIES + BUFFERS + weights.working_bytes + rounding, 0),)
        grant(
            MemoryNeed(stage="export", peaks=peaks, result=plan.layout.nbytes),
            job.resources,
            folder=job.output,
        )
        with stage_folder.publish(job.output, stage="export", inputs=made_from) as folder:
            path, lost = folder / f"model-{kind.lower()}.gguf", list[str]()
            gguf.write(path, plan.layout, lambda info: _pieces(weights, plan, info, lost))
            progress.say(f"export {job.output.name}: proving it")
            prove(path, weights, plan)
        for line in lost:
            progress.say(f"export {job.output.name}: {line}")
        _report(job, weights, plan, progress)
    return job.output


def _own_dtype(weights: GGUFWeights) -> str:
    """The dtype of the source's embedding, the first tensor of the file."""
    name = file_tensors(weights.config, weights.shapes)[0].parts[0].source
    stored_dtype = weights.dtypes[name]
    if stored_dtype not in gguf.TYPES:
        raise UsageError(
            f"{name}: {stored_dtype}, which GGUF files here do not hold",
            f"give --dtype {', '.join(CHOICES)}",
        )
    return stored_dtype


def _kind_in_blocks(weights: GGUFWeights) -> str | None:
    """The name of a file whose linears are in blocks, a key of gguf.FILE_TYPES, or None.

    It is what the scheme names, whether rows fit its blocks or not. With another scheme (each
    linear has its own) it is the type that most linears have, and the mixture of that name where
    there are several.
    """
    if not weights.blocks:
        return None
    if weights.scheme in gguf.FILE_TYPES:
        return weights.scheme
    counted = Counter(weights.blocks.values()).most_common()
    usual = counted[0][0]
    mixtures = (name for name, kind in MIXTURES.items() if kind == usual and len(counted) > 1)
    return next(mixtures, usual)


def rounding_bytes(plan: GGUFPlan, name: str) -> int:
    """Bytes that rounding a tensor of the file takes beside its pieces."""
    return rtn_mse.working_bytes(plan.tensors[name].parts[0].shape[1], 0)


def prove(path: Path, weights: GGUFWeights, plan: GGUFPlan) -> None:
    """Compare a written file with its source: the header, and every row of every tensor.

    Raises:
        InputError: the file cannot be read.
        IntegrityError: naming what differs.
    """
    header = gguf.read_header(path, types=gguf.WRITTEN)
    specs = {name: (info.dtype, info.shape) for name, info in header.tensors.items()}
    if gguf.layout(header.metadata, specs) != plan.layout:
        raise IntegrityError(
            f"{path.name}: its header is not what was written", "export again, and check the disk"
        )
    for info in header.tensors.values():
        tensor = plan.tensors.get(info.name)
        if tensor is None:
            written = _file_rows(path, info, 0, info.shape[0], like=plan.computed[info.name])
            _compare(written, plan.computed[info.name], info, source="what was computed")
            continue
        first = 0
        for part in tensor.parts:
            for start, stop in _spans(part, weights):
                expected = _converted(weights, part, info, start, stop)
                written = _file_rows(path, info, first + start, first + stop, like=expected)
                _compare(written, expected, info, source=part.source)
            first += part.shape[0]


def _compare(written: Tensor, expected: Tensor, info: TensorInfo, *, source: str) -> None:
    bits = _BITS.get(info.dtype, torch.uint8)
    if not torch.equal(written.contiguous().view(bits), expected.contiguous().view(bits)):
        raise IntegrityError(
            f"{info.name}: the file's values are not those of {source}",
            "export again, and check the disk",
        )


def _pieces(
    weights: GGUFWeights, plan: GGUFPlan, info: TensorInfo, lost: list[str]
) -> Iterator[memoryview]:
    """Yield the bytes of a tensor of the file, in its order of rows.

    Args:
        weights: the source.
        plan: content of the file.
        info: the tensor.
        lost: gets a line where rows that are rounded into blocks become zero.

    Raises:
        UsageError: a tensor that its dtype does not hold.
    """
    tensor = plan.tensors.get(info.name)
    if tensor is None:
        yield bytes_of(plan.computed[info.name])
        return
    for part in tensor.parts:
        cast = Cast(part.source, _dtype_of(info))
        for start, stop in _spans(part, weights):
            yield bytes_of(_converted(weights, part, info, start, stop, cast))
        if info.dtype not in gguf.BLOCKS:
            cast.require_held()
        elif cast.vanished:
            lost.append(
                f"{part.source}: {cast.vanished:,} of {cast.rows:,} rows become 0 in {info.dtype}, "
                f"whose scales are float16 (their largest value is {cast.left:.3g})"
            )


def _dtype_of(info: TensorInfo) -> torch.dtype:
    """Dtype of a tensor's numbers; of blocks that of their scales."""
    return torch.float16 if info.dtype in gguf.BLOCKS else DTYPES[info.dtype]


def _spans(place: Place, weights: GGUFWeights) -> Iterator[tuple[int, int]]:
    """Yield rows that are handled together.

    They are those of a head where rows change places, else as many as a piece holds.
    """
    rows, columns = place.shape[0], place.shape[1] if len(place.shape) > 1 else 1
    step = rows_at_once(place)
    if place.order == "stored":
        step = max(1, PIECE_BYTES // (columns * DTYPES[weights.dtypes[place.source]].itemsize))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def _converted(
    weights: GGUFWeights,
    place: Place,
    info: TensorInfo,
    start: int,
    stop: int,
    cast: Cast | None = None,
) -> Tensor:
    """Rows of the file in its dtype, or as the bytes of their blocks.

    Args:
        weights: the source.
        place: the part of the tensor.
        info: the tensor in the file.
        start: first row of the part.
        stop: row after the last.
        cast: counts what the rows lose.

    Raises:
        SchemeError: a scale that the type does not hold.
    """
    cast = cast or Cast(place.source, _dtype_of(info))
    if place.order == "keys":
        values = _keys(weights, place, start, stop)
        if info.dtype in gguf.BLOCKS:
            return encode(place.source, _rounded(place.source, values, info, cast))
        return cast(values)
    rows = torch.arange(start, stop) if place.order == "stored" else row_order(place)[start:stop]
    low, high = int(rows.min()), int(rows.max()) + 1
    if info.dtype in gguf.BLOCKS:
        return encode(place.source, _quantized(weights, place, info, low, high, cast))[rows - low]
    return cast(weights.read(place.source, low, high))[rows - low]


def _keys(weights: GGUFWeights, place: Place, start: int, stop: int) -> Tensor:
    """Rows of transposed keys, those of whole heads, float."""
    rank, keys = place.shape[0] // place.heads, place.shape[1]
    both = keys + place.other_rows
    heads = [
        weights.read(place.source, head * both, head * both + keys).T  # [rank, keys]
        for head in range(start // rank, stop // rank)
    ]
    return torch.cat(heads).contiguous()


def _quantized(
    weights: GGUFWeights, place: Place, info: TensorInfo, start: int, stop: int, cast: Cast
) -> QTensor:
    """Rows of a tensor of blocks: as they were quantized, or rounded here, each by itself."""
    if place.source in weights.blocks and weights.read_quantized is not None:
        return weights.read_quantized(place.source, start, stop)
    return _rounded(place.source, weights.read(place.source, start, stop), info, cast)


def _rounded(name: str, rows: Tensor, info: TensorInfo, cast: Cast) -> QTensor:
    """Rows rounded to the scales of least squared error of a type."""
    scale_dtype = DTYPES[BLOCK_TYPES[info.dtype].scale_dtype]
    results = rtn_mse.quantize_group(
        {name: rows}, preset(info.dtype), statistics={}, scale_dtype=scale_dtype
    )
    weight = results[name].weight
    cast.compare(rows, weight.dequantize())
    return weight


def _file_rows(path: Path, info: TensorInfo, start: int, stop: int, *, like: Tensor) -> Tensor:
    """Read rows of a tensor of the file, those of blocks as bytes.

    Args:
        path: the file.
        info: the tensor.
        start: first row of the file, of all dimensions but the last.
        stop: row after the last.
        like: rows of the same shape and dtype.
    """
    rows = torch.empty((stop - start, *like.shape[1:]), dtype=like.dtype)
    width = rows[0].nbytes
    read_into(path, rows, info.offset + start * width, name=info.name)
    return rows


def _report(job: ExportJob, weights: GGUFWeights, plan: GGUFPlan, progress: Progress) -> None:
    """Report remarks for readers of the file."""
    config, name = weights.config, f"export {job.output.name}"
    window = getattr(config, "sliding_window", None)
    if (
        window is not None
        and window < config.max_position_embeddings
        and not any(".attention.sliding_window" in key for key in metadata(config))
    ):
        progress.say(
            f"{name}: context_length is {window}, the sliding window; llama.cpp has none for "
            "this family"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn" and rope.get("truncate") is False:
        progress.say(
            f"{name}: llama.cpp rounds the bounds of YaRN's ramp to whole dimensions, which "
            "config.json's truncate false says not to do"
        )
    if plan.remark is not None:
        progress.say(f"{name}: {plan.remark}")
    types = Counter(
        info.dtype for info in plan.layout.tensors.values() if info.dtype in gguf.BLOCKS
    )
    if types:
        progress.say(
            f"{name}: "
            + ", ".join(f"{count} matrices in {kind}" for kind, count in types.most_common())
        )
    if weights.left_out is not None:
        progress.say(f"{name}: {weights.left_out}")
    if weights.quantized_inputs:
        progress.say(
            f"{name}: {weights.quantized_inputs} linears quantize their inputs too, which "
            "llama.cpp will not do"
        )
    if weights.kv_cache:
        progress.say(
            f"{name}: the measured scales of the key-value cache are left out, llama.cpp takes none"
        )

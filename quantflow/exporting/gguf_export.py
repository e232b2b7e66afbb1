"""Stage 4 for llama.cpp: a model, or an artifact's dequantized weights, as one GGUF file in 16 or 32 bits.

Reads    a model folder with its tokenizer, or what `quantflow export` wrote
Writes   <o>: model-<dtype>.gguf and DONE.json; the whole folder appears at once
Resumes  a finished result of the same inputs is left alone
Fails    2 a dtype that does not hold a weight, 3 unusable input, 5 the folder is held or the disk is full, 6 a family,
         tokenizer or rotary embedding that is not written, 7 the file is not what was written

Matrices have the chosen dtype, vectors (norms, biases) float32. A piece of a tensor is in memory at a
time. Before the folder appears the file is read again: its header, and every tensor against the source.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from quantflow.artifact import stage_folder
from quantflow.artifact.manifest import MANIFEST_NAME
from quantflow.artifact.safetensors_header import TensorInfo
from quantflow.core.dtypes import DTYPES
from quantflow.errors import IntegrityError, UsageError, nearest
from quantflow.exporting import ExportRequest
from quantflow.exporting.gguf_source import GGUFWeights, open_weights
from quantflow.formats.llama_cpp import gguf
from quantflow.formats.llama_cpp.metadata import ROPE_FACTORS, metadata, rope_factors
from quantflow.formats.llama_cpp.tensors import Place, places, row_order, rows_at_once
from quantflow.formats.llama_cpp.tokenizer import vocabulary
from quantflow.models.reading import bytes_of, read_into
from quantflow.planning.cost import BUFFERS, LIBRARIES, Need
from quantflow.planning.recipe import Recipe, Resources
from quantflow.planning.resources import grant
from quantflow.progress import Progress

VERSION = 1
CHOICES = {"bf16": "BF16", "f16": "F16", "f32": "F32"}
PIECE_BYTES = 8 << 20  # of a tensor, as the source stores it
_BITS = {"F32": torch.int32, "F16": torch.int16, "BF16": torch.int16}


@dataclass(frozen=True, kw_only=True)
class GGUFExportJob:
    """One file.

    Attributes:
        source: a model folder or an artifact.
        dtype: of matrices, a key of `CHOICES`; None takes the source's.
        replace: redo a finished result that was made from other inputs, instead of refusing.
        resources: how much memory and disk there is.
    """

    source: Path
    output: Path
    dtype: str | None = None
    replace: bool = False
    resources: Resources = Resources()


@dataclass(frozen=True, kw_only=True)
class GGUFPlan:
    """What the file will hold.

    Attributes:
        layout: where.
        places: name in the file -> what of the source.
        computed: name in the file -> what no tensor of the source is, float32.
    """

    layout: gguf.GGUFLayout
    places: dict[str, Place]
    computed: dict[str, Tensor]


def requested(request: ExportRequest) -> GGUFExportJob:
    """Return the job of a request; see `quantflow.exporting.Exporter`.

    Raises:
        UsageError: a model beside the one that is exported.
    """
    if request.model is not None:
        told = f"export: --model {request.model} beside format {request.options.format}"
        raise UsageError(told, "give the model's folder instead of QUANTIZED")
    return GGUFExportJob(
        source=request.source,
        output=request.output,
        dtype=request.options.dtype,
        replace=request.replace,
        resources=request.resources,
    )


def job_from(source: str, *, output: str, model: str | None, recipe: Recipe, force: bool) -> GGUFExportJob:
    """Return the job of a command line; `recipe` is the recipe's under the flags.

    Raises:
        UsageError: as `requested`.
    """
    return requested(
        ExportRequest(
            source=Path(source),
            output=Path(output),
            options=recipe.export,
            model=None if model is None else Path(model),
            resources=recipe.resources,
            replace=force,
        )
    )


def run(job: GGUFExportJob, progress: Progress) -> Path:
    """Write the file and return its folder; one that is up to date is left alone."""
    if job.dtype not in (None, *CHOICES):
        raise UsageError(f"export: dtype {job.dtype!r} of format gguf is unknown", nearest(str(job.dtype), list(CHOICES)))
    if (job.source / "quantize.json").exists() and not (job.source / MANIFEST_NAME).exists():
        cause = f"{job.source}: is what quantize wrote; format gguf is made from a model or an artifact"
        raise UsageError(cause, "run `quantflow export` without --format gguf first, and give what it wrote")
    with stage_folder.locked(job.output):
        weights = open_weights(job.source)
        dtype = CHOICES[job.dtype] if job.dtype else _own_dtype(weights)
        plan = planned(weights, dtype)
        header = sha256(plan.layout.header).hexdigest()
        made_from = {"dtype": dtype, "header": header, "model": weights.identity, "version": VERSION}
        if stage_folder.is_up_to_date(job.output, made_from):
            progress.say(f"export {job.output.name}: up to date")
            return job.output
        stage_folder.refuse_other_result(job.output, made_from, force=job.replace)
        moments = ((LIBRARIES + BUFFERS + weights.working_bytes, 0),)
        grant(Need(stage="export", moments=moments, result=plan.layout.nbytes), job.resources, folder=job.output)
        with stage_folder.publish(job.output, stage="export", inputs=made_from) as folder:
            path = folder / f"model-{dtype.lower()}.gguf"
            gguf.write(path, plan.layout, lambda info: _pieces(weights, plan, info))
            progress.say(f"export {job.output.name}: proving it")
            prove(path, weights, plan)
        _report(job, weights, progress)
    return job.output


def _own_dtype(weights: GGUFWeights) -> str:
    """Return the dtype of the source's embedding, the first tensor of the file."""
    name = places(weights.config, weights.shapes)[0].source
    found = weights.dtypes[name]
    if found not in gguf.TYPES:
        raise UsageError(f"{name}: {found}, which GGUF files here do not hold", f"give --dtype {', '.join(CHOICES)}")
    return found


def planned(weights: GGUFWeights, dtype: str) -> GGUFPlan:
    """Return what a file of `dtype` will hold.

    Raises:
        InputError: a tensor is missing, superfluous or of another shape; no tokenizer, or one of another model.
        UnsupportedError: a family, tokenizer or rotary embedding that is not written.
    """
    config = weights.config
    found = {place.name: place for place in places(config, weights.shapes)}
    factors = rope_factors(config)
    computed = {} if factors is None else {ROPE_FACTORS: factors}
    specs = {name: ("F32", tuple(tensor.shape)) for name, tensor in computed.items()}
    specs |= {name: (dtype if len(place.shape) > 1 else "F32", place.shape) for name, place in found.items()}
    values = {
        **metadata(config),
        "general.type": ("string", "model"),
        "general.file_type": ("u32", gguf.FILE_TYPES[dtype]),
        **vocabulary(weights.folder, config),
    }
    return GGUFPlan(layout=gguf.layout(values, specs), places=found, computed=computed)


def prove(path: Path, weights: GGUFWeights, plan: GGUFPlan) -> None:
    """Compare a written file with what it was made from: the header, and every row of every tensor.

    Raises:
        InputError: the file cannot be read.
        IntegrityError: naming what differs.
    """
    found = gguf.read_header(path)
    specs = {name: (info.dtype, info.shape) for name, info in found.tensors.items()}
    if gguf.layout(found.metadata, specs) != plan.layout:
        raise IntegrityError(f"{path.name}: its header is not what was written", "export again, and check the disk")
    for info in found.tensors.values():
        place = plan.places.get(info.name)
        if place is None:
            written = _file_rows(path, info, 0, info.shape[0])
            _compare(written, plan.computed[info.name], info, source="what was computed")
            continue
        position = row_order(place).argsort()  # where in the file each row of the source stands
        for start, stop in _spans(place, weights):
            rows = position[start:stop]
            low = int(rows.min())
            written = _file_rows(path, info, low, int(rows.max()) + 1)[rows - low]
            _compare(written, _converted(weights, place, info, start, stop), info, source=place.source)


def _compare(written: Tensor, expected: Tensor, info: TensorInfo, *, source: str) -> None:
    bits = _BITS[info.dtype]
    if not torch.equal(written.contiguous().view(bits), expected.contiguous().view(bits)):
        raise IntegrityError(f"{info.name}: the file's values are not those of {source}", "export again, and check the disk")


def _pieces(weights: GGUFWeights, plan: GGUFPlan, info: TensorInfo) -> Iterator[memoryview]:
    """Yield the bytes of a tensor of the file, in its order of rows."""
    place = plan.places.get(info.name)
    if place is None:
        yield bytes_of(plan.computed[info.name])
        return
    order = row_order(place)
    for start, stop in _spans(place, weights):
        rows = order[start:stop]
        low = int(rows.min())
        yield bytes_of(_converted(weights, place, info, low, int(rows.max()) + 1)[rows - low])


def _spans(place: Place, weights: GGUFWeights) -> Iterator[tuple[int, int]]:
    """Yield rows that are handled together: of a head where rows change places, else as many as a piece holds."""
    rows, columns = place.shape[0], place.shape[1] if len(place.shape) > 1 else 1
    step = rows_at_once(place)
    if place.order == "stored":
        step = max(1, PIECE_BYTES // (columns * DTYPES[weights.dtypes[place.source]].itemsize))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def _converted(weights: GGUFWeights, place: Place, info: TensorInfo, start: int, stop: int) -> Tensor:
    """Return rows of the source in the file's dtype.

    Raises:
        UsageError: a value that the dtype does not hold.
    """
    part = weights.read(place.source, start, stop)
    converted = part.to(DTYPES[info.dtype])
    if not torch.isfinite(converted.float().abs().amax()):  # the source's values are
        largest = part.double().abs().amax().item()
        cause = f"{place.source}: {largest:.6g} does not fit {info.dtype}"
        raise UsageError(f"{cause}, whose largest is {torch.finfo(converted.dtype).max:.6g}", "give --dtype bf16")
    return converted


def _file_rows(path: Path, info: TensorInfo, start: int, stop: int) -> Tensor:
    """Read rows of a tensor of the file."""
    rows = torch.empty((stop - start, *info.shape[1:]), dtype=DTYPES[info.dtype])
    width = info.nbytes // info.shape[0]
    read_into(path, rows, info.offset + start * width, name=info.name)
    return rows


def _report(job: GGUFExportJob, weights: GGUFWeights, progress: Progress) -> None:
    """Say what a reader of the file should know."""
    config, name = weights.config, f"export {job.output.name}"
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        progress.say(f"{name}: context_length is {window}, the sliding window; llama.cpp has none for this family")
    if weights.quantized_inputs:
        progress.say(f"{name}: {weights.quantized_inputs} linears quantize their inputs too, which llama.cpp will not do")
    if weights.kv_cache:
        progress.say(f"{name}: the measured scales of the key-value cache are left out, llama.cpp takes none")

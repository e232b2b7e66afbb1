"""A model with a LoRA adapter in its weights, as a folder that can be quantized: W + scaling * B A.

Reads    a model that is not quantized, an adapter in PEFT's files
Writes   <o>: config.json, weights, side files and DONE.json; the whole folder appears at once
Resumes  a finished result of the same model and adapter is left alone, another one replaced
Fails    2 a head that is the embedding too, a sum that the weight's dtype does not hold;
         3 unusable input, an adapter of another model; 5 the folder is held or the disk is full;
         6 another kind of adapter than plain LoRA on linears; 7 what is read again differs

The product and the sum are float32, on one thread; the sum is rounded once, to the dtype of the
weight. One tensor of the model is in memory at a time, beside the adapter. DONE.json gives the
folder a name that manifests record: that of the model and that of the adapter.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from quantflow.core.cast import cast
from quantflow.core.determinism import single_threaded
from quantflow.errors import InputError, UsageError
from quantflow.exporting.plain_files import require_written, write_beside, write_model
from quantflow.files import stage_folder
from quantflow.files.canonical import digest_of, file_digest
from quantflow.files.checkpoint import Checkpoint, open_checkpoint, refuse_quantized
from quantflow.files.digests import Digests
from quantflow.files.origin import IMPORT, origin_of
from quantflow.files.outputs import output_folder
from quantflow.models.identity import identify
from quantflow.models.reading import read_tensor
from quantflow.progress import SILENT, Progress
from quantflow.runtime.adapters import CONFIG, Factors, read_adapter, weights_file
from quantflow.sources.models import model_folder
from quantflow.units import parse_size

VERSION = 1
_FLOATS = frozenset({"F32", "BF16", "F16"})
_HEADS = frozenset({"lm_head", "embed_out"})


@dataclass(frozen=True, kw_only=True)
class MergedAdapterJob:
    """One model with an adapter, and the folder that it becomes.

    Attributes:
        source: model that is not quantized.
        adapter: folder of adapter_config.json and adapter_model.safetensors.
        shard_size: largest number of bytes of one weight file.
        revision: revision of a model on the hub.
    """

    source: Path
    adapter: Path
    output: Path
    shard_size: str = "4GiB"
    revision: str | None = None

    def run(self, progress: Progress = SILENT) -> Path:
        """Write the folder and return it; see `run`."""
        return run(self, progress)


def run(job: MergedAdapterJob, progress: Progress) -> Path:
    """Write the folder and return it; one that is up to date is left alone."""
    reads = {"the model": job.source, "the adapter": job.adapter}
    job = replace(
        job,
        source=model_folder(job.source, revision=job.revision, progress=progress),
        output=output_folder(job.output, reads=reads),
    )
    with stage_folder.locked(job.output), single_threaded():
        checkpoint = open_checkpoint(job.source)
        refuse_quantized(checkpoint)
        adapter = [file_digest(path) for path in (job.adapter / CONFIG, weights_file(job.adapter))]
        made_from = {
            "name": f"{origin_of(job.source).name} + {job.adapter.resolve().name}",
            "sha256": digest_of([identify(checkpoint, Digests()), *adapter, VERSION]),
        }
        if stage_folder.is_up_to_date(job.output, made_from):
            progress.say(f"adapter {job.output.name}: up to date")
            return job.output
        stage_folder.refuse_other_result(job.output, made_from, force=True)
        factors = read_adapter(job.adapter)
        _refuse_others(checkpoint, factors, path=weights_file(job.adapter))
        specs = {name: (info.dtype, info.shape) for name, info in checkpoint.infos.items()}
        with stage_folder.publish(job.output, stage=IMPORT, inputs=made_from) as folder:
            tensors, limit = _tensors(checkpoint, factors), parse_size(job.shard_size)
            write_model(folder, specs, tensors, limit=limit, stage="adapter", progress=progress)
            stage = f"adapter {job.output.name}"
            write_beside(folder, checkpoint, checkpoint.config, stage=stage, progress=progress)
            require_written(folder, specs, _tensors(checkpoint, factors))
    progress.say(f"adapter {job.output.name}: merged into {len(factors)} linears")
    return job.output


def _refuse_others(checkpoint: Checkpoint, factors: Mapping[str, Factors], *, path: Path) -> None:
    """Refuse factors that belong to no weight of the model, or do not fit it.

    Raises:
        InputError: naming the linear.
        UsageError: a head that shares the embedding's weight, which would change with it.
    """
    for name, each in factors.items():
        if name in _HEADS and checkpoint.config.get("tie_word_embeddings"):
            raise UsageError(
                f"{path}: {name} has the embedding's weight, which would change too",
                "train without it",
            )
        info = checkpoint.infos.get(f"{name}.weight")
        if info is None or len(info.shape) != 2 or info.dtype not in _FLOATS:
            held = "no such tensor" if info is None else f"{info.dtype} {list(info.shape)}"
            cause = f"{path}: {name} is no linear of {checkpoint.folder} ({name}.weight: {held})"
            raise InputError(cause, "give an adapter of this model")
        each.require_fit(name, inputs=info.shape[1], outputs=info.shape[0], path=path)


def _tensors(
    checkpoint: Checkpoint, factors: Mapping[str, Factors]
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the model, those of the adapter's linears with its product added."""
    for name, (file, info) in checkpoint.tensors.items():
        weight = read_tensor(checkpoint.folder / file, info)
        added = factors.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if added is not None:
            merged = weight.float() + added.up @ added.down
            wider = "bfloat16" if info.dtype == "F16" else "float32"
            remedy = f"store the model in {wider} and merge again"
            weight = cast(name, merged, weight.dtype, remedy=remedy)
        yield name, weight

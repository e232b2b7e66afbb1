"""Stage 4 for other programs: a quantized folder's linears in another layout.

Reads    an artifact, or another program's folder in one of `quantflow.formats.LAYOUTS`
Writes   <o>: config.json, weights, side files and DONE.json; the whole folder appears at once
Resumes  a finished result of the same inputs is left alone
Fails    2 a folder that is neither, an unknown dtype, 3 unusable input, 5 the folder is held or the
         disk is full, 6 a value that the layout would change, 7 a file differs from its hash, or
         what was written decodes to other values

No value changes: every linear is encoded before a file is written, and decoded again from what was
written. Scales of integers are stored in float16, as other programs want them; in a layout of this
runtime's own in the model's dtype where that is exact, else in that of the source.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantflow.core.dtypes import DTYPES, NAMES
from quantflow.core.qtensor import QuantizedLinear
from quantflow.errors import InputError, IntegrityError, UnsupportedError, UsageError, nearest
from quantflow.exporting.dequantized_export import CHOICES
from quantflow.exporting.job import ExportJob
from quantflow.exporting.plain_files import require_written, write_beside, write_model
from quantflow.exporting.quantized_source import identity_of, require_quantized
from quantflow.files import disk, stage_folder
from quantflow.files.canonical import readable_json
from quantflow.files.safetensors_header import SplitTensor
from quantflow.files.safetensors_writer import Spec
from quantflow.files.torch_file import write_torch_file
from quantflow.formats import BESIDE, DEFAULT, LAYOUTS, PICKLED, STACKED, WHO_READS
from quantflow.formats.weight_layout import WeightLayout
from quantflow.models.open import graph_for
from quantflow.models.reading import bytes_of, read_tensors
from quantflow.planning.artifact_config import left_alone, module_names
from quantflow.planning.stock_transformers import for_transformers
from quantflow.progress import Progress
from quantflow.runtime.artifact import Artifact, open_folder
from quantflow.units import parse_size

VERSION = 1


def run(job: ExportJob, progress: Progress) -> Path:
    """Write the folder and return it; one that is up to date is left alone."""
    if job.options.measure_inputs:
        raise UsageError(
            "export: --measure-inputs of another program's folder",
            "leave it out: its source is not there",
        )
    if job.model is not None:
        cause = f"export: --model {job.model} beside format {job.options.format}"
        raise UsageError(cause, "leave --model out, the quantized folder is all that is read")
    if job.options.dtype is not None and job.options.dtype not in CHOICES:
        cause = f"export: dtype {job.options.dtype!r} of format {job.options.format} is unknown"
        raise UsageError(cause, nearest(job.options.dtype, list(CHOICES)))
    require_quantized(job.source, job.output, product=f"format {job.options.format}")
    with stage_folder.locked(job.output):
        artifact = open_folder(job.source, backend="reference")
        identity = identity_of(artifact)
        made_from = {
            "source": identity,
            "format": job.options.format,
            "dtype": job.options.dtype,
            "version": VERSION,
        }
        if stage_folder.is_up_to_date(job.output, made_from):
            progress.say(f"export {job.output.name}: up to date")
            return job.output
        stage_folder.refuse_other_result(job.output, made_from, force=job.force)
        conversion = _Conversion.of(artifact, job)
        specs = conversion.specs(progress)
        with stage_folder.publish(job.output, stage="export", inputs=made_from) as folder:
            limit = parse_size(job.options.shard_size)
            if job.options.format in PICKLED:
                name = PICKLED[job.options.format](
                    {name: placement.scheme for name, placement in artifact.linears.items()}
                )
                write_torch_file(
                    folder / name,
                    specs,
                    (bytes_of(tensor) for _, tensor in conversion.tensors(specs)),
                )
            else:
                specs = write_model(
                    folder,
                    specs,
                    conversion.tensors(specs),
                    limit=limit,
                    stage=f"export {job.options.format}",
                    progress=progress,
                    unused_of=artifact.checkpoint,
                )
            config = conversion.config()
            stage = f"export {job.output.name}"
            write_beside(folder, artifact.checkpoint, config, stage=stage, progress=progress)
            if job.options.format in BESIDE:
                name, content = BESIDE[job.options.format]
                disk.write_file(
                    folder / name, readable_json(content(config["quantization_config"]))
                )
            require_written(folder, specs, conversion.unchanged(specs))
            conversion.require_same(folder, progress)
    progress.say(
        f"export {job.output.name}: {len(artifact.linears)} linears, every value as it was"
    )
    if job.options.format in WHO_READS:
        said = WHO_READS[job.options.format](
            {name: placement.scheme for name, placement in artifact.linears.items()}
        )
        if said is not None:
            progress.say(f"export {job.output.name}: {said}")
    return job.output


@dataclass(frozen=True, kw_only=True, eq=False)
class _Conversion:
    """An opened folder, and the layout that its linears are encoded in."""

    artifact: Artifact
    layout: WeightLayout
    dtypes: tuple[torch.dtype, ...]
    stacks: Mapping[str, SplitTensor]

    @classmethod
    def of(cls, artifact: Artifact, job: ExportJob) -> "_Conversion":
        """The conversion.

        Raises:
            UnsupportedError: a linear, or a cache, that the layout cannot hold.
        """
        layout = LAYOUTS[job.options.format]
        if any(placement.reordered for placement in artifact.linears.values()):
            layout = layout.with_order()
        if artifact.kv_cache is not None:
            cause = (
                f"{artifact.checkpoint.folder}: keys and values are quantized, format "
                f"{job.options.format} has no words for it"
            )
            raise UnsupportedError(cause, "keep it as it is, or quantize without kv_cache")
        for name, placement in artifact.linears.items():
            if (reason := layout.why_not(placement.scheme, placement.shape)) is not None:
                raise UnsupportedError(
                    f"{name}: {job.options.format}: {reason}",
                    "keep it as it is, or quantize with another scheme",
                )
        dtypes = (torch.float16,)
        if job.options.dtype is not None:
            dtypes = (CHOICES[job.options.dtype],)
        elif job.options.format == DEFAULT:
            own = getattr(artifact.config, "dtype", None)
            dtypes = (
                *((own,) if own in NAMES else ()),
                torch.float16,
                torch.bfloat16,
                torch.float32,
            )
        shapes = {name: placement.shape for name, placement in artifact.linears.items()}
        stacks = STACKED[job.options.format](shapes) if job.options.format in STACKED else {}
        return cls(artifact=artifact, layout=layout, dtypes=dtypes, stacks=stacks)

    def encoded(self, name: str, linear: QuantizedLinear | None = None) -> dict[str, Tensor]:
        """The tensors of a linear.

        Raises:
            UnsupportedError: a value that the layout would change.
        """
        linear = linear or self.artifact.decode(name)
        exact = (
            dtype
            for dtype in self.dtypes
            if torch.equal(linear.weight.scale.to(dtype).float(), linear.weight.scale)
        )
        return self.layout.encode(name, linear, scale_dtype=next(exact, self.dtypes[0]))

    def specs(self, progress: Progress) -> dict[str, Spec]:
        """Encode every linear once; return dtype and shape of every tensor of the result."""
        artifact, specs = self.artifact, {}
        names = progress.steps(list(artifact.names), stage="export: compare values", unit="tensor")
        for name in names:
            linear = name.removesuffix(".weight")
            if linear in artifact.linears and name != linear:
                for key, tensor in self.encoded(linear).items():
                    specs[key] = (NAMES[tensor.dtype], tuple(tensor.shape))
            else:
                info = artifact.checkpoint.infos[name]
                specs[name] = (info.dtype, info.shape)
        return self._stacked(specs)

    def _stacked(self, specs: dict[str, Spec]) -> dict[str, Spec]:
        """The tensors of the result with stacks in the place of their shares.

        Raises:
            UnsupportedError: a share is missing.
        """
        stacked = dict(specs)
        for name, whole in self.stacks.items():
            kinds = {stacked.pop(part.name)[0] for part in whole.parts if part.name in specs}
            missing = [part.name for part in whole.parts if part.name not in specs]
            if kinds and missing:
                cause = f"{missing[0]}: not there, {name} holds it beside others"
                raise UnsupportedError(cause, "keep it as it is, or quantize all experts alike")
            if kinds:
                stacked[name] = (kinds.pop(), whole.shape)
        return stacked

    def tensors(self, specs: Mapping[str, Spec]) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the result, in the order of `specs`."""
        artifact, shares = (
            self.artifact,
            {part.name for whole in self.stacks.values() for part in whole.parts},
        )
        for name in artifact.names:
            linear = name.removesuffix(".weight")
            if linear in artifact.linears and name != linear:
                if shares.isdisjoint(
                    self.layout.tensor_names(linear, artifact.linears[linear].scheme)
                ):
                    yield from self.encoded(linear).items()
            elif name not in shares:
                yield name, read_tensors(artifact.checkpoint, [name])[name]
        for name, whole in self.stacks.items():
            if name in specs:
                yield name, self._whole(whole, DTYPES[specs[name][0]])

    def unchanged(self, specs: Mapping[str, Spec]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the result that are the source's own, in no linear's parts."""
        for name in self.artifact.names:
            if name in specs and name.removesuffix(".weight") not in self.artifact.linears:
                yield name, read_tensors(self.artifact.checkpoint, [name])[name]

    def _whole(self, split: SplitTensor, dtype: torch.dtype) -> Tensor:
        """A tensor that holds several linears."""
        tensor = torch.empty(split.shape, dtype=dtype)
        for part in split.parts:
            owner = part.name.rpartition(".")[0]
            plain = part.name in self.artifact.names
            share = (
                read_tensors(self.artifact.checkpoint, [part.name])
                if plain
                else self.encoded(owner)
            )
            tensor.as_strided(part.shape, part.strides, part.start).copy_(share[part.name])
        return tensor

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        artifact, content = self.artifact, dict(self.artifact.checkpoint.config)
        schemes = {name: placement.scheme for name, placement in artifact.linears.items()}
        graph = graph_for(artifact.config)
        modules = module_names(graph) | dict(artifact.modules)
        quantized = {*schemes, *(modules.get(name, name) for name in schemes)}
        checkpoint, stored = artifact.checkpoint, artifact.checkpoint.infos
        plain = {name: stored[name] for name in artifact.names if name in stored}
        left = left_alone(graph, quantized, infos=plain, unused=checkpoint.unused)
        content["quantization_config"] = self.layout.quantization_config(
            schemes,
            ignore=list(
                dict.fromkeys([*left, *(modules[name] for name in left if name in modules)])
            ),
            model_type=str(content.get("model_type")),
            modules=modules,
        )
        if self.layout.name == LAYOUTS[DEFAULT].name:
            content["quantization_config"] |= for_transformers(graph, schemes)
        return {
            key: value for key, value in content.items() if key != "quantization_config" or value
        }

    def require_same(self, folder: Path, progress: Progress) -> None:
        """Open what was written and compare every linear with the source's.

        Raises:
            IntegrityError: one has other values.
        """
        try:
            written = open_folder(folder, backend="reference")
        except InputError as error:
            raise IntegrityError(error.cause, "export again, and check the disk") from error
        for name in progress.steps(
            list(self.artifact.linears), stage="export: compare what was written", unit="linear"
        ):
            left, right = self.artifact.decode(name), written.decode(name)
            inputs = (left.input_scale is None) == (right.input_scale is None)
            if inputs and left.input_scale is not None and right.input_scale is not None:
                inputs = torch.equal(left.input_scale, right.input_scale)
            if (
                not inputs
                or left.scheme.input != right.scheme.input
                or not torch.equal(left.dequantize(), right.dequantize())
            ):
                raise IntegrityError(
                    f"{name}: what was written decodes to other values",
                    "export again, and check the disk",
                )

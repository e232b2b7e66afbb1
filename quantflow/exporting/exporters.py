"""The formats that `export` writes: `EXPORTERS` is their only registry.

A row names its module, which is imported when it is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quantflow.errors import UsageError, nearest
from quantflow.exporting.artifact_job import work_folder
from quantflow.exporting.export import check as check_export
from quantflow.exporting.job import ExportJob
from quantflow.files.checkpoint import CONFIG
from quantflow.files.manifest import MANIFEST_NAME
from quantflow.files.outputs import output_folder
from quantflow.formats import DEFAULT
from quantflow.planning.recipe import Export
from quantflow.progress import Progress
from quantflow.runtime.artifact import is_model
from quantflow.sources.models import is_on_hub, model_folder


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """A row of EXPORTERS.

    Attributes:
        takes: source of the format, in words.
        reader: reader of its files, in words.
        options: keys of the recipe's `export` that it reads.
        foreign: module for a source that another program quantized; None where `module` takes
            that too, or nothing does.
        module: module whose `run(job, progress)` writes the folder and returns it.
        plain: module for a source that is not quantized, which reads dtype and shard_size.
        takes_model: whether the source may be a model, by any of its names.
    """

    takes: str
    reader: str
    options: tuple[str, ...]
    module: str
    takes_model: bool = False
    foreign: str | None = None
    plain: str | None = None

    def check_options(self, job: ExportJob) -> None:
        """Refuse options that this format does not read.

        Raises:
            UsageError: naming one.
        """
        for item in fields(Export):
            value = getattr(job.options, item.name)
            if item.name not in ("format", *self.options) and value != item.default:
                cause = f"export: {item.name} {value} beside format {job.options.format}"
                remedy = f"leave it out; this format reads {', '.join(self.options)}"
                raise UsageError(cause, remedy)

    def run(self, job: ExportJob, progress: Progress, *, prover: Any = None) -> Path:
        """Write the files that a job asks for, and return the folder.

        Args:
            job: job of this format.
            progress: receiver of progress.
            prover: a process that has started to prove an artifact (quantflow/exporting/proof.py),
                for the format of artifacts.

        Raises:
            UsageError: the job has an option that this format does not read.
            QuantflowError: as the format's module.
        """
        if self.plain is not None and _is_plain(job.source):
            replace(self, options=("dtype", "shard_size")).check_options(job)
            written: Path = import_module(self.plain).run(job, progress)
            return written
        self.check_options(job)
        foreign = self.foreign is not None and is_foreign(job.source)
        module = import_module(self.foreign if foreign and self.foreign else self.module)
        proven = {} if prover is None or foreign else {"prover": prover}
        folder: Path = module.run(job, progress, **proven)
        return folder


def _of_layout(reader: str, *, options: tuple[str, ...] = ("dtype", "shard_size")) -> Exporter:
    """The exporter of another program's layout; `dtype` is that of the scales of integers."""
    return Exporter(
        takes="an artifact, or a folder that another program quantized; no value changes",
        reader=reader,
        options=options,
        module="quantflow.exporting.layout_export",
    )


EXPORTERS: Mapping[str, Exporter] = MappingProxyType(
    {
        "compressed-tensors": Exporter(
            takes="what `quantize` or `unify` wrote; a model, whose tensors stay as they are",
            reader="this runtime, transformers, vLLM",
            options=("shard_size", "measure_inputs"),
            module="quantflow.exporting.export",
            foreign="quantflow.exporting.layout_export",
            plain="quantflow.exporting.model_export",
        ),
        "inc": Exporter(
            takes="a measurement",
            reader="Gaudi's toolkit",
            options=("device", "scale_method"),
            module="quantflow.exporting.gaudi_export",
        ),
        "imatrix": Exporter(
            takes="a measurement with mean_square or hessian, and its model",
            reader="llama-quantize, and `quantize --imatrix` here",
            options=(),
            module="quantflow.exporting.imatrix_export",
        ),
        "gguf": Exporter(
            takes="a model as it is, or an artifact: in llama.cpp's types or MXFP4 where it was "
            "quantized to them, else dequantized",
            reader="llama.cpp and its own quantizers",
            options=("dtype",),
            module="quantflow.exporting.gguf_export",
            takes_model=True,
        ),
        "gptq": _of_layout("vLLM, and what else reads GPTQ's layout, version 1"),
        "gptq_v2": _of_layout("what reads GPTQ's layout, version 2, which has zero points of 0"),
        "auto_round": _of_layout(
            "AutoRound, and what else reads its format; linears may differ in bits"
        ),
        "awq": _of_layout("vLLM, and what else reads AWQ's gemm layout"),
        "fp8": _of_layout("what reads float8 in blocks or per tensor", options=("shard_size",)),
        "modelopt": _of_layout(
            "TensorRT-LLM, vLLM and SGLang, as of NVIDIA's Model Optimizer", options=("shard_size",)
        ),
        "mxfp4": _of_layout(
            "what reads gpt-oss as it was published: its experts alone", options=("shard_size",)
        ),
        "ipex": _of_layout(
            "Intel's extension for PyTorch, as its low-precision checkpoint", options=("dtype",)
        ),
        "openvino": Exporter(
            takes="an artifact, or a folder that another program quantized; no value changes",
            reader="OpenVINO and OpenVINO GenAI",
            options=("dtype",),
            module="quantflow.exporting.openvino_export",
        ),
        "dequantized": Exporter(
            takes="an artifact",
            reader="what reads its source: transformers, or any tool for plain models",
            options=("dtype", "shard_size"),
            module="quantflow.exporting.dequantized_export",
        ),
    }
)


def run(job: ExportJob, progress: Progress, *, prover: Any = None) -> Path:
    """Write the files that a job asks for, by the exporter of its format; see `ExportJob.run`."""
    chosen = exporter(job.options.format)
    return chosen.run(_settled(job, chosen, progress), progress, prover=prover)


def check(job: ExportJob) -> None:
    """Refuse an artifact's export by what can be seen before its layers are there.

    Raises:
        UsageError: another format than an artifact's, options that it does not read, or a folder
            that is read.
    """
    EXPORTERS[DEFAULT].check_options(job)
    check_export(replace(job, output=output_folder(job.output, reads={"the model": job.model})))


def _settled(job: ExportJob, chosen: Exporter, progress: Progress) -> ExportJob:
    """The job with a folder for every name."""

    def folder_of(model: Path) -> Path:
        return model_folder(model, revision=job.revision, progress=progress)

    if chosen.takes_model:
        source, model = folder_of(job.source), job.model
    else:
        named = is_on_hub(job.source)
        source = folder_of(job.source) if named else _layers(job.source, job.options.format)
        model = None if job.model is None else folder_of(job.model)
    reads = {"what is exported": job.source, "the model": job.model}
    return replace(job, source=source, output=output_folder(job.output, reads=reads), model=model)


def _layers(folder: Path, format: str) -> Path:
    """The quantize folder beside an artifact of one command, for an artifact's own format."""
    layers = work_folder(folder) / "2-quantize"
    artifact = format == DEFAULT and (folder / MANIFEST_NAME).is_file()
    return layers if artifact and layers.is_dir() else folder


def is_foreign(folder: Path) -> bool:
    """Whether a folder is a model's, quantized or not, that this project did not write."""
    return (folder / CONFIG).is_file() and not (folder / MANIFEST_NAME).exists()


def _is_plain(folder: Path) -> bool:
    """Whether a folder is a model that is not quantized."""
    return is_foreign(folder) and is_model(folder)


def exporter(name: str) -> Exporter:
    """The exporter of a format.

    Raises:
        UsageError: there is none; the nearest one is named.
    """
    if name not in EXPORTERS:
        raise UsageError(f"export: format {name!r} is unknown", nearest(name, list(EXPORTERS)))
    return EXPORTERS[name]

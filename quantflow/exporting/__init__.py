"""The artifact's files: weights, ledger, model card, other runtimes' files, and the proof.

`EXPORTERS` is the only registry of formats that `export` writes. A row names its module, which is
imported when it is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quantflow.errors import UsageError, nearest
from quantflow.files.checkpoint import CONFIG
from quantflow.files.manifest import MANIFEST_NAME
from quantflow.planning.recipe import Export, Resources
from quantflow.progress import Progress


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What is asked of an exporter.

    Attributes:
        source: what the exporter takes: a finished quantize folder, a measurement, a model or an
            artifact.
        output: the folder that it writes.
        options: the recipe's words; an exporter reads its own of them.
        model: the source model, where the exporter knows of one.
        quant_config: Gaudi's own configuration, as its toolkit was given it.
        keep_originals: keep what Gaudi measured beside what is written for it.
        resources: limits of memory and disk.
        replace: redo a finished result that was made from other inputs, instead of refusing.
    """

    source: Path
    output: Path
    options: Export = Export()
    model: Path | None = None
    quant_config: Any = None
    keep_originals: bool = False
    resources: Resources = Resources()
    replace: bool = False


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """A row of EXPORTERS.

    Attributes:
        takes: what its source is, in words.
        reader: what reads its files, in words.
        options: words of the recipe's `export` that it reads.
        foreign: the same for a source that another program quantized; None where `module` takes
            that too, or nothing does.
        module: has `requested(request)`, which returns a job, and `run(job, progress)`, which does
            it and returns the folder.
        takes_model: the source may be a model, by any of its names.
    """

    takes: str
    reader: str
    options: tuple[str, ...]
    module: str
    takes_model: bool = False
    foreign: str | None = None

    def job(self, request: ExportRequest) -> Any:
        """Return the job, a record.

        Raises:
            UsageError: the request contradicts itself, or has an option that this format does not
                read.
        """
        for item in fields(Export):
            given = getattr(request.options, item.name)
            if item.name not in ("format", *self.options) and given != item.default:
                cause = f"export: {item.name} {given} beside format {request.options.format}"
                raise UsageError(
                    cause, f"leave it out; this format reads {', '.join(self.options)}"
                )
        other = self.foreign is not None and is_foreign(request.source)
        return import_module(self.foreign if other and self.foreign else self.module).requested(
            request
        )

    def run(self, job: Any, progress: Progress, *, prover: Any = None) -> Path:
        """Do what `job` returned, and return the folder.

        Args:
            job: of this exporter.
            progress: is told how far it is.
            prover: a process that has started to prove an artifact (quantflow/exporting/proof.py),
                for the format of artifacts.

        Raises:
            QuantflowError: as the format's module.
        """
        more = {} if prover is None else {"prover": prover}
        folder: Path = import_module(type(job).__module__).run(job, progress, **more)
        return folder


def _of_layout(reader: str, *, options: tuple[str, ...] = ("dtype", "shard_size")) -> Exporter:
    """Return the exporter of a layout that other programs made; `dtype` is that of the scales of integers."""
    return Exporter(
        takes="an artifact, or a folder that another program quantized; no value changes",
        reader=reader,
        options=options,
        module="quantflow.exporting.layout_export",
    )


EXPORTERS: Mapping[str, Exporter] = MappingProxyType(
    {
        "compressed-tensors": Exporter(
            takes="what `quantize` or `unify` wrote",
            reader="this runtime, transformers, vLLM",
            options=("shard_size", "measure_inputs"),
            module="quantflow.exporting.export",
            foreign="quantflow.exporting.layout_export",
        ),
        "inc": Exporter(
            takes="a measurement",
            reader="Gaudi's toolkit",
            options=("device", "scale_method"),
            module="quantflow.exporting.gaudi_export",
        ),
        "gguf": Exporter(
            takes="a model as it is, or an artifact: in llama.cpp's types where it was quantized "
            "to them, else dequantized",
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
            reader="what reads its source: transformers, any tool for models that are not quantized",
            options=("dtype", "shard_size"),
            module="quantflow.exporting.dequantized_export",
        ),
    }
)


def is_foreign(folder: Path) -> bool:
    """Return whether a folder is a model's, quantized or not, that this project did not write."""
    return (folder / CONFIG).is_file() and not (folder / MANIFEST_NAME).exists()


def exporter(name: str) -> Exporter:
    """Return the exporter of a format.

    Raises:
        UsageError: there is none; the nearest one is named.
    """
    if name not in EXPORTERS:
        raise UsageError(f"export: format {name!r} is unknown", nearest(name, list(EXPORTERS)))
    return EXPORTERS[name]

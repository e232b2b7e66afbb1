"""Stage 4 for Gaudi: a measurement as its toolkit's files, with the QUANT_CONFIG for them.

Reads    the folder of `quantflow measure` or unify, or Gaudi's own files; the model where the scale
         method needs weights
Writes   <o>: the folders below, and DONE.json; the whole folder appears at once
Resumes  a finished result of the same inputs is left alone
Fails    2 options that contradict each other, 3 unusable input, 5 the folder is held, 6 an unknown
         device

    quantization_config/<name>.json       for optimum-habana and TGI, which QUANT_CONFIG names
    hqt_output/<prefix>_hooks_maxabs...   maxima (npz, json, mod_list) and their scales
    vllm/<name>_g2.json, vllm/g2/...      the same for vLLM, in the names of its modules; from our
                                          measurements only

The first inputs of attention's products are what was measured, the second ones the caches'. Where a
scale per channel is wanted for several ranks, the toolkit derives it: each of its ranks holds a
part of the channels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantflow.core.device_scales import DEVICES, Target, target
from quantflow.errors import InputError, UsageError, nearest
from quantflow.exporting.job import ExportJob
from quantflow.files import stage_folder
from quantflow.formats.gaudi import experts, gaudi_nodes
from quantflow.formats.gaudi.file_names import GENERATIONS, device_folder, find_triples
from quantflow.formats.gaudi.files import (
    GaudiFiles,
    config_table,
    has_scales,
    kept,
    needs_weights,
    write_ours,
    write_theirs,
)
from quantflow.formats.gaudi.quant_config import QuantConfig
from quantflow.formats.gaudi.scale_methods import method_config
from quantflow.formats.gaudi.scales import near_steps
from quantflow.formats.gaudi.triple import MEASUREMENT, Triple, read_triple
from quantflow.measuring.merging.grouping import some
from quantflow.measuring.record import Measurement, read_measurement
from quantflow.models.open import ModelFiles, open_files
from quantflow.models.reading import read_tensor
from quantflow.models.source import fingerprint
from quantflow.progress import Progress
from quantflow.quantizing.gaudi_measurement import are_gaudis, digests, refuse_other_model
from quantflow.unifying.unify import rank_folders

VERSION = 1
_CPU = "For FP8 quantization, only QDQ mode is supported on CPU device."  # the toolkit's own words


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Maxima of the ranks, in Gaudi's names.

    Attributes:
        ranks: one triple a rank, in order.
        ours: whether `quantflow measure` made them.
        digest: digest of each rank's files.
        observer: observer that kept the maxima.
        cacheless: attention modules whose keys and values were not measured.
        family: the model's type, where the ranks know it.
        fingerprints: fingerprints of the model, where the ranks know it.
    """

    ranks: tuple[Triple, ...]
    ours: bool
    digest: Any
    observer: str = "maxabs"
    cacheless: tuple[str, ...] = ()
    family: str = ""
    fingerprints: frozenset[str] = frozenset()


def _config(job: ExportJob) -> QuantConfig:
    """What the files are for: the QUANT_CONFIG, under the scale method that was asked for.

    Raises:
        UsageError: an unknown scale method, or one that the QUANT_CONFIG contradicts.
    """
    given = job.quant_config
    config = QuantConfig(dump_stats_path="./hqt_output/measure") if given is None else given.config
    if job.options.scale_method is None:
        return config
    return replace(config, scale_method=method_config(job.options.scale_method))


def _name(job: ExportJob) -> str:
    """Name of the QUANT_CONFIG that is written, without `.json`."""
    return "maxabs_quant" if job.quant_config is None else job.quant_config.path.stem


def run(job: ExportJob, progress: Progress) -> Path:
    """Write the files and return their folder; one that is up to date is left alone."""
    goal = _target(job)
    measured = _measured(job)
    source = None if job.model is None else open_files(job.model)
    model = None if source is None else _same_model(job, measured, source)
    made_from = {
        "measurement": measured.digest,
        "model": model,
        "version": VERSION,
        **_deciding_settings(job),
    }
    files = GaudiFiles(
        config=_config(job),
        name=_name(job),
        device=str(job.options.device),
        target=goal,
        read_weight=_reader(source),
    )
    with stage_folder.locked(job.output):
        if stage_folder.is_up_to_date(job.output, made_from):
            progress.say(f"export {job.output.name}: up to date")
            return job.output
        stage_folder.refuse_other_result(job.output, made_from, force=job.force)
        with stage_folder.publish(job.output, stage="export", inputs=made_from) as folder:
            if measured.ours:
                write_ours(folder, measured.ranks, files, family=measured.family)
            else:
                write_theirs(
                    folder,
                    measured.ranks,
                    files,
                    observer=measured.observer,
                    keep_originals=job.keep_originals,
                )
        if measured.cacheless:
            progress.say(
                f"export {job.output.name}: caches and products of {len(measured.cacheless)} "
                f"attention modules are left out, {measured.cacheless[0]} first: their keys and "
                "values were not measured"
            )
        if measured.ours:
            _report_experts(job, measured, progress)
        _report(job, measured.ranks, goal, progress)
    return job.output


def _report_experts(job: ExportJob, measured: Measured, progress: Progress) -> None:
    """Report what became of a mixture's experts."""
    counts = experts.totals(triple.nodes for triple in measured.ranks)
    if counts and measured.family not in experts.PATCHED_FAMILIES:
        progress.say(
            f"export {job.output.name}: optimum-habana runs the experts of a {measured.family} in "
            "bfloat16, so its files leave them out; vLLM's have them"
        )
    untold = [name for triple in measured.ranks for name in experts.untold(triple.nodes)]
    if untold:
        progress.say(
            f"export {job.output.name}: {len(untold)} experts got no token, {untold[0]} first; "
            "they have the largest maximum of their layer's"
        )


def _target(job: ExportJob) -> Target:
    """The device whose scales are derived.

    Raises:
        UsageError: no device, or a configuration that it does not take.
    """
    if job.options.device is None:
        raise UsageError(
            "export: format inc without a device", f"give --device {', '.join(DEVICES)}"
        )
    if job.options.device not in DEVICES:
        raise UsageError(
            f"export: device {job.options.device!r} is unknown",
            nearest(job.options.device, DEVICES),
        )
    if job.options.device == "cpu" and not _config(job).use_qdq:
        raise UsageError(
            f"export: {_CPU}", 'add "use_qdq": true to the QUANT_CONFIG, or give --device gaudi2'
        )
    if _config(job).dynamic_quantization:
        raise UsageError(
            "export: dynamic_quantization uses no files",
            "give the QUANT_CONFIG to the runtime as it is",
        )
    return target(_config(job).scale_device(job.options.device), _config(job).fp8_config)


def _measured(job: ExportJob) -> Measured:
    """Read every rank.

    Raises:
        UsageError: a quantized folder, or several ranks for one shared file.
        InputError: no measurement, or ranks that contradict each other.
    """
    path = job.source
    if (path / "quantize.json").exists() or (path / "quantflow.json").exists():
        raise UsageError(
            f"{path}: is quantized; format inc is made from a measurement",
            "give the folder that measure wrote",
        )
    if are_gaudis(path):
        _refuse_other_generation(path, str(job.options.device))
        files = find_triples(path)
        triples = [read_triple(measured) for measured in files.values()]
        if any(triple.mode != MEASUREMENT for triple in triples):
            raise InputError(f"{path}: holds scales", "give the files of the measurement")
        observer = files[0].name.observer
        measured = Measured(
            ranks=tuple(triples), ours=False, digest=digests(files), observer=observer
        )
    else:
        measurements = [read_measurement(folder) for folder in rank_folders(path)]
        _refuse_missing(path, measurements)
        measured = Measured(
            ranks=tuple(
                Triple(nodes=gaudi_nodes.nodes_from(one.statistics)) for one in measurements
            ),
            ours=True,
            cacheless=gaudi_nodes.without_cache(measurements[0].statistics),
            family=measurements[0].meta["model"]["family"],
            digest=[one.meta["digest"] for one in measurements],
            fingerprints=frozenset(one.meta["model"]["fingerprint"] for one in measurements),
        )
    if len(measured.ranks) > 1 and not _config(job).seperate_measure_files:
        raise UsageError(
            f"export: {len(measured.ranks)} ranks, and seperate_measure_files is false",
            "run `quantflow unify` first",
        )
    return measured


def _refuse_missing(path: Path, measurements: Sequence[Measurement]) -> None:
    ranks = sorted(int(one.meta["mesh"]["rank"]) for one in measurements)
    world = max(int(one.meta["mesh"]["world"]) for one in measurements)
    if ranks != list(range(world)):
        raise InputError(
            f"{path}: holds ranks {ranks} of {world}", "give every rank once, or unify them first"
        )


def _refuse_other_generation(path: Path, device: str) -> None:
    """Refuse files in a folder that vLLM's calibration names after the other Gaudi: g2, g3.

    Nothing in the files says which device measured them, and one saturates where the other does
    not.
    """
    path = device_folder(path)
    expected = GENERATIONS.get(device)
    generations = [part for part in (path.name, path.parent.name) if part in GENERATIONS.values()]
    if expected is not None and generations and expected not in generations:
        raise InputError(
            f"{path}: folder {generations[0]} is of another device than {device}",
            f"measure on {device}, or rename the folder if its name is wrong",
        )


def _same_model(job: ExportJob, measured: Measured, source: ModelFiles) -> str:
    """The model's fingerprint.

    Raises:
        InputError: the measurement is another model's.
    """
    if not measured.ours:
        refuse_other_model(job.source, _weights(measured.ranks, source), source)
    actual = fingerprint(source.checkpoint)
    for expected in measured.fingerprints - {actual}:
        raise InputError(
            f"{job.source}: measured on model {expected[:16]}, {job.model} is {actual[:16]}",
            "give the model that was measured",
        )
    return actual


def _weights(ranks: Sequence[Triple], source: ModelFiles) -> dict[str, Tensor]:
    """`<source name>|weight|amax` over all ranks: of copies theirs, of parts that of the whole.

    Of several ranks the lists of experts are left out: they may count those of a card.
    """
    maxima: dict[str, Tensor] = {}
    for triple in ranks:
        nodes = {
            name: node
            for name, node in triple.nodes.items()
            if len(ranks) == 1 or experts.listed(name) is None
        }
        for key, value in gaudi_nodes.statistics_from(nodes, known=_linears(source))[0].items():
            if key.endswith("|weight|amax"):
                maxima[key] = torch.maximum(maxima.get(key, value), value)
    return maxima


def _deciding_settings(job: ExportJob) -> dict[str, Any]:
    """Everything of the job that decides the files, as plain data."""
    config = config_table(
        _config(job), dump_stats_path=_config(job).dump_stats_path, block=_config(job).blocklist
    )
    return {
        "device": job.options.device,
        "name": _name(job),
        "config": config,
        "keep_originals": job.keep_originals,
    }


def _reader(source: ModelFiles | None) -> Callable[[str], Tensor] | None:
    return None if source is None else partial(_read, source)


def _read(source: ModelFiles, node: str) -> Tensor:
    """The weight of a node, [O, I]; of one that vLLM runs fused, its parts one below the other."""
    parts = []
    for name in gaudi_nodes.parts_of(node, known=_linears(source)):
        if f"{name}.weight" not in source.checkpoint.tensors:
            raise InputError(
                f"{name}.weight: not in {source.checkpoint.folder}",
                "give the model that was measured",
            )
        file, info = source.checkpoint.tensors[f"{name}.weight"]
        parts.append(read_tensor(source.checkpoint.folder / file, info))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _linears(source: ModelFiles) -> set[str]:
    """Names of what has a weight."""
    return {name.removesuffix(".weight") for name in source.checkpoint.tensors}


def _report(job: ExportJob, ranks: tuple[Triple, ...], goal: Target, progress: Progress) -> None:
    """Report remarks for readers of the files."""
    nodes = kept(ranks[0].nodes, _config(job), _config(job).blocklist)
    progress.say(
        f"export {job.output.name}: {len(nodes)} of {len(ranks[0].nodes)} nodes quantized, "
        f"ranks: {len(ranks)}"
    )
    unknown = [
        name for name, node in nodes.items() if gaudi_nodes.maxima_of_inputs(name, node) is None
    ]
    if unknown and has_scales(_config(job), ranks=len(ranks)):
        progress.say(
            f"export {job.output.name}: scales of {len(unknown)} nodes are left to the toolkit, "
            f"which knows what they are: {some(unknown)}"
        )
    close = near_steps(nodes, _config(job).scale_method, target=goal)
    if close:
        progress.say(
            f"export {job.output.name}: {len(close)} inputs are at most 5 % above a step of "
            f"their scale, {close[0]} first"
        )
    if len(ranks) > 1 and needs_weights(_config(job)):
        progress.say(
            f"export {job.output.name}: scales per channel of {len(ranks)} ranks are left to the "
            "toolkit"
        )

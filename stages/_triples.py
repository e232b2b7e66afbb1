"""Gaudi's measurement files as what our stages take: statistics for quantize, and ranks to be merged.

The files hold maxima and nothing else: no calibration text, no model's name. So quantize takes FP8 from them, and what else
needs maxima alone; its canary is seeded, and the model is recognised by the maxima of its weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantflow.artifact.canonical import digest_of, file_digest
from quantflow.errors import InputError, UsageError
from quantflow.measurements.inc import Triple, read_triple, write_triple
from quantflow.measurements.inc_names import FileName, Files, find_triples
from quantflow.measurements.inc_nodes import statistics_from
from quantflow.measurements.inc_unify import unify_triples
from quantflow.measurements.keys import parse_key
from quantflow.measurements.record import Measurement
from quantflow.measurements.unify import parse_groups
from quantflow.models.reading import read_tensor
from quantflow.models.source import ModelFiles
from stages import _workspace
from stages._plan import Plan
from stages._progress import Progress

UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class UnifyJob:
    """One merge of Gaudi's files.

    Attributes:
        measurement: a folder with every rank's files, or folder/prefix.
        output: the folder of the merged files; they keep the prefix.
        groups: as `-g` takes them; empty means all ranks into one.
        replace: redo a finished result that was made from other inputs, instead of refusing.
    """

    measurement: Path
    output: Path
    groups: tuple[str, ...] = ()
    replace: bool = False


def unify(job: UnifyJob, progress: Progress) -> Path:
    """Merge the ranks and return the folder written, or the existing one when nothing changed."""
    files = find_triples(job.measurement)
    groups = parse_groups(job.groups, world=len(files)) if job.groups else [list(range(len(files)))]
    inputs = {"files": digests(files), "groups": groups}
    with _workspace.locked(job.output):
        if _workspace.is_up_to_date(job.output, inputs):
            progress.say("unify: up to date")
            return job.output
        _workspace.refuse_other_result(job.output, inputs, force=job.replace)
        unified = unify_triples({rank: read_triple(found) for rank, found in files.items()}, groups)
        with _workspace.publish(job.output, stage="unify", inputs=inputs) as temporary:
            for rank, triple in enumerate(unified):
                write_triple(temporary, _renamed(files[0].name, rank, world=len(unified)), triple)
    return job.output


def _renamed(name: FileName, rank: int, *, world: int) -> FileName:
    """Return the name of a merged rank; one rank that is all there is has none, as the toolkit's single process."""
    single = world == 1
    return FileName(prefix=name.prefix, observer=name.observer, rank=None if single else rank, world=None if single else world)


def digests(files: Mapping[int, Files]) -> dict[str, str]:
    """Return file name -> sha256 of everything that is read for these ranks."""
    paths = [path for found in files.values() for path in (found.npz, found.json, found.mod_list) if path is not None]
    return {path.name: file_digest(path) for path in paths}


def measurement_from(path: Path, plan: Plan, *, source: ModelFiles, progress: Progress) -> Measurement:
    """Return Gaudi's files of one rank as a measurement without calibration text.

    Raises:
        InputError: several ranks; a linear that was not measured; weights with other maxima than the model's.
        UsageError: the scheme, algorithm or transforms need more than maxima.
    """
    files = find_triples(path)
    if len(files) > 1:
        raise InputError(f"{path}: holds {len(files)} ranks, quantize reads one", "run `quantflow unify` on it first")
    triple = read_triple(files[0])
    statistics, others = statistics_from(triple.nodes)
    _refuse_more_than_maxima(plan, statistics)
    unmeasured = [
        name
        for name, scheme in plan.schemes.items()
        if scheme is not None and plan.needs and f"{name}|input|amax" not in statistics
    ]
    if unmeasured:
        raise InputError(
            f"{unmeasured[0]}: not measured in {path} ({len(unmeasured)} such linears)", "add them to ignore, or measure them"
        )
    checked = _refuse_other_model(path, statistics, source)
    progress.say(
        f"quantize {plan.name}: {path} holds maxima without text; {checked} of {len(plan.schemes)} linears recognised by their "
        f"weights, {len(others)} nodes not used"
    )
    return Measurement(meta=_meta(triple, digests(files)), statistics=statistics, sequences=[], indices=[])


def _refuse_more_than_maxima(plan: Plan, statistics: Mapping[str, Tensor]) -> None:
    present = {parse_key(key).statistic for key in statistics if parse_key(key).site == "input"}
    missing = sorted(plan.needs - present)
    if missing:
        raise UsageError(
            f"{plan.name}: {plan.algorithm} and the scheme need {', '.join(missing)}, Gaudi's files hold maxima alone",
            "use scheme FP8, or `quantflow measure`",
        )


def _refuse_other_model(path: Path, statistics: Mapping[str, Tensor], source: ModelFiles) -> int:
    """Compare the maxima of the weights with the model's, as stored and rounded to bfloat16; return how many there are."""
    checked = 0
    for key, seen in statistics.items():
        name, site, statistic = parse_key(key)
        if (site, statistic) != ("weight", "amax") or f"{name}.weight" not in source.checkpoint.tensors:
            continue
        file, info = source.checkpoint.tensors[f"{name}.weight"]
        amax = read_tensor(source.checkpoint.folder / file, info).abs().max().float()
        if not any(torch.equal(seen, value) for value in (amax, amax.bfloat16().float(), amax.half().float())):
            raise InputError(
                f"{name}: the largest weight is {amax.item():.9g}, {path} saw {seen.item():.9g}",
                "give the files that were measured on this model",
            )
        checked += 1
    return checked


def _meta(triple: Triple, files: Mapping[str, str]) -> dict[str, Any]:
    """Return what later stages read of a measurement; the text is unknown, so its counts are zero."""
    return {
        "digest": digest_of(files),
        "model": {"name": UNKNOWN, "fingerprint": None, "family": UNKNOWN},
        "mesh": {"rank": 0, "world": 1, "tp": 1, "dp": 1, "ep": 1},
        "dtype": UNKNOWN,
        "seed": 0,
        "calibration": {"hash": UNKNOWN, "samples": triple.samples or 0, "tokens": 0, "sequence_length": 0},
        "counts": {"samples": triple.samples or 0, "tokens": 0},
    }

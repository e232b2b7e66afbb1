"""Gaudi's measurement files as what quantize takes.

The files hold maxima and nothing else: no calibration text, no model's name. So quantize takes FP8
from them, and what else needs maxima alone; its canary is seeded, and the model is recognised by
the maxima of its weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantflow.errors import InputError, UsageError
from quantflow.files.canonical import digest_of, file_digest
from quantflow.formats.gaudi.file_names import TripleFiles, find_triples, holds_triples
from quantflow.formats.gaudi.gaudi_nodes import statistics_from
from quantflow.formats.gaudi.triple import Triple, read_triple
from quantflow.measuring.merging.gaudi_files import unify_triples
from quantflow.measuring.record import META_NAME, Measurement
from quantflow.models.open import ModelFiles
from quantflow.models.reading import read_tensor
from quantflow.observers.amax import AMAX
from quantflow.observers.keys import parse_key
from quantflow.planning.plan import Plan
from quantflow.progress import Progress

UNKNOWN = "unknown"
IPEX_SUMMARY = "best_configure.json"  # of IPEX's static int8


def are_gaudis(path: Path) -> bool:
    """Whether a path names files of Gaudi's toolkit, and no folder of ours."""
    return (
        holds_triples(path)
        and not (path / META_NAME).exists()
        and not any(path.glob("rank-*-of-*"))
    )


def refuse_ipex(path: Path) -> None:
    """Refuse a summary of IPEX's calibration, which keeps scales and zero points, but no maxima.

    Raises:
        InputError: the folder, or the file, is such a summary.
    """
    summary = path / IPEX_SUMMARY if path.is_dir() else path
    if summary.name == IPEX_SUMMARY and summary.is_file():
        raise InputError(
            f"{summary}: IPEX's scales and zero points of one process, of inputs that it may "
            "have smoothed; maxima are needed",
            "measure the model that it was made of: quantflow measure MODEL -o DIR",
        )


def digests(files: Mapping[int, TripleFiles]) -> dict[str, str]:
    """The sha256 of every file that is read for these ranks, by file name."""
    paths = [
        path
        for found in files.values()
        for path in (found.npz, found.json, found.mod_list)
        if path is not None
    ]
    return {path.name: file_digest(path) for path in paths}


def measurement_from(
    path: Path, plan: Plan, *, source: ModelFiles, progress: Progress, cards: int = 1
) -> Measurement:
    """Gaudi's files as a measurement without calibration text.

    They are of one rank, or of as many as quantize.

    Raises:
        InputError: several ranks that are not those that quantize; a linear that was not measured;
            weights with other maxima than the model's.
        UsageError: the scheme, algorithm or transforms need more than maxima.
    """
    files = find_triples(path)
    if len(files) not in (1, cards):
        raise InputError(
            f"{path}: holds {len(files)} ranks, quantize reads one",
            f"merge them first: quantflow unify -m {path} -o DIR",
        )
    triples = {rank: read_triple(files_of_rank) for rank, files_of_rank in files.items()}
    triple = (
        triples[0] if len(triples) == 1 else unify_triples(triples, [sorted(triples)])[0].triple
    )
    statistics, others = statistics_from(triple.nodes, known=plan.schemes)
    _refuse_more_than_maxima(plan, statistics)
    unmeasured = [
        name
        for name, scheme in plan.schemes.items()
        if scheme is not None and plan.needs and f"{name}|input|amax" not in statistics
    ]
    if unmeasured:
        raise InputError(
            f"Layer '{unmeasured[0]}' cannot be quantized because no measures were supplied: "
            f"{path} has none "
            f"({len(unmeasured)} such linears)",
            'add them to ignore, give a QUANT_CONFIG with "ignore_modules_wo_measures": true, or '
            "measure them",
        )
    checked = refuse_other_model(path, statistics, source)
    progress.say(
        f"quantize {plan.name}: {path} holds maxima without text; {checked} of "
        f"{len(plan.schemes)} linears recognised by their "
        f"weights, {len(others)} nodes not used"
    )
    return Measurement(
        meta=_meta(triple, digests(files)), statistics=statistics, sequences=[], indices=[]
    )


def _refuse_more_than_maxima(plan: Plan, statistics: Mapping[str, Tensor]) -> None:
    present = {parse_key(key).statistic for key in statistics if parse_key(key).site == "input"}
    missing = [*sorted(plan.needs - present), *(["the calibration text"] if plan.learns else [])]
    if missing:
        raise UsageError(
            f"{plan.name}: {plan.method} and the scheme need {', '.join(missing)}, Gaudi's files "
            "hold maxima alone",
            "use scheme FP8, or `quantflow measure`",
        )


def refuse_other_model(path: Path, statistics: Mapping[str, Tensor], source: ModelFiles) -> int:
    """Compare the weights' maxima with the model's, as stored or as bfloat16.

    Returns:
        Number of weights that were compared.

    Raises:
        InputError: naming the first that differs.
    """
    checked = 0
    for key, seen in statistics.items():
        name, site, statistic = parse_key(key)
        if (site, statistic) != (
            "weight",
            AMAX.name,
        ) or f"{name}.weight" not in source.checkpoint.tensors:
            continue
        file, info = source.checkpoint.tensors[f"{name}.weight"]
        amax = read_tensor(source.checkpoint.folder / file, info).abs().max().float()
        if not any(
            torch.equal(seen, value)
            for value in (amax, amax.bfloat16().float(), amax.half().float())
        ):
            raise InputError(
                f"{name}: the largest weight is {amax.item():.9g}, {path} saw {seen.item():.9g}",
                "give the files that were measured on this model",
            )
        checked += 1
    return checked


def _meta(triple: Triple, files: Mapping[str, str]) -> dict[str, Any]:
    """The record of a measurement for later stages; the text is unknown, so its counts are zero."""
    return {
        "digest": digest_of(files),
        "model": {"name": UNKNOWN, "fingerprint": None, "family": UNKNOWN},
        "mesh": {"rank": 0, "world": 1, "tp": 1, "dp": 1, "ep": 1},
        "dtype": UNKNOWN,
        "seed": 0,
        "calibration": {
            "hash": UNKNOWN,
            "samples": triple.samples or 0,
            "tokens": 0,
            "sequence_length": 0,
        },
        "counts": {"samples": triple.samples or 0, "tokens": 0},
    }

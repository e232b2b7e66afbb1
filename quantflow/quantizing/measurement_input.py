"""The measurement that stage 2 reads: opened, recognised, refused where it is another model's."""

from pathlib import Path

import torch

from quantflow.core.determinism import single_threaded
from quantflow.errors import InputError, UsageError
from quantflow.files import stage_folder
from quantflow.files.digests import NAME as HASHES
from quantflow.measuring.merging.ranks import unify
from quantflow.measuring.record import (
    Measurement,
    open_measurements,
    read_measurement,
    read_meta,
    recorded,
)
from quantflow.models.graph import Graph
from quantflow.models.open import ModelFiles
from quantflow.planning.plan import Plan
from quantflow.progress import Progress
from quantflow.quantizing.cache_scales import kv_scales_of
from quantflow.quantizing.gaudi_measurement import are_gaudis, measurement_from, refuse_ipex


def known_hashes(folder: Path | None) -> list[Path]:
    """The files in which measure may have kept the source's hashes."""
    return [] if folder is None else [folder / HASHES, folder.parent / HASHES]


def measurement_of(
    folder: Path | None,
    plan: Plan,
    *,
    scheme: str,
    source: ModelFiles,
    graph: Graph,
    progress: Progress,
    ranks: int = 1,
) -> tuple[Path | None, Measurement | None]:
    """The measurement, and the folder of its one rank; no folder where the files are Gaudi's.

    A measurement of as many ranks as quantize is merged here as `unify` merges it, since each card
    takes the scales of the whole.

    Args:
        folder: folder of a measurement or of one rank; Gaudi's files, as a folder or folder/prefix;
            or None.
        plan: the plan, which says what has to be measured.
        scheme: the recipe's word for the scheme.
        source: the model.
        graph: names of its linears.
        progress: listener for the model that Gaudi's files are taken for.
        ranks: number of cards that quantize.

    Raises:
        UsageError: a measurement is needed, and none is given.
        InputError: it is unfinished, or of several ranks that are not those that quantize.
        StatisticsError: the plan quantizes caches, and their amax was not measured.
    """
    where, measurement = _found(
        folder, plan, scheme=scheme, source=source, progress=progress, cards=ranks
    )
    # what is missing is said before hours are spent, not after them
    for layer in graph.layers:
        kv_scales_of(measurement, layer, plan.kv_cache)
    return where, measurement


def _found(
    folder: Path | None,
    plan: Plan,
    *,
    scheme: str,
    source: ModelFiles,
    progress: Progress,
    cards: int,
) -> tuple[Path | None, Measurement | None]:
    """The folder and its measurement, whose statistics are not looked into yet."""
    if folder is None:
        if plan.needs_measurement:
            needs = [
                *sorted(plan.needs),
                *([] if plan.kv_cache is None else ["the largest keys and values of the cache"]),
            ]
            needs += ["the calibration text"] if plan.learns else []
            raise UsageError(
                f"{plan.name}: {scheme} with {plan.method} needs {', '.join(needs)}, none is given",
                "run `quantflow measure` and give its folder with --measurement",
            )
        return None, None
    if are_gaudis(folder):
        return None, measurement_from(folder, plan, source=source, progress=progress, cards=cards)
    refuse_ipex(folder)
    if not (folder / "measurement.json").exists():
        ranks = sorted(folder.glob("rank-*-of-*"))
        if len(ranks) > 1 and len(ranks) == cards:
            return folder, _merged(folder, ranks)
        if len(ranks) > 1:
            reads = "one" if cards == 1 else f"one or, with --ranks {cards}, {cards}"
            groups = ", each merged of a group by unify" if "unified" in read_meta(ranks[0]) else ""
            raise InputError(
                f"{folder}: holds {len(ranks)} ranks{groups}; quantize reads {reads}",
                _one_of_all(folder),
            )
        folder = ranks[0] if ranks else folder
    if stage_folder.done(folder) is None and stage_folder.done(folder.parent) is None:
        raise InputError(
            f"{folder}: is unfinished or missing (no DONE.json)",
            "run `quantflow measure`; it continues",
        )
    measurement = read_measurement(folder)
    if measurement.meta["mesh"]["world"] != 1:
        raise InputError(
            f"{folder}: one of {measurement.meta['mesh']['world']} ranks",
            _one_of_all(folder.parent),
        )
    return folder, measurement


def _one_of_all(folder: Path) -> str:
    """The remedy for ranks that are no single measurement, merged in groups or not."""
    return (
        f"make one of all: `quantflow unify -m {folder} -o DIR` without -g and --ranks; give DIR "
        "as --measurement"
    )


def _merged(folder: Path, ranks: list[Path]) -> Measurement:
    """The ranks of a finished folder as one, as `unify` writes it."""
    for rank in ranks:
        if stage_folder.done(rank) is None and stage_folder.done(folder) is None:
            raise InputError(
                f"{rank}: is unfinished (no DONE.json)", "run the same `quantflow measure` again"
            )
    metas = {rank: read_meta(rank) for rank in ranks}
    with single_threaded(), torch.no_grad():
        (merged,) = unify(open_measurements(metas), [list(range(len(ranks)))])
        return recorded(merged)


def refuse_foreign(
    measurement: Measurement | None, *, model: Path, fingerprint: str, folder: Path | None
) -> None:
    """Refuse a measurement of another model.

    Args:
        measurement: the measurement; Gaudi's files were recognised already.
        model: the source folder.
        fingerprint: fingerprint of the source.
        folder: the measurement's folder.

    Raises:
        InputError: naming both.
    """
    measured = None if measurement is None else measurement.meta["model"]["fingerprint"]
    if measured is not None and measured != fingerprint:
        raise InputError(
            f"{folder}: measured on model {measured[:16]}, {model} is {fingerprint[:16]}",
            "measure this model, or give the measurement that belongs to it",
        )

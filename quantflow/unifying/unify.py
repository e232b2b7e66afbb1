"""Stage 3, unify: merge the measurements of several ranks into fewer, or expand one to more.

Reads    the rank folders of a measurement, the files of Gaudi's toolkit, or the rank folders of
         `quantize --ranks` and, if they were made file to file, the model that they were made from
Writes   <o>/rank-RRR-of-GGG/, one per group, or Gaudi's files of each group; all of <o> appears at
         once. Shards of one group become <o> itself, a quantize folder
Resumes  a finished result of the same ranks and groups is left alone
Fails    2 groups that do not cover every rank once or that no card would hold, 3 missing,
         duplicate, foreign or damaged ranks, a source that is gone and statistics that cannot be
         merged, 5 the folder is held, 7 a damaged shard

Statistics are read one at a time, so memory is that of two groups' results, whatever the number of
ranks: one is written while the next is merged. For shards (quantflow/unifying/shards.py) it is that
of a few units.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantflow import cpu_threads
from quantflow.core.determinism import single_threaded
from quantflow.core.parallel import Workers
from quantflow.errors import InputError, UsageError
from quantflow.files import stage_folder
from quantflow.files.outputs import output_folder
from quantflow.files.rank_folders import rank_folder
from quantflow.measuring.merging.grouping import consecutive_groups, parse_groups, some
from quantflow.measuring.merging.ranks import unify_each
from quantflow.measuring.record import (
    META_NAME,
    Measurement,
    open_measurements,
    read_measurement,
    read_meta,
    write_measurement,
)
from quantflow.progress import Progress
from quantflow.quantizing.gaudi_measurement import are_gaudis, refuse_ipex
from quantflow.quantizing.shards.share import shard_folders
from quantflow.unifying import gaudi as gaudi_unify
from quantflow.unifying.expand import expand, planned
from quantflow.unifying.job import UnifyJob
from quantflow.unifying.shards import COLUMNS as PART_COLUMNS
from quantflow.unifying.shards import REPORT, join, open_shards
from quantflow.unifying.shards import summary as summary_of_shards

_RANK_FOLDER = re.compile(r"rank-[0-9]{3,}-of-[0-9]{3,}")
AT_ONCE = 2  # results in memory: one is merged while another is on its way to the disk
_TOLD = 8  # lines about outliers; all of them are in measurement.json
COLUMNS = ("statistic", "rule", "count")


def run(job: UnifyJob, progress: Progress) -> Path:
    """Merge and return the folder written, or the existing one when nothing changed."""
    _refuse_overlap(job.measurement, job.output)
    if shard_folders(job.measurement):
        return _join(job, progress)
    if job.model is not None:
        raise UsageError(
            f"unify: --model {job.model} without quantized shards",
            "leave it out; only they need it",
        )
    if are_gaudis(job.measurement):
        return _unify_gaudis(job, progress)
    if job.expert_parallel is not None and job.expand is None:
        raise UsageError(
            "unify: --expert-parallel of a measurement of ours, which says what each rank holds",
            "leave it out; it is for the files of Gaudi's toolkit, and for --expand",
        )
    metas = {folder: read_meta(folder) for folder in rank_folders(job.measurement)}
    # unify names the rank of a folder that is missing.
    world = max(int(meta["mesh"]["world"]) for meta in metas.values())
    groups = _groups(job, world)
    inputs = {
        "ranks": [
            meta["digest"]
            for meta in sorted(metas.values(), key=lambda meta: int(meta["mesh"]["rank"]))
        ],
        "groups": groups,
        "allow_missing": job.allow_missing,
        "expand": job.expand,
        **({} if job.expert_parallel is None else {"expert_parallel": job.expert_parallel}),
    }
    with stage_folder.locked(job.output), single_threaded(), torch.no_grad():
        if stage_folder.is_up_to_date(job.output, inputs):
            progress.say("unify: up to date")
            return job.output
        stage_folder.refuse_other_result(job.output, inputs, force=job.force)
        measurements, count = _made(job, metas, groups)
        hashes: dict[str, str] = {}
        with (
            stage_folder.publish(
                job.output, stage="unify", inputs=inputs, hashes=hashes
            ) as temporary,
            # Workers end inside `publish`: no thread writes when the folder is finished or removed.
            Workers(AT_ONCE) as workers,
        ):
            written = workers.stream(partial(_write, temporary, count), enumerate(measurements))
            for rank in progress.steps(range(count), stage="unify", unit="rank"):
                files, unified = next(written)
                hashes |= files
                _tell(progress, rank, unified)
    return job.output


def settled(job: UnifyJob) -> UnifyJob:
    """The job with the folder that it writes.

    Raises:
        UsageError: it lies in what is read.
    """
    reads = {"the measurement": job.measurement, "the model": job.model}
    return replace(job, output=output_folder(job.output, reads=reads))


def _write(
    output: Path, count: int, numbered: tuple[int, Measurement]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Write one rank.

    Returns:
        The sha256 of its files by their name in the output, and its record of the merge.
    """
    rank, measurement = numbered
    folder = rank_folder(output, rank, count)
    folder.mkdir()
    hashes = write_measurement(folder, measurement)
    return {
        f"{folder.name}/{name}": digest for name, digest in hashes.items()
    }, measurement.meta.get("unified", {})


def _join(job: UnifyJob, progress: Progress) -> Path:
    """Put quantized shards together."""
    for flag, is_set in (
        ("--expand", job.expand is not None),
        ("--allow-missing", job.allow_missing),
        ("--expert-parallel", job.expert_parallel is not None),
    ):
        if is_set:
            raise UsageError(
                f"unify: {flag} with quantized shards",
                "every shard is needed; `quantize --ranks` makes more",
            )
    shards = open_shards(job.measurement)
    groups = _groups(job, len(shards)) or []
    return join(
        shards, job.output, groups=groups, model=job.model, force=job.force, progress=progress
    )


def report(result: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of the table that shows a `summary`."""
    head, rows = (
        (PART_COLUMNS, result["joined"]) if "joined" in result else (COLUMNS, result["merged"])
    )
    return head, [tuple(str(row[column]) for column in head) for row in rows]


def summary(folder: Path) -> dict[str, Any]:
    """The record of a finished folder, all ranks together."""
    if (folder / REPORT).is_file() or shard_folders(folder):
        return summary_of_shards(folder)
    if gaudi_unify.holds_account(folder):
        return gaudi_unify.summary(folder)
    metas = [read_meta(rank) for rank in rank_folders(folder)]
    rules: Counter[tuple[str, str]] = Counter()
    problems: dict[str, list[Any]] = {"missing": [], "outliers": [], "bounds": [], "unseen": []}
    for meta in metas:
        unified = meta.get("unified", {})
        for row in (*unified.get("merged", ()), *meta.get("expanded", {}).get("rules", ())):
            rules[row["statistic"], row["rule"]] += row["count"]
        for name, values in problems.items():
            values += unified.get(name, ())
    merged = [
        dict(zip(COLUMNS, (*key, count), strict=True)) for key, count in sorted(rules.items())
    ]
    mesh = {key: metas[0]["mesh"][key] for key in ("world", "tp", "dp", "ep")}
    return {"folder": str(folder), "mesh": mesh, "merged": merged, **problems}


def rank_folders(folder: Path) -> list[Path]:
    """The folders of every rank in a folder, which may be one rank's itself.

    Raises:
        InputError: there is none, or one is unfinished.
    """
    if (folder / META_NAME).is_file():
        return [folder]
    refuse_ipex(folder)
    folders = sorted(
        path
        for path in folder.glob("rank-*")
        if path.is_dir() and _RANK_FOLDER.fullmatch(path.name)
    )
    if not folders:
        raise InputError(
            f"{folder}: holds no rank-*-of-* folder",
            "give the -o folder of `quantflow measure`, or one with Gaudi's ..._hooks_maxabs... "
            "files",
        )
    for rank in folders:
        if stage_folder.done(rank) is None and stage_folder.done(folder) is None:
            raise InputError(
                f"{rank}: is unfinished (no DONE.json)", "run the same `quantflow measure` again"
            )
    return folders


def _unify_gaudis(job: UnifyJob, progress: Progress) -> Path:
    return gaudi_unify.run(
        job.measurement,
        job.output,
        groups_of=lambda world: _groups(job, world) or [],
        allow_missing=job.allow_missing,
        expert_parallel=job.expert_parallel,
        expand=job.expand,
        force=job.force,
        progress=progress,
    )


def _refuse_overlap(measurement: Path, output: Path) -> None:
    """Refuse an output inside the input, or around it: the next merge would count it."""
    source = measurement.resolve()
    target = output.resolve()
    if target.is_relative_to(source) or source.is_relative_to(target):
        raise UsageError(
            f"-o {output} and -m {measurement}: one lies in the other",
            "write beside the measurement",
        )


def _groups(job: UnifyJob, world: int) -> list[list[int]] | None:
    asked = [name for name in ("groups", "ranks", "expand") if getattr(job, name) not in (None, ())]
    if len(asked) > 1:
        raise UsageError(f"unify: {' beside '.join(asked)}", "give one of -g, --ranks and --expand")
    if job.expand is not None:
        return None
    if job.ranks is not None:
        return consecutive_groups(job.ranks, world)
    return parse_groups(job.groups, world=world) if job.groups else [list(range(world))]


def _made(
    job: UnifyJob, metas: Mapping[Path, dict[str, Any]], groups: list[list[int]] | None
) -> tuple[Iterator[Measurement], int]:
    """The measurements to be written, made one after the other, and how many they are."""
    if groups is not None:
        with Workers(cpu_threads.usable_cores()) as workers:
            opened = open_measurements(metas, workers=workers)
        return unify_each(opened, groups, allow_missing=job.allow_missing), len(groups)
    if len(metas) > 1:
        raise InputError(
            f"{job.measurement}: holds {len(metas)} ranks, one is expanded",
            "run `quantflow unify` on it first",
        )
    whole = read_measurement(*metas)
    placements = planned(
        whole.meta["tensors"], ranks=job.expand or 0, expert_parallel=job.expert_parallel
    )
    return expand(whole, placements=placements), len(placements)


def _tell(progress: Progress, rank: int, unified: dict[str, Any]) -> None:
    """Say what somebody should look at."""
    outliers = unified.get("outliers", [])
    for outlier in outliers[:_TOLD]:
        progress.say(
            f"unify: {outlier['key']}: rank {outlier['rank']} saw {outlier['amax']:.4g}, the "
            f"median rank {outlier['median']:.4g}"
        )
    if len(outliers) > _TOLD:
        progress.say(
            f"unify: {len(outliers) - _TOLD} more such ranks, see unified.outliers in "
            "measurement.json"
        )
    if unified.get("missing"):
        progress.say(f"unify: rank {rank} is without ranks {some(unified['missing'])}")
    if unified.get("bounds"):
        progress.say(
            f"unify: {len(unified['bounds'])} statistics bound what was not measured, such as "
            f"{unified['bounds'][0]}"
        )
    if unified.get("unseen"):
        progress.say(
            f"unify: {len(unified['unseen'])} experts got no token on any rank: "
            f"{', '.join(unified['unseen'][:4])}"
        )

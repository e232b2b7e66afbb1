"""Stage 3, unify: merge what several ranks measured into what fewer would have measured.

Reads    the rank folders of a measurement
Writes   <o>/rank-RRR-of-GGG/, one per group; all of <o> appears at once
Resumes  a finished result of the same ranks and groups is left alone
Fails    2 groups that do not cover every rank once, 3 missing, duplicate, foreign or damaged ranks, 5 the folder is held
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantflow.errors import InputError
from quantflow.measurements.contributions import outliers
from quantflow.measurements.record import Measurement, read_measurement, write_measurement
from quantflow.measurements.unify import parse_groups, unify
from stages import _workspace
from stages._progress import Progress
from stages.measure import rank_folder


@dataclass(frozen=True, kw_only=True)
class Job:
    """One merge.

    Attributes:
        measurement: the folder that holds rank-*-of-*.
        groups: as `-g` takes them; empty means all ranks into one.
        replace: redo a finished result that was made from other inputs, instead of refusing.
    """

    measurement: Path
    output: Path
    groups: tuple[str, ...] = ()
    replace: bool = False


def run(job: Job, progress: Progress) -> Path:
    """Merge and return the folder written, or the existing one when nothing changed."""
    measurements = read_ranks(job.measurement)
    world = max(int(m.meta["mesh"]["world"]) for m in measurements)  # a folder that is missing is unify's to name
    groups = parse_groups(job.groups, world=world) if job.groups else [list(range(world))]
    inputs = {"ranks": [m.meta["digest"] for m in measurements], "groups": groups}
    with _workspace.locked(job.output):
        if _workspace.is_up_to_date(job.output, inputs):
            progress.say("unify: up to date")
            return job.output
        _workspace.refuse_other_result(job.output, inputs, force=job.replace)
        for found in outliers(measurements):
            progress.say(f"unify: {found.key}: rank {found.rank} saw {found.amax:.4g}, the median rank {found.median:.4g}")
        unified = unify(measurements, groups)
        with _workspace.publish(job.output, stage="unify", inputs=inputs) as temporary:
            for rank, measurement in enumerate(unified):
                folder = rank_folder(temporary, rank, len(unified))
                folder.mkdir()
                write_measurement(folder, measurement)
    return job.output


def read_ranks(folder: Path) -> Sequence[Measurement]:
    """Return the measurements of every finished rank in a folder, in rank order.

    Raises:
        InputError: there is none, or one is unfinished.
    """
    folders = sorted(folder.glob("rank-*-of-*"))
    if not folders:
        raise InputError(f"{folder}: holds no rank-*-of-* folder", "give the -o folder of `quantflow measure`")
    for rank in folders:
        if _workspace.done(rank) is None and _workspace.done(folder) is None:
            raise InputError(f"{rank}: is unfinished (no DONE.json)", "run the same `quantflow measure` again")
    return [read_measurement(rank) for rank in folders]

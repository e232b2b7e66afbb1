"""Statistics that an entry needs and its measurement lacks: taken now, on the tokens that it kept.

A measurement that was taken for one algorithm may lack another's statistics: gptq's has no
gradients, which yaqa and best need. The rest is measured beside it, together with the statistics
that it has, on its tokens in their order: `1-measure` gets `1-measure-with-gradient`, which equals
one measurement of all these statistics. The first stays as it is, since results that were made from
it name it.
"""

from pathlib import Path

from quantflow.distributed.launch import launched_rank
from quantflow.files.canonical import read_json
from quantflow.files.outputs import beside
from quantflow.files.stage_folder import done
from quantflow.measuring.job import MeasureJob
from quantflow.measuring.record import CALIBRATION_NAME, META_NAME
from quantflow.observers import OBSERVERS
from quantflow.planning.recipe import Calibration, Measure
from quantflow.planning.requirements import statistics_for
from quantflow.progress import Progress
from quantflow.quantizing.job import QuantizeJob


def completed(job: QuantizeJob, progress: Progress) -> Path | None:
    """A measurement with all that the entry needs: the job's, or one beside it, taken now.

    Gaudi's files, several ranks and unfinished folders are left to quantize, which says what is
    wrong with them.

    Raises:
        QuantflowError: see MeasureJob.run.
    """
    measurement = job.measurement
    if measurement is None or launched_rank() is not None:
        return measurement
    rank = _only_rank(measurement)
    if rank is None:
        return measurement
    meta = read_json(rank / META_NAME)
    has = set(meta.get("observers", ()))
    missing = [name for name in OBSERVERS if name in set(statistics_for([job.entry])) - has]
    if not missing or meta.get("mesh", {}).get("world") != 1:
        return measurement
    output = beside(measurement, f"-with-{'-'.join(missing)}")
    progress.say(
        f"quantize {job.entry.name}: {measurement} has no {', '.join(missing)}; measuring it into "
        f"{output}"
    )
    calibration = Calibration(
        source=str(rank / CALIBRATION_NAME),
        samples=meta["calibration"]["samples"],
        sequence_length=meta["calibration"]["sequence_length"],
        pack=False,
    )
    options = Measure(
        stats=tuple(name for name in OBSERVERS if name in has | set(missing)),
        experts=meta.get("experts"),
    )
    return (
        MeasureJob(
            model=job.model,
            output=output,
            calibration=calibration,
            options=options,
            seed=meta["seed"],
            resources=job.resources,
            compute=job.compute,
            force=True,
        )
        .run(progress)
        .folder
    )


def _only_rank(measurement: Path) -> Path | None:
    """Folder of a finished measurement's only rank; None for any other folder."""
    if (measurement / META_NAME).is_file():
        ranks = [measurement]
    else:
        ranks = sorted(measurement.glob("rank-*-of-*"))
    if len(ranks) != 1 or not (ranks[0] / META_NAME).is_file() or done(ranks[0]) is None:
        return None
    return ranks[0]

"""What an artifact needs of a measurement, and what a measurement lacks: measured then, on the tokens that it kept.

A measurement that was taken for one algorithm has not what another reads: gptq's has no gradients,
which yaqa and best need. The rest is measured beside it, together with what it has, on its tokens
in their order: `1-measure` gets `1-measure-with-gradient`, which is what one measurement of all
these statistics would have been. The first stays as it is, since results that were made from it
name it.
"""

from pathlib import Path

from quantflow.distributed.launch import launched_rank
from quantflow.files.canonical import read_json
from quantflow.files.outputs import beside
from quantflow.files.stage_folder import done
from quantflow.measuring.record import CALIBRATION_NAME, META_NAME
from quantflow.models.open import graph_for, open_files
from quantflow.observers import OBSERVERS
from quantflow.planning.plan import resolve
from quantflow.planning.recipe import Calibration, Compute, Quantize, Resources
from quantflow.planning.requirements import statistics_for
from quantflow.progress import Progress


def needs_measurement(entry: Quantize, model: Path) -> bool:
    """Return whether an artifact cannot be made from the weights alone.

    Raises:
        InputError: the model cannot be opened.
        UsageError: the entry does not fit the model.
    """
    if entry.linears:  # only what reads nothing rounds named linears; quantize refuses the rest
        return False
    source = open_files(model)
    shapes = {name: info.shape for name, info in source.checkpoint.infos.items()}
    plan = resolve(entry, graph_for(source.config), shapes)
    return plan.needs_measurement or entry.mixed


def completed(
    measurement: Path,
    entry: Quantize,
    *,
    model: Path,
    resources: Resources,
    progress: Progress,
    compute: Compute = Compute(),
) -> Path:
    """Return a measurement that has what an artifact needs: this one, or one beside it that is taken now.

    Gaudi's files, several ranks and unfinished folders are returned as they are; quantize says what
    is wrong with them.

    Args:
        measurement: a folder with one rank, or the rank's own.
        entry: of the artifact.
        model: its source.
        resources: limits of memory and disk.
        progress: is told what is measured.
        compute: the device that runs the layers, and in which dtype.

    Raises:
        QuantflowError: as measure.
    """
    ranks = (
        [measurement]
        if (measurement / META_NAME).is_file()
        else sorted(measurement.glob("rank-*-of-*"))
    )
    if (
        launched_rank() is not None
        or len(ranks) != 1
        or not (ranks[0] / META_NAME).is_file()
        or done(ranks[0]) is None
    ):
        return measurement
    meta = read_json(ranks[0] / META_NAME)
    has = set(meta.get("observers", ()))
    missing = [name for name in OBSERVERS if name in set(statistics_for([entry])) - has]
    if not missing or meta.get("mesh", {}).get("world") != 1:
        return measurement
    output = beside(measurement, f"-with-{'-'.join(missing)}")
    progress.say(
        f"quantize {entry.name}: {measurement} has no {', '.join(missing)}; measuring it into "
        f"{output}"
    )
    kept = meta["calibration"]
    calibration = Calibration(
        source=str(ranks[0] / CALIBRATION_NAME),
        samples=kept["samples"],
        sequence_length=kept["sequence_length"],
        pack=False,
    )
    # here: it imports transformers' model code, and most artifacts lack nothing
    from quantflow.measuring import measure

    job = measure.MeasureJob(
        model=model,
        output=output,
        calibration=calibration,
        seed=meta["seed"],
        stats=tuple(name for name in OBSERVERS if name in has | set(missing)),
        experts=meta.get("experts"),
        replace=True,
        resources=resources,
        compute=compute,
    )
    return measure.run(job, progress)

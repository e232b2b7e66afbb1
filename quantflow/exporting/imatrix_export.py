"""Stage 4 for llama.cpp's quantizer: a measurement as its importance matrix.

Reads    the folder of `quantflow measure` or unify, and the model that was measured
Writes   <o>: imatrix.gguf, imatrix.dat in the older form, and DONE.json; the whole folder appears
         at once
Resumes  a finished result of the same inputs is left alone
Fails    2 no --model, or several ranks, 3 unusable input, 5 the folder is held, 6 a family without
         names of llama.cpp's

The mean squares are those of `measure --stats mean_square`, or else the diagonals of its Hessians.
The files have every linear of the layers, experts of a layer in one entry. An expert that saw no
token has a count of 0.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from quantflow.errors import InputError, StatisticsError, UsageError
from quantflow.exporting.job import ExportJob
from quantflow.files import stage_folder
from quantflow.formats.llama_cpp.experts import file_tensors
from quantflow.formats.llama_cpp.imatrix import (
    Entry,
    ImportanceMatrix,
    rows_of,
    write_gguf,
    write_older,
)
from quantflow.measuring.record import Measurement, read_measurement
from quantflow.models.configuration import load_config
from quantflow.models.open import ModelFiles, open_files
from quantflow.models.source import fingerprint
from quantflow.numerics.statistics import COUNT
from quantflow.observers.hessian import HESSIAN_SUM
from quantflow.observers.keys import Key
from quantflow.observers.mean_square import POWER_SUM, MeanSquareObserver
from quantflow.progress import Progress
from quantflow.unifying.unify import rank_folders

VERSION = 1
GGUF, OLDER = "imatrix.gguf", "imatrix.dat"


def run(job: ExportJob, progress: Progress) -> Path:
    """Write the files and return their folder; one that is up to date is left alone."""
    if job.model is None:
        raise UsageError(
            f"export {job.output.name}: format imatrix without a model, whose names it writes",
            "give --model, the model that was measured",
        )
    folders = rank_folders(job.source)
    if len(folders) > 1:
        raise UsageError(
            f"{job.source}: {len(folders)} ranks, an importance matrix is of all tokens",
            "run `quantflow unify` first",
        )
    measurement, source = read_measurement(folders[0]), open_files(job.model)
    model = _same_model(job, measurement, source)
    made_from = {"measurement": measurement.meta["digest"], "model": model, "version": VERSION}
    with stage_folder.locked(job.output):
        if stage_folder.is_up_to_date(job.output, made_from):
            progress.say(f"export {job.output.name}: up to date")
            return job.output
        stage_folder.refuse_other_result(job.output, made_from, force=job.force)
        matrix = matrix_of(measurement, source)
        with stage_folder.publish(job.output, stage="export", inputs=made_from) as folder:
            write_gguf(folder / GGUF, matrix)
            write_older(folder / OLDER, matrix)
    unseen = sum(int((entry.counts == 0).sum()) for entry in matrix.entries.values())
    if unseen:
        progress.say(
            f"export {job.output.name}: {unseen} matrices of experts saw no token; their inputs "
            "count alike"
        )
    return job.output


def _same_model(job: ExportJob, measurement: Measurement, source: ModelFiles) -> str:
    """The model's fingerprint.

    Raises:
        InputError: the measurement is another model's.
    """
    actual, expected = fingerprint(source.checkpoint), measurement.meta["model"]["fingerprint"]
    if actual != expected:
        raise InputError(
            f"{job.source}: measured on model {expected[:16]}, {job.model} is {actual[:16]}",
            "give the model that was measured",
        )
    return actual


def matrix_of(measurement: Measurement, source: ModelFiles) -> ImportanceMatrix:
    """The importance matrix of a measurement.

    Raises:
        StatisticsError: it has neither mean squares nor Hessians.
        UnsupportedError: the family has no names of llama.cpp's.
    """
    shapes = {name: tuple(info.shape) for name, info in source.checkpoint.infos.items()}
    rows = rows_of(file_tensors(load_config(source.checkpoint), shapes))
    linears: dict[str, list[str]] = {}
    for linear, row in rows.items():  # those of an entry in the order of its matrices
        linears.setdefault(row.entry, []).append(linear)
    calibration = measurement.meta["calibration"]
    return ImportanceMatrix(
        entries={entry: _entry(measurement, names) for entry, names in linears.items()},
        datasets=(f"quantflow calibration {calibration['hash'][:16]}",),
        chunks=calibration["samples"],
        chunk_size=calibration["sequence_length"],
    )


def _entry(measurement: Measurement, linears: Sequence[str]) -> Entry:
    """The entry of some linears, a matrix of each."""
    sums, counts = zip(*(_seen(measurement, name) for name in linears), strict=True)
    return Entry(sums=torch.cat(sums).float(), counts=torch.stack(counts).float())


def _seen(measurement: Measurement, name: str) -> tuple[Tensor, Tensor]:
    """The sum of squares of each input of a linear, [I], and the number of tokens, []."""
    found = measurement.statistics
    count = found.get(str(Key(name, "input", COUNT.name)))
    squares = found.get(str(Key(name, "input", POWER_SUM.name)))
    if squares is None and (key := str(Key(name, "input", HESSIAN_SUM.name))) in found:
        squares = found[key].diagonal()
    if squares is None or count is None:
        raise StatisticsError(
            f"{name}: the measurement has no mean squares of its input",
            f"measure with --stats {MeanSquareObserver.NAME}",
        )
    return squares, count

"""Stage 4 of a model that is not quantized: its tensors as they are, in files of another size.

Reads    a model
Writes   <o>: config.json, weights, side files and DONE.json; the whole folder appears at once
Resumes  a finished result of the same inputs is left alone
Fails    2 an option of artifacts, an unknown dtype, or one folder for both; 3 unusable input, 5 the
         folder is held or the disk is full, 7 a file differs from what was written

Small files let each of several ranks, and machines with little memory, read what they need.
"""

from pathlib import Path

from quantflow.errors import UsageError, nearest
from quantflow.exporting.dequantized_export import CHOICES, write_dequantized
from quantflow.exporting.job import ExportJob
from quantflow.progress import Progress


def run(job: ExportJob, progress: Progress) -> Path:
    """Write the folder and return it; one that is up to date is left alone."""
    if job.model is not None:
        raise UsageError(
            f"export: --model {job.model} beside {job.source}, which is a model",
            "leave --model out",
        )
    if job.options.dtype is not None and job.options.dtype not in CHOICES:
        cause = f"export: dtype {job.options.dtype!r} is unknown"
        raise UsageError(cause, nearest(job.options.dtype, list(CHOICES)))
    if job.output.resolve() == job.source.resolve():
        raise UsageError(
            f"{job.output}: the folder that is read and the one that is written", "give two folders"
        )
    progress.say(
        f"export {job.output.name}: {job.source} is not quantized; its tensors are written in "
        f"files of {job.options.shard_size} at most"
    )
    return write_dequantized(job, progress, dtype=job.options.dtype)

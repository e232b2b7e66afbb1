"""The answers of a model to tasks of lm-eval, in one process or in several that share it.

Reads    an artifact or a model; files and data sets of the tasks
Writes   nothing
Resumes  nothing
Fails    2 a model that cannot be cut into so many parts, 6 one that the lean decoder does not run;
         what tasks and loading raise

Several processes give the bits of one where our kernels multiply
(quantflow/runtime/ranks/tensor_parallel.py), and agree within float32's rounding where torch does.
Scores do not name the number of processes. Rank 0 asks, and tells the others what to run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantflow.progress import Progress
from quantflow.runtime.load import Loaded, load
from quantflow.runtime.ranks import processes as rank_processes
from quantflow.validating.harness import TaskOptions, evaluate, protocol

VERB = "tasks"  # of messages


@dataclass(frozen=True, kw_only=True)
class AnswersJob:
    """A model that is asked.

    Attributes:
        artifact: folder of an artifact, or of a model that is not quantized.
        tasks: names, limit, shots and template.
        stage: name in messages, beginning with VERB.
        exact: whether inputs that the schemes leave alone are never rounded.
        rounded_inputs: whether they are, as for `quantflow.load`.
        backend, dtype: backend and dtype of the decoder, as `runtime.load.load` takes them.
        ranks: number of processes that share the model, each with a part of every matrix.
    """

    artifact: Path
    tasks: TaskOptions
    stage: str
    exact: bool = False
    rounded_inputs: bool = False
    backend: str = "auto"
    dtype: str = "float32"
    ranks: int = 1

    def run(self, progress: Progress) -> dict[str, Any] | None:
        """Ask; see `run` below."""
        return run(self, progress)


def run(job: AnswersJob, progress: Progress) -> dict[str, Any] | None:
    """Ask, in this process or in those that share the model.

    Returns:
        `protocol`, what decides the tokens of the questions, and `document`, lm-eval's own, as
        plain data; None on a rank that is not the first.

    Raises:
        QuantflowError: the model cannot be loaded or shared, or a task cannot be asked.
    """
    if rank_processes.starts(job.ranks):
        return rank_processes.start(VERB, job, world=job.ranks, progress=progress)
    with rank_processes.joined(VERB, job.ranks) as communicator:
        loaded = load(
            job.artifact,
            decoder="auto",
            backend=job.backend,
            dtype=getattr(torch, job.dtype),
            exact=job.exact,
            rounded_inputs=job.rounded_inputs,
            communicator=communicator,
        )
        return rank_processes.drive(loaded, communicator, lambda led: _answers(job, led, progress))


def _answers(job: AnswersJob, loaded: Loaded, progress: Progress) -> dict[str, Any]:
    document = evaluate(loaded, job.tasks, stage=job.stage, progress=progress)
    return {"protocol": protocol(loaded, job.tasks), "document": _plain(document)}


def _plain(value: Any) -> Any:
    """lm-eval's document as plain data."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return value.item() if hasattr(value, "item") else str(value)

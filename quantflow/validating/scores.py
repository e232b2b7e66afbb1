"""The scores of one model in tasks, with nothing beside it: no gate, no verdict.

Reads    a model or an artifact; files and data sets of the tasks
Writes   <report>/scores.json, and tasks.json, lm-eval's own document
Resumes  scores of the same model and tasks are left alone
Fails    2 no task, 3 unusable model, 5 too little memory; what tasks and loading raise

The runtime runs the model as `generate` does, whole in memory, in the dtype that is asked for.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isclose, sqrt
from statistics import fmean, stdev
from typing import Any

from quantflow.core.determinism import tools
from quantflow.errors import UnsupportedError
from quantflow.files import disk, stage_folder
from quantflow.files.canonical import read_json
from quantflow.files.checkpoint import open_checkpoint
from quantflow.files.digests import Digests
from quantflow.models.source import fingerprint
from quantflow.progress import Progress
from quantflow.validating import task_scores
from quantflow.validating.job import ScoreJob

VERSION = 1


def run(job: ScoreJob, progress: Progress) -> dict[str, Any]:
    """The content of scores.json: model, protocol, and score by task.

    Raises:
        UnsupportedError: another device than the CPU.
        QuantflowError: a task that cannot be asked, or a model that cannot be loaded.
    """
    if job.compute.device != "cpu":
        raise UnsupportedError(
            f"validate: tasks with --device {job.compute.device}", "leave --device out"
        )
    folder = job.folder
    task_scores.check_tasks(job.model, None, job.options)
    inputs = {
        "model": fingerprint(open_checkpoint(job.model), Digests()),
        "tasks": [*job.options.tasks],
        "files": task_scores.files_of(job.options),
        "asked": {
            key: asdict(job.options)[key]
            for key in ("limit", "shots", "chat_template", "exact", "rounded_inputs")
        },
        "dtype": job.compute.model_dtype,
        "version": VERSION,
        "tools": tools(),
    }
    with stage_folder.locked(folder):
        if stage_folder.is_up_to_date(folder, inputs):
            progress.say(f"validate {job.model.name}: up to date")
            result: dict[str, Any] = read_json(folder / "scores.json")
            return result
        parts = ("scores.json", "tasks.json")
        stage_folder.refuse_other_result(folder, inputs, force=job.force, parts=parts)
        answers = task_scores.answers_of(
            job.model,
            options=job.options,
            resources=job.resources,
            dtype=job.compute.model_dtype,
            progress=progress,
        )
        document = answers["document"]
        result = {
            "model": job.model.name,
            "fingerprint": inputs["model"],
            "protocol": answers["protocol"] | {"dtype": job.compute.model_dtype},
            "scores": {name: _score(name, document) for name in sorted(document["samples"])},
        }
        with stage_folder.publish(folder, stage="validate", inputs=inputs) as written:
            for name, content in (("scores.json", result), ("tasks.json", document)):
                disk.write_file(
                    written / name, json.dumps(content, indent=1, sort_keys=True).encode()
                )
    return result


def _score(name: str, document: Mapping[str, Any]) -> dict[str, Any]:
    metric, value = task_scores.first_metric(name, document)
    answers = [sample.get(metric) for sample in document["samples"][name]]
    return {
        "metric": metric,
        "higher_is_better": document["higher_is_better"][name][metric],
        "version": document["versions"][name],
        "samples": len(answers),
        "score": value,
        "standard_error": _error_of_mean(answers, value),
    }


def _error_of_mean(answers: Sequence[Any], mean: float) -> float | None:
    """The standard error of a score that is the mean of its documents'; None of another."""
    numbers = [float(answer) for answer in answers if isinstance(answer, int | float)]
    if len(numbers) != len(answers) or len(numbers) < 2 or not isclose(fmean(numbers), mean):
        return None
    return stdev(numbers) / sqrt(len(numbers))

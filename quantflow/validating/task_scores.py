"""The scores of an artifact and of its source in tasks, and the recovery of the source's score.

    {"protocol": {limit, shots, chat_template, bos, lm_eval, dtype},
     "scores": {task: {"metric", "higher_is_better", "version", "samples",
                       "baseline", "artifact", "recovery",
                       "answers": {"baseline": "0110", "artifact": "0111"} or null}}}

`recovery` is the artifact's score over the source's, in percent; of a metric that is better when it
is lower the source's over the artifact's; null where the divisor is 0. `answers` has a digit for
each document, in the data set's order: 1 is right. It is null where a document's score is neither 0
nor 1.

Both run on the runtime, in float32, with the weights of one of them in memory at a time, of one
process or of several that share it. What the source answers is kept for the next artifact.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantflow import process_memory
from quantflow.core.determinism import tools
from quantflow.distributed.launch import launched_rank
from quantflow.errors import InputError, ResourceError, UnsupportedError, UsageError, extra
from quantflow.files import disk
from quantflow.files.canonical import canonical_json, digest_of, file_digest, read_json
from quantflow.files.checkpoint import open_checkpoint
from quantflow.models.tokenizer import load_tokenizer
from quantflow.planning.recipe import Resources, Validate
from quantflow.planning.resources import memory_limit
from quantflow.progress import Progress
from quantflow.runtime.ranks import processes as rank_processes
from quantflow.shipped import SHIPPED
from quantflow.units import size as text_of

if TYPE_CHECKING:
    from quantflow.validating.harness import TaskOptions
    from quantflow.validating.task_answers import AnswersJob

# the metric that stands for a task, where it has one of them
_FIRST = ("acc_norm", "acc", "exact_match")
_FLOATS = frozenset({"F32", "F16", "BF16"})
_NAMED = frozenset({".yaml", ".yml", ".jsonl", ".py"})  # what a task's YAML may name beside it


@dataclass(frozen=True, kw_only=True)
class TaskScores:
    """The record of tasks that a validation keeps, and lm-eval's own documents of both models."""

    record: Mapping[str, Any]
    baseline: Mapping[str, Any]
    artifact: Mapping[str, Any]


def check_tasks(artifact: Path, baseline: Path | None, options: Validate) -> list[str]:
    """The names of the tasks that will be asked, each of a group.

    Tasks that cannot be asked are refused before anything runs. A model alone has no baseline.

    Raises:
        UnsupportedError: lm-eval is not installed, or several ranks cannot share a model.
        UsageError: a task that nobody knows, ranks without a task, or a model that cannot be cut
            into so many parts.
        InputError: documents that cannot be read, no tokenizer, or one without the chat template
            that is asked for.
    """
    if not options.tasks:
        if options.ranks > 1:
            raise UsageError(
                f"validate: {options.ranks} ranks without tasks",
                "give --tasks: the rest runs in one process",
            )
        return []
    if find_spec("lm_eval") is None:
        raise UnsupportedError("--tasks: lm-eval is not installed", extra("eval"))
    from quantflow.validating import harness

    tokenizer = load_tokenizer(artifact)
    if options.chat_template:
        harness.refuse_no_template(tokenizer, str(artifact))
    if options.ranks > 1:
        if launched_rank() is not None:
            cause = f"validate: {options.ranks} ranks, and torchrun started this process"
            raise UsageError(cause, "start validate once, without torchrun")
        for folder in (artifact, *(() if baseline is None else (baseline,))):
            rank_processes.check("validate", _job(folder, options), world=options.ranks)
    return list(harness.loaded_tasks(_asked(options)).tasks)


def files_of(options: Validate) -> dict[str, str]:
    """The hash of every local file that tasks are read from: a YAML, and neighbours it can name."""
    hashes = {}
    for name in options.tasks:
        path = (
            SHIPPED / "tasks" / f"{name}.yaml"
            if not name.endswith((".yaml", ".yml"))
            else Path(name)
        )
        if path.is_file():
            for file in sorted(
                each for each in path.parent.iterdir() if each.suffix in _NAMED and each.is_file()
            ):
                hashes[f"{name} {file.name}"] = file_digest(file)
    return hashes


def score_tasks(
    artifact: Path,
    baseline: Path,
    *,
    options: Validate,
    resources: Resources,
    kept: Path,
    key: str,
    progress: Progress,
) -> TaskScores:
    """The scores of both models.

    Args:
        artifact: folder of the artifact.
        baseline: folder of its source.
        options: names, limit, shots, template and ranks.
        resources: limits of memory and disk.
        kept: folder of the baseline's answers.
        key: digest of the baseline.
        progress: receiver of progress.

    Raises:
        ResourceError: a model does not fit into memory.
        InputError: the tokenizers of the two write different questions.
    """
    from quantflow.validating import task_answers

    _refuse_beyond_memory(artifact, resources)
    answers = task_answers.run(_as_asked(_job(artifact, options), options), progress)
    assert answers is not None  # this process is no rank
    protocol, document = answers["protocol"], answers["document"]
    key = digest_of([key, list(options.tasks), protocol, files_of(options), tools()])
    path = kept / f"tasks-{key}.json"
    source = _kept(path, key)
    if source is None:
        _refuse_beyond_memory(baseline, resources)
        answers = task_answers.run(
            replace(_job(baseline, options), stage="tasks of the source"), progress
        )
        assert answers is not None
        source = answers["document"]
        disk.make_folder(kept)
        disk.write_shared(
            path, canonical_json({"key": key, "document": source, "digest": digest_of(source)})
        )
    _refuse_other_questions(artifact, source, document)
    scores = {name: _score(name, source, document) for name in sorted(document["samples"])}
    return TaskScores(
        record={"protocol": protocol, "scores": scores}, baseline=source, artifact=document
    )


def answers_of(
    folder: Path, *, options: Validate, resources: Resources, dtype: str, progress: Progress
) -> dict[str, Any]:
    """The answers of one model, as `quantflow.validating.task_answers.run` has them.

    Raises:
        ResourceError: it does not fit into memory.
    """
    from quantflow.validating import task_answers

    _refuse_beyond_memory(folder, resources)
    job = replace(_as_asked(_job(folder, options), options), dtype=dtype)
    answers = task_answers.run(job, progress)
    assert answers is not None  # this process is no rank
    return answers


def first_metric(name: str, document: Mapping[str, Any]) -> tuple[str, float]:
    """The metric that stands for a task in lm-eval's document, and its value."""
    better = document["higher_is_better"][name]
    metric = next(each for each in (*_FIRST, *better) if each in better)
    results = document["results"][name]
    return metric, next(results[key] for key in results if key.split(",")[0] == metric)


def _asked(options: Validate) -> "TaskOptions":
    from quantflow.validating.harness import TaskOptions

    return TaskOptions(
        names=options.tasks,
        limit=options.limit,
        shots=options.shots,
        chat_template=options.chat_template,
    )


def _job(folder: Path, options: Validate) -> "AnswersJob":
    from quantflow.validating.task_answers import AnswersJob

    return AnswersJob(
        artifact=folder, tasks=_asked(options), stage=f"tasks of {folder.name}", ranks=options.ranks
    )


def _as_asked(job: "AnswersJob", options: Validate) -> "AnswersJob":
    """The job with inputs treated as the options say."""
    return replace(job, exact=options.exact, rounded_inputs=options.rounded_inputs)


def _refuse_beyond_memory(folder: Path, resources: Resources) -> None:
    """Refuse a model whose weights do not fit.

    Raises:
        ResourceError: with what is needed and what there is.
    """
    reason = beyond_memory(folder, resources)
    if reason is not None:
        raise ResourceError(
            f"tasks: {reason}", "leave --tasks out: the rest of validate takes one layer at a time"
        )


def beyond_memory(folder: Path, resources: Resources) -> str | None:
    """The reason why a model's weights do not fit into memory, None where they do.

    Floats are float32 in memory, integers as stored.
    """
    infos = open_checkpoint(folder).infos.values()
    weights = sum(
        4 * math.prod(info.shape) if info.dtype in _FLOATS else info.nbytes for info in infos
    )
    resident = process_memory.usage().resident
    limit, why = memory_limit(resources, resident=resident)
    if resident + weights <= limit:
        return None
    return (
        f"the weights of {folder} take {text_of(weights)} beside {text_of(resident)}, "
        f"{why} is {text_of(limit)}"
    )


def _refuse_other_questions(
    artifact: Path, source: Mapping[str, Any], document: Mapping[str, Any]
) -> None:
    """Refuse scores of different questions.

    Raises:
        InputError: naming the first.
    """
    for name, samples in document["samples"].items():
        for ours, theirs in zip(samples, source["samples"][name], strict=True):
            if any(ours[key] != theirs[key] for key in ("doc_hash", "prompt_hash", "target_hash")):
                raise InputError(
                    f"{artifact}: task {name}, document {ours['doc_id']}: its question is not "
                    "that of the source",
                    "compare the chat templates of the two, and check that the task has one order",
                )


def _score(name: str, source: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    metric, ours = first_metric(name, document)
    values = {"baseline": first_metric(name, source)[1], "artifact": ours}
    better = document["higher_is_better"][name]
    over, under = (
        (values["artifact"], values["baseline"])
        if better[metric]
        else (values["baseline"], values["artifact"])
    )
    answers = {
        model: _answers(answers_document["samples"][name], metric)
        for model, answers_document in (("baseline", source), ("artifact", document))
    }
    return {
        "metric": metric,
        "higher_is_better": better[metric],
        "version": document["versions"][name],
        "samples": len(document["samples"][name]),
        **values,
        "recovery": 100 * over / under if under else None,
        "answers": None if None in answers.values() else answers,
    }


def _answers(samples: Sequence[Mapping[str, Any]], metric: str) -> str | None:
    ordered = [
        sample.get(metric) for sample in sorted(samples, key=lambda sample: sample["doc_id"])
    ]
    return (
        "".join("1" if value else "0" for value in ordered)
        if all(value in (0, 1) for value in ordered)
        else None
    )


def _kept(path: Path, key: str) -> dict[str, Any] | None:
    try:
        record = read_json(path)
        document: dict[str, Any] = record["document"]
        return (
            document if record["key"] == key and record["digest"] == digest_of(document) else None
        )
    except (InputError, KeyError, TypeError):  # missing or damaged: asked again, never used
        return None

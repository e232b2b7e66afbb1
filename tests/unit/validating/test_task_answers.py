"""Tasks of one process, and of two that share the model."""

import json
from dataclasses import replace

import pytest

from quantflow.progress import SILENT
from quantflow.runtime.ranks import processes as rank_processes
from quantflow.validating import task_answers
from quantflow.validating.harness import TaskOptions
from quantflow.validating.task_answers import AnswersJob


@pytest.mark.slow
def test_two_processes_answer_with_the_bits_of_one_and_one_document_is_returned(llama, monkeypatch):
    worlds, launch = [], rank_processes.launch

    def counted(verb, job, *, ranks, **words):
        worlds.append(ranks)
        return launch(verb, job, ranks=ranks, **words)

    monkeypatch.setattr(rank_processes, "launch", counted)
    names = ("small_piqa", "small_summaries")  # likelihoods, and texts that are continued
    job = AnswersJob(
        artifact=llama, tasks=TaskOptions(names=names, limit=3), stage="tasks of a model"
    )
    alone = task_answers.run(job, SILENT)
    assert worlds == [] and {
        name: len(each) for name, each in alone["document"]["samples"].items()
    } == dict.fromkeys(names, 3)
    assert task_answers.run(replace(job, ranks=2), SILENT) == json.loads(json.dumps(alone))
    assert worlds == [2]

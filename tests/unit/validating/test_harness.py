"""lm-eval's questions answered by the runtime, beside lm-eval's own class on transformers."""

import json
import runpy
import shutil
import socket
import time
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch
from huggingface_hub import constants
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantflow.errors import InputError, UnsupportedError, UsageError
from quantflow.exporting import export
from quantflow.exporting.job import ExportJob
from quantflow.planning.recipe import Quantize
from quantflow.progress import SILENT
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.runtime.load import load
from quantflow.validating import harness
from quantflow.validating.harness import TaskOptions, evaluate, loaded_tasks

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-llama"
TASKS = Path(__file__).parents[3] / "configs" / "tasks"
SHIPPED = {  # task: documents
    "small_lambada": 16,
    "small_hellaswag": 12,
    "small_piqa": 16,
    "small_winogrande": 20,
    "small_summaries": 8,
    "small_tool_calls": 12,
    "small_long_copies": 8,
}
QUESTIONS = ({"q": "value scale", "a": " round"}, {"q": "group layer token", "a": " model"})


def asked_of_transformers(folder, options, **words):
    """lm-eval's own class and evaluator, in float32; compressed-tensors decodes an artifact."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=8)
    tasks = list(loaded_tasks(options).tasks.values())
    manager = TaskManager(include_defaults=False)
    return simple_evaluate(
        theirs, tasks=tasks, bootstrap_iters=0, limit=options.limit, task_manager=manager, **words
    )


def asked(folder, *names, **words):
    return evaluate(
        load(folder, decoder="auto"), TaskOptions(names=names, **words), stage="t", progress=SILENT
    )


def same(ours, theirs):
    """Compare all samples and scores of two documents of lm-eval."""
    assert ours["samples"].keys() == theirs["samples"].keys()
    for task, samples in ours["samples"].items():
        for one, other in zip(samples, theirs["samples"][task], strict=True):
            assert one["doc"] == other["doc"] and one["arguments"] == other["arguments"]
            for answer, expected in zip(
                one["filtered_resps"], other["filtered_resps"], strict=True
            ):
                # a log likelihood, and whether greedy decoding says it
                if isinstance(answer, tuple):
                    assert (
                        answer[0] == pytest.approx(expected[0], rel=1e-4)
                        and answer[1] == expected[1]
                    )
                else:  # a text, or the log likelihood of a whole one
                    assert answer == (
                        expected if isinstance(expected, str) else pytest.approx(expected, rel=1e-4)
                    )
            for metric in one["metrics"]:
                assert one[metric] == pytest.approx(other[metric], rel=1e-4)
        scores, expected = ours["results"][task], theirs["results"][task]
        assert scores.keys() == expected.keys()
        assert {
            key: value for key, value in scores.items() if isinstance(value, float)
        } == pytest.approx(
            {key: value for key, value in expected.items() if isinstance(value, float)}, rel=1e-4
        )
    assert ours["n-samples"] == theirs["n-samples"] and ours["versions"] == theirs["versions"]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    entry = Quantize(name="a", scheme="W4A16", algorithm="rtn")
    quantize.run(QuantizeJob(model=EXAMPLE, output=folder / "2", entry=entry), SILENT)
    return export.run(ExportJob(source=folder / "2", output=folder / "4"), SILENT)


@pytest.fixture
def own(tmp_path):
    """Write a task with its documents; returns the YAML's path."""

    def write(body, rows=QUESTIONS):
        (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        lines = [
            "task: own",
            "dataset_path: json",
            "dataset_kwargs: {data_files: {test: own.jsonl}}",
            "test_split: test",
            body,
        ]
        (tmp_path / "own.yaml").write_text("\n".join(lines))
        return str(tmp_path / "own.yaml")

    return write


ASKING = 'output_type: loglikelihood\ndoc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"'


@pytest.mark.slow
def test_every_sample_of_the_shipped_tasks_is_what_transformers_says(artifact):
    answers = []
    for folder in (EXAMPLE, artifact):
        ours = asked(folder, *SHIPPED)
        assert {name: len(samples) for name, samples in ours["samples"].items()} == SHIPPED
        same(ours, asked_of_transformers(folder, TaskOptions(names=tuple(SHIPPED))))
        answers.append([sample["filtered_resps"] for sample in ours["samples"]["small_piqa"]])
    assert answers[0] != answers[1]  # the artifact is not its source


def test_every_sample_of_a_shipped_task_is_what_transformers_says(llama):
    same(
        asked(llama, "small_hellaswag"),
        asked_of_transformers(llama, TaskOptions(names=("small_hellaswag",))),
    )


def test_examples_and_a_chat_template_are_put_before_questions_as_by_lm_eval(llama, tmp_path, own):
    chat = tmp_path / "chat"
    shutil.copytree(llama, chat)
    tokenizer = AutoTokenizer.from_pretrained(chat)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    tokenizer.save_pretrained(chat)
    rows = [
        {"q": f"value {word}", "a": f" {word}"}
        for word in ("scale", "round", "group", "layer", "token")
    ]
    path = own(f"{ASKING}\nfewshot_split: test", rows)
    for folder, template in ((llama, False), (chat, True)):
        ours = asked(folder, path, shots=2, chat_template=template)
        words = {"apply_chat_template": template, "fewshot_as_multiturn": template}
        same(ours, asked_of_transformers(folder, TaskOptions(names=(path,), shots=2), **words))
        assert ours["n-shot"]["own"] == 2
        assert ("user: value" in ours["samples"]["own"][0]["arguments"][0][0]) == template


def test_texts_that_are_continued_and_rolled_over_are_what_transformers_says(llama, own):
    generating = own(
        'output_type: generate_until\ndoc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\n'
        'generation_kwargs: {until: ["e"], do_sample: false, max_gen_toks: 12}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]"
    )
    same(asked(llama, generating), asked_of_transformers(llama, TaskOptions(names=(generating,))))
    # longer than the model's 128 positions
    long = " ".join(["group layer token model range shift"] * 40)
    rolling = own(
        'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{q}}"\n'
        "metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, "
        "higher_is_better: false}]",
        rows=[{"q": long}, {"q": "value scale"}],
    )
    same(asked(llama, rolling), asked_of_transformers(llama, TaskOptions(names=(rolling,))))


def test_summaries_are_scored_by_the_longest_common_subsequence_of_their_words(llama):
    functions = runpy.run_path(str(TASKS / "rouge.py"))
    # of 6 words 4 are common in their order: 4/6 and 4/5, F = 8/11; "river" and "rivers" have one
    # stem
    found = functions["scores"](
        {"summary": "the river rose by two metres"}, ["rivers rose two tall metres"]
    )
    assert found["rougeL"] == pytest.approx(8 / 11) and found["rouge1"] == pytest.approx(8 / 11)
    # "river rose" alone
    assert found["rouge2"] == pytest.approx(2 * (1 / 5) * (1 / 4) / (1 / 5 + 1 / 4))
    assert functions["scores"]({"summary": "a b"}, [""])["rougeL"] == 0
    ours = asked(llama, "small_summaries", limit=3)
    same(ours, asked_of_transformers(llama, TaskOptions(names=("small_summaries",), limit=3)))
    (scores,) = ours["results"].values()
    assert {"rougeL,none", "rouge1,none", "rouge2,none"} <= scores.keys()


@pytest.mark.parametrize(
    ("answer", "scores"),
    [
        ('{"name": "ring", "arguments": {"minutes": 7, "label": "Eggs. "}}', (1, 1, 1)),
        (' {"arguments": {"label": "eggs", "minutes": 7}, "name": "ring"}', (1, 1, 1)),
        ('{"name": "ring", "arguments": {"minutes": "7", "label": "eggs"}}', (1, 1, 0)),
        ('{"name": "ring", "arguments": {"minutes": 7}}', (1, 1, 0)),
        ('{"name": "send", "arguments": {"minutes": 7, "label": "eggs"}}', (1, 0, 0)),
        ('{"name": "ring", "arguments": [7, "eggs"]}', (0, 0, 0)),
        ('{"name": "ring", "arguments": {"minutes": 7', (0, 0, 0)),
        ("[]", (0, 0, 0)),
        ("", (0, 0, 0)),
    ],
)
def test_a_tool_call_is_scored_by_its_json_its_name_and_its_arguments(answer, scores):
    functions = runpy.run_path(str(TASKS / "tool_calls.py"))
    call = '{"name": "ring", "arguments": {"minutes": 7, "label": "eggs"}}'
    found = functions["scores"]({"call": call}, [answer])
    assert (found["valid"], found["name"], found["call"]) == scores


@pytest.mark.parametrize(
    ("answer", "share"),
    [("a b c d", 1), (" a b\nc  d e", 1), ("a b d c", 0.5), ("a b", 0.5), ("", 0), ("b", 0)],
)
def test_a_copy_is_scored_by_its_words_before_the_first_error(answer, share):
    functions = runpy.run_path(str(TASKS / "copies.py"))
    found = functions["scores"]({"text": "a b\nc d"}, [answer])
    assert found == {"before_error": share, "whole": float(share == 1)}


def test_the_texts_of_generating_tasks_are_ours(llama):
    """Questions are whole, and the answer that stands there has every point."""
    options = TaskOptions(names=("small_tool_calls", "small_long_copies"))
    for name, task in loaded_tasks(options).tasks.items():
        for document in task.test_docs():
            target = task.doc_to_target(document)
            scores = set(task.process_results(document, [target.strip()]).values())
            assert scores == {1.0} and "{{" not in task.doc_to_text(document), name
            assert len(target.split()) > (150 if name == "small_long_copies" else 3)


def test_a_limit_takes_the_first_documents(llama):
    found = asked(llama, "small_piqa", limit=3)
    assert [sample["doc_id"] for sample in found["samples"]["small_piqa"]] == [0, 1, 2]


def test_one_model_has_one_document_and_nothing_is_written_to_the_terminal(llama, capfd):
    documents = [json.dumps(asked(llama, "small_piqa", limit=2), default=str) for _ in range(2)]
    assert documents[0] == documents[1]
    assert capfd.readouterr().err == ""


def test_an_end_token_is_no_part_of_an_answer(llama):
    """A tokenizer need not call it special; lm-eval would compare its text with the target."""
    loaded = load(llama, decoder="auto")
    ends = tuple(range(loaded.decoder.vocab_size))  # whatever the model says is an end
    options = TaskOptions(names=("small_summaries",), limit=2)
    found = evaluate(replace(loaded, eos_token_ids=ends), options, stage="t", progress=SILENT)
    assert [sample["resps"] for sample in found["samples"]["small_summaries"]] == [[[""]]] * 2


def test_a_task_that_samples_is_refused(llama, own):
    path = own(
        'output_type: generate_until\ndoc_to_text: "{{q}}"\ndoc_to_target: '
        '"{{a}}"\ngeneration_kwargs: {do_sample: true}'
    )
    with pytest.raises(UnsupportedError, match="the task samples"):
        asked(llama, path)


def test_a_template_that_is_not_there_is_refused(llama):
    with pytest.raises(InputError, match="has no chat template; leave --chat-template out"):
        asked(llama, "small_piqa", chat_template=True)


def refused(error, pattern, *names, **words):
    with pytest.raises(error, match=pattern) as caught:
        loaded_tasks(TaskOptions(names=names, **words))
    assert len(str(caught.value)) < 400


def test_a_task_that_is_named_twice_is_refused():
    refused(UsageError, "task small_piqa: it is named twice", "small_piqa", "small_piqa")


def test_a_task_that_runs_what_models_write_is_refused(own):
    refused(
        UnsupportedError,
        "task own: it runs code that a model writes; leave it out",
        own(f"{ASKING}\nunsafe_code: true"),
    )


def test_files_that_are_wrong_are_refused(own, tmp_path):
    refused(InputError, "nothing.yaml", "nothing.yaml")
    path = own(ASKING, rows=())
    refused(InputError, r"own.jsonl: holds no documents; give a JSON object in each line", path)
    (tmp_path / "own.jsonl").write_text("{")
    refused(InputError, r"own.jsonl: line 1", path)
    (tmp_path / "own.jsonl").write_text('{"q": "a", "a": "b"}\n[1]\n')
    refused(InputError, r"own.jsonl: document 2 is no object", path)
    (tmp_path / "own.jsonl").write_text('{"question": "a", "a": "b"}\n')
    refused(InputError, r"'q' is undefined", path)
    (tmp_path / "own.jsonl").unlink()
    refused(InputError, r"own.jsonl: No such file", path)
    (tmp_path / "own.yaml").write_text("task: [")
    refused(InputError, "own.yaml: .*Error", path)
    (tmp_path / "own.yaml").write_text("output_type: loglikelihood")
    refused(InputError, "own.yaml: no task", path)


def test_a_number_of_examples_that_a_task_does_not_take_is_refused(own):
    path = own(f"{ASKING}\nnum_fewshot: 0")
    refused(
        UsageError,
        "task own: 3 examples, its own file says 0; leave --shots out for it",
        path,
        shots=3,
    )
    path = own(f"{ASKING}\nfewshot_split: test")
    refused(InputError, "task .*own.yaml", path, shots=3)  # two documents, of which one is asked


def test_a_later_document_without_what_the_question_names_is_refused(llama, own):
    path = own(
        ASKING.replace("{{q}}", "{{q.strip()}}"),
        rows=[{"q": "value", "a": " a"}, {"q": None, "a": " b"}],
    )
    with pytest.raises(InputError, match="strip"):
        asked(llama, path)


@pytest.mark.parametrize("told", ["cannot be reached", "HF_HUB_OFFLINE is set"])
def test_a_data_set_of_a_hub_that_does_not_answer_is_said_at_once(told, tmp_path, monkeypatch):
    """The package datasets would ask six times, with 23 seconds between."""
    task = {"task": "far", "dataset_path": "org/far", "output_type": "generate_until"}
    task |= {"test_split": "test", "doc_to_text": "{{q}}", "doc_to_target": "{{a}}"}
    (tmp_path / "far.yaml").write_text(json.dumps(task))
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with socket.socket() as taken:  # bound and not listening: every connection is refused
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        for library, key in ((constants, "ENDPOINT"), (datasets.config, "HF_ENDPOINT")):
            monkeypatch.setattr(library, key, endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", "OFFLINE" in told)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        with pytest.raises(
            InputError, match=f"far.yaml: its data set is not in .*{told}"
        ) as caught:
            loaded_tasks(TaskOptions(names=(str(tmp_path / "far.yaml"),)))
    assert "small_hellaswag, small_lambada" in caught.value.remedy
    assert not waits and datasets.config.HF_HUB_OFFLINE is False
    assert constants.HF_HUB_OFFLINE is ("OFFLINE" in told)


def test_a_data_set_that_is_in_the_cache_needs_no_hub(tmp_path, monkeypatch):
    asked = []
    rows = {"test": datasets.Dataset.from_list([{"q": "scale", "a": " round"}])}

    def load_dataset(path, **_):
        asked.append((path, datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE))
        return rows

    task = {"task": "near", "dataset_path": "org/near", "output_type": "generate_until"}
    task |= {"test_split": "test", "doc_to_text": "{{q}}", "doc_to_target": "{{a}}"}
    (tmp_path / "near.yaml").write_text(json.dumps(task))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(harness, "why_unreachable", lambda: "it cannot be reached")
    found = loaded_tasks(TaskOptions(names=(str(tmp_path / "near.yaml"),)))
    assert list(found.tasks) == ["near"] and asked == [("org/near", True, True)]
    monkeypatch.setattr(harness, "why_unreachable", lambda: None)
    loaded_tasks(TaskOptions(names=(str(tmp_path / "near.yaml"),)))
    assert asked[1] == ("org/near", datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE)

"""`validate --tasks` asks both models, without a network.

Impossible tasks end with a sentence and an exit code.
"""

import json
import os
import shutil
import socket

import pytest

from quantflow.exporting import export as export_stage
from quantflow.runtime.ranks import processes as rank_processes
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code


@pytest.fixture(scope="module")
def artifact(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_stage, "_prove", lambda *_: {})  # a fresh process: test_verbs has it
        words = [
            "quantize",
            llama,
            "-o",
            folder / "a",
            "--scheme",
            "W4A16",
            "--algorithm",
            "rtn",
            "--group-size",
            "32",
        ]
        assert exit_code(cli, list(map(str, words))) == 0
    return folder / "a"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(self, address):
        raise OSError(f"the test has no network: {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def validate(artifact, llama, text_files, tmp_path, capsys):
    def run(*options):
        words = [
            "validate",
            artifact,
            "--baseline",
            llama,
            "--text",
            text_files["heldout"],
            "--tokens",
            "600",
        ]
        words += [
            "--sequence-length",
            "64",
            "--report",
            tmp_path / "report",
            "--allow-inconclusive",
            "-q",
            *options,
        ]
        code = exit_code(cli, list(map(str, words)))
        return code, capsys.readouterr()

    return run


def write_task(folder, rows):
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own.yaml").write_text(
        "task: own\ndataset_path: json\ndataset_kwargs: {data_files: {test: "
        "own.jsonl}}\ntest_split: test\n"
        'output_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: '
        '"{{c}}"\ndoc_to_target: 0\n'
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    return folder / "own.yaml"


def test_a_task_of_a_yaml_and_json_lines_is_asked_without_a_network(validate, tmp_path):
    task = write_task(
        tmp_path,
        [{"q": "value", "c": [" scale", " round"]}, {"q": "group", "c": [" layer", " token"]}] * 2,
    )
    code, printed = validate(
        "--tasks", f"{task},small_piqa", "--limit", "3", "-o", tmp_path / "out.json"
    )
    assert code in (0, 4)  # the gate's
    rows = [line for line in printed.out.splitlines() if line.startswith(("own", "small_piqa"))]
    assert len(rows) == 2 and all(" 3 " in row for row in rows)
    theirs = json.loads((tmp_path / "out.json").read_text())
    assert theirs["n-samples"] == {
        "own": {"original": 4, "effective": 3},
        "small_piqa": {"original": 16, "effective": 3},
    }
    record = json.loads((tmp_path / "report" / "validation.json").read_text())["tasks"]
    assert record["protocol"]["limit"] == 3 and record["protocol"]["bos"] in (True, False)
    assert record["scores"]["own"]["artifact"] == theirs["results"]["own"]["acc,none"]
    assert "\r" not in printed.err


def test_a_model_alone_is_scored_as_beside_an_artifact(validate, llama, tmp_path, capsys):
    rows = [{"q": "value", "c": [" scale", " round"]}, {"q": "group", "c": [" layer", " token"]}]
    task = str(write_task(tmp_path, [*rows, {"q": "a", "c": [" b", " c"]}]))
    assert validate("--tasks", task)[0] in (0, 4)
    beside = json.loads((tmp_path / "report" / "validation.json").read_text())["tasks"]["scores"]
    alone = ["validate", "-m", str(llama), "--tasks", task, "--report", str(tmp_path / "alone")]
    assert exit_code(cli, [*alone, "-o", str(tmp_path / "eval.json"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((tmp_path / "alone" / "scores.json").read_text())
    score = result["scores"]["own"]
    assert score["score"] == beside["own"]["baseline"]
    share = score["score"]  # of three documents
    assert score["standard_error"] == pytest.approx((share * (1 - share) / 2) ** 0.5)
    assert json.loads((tmp_path / "eval.json").read_text())["n-samples"]["own"]["effective"] == 3
    assert exit_code(cli, alone) == 0  # left alone
    printed = capsys.readouterr()
    assert "own   acc" in printed.out and "scores: " in printed.out
    assert exit_code(cli, [*alone, "--dtype", "bfloat16"]) == 2  # other inputs
    assert exit_code(cli, [*alone, "--dtype", "bfloat16", "--force", "-q"]) == 0
    record = json.loads((tmp_path / "alone" / "scores.json").read_text())
    assert record["protocol"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ((), "neither a baseline nor tasks"),
        (("--tasks", "small_piqa", "--gate", "strict"), "--gate without a baseline"),
        (("--tasks", "small_piqa", "--tokens", "9"), "--tokens without a baseline"),
        (("--tasks", "small_piqa", "--previous", "x"), "--previous without a baseline"),
    ],
)
def test_what_compares_needs_a_baseline(words, cause, capsys):
    assert exit_code(cli, ["validate", "model", *words]) == 2
    assert cause in capsys.readouterr().err


@pytest.mark.slow
def test_what_cannot_be_asked_is_a_sentence_and_an_exit_code(validate, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    empty = write_task(tmp_path, [])
    bombs = {
        "deep": "task: " + "[" * 100_000,
        "alias": "a: &a [x]\nb: &b [*a, *a]\ntask: [*b, *b]\n",
        "large": "#" * (2 << 20),
    }
    for name, text in bombs.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder.py").mkdir()
    for options, expected, told in (
        (("--tasks", "small_piqua"), 2, "fix: did you mean small_piqa"),
        (("--tasks", "small_piqa", "--limit", "0"), 2, "limit"),
        (("--tasks", "small_piqa", "--shots", "-1"), 2, "shots"),
        (("--tasks", empty), 3, "own.jsonl: holds no documents"),
        (("--tasks", tmp_path / "deep.yaml"), 3, "deeper in each other than 50"),
        (("--tasks", tmp_path / "alias.yaml"), 3, "the alias a inside of an anchored value"),
        (("--tasks", tmp_path / "large.yaml"), 3, "over 1048576 bytes"),
        (("--tasks", tmp_path / "pipe.yaml"), 3, "not a regular file"),
        (("--tasks", "piqa"), 3, "is not in the cache, and HF_HUB_OFFLINE is set"),
        (("--tasks", "small_piqa", "--chat-template"), 3, "no chat template"),
        (("-o", tmp_path / "out.json"), 2, "no tasks are asked"),
        (("--ranks", "2"), 2, "validate: 2 ranks without tasks\n  fix: give --tasks"),
        (("--tasks", "small_piqa", "--ranks", "0"), 2, "ranks=0"),
        (("--tasks", "small_piqa", "--ranks", "3"), 2, "3"),
        (("--tasks", "small_piqa", "--max-memory", "1KiB"), 5, "memory"),
    ):
        code, printed = validate(*options)
        assert (code, told in printed.err) == (expected, True), (options, printed.err)
        assert "Traceback" not in printed.err
    assert not (tmp_path / "out.json").exists()


def test_ranks_that_somebodys_torchrun_started_do_not_validate_all_at_once(validate, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, printed = validate("--tasks", "small_piqa", "--ranks", "2")
    assert code == 2 and "validate: 2 ranks, and torchrun started this process" in printed.err


@pytest.mark.slow
def test_ranks_that_share_the_models_leave_the_files_that_one_process_leaves(
    validate, tmp_path, monkeypatch
):
    worlds, launch = [], rank_processes.launch

    def counted(verb, job, *, ranks, **words):
        worlds.append(ranks)
        return launch(verb, job, ranks=ranks, **words)

    monkeypatch.setattr(rank_processes, "launch", counted)
    found = []
    for more in ((), ("--ranks", "2")):
        code, _ = validate(
            "--tasks", "small_piqa", "--limit", "4", "-o", tmp_path / "out.json", *more
        )
        files = [tmp_path / "out.json", *sorted((tmp_path / "report").glob("*.json"))]
        found.append((code, {path.name: path.read_bytes() for path in files}))
        for folder in ("report", "validation-cache"):  # so that both models are asked again
            shutil.rmtree(tmp_path / folder)
    assert found[0] == found[1] and len(found[0][1]) == 5
    assert worlds == [2, 2]

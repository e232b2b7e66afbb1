"""`bench --url` times a running server: its requests begin together, and have as many tokens."""

import json

import pytest

from quantflow.benching.server_speed import _run
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code


def bench(*words):
    return exit_code(cli, ["bench", *map(str, words)])


def test_a_running_server_is_timed_in_the_tables_of_its_benchmark(server, capsys):
    words = ("--url", server.url, "-b", 1, 3, "--sequence-length", 9, "--decode-length", 4)
    assert bench(*words, "--runs", 2, "--warmups", 1, "-q", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["artifact"] == server.ask("GET", "/info").json()["model_id"]
    for batch, rows in zip(result["batches"], (1, 3), strict=True):
        assert (batch["batch_size"], batch["input_tokens"]) == (rows, 9)
        # end tokens are ignored: every request has its four tokens in both runs
        assert batch["produced"] == batch["requested"] == 2 * 4 * rows
        assert 0 < batch["first_token"]["lowest"] <= batch["first_token"]["highest"] < 60
        assert batch["decode_per_second"]["average"] > 0
    assert bench(*words, "--runs", 1, "-q", "--prompt", "def main():", "--temperature", 0.5) == 0
    told = capsys.readouterr().out
    assert f"at {server.url}: drawn tokens, over HTTP" in told and "| Prefill" in told


def test_a_prompt_has_the_length_that_is_asked_for(server):
    answers = []
    for length in (3, 9):
        body = {
            "inputs": " ".join(map(str, range(length))),
            "parameters": {"truncate": length, "max_new_tokens": 1, "decoder_input_details": True},
        }
        answers.append(server.post("/generate", body).json()["details"]["prefill"])
    assert [len(prompt) for prompt in answers] == [3, 9]


def test_a_token_of_a_batch_is_there_when_every_request_has_it():
    run = _run([[1.0, 2.0, 2.5], [3.0, 3.5]], requested=6)
    assert (run.first_seconds, run.produced, run.requested) == (3.0, 5, 6)
    assert run.step_seconds == (0.5, 0.0)  # the third came before the others had their second


@pytest.mark.parametrize(
    ("words", "code", "cause"),
    [
        (("--url", "host:1"), 2, "url=host:1"),
        (("--url", "http://127.0.0.1:9", "--baseline", "x"), 2, "baseline beside --url"),
        (("--url", "http://127.0.0.1:9", "--kernels"), 2, "--kernels beside --url"),
        (("--url", "http://127.0.0.1:9"), 5, "http://127.0.0.1:9: "),
    ],
)
def test_what_cannot_be_timed_is_refused(words, code, cause, capsys):
    assert bench(*words) == code
    assert cause in capsys.readouterr().err


def test_what_the_server_refuses_is_said(server, capsys):
    assert bench("--url", server.url, "--input-tokens", 3, "--new-tokens", 10**6, "-q") == 3
    assert "Input validation error: `inputs` tokens" in capsys.readouterr().err

"""`serve --ranks`: ranks that share a model answer as one process, end together, or refuse."""

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest

from quantflow.errors import UsageError
from quantflow.progress import SILENT
from quantflow.runtime.ranks import processes as rank_processes
from quantflow.server import process as server_process
from quantflow.server.settings import ServeJob
from tests.unit.server.test_life import started


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"ranks": 3}, "3 ranks: 8 heads, 4 of keys and values, do not go whole"),
        ({"ranks": 2, "adapters": ("a=b",)}, "serve: 2 ranks with an adapter"),
        ({"ranks": 2, "models": ("a=b",)}, "serve: 2 ranks with further models"),
        ({"ranks": 2, "speculate": "mtp:2"}, "serve: 2 ranks with speculate=mtp:2"),
        ({"ranks": 2, "medusa": Path("heads")}, "serve: 2 ranks with medusa"),
        ({"ranks": 2, "decoder": "transformers"}, "serve: 2 ranks with the transformers decoder"),
        ({"ranks": 2, "device": "cuda"}, "serve: 2 ranks with device cuda"),
    ],
)
def test_what_ranks_cannot_serve_is_refused_before_one_is_started(
    artifact, monkeypatch, settings, told
):
    monkeypatch.setattr(rank_processes, "launch", lambda *_, **__: pytest.fail("ranks started"))
    with pytest.raises(UsageError, match=told):
        server_process.run(ServeJob(artifact=artifact, name="m", port=0, **settings), SILENT)


def test_ranks_that_torchrun_started_do_not_serve(artifact, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="ranks=2 in a process that torchrun started"):
        server_process.run(ServeJob(artifact=artifact, name="m", port=0, ranks=2), SILENT)


BODIES = [
    ("/generate", {"inputs": "def main(", "parameters": {"max_new_tokens": 24}}),
    (
        "/generate",
        {"inputs": "class A", "parameters": {"max_new_tokens": 24, "do_sample": True, "seed": 5}},
    ),
    ("/generate", {"inputs": "def main(" * 9, "parameters": {"max_new_tokens": 9}}),
    (
        "/generate",
        {
            "inputs": "a",
            "parameters": {
                "max_new_tokens": 8,
                "grammar": {"type": "regex", "value": "[0-9]{4}"},
            },
        },
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "sum"}], "max_tokens": 9, "seed": 1},
    ),
]


def ask(port, method, path, body=None):
    with closing(HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())


def answers(port):
    """What a server says to several requests at once, without times and ids."""

    def text(asked):
        answer = ask(port, "POST", *asked)
        return answer.get("generated_text") or answer["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(len(BODIES)) as threads:
        return list(threads.map(text, BODIES))


@pytest.mark.slow
def test_ranks_answer_as_one_process_and_end_at_a_signal(artifact, template):
    chats = ("--chat-template", str(template))
    with started(artifact, *chats) as (alone, port, _):
        expected = answers(port)
        alone.send_signal(signal.SIGTERM)
        assert alone.wait(30) == 0
    with started(artifact, *chats, "--ranks", "2") as (shared, port, _):
        assert answers(port) == expected
        assert ask(port, "GET", "/info")["ranks"] == 2
        shared.send_signal(signal.SIGINT)
        assert shared.wait(30) == 0


@pytest.mark.slow
def test_the_ranks_that_were_named_are_traced_and_no_other(artifact, tmp_path):
    options = ("--served-model-name", "m", "--profile", str(tmp_path), "--profile-steps", "2")
    with started(artifact, *options, "--ranks", "2", "--profile-ranks", "1") as (shared, port, _):
        ask(port, "POST", *BODIES[0])
        shared.send_signal(signal.SIGINT)
        assert shared.wait(30) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["m-rank1.json"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_the_server_with_its_name(artifact, template, rank):
    with started(artifact, "--ranks", "2", "--chat-template", str(template)) as (shared, port, _):
        answers(port)
        task = Path(f"/proc/{shared.pid}/task/{shared.pid}/children").read_text().split()
        wanted = [
            int(child)
            for child in task
            if f"\0RANK={rank}\0" in f"\0{Path(f'/proc/{child}/environ').read_text()}"
        ]
        os.kill(*wanted, signal.SIGKILL)
        told = shared.stderr.read()
        assert shared.wait(30) == 5 and f"rank {rank} of 2 was ended by SIGKILL" in told, told
    assert not any(Path(f"/proc/{child}").exists() for child in task)

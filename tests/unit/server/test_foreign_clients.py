"""Foreign clients, each in an environment of its own, and requests that schemathesis makes up."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from quantflow.server.settings import Limits

HERE = Path(__file__).parent
ENVIRONMENT = os.environ.get("SERVING_CLIENTS_ENV")
PROMPT = "class Stack:\n    def"
REQUESTS = 2_000  # test_mutations.py sends more, in a tenth of the time

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not ENVIRONMENT, reason="SERVING_CLIENTS_ENV names no environment with the clients"
    ),
]


@pytest.fixture
def client(server):
    """A function that runs a client by name and returns its result."""

    def run(name):
        command = [
            f"{ENVIRONMENT}/bin/python",
            "-P",
            str(HERE / "foreign_clients.py"),
            name,
            server.url,
        ]
        environment = {
            "PATH": os.environ["PATH"],
            "HF_HUB_OFFLINE": "0",
            "HOME": os.environ.get("HOME", "/"),
        }
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=300, env=environment
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def expected(server):
    answer = server.generate(
        PROMPT, max_new_tokens=6, details=True, decoder_input_details=True
    ).json()
    body = {"messages": [{"role": "user", "content": "def"}], "max_tokens": 6, "temperature": 0}
    chat = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    ids = [token["id"] for token in answer["details"]["tokens"]]
    return answer["generated_text"], ids, len(answer["details"]["prefill"]), chat


PERSON = {"name", "age", "home", "kinds"}


def test_openai(client, expected):
    found = client("openai")
    assert found["parsed"].keys() == found["called"].keys() == PERSON
    assert found["stream"] == expected[3] and found["usage"] == 6
    assert found["told"] == ["context_length_exceeded", "messages"]
    assert "tool_calls.function.arguments.delta" in found["events"]
    assert found["models"] == ["python-model"]


def test_mcp(client):
    """The schemas of released servers of MCP, as its client lists them."""
    found = client("mcp")
    assert {"get_current_time", "git_log", "fetch"} <= found.keys()
    assert all(name == called for name, (called, _) in found.items())
    assert sum(whole for _, whole in found.values()) > len(found) / 2


def test_huggingface_hub(client, expected):
    text, ids, prompt, chat = expected
    found = client("hub")
    assert (found["text"], found["stream"], found["details"], found["prefill"]) == (
        text,
        text,
        ids,
        prompt,
    )
    assert (found["chat"], found["chat_stream"], found["logprobs"]) == (chat, chat, 6)
    assert found["told"] == "Input validation error: `top_k` must be strictly positive"


def test_text_generation(client, expected):
    text, ids, prompt, _ = expected
    found = client("text-generation")
    assert [found[name] for name in ("text", "stream", "last", "async")] == [text] * 4
    assert (found["details"], found["prefill"]) == (ids, prompt)
    assert "`inputs` tokens + `max_new_tokens` must be <= 1024" in found["told"]


def test_langchain(client, expected):
    text, _, _, chat = expected
    found = client("langchain")
    assert (found["text"], found["chat"], found["chat_stream"], found["batch"][0]) == (
        text,
        chat,
        chat,
        chat,
    )
    assert found["called"] == ["weather"]
    assert all(one.keys() == PERSON for one in found["structured"].values())
    assert found["chosen"].keys() in ({"city"}, PERSON) and found["streamed"] and found["free"]


def test_litellm_falls_back_where_a_prompt_is_too_long(client, expected):
    """BerriAI/litellm#10793: fallbacks start by the words of the error."""
    found = client("litellm")
    assert found["errors"] == ["ContextWindowExceededError"] * 4
    assert (found["fallback"], found["short"]) == ("from the larger", expected[3])


def test_requests_that_schemathesis_makes_up_get_no_5xx_and_no_reset(serve):
    """About REQUESTS over all operations, in schemathesis's phases; a limit keeps answers short."""
    with serve(limits=Limits(max_total_tokens=48)) as server:
        operations = sum(
            len(methods) for methods in server.get("/openapi.json").json()["paths"].values()
        )
        command = [
            f"{ENVIRONMENT}/bin/schemathesis",
            "run",
            f"{server.url}/openapi.json",
            "--checks",
            "not_a_server_error",
        ]
        command += [
            "--max-examples",
            str(REQUESTS // operations),
            "--phases",
            "examples,coverage,fuzzing",
            "--seed",
            "1",
        ]
        command += [
            "--request-timeout",
            "60",
            "--workers",
            "1",  # Python 3.11 may fail to parse in two threads at once (python/cpython#106905)
            "--suppress-health-check",
            "all",
            "--continue-on-failure",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        assert server.settled(60).pool.used == 0 and server.get("/health").status == 200

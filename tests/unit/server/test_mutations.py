"""Requests that are almost right: 10,000 mutations of good bodies over every route, from a seed."""

import copy
import json
import random
from http.client import HTTPConnection

import pytest

from quantflow.server.settings import Limits

PROMPT = "class Stack:\n    def"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
PARAMETERS = {
    "max_new_tokens": 4,
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "typical_p": 0.9,
    "seed": 1,
    "stop": ["x"],
}
PARAMETERS |= {
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "truncate": 8,
    "details": True,
    "top_n_tokens": 2,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
OPENAI = {
    "model": "tgi",
    "max_tokens": 4,
    "temperature": 0.7,
    "n": 2,
    "seed": 1,
    "stop": ["x"],
    "logit_bias": {"5": 1.0},
}
CHAT = {
    **OPENAI,
    "messages": [{"role": "user", "content": "def"}],
    "logprobs": True,
    "top_logprobs": 2,
}
GOOD = [
    ("/generate", {"inputs": PROMPT, "parameters": {**PARAMETERS, "decoder_input_details": True}}),
    (
        "/generate",
        {
            "inputs": PROMPT,
            "parameters": {"max_new_tokens": 4, "grammar": {"type": "json", "value": SCHEMA}},
        },
    ),
    (
        "/generate",
        {
            "inputs": PROMPT,
            "parameters": {"max_new_tokens": 4, "grammar": {"type": "regex", "value": "[ab]{2,3}"}},
        },
    ),
    ("/generate_stream", {"inputs": PROMPT, "parameters": PARAMETERS}),
    ("/", {"inputs": PROMPT, "parameters": PARAMETERS, "stream": True}),
    ("/tokenize", {"inputs": PROMPT}),
    ("/vertex", {"instances": [{"inputs": PROMPT, "parameters": PARAMETERS}]}),
    ("/invocations", {"inputs": PROMPT, "parameters": PARAMETERS}),
    ("/v1/completions", {**OPENAI, "prompt": [PROMPT, "x"], "echo": True, "logprobs": 2}),
    (
        "/v1/completions",
        {
            **OPENAI,
            "prompt": [[1, 2, 3], [4]],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required"}),
    (
        "/v1/chat/completions",
        {
            **CHAT,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            },
        },
    ),
    ("/chat_tokenize", {"messages": CHAT["messages"], "tools": [TOOL]}),
]
JUNK = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    -(2**63),
    10**30,
    0.5,
    -0.5,
    1e308,
    1e-320,
]
JUNK += [
    "",
    "x",
    "\x00",
    "é🙂",
    "a" * 5000,
    [],
    {},
    [[]],
    [{}],
    {"a": {}},
    [None],
    {"": ""},
    ["x"] * 100,
]
JUNK += [{"type": "json", "value": {"$ref": "#"}}, {"type": "regex", "value": "("}]


def mutated(value, rng):
    """A copy with one to three places replaced, removed, doubled or added to."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        places = list(_places(value))
        if not places:
            return rng.choice(JUNK)
        holder, key = rng.choice(places)
        way = rng.random()
        if way < 0.7:
            holder[key] = copy.deepcopy(rng.choice(JUNK))
        elif way < 0.85:
            del holder[key]
        elif isinstance(holder, dict):
            holder[str(rng.choice(JUNK))[:50]] = copy.deepcopy(rng.choice(JUNK))
        else:
            holder.append(copy.deepcopy(holder[key]))
    return value


def _places(value):
    """Yield every holder and key inside nested data."""
    pairs = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in list(pairs):
        yield value, key
        yield from _places(inner)


def ask_all(server, count, seed):
    """Send mutations over one connection that is kept alive; return how often each status came."""
    rng, statuses = random.Random(seed), {}
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    for number in range(count):
        path, body = rng.choice(GOOD)
        data = json.dumps(mutated(body, rng))
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read().decode()
        statuses[response.status] = statuses.get(response.status, 0) + 1
        assert response.status < 500, (number, path, data[:2000], content)
        if response.headers["content-type"].startswith("application/json"):
            answer = json.loads(content)
            assert response.status == 200 or answer["error_type"], (path, data[:2000], content)
        assert "Internal error" not in content and "Traceback" not in content, (
            path,
            data[:2000],
            content,
        )
    connection.close()
    return statuses


def check(serve, count, seed):
    with serve(limits=Limits(max_total_tokens=48)) as server:
        expected = server.generate(PROMPT, max_new_tokens=8).json()
        statuses = ask_all(server, count, seed)
        assert statuses[200] > count // 20 and statuses[422] > count // 20, statuses
        assert server.settled().pool.used == 0
        assert server.generate(PROMPT, max_new_tokens=8).json() == expected


@pytest.mark.slow
def test_requests_that_are_almost_right_get_promised_answers(serve):
    check(serve, 150, 0)


@pytest.mark.slow
def test_ten_thousand_of_them_do(serve):
    check(serve, 10_000, 1)

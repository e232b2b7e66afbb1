"""What clients and operators learn of a request: errors that clients know, ids, lines, counts.

Reports of the kinds: BerriAI/litellm#10793 and #12680 (a fallback that starts by the words of the
error alone), vllm-project/vllm#24910 (an oversized prompt), letta-ai/letta#3189 (a redirect for a
slash names http behind a proxy with https), cheshire-cat-ai/core#732 (slashes at the end).
"""

import re
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quantflow.server import process
from quantflow.server.metrics import ENGINE_COUNTERS, ENGINE_GAUGES, Metrics, _flat
from quantflow.server.request_log import plain_path
from quantflow.server.settings import Limits

USER = [{"role": "user", "content": "def"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = "x y " * 900  # more tokens than a prompt may have, and few enough characters to count them
ENDLESS = "x y " * 100_000


def long(path, text):
    return {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [LONG, ENDLESS], ids=["tokens", "characters"])
@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), (TEXT, "prompt")])
def test_a_prompt_that_is_too_long_has_openais_code(server, path, field, text, stream):
    answer = server.post(path, {**long(path, text), "stream": stream})
    error = answer.json()["error"]
    assert (answer.status, error["code"]) == (400, "context_length_exceeded")
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    message = error["message"]
    # litellm and others look for these words
    assert message.startswith("This model's maximum context length is 1024 tokens. However, ")
    assert f"Please reduce the length of the {field} or completion." in message
    most = server.models.first.max_input_tokens
    # /v1/completions adds 16 tokens where the request says nothing
    told = r"16 in the completion" if (path, text) == (TEXT, LONG) else rf"(have|most) {most}\b"
    assert re.search(told, message), message


def test_a_completion_that_does_not_fit_has_it_too(server):
    answer = server.post(CHAT, {"messages": USER, "max_tokens": 1024})
    error = answer.json()["error"]
    assert (answer.status, error["code"]) == (400, "context_length_exceeded")
    found = re.search(r"requested (\d+) tokens \((\d+) in the messages, 1024 in", error["message"])
    total, prompt = map(int, found.groups())
    assert total == prompt + 1024 and prompt > 0
    room = 1024 - prompt
    assert server.post(CHAT, {"messages": USER, "max_tokens": room + 1}).status == 400


def test_the_limit_in_a_message_is_the_one_that_holds(serve):
    """A prompt of the number of tokens that it names is taken, one of more is not."""
    with serve(limits=Limits(max_input_tokens=12, max_total_tokens=100)) as server:
        message = server.post(CHAT, long(CHAT, "x y " * 60)).json()["error"]["message"]
        most = int(re.search(r"may have (\d+)\.", message)[1])
        ids = [5] * most
        assert most == 12
        assert server.post(TEXT, {"prompt": ids, "max_tokens": 1}).status == 200
        assert server.post(TEXT, {"prompt": [*ids, 5], "max_tokens": 1}).status == 400
        # TGI's words, with the number that holds
        told = server.generate("x y " * 60, max_new_tokens=None).json()["error"]
        assert told.startswith("Input validation error: `inputs` must have less than 13 tokens.")
        told = server.generate("x", truncate=13).json()["error"]
        assert "less than 13. Given: 13" in told
        assert server.generate("x " * 30, truncate=12, max_new_tokens=1).status == 200


def test_tgis_routes_keep_tgis_status_and_words(server):
    for text, told in ((LONG, "must have less than 1024 tokens"), (ENDLESS, "characters")):
        answer = server.generate(text, max_new_tokens=None)
        assert (answer.status, answer.json()["error_type"]) == (422, "validation")
        assert answer.json()["error"].startswith("Input validation error: `inputs` must have")
        assert told in answer.json()["error"]
    answer = server.generate("def", max_new_tokens=2000).json()
    assert "`inputs` tokens + `max_new_tokens` must be <= 1024" in answer["error"]


FIELDS = {
    "max_tokens": (CHAT, {"max_tokens": 0}),
    "max_completion_tokens": (CHAT, {"max_completion_tokens": 0}),
    "top_logprobs": (CHAT, {"logprobs": True, "top_logprobs": 21}),
    "temperature": (CHAT, {"temperature": -1}),
    "messages": (CHAT, {"messages": []}),
    "logit_bias": (CHAT, {"logit_bias": {"999999": 1}}),
    "n": (CHAT, {"n": 99}),
    "messages.0.role": (CHAT, {"messages": [{"content": "no role"}]}),
    "prompt": (TEXT, {"prompt": ""}),
    "logprobs": (TEXT, {"prompt": "def", "logprobs": 21}),
    "best_of": (TEXT, {"prompt": "def", "best_of": 99}),
    "stop": (TEXT, {"prompt": "def", "stop": [f"{i}" for i in range(65)]}),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_refusal_names_the_field_that_the_client_sent(server, name):
    path, fields = FIELDS[name]
    answer = server.post(path, {**({"messages": USER} if path == CHAT else {}), **fields})
    error = answer.json()["error"]
    assert (answer.status, error["param"], error["code"]) == (422, name, "validation"), error
    assert not re.search(r"`(inputs|max_new_tokens|top_n_tokens)`", error["message"])


def test_a_refusal_without_a_field_names_none(server):
    for body, kind in (
        ({"messages": USER, "model": "another"}, "model_not_found"),
        ({"messages": [{"role": "wizard", "content": "`max_tokens`"}]}, "template_error"),
    ):
        error = server.post(CHAT, body).json()["error"]
        assert (error["code"], error["param"]) == (kind, None)


@pytest.mark.parametrize("path", ["//v1/models", "/v1/models/", "/v1//models//", "//v1/models?a=b"])
def test_slashes_are_answered_without_a_redirect(server, path):
    found = server.get(path)
    assert found.status == 200 and found.json()["object"] == "list"
    assert server.get("//info/").status == 200
    assert server.post("//v1/chat/completions/", {"messages": USER, "max_tokens": 1}).status == 200


def test_slashes_open_no_way_around_the_key(serve):
    with serve(api_key="secret") as server:
        for path in ("//info", "/info/", "//v1//models", "/v1/models/", "/health/../info"):
            assert server.get(path).status == 401, path
        for path in ("/health/", "//health"):
            assert server.get(path).status == 200, path
        assert server.get("/v1/nothing").json()["error"]["code"] == "unauthorized"


def test_a_path_keeps_what_is_no_doubled_slash():
    assert [plain_path(path) for path in ("", "/", "//", "/a/b", "//a///b/", "/a%2F/")] == [
        "/",
        "/",
        "/",
        "/a/b",
        "/a/b",
        "/a%2F",
    ]


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1", "/v1/models/a/b", "//v1/nothing"])
def test_an_unknown_path_below_v1_has_openais_form(server, path):
    answer = server.get(path)
    assert answer.status == 404 and answer.json()["error"]["code"] == "not_found"
    assert server.get("/nothing").json()["error"] == "Not found"
    assert server.get(CHAT).json()["error"]["code"] == "method_not_allowed"


def test_the_id_of_a_request_goes_back(server):
    ids = {server.get("/health").headers["x-request-id"] for _ in "abc"}
    assert len(ids) == 3 and all(re.fullmatch("[0-9a-f]{16}", one) for one in ids)
    for path, body in ((CHAT, {"messages": USER, "max_tokens": 1}), ("/tokenize", {"inputs": "a"})):
        answer = server.post(path, body, **{"X-Request-Id": "agent-7:step/2"})
        assert answer.headers["x-request-id"] == "agent-7:step/2"
    for stream in ({**long(CHAT, "def"), "stream": True, "max_tokens": 2}, {"messages": 3}):
        assert server.post(CHAT, stream, **{"X-Request-Id": "b"}).headers["x-request-id"] == "b"
    for wrong in ("", "a b", "x" * 129, "é", "a;b"):
        headers = {"X-Request-Id": wrong.encode("latin-1")}
        assert server.get("/health", **headers).headers["x-request-id"] != wrong


@pytest.fixture
def logged(serve, monkeypatch):
    """A server, and the list of the lines that it prints."""
    lines = []
    plain = process.application
    monkeypatch.setattr(
        process, "application", lambda site, *, tell: plain(site, tell=lines.append)
    )
    with serve() as server:
        yield server, lines


def soon(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_request_has_a_line_with_its_tokens(logged):
    server, lines = logged
    body = {"messages": USER, "max_tokens": 3, "n": 2, "temperature": 1}
    usage = server.post(CHAT, body, **{"X-Request-Id": "one"}).json()["usage"]
    server.post("//generate_stream/", {"inputs": "def", "parameters": {"max_new_tokens": 2}})
    server.get("/nothing%1b]0;x%0a?key=secret", **{"X-Request-Id": "a b"})
    soon(lambda: len(lines) == 3)
    when = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}"
    tokens = f"{usage['prompt_tokens']} \\+ {usage['completion_tokens']} tokens"
    chat, stream, nothing = sorted(lines, key=lambda line: " POST " not in line)
    chat, stream = (chat, stream) if CHAT in chat else (stream, chat)
    assert re.fullmatch(rf"{when} one POST {CHAT} 200, \d+\.\d+ s, {tokens}", chat)
    assert re.fullmatch(rf"{when} \w+ POST /generate_stream 200, .* s, \d+ \+ 2 tokens", stream)
    assert " 404, " in nothing and "secret" not in nothing and "a b" not in nothing
    assert all(line.isprintable() for line in lines)


def test_a_client_that_leaves_is_said_and_counted(logged):
    server, lines = logged
    asks = [
        ("/generate", {"inputs": "def", "parameters": {"max_new_tokens": 900}}),
        ("/generate_stream", {"inputs": "def", "parameters": {"max_new_tokens": 900}}),
        (CHAT, {"messages": USER, "max_tokens": 900}),
        (CHAT, {"messages": USER, "max_tokens": 900, "stream": True, "n": 2}),
        (TEXT, {"prompt": ["def", "x"], "max_tokens": 900, "stream": True}),
    ]
    for path, body in asks:
        rows = 2 if "n" in body or isinstance(body.get("prompt"), list) else 1
        with server.take_nothing(path, body):
            soon(lambda rows=rows: server.models.first.engine.counters().running == rows)
        server.settled()
    soon(lambda: len(lines) == len(asks))
    assert all(" client left, " in line for line in lines), lines
    counts = counted(server)
    assert (counts["quantflow_request_left"], counts["tgi_request_success"]) == (6, 0)
    assert counts["tgi_request_count"] == 6


def counted(server):
    """The samples of /metrics without labels."""
    lines = server.get("/metrics").body.decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


def test_every_request_ends_as_one_of_three(serve):
    with serve(limits=Limits(max_concurrent_requests=2)) as server:
        server.generate("def", max_new_tokens=2)
        server.post(TEXT, {"prompt": ["def", "x"], "max_tokens": 2})
        server.post(CHAT, {"messages": USER, "max_tokens": 2, "stream": True})
        server.generate("")
        server.post(CHAT, {"messages": [{"role": "wizard", "content": "x"}]})
        server.post(CHAT, long(CHAT, LONG))
        server.post("/generate_stream", {"inputs": LONG})
        server.site.service.admission.enter(2)
        server.post("/generate_stream", {"inputs": "def"})
        server.post(CHAT, {"messages": USER})
        server.site.service.admission.leave(2)
        server.settled()
        counts = counted(server)
        assert counts["tgi_request_success"] == 4 and counts["quantflow_request_left"] == 0
        failures = {name: n for name, n in counts.items() if name.startswith("tgi_request_failure")}
        assert failures == {
            'tgi_request_failure{err="validation"}': 3,
            'tgi_request_failure{err="template_error"}': 1,
            'tgi_request_failure{err="overloaded"}': 2,
        }
        assert counts["tgi_request_count"] == 4 + 6


def test_times_of_tokens_are_histograms(serve):
    with serve() as server:
        server.generate("def", max_new_tokens=5)
        body = {"messages": USER, "n": 2, "temperature": 1, "max_tokens": 4, "stream": True}
        body["logit_bias"] = {str(end): -100 for end in server.models.first.loaded.eos_token_ids}
        server.post(CHAT, body)
        counts = counted(server)
    assert counts["quantflow_time_to_first_token_seconds_count"] == 3
    assert counts["quantflow_inter_token_latency_seconds_count"] == 4 + 2 * 3
    for name in ("quantflow_time_to_first_token_seconds", "quantflow_inter_token_latency_seconds"):
        assert counts[f"{name}_sum"] > 0
        buckets = [value for key, value in counts.items() if key.startswith(f"{name}_bucket")]
        assert buckets == sorted(buckets) and buckets[-1] == counts[f"{name}_count"]


def test_each_metric_has_a_type_and_a_sentence_of_its_own(server):
    server.generate("def", max_new_tokens=1)
    text = server.get("/metrics").body.decode()
    # the client library adds the time of its start to each histogram, under the same sentence
    helps = dict(re.findall(r"^# HELP (\w+)(?<!_created) (.+)$", text, re.MULTILINE))
    types = dict(re.findall(r"^# TYPE (\w+)(?<!_created) (\w+)$", text, re.MULTILINE))
    assert helps.keys() == types.keys() and len(set(helps.values())) == len(helps)
    assert set(types.values()) == {"counter", "gauge", "histogram"}
    assert all(line.endswith(".") for line in helps.values())
    assert {name for name, kind in types.items() if kind == "counter"} == {
        "tgi_request_count",
        "tgi_request_success",
        "tgi_request_failure",
        "quantflow_request_left",
        *(f"quantflow_engine_{name}" for name in ENGINE_COUNTERS),
    }
    read = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert {name: read[name] for name in types} == types


def test_the_tables_have_every_number_of_an_engine(server):
    names = {name for name, _ in _flat(server.models.first.engine.counters())}
    assert names == ENGINE_COUNTERS.keys() | ENGINE_GAUGES.keys()


def test_a_models_name_is_escaped(server):
    counters = server.models.first.engine.counters()
    text = Metrics(lambda: [('a"\\\n', counters)]).text().decode()
    (family,) = [
        family
        for family in text_string_to_metric_families(text)
        if family.name == "quantflow_engine_steps"
    ]
    assert family.samples[0].labels == {"model": 'a"\\\n'}


def test_an_exception_is_printed_with_the_id_of_its_request(serve, capsys, monkeypatch):
    with serve() as server:
        monkeypatch.setattr(server.models.first, "require_length", lambda text: 1 / 0)
        answer = server.post("/tokenize", {"inputs": "a"}, **{"X-Request-Id": "seven"})
        assert (answer.status, answer.json()["error_type"]) == (500, "internal")
    assert "request seven:\nTraceback" in capsys.readouterr().err

"""TGI's routes of a running server: answers, streams, headers, texts, and refusals."""

import asyncio
import json

import jsonschema
import pytest
import torch
from transformers import AutoTokenizer

from quantflow.runtime.decoding import generate
from quantflow.runtime.load import load

PROMPT = "class Stack:\n    def"


@pytest.fixture(scope="module")
def alone(artifact):
    """A function from a prompt to the tokens with which `generate` continues it."""
    loaded = load(artifact, decoder="auto")

    def run(prompt, count, **options):
        ids = torch.tensor([loaded.tokenizer(prompt)["input_ids"]])
        options = {"eos_token_id": loaded.eos_token_ids} | options
        return generate(loaded.decoder, ids, max_new_tokens=count, **options)[
            0, ids.shape[1] :
        ].tolist()

    return run


def test_an_answer_is_what_generate_says(server, alone, artifact):
    answer = server.generate(PROMPT, max_new_tokens=12, details=True)
    assert answer.status == 200
    tokens = alone(PROMPT, 12)
    details = answer.json()["details"]
    assert [token["id"] for token in details["tokens"]] == tokens
    assert answer.json()["generated_text"] == AutoTokenizer.from_pretrained(artifact).decode(tokens)
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == (
        "length",
        12,
        None,
    )
    assert "".join(token["text"] for token in details["tokens"]) == answer.json()["generated_text"]


def test_details_hold_the_prompt_and_the_likeliest_tokens(server, artifact):
    answer = server.generate(
        PROMPT, max_new_tokens=3, details=True, decoder_input_details=True, top_n_tokens=4
    ).json()
    details, ids = answer["details"], AutoTokenizer.from_pretrained(artifact)(PROMPT)["input_ids"]
    assert [token["id"] for token in details["prefill"]] == ids
    assert details["prefill"][0]["logprob"] is None and all(
        token["logprob"] < 0 for token in details["prefill"][1:]
    )
    for token, top in zip(details["tokens"], details["top_tokens"], strict=True):
        assert (
            len(top) == 4 and top[0]["id"] == token["id"] and top[0]["logprob"] == token["logprob"]
        )
        assert sorted((one["logprob"] for one in top), reverse=True) == [
            one["logprob"] for one in top
        ]
    assert (
        answer["generated_text"]
        == server.generate(PROMPT, max_new_tokens=3).json()["generated_text"]
    )


def test_headers_say_how_long_it_took_and_how_much_it_was(server):
    answer = server.generate(PROMPT, max_new_tokens=5)
    headers = answer.headers
    assert (
        headers["x-compute-characters"] == str(len(PROMPT)) and headers["x-generated-tokens"] == "5"
    )
    assert float(headers["x-compute-time"]) > 0
    for name in ("total", "validation", "queue", "inference"):
        assert int(headers[f"x-{name}-time"]) >= 0
    assert (
        int(headers["x-prompt-tokens"]) > 3
        and int(headers["x-time-per-token"]) >= 0
        and headers["x-compute-type"]
    )


def test_a_stream_has_an_event_per_token_and_the_whole_text_in_the_last(server):
    whole = server.generate(PROMPT, max_new_tokens=9, details=True).json()
    answer = server.post(
        "/generate_stream", {"inputs": PROMPT, "parameters": {"max_new_tokens": 9}}
    )
    events = answer.events()
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [event["token"] for event in events] == whole["details"]["tokens"]
    assert [event["index"] for event in events] == list(range(1, 10))
    assert all(
        event["generated_text"] is None and event["details"] is None for event in events[:-1]
    )
    assert events[-1]["generated_text"] == whole["generated_text"]
    assert (
        events[-1]["details"]["finish_reason"] == "length"
        and events[-1]["details"]["generated_tokens"] == 9
    )


def test_token_ids_in_place_of_text_go_in_and_come_out(serve, alone, artifact):
    ids = AutoTokenizer.from_pretrained(artifact)(PROMPT)["input_ids"]
    prompt, tokens = ", ".join(map(str, ids)), alone(PROMPT, 6)
    said = ",".join(map(str, tokens))
    with serve(token_ids=True) as server:
        answer = server.generate(prompt, max_new_tokens=6, details=True)
        assert answer.json()["generated_text"] == said
        assert [token["id"] for token in answer.json()["details"]["tokens"]] == tokens
        assert answer.headers["x-prompt-tokens"] == str(len(ids))  # nothing is put before them
        assert (
            server.generate(prompt, max_new_tokens=6, return_full_text=True).json()[
                "generated_text"
            ]
            == f"{prompt},{said}"
        )
        streamed = server.post(
            "/generate_stream", {"inputs": prompt, "parameters": {"max_new_tokens": 6}}
        ).events()
        assert streamed[-1]["generated_text"] == said and len(streamed) == 6
        both = {"instances": [{"inputs": prompt, "parameters": {"max_new_tokens": 6}}] * 2}
        assert server.post("/vertex", both).json() == {"predictions": [said, said]}
        for wrong, why in {
            "1,def": "Given: 'def'",
            "1,,2": "Given: ''",
            "1,-2": "Given: '-2'",
            "": "cannot be empty",
        }.items():
            refused = server.generate(wrong)
            assert refused.status == 422 and why in refused.json()["error"]
        assert "is not one of" in server.generate("999999").json()["error"]


def test_the_mistake_of_a_stream_is_an_event_and_its_status_200(server):
    answer = server.post(
        "/generate_stream", {"inputs": PROMPT, "parameters": {"best_of": 2, "do_sample": True}}
    )
    text = "Input validation error: `best_of` != 1 is not supported when streaming tokens"
    assert (answer.status, answer.events()) == (200, [{"error": text, "error_type": "validation"}])


def test_a_seed_gives_the_same_text_and_is_told(server):
    first, second = (
        server.generate(
            PROMPT, max_new_tokens=8, do_sample=True, seed=2**64 - 1, details=True
        ).json()
        for _ in "ab"
    )
    assert first == second and first["details"]["seed"] == 2**64 - 1
    other = server.generate(PROMPT, max_new_tokens=8, do_sample=True, details=True).json()
    again = server.generate(
        PROMPT, max_new_tokens=8, do_sample=True, seed=other["details"]["seed"]
    ).json()
    assert again["generated_text"] == other["generated_text"]


def test_the_best_of_two_has_the_higher_mean_log_probability(server):
    details = server.generate(
        PROMPT, max_new_tokens=6, best_of=2, temperature=1.5, details=True
    ).json()["details"]
    (other,) = details["best_of_sequences"]
    means = [
        sum(token["logprob"] for token in one["tokens"]) / len(one["tokens"])
        for one in (details, other)
    ]
    assert (
        means[0] >= means[1]
        and other["seed"] == (details["seed"] + 1) % 2**64
        or other["seed"] + 1 == details["seed"]
    )


def test_a_stop_string_ends_the_text_with_it(server):
    whole = server.generate(PROMPT, max_new_tokens=40).json()["generated_text"]
    stop = whole[10:13]
    answer = server.generate(
        PROMPT, max_new_tokens=40, stop=["never said", stop], details=True
    ).json()
    assert answer["generated_text"] == whole[: whole.index(stop) + 3]
    assert answer["details"]["finish_reason"] == "stop_sequence"


def test_the_prompt_is_returned_where_it_is_asked_for(server):
    short = server.generate(PROMPT, max_new_tokens=2).json()["generated_text"]
    assert (
        server.generate(PROMPT, max_new_tokens=2, return_full_text=True).json()["generated_text"]
        == PROMPT + short
    )


def test_truncate_keeps_the_last_tokens(server, alone, artifact):
    answer = server.generate(
        "x = 1\n" * 40 + PROMPT, max_new_tokens=4, truncate=5, decoder_input_details=True
    ).json()
    tokens = AutoTokenizer.from_pretrained(artifact)("x = 1\n" * 40 + PROMPT)["input_ids"]
    assert [token["id"] for token in answer["details"]["prefill"]] == tokens[-5:]


def test_a_grammar_is_followed(server):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer = server.generate(
        PROMPT, max_new_tokens=40, grammar={"type": "json", "value": schema}, repetition_penalty=1.3
    )
    jsonschema.validate(json.loads(answer.json()["generated_text"]), schema)
    wrong = server.generate(PROMPT, grammar={"type": "regex", "value": "["})
    assert wrong.status == 422 and wrong.json()["error"].startswith(
        "Input validation error: grammar is not valid: "
    )


def test_tokenize_says_where_each_token_stands(server, artifact):
    text = "def größe(self):\n    pass"
    tokens = server.post("/tokenize", {"inputs": text}).json()
    assert [token["id"] for token in tokens] == AutoTokenizer.from_pretrained(artifact)(text)[
        "input_ids"
    ]
    for token in tokens[1:]:
        assert token["text"] == text[token["start"] : token["stop"]]


def test_root_answers_with_a_list_or_a_stream(server):
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 3}}
    (answer,) = server.post("/", body).json()
    assert (
        answer["generated_text"]
        == server.generate(PROMPT, max_new_tokens=3).json()["generated_text"]
    )
    assert (
        server.post("/", {**body, "stream": True}).events()[-1]["generated_text"]
        == answer["generated_text"]
    )


def test_vertex_and_invocations_answer_in_their_own_forms(server):
    parameters = {"max_new_tokens": 3}
    text = server.generate(PROMPT, **parameters).json()["generated_text"]
    instances = [{"inputs": PROMPT, "parameters": parameters}] * 2
    assert server.post("/vertex", {"instances": instances}).json() == {"predictions": [text, text]}
    assert (
        server.post("/vertex", {"instances": instances * 3}).json()["error_type"]
        == "batch size exceeded"
    )
    assert server.post("/invocations", {"inputs": PROMPT, "parameters": parameters}).json() == [
        {"generated_text": text}
    ]
    chat = server.post(
        "/invocations", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    ).json()
    assert chat["object"] == "chat.completion"


def test_info_has_tgis_keys(server):
    info = server.get("/info").json()
    expected = {
        "max_concurrent_requests": 128,
        "max_best_of": 2,
        "max_stop_sequences": 4,
        "max_input_length": 1023,
    }
    expected |= {
        "max_total_tokens": 1024,
        "max_waiting_tokens": 20,
        "max_client_batch_size": 4,
        "validation_workers": 2,
    }
    assert info.items() >= expected.items()
    assert info["model_id"] == "python-model" and len(info["model_sha"]) == 64


def test_a_model_of_more_positions_is_served_as_far_as_tgi_serves_it():
    from quantflow.server.models import batch_limits
    from quantflow.server.settings import Limits

    limits = batch_limits(Limits(), positions=8192)
    assert (limits.max_total_tokens, limits.max_input_tokens) == (4096, 4095)
    limits = batch_limits(Limits(max_total_tokens=6000), positions=8192)
    assert (limits.max_total_tokens, limits.max_input_tokens) == (6000, 5999)


def test_a_server_that_was_given_a_length_takes_no_longer_prompt_and_text(serve):
    from quantflow.server.settings import Limits

    with serve(limits=Limits(max_total_tokens=24)) as server:
        prompt = server.generate(
            "def", max_new_tokens=1, details=True, decoder_input_details=True
        ).json()["details"]["prefill"]
        room = 24 - len(prompt)
        assert server.generate("def", max_new_tokens=room).status == 200
        refused = server.generate("def", max_new_tokens=room + 1)
        assert (
            refused.status == 422
            and "`inputs` tokens + `max_new_tokens` must be <= 24" in refused.json()["error"]
        )
        assert server.get("/info").json()["max_total_tokens"] == 24


MISTAKES = {
    "no JSON": (b"{", 400, "bad_json"),
    "NaN": (b'{"inputs": "x", "parameters": {"temperature": NaN}}', 400, "bad_json"),
    "a number too large": (
        b'{"inputs": "x", "parameters": {"temperature": 1e999}}',
        422,
        "validation",
    ),
    "bytes that are no UTF-8": (b'{"inputs": "\xff"}', 400, "bad_json"),
    "half a surrogate pair": (b'{"inputs": "\\ud800"}', 400, "bad_json"),
    "lists in lists in lists": (
        b'{"inputs": "x", "parameters": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        400,
        "bad_json",
    ),
    "a huge integer": (
        b'{"inputs": "x", "parameters": {"seed": ' + b"9" * 6000 + b"}}",
        400,
        "bad_json",
    ),
    "no inputs": (b"{}", 422, "validation"),
    "inputs of another type": (b'{"inputs": 3}', 422, "validation"),
    "a negative count": (
        b'{"inputs": "x", "parameters": {"max_new_tokens": -1}}',
        422,
        "validation",
    ),
    "a seed of 128 bits": (
        b'{"inputs": "x", "parameters": {"seed": 340282366920938463463374607431768211456}}',
        422,
        "validation",
    ),
    "10,000 stop strings": (
        json.dumps({"inputs": "x", "parameters": {"stop": ["a"] * 10_000}}).encode(),
        422,
        "validation",
    ),
    "a prompt of 1 MB": (json.dumps({"inputs": "x y " * 250_000}).encode(), 422, "validation"),
    "a body above the limit": (
        b'{"inputs": "' + b"x" * 2_000_001 + b'"}',
        413,
        "payload_too_large",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_one_sentence_and_costs_nothing(server, name):
    body, status, kind = MISTAKES[name]
    answer = server.ask("POST", "/generate", body)
    assert (answer.status, answer.json()["error_type"]) == (status, kind), answer.body
    assert len(answer.json()["error"]) < 600 and "Traceback" not in answer.json()["error"]
    assert server.settled().running == 0


def test_another_content_type_path_or_method_is_refused(server):
    assert server.post("/generate", {"inputs": "x"}, **{"Content-Type": "text/plain"}).status == 415
    assert server.get("/generate").json()["error_type"] == "method_not_allowed"
    assert server.get("/nothing").json() == {"error": "Not found", "error_type": "not_found"}


def test_a_name_that_points_to_the_loopback_is_refused(server):
    assert server.get("/info", Host="attacker.example").status == 421
    assert server.get("/info", Host=f"localhost:{server.port}").status == 200


def test_metrics_have_tgis_names(server):
    before = server.get("/metrics").body.decode()
    server.generate(PROMPT, max_new_tokens=2)
    server.generate("", max_new_tokens=2)
    after = server.get("/metrics").body.decode()

    def value(text, name):
        return next(
            (float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} ")),
            0.0,
        )

    for name, more in (
        ("tgi_request_count", 2),
        ("tgi_request_success", 1),
        ('tgi_request_failure{err="validation"}', 1),
    ):
        assert value(after, name) == value(before, name) + more
    assert (
        value(after, "tgi_request_generated_tokens_sum")
        == value(before, "tgi_request_generated_tokens_sum") + 2
    )
    for name in (
        "duration",
        "validation_duration",
        "queue_duration",
        "inference_duration",
        "mean_time_per_token_duration",
    ):
        assert f"tgi_request_{name}_bucket" in after
    for line in (
        "tgi_queue_size 0.0",
        'tgi_batch_next_size_bucket{le="1.0"}',
        "quantflow_engine_pool_blocks",
    ):
        assert line in after


def test_a_stream_that_the_client_leaves_frees_its_row(server):
    async def leave():
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = json.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": 900}}).encode()
        head = "POST /generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        writer.write(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        assert b"data: " in await reader.readuntil(b"}\n\n")
        writer.close()

    before = server.models.first.engine.counters().cancelled
    asyncio.run(leave())
    assert server.settled(5).cancelled == before + 1


def test_guessed_tokens_change_no_text(serve, server):
    prompt = "a = [1, 2, 3, 4]\nb = [1, 2, 3, 4]\nc = [1, 2,"
    asked = {"max_new_tokens": 24, "details": True}
    grammar = {"type": "regex", "value": r"( \d,?)+\]\n"}
    with serve(speculate=4) as guessing:
        for more in ({}, {"do_sample": True, "seed": 3, "temperature": 0.5}, {"grammar": grammar}):
            expected = server.generate(prompt, **asked, **more).json()
            before = guessing.models.first.engine.counters().steps
            assert guessing.generate(prompt, **asked, **more).json() == expected
            steps = guessing.models.first.engine.counters().steps - before
            assert more or steps < expected["details"]["generated_tokens"]

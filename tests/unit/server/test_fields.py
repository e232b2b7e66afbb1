"""Fields of other servers: each of the table is applied, refused by its name, or harmless.

ggml-org/llama.cpp#10732 and #28697, vllm-project/vllm#53975, dottxt-ai/outlines#1888 and
vllm-project/vllm#1097 tell of answers that lack what a field asked for, without a word.
"""

from pathlib import Path

import pytest

from quantflow.server.asked import asked_by, asked_of, constraint_of, limit_of
from quantflow.server.bodies import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    Message,
    Parameters,
    ResponseFormat,
    StructuredOutputs,
    VertexBody,
)
from quantflow.server.errors import Refused
from quantflow.server.fields import NESTED, ROWS, Fate, table
from quantflow.server.http import typed
from quantflow.server.settings import Limits
from quantflow.server.validation import check

MESSAGES = [{"role": "user", "content": "hi"}]
BASES = {
    "chat": (ChatBody, {"messages": MESSAGES}),
    "completions": (CompletionBody, {"prompt": "hi"}),
    "prompt": (Parameters, {}),
}
REFUSED = [
    (place, name, row)
    for row in ROWS
    if row.fate is Fate.REFUSED
    for name in row.names
    for place in (row.only or BASES)
]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}}


def body_of(place, **fields):
    kind, base = BASES[place]
    return typed(kind, {**base, **fields})


def test_the_page_has_the_table_of_the_code():
    page = Path(__file__).parents[3] / "docs/serving.md"
    assert table() in page.read_text(), "put the text of quantflow.server.fields.table() there"


@pytest.mark.parametrize("place", BASES)
def test_every_field_that_is_refused_is_refused_by_its_name(place):
    for where, name, row in REFUSED:
        if where != place:
            continue
        with pytest.raises(Refused, match=f"`{name}` is not supported: ") as caught:
            body_of(place, **{name: [7.5] if name == "modalities" else 7.5})
        assert caught.value.status == 422
        on = True in [one for one in row.neutral if isinstance(one, bool)]
        for nothing in (None, [], {}, "", on, *row.neutral):
            body_of(place, **{name: nothing})
        with pytest.raises(Refused, match=f"`{name}` is not supported: "):
            body_of(place, **{name: not on})


def test_every_field_that_is_applied_is_read_by_a_body():
    known = {name for kind, _ in BASES.values() for name in kind.model_fields}
    applied = [name for row in ROWS if row.fate is Fate.APPLIED for name in row.names]
    assert set(applied) <= known
    ignored = {name for row in ROWS if row.fate is Fate.IGNORED for name in row.names}
    assert ignored & known <= {"user"}
    refused = [(place, name) for place, name, _ in REFUSED]
    assert len(refused) == len(set(refused))
    for place, (kind, _) in BASES.items():  # what a body reads is not refused before it is read
        read = kind.model_fields.keys() - {"suffix", "watermark"}
        assert not read & {name for where, name in refused if where == place}


def test_every_field_that_is_ignored_is_taken():
    for row in ROWS:
        for name in row.names if row.fate is Fate.IGNORED else ():
            for place in BASES:
                body_of(place, **{name: "x"})
    assert body_of("chat", an_unknown_one=1, keep_alive="5m").messages[0].content == "hi"


@pytest.mark.parametrize(
    ("kind", "base", "inside"),
    [(Message, MESSAGES[0], "messages"), (StructuredOutputs, {}, "structured_outputs")],
)
def test_objects_inside_a_body_are_read_as_closely(kind, base, inside):
    rows = [row for row in NESTED[inside] if row.fate is Fate.REFUSED]
    assert rows
    for row in rows:
        for name in row.names:
            with pytest.raises(Refused, match=f"`{inside}.{name}` is not supported"):
                typed(kind, {**base, name: "x"})
            typed(kind, {**base, name: None})


def test_parameters_beside_a_prompt_are_refused():
    """huggingface/text-generation-inference takes them inside `parameters` alone."""
    for name, value in (("max_new_tokens", 5), ("temperature", 0.5), ("stop", ["x"])):
        with pytest.raises(Refused, match=f"`{name}` stands beside `inputs`"):
            typed(GenerateBody, {"inputs": "hi", name: value})
        with pytest.raises(Refused, match=f"`{name}` stands beside `inputs`"):
            typed(VertexBody, {"instances": [{"inputs": "hi", name: value}]})
    with pytest.raises(Refused, match="`extra_body` is not supported"):
        typed(GenerateBody, {"inputs": "hi", "extra_body": {"a": 1}})


CONSTRAINTS = {
    "guided_json": ({"guided_json": SCHEMA}, "json", SCHEMA),
    "guided_json as text": ({"guided_json": "{}"}, "json", "{}"),
    "guided_regex": ({"guided_regex": "[0-9]{3}"}, "regex", "[0-9]{3}"),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, "choice", ["yes", "no"]),
    "guided_grammar": ({"guided_grammar": 'root ::= "x"'}, "grammar", 'root ::= "x"'),
    "json_schema": ({"json_schema": SCHEMA}, "json", SCHEMA),
    "regex": ({"regex": "a"}, "regex", "a"),
    "ebnf": ({"ebnf": 'root ::= "x"'}, "grammar", 'root ::= "x"'),
    "grammar as text": ({"grammar": 'root ::= "x"'}, "grammar", 'root ::= "x"'),
    "grammar": ({"grammar": {"type": "regex", "value": "a"}}, "regex", "a"),
    "an object": ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA),
    "its choice": ({"structured_outputs": {"choice": ["a"], "regex": None}}, "choice", ["a"]),
    "its regex": ({"structured_outputs": {"regex": "a"}}, "regex", "a"),
    "its grammar": ({"structured_outputs": {"grammar": "x"}}, "grammar", "x"),
    "its any object": ({"structured_outputs": {"json_object": True}}, "json_object", True),
    "none": ({"structured_outputs": {"json_object": False}, "grammar": ""}, None, None),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("place", BASES)
def test_a_constraint_is_applied_under_every_name(place, name):
    fields, kind, value = CONSTRAINTS[name]
    found = constraint_of(body_of(place, **fields))
    assert (found is None) == (kind is None)
    assert found is None or (found.type, found.value) == (kind, value)


FORMATS = {
    "OpenAI's": ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}, SCHEMA),
    "without its wrapper": ({"type": "json_schema", "schema": SCHEMA}, SCHEMA),
    "as the wrapper": ({"type": "json_schema", "json_schema": SCHEMA}, SCHEMA),
    "llama.cpp's": ({"type": "json_object", "schema": SCHEMA}, SCHEMA),
    "text-generation-inference's": ({"type": "json", "value": SCHEMA}, SCHEMA),
    "any object": ({"type": "json_object"}, None),
    "an empty schema": ({"type": "json_object", "schema": {}}, None),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_response_format_has_its_schema_wherever_it_stands(name):
    format, schema = FORMATS[name]
    found = constraint_of(body_of("chat", response_format=format))
    assert found.value == schema and found.type == ("json_object" if schema is None else "json")
    assert constraint_of(body_of("chat", response_format={"type": "text"})) is None
    assert typed(ResponseFormat, {"type": "regex", "value": "a"}).value == "a"


def test_two_constraints_are_refused_with_both_names():
    with pytest.raises(Refused, match="`guided_json` and `response_format`: one constraint"):
        constraint_of(body_of("chat", guided_json=SCHEMA, response_format={"type": "json_object"}))


def test_two_names_of_one_field_may_not_differ():
    one = body_of("chat", repeat_penalty=1.1, repetition_penalty=1.1)
    assert asked_of(one, grammar=None, limit=1, top=0).repetition_penalty == 1.1
    for place, fields in (
        ("chat", {"repeat_penalty": 1.1, "repetition_penalty": 1.2}),
        ("completions", {"min_tokens": 1, "min_new_tokens": 2}),
        ("chat", {"stop": ["a"], "stop_sequences": ["b"]}),
    ):
        with pytest.raises(Refused, match="one field, and differ"):
            asked_of(body_of(place, **fields), grammar=None, limit=1, top=0)
    with pytest.raises(Refused, match="`max_tokens` = 1 and `n_predict` = 2"):
        limit_of(body_of("chat", max_tokens=1, n_predict=2), default=None)


def test_minus_one_is_any_seed_and_as_many_tokens_as_fit():
    """leejet/stable-diffusion.cpp#1163, ollama/ollama#2773; ggml-org/llama.cpp's n_predict."""
    asked = asked_of(body_of("chat", seed=-1, top_k=-1), grammar=None, limit=1, top=0)
    assert asked.seed is None and asked.top_k == 0 and asked.sampling(3).top_k is None
    assert asked_of(body_of("chat", seed=-5), grammar=None, limit=1, top=0).seed == 2**64 - 5
    for name in ("max_tokens", "n_predict", "max_completion_tokens"):
        assert limit_of(body_of("completions", **{name: -1}), default=16) is None
        assert limit_of(body_of("completions", **{name: 3}), default=16) == 3
    assert limit_of(body_of("completions"), default=16) == 16


def test_both_interfaces_read_the_same_settings():
    fields = {
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "repeat_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "bad_words": ["x"],
        "logit_bias": [[5, False], [6, 1.5]],
        "stop_token_ids": [3, 3, 4],
        "truncate_prompt_tokens": 9,
        "include_stop_str_in_output": False,
        "skip_special_tokens": False,
        "add_special_tokens": False,
    }
    own = asked_by(body_of("prompt", **fields))
    other = asked_of(body_of("completions", **fields), grammar=None, limit=1, top=0)
    for name in ("min_p", "presence_penalty", "repetition_penalty", "no_repeat_ngram_size"):
        assert getattr(own, name) == getattr(other, name)
    assert own.bad_words == ("x",) and own.stop_token_ids == other.stop_token_ids == (3, 4)
    assert own.truncate == 9 and own.keeps_stop is False and own.special is False
    assert own.shows_special and own.repetition_penalty == 1.3
    rules = other.rules(bad_words=((7,),))
    assert (rules.no_repeat_ngram_size, rules.bad_words) == (2, ((7,),))


def test_filters_and_tokens_of_other_servers_are_applied():
    """ggml-org/llama.cpp's `top_n_sigma`, of which -1 and 0 are none; vLLM's allowed tokens."""
    for value, expected in ((1.5, 1.5), (0, None), (-1.0, None)):
        asked = asked_by(body_of("prompt", top_n_sigma=value))
        assert asked.top_n_sigma == expected and asked.samples == (expected is not None)
    sampled = asked_of(body_of("chat", top_n_sigma=2), grammar=None, limit=1, top=0).sampling(0)
    assert sampled.top_n_sigma == 2
    with pytest.raises(Refused, match="must not be empty"):
        check(asked_by(body_of("prompt", allowed_token_ids=[])), Limits(), text="hi")


def test_values_without_effect_are_taken_as_openais_clients_send_them():
    values = {"top_p": 1.0, "typical_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}
    asked = asked_of(body_of("chat", **values), grammar=None, limit=1, top=0)
    check(asked, Limits(), text="hi")
    assert asked.sampling(0).typical_p is None and asked.sampling(0).top_k is None


def test_lists_that_each_step_reads_are_bounded():
    for fields, told in (({"bad_words": ["x" * 501]}, "500"), ({"bad_words": [""]}, "empty")):
        with pytest.raises(Refused, match=told):
            check(asked_by(body_of("prompt", **fields)), Limits(), text="hi")


TWO_CONSTRAINTS = {"ebnf": "root ::= 'a'", "guided_regex": "a"}
TWO_LIMITS = {"truncate": 0, "truncate_prompt_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/generate_stream", {"inputs": "a", "parameters": TWO_CONSTRAINTS}, "one constraint is"),
        ("/generate_stream", {"inputs": "a", "parameters": TWO_LIMITS}, "`truncate` = 0"),
        ("/", {"inputs": "a", "parameters": TWO_CONSTRAINTS}, "one constraint is"),
        ("/v1/completions", {"prompt": "a", **TWO_CONSTRAINTS}, "one constraint is"),
        ("/v1/chat/completions", {**CHAT, **TWO_CONSTRAINTS}, "one constraint is"),
    ],
)
def test_a_stream_of_a_body_that_says_two_things_says_what_is_wrong(server, path, body, expected):
    answer = server.post(path, {**body, "stream": True})
    assert expected in answer.body.decode()
    assert answer.status == (422 if path.startswith("/v1") else 200)  # TGI has an event

"""OpenAI's routes, asked by OpenAI's own client."""

import json
import re
import warnings

import jsonschema
import pytest

openai = pytest.importorskip("openai")

MESSAGES = [{"role": "system", "content": "You write Python."}, {"role": "user", "content": "def"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Rome", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "additionalProperties": False}},
}


@pytest.fixture(scope="module")
def client(server):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            yield client


def chat(client, **options):
    return client.chat.completions.create(
        **{"model": "python-model", "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
        | options
    )


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["python-model"]


def test_a_chat_is_what_the_template_makes_of_it(client, server):
    answer = chat(client)
    prompt = "system: You write Python.\nuser: def\nassistant:"
    plain = server.generate(prompt, max_new_tokens=8).json()["generated_text"]
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (
        plain,
        "assistant",
        "length",
    )
    assert (
        answer.usage.completion_tokens == 8
        and answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    )
    tokens = server.post("/chat_tokenize", {"messages": MESSAGES}).json()
    assert (
        tokens["templated_text"] == "<s>" + prompt
        and len(tokens["tokenize_response"]) == answer.usage.prompt_tokens
    )


def test_a_stream_joins_to_the_whole_answer_and_ends_with_its_usage(client):
    whole = chat(client, max_tokens=20)
    chunks = list(chat(client, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert (
        chunks[0].choices[0].delta.role == "assistant"
        and chunks[-2].choices[0].finish_reason == "length"
    )
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert (
        len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks})
        == 1
    )
    assert {chunk.object for chunk in chunks} == {
        "chat.completion.chunk"
    } and whole.object == "chat.completion"
    assert (chunks[0].model, chunks[0].system_fingerprint) == (
        whole.model,
        whole.system_fingerprint,
    )


def test_stop_strings_are_no_part_of_the_answer(client):
    whole = chat(client, max_tokens=30).choices[0].message.content
    stop = whole[8:11]
    answer = chat(client, max_tokens=30, stop=[stop]).choices[0]
    assert (answer.message.content, answer.finish_reason) == (whole[: whole.index(stop)], "stop")
    chunks = list(chat(client, max_tokens=30, stop=stop, stream=True))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.message.content
    )


def test_logprobs_stand_beside_the_tokens(client):
    answer = chat(client, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert "".join(token.token for token in content) == answer.choices[0].message.content
    assert all(
        token.top_logprobs[0].logprob == token.logprob and len(token.top_logprobs) == 3
        for token in content
    )
    assert (
        bytes(byte for token in content for byte in token.bytes).decode()
        == answer.choices[0].message.content
    )
    chunks = list(chat(client, logprobs=True, top_logprobs=3, stream=True))
    streamed = [
        token
        for chunk in chunks
        for c in chunk.choices
        if c.logprobs
        for token in c.logprobs.content
    ]
    assert streamed == content


def test_choices_have_seeds_of_their_own_and_the_same_ones_again(client):
    first, again = (chat(client, temperature=1.0, n=3, seed=-5) for _ in "ab")
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 3 and texts == [choice.message.content for choice in again.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    streamed = ["", "", ""]
    for chunk in chat(client, temperature=1.0, n=3, seed=-5, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_a_response_format_is_followed(client):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    format = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }
    jsonschema.validate(
        json.loads(chat(client, response_format=format, max_tokens=40).choices[0].message.content),
        schema,
    )
    with pytest.raises(openai.UnprocessableEntityError, match="grammar is not valid"):
        chat(
            client,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "nothing"}},
            },
        )


def test_any_json_object_may_be_asked_for(client):
    answer = chat(
        client, response_format={"type": "json_object"}, max_tokens=300, frequency_penalty=0.5
    ).choices[0]
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)
    assert answer.message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "weather"}}],
    ids=["any", "by name"],
)
def test_a_tool_that_must_be_called_is_called_as_its_schema_says(client, choice):
    tools = [WEATHER] if choice == "required" else [CLOCK, WEATHER]
    answer = chat(client, tools=tools, tool_choice=choice, max_tokens=60).choices[0]
    (call,) = answer.message.tool_calls
    assert (answer.finish_reason, call.function.name, answer.message.content) == (
        "tool_calls",
        "weather",
        None,
    )
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    chunks = list(chat(client, tools=tools, tool_choice=choice, max_tokens=60, stream=True))
    streamed = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [one.function.name for one in streamed if one.id] == ["weather"] and streamed[0].id
    assert "".join(one.function.arguments for one in streamed) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls" and not any(
        c.choices[0].delta.content for c in chunks
    )


def test_a_tool_that_is_not_called_leaves_the_text(client):
    plain = chat(client, tools=[CLOCK], tool_choice="none").choices[0].message
    assert plain.content == chat(client).choices[0].message.content and plain.tool_calls is None
    auto = chat(client, tools=[CLOCK]).choices[0].message
    assert auto.content and auto.tool_calls is None
    chunks = chat(client, tools=[CLOCK], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == auto.content


def test_mistakes_are_errors_that_the_client_knows(client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        chat(client, model="another")
    with pytest.raises(openai.UnprocessableEntityError, match="strictly positive"):
        chat(client, max_tokens=0)
    with pytest.raises(openai.UnprocessableEntityError, match="Tool with name sun not found"):
        chat(client, tools=[CLOCK], tool_choice={"type": "function", "function": {"name": "sun"}})
    with pytest.raises(openai.UnprocessableEntityError, match="Template error: .*no wizards"):
        chat(client, messages=[{"role": "wizard", "content": "hi"}])
    with pytest.raises(openai.UnprocessableEntityError, match="`messages` cannot be empty"):
        chat(client, messages=[])
    with pytest.raises(openai.UnprocessableEntityError, match="image_url"):
        chat(
            client,
            messages=[
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ],
        )
    with pytest.raises(openai.UnprocessableEntityError, match="logit_bias"):
        chat(client, logit_bias={"5000": 1})


def test_a_bias_takes_a_token_away_and_another_one_in(client, server):
    details = server.generate("def main", max_new_tokens=1, details=True, top_n_tokens=2).json()[
        "details"
    ]
    first, second = (token["id"] for token in details["top_tokens"][0])
    words = [token["text"] for token in details["top_tokens"][0]]
    options = {"model": "tgi", "prompt": "def main", "max_tokens": 1, "temperature": 0}
    assert client.completions.create(**options).choices[0].text == words[0]
    assert (
        client.completions.create(**options, logit_bias={str(first): -100}).choices[0].text
        == words[1]
    )
    assert (
        client.completions.create(**options, logit_bias={str(second): 100}).choices[0].text
        == words[1]
    )


def test_completions_of_several_prompts_as_text_and_as_tokens(client, server):
    prompts = ["def main", "import"]
    answer = client.completions.create(model="tgi", prompt=prompts, max_tokens=6, temperature=0)
    texts = [
        server.generate(prompt, max_new_tokens=6).json()["generated_text"] for prompt in prompts
    ]
    assert [choice.text for choice in answer.choices] == texts
    ids = [
        [token["id"] for token in server.post("/tokenize", {"inputs": prompt}).json()]
        for prompt in prompts
    ]
    answer = client.completions.create(model="tgi", prompt=ids, max_tokens=6, temperature=0)
    assert [choice.text for choice in answer.choices] == texts
    answer = client.completions.create(
        model="tgi", prompt=ids[1], max_tokens=6, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in answer) == texts[1]


def test_an_echo_has_the_log_probabilities_of_the_prompt(client, server):
    answer = client.completions.create(
        model="tgi", prompt="def main", max_tokens=2, temperature=0, echo=True, logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    details = server.generate(
        "def main", max_new_tokens=2, decoder_input_details=True, details=True
    ).json()["details"]
    both = [*details["prefill"], *details["tokens"]]
    assert logprobs.token_logprobs == [token["logprob"] for token in both]
    assert answer.choices[0].text.startswith("def main") and len(logprobs.text_offset) == len(both)


def test_the_best_of_several_completions_is_returned(client, server):
    # neither of the two continuations ends early
    no_end = {str(end): -100 for end in server.models.first.loaded.eos_token_ids}
    answer = client.completions.create(
        model="tgi", prompt="def", max_tokens=5, best_of=2, temperature=1.0, logit_bias=no_end
    )
    assert len(answer.choices) == 1 and answer.usage.completion_tokens == 10


def completed(client, **options):
    return client.completions.create(
        **{"model": "tgi", "prompt": "def main(", "temperature": 0, "max_tokens": 3} | options
    )


@pytest.mark.parametrize("count", [0, 2])
def test_an_echoed_prompt_has_the_likeliest_tokens_of_each_place_and_what_stands_there(
    client, server, count
):
    whole = completed(client, echo=True, logprobs=count).choices[0]
    found = whole.logprobs
    assert (
        whole.text.startswith("def main(")
        and found.token_logprobs[0] is None
        and found.top_logprobs[0] is None
    )
    for token, logprob, top in zip(
        found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:], strict=True
    ):
        assert top[token] == logprob and max(1, count) <= len(top) <= count + 1
    likeliest = [
        max(top, key=top.get) == token
        for token, top in zip(found.tokens[1:], found.top_logprobs[1:], strict=True)
    ]
    # the answer holds the likeliest tokens, the prompt does not
    assert count == 0 or (not all(likeliest) and all(likeliest[-3:]))
    special = [place for place, token in enumerate(found.tokens) if token == "<s>"]
    for place, (token, offset) in enumerate(zip(found.tokens, found.text_offset, strict=True)):
        assert place in special or whole.text[offset : offset + len(token)] == token
    chunks = [
        chunk.choices[0] for chunk in completed(client, echo=True, logprobs=count, stream=True)
    ]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for chunk in chunks for one in getattr(chunk.logprobs, name)] == getattr(
            found, name
        )
    alone = completed(client, echo=True, logprobs=count, max_tokens=0).choices[0]
    assert (alone.text, alone.finish_reason) == ("def main(", "length")
    assert alone.logprobs.token_logprobs == found.token_logprobs[:-3]
    assert [choice.text for choice in completed(client, echo=True, max_tokens=0, n=2).choices] == [
        "def main("
    ] * 2


def test_a_prompt_that_is_not_echoed_is_continued(client):
    with pytest.raises(openai.UnprocessableEntityError, match="strictly positive"):
        completed(client, max_tokens=0)
    with pytest.raises(openai.UnprocessableEntityError, match="strictly positive"):
        completed(client, max_tokens=0, echo=True, stream=True)


NESTED = {
    "type": "function",
    "function": {
        "name": "visit",
        "parameters": {
            "$defs": {
                "Place": {
                    "type": "object",
                    "properties": {"city": {"enum": ["Rome"]}},
                    "required": ["city"],
                }
            },
            "type": "object",
            "properties": {"to": {"$ref": "#/$defs/Place"}},
            "required": ["to"],
            "additionalProperties": False,
        },
    },
}
NESTED["function"]["parameters"]["$defs"]["Place"]["additionalProperties"] = False


@pytest.mark.parametrize(
    "choice", ["required", "visit", {"type": "function", "function": {"name": "visit"}}], ids=str
)
def test_a_schema_of_a_tool_may_refer_to_itself(client, choice):
    tools = [NESTED] if choice == "required" else [WEATHER, NESTED]
    (call,) = (
        chat(client, tools=tools, tool_choice=choice, max_tokens=60).choices[0].message.tool_calls
    )
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "visit",
        {"to": {"city": "Rome"}},
    )


def test_tools_that_nothing_forces_may_have_any_schema(client):
    assert chat(client, tools=[NESTED]).choices[0].message.content


CALL = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Sure: {CALL}", "Sure: ", 1),
        (f"Sure: {CALL} and {CALL}.", "Sure:  and .", 2),
        (f"{CALL}{CALL}", None, 2),
        ('<tool_call>{"name": "sun"}</tool_call>', '<tool_call>{"name": "sun"}</tool_call>', 0),
        ("a < b <tool", "a < b <tool", 0),
    ],
)
def test_what_stands_around_calls_is_the_text_of_streams_and_of_whole_answers(
    client, text, content, calls
):
    """The model writes what a grammar makes it write."""
    format = {"response_format": {"type": "regex", "value": re.escape(text)}}
    options = {"tools": [CLOCK], "extra_body": format, "max_tokens": 120}
    whole = chat(client, **options).choices[0]
    assert (whole.message.content, len(whole.message.tool_calls or ())) == (content, calls)
    chunks = [chunk.choices[0] for chunk in chat(client, **options, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == (content or "")
    assert sum(call.id is not None for c in chunks for call in c.delta.tool_calls or ()) == calls
    assert chunks[-1].finish_reason == whole.finish_reason
    one = chat(client, **options, parallel_tool_calls=False).choices[0].message
    assert len(one.tool_calls or ()) == min(calls, 1)

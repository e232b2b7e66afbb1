"""What becomes of a conversation: its prompt, and the calls and reasoning in its answers.

The model writes what a regular expression makes it write.
"""

import json
import re

import pytest

from quantflow.models import chat_form, chat_template
from quantflow.models.tokenizer import load_tokenizer
from quantflow.runtime.prompt_files import encode
from quantflow.server.parsers import CALL_PARSERS
from quantflow.server.text import AnswerText, Vocabulary

# after Qwen 3's template: roles by name, tools, reasoning of earlier answers, thinking on request
QWEN = """{{ bos_token }}{% if tools %}tools: {{ tools | tojson }}
{% endif %}{% for m in messages %}\
{% if m.role == 'user' or m.role == 'system' %}{{ m.role }}: {{ m.content }}
{% elif m.role == 'assistant' %}assistant: \
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\
{% for call in m.tool_calls %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}
{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: \
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}{% endif %}{% if reasoning_effort is defined %}({{ reasoning_effort }}){% endif %}"""
# after Gemma's: any role that comes, and nothing of tools
PLAIN = """{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
# after Mistral's
MISTRAL = """{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\
{% for call in m.tool_calls %}{% if call.id | length != 9 %}\
{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}\
[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]\
{{ call.function.arguments | tojson }}{% endfor %}{{ m.tool_call_id }}
{% endfor %}{{ tools | tojson if tools }}"""
# after Kimi K2's
KIMI = """{% for m in messages %}<|im_middle|>{{ m.role }}: {{ m.content }}{{ m.tool_call_id }}\
{% for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>\
{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}
{% endfor %}{{ tools | tojson if tools }}"""
# one that knows two more roles
DEVELOPER = """{% for m in messages %}\
{{ m.role if m.role in ['developer', 'critic'] else 'other' }}: {{ m.content }}
{% endfor %}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASKED = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def servers(serve, tmp_path_factory):
    """A function from the text of a template to the client of a server with it."""
    folder, running = tmp_path_factory.mktemp("templates"), {}

    def server(template):
        if template not in running:
            path = folder / f"{len(running)}.jinja"
            path.write_text(template)
            context = serve(chat_template=path)
            running[template] = context, context.__enter__()
        return running[template][1]

    yield server
    for context, _ in running.values():
        context.__exit__(None, None, None)


@pytest.fixture(scope="module")
def qwen(servers):
    return servers(QWEN)


@pytest.fixture(scope="module")
def plain(servers):
    return servers(PLAIN)


def prompt(server, messages=ASKED, **fields):
    """The text of a conversation's prompt."""
    answer = server.post("/chat_tokenize", {"messages": messages, **fields})
    assert answer.status == 200, answer.json()
    return answer.json()["templated_text"]


@pytest.fixture(scope="module")
def written(artifact):
    """A function from a template and a conversation to its prompt, without a server."""
    tokenizer = load_tokenizer(artifact)

    def text(template, messages=ASKED, **options):
        rendered = chat_template.render(
            tokenizer, messages, answer=True, template=template, options=options
        )
        return rendered.text

    return text


def refusal(server, **fields):
    answer = server.post("/v1/chat/completions", {"messages": ASKED, "max_tokens": 1, **fields})
    assert answer.status == 422, answer.json()
    return answer.json()["error"]["message"]


def answered(server, text, **fields):
    """The choice of a whole answer, and that of a stream with its deltas put together."""
    body = {
        "messages": ASKED,
        "max_tokens": 200,
        "response_format": {"type": "regex", "value": re.escape(text)},
        **fields,
    }
    whole = server.post("/v1/chat/completions", body).json()["choices"][0]
    events = server.post("/v1/chat/completions", {**body, "stream": True}).events()
    assert events[-1] == "[DONE]"
    return whole, [event["choices"][0] for event in events[:-1]]


def together(chunks):
    """The message and the reason of a stream, as a whole answer has them; ids left out."""
    message = {"role": "assistant", "content": ""}
    for chunk in chunks:
        delta = chunk["delta"]
        for name in ("content", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                assert call["index"] == len(calls) and call["function"]["arguments"] == ""
                calls.append({"type": call["type"], "function": dict(call["function"])})
            else:
                assert call["index"] == len(calls) - 1 and set(call) == {"index", "function"}
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    if not message["content"] and "tool_calls" in message:
        message["content"] = None
    return message, chunks[-1]["finish_reason"]


def without_ids(message):
    calls = [
        {name: value for name, value in call.items() if name != "id"}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome, Oslo"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        (f"<think>\nHm.\n</think>\n\nSure: {CALL}", "Sure: ", "Hm.", 1),
        (f"<think>\nHm.\n</think>\n\n{CALL}\n{CALL}", None, "Hm.", 2),
        (f"{CALL[:-12]}", None, None, 1),
        ("<think>Hm.</think>a < b", "a < b", "Hm.", 0),
        ('{"city": "Rome"}', '{"city": "Rome"}', None, 0),
    ],
)
def test_a_stream_holds_the_reasoning_and_the_calls_of_the_whole_answer(
    qwen, text, content, reasoning, calls
):
    """vllm-project/vllm#28852, open-webui/open-webui#24697, vllm-project/vllm#43267."""
    whole, chunks = answered(qwen, text, tools=[WEATHER])
    message = whole["message"]
    assert (message["content"], message.get("reasoning_content")) == (content, reasoning)
    assert len(message.get("tool_calls", ())) == calls
    assert together(chunks) == (without_ids(message), whole["finish_reason"])
    for call in message.get("tool_calls", ()):
        assert json.loads(call["function"]["arguments"]) == {"city": "Rome, Oslo"}
        assert call["id"].startswith("call_")
    if calls:
        pieces = [
            call["function"]["arguments"]
            for chunk in chunks
            for call in chunk["delta"].get("tool_calls", ())
        ]
        assert len(pieces) > 3 * calls  # as they are written
        assert whole["finish_reason"] == "tool_calls"


def test_logprobs_stand_beside_reasoning_and_calls_too(qwen):
    whole, chunks = answered(qwen, f"<think>Hm.</think>{CALL}", tools=[WEATHER], logprobs=True)
    streamed = [
        one["token"] for chunk in chunks for one in (chunk["logprobs"] or {}).get("content", ())
    ]
    assert streamed == [one["token"] for one in whole["logprobs"]["content"]]


def test_reasoning_that_the_prompt_begins_is_reasoning(qwen):
    fields = {"chat_template_kwargs": {"enable_thinking": True}}
    assert prompt(qwen, **fields).endswith("assistant: <think>\n")
    whole, chunks = answered(qwen, "Hm.\n</think>\n\nFour.", **fields)
    assert whole["message"] == {
        "role": "assistant", "content": "Four.", "reasoning_content": "Hm.",
    }  # fmt: skip
    assert together(chunks) == (whole["message"], "stop")
    whole, _ = answered(qwen, "Hm.", **fields)
    assert (whole["message"]["content"], whole["message"]["reasoning_content"]) == ("", "Hm.")


def test_json_comes_behind_the_reasoning_that_the_prompt_begins(qwen):
    """The model reasons as it likes; without that mark in the prompt the JSON comes at once."""
    fields = {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "a"}}},
        "max_tokens": 8,
        "temperature": 0,
    }
    whole, _ = answered(qwen, "", **fields)
    assert whole["message"] == {"role": "assistant", "content": '"a"'}
    begun = [*ASKED, {"role": "assistant", "content": "<think>def"}]
    free, _ = answered(qwen, "", messages=begun, response_format=None, max_tokens=8, temperature=0)
    whole, chunks = answered(qwen, "", **fields, messages=begun)
    assert whole["message"] == free["message"] and whole["message"]["content"] == ""
    assert whole["message"]["reasoning_content"] and whole["finish_reason"] == "length"
    assert together(chunks) == (whole["message"], "length")
    over = [*ASKED, {"role": "assistant", "content": "<think>def</think>"}]
    whole, _ = answered(qwen, "", **fields, messages=over)
    assert whole["message"] == {"role": "assistant", "content": '"a"'}
    forced = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 40}
    whole, _ = answered(qwen, "", **(fields | {"response_format": None} | forced), messages=over)
    assert whole["message"]["tool_calls"][0]["function"]["name"] == "weather"


def test_a_forced_call_that_is_cut_off_has_its_arguments_so_far(qwen):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "minLength": 200}},
        "required": ["city"],
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    fields = {"tools": [tool], "tool_choice": "required", "response_format": None}
    whole, chunks = answered(qwen, "", **fields, max_tokens=24, temperature=0)
    (call,) = whole["message"]["tool_calls"]
    assert call["function"]["name"] == "weather" and whole["message"]["content"] is None
    assert call["function"]["arguments"].startswith("{")
    with pytest.raises(ValueError):
        json.loads(call["function"]["arguments"])
    assert together(chunks) == (without_ids(whole["message"]), "length")
    assert whole["finish_reason"] == "length"


def test_parsers_can_be_chosen_and_left_out(serve, tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(QWEN)
    text = "<think>Hm.</think>[TOOL_CALLS]weather[ARGS]{}"
    with serve(chat_template=path, tool_parser="mistral", reasoning_parser="none") as server:
        whole, chunks = answered(server, text, tools=[WEATHER])
        assert whole["message"]["content"] == "<think>Hm.</think>"
        assert len(whole["message"]["tool_calls"][0]["id"]) == 9
        assert together(chunks)[0] == without_ids(whole["message"])


def test_a_developer_is_the_system_where_the_template_does_not_know_the_role(qwen, written):
    """sgl-project/sglang#40082, vllm-project/vllm#42407: the instruction was left out."""
    messages = [{"role": "developer", "content": "Be brief."}, *ASKED]
    assert prompt(qwen, messages) == "<s>system: Be brief.\nuser: hi\nassistant: "
    assert written(DEVELOPER, messages).startswith("developer: Be brief.")


@pytest.mark.parametrize("role", ["devloper", "function", "", "critic"])
def test_a_role_that_nobody_knows_is_refused_by_name(qwen, plain, written, role):
    messages = [{"role": role, "content": "x"}, *ASKED]
    for server in (qwen, plain):
        message = refusal(server, messages=messages)
        assert f"no role {role!r}" in message and "system, user, assistant, tool" in message
    if role == "critic":
        assert f"{role}: x" in written(DEVELOPER, messages)


def test_a_role_whose_messages_the_template_leaves_out_is_refused_by_name(qwen, plain):
    messages = [*ASKED, {"role": "tool", "content": "22 degrees", "tool_call_id": "a"}]
    assert "leaves out the messages of the role 'tool'" in refusal(qwen, messages=messages)
    assert "tool: 22 degrees\n" in prompt(plain, messages)


def test_tools_that_the_template_does_not_know_stand_in_the_last_message(plain, qwen):
    """ggml-org/llama.cpp#27129, unslothai/unsloth#10314: they were dropped."""
    messages = [*ASKED, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "go"}]
    text = prompt(plain, messages, tools=[WEATHER])
    assert text.startswith("<s>user: hi\nassistant: Yes?\nuser: go\n---\n[{")
    assert '"name": "weather"' in text and chat_form.TOOL_PROMPT in text
    assert text.endswith(f"{chat_form.TOOL_PROMPT}\nassistant:")
    assert prompt(plain, tools=[WEATHER], tool_prompt="Call one!").endswith("Call one!\nassistant:")
    assert "weather" not in prompt(plain, tools=[WEATHER], tool_choice="none")
    assert prompt(qwen, tools=[WEATHER]).startswith("<s>tools: [{")
    whole, _ = answered(plain, '{"name": "weather", "parameters": {}}', tools=[WEATHER])
    assert whole["message"]["tool_calls"][0]["function"]["name"] == "weather"


def test_parts_of_a_message_are_lines(plain):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert prompt(plain, [{"role": "user", "content": parts}]) == "<s>user: one\ntwo\nassistant:"


BEGUN = [*ASKED, {"role": "assistant", "content": "Sure, the"}]


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "assistant: Sure, the"),
        ({"continue_final_message": True}, "assistant: Sure, the"),
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            "assistant: Sure, the",
        ),
        ({"add_generation_prompt": False}, "assistant: Sure, the"),
        ({"add_generation_prompt": True}, "assistant: Sure, the\nassistant:"),
        ({"continue_final_message": False}, "assistant: Sure, the\nassistant:"),
        (
            {"continue_final_message": False, "add_generation_prompt": False},
            "assistant: Sure, the\n",
        ),
    ],
    ids=str,
)
def test_a_last_message_of_the_assistant_is_continued(plain, fields, end):
    """huggingface/text-generation-inference#2733, ggml-org/llama.cpp#11755."""
    assert prompt(plain, BEGUN, **fields) == f"<s>user: hi\n{end}"


def test_what_is_continued_is_the_rest_alone(plain):
    body = {"messages": BEGUN, "max_tokens": 6, "temperature": 0}
    answer = plain.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    text = "user: hi\nassistant: Sure, the"
    assert answer == plain.generate(text, max_new_tokens=6).json()["generated_text"]
    assert "both true" in refusal(plain, continue_final_message=True, add_generation_prompt=True)
    assert prompt(plain, add_generation_prompt=False) == "<s>user: hi\n"


def test_a_pipeline_and_prompt_files_continue_too(artifact):
    import quantflow

    with quantflow.pipeline(artifact) as generator:
        generator.tokenizer.chat_template = PLAIN
        options = {"max_new_tokens": 4}
        (rest,) = generator("<s>user: hi\nassistant: Sure, the"[3:], **options)
        rest = rest["generated_text"].removeprefix("user: hi\nassistant: Sure, the")
        (answer,) = generator(BEGUN, **options)
        assert answer["generated_text"] == [
            *ASKED,
            {"role": "assistant", "content": f"Sure, the{rest}"},
        ]
        (answer,) = generator(BEGUN, **options, return_full_text=False)
        assert answer["generated_text"] == rest
        (answer,) = generator(BEGUN, **options, continue_final_message=False)
        assert answer["generated_text"][:2] == BEGUN and len(answer["generated_text"]) == 3
        (ids,) = encode([BEGUN], generator.tokenizer, limit=None, chat=True)
        assert generator.tokenizer.decode(ids) == "<s>user: hi\nassistant: Sure, the"


def test_variables_that_the_template_never_reads_are_named(plain, qwen):
    fields = {
        "chat_template_kwargs": {"enable_thinking": False, "moo\r\nd: é": 1},
        "reasoning_effort": "high",
        "guideline": "none",
    }
    names = r"enable_thinking, guideline, moo\r\nd: \u00e9, reasoning_effort"
    body = {"messages": ASKED, "max_tokens": 1}
    for more in ({}, {"stream": True}):
        answer = plain.post("/v1/chat/completions", {**body, **fields, **more})
        assert (answer.status, answer.headers["x-unread-template-variables"]) == (200, names)
    answer = plain.post("/chat_tokenize", {**body, **fields})
    assert answer.headers["x-unread-template-variables"] == names
    known = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}
    answer = qwen.post("/v1/chat/completions", {**body, **known})
    assert answer.status == 200 and "x-unread-template-variables" not in answer.headers


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"reasoning_effort": "high"}, "assistant: (high)"),  # openvinotoolkit/model_server#4495
        ({"enable_thinking": True}, "assistant: <think>\n"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "assistant: <think>\n"),
        ({"reasoning_effort": "none"}, "assistant: (none)"),
    ],
)
def test_fields_of_thinking_reach_the_template(qwen, fields, end):
    assert prompt(qwen, **fields).endswith(end)


def test_arguments_of_earlier_calls_are_texts_where_the_template_needs_them(written):
    """DeepSeek's templates put arguments together with other texts; Qwen's write objects."""
    deepseek = """{% for m in messages %}{% if m.role == 'tool' %}{{ m.content }}\
{% elif m.role == 'user' %}{{ m.content }}{% endif %}{% for call in m.tool_calls %}\
{{ '<｜tool▁sep｜>' + call['function']['arguments'] }}{% endfor %}{% endfor %}"""
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    messages = [
        *ASKED,
        {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]},
        {"role": "tool", "content": "22", "tool_call_id": "a"},
    ]
    assert written(deepseek, messages) == 'hi<｜tool▁sep｜>{"city": "Rome"}22'
    assert '"arguments": {"city": "Rome"}' in written(QWEN, messages[:2])


def test_thinking_is_enabled_under_the_name_that_the_template_reads(written):
    """DeepSeek V3.1 reads `thinking`, and sets it first where it is missing."""
    template = """{% if not thinking is defined %}{% set thinking = false %}{% endif %}\
{{ messages[-1].content }}{{ '<think>' if thinking else '</think>' }}"""
    assert written(template) == "hi</think>"
    assert written(template, enable_thinking=True) == "hi<think>"
    assert written(template, thinking=False, enable_thinking=True) == "hi</think>"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_of_the_history_reaches_the_template(qwen, name):
    earlier = {"role": "assistant", "content": "Four.", name: "Hm."}
    assert "assistant: <think>Hm.</think>Four." in prompt(qwen, [*ASKED, earlier, *ASKED])


def test_calls_have_the_ids_that_mistrals_templates_take(servers):
    """ml-explore/mlx-lm#1375, vllm-project/vllm#9019, jundot/omlx#1997."""
    server = servers(MISTRAL)
    whole, _ = answered(server, "[TOOL_CALLS]weather[ARGS]{}", tools=[WEATHER])
    (call,) = whole["message"]["tool_calls"]
    assert re.fullmatch("[A-Za-z0-9]{9}", call["id"])
    for own in (call["id"], "call_0fypS1hVX", "chatcmpl-tool-3c94d20904d94faba1b9a917b347db1c"):
        earlier = {"role": "assistant", "content": "", "tool_calls": [{**call, "id": own}]}
        result = {"role": "tool", "content": "22", "tool_call_id": own}
        text = prompt(server, [*ASKED, earlier, result])
        shown, said = re.search(r"\[CALL_ID\](\w{9})\[ARGS\]{}\ntool: 22(\w{9})", text).groups()
        assert shown == said and (own == shown) == (len(own) == 9)


def test_functions_of_the_older_form_are_tools_and_are_answered_in_it(qwen):
    """langchain-ai/langchain#12966, BerriAI/litellm#2037: clients that still send `functions`."""
    functions = [WEATHER["function"], {"name": "clock", "description": "Tell the time."}]
    new = [{"type": "function", "function": one} for one in functions]
    assert prompt(qwen, functions=functions) == prompt(qwen, tools=new)
    assert "weather" not in prompt(qwen, functions=functions, function_call="none")
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    whole, chunks = answered(qwen, text * 2, functions=functions)
    called = {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert whole["message"]["function_call"] == called and "tool_calls" not in whole["message"]
    assert whole["finish_reason"] == chunks[-1]["finish_reason"] == "function_call"
    deltas = [one["delta"]["function_call"] for one in chunks if "function_call" in one["delta"]]
    assert deltas[0] == {"name": "weather", "arguments": ""}
    assert "".join(one["arguments"] for one in deltas) == called["arguments"]
    forced, _ = answered(
        qwen, "", functions=functions, function_call={"name": "clock"}, response_format=None
    )
    assert forced["message"]["function_call"]["name"] == "clock"
    plain, _ = answered(qwen, "Hi.", functions=functions)
    assert (plain["message"]["content"], plain["finish_reason"]) == ("Hi.", "stop")


def test_a_history_of_the_older_form_is_written_as_the_newer_one(plain, qwen):
    call = {"name": "weather", "arguments": '{"city": "Rome"}'}
    older = [
        *ASKED,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "22"},
    ]
    newer = [
        *ASKED,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "name": "weather", "tool_call_id": "call_1", "content": "22"},
    ]
    for server, shown in ((plain, 3), (qwen, 2)):  # the second template leaves results out
        assert prompt(server, older[:shown]) == prompt(server, newer[:shown])
    assert prompt(plain, older).endswith("tool: 22\nassistant:")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"functions": [WEATHER["function"]], "tools": [WEATHER]}, "one field in two forms"),
        ({"function_call": "auto", "tool_choice": "auto"}, "one field in two forms"),
        ({"functions": [WEATHER["function"]], "function_call": "weather"}, "function_call"),
    ],
    ids=str,
)
def test_both_forms_of_tools_in_one_body_are_refused(plain, fields, told):
    assert told in refusal(plain, **fields)
    for choice in ({"name": "sun"}, {"name": "weather"}):
        body = {"messages": ASKED, "functions": [], "function_call": choice}
        answer = plain.post("/v1/chat/completions", body)
        assert answer.status == 422 and answer.json()["error_type"] == "tool_error"


@pytest.mark.slow
def test_calls_have_the_ids_that_kimi_goes_on_with(servers):
    """sgl-project/sglang#10607, getkimchi/kimchi#1063: with other ids the model ends its turn.

    They count the calls of the conversation, whoever made it.
    """
    server = servers(KIMI)
    text = "<|tool_call_begin|>functions.weather:9<|tool_call_argument_begin|>{}<|tool_call_end|>"
    whole, chunks = answered(server, text * 2, tools=[WEATHER])
    calls = whole["message"]["tool_calls"]
    ids = ["functions.weather:0", "functions.weather:1"]
    assert [call["id"] for call in calls] == ids
    streamed = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    assert [call["id"] for call in streamed if "id" in call] == ids
    for own in (ids, ["call_0fyp", "functions_weather_1"]):
        named = [{**call, "id": one} for call, one in zip(calls, own, strict=True)]
        earlier = {"role": "assistant", "content": "", "tool_calls": named}
        results = [{"role": "tool", "content": "22", "tool_call_id": one} for one in own]
        messages = [*ASKED, earlier, *results]
        shown = re.findall(r"functions\.weather:\d", prompt(server, messages))
        assert shown == [*ids, *ids]
        later, _ = answered(server, text, tools=[WEATHER], messages=messages)
        assert later["message"]["tool_calls"][0]["id"] == "functions.weather:2"
    unknown = [*ASKED, {"role": "tool", "content": "22", "tool_call_id": "lost"}]
    assert "22lost" in prompt(server, unknown)


def test_special_tokens_that_reading_needs_have_their_text(artifact):
    """Mistral's and Llama's marks of calls are special tokens, which texts leave out."""
    tokenizer = load_tokenizer(artifact)
    marks = ["[TOOL_CALLS]", "[ARGS]", "<|other|>"]
    tokenizer.add_special_tokens({"extra_special_tokens": marks})
    vocabulary = Vocabulary(tokenizer)
    ids = tokenizer.encode("def é[TOOL_CALLS]clock[ARGS]{}<|other|> end", add_special_tokens=False)
    texts = []
    for kept in (CALL_PARSERS["mistral"].kept, CALL_PARSERS["hermes"].kept):
        hidden = vocabulary.hidden_but(kept)
        text = AnswerText(tokenizer, ids[:1], stops=(), keeps_stop=False, hidden=hidden)
        for token in ids[1:]:
            text.put(token)
        text.end(stopped=False)
        texts.append(text.text)
    assert texts == [" é[TOOL_CALLS]clock[ARGS]{} end", " éclock{} end"]

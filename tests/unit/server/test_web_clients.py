"""Bodies of clients that run in a browser or an editor, as they send them.

They are written after the clients' sources, which the tests name: Open WebUI
(open-webui/open-webui) and Continue (continuedev/continue).
"""

import json

import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TASK = """### Task:
Generate 1-3 broad tags categorizing the main themes of the chat history.

### Output:
JSON format: { "tags": ["tag1", "tag2", "tag3"] }

### Chat History:
<chat_history>
USER: def
ASSISTANT: import
</chat_history>"""
SEARCH = {
    "type": "function",
    "function": {
        "name": "search_web",
        "description": "Search the web",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What to look for"},
                "count": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
            },
            "required": ["query"],
        },
    },
}
# what Open WebUI's page hands to its backend, and a direct connection to the server
LEFT_OVERS = {
    "params": {},
    "files": [],
    "filter_ids": [],
    "tool_ids": [],
    "tool_servers": [],
    "features": {"image_generation": False, "code_interpreter": False, "web_search": False},
    "variables": {"{{USER_NAME}}": "Ann", "{{CURRENT_DATE}}": "2026-01-31"},
    "model_item": {"id": "tgi", "object": "model", "owned_by": "openai", "actions": []},
    "session_id": "IhQ1v0bNrvhJ4sQxAAAB",
    "chat_id": "local:IhQ1v0bNrvhJ4sQxAAAB",
    "id": "0b0e7a3c-6c1e-4f0a-9f6a-8a5d3b1f2c4d",
    "parent_id": None,
    "background_tasks": {"title_generation": True, "tags_generation": True},
    "metadata": {"task": "tags_generation", "task_body": {"messages": []}, "chat_id": None},
}


def said(answer):
    """The text of a stream's chunks, and the usage at its end."""
    *events, end = answer.events()
    assert end == "[DONE]"
    text = "".join(
        choice["delta"].get("content") or "" for one in events for choice in one["choices"]
    )
    return text, events[-1].get("usage")


def chat(server, text="def", **fields):
    body = {"model": "tgi", "messages": [{"role": "user", "content": text}], **fields}
    answer = server.post(CHAT, body)
    assert answer.status == 200, answer.body
    return answer


@pytest.fixture(scope="module")
def plain(server):
    """The answer to a plain request."""
    answer = chat(server, max_tokens=6, temperature=0)
    return answer.json()["choices"][0]["message"]["content"]


def test_open_webui_lists_models(server):
    """open-webui/open-webui, routers/openai.py: `{url}/models` with a key, also one of blanks."""
    for key in ("Bearer sk-none", "Bearer ", "Bearer"):
        answer = server.get("/v1/models", Authorization=key)
        assert answer.status == 200
        (model,) = answer.json()["data"]
        assert {"id", "object", "owned_by", "created"} <= model.keys()


def test_open_webui_chats(server, plain):
    """open-webui/open-webui, routers/openai.py and utils/payload.py: a stream with its usage."""
    headers = {
        "Authorization": "Bearer none",
        "X-OpenWebUI-User-Name": "Ann%20B",
        "X-OpenWebUI-Chat-Id": "local",
    }
    body = {
        "stream": True,
        "model": "tgi",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "def"}]},
        ],
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "max_tokens": 6,
        "top_p": 1.0,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "seed": 0,
        "stop": ["<|im_end|>"],
        "logit_bias": {},
        **LEFT_OVERS,
    }
    answer = server.post(CHAT, body, **headers)
    assert answer.status == 200, answer.body
    text, usage = said(answer)
    assert text == plain and usage["completion_tokens"] == 6


def test_open_webui_sends_options_of_ollama_too(server, plain):
    """open-webui/open-webui, utils/payload.py: parameters that it does not know go on as they are.

    A model that was set up for Ollama keeps its options.
    """
    options = {"num_ctx": 4096, "num_gpu": 99, "num_thread": 8, "keep_alive": "5m"}
    options |= {"use_mmap": True, "mirostat": 0, "mirostat_tau": 5.0, "tfs_z": 1, "num_keep": 24}
    answer = chat(server, max_tokens=6, temperature=0, **options)
    assert answer.json()["choices"][0]["message"]["content"] == plain
    for name, value in (("think", True), ("mirostat", 2), ("format", "json")):
        refused = server.post(CHAT, {"messages": [{"role": "user", "content": "a"}], name: value})
        assert refused.status == 422 and f"`{name}`" in refused.json()["error"]["message"]


def test_open_webui_asks_for_titles_tags_and_questions(server):
    """open-webui/open-webui, routers/tasks.py: no stream, and the chat as one message.

    The title has a limit, under OpenAI's newer name.
    """
    for limit in ({"max_completion_tokens": 8}, {"max_tokens": 8}):
        task = chat(server, TASK, stream=False, temperature=0, **limit, **LEFT_OVERS).json()
        assert task["usage"]["completion_tokens"] == 8
    formatted = chat(
        server,
        TASK,
        stream=False,
        max_tokens=200,
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "tags",
                "schema": {
                    "type": "object",
                    "properties": {
                        "tags": {"type": "array", "items": {"enum": ["code"]}, "maxItems": 3}
                    },
                    "required": ["tags"],
                },
            },
        },
    )
    content = json.loads(formatted.json()["choices"][0]["message"]["content"])
    assert set(content["tags"]) <= {"code"}


def test_open_webui_goes_on_behind_a_call(server):
    """open-webui/open-webui, utils/middleware.py: calls have an index, and content may be empty."""
    function = {"name": "search_web", "arguments": '{"query": "a"}'}
    messages = [
        {"role": "system", "content": "Short."},
        {"role": "user", "content": "def"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "[]"},
    ]
    answer = chat(server, messages=messages, tools=[SEARCH], stream=True, max_tokens=4)
    assert len(answer.events()) > 2


def test_open_webui_in_a_browser_gets_cors(serve):
    """open-webui/open-webui: a direct connection comes from the page's own address."""
    origin = "http://localhost:8080"
    with serve(cors_allow_origin=(origin,)) as server:
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        asked["Access-Control-Request-Headers"] = "authorization,content-type"
        allowed = server.ask("OPTIONS", CHAT, headers=asked)
        assert allowed.status == 200
        assert allowed.headers["access-control-allow-origin"] == origin
        assert "authorization" in allowed.headers["access-control-allow-headers"].lower()


QWEN_STOPS = [
    *("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<|im_start|>", "<|im_end|>"),
    *("/src/", "#- coding: utf-8", "```"),
]


def test_continue_completes_code(server):
    """continuedev/continue, core/autocomplete: a raw prompt with marks, and a dozen stop strings.

    templating/AutocompleteTemplate.ts has the marks of each family, getStopTokens.ts adds three.
    """
    prompt = "<|fim_prefix|>class Stack:\n    def<|fim_suffix|>\n        pass<|fim_middle|>"
    body = {"model": "tgi", "max_tokens": 8, "temperature": 0.01, "stream": True}
    answer = server.post(TEXT, {**body, "prompt": prompt, "stop": QWEN_STOPS})
    assert answer.status == 200, answer.body
    *events, end = answer.events()
    assert end == "[DONE]" and all("text" in one["choices"][0] for one in events)
    stopped = server.post(
        TEXT, {**body, "stream": False, "prompt": "def", "stop": [*QWEN_STOPS, "(", "_", " "]}
    ).json()["choices"][0]
    assert stopped["finish_reason"] == "stop" and not set("(_ ") & set(stopped["text"])
    many = server.post(TEXT, {**body, "prompt": "def", "stop": [f"{n}" for n in range(65)]})
    assert many.status == 422 and "up to 64 stop" in many.json()["error"]["message"]


def test_continue_sends_the_rest_of_a_file_where_a_server_fills_in(server):
    """continuedev/continue, core/llm/llms/OpenAI.ts: `fim/completions` with `suffix`.

    Its `vllm` provider says that it has no such route, and sends the marks in the prompt.
    """
    body = {
        "model": "tgi",
        "prompt": "def",
        "suffix": "\n    pass",
        "max_tokens": 4,
        "stream": True,
    }
    assert server.post("/v1/fim/completions", body).status == 404
    refused = server.post(TEXT, body)
    assert refused.status == 422 and "Suffix" in refused.json()["error"]["message"]


def test_continue_chats_and_applies_edits(server, plain):
    """continuedev/continue, core/llm/openaiTypeConverters.ts and templates/edit.ts.

    Fields that it has no value for are left out; an edit begins the answer, which goes on.
    """
    body = {"stream": True, "stream_options": {"include_usage": True}, "tool_choice": None}
    text, usage = said(chat(server, max_tokens=6, temperature=0, stop=None, **body))
    assert text == plain and usage["total_tokens"] > 6
    start = "Sure! Here's the entire rewritten code block:\n```python\n"
    messages = [{"role": "user", "content": "def"}, {"role": "assistant", "content": start}]
    prompt = server.post("/chat_tokenize", {"messages": messages}).json()["templated_text"]
    assert prompt.endswith(start)
    text, _ = said(chat(server, messages=messages, max_tokens=6, temperature=0, **body))
    assert text and start not in text


def test_continue_sends_tools_one_call_at_a_time(server):
    """continuedev/continue, core/llm/llms/OpenAI.ts: `parallel_tool_calls` is false.

    An answer without text is sent back as one blank.
    """
    call = {"name": "search_web", "arguments": '{"query": "a"}'}
    messages = [
        {"role": "user", "content": "def"},
        {
            "role": "assistant",
            "content": " ",
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "content": "nothing", "tool_call_id": "call_1"},
    ]
    options = {"tools": [SEARCH], "parallel_tool_calls": False, "stream": True, "max_tokens": 4}
    assert said(chat(server, messages=messages, **options))[0]
    forced = {"type": "function", "function": {"name": "search_web"}}
    answer = chat(server, **{**options, "tool_choice": forced, "max_tokens": 120})
    calls = [
        call
        for one in answer.events()[:-1]
        for choice in one["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]
    assert calls[0]["function"]["name"] == "search_web"
    assert {call["index"] for call in calls} == {0}

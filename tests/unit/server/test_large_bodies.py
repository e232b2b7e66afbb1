"""The largest bodies that a server takes, at every route: the event loop goes on meanwhile.

What stops the loop is measured in seconds of the processor, so waiting for one changes nothing: the
time that the process computed between two turns of a task that asks for a turn every 2 ms. A second
of a slower processor, or of one whose other half a neighbour uses, counts for less: by the time
that the standard library takes to read an object of the same size at that moment.

Reports of the kind: vllm-project/vllm#24910 (5 MB that are refused stop the health route for
4.8 s), vllm-project/vllm#10635 (prompts tokenized on the loop), BerriAI/litellm#33175 (routes that
count tokens).
"""

import asyncio
import gc
import json
import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest
import uvicorn

from quantflow.server import process
from quantflow.server.app import endpoints
from quantflow.server.process import OrderlyServer
from quantflow.server.settings import Limits

LONGEST_BLOCK = 0.1
TURN = 0.002
PARSED = 0.072  # seconds in which an idle Xeon with AMX reads OBJECT: its seconds count whole
ROOM = 1_990_000  # of the 2,000,000 bytes that --payload-limit takes
USER = {"role": "user", "content": "a"}
ONE = {"max_new_tokens": 1}


def filled(before, item, after):
    """A maker of JSON of about the largest size: as many items as fit between two texts."""

    def make():
        count = (ROOM - len(before) - len(after)) // (len(item) + 1)
        return f"{before}{','.join([item] * count)}{after}".encode()

    return make


def entries(before, after, value="1"):
    """The same, of entries of an object: each key is another."""

    def make():
        count = (ROOM - len(before) - len(after)) // (len(value) + 10)
        items = ",".join(f'"{number:06}":{value}' for number in range(count))
        return f"{before}{items}{after}".encode()

    return make


def repeated(before, word, after):
    """The same, of a text that repeats a word."""
    return lambda: (before + word * ((ROOM - 200) // len(word)) + after).encode()


def prompts(word):
    """Bodies of the routes that continue a prompt, whose texts repeat `word`."""
    end = '","parameters":{"max_new_tokens":1'
    start = '{"inputs":"a","parameters":{"max_new_tokens":1}'
    schema = '{"inputs":"a","parameters":{"grammar":{"type":"json","value":{"x":['
    return {
        "a long text": repeated('{"inputs":"', word, f"{end}}}}}"),
        "a long text that is truncated": repeated('{"inputs":"', word, f'{end},"truncate":5}}}}'),
        "many values that nothing reads": filled(f'{start},"x":[', "{}", "]}"),
        "many lists that nothing reads": filled(f'{start},"x":[', "[]", "]}"),
        "many stop strings": filled('{"inputs":"a","parameters":{"stop":[', '"a"', "]}}"),
        "many bad words": filled('{"inputs":"a","parameters":{"bad_words":[', '"a"', "]}}"),
        "a wide schema": filled(schema, "{}", "]}}}}"),
        "a wide object": entries(f"{start},", "}"),
    }


def chats():
    """Bodies of the routes that take a conversation."""
    start = '{"messages":[{"role":"user","content":"a"}],"max_tokens":1'
    tool = '{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}'
    shut = f'{start},"tool_choice":"required","tools":['
    many = f'{tool[:-3]},"properties":{{"a":[' + "{},"[:-1]
    form = f'{start},"response_format":{{"type":"json_schema","json_schema":{{"schema":{{"x":['
    return {
        "many messages": filled('{"max_tokens":1,"messages":[', json.dumps(USER), "]}"),
        "many parts": filled(
            '{"messages":[{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}"
        ),
        "a long message": repeated(
            '{"messages":[{"role":"user","content":"', "ab ", '"}],"max_tokens":1}'
        ),
        "many tools": filled(shut, tool, "]}"),
        "a wide tool": filled(f"{shut}{many},", "{}", "]}}}]}"),
        "a wide tool that nothing forces": filled(f'{start},"tools":[{many},', "{}", "]}}}]}"),
        "a wide format": filled(form, "{}", "]}}}}"),
        "many words for the template": entries(f'{start},"chat_template_kwargs":{{', "}}"),
        "a large bias": entries(f'{start},"logit_bias":{{', "}}"),
        "a bias of no numbers": entries(f'{start},"logit_bias":{{', "}}", '"x"'),
        "many calls": filled(
            '{"messages":[{"role":"assistant","tool_calls":[',
            '{"function":{"name":"f","arguments":"{}"}}',
            "]}]}",
        ),
    }


BODIES = {
    "/generate": prompts("a"),
    "/generate_stream": prompts("ab "),
    "/": prompts("ab "),
    "/tokenize": prompts("a"),
    "/invocations": prompts("a") | chats(),
    "/vertex": {
        "many prompts": filled('{"instances":[', '{"inputs":"a"}', "]}"),
        "a long prompt": repeated('{"instances":[{"inputs":"', "ab ", '"}]}'),
    },
    "/v1/completions": {
        "many ids": filled('{"prompt":[', "1", "]}"),
        "many prompts": filled('{"prompt":[', '"a"', "]}"),
        "many prompts of ids": filled('{"prompt":[', "[1]", "]}"),
        "many prompts of neither": filled('{"prompt":[', "{}", "]}"),
        "a long text": repeated('{"prompt":"', "ab ", '"}'),
        "a large bias": entries('{"prompt":"a","logit_bias":{', "}}"),
    },
    "/v1/chat/completions": chats(),
    "/chat_tokenize": chats(),
}
# One body of each route, among them those that stopped an earlier server for seconds.
WORST = {
    "/generate": "many lists that nothing reads",
    "/generate_stream": "many stop strings",
    "/": "a long text",
    "/tokenize": "a long text",
    "/invocations": "many messages",
    "/vertex": "many prompts",
    "/v1/completions": "many ids",
    "/v1/chat/completions": "a wide tool",
    "/chat_tokenize": "a long message",
}


class Turns:
    """A task on the server's event loop that measures the longest time without a turn."""

    def __init__(self, loop):
        self._loop, self._stop = loop, threading.Event()
        self.longest = 0.0

    async def _run(self):
        while not self._stop.is_set():
            computed, begin = time.process_time(), time.monotonic()
            await asyncio.sleep(TURN)
            # several threads may compute at once, so this is at most the time that went by
            spent = min(time.process_time() - computed, time.monotonic() - begin)
            self.longest = max(self.longest, spent - TURN)

    def __enter__(self):
        self._task = asyncio.run_coroutine_threadsafe(self._run(), self._loop)
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._task.result(10)


@pytest.fixture(scope="module")
def turns(serve):
    """A server, and a function that answers with `Turns` on its loop."""
    loops = []

    async def on_tick(self, counter):
        loops.append(asyncio.get_running_loop())
        return await OrderlyServer.on_tick(self, counter)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "OrderlyServer", type("S", (OrderlyServer,), {"on_tick": on_tick}))
        with serve(limits=Limits(max_concurrent_requests=8)) as server:
            server.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 1})
            usual = gc.get_threshold()
            process.keep_heap()  # as the process does
            yield server, lambda: Turns(loops[-1])
    gc.set_threshold(*usual)
    gc.unfreeze()


OBJECT = entries("{", "}")()


def slower():
    """How many times as long as in PARSED this processor takes now; 1 where it is faster."""
    begin = time.thread_time()
    json.loads(OBJECT)
    return max(1.0, (time.thread_time() - begin) / PARSED)


def longest_block(turns, work):
    """The longest block of the loop during some work: the shortest of up to six tries."""
    longest = []
    for _ in range(6):
        with turns() as found:
            work()
        block = found.longest
        longest.append(block if block < LONGEST_BLOCK else block / slower())
        if longest[-1] < LONGEST_BLOCK:
            break
    return min(longest)


EVERY = [
    pytest.param(
        path,
        name,
        marks=() if WORST[path] == name else pytest.mark.slow,
        id=f"{path} {name}",
    )
    for path, bodies in BODIES.items()
    for name in bodies
]


@pytest.mark.parametrize(("path", "name"), EVERY)
def test_the_loop_goes_on_beside_the_largest_bodies(turns, path, name):
    server, measure = turns
    body = BODIES[path][name]()
    assert len(body) < 2_000_000
    found = []
    block = longest_block(measure, lambda: found.append(server.ask("POST", path, body)))
    assert all(answer.status < 500 for answer in found), found[0].body[:500]
    assert block < LONGEST_BLOCK
    assert server.settled().running == 0


def test_every_route_that_takes_a_body_is_among_them():
    assert {route.path for route in endpoints() if route.body is not None} == set(BODIES)


@contextmanager
def large_collections():
    """The large garbage collections during the block: each stops all threads of the process."""
    found = []

    def seen(phase, info):
        if phase == "start" and info["generation"] == 2:
            found.append(info)

    gc.callbacks.append(seen)
    try:
        yield found
    finally:
        gc.callbacks.remove(seen)


@pytest.mark.parametrize("path", WORST)
def test_a_large_body_starts_no_large_collection_of_garbage(turns, path):
    server, _ = turns
    with large_collections() as found:
        assert server.ask("POST", path, BODIES[path][WORST[path]]()).status < 500
    assert not found


@pytest.mark.parametrize(("rows", "ticks"), [(0, process.TICKS), (3, process.BUSY_TICKS)])
def test_garbage_is_collected_at_its_time(turns, monkeypatch, rows, ticks):
    server, _ = turns
    monkeypatch.setattr(server.site.service.admission, "rows", rows)
    idle = OrderlyServer(uvicorn.Config(None), server.site, None)
    with large_collections() as found:
        asyncio.run(idle.on_tick(ticks - 1))
        asyncio.run(idle.on_tick(0))
        assert not found
        asyncio.run(idle.on_tick(ticks))
    assert len(found) == 1


@contextmanager
def full(server):
    admission = server.site.service.admission
    admission.enter(admission.most)
    try:
        yield
    finally:
        admission.leave(admission.most)


def test_every_route_that_works_is_counted(turns):
    """A full server refuses all of them at once, before a template is rendered."""
    server, _ = turns
    bodies = {
        "/vertex": {"instances": [{"inputs": "a"}]},
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": [USER]},
        "/chat_tokenize": {"messages": [USER]},
    }
    model = server.models.first
    with full(server), pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "render", None)  # not called
        for path in BODIES:
            answer = server.post(path, bodies.get(path, {"inputs": "a"}))
            assert answer.status == 429, (path, answer.body)
    assert server.settled().running == 0


def test_a_conversation_that_is_refused_is_not_rendered(turns, monkeypatch):
    server, _ = turns
    monkeypatch.setattr(server.models.first, "render", None)  # not called
    refused = server.post("/v1/chat/completions", {"messages": [USER], "temperature": -1})
    assert refused.status == 422 and "temperature" in refused.json()["error"]["message"]


def test_a_request_has_a_limit_of_tools_and_a_message_of_calls(turns):
    server, _ = turns
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [USER], "max_tokens": 1, "tools": [tool] * 1025}
    refused = server.post("/v1/chat/completions", body)
    assert refused.status == 422 and refused.json()["error"]["param"] == "tools"
    assert "1024" in refused.json()["error"]["message"]
    calls = [{"function": {"name": "f", "arguments": "{}"}}] * 1025
    told = {"messages": [{"role": "assistant", "tool_calls": calls}, USER], "max_tokens": 1}
    refused = server.post("/v1/chat/completions", told)
    assert refused.status == 422 and "1024" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_the_loop_goes_on_beside_the_largest_answers(turns):
    server, measure = turns
    options = {"max_tokens": 900, "n": 4, "temperature": 1, "seed": 1}
    chat = {"messages": [USER], "logprobs": True, "top_logprobs": 20, **options}
    text = {"prompt": "a b " * 200, "logprobs": 20, "echo": True, "n": 4, "max_tokens": 300}
    ends = {str(end): -100 for end in server.models.first.loaded.eos_token_ids}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
        for stream in (False, True):
            asked, found = {**body, "stream": stream, "logit_bias": ends}, []
            ask = partial(server.post, path, asked)
            block = longest_block(measure, lambda ask=ask, found=found: found.append(ask()))
            assert found[0].status == 200 and len(found[0].body) > 500_000
            assert block < LONGEST_BLOCK, (path, stream)


@pytest.mark.slow
def test_many_large_bodies_at_once_hold_nobody_up(turns):
    """The event loop, a small prompt and the memory of ten clients that tokenize what they can."""
    server, measure = turns
    most = server.models.first._bound.per_token * server.models.first.max_input_tokens
    body = json.dumps({"inputs": "aZ" * (most // 2)}).encode()
    truncated = BODIES["/generate"]["a long text that is truncated"]()

    def attack():
        asked = [("/tokenize", body)] * 6 + [("/generate", truncated)] * 4
        threads = [threading.Thread(target=server.ask, args=("POST", *one)) for one in asked]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert longest_block(measure, attack) < LONGEST_BLOCK

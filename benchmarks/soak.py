"""A server under mixed load for a long time: promised answers, no block left, memory that stays.

    python benchmarks/soak.py work/4-export --minutes 60
    python benchmarks/soak.py work/4-export --minutes 1 --clients 2        a try

`quantflow serve` runs in a process of its own. Each client asks again when it was answered or gave
up: texts, streams, several answers, log-probabilities, grammars and stop strings, greedy or
sampled; chats with tools, with schemas and with reasoning, as LangChain, MCP's clients, Open WebUI
and Continue send them; bodies cut short, wrong, too long and of 1 MB; one request in ten goes away
after some of its answer. The chats have a template of this program's, unless --options name one.
Everything is drawn from --seed. Every ten seconds the server's resident memory and
/metrics are read; at the end, when no request runs, once more.

It exits 1 where an answer has another status than its kind of request promises, a connection ends
before its answer, a block of the cache is in use or a token reserved at the end, a request is
unaccounted for, or the memory of the last tenth of the time is more than `--growth` above that of
the first tenth after the warm-up. The warm-up takes two minutes at least: a shorter try does not
judge memory.
"""

import argparse
import json
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from statistics import median
from typing import Any

from _report import table

HOST = "127.0.0.1"
# in which memory may grow: caches of grammars, threads, the pool's pages; of the time, and seconds
WARM, LEAST_WARM = 0.05, 120.0
WORDS = (
    (Path(__file__).resolve().parents[1] / "examples/tiny-llama/stdlib_text.py").read_text().split()
)
PROPERTIES = {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["name"]}
PLACE = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
# an edit of the filesystem server, GitHub's issues, and a search as pydantic writes it
TOOLS = {
    "edit_file": {
        "path": {"type": "string"},
        "edits": {"type": "array", "maxItems": 3, "items": PLACE},
        "dryRun": {"type": "boolean", "default": False},
    },
    "list_issues": {
        "state": {"type": "string", "enum": ["OPEN", "CLOSED"]},
        "perPage": {"type": "number", "minimum": 1, "maximum": 100},
        "since": {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}]},
    },
    "search": {"query": {"type": "string", "maxLength": 40}, "place": PLACE},
}
LEFT_OVERS: dict[str, Any] = {  # of Open WebUI's page
    "params": {},
    "features": {"web_search": False, "code_interpreter": False},
    "metadata": {"task": "title_generation", "chat_id": None},
    "session_id": "a",
    "background_tasks": {"tags_generation": True},
}
TEMPLATE = """{% for m in messages %}{{ m.role }}: \
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\
{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}\
{% if add_generation_prompt %}assistant: {% if enable_thinking %}<think>{% endif %}{% endif %}"""
STOPS = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|im_end|>", "/src/", "```"]
Body = dict[str, Any] | bytes


@dataclass(kw_only=True)
class Seen:
    """What the clients saw, and what the server was seen to take.

    Attributes:
        answers: by kind of request and status, or `left` where the client went away.
        faults: what was not promised.
        memory: seconds since the start and resident bytes.
    """

    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def text(rng: random.Random, most: int = 60) -> str:
    """Return some words."""
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def generate(rng: random.Random) -> tuple[str, Body]:
    """One of TGI's texts, with options of every sort."""
    options: dict[str, Any] = {
        "max_new_tokens": rng.choice((1, 8, 40, 120)),
        "details": rng.random() < 0.5,
    }
    if rng.random() < 0.5:
        options |= {
            "do_sample": True,
            "temperature": rng.uniform(0.2, 2.0),
            "top_p": 0.9,
            "seed": rng.randrange(1000),
        }
    if rng.random() < 0.3:
        options |= {"stop": [rng.choice(WORDS)], "repetition_penalty": 1.1}
    if rng.random() < 0.3:
        options |= {"top_n_tokens": 4, "details": True}
    return rng.choice(("/generate", "/generate_stream")), {
        "inputs": text(rng),
        "parameters": options,
    }


def completion(rng: random.Random) -> tuple[str, Body]:
    """One of OpenAI's completions, streamed or not."""
    options: dict[str, Any] = {
        "max_tokens": rng.choice((4, 32)),
        "n": rng.choice((1, 3)),
        "temperature": rng.choice((0, 0.8)),
    }
    options |= {
        "logprobs": rng.choice((None, 3)),
        "seed": rng.randrange(1000),
        "stream": rng.random() < 0.5,
    }
    return "/v1/completions", {"prompt": text(rng), **options}


def grammar(rng: random.Random) -> tuple[str, Body]:
    """A text that follows a schema, or an expression."""
    regex = {"type": "regex", "value": f"[a-z]{{1,{rng.randint(1, 40)}}}"}
    asked = rng.choice((regex, {"type": "json", "value": SCHEMA}))
    return "/generate", {
        "inputs": text(rng),
        "parameters": {"max_new_tokens": 60, "grammar": asked},
    }


def exploding(rng: random.Random) -> tuple[str, Body]:
    """A grammar whose states double with each letter: refused where the text comes that far."""
    asked = {"type": "regex", "value": f"(a|b)*a(a|b){{{rng.randint(20, 60)}}}"}
    return "/generate", {
        "inputs": text(rng),
        "parameters": {"max_new_tokens": 60, "grammar": asked},
    }


def tokenize(rng: random.Random) -> tuple[str, Body]:
    """Tokens of a text."""
    return "/tokenize", {"inputs": text(rng, 400)}


def chat(rng: random.Random, **fields: Any) -> tuple[str, Body]:
    """A chat as Open WebUI sends it: a stream with its usage or a title, with its page's fields."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": text(rng, 20)}],
        "max_completion_tokens": rng.choice((8, 40)),
        "temperature": rng.choice((0, 0.7)),
        "stream": rng.random() < 0.7,
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    return "/v1/chat/completions", {**body, **rng.choice(({}, LEFT_OVERS)), **fields}


def tools(rng: random.Random) -> tuple[str, Body]:
    """A chat with tools, which may be called or must be, and with earlier calls."""
    offered = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {"type": "object", "properties": properties, "required": []},
            },
        }
        for name, properties in TOOLS.items()
    ]
    named = {"type": "function", "function": {"name": rng.choice(list(TOOLS))}}
    call = {"name": "search", "arguments": json.dumps({"query": text(rng, 3)})}
    earlier = [
        {"role": "user", "content": text(rng, 10)},
        {
            "role": "assistant",
            "content": rng.choice(("", " ", None)),
            "tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": text(rng, 10)},
    ]
    return chat(
        rng,
        messages=[*(earlier if rng.random() < 0.5 else ()), {"role": "user", "content": "go"}],
        tools=offered,
        tool_choice=rng.choice(("auto", "none", "required", named)),
        parallel_tool_calls=rng.random() < 0.5,
        max_completion_tokens=rng.choice((8, 120)),
    )


def structured(rng: random.Random) -> tuple[str, Body]:
    """An answer that follows a schema, under the names of several servers."""
    wrapped = {"name": "answer", "schema": PLACE, "strict": rng.random() < 0.5}
    return chat(
        rng,
        **rng.choice(
            (
                {"response_format": {"type": "json_schema", "json_schema": wrapped}},
                {"response_format": {"type": "json_object"}},
                {"guided_json": {**SCHEMA, "title": text(rng, 2)}},  # compiled anew
                {"structured_outputs": {"choice": ["yes", "no"]}},
            )
        ),
    )


def reasoning(rng: random.Random) -> tuple[str, Body]:
    """A chat whose answer begins with reasoning, and whose history has some."""
    name = rng.choice(("reasoning_content", "reasoning"))
    earlier = {"role": "assistant", "content": text(rng, 5), name: text(rng, 10)}
    question = {"role": "user", "content": text(rng, 10)}
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    return chat(
        rng,
        messages=[question, earlier, question],
        reasoning_effort=rng.choice((None, "low", "none")),
        **rng.choice(({"enable_thinking": False}, {"enable_thinking": True}, thinks)),
    )


def editor(rng: random.Random) -> tuple[str, Body]:
    """The completion of code as Continue asks for it: a raw prompt, and many stop strings."""
    prompt = f"<|fim_prefix|>{text(rng, 30)}<|fim_suffix|>{text(rng, 10)}<|fim_middle|>"
    body = {"prompt": prompt, "stop": STOPS, "max_tokens": 40, "temperature": 0.01}
    return "/v1/completions", {**body, "stream": True}


def large(rng: random.Random) -> tuple[str, Body]:
    """Chats that are too large: of 1 MB, of many messages, of more tools than are taken."""
    many = {"type": "function", "function": {"name": "search", "parameters": PLACE}}
    return chat(
        rng,
        **rng.choice(
            (
                {"messages": [{"role": "user", "content": "x " * 500_000}]},
                {"messages": [{"role": "user", "content": text(rng)}] * 5_000},
                {"tools": [many] * 2_000},
            )
        ),
    )


def wrong(rng: random.Random) -> tuple[str, Body]:
    """What is refused: values out of range, a prompt of 1 MB, no JSON at all."""
    bodies: tuple[Body, ...] = (
        {"inputs": "x", "parameters": {"temperature": -1.0}},
        {"inputs": "x", "parameters": {"max_new_tokens": 10**9}},
        {"inputs": "x " * 500_000},
        b'{"inputs": ',
        b'{"inputs": "x", "parameters": {"temperature": NaN}}',
        b"\xff\xfe",
    )
    return "/generate", rng.choice(bodies)


# what a kind of request may be answered with, and how often it comes
KINDS: dict[str, tuple[Callable[[random.Random], tuple[str, Body]], set[int], int]] = {
    "generate": (generate, {200, 429}, 8),
    "completion": (completion, {200, 429}, 5),
    "grammar": (grammar, {200, 429}, 2),
    "exploding": (exploding, {200, 422, 429}, 1),
    "tokenize": (tokenize, {200}, 1),
    "chat": (chat, {200, 429}, 3),
    "tools": (tools, {200, 429}, 4),
    "structured": (structured, {200, 429}, 3),
    "reasoning": (reasoning, {200, 429}, 2),
    "editor": (editor, {200, 429}, 2),
    "large": (large, {400, 413, 422, 429}, 1),
    "wrong": (wrong, {400, 413, 422}, 3),
}


def ask(port: int, rng: random.Random, seen: Seen) -> None:
    """Send one request; read its answer, or go away before its end."""
    kind = rng.choices(list(KINDS), [weight for _, _, weight in KINDS.values()])[0]
    make, promised, _ = KINDS[kind]
    path, body = make(rng)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    leaves = rng.random() < 0.1
    connection = HTTPConnection(HOST, port, timeout=300)
    said = b""
    try:
        if leaves:
            cut = data[: rng.randrange(len(data) + 1)] if rng.random() < 0.3 else data
            head = (
                f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            )
            connection.connect()
            connection.sock.sendall(head.encode() + cut)
            connection.sock.settimeout(rng.random())
            with suppress(TimeoutError):
                connection.sock.recv(rng.randrange(1, 4000))
            outcome = "left"
        else:
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            said = answer.read()[:200]
            outcome = str(answer.status)
    except (HTTPException, OSError) as error:
        outcome = "left" if leaves else f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    with seen.lock:
        seen.answers[kind, outcome] += 1
        if outcome != "left" and not (outcome.isdigit() and int(outcome) in promised):
            seen.faults.append(f"{kind}: {outcome}: {data[:200]!r}: {said!r}")


def resident(pid: int) -> int:
    """Return the resident bytes of a process."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * 4096


def counters(port: int) -> dict[str, float]:
    """Return the engine's numbers from /metrics, summed over models."""
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found: Counter[str] = Counter()
    for line in lines:
        if line.startswith("quantflow_engine_"):
            found[line.split("{")[0].removeprefix("quantflow_engine_")] += float(
                line.rsplit(" ", 1)[1]
            )  # type: ignore[assignment]
    return dict(found)


def judge(seen: Seen, end: dict[str, float], seconds: float, growth: float) -> list[str]:
    """Return what was not kept."""
    left = [
        f"{name} is {end[name]:g} at the end"
        for name in ("running", "waiting", "pool_used", "reserved_tokens")
        if end[name]
    ]
    if end["submitted"] != end["finished"] + end["cancelled"] + end["failed"] or end["failed"]:
        left.append(
            "requests: "
            f"{ ({name: end[name] for name in ('submitted', 'finished', 'cancelled', 'failed')}) }"
        )
    warm = max(WARM * seconds, LEAST_WARM)
    early = [size for when, size in seen.memory if warm <= when <= warm + 0.1 * seconds]
    late = [size for when, size in seen.memory if when >= 0.9 * seconds]
    if early and median(late) > (1 + growth) * median(early):
        left.append(
            f"resident memory grew from {median(early) / 1e6:.0f} to {median(late) / 1e6:.0f} MB"
        )
    return seen.faults[:20] + left


def start(given: argparse.Namespace, stack: ExitStack) -> tuple[int, int]:
    """Start the server and wait until it answers; return its port and process."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    options = list(given.options)
    if "--chat-template" not in options:
        template = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "chat.jinja"
        template.write_text(TEMPLATE)
        options += ["--chat-template", str(template)]
    command = [sys.executable, "-m", "quantflow", "serve", str(given.artifact)]
    command += ["--port", str(port), *options]
    server = stack.enter_context(
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    )
    stack.callback(server.send_signal, signal.SIGTERM)
    for _ in range(600):
        try:
            counters(port)
            return port, server.pid
        except OSError:
            if server.poll() is not None:
                raise SystemExit(f"the server ended with {server.returncode}") from None
            time.sleep(0.2)
    raise SystemExit("the server does not answer")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the load and print what was seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0, metavar="X")
    parser.add_argument("--clients", type=int, default=8, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--growth",
        type=float,
        default=0.1,
        metavar="X",
        help="of resident memory, as a share (default: 0.1)",
    )
    parser.add_argument(
        "--options",
        type=shlex.split,
        default=[],
        metavar="WORDS",
        help="of serve, behind an equals sign",
    )
    given = parser.parse_args(arguments)
    seen, seconds = Seen(), given.minutes * 60
    with ExitStack() as stack:
        port, pid = start(given, stack)
        begin = time.monotonic()

        def client(number: int) -> None:
            rng = random.Random(f"{given.seed} {number}")
            while time.monotonic() - begin < seconds:
                ask(port, rng, seen)

        threads = [
            threading.Thread(target=client, args=(number,)) for number in range(given.clients)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            passed = time.monotonic() - begin
            seen.memory.append((passed, resident(pid)))
            asked, size = sum(seen.answers.values()), seen.memory[-1][1] / 1e6
            print(
                f"soak: {passed:.0f} s of {seconds:.0f}, {asked} requests, {size:.0f} MB",
                file=sys.stderr,
            )
            time.sleep(min(10.0, max(1.0, seconds / 30)))
        for _ in range(60):  # clients that went away are noticed within a step
            end = counters(port)
            if not end["running"] and not end["waiting"]:
                break
            time.sleep(1)
    rows = [(kind, outcome, count) for (kind, outcome), count in sorted(seen.answers.items())]
    print(table(("request", "answer", "how often"), rows))
    sizes = [size / 1e6 for _, size in seen.memory]
    first, most, last = sizes[0], max(sizes), sizes[-1]
    asked, generated, used = sum(seen.answers.values()), end["generated_tokens"], end["pool_used"]
    print(f"\n{asked} requests in {given.minutes:g} minutes, {generated:.0f} tokens generated;")
    print(
        f"resident memory {first:.0f} MB at first, {most:.0f} at most, {last:.0f} at the end; "
        f"{used:.0f} blocks in use"
    )
    faults = judge(seen, end, seconds, given.growth)
    for fault in faults:
        print(f"NOT KEPT: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

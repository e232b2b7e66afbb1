"""A server's life: keys, the number of clients, slow clients, the end, and an engine that dies."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from quantflow.server import process as server_process
from quantflow.server.app import endpoints
from quantflow.server.process import bound, opening_lines
from quantflow.server.settings import Limits, ServeJob

PROMPT = "class Stack:\n    def"
HEAD = (
    b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)


def long_answer(server, count=400):
    """Request a long answer in a thread; return the thread and the list for its answer."""
    found = []
    thread = threading.Thread(
        target=lambda: found.append(server.generate(PROMPT, max_new_tokens=count))
    )
    thread.start()
    return thread, found


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_request_above_the_limit_gets_429_at_once_and_the_others_end(serve):
    with serve(limits=Limits(max_concurrent_requests=2)) as server:
        running = [long_answer(server) for _ in range(2)]
        wait_for(lambda: server.site.service.admission.rows == 2)
        refused = server.generate(PROMPT, max_new_tokens=1)
        assert server.site.service.admission.rows == 2  # it did not wait for them
        assert refused.json() == {"error": "Model is overloaded", "error_type": "overloaded"}
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert server.post("/generate_stream", {"inputs": PROMPT}).status == 429
        error = server.post("/v1/completions", {"prompt": PROMPT}).json()["error"]
        assert (error["message"], error["type"]) == ("Model is overloaded", "overloaded")
        for thread, found in running:
            thread.join()
            assert found[0].status == 200
        assert server.generate(PROMPT, max_new_tokens=1).status == 200


def test_an_answer_is_sent_without_waiting_for_what_the_client_acknowledges(artifact):
    async def option():
        accepted = asyncio.get_running_loop().create_future()

        def connected(_, writer):
            connection = writer.get_extra_info("socket")
            accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listening = bound(ServeJob(artifact=artifact, port=0))
        async with await asyncio.start_server(connected, sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname()[:2])
            found = await accepted
            writer.close()
            return found

    assert asyncio.run(option()) == 1


def test_the_start_says_of_each_limit_where_it_is_from(serve, artifact):
    job = ServeJob(
        artifact=artifact,
        limits=Limits(max_total_tokens=900),
        origins={"max_total_tokens": "MAX_TOTAL_TOKENS"},
    )
    with serve(limits=job.limits) as server:
        lines = opening_lines(job, server.models)
    assert lines[0].startswith(f"model {job.first_name}: {artifact}, lean decoder")
    found = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines if line.startswith("  ")}
    assert found["max-total-tokens"] == ["900", "MAX_TOTAL_TOKENS"]
    assert found["max-input-tokens"] == ["899", "model and memory"]
    assert found["max-best-of"] == ["2", "default"] and found["queue-threshold-ms"] == [
        "none",
        "default",
    ]


def test_a_client_that_goes_away_frees_its_row(serve):
    with serve() as server:
        body = json.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": 1000}}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(HEAD % len(body) + body)
            wait_for(lambda: server.models.first.engine.counters().running == 1)
        counters = server.settled()
        # the request was for 1000 tokens
        assert counters.cancelled == 1 and counters.generated_tokens < 900


def test_a_key_is_asked_of_everything_but_health_and_the_page(serve, tmp_path):
    (tmp_path / "key").write_text("secret\nnot the key\n")
    files = [route.path for route in endpoints() if route.path.startswith("/page/")]
    assert {"/page/style.css", "/page/app.js"} <= set(files)
    free = {("GET", path) for path in ("/health", "/ping", "/metrics", "/", *files)}
    with serve(api_key_file=tmp_path / "key") as server:
        for route in endpoints():
            body = (
                None
                if route.method == "GET"
                else {"inputs": PROMPT, "parameters": {"max_new_tokens": 1}}
            )
            refused = server.ask(route.method, route.path, body).status == 401
            assert refused == ((route.method, route.path) not in free), route.path
        assert server.post("/", {"inputs": PROMPT, "stream": True}).status == 401
        assert (server.ask("HEAD", "/health").status, server.ask("HEAD", "/info").status) == (
            200,
            401,
        )
        assert server.generate(PROMPT, max_new_tokens=1).status == 401
        assert server.get("/info").json() == {"error": "Unauthorized", "error_type": "unauthorized"}
        for wrong in ("secret", "Bearer", "Bearer not the key", "Basic secret", "Bearer sécret"):
            assert server.get("/info", Authorization=wrong.encode()).status == 401
        assert server.get("/info", Authorization="Bearer secret").status == 200
        assert [server.get(path).status for path in ("/health", "/ping", "/metrics")] == [
            200,
            200,
            200,
        ]
        assert server.get("/info", Authorization="Bearer secret", Host="any.example").status == 200
    with serve(api_key="clé\n", protect_health=True) as server:
        assert [server.get(path).status for path in ("/health", "/ping", "/metrics")] == [
            401,
            401,
            401,
        ]
        assert server.get("/health", Authorization="Bearer clé".encode()).status == 200


def test_pages_of_other_origins_may_call_when_they_are_listed(serve, server):
    asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    assert (
        "access-control-allow-origin"
        not in server.ask("OPTIONS", "/generate", headers=asked).headers
    )
    with serve(cors_allow_origin=("https://page.example",), api_key="secret") as other:
        answer = other.ask("OPTIONS", "/generate", headers=asked)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (
            200,
            "https://page.example",
        )
        asked["Origin"] = "https://another.example"
        assert other.ask("OPTIONS", "/generate", headers=asked).status == 400


def test_slow_clients_are_given_up(serve):
    with serve(client_timeout=0.4) as server:
        for sent in (b"", b"POST /gen", b"POST /generate HTTP/1.1\r\nHost: localhost\r\n"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
                client.sendall(sent)
                assert client.recv(1000) == b""  # closed
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(
                b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
                b'{"inputs"'
            )
            assert client.recv(1000).startswith(b"HTTP/1.1 408")
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
            client.sendall(b"POST /gen")  # and no more of its second request
            assert client.recv(1000) == b""
        assert server.get("/health").status == 200


def test_an_answer_that_nobody_takes_is_dropped_with_its_connection(serve, monkeypatch):
    def narrow(job):
        listening = bound(job)
        # the system would take the whole answer from the server, however slow its client is
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        return listening

    monkeypatch.setattr(server_process, "bound", narrow)
    with (
        serve(client_timeout=0.5) as server,
        server.take_nothing("/tokenize", {"inputs": "aZ" * 20_000}) as client,
    ):
        assert client.recv(1, socket.MSG_PEEK)  # the answer has begun, and stays where it is
        assert server.site.service.admission.rows == 1
        wait_for(lambda: not server.connections)  # though the client keeps its end
        assert server.site.service.admission.rows == 0


def test_headers_have_a_limit(serve):
    with (
        serve(header_limit=8192) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as client,
    ):
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000)
        answer = client.recv(1000)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
        assert server.get("/health").status == 200


def test_a_dead_engine_turns_health_to_503_and_ends_the_server(serve):
    with serve() as server:
        thread, found = long_answer(server)
        wait_for(lambda: server.models.first.engine.counters().running == 1)
        engine = server.models.first.engine
        engine._runner.forward = lambda pieces: 1 / 0
        thread.join()
        assert (found[0].status, found[0].json()["error_type"]) == (424, "generation")
        assert server.get("/health").json() == {"error": "unhealthy", "error_type": "healthcheck"}
        assert server.generate(PROMPT).status == 424
        wait_for(lambda: _closed(server.port))


def _closed(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return True
    return False


def test_a_request_that_fails_takes_no_other_with_it(serve, monkeypatch):
    with serve() as server:
        monkeypatch.setattr(server.models.first.grammars, "mask", lambda grammar: _Broken())
        whole = server.generate(PROMPT, max_new_tokens=60).json()
        thread, found = long_answer(server, 60)
        broken = server.generate(PROMPT, grammar={"type": "regex", "value": "a"})
        assert (broken.status, broken.json()["error_type"]) == (424, "generation")
        assert "secret" not in broken.json()["error"]
        thread.join()
        assert found[0].json() == whole


class _Broken:
    left_out = ()

    def allowed(self, tokens):
        raise RuntimeError("secret of the server")

    def advance(self, token):
        pass


@contextmanager
def started(artifact, *arguments, **environment):
    """Start the verb; yield the process, its URL's port, and the lines that it printed before."""
    command = [sys.executable, "-m", "quantflow", "serve", str(artifact), "--port", "0", *arguments]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as process:
        lines = []
        try:
            for line in process.stderr:
                lines.append(line.rstrip())
                if "serving on" in line:
                    break
            assert lines and "serving on" in lines[-1], lines
            yield process, int(lines[-1].rpartition(":")[2]), lines
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_running_request_end(artifact, asking, number):
    with started(artifact, MAX_BEST_OF="3", MAX_TOTAL_TOKENS="900") as (process, port, lines):
        table = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ")}
        assert (
            table["max-best-of"] == ["3", "MAX_BEST_OF"] and table["max-input-tokens"][0] == "899"
        )
        thread, found = long_answer(asking(port), 300)
        time.sleep(0.3)
        process.send_signal(number)
        thread.join()
        assert (found[0].status, process.wait(20)) == (200, 0)
    assert len(found[0].json()["generated_text"]) > 100


@pytest.mark.slow
def test_what_does_not_end_in_time_is_cancelled(artifact):
    body = json.dumps(
        {"inputs": PROMPT, "parameters": {"max_new_tokens": 1000, "repetition_penalty": 1.2}}
    ).encode()
    options = started(artifact, "--drain-seconds", "1")
    with options as (process, port, _), socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(HEAD % len(body) + body)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        assert process.wait(20) == 0
        assert time.monotonic() - begin < 5

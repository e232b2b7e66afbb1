"""Clients that leave at random, read slowly or send half: good answers, and no block is left."""

import asyncio
import gc
import json
import random
import threading
from contextlib import suppress

import pytest

from quantflow.process_memory import usage
from quantflow.server.settings import Limits

PROMPT = "class Stack:\n    def"


def head(path, length):
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        "",
        "",
    ]
    return "\r\n".join(lines).encode()


async def leave(port, rng):
    """Send a request or a part of it, read a part of the answer or nothing, and go."""
    streams = rng.random() < 0.7
    path, new = ("/generate_stream" if streams else "/generate"), rng.choice((3, 50, 300))
    prompt = PROMPT + " x" * rng.randrange(200)
    options = {
        "max_new_tokens": new,
        "do_sample": rng.random() < 0.5,
        "stop": ["zzz"] if rng.random() < 0.3 else [],
    }
    body = json.dumps({"inputs": prompt, "parameters": options}).encode()
    data = head(path, len(body)) + body
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data if rng.random() < 0.8 else data[: rng.randrange(len(data))])
    await asyncio.sleep(rng.random() * 0.1)
    if rng.random() < 0.6:
        with suppress(TimeoutError):
            await asyncio.wait_for(reader.read(rng.randrange(1, 3000)), rng.random() * 0.3)
    writer.transport.abort() if rng.random() < 0.5 else writer.close()


def leave_many(server, count, *, seed, at_once=16):
    async def run():
        room, rng = asyncio.Semaphore(at_once), random.Random(seed)

        async def one(number):
            async with room:
                await leave(server.port, random.Random(number))

        numbers = [rng.randrange(2**32) for _ in range(count)]
        await asyncio.gather(*(one(number) for number in numbers))

    asyncio.run(run())


def check_nothing_is_left(server):
    counters = server.settled(30)
    assert counters.pool.used == 0 and counters.reserved_tokens == 0
    assert counters.submitted == counters.finished + counters.cancelled + counters.failed
    assert counters.failed == 0


def test_clients_that_go_away_leave_nothing(serve):
    with serve() as server:
        expected = server.generate(PROMPT, max_new_tokens=20).json()
        leave_many(server, 60, seed=1)
        check_nothing_is_left(server)
        assert server.generate(PROMPT, max_new_tokens=20).json() == expected


@pytest.mark.slow
def test_a_thousand_clients_that_go_away_leave_nothing_and_no_memory(serve):
    # so small a cache has all of its pages in memory after the first clients
    small = Limits(max_batch_total_tokens=4096)
    with serve(limits=small) as server:
        expected = server.generate(PROMPT, max_new_tokens=20).json()
        leave_many(server, 2000, seed=2)
        gc.collect()
        before = usage().anonymous
        leave_many(server, 1000, seed=3)
        check_nothing_is_left(server)
        gc.collect()
        assert usage().anonymous - before < 30e6
        assert server.generate(PROMPT, max_new_tokens=20).json() == expected


@pytest.mark.slow
def test_a_hundred_slow_readers_stop_nobody(serve):
    with serve(client_timeout=3.0) as server:
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 150, "top_n_tokens": 5}}
        clients = [server.take_nothing("/generate_stream", body) for _ in range(100)]
        for _ in range(20):
            assert server.get("/health").status == 200
        assert server.generate(PROMPT, max_new_tokens=5).status == 200
        server.settled(240)
        check_nothing_is_left(server)
        for client in clients:
            client.close()


def test_good_requests_among_bad_ones_get_the_text_that_they_get_alone(serve):
    with serve() as server:
        prompts = [f"{PROMPT} f{number}" for number in range(12)]
        alone = [
            server.generate(prompt, max_new_tokens=12, details=True).json() for prompt in prompts
        ]
        found = [None] * len(prompts)

        def good(number):
            found[number] = server.generate(prompts[number], max_new_tokens=12, details=True).json()

        def bad(number):
            server.generate(
                "x", max_new_tokens=5, grammar={"type": "regex", "value": "(a|b)*a(a|b){40}"}
            )
            server.ask("POST", "/generate", b'{"inputs": ')
            server.generate("x " * 3000)

        threads = [
            threading.Thread(target=work, args=(number,))
            for number in range(12)
            for work in (good, bad)
        ]
        random.Random(0).shuffle(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == alone  # the same bits of log-probabilities too
        assert server.settled().pool.used == 0

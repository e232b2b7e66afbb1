"""Server-sent events: their bytes, comments in silences, and clients that read nothing or leave."""

import asyncio
import json
import time
from contextlib import ExitStack

import pytest

from quantflow.server.events import EventStream, SlowClient, send_events
from quantflow.server.http import Patience, Serving
from quantflow.server.openai import ENDPOINTS as OPENAI
from quantflow.server.tgi import ENDPOINTS as TGI


class Client:
    """A client that takes what is sent, up to the piece `stuck`."""

    def __init__(self, stuck=None):
        self.got, self.stuck = [], stuck

    async def send(self, message):
        if self.stuck is not None and len(self.got) >= self.stuck:
            await asyncio.Event().wait()
        self.got.append(message)

    @property
    def text(self):
        return b"".join(message.get("body", b"") for message in self.got).decode()


class Events:
    """A source of texts, each after a wait.

    It knows whether what it holds was closed, and not before its end.
    """

    def __init__(self, *texts, wait=0.0, error=None):
        self.texts, self.wait, self.error = texts, wait, error
        self.runs, self.closed = False, False
        self.held = ExitStack()
        self.held.callback(self._close)

    async def run(self):
        self.runs = True
        try:
            for text in self.texts:
                await asyncio.sleep(self.wait)
                yield text
            if self.error is not None:
                raise self.error
        finally:
            self.runs = False

    def _close(self):
        self.closed = not self.runs


def sent(client, events, *, patience=5.0, silence=5.0):
    async def alone():
        stream = EventStream(events=events.run(), headers={"x-a": "b"}, held=events.held)
        await send_events(stream, client.send, patience=patience, silence=silence)
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert asyncio.run(alone()) == []


def test_events_go_out_as_the_page_on_the_format_says():
    client, events = Client(), Events("one", "größe")
    sent(client, events)
    assert client.text == "data: one\n\ndata: größe\n\n" and events.closed
    assert client.got[0]["status"] == 200 and {
        (b"content-type", b"text/event-stream"),
        (b"x-a", b"b"),
    } <= set(client.got[0]["headers"])
    assert [message["more_body"] for message in client.got[1:]] == [True, True, False]


def test_long_silences_hold_comments_and_short_ones_none():
    client, begin = Client(), time.monotonic()
    sent(client, Events("one", "two", wait=0.5), silence=0.1)
    most = (time.monotonic() - begin) / 0.1
    pieces = client.text.split("data: ")
    assert [piece.partition("\n\n")[0] for piece in pieces[1:]] == ["one", "two"]
    assert all(1 <= piece.count(":\n\n") <= most for piece in pieces[:2]) and pieces[2] == "two\n\n"
    client = Client()
    sent(client, Events(*"abcdef", wait=0.05), silence=2.0)
    assert ":\n\n" not in client.text


@pytest.mark.parametrize("stuck", [0, 1, 3])
def test_a_client_that_reads_nothing_is_given_up(stuck):
    client, events, begin = Client(stuck), Events("one", "two", "three", "four"), time.monotonic()
    with pytest.raises(SlowClient):
        sent(client, events, patience=0.4)
    assert 0.4 <= time.monotonic() - begin < 2.0 and len(client.got) == stuck and events.closed


def test_a_client_that_does_not_take_a_comment_is_given_up_though_no_event_comes():
    client, events = Client(1), Events("one", wait=5.0)
    begin = time.monotonic()
    with pytest.raises(SlowClient):
        sent(client, events, patience=0.3, silence=0.2)
    assert time.monotonic() - begin < 2.0 and events.closed


def test_what_the_events_raise_comes_through_and_is_no_slow_client():
    client, events = Client(), Events("one", error=TimeoutError("a lock"))
    with pytest.raises(TimeoutError, match="a lock"):
        sent(client, events)
    assert events.closed and client.text == "data: one\n\n"


def test_a_cancelled_answer_closes_its_events():
    client, events = Client(), Events("one", "two", wait=60.0)

    async def run():
        task = asyncio.create_task(
            send_events(
                EventStream(events=events.run(), held=events.held), client.send, patience=5.0
            )
        )
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert events.closed


@pytest.mark.parametrize("path", ["/v1/completions", "/generate_stream"])
def test_a_client_that_never_takes_the_headers_leaves_no_row(server, path):
    text = {"prompt": "class", "max_tokens": 200} if path.startswith("/v1") else {"inputs": "class"}
    body = json.dumps({**text, "stream": True}).encode()
    endpoint = next(one for one in (*OPENAI, *TGI) if one.path == path)
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        return incoming.pop() if incoming else await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    serving = Serving(endpoint, server.site, Patience(body_bytes=1000, seconds=0.2))
    with pytest.raises(SlowClient):
        asyncio.run(serving(scope, receive, Client(0).send))
    assert server.site.service.admission.rows == 0
    server.settled()

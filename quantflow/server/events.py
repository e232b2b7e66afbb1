"""Server-sent events on their way to a client, with comments in long silences and a time limit.

The connection of a client that reads nothing is closed. One task checks the clock for the whole
answer: a timer and a task for every event would cost more than to make the event.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import ExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field

from starlette.types import Message, Send

SILENCE_SECONDS = 15.0
_LOOKS = 8  # how often the clock is read within `patience` or `silence`, the shorter of the two


@dataclass(frozen=True, kw_only=True)
class EventStream:
    """An answer as server-sent events.

    Attributes:
        events: texts behind `data:`, one per event.
        headers: headers of the response.
        held: stack that is closed after the events, also where the client went away before the
            first.
    """

    events: AsyncGenerator[str, None]
    headers: Mapping[str, str] = field(default_factory=dict)
    held: ExitStack = field(default_factory=ExitStack)


class SlowClient(Exception):
    """A client did not take what was sent to it; its connection is closed."""


async def send_events(
    stream: EventStream, send: Send, *, patience: float, silence: float = SILENCE_SECONDS
) -> None:
    """Send an answer, then close its events and what it holds.

    Args:
        stream: answer to send.
        send: ASGI's send, which waits where the client does not read.
        patience: seconds that a piece may wait, or an eighth more.
        silence: seconds without an event before a comment keeps the connection alive.

    Raises:
        SlowClient: a piece was not taken in time.
    """
    headers = {
        "content-type": "text/event-stream",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
        **stream.headers,
    }
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    with stream.held:
        line = _Line(send)
        try:
            async with (
                asyncio.timeout(None) as limit,
                line.watched(limit, patience, silence),
                aclosing(stream.events),
            ):
                await line.put({"type": "http.response.start", "status": 200, "headers": raw})
                async for event in stream.events:
                    await line.put(_body(f"data: {event}\n\n"))
                await line.put(_body("", more=False))
        except TimeoutError:
            if not limit.expired():
                raise
            raise SlowClient from None


class _Line:
    """The pieces to one client, and the time since which one waits."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waits: float | None = None  # time since which a piece waits; None: all were taken
        self._taken = time.monotonic()  # time at which the last piece was taken

    async def put(self, piece: Message) -> None:
        """Send a piece; return when it was taken."""
        self._waits = self._waits or time.monotonic()
        await self._send(piece)
        self._waits, self._taken = None, time.monotonic()

    @asynccontextmanager
    async def watched(
        self, limit: asyncio.Timeout, patience: float, silence: float
    ) -> AsyncIterator[None]:
        """Check the clock inside the block; `limit` ends it when a piece waits too long."""
        watch = asyncio.create_task(self._watch(limit, patience, silence))
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.wait({watch})

    async def _watch(self, limit: asyncio.Timeout, patience: float, silence: float) -> None:
        with suppress(TimeoutError):
            while self._waits is None or time.monotonic() - self._waits < patience:
                await asyncio.sleep(min(patience, silence) / _LOOKS)
                if self._waits is None and time.monotonic() - self._taken >= silence:
                    async with asyncio.timeout(patience):
                        await self.put(_body(":\n\n"))
        limit.reschedule(asyncio.get_running_loop().time())


def _body(text: str, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}

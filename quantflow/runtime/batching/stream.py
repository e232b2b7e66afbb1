"""The events of one request on their way from the engine's thread to whoever waits for them."""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from quantflow.runtime.batching.request import BatchRequest, PromptToken, TokenEvent


@dataclass(kw_only=True)
class RequestTimes:
    """Times of a request, in seconds of `time.monotonic`; None before it has come so far."""

    submitted: float
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None


class Readers:
    """Readers in event loops that have something to read, woken together.

    One thread alone uses it. Waking a reader costs a system call, and the reader takes the
    interpreter from the thread that woke it. Woken one by one among the rows of a step, readers
    would hold up the rows that are left.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._waiters: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, waiter: "asyncio.Future[None]") -> None:
        """Remember one."""
        self._waiters.setdefault(loop, []).append(waiter)

    def wake(self) -> None:
        """Wake all."""
        woken, self._waiters = self._waiters, {}
        for loop, waiters in woken.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(_wake, waiters)


class Stream:
    """The events of one request, in order; the last one has `finish`.

    It is read once, by `for` in a thread or by `async for` in an event loop. What is not read yet
    is kept: a slow reader stops nobody. Leaving either loop early does not cancel the request;
    `cancel` does.

    Attributes:
        request: submitted request.
        times: times of the request.
        prompt: the prompt's tokens with log-probabilities, complete before the first event; empty
            unless asked for.
        cached_tokens: tokens of the prompt that were taken from shared blocks, known before the
            first event.
    """

    def __init__(self, request: BatchRequest, *, on_cancel: Callable[["Stream"], None]) -> None:
        """Begin without events.

        Args:
            request: submitted request.
            on_cancel: function that `cancel` calls, from any thread.
        """
        self.request = request
        self.times = RequestTimes(submitted=time.monotonic())
        self.prompt: tuple[PromptToken, ...] = ()
        self.cached_tokens = 0
        self._on_cancel = on_cancel
        self._events: deque[TokenEvent] = deque()
        self._changed = threading.Condition()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._over = False

    @property
    def finished(self) -> bool:
        """Whether the last event has come; it may not have been read."""
        return self.times.finished is not None

    def cancel(self) -> None:
        """End the request before the engine's next step. Any thread may call it.

        The last event says so, unless the request had ended.
        """
        self._on_cancel(self)

    def put(self, event: TokenEvent, readers: Readers) -> None:
        """Add an event; the engine's thread calls it.

        A reader that waits in an event loop joins `readers`.
        """
        with self._changed:
            now = time.monotonic()
            if event.id is not None and self.times.first_token is None:
                self.times.first_token = now
            if event.finish is not None:
                self.times.finished = now
            self._events.append(event)
            self._changed.notify_all()
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            readers.add(*waiter)

    def __iter__(self) -> Iterator[TokenEvent]:
        """Wait for the events, blocking the thread."""
        while not self._over:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._events))
                event = self._take()
            yield event

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Wait for the events in an event loop."""
        while not self._over:
            with self._changed:
                event = self._take() if self._events else None
                if event is None:
                    loop = asyncio.get_running_loop()
                    waiter = loop.create_future()
                    self._waiter = (loop, waiter)
            if event is None:
                await waiter
            else:
                yield event

    def _take(self) -> TokenEvent:
        event = self._events.popleft()
        self._over = event.finish is not None
        return event


def _wake(waiters: "list[asyncio.Future[None]]") -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)

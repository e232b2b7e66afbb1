"""Each request has an id, that of its client or a new one, and a line in the log if wished.

    2026-11-28T12:00:00+0000 3c5f POST /v1/chat/completions 200, 0.412 s, 12 + 20 tokens

The id goes back to the client as `x-request-id`, so that both name the same request. Nothing that a
client sent stands in the line but the method, the path and the id.
"""

import re
import secrets
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quantflow.plain_text import one_line

HEADER = b"x-request-id"
LONGEST_PATH = 200  # characters of a path in a line
_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


@dataclass(kw_only=True)
class TrackedRequest:
    """A request while it is answered.

    Attributes:
        id: id of the request.
        answers: answers (`quantflow.server.generation.Answer`) that were begun for it.
        status: status of the response; None before it began.
        complete: whether all of the response was sent.
    """

    id: str
    answers: list[Any] = field(default_factory=list)
    status: int | None = None
    complete: bool = False
    begin: float = field(default_factory=time.monotonic)

    def line(self, method: str, path: str) -> str:
        """The line of the log."""
        outcome = str(self.status) if self.complete else "client left"
        seconds = f"{time.monotonic() - self.begin:.3f} s"
        shown = one_line(path[:LONGEST_PATH])
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        line = f"{when} {self.id} {method} {shown} {outcome}, {seconds}"
        if not self.answers:
            return line
        read = sum(len(answer.prompt) for answer in self.answers)
        written = sum(len(row.pieces) for answer in self.answers for row in answer.rows)
        return f"{line}, {read} + {written} tokens"


_CURRENT: ContextVar[TrackedRequest | None] = ContextVar("request", default=None)


def current_request() -> TrackedRequest | None:
    """The request that the running task answers; None outside of a server."""
    return _CURRENT.get()


class RequestLog:
    """An ASGI application whose requests have ids, and lines in a log."""

    def __init__(self, app: ASGIApp, *, tell: Callable[[str], None] | None) -> None:
        """Keep the application.

        Args:
            app: application that answers.
            tell: function that takes a line for each request; None takes none.
        """
        self._app, self._tell = app, tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == HEADER), b"").decode(
            "latin-1"
        )
        request = TrackedRequest(id=given if _ID.fullmatch(given) else secrets.token_hex(8))
        _CURRENT.set(request)

        async def tracked(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.status = message["status"]
                headers = [*message.get("headers", ()), (HEADER, request.id.encode())]
                message = {**message, "headers": headers}
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                request.complete = True

        path = plain_path(scope["path"])
        try:
            await self._app({**scope, "path": path}, receive, tracked)
        finally:
            if self._tell is not None:
                self._tell(request.line(scope["method"], path))


def plain_path(path: str) -> str:
    """A path without doubled slashes and without one at its end.

    Clients join an address that ends with a slash and a path that begins with one. A redirect would
    name http, also where the client came by a proxy with https.
    """
    return re.sub("/+", "/", path).rstrip("/") or "/"

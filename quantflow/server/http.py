"""HTTP between routes and the server: bodies in, JSON and server-sent events out, in bounded time.

A route is an `Endpoint`: a path, the type of its body, and a function. While the function works,
the connection is watched. A client that goes away cancels it, and with it the rows that it waits
for. All functions share a `Site` (site.py).
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from quantflow.server.bodies import Body
from quantflow.server.errors import Refused
from quantflow.server.events import EventStream, SlowClient, send_events

RETRY_SECONDS = "1"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A route.

    Attributes:
        method, path: method and path of HTTP.
        run: function from the call to the response.
        summary: one sentence for people.
        tag: interface that the route belongs to.
        body: type of the request's JSON; None without a body.
        answer: example of the answer's JSON.
        openai: whether refusals have OpenAI's form.
        free: whether no key is needed.
        health: whether no key is needed unless the server protects the route.
        shown: whether the OpenAPI description has the route.
    """

    method: str
    path: str
    run: "Callable[[HttpCall], Awaitable[Response | EventStream]]"
    summary: str
    tag: str
    body: type[Body] | None = None
    answer: Any = None
    openai: bool = False
    free: bool = False
    health: bool = False
    shown: bool = True


@dataclass(frozen=True, kw_only=True)
class HttpCall:
    """One request at a route.

    Attributes:
        request: request of starlette.
        body: parsed body.
        site: state that all routes share.
    """

    request: Request
    body: Any
    site: Any


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Limits of a client.

    Attributes:
        body_bytes: largest body of a request.
        seconds: longest time for a body to come in, and for a piece of the answer to go out.
    """

    body_bytes: int
    seconds: float


class Serving:
    """An endpoint as an ASGI application."""

    def __init__(self, endpoint: Endpoint, site: Any, patience: Patience) -> None:
        """Keep the endpoint, the shared state, and the limits of its clients."""
        self.endpoint, self._site, self._patience = endpoint, site, patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        try:
            body = await self._read(request)
        except Refused as refused:
            await self._send(refusal(refused, openai=self.endpoint.openai), scope, receive, send)
            return
        except ClientDisconnect:
            return
        gone = asyncio.create_task(_gone(receive))
        work = asyncio.create_task(
            self._work(HttpCall(request=request, body=body, site=self._site), scope, receive, send)
        )
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (gone, work):
                if not task.done():
                    task.cancel()
            await asyncio.wait({gone, work})
        if not work.cancelled() and (error := work.exception()) is not None:
            if not isinstance(error, SlowClient):
                self._site.log_exception(error)
            raise error  # the server closes the connection

    async def _work(self, call: HttpCall, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self.endpoint.run(call)
        except Refused as refused:
            response = refusal(refused, openai=self.endpoint.openai)
        except Exception as error:
            call.site.log_exception(error)
            response = refusal(Refused("internal", "Internal error"), openai=self.endpoint.openai)
        if isinstance(response, EventStream):
            await send_events(response, send, patience=self._patience.seconds)
        else:
            await self._send(response, scope, receive, send)

    async def _send(self, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        await response(scope, receive, self._patient(send))

    def _patient(self, send: Send) -> Send:
        """A send that gives up on a client that does not read.

        Raises:
            SlowClient: a piece took too long; the server closes the connection.
        """

        async def patient(message: Message) -> None:
            try:
                async with asyncio.timeout(self._patience.seconds):
                    await send(message)
            except TimeoutError:
                raise SlowClient from None

        return patient

    async def _read(self, request: Request) -> Any:
        """The body.

        Raises:
            Refused: it is too large, too slow, of another type, no JSON, or not the route's.
            ClientDisconnect: the client went away.
        """
        data = await self._bytes(request)
        if self.endpoint.body is None:
            return None
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json" and not media.endswith("+json"):
            raise Refused(
                "unsupported_media_type", "Expected request with `Content-Type: application/json`"
            )
        return typed(self.endpoint.body, parse(data))

    async def _bytes(self, request: Request) -> bytes:
        most = self._patience.body_bytes
        cause = f"length limit exceeded: {most} bytes are allowed"
        declared = request.headers.get("content-length", "0")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > most:
            raise Refused("payload_too_large", cause)
        pieces, size = [], 0
        try:
            async with asyncio.timeout(self._patience.seconds):
                async for piece in request.stream():
                    size += len(piece)
                    if size > most:
                        raise Refused("payload_too_large", cause)
                    pieces.append(piece)
        except TimeoutError:
            raise Refused(
                "timeout", f"the body did not come in {self._patience.seconds:g} s"
            ) from None
        return b"".join(pieces)


def refusal(refused: Refused, *, openai: bool) -> Response:
    """A refusal as a response."""
    headers = {"retry-after": RETRY_SECONDS} if refused.kind == "overloaded" else {}
    if refused.kind == "unauthorized":
        headers["www-authenticate"] = "Bearer"
    body = refused.openai_body() if openai else refused.body()
    return JSONResponse(body, status_code=refused.status, headers=headers)


def typed(kind: type[Body], value: Any) -> Any:
    """A value as a body of a kind.

    Raises:
        Refused: a field is missing or of another type; the message names the first.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200]
        cause = f"Failed to deserialize the JSON body into the target type: {where}: {first['msg']}"
        raise Refused("validation", cause) from None
    except RecursionError:
        raise Refused("bad_json", "Failed to parse the request body as JSON: too deep") from None


def parse(data: bytes) -> Any:
    """The value of JSON: UTF-8, without NaN and without half surrogate pairs.

    Raises:
        Refused: the bytes are no such JSON.
    """
    try:
        text = data.decode()
        value = json.loads(text, parse_constant=_no_constant)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
        return value
    except (ValueError, RecursionError) as error:
        name = (
            "too deep"
            if isinstance(error, RecursionError)
            else next(iter(str(error).splitlines()), "")[:200]
        )
        raise Refused("bad_json", f"Failed to parse the request body as JSON: {name}") from None


async def _gone(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")

"""HTTP between routes and the server: bodies in, JSON and server-sent events out, in bounded time.

A route is an `Endpoint`: a path, the type of its body, and a function. While the function works,
the connection is watched. A client that goes away cancels it, and with it the rows that it waits
for. All functions share a `Site` (site.py).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from quantflow.server.bodies import Body
from quantflow.server.errors import Refused
from quantflow.server.events import EventStream, SlowClient, send_events
from quantflow.server.json_text import parse, pieces
from quantflow.server.threads import ServerThreads

Result = TypeVar("Result")

RETRY_SECONDS = "1"
FEW = 1000  # objects of an answer that are made and written on the loop, in a few milliseconds


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
        names: function from the body, which may be None, to the names that the client knows:
            TGI's name of a field -> this route's.
        free: whether no key is needed.
        health: whether no key is needed unless the server protects the route.
        shown: whether the OpenAPI description has the route.
    """

    method: str
    path: str
    run: "Callable[[HttpCall], Awaitable[Response | EventStream | LargeJson]]"
    summary: str
    tag: str
    body: type[Body] | None = None
    answer: Any = None
    openai: bool = False
    names: Callable[[Any], Mapping[str, str]] = lambda body: {}
    free: bool = False
    health: bool = False
    shown: bool = True


@dataclass(frozen=True, kw_only=True)
class HttpCall:
    """One request at a route.

    Attributes:
        request: request of starlette.
        body: parsed body.
        nbytes: bytes of the body.
        site: state that all routes share.
    """

    request: Request
    body: Any
    nbytes: int
    site: Any

    async def beside(self, work: Callable[[], Result]) -> Result:
        """Do work that grows with the body: in a thread, unless the body is small."""
        workers: ServerThreads = self.site.models.workers
        return await workers.sized(work, nbytes=self.nbytes)


@dataclass(frozen=True, kw_only=True)
class LargeJson:
    """An answer whose JSON is made in a thread and sent in pieces.

    Attributes:
        pieces: its pieces.
        headers: headers of the response.
        held: stack that is closed when it was sent.
    """

    pieces: Iterator[str]
    headers: Mapping[str, str] = field(default_factory=dict)
    held: ExitStack = field(default_factory=ExitStack)


def json_answer(
    make: Callable[[], Any],
    *,
    items: int,
    headers: Mapping[str, str] | None = None,
    held: ExitStack | None = None,
) -> Response | LargeJson:
    """The response whose JSON is the value of `make`; a large one is made in a thread.

    Args:
        make: function that makes the value; an iterator in it becomes a list.
        items: objects in the value, at most.
        headers: headers of the response.
        held: stack that is closed when the response was sent, or is ready to be.
    """
    held = held or ExitStack()
    if items > FEW:
        return LargeJson(pieces=_later(make), headers=headers or {}, held=held)
    with held:
        return Response("".join(pieces(make())), headers=headers, media_type="application/json")


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
            body, nbytes = await self._read(request)
        except Refused as refused:
            await self._send(self._refusal(refused, None), scope, receive, send)
            return
        except ClientDisconnect:
            return
        gone = asyncio.create_task(_gone(receive))
        call = HttpCall(request=request, body=body, nbytes=nbytes, site=self._site)
        work = asyncio.create_task(self._work(call, scope, receive, send))
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
        response: Response | EventStream | LargeJson
        try:
            response = await self.endpoint.run(call)
            if isinstance(response, LargeJson):
                response = await self._begun(response)
        except Refused as refused:
            response = self._refusal(refused, call.body)
        except Exception as error:
            call.site.log_exception(error)
            response = self._refusal(Refused("internal", "Internal error"), call.body)
        if isinstance(response, LargeJson):
            with response.held:
                await self._send_pieces(response, send)
        elif isinstance(response, EventStream):
            await send_events(response, send, patience=self._patience.seconds)
        else:
            await self._send(response, scope, receive, send)

    async def _send(self, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        await response(scope, receive, self._patient(send))

    def _refusal(self, refused: Refused, body: Any) -> Response:
        names = self.endpoint.names(body)
        return refusal(refused, openai=self.endpoint.openai, names=names)

    async def _begun(self, answer: LargeJson) -> LargeJson:
        """The answer with its first piece made: what fails does so before anything is sent."""
        try:
            first = await self._site.models.workers.large(lambda: next(answer.pieces, ""))
        except BaseException:
            answer.held.close()
            raise
        return replace(answer, pieces=chain((first,), answer.pieces))

    async def _send_pieces(self, answer: LargeJson, send: Send) -> None:
        """Send an answer as its pieces are made; the next is made when one was taken."""
        patient = self._patient(send)
        headers = {"content-type": "application/json", **answer.headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await patient({"type": "http.response.start", "status": 200, "headers": raw})
        workers: ServerThreads = self._site.models.workers
        while (piece := await workers.large(lambda: next(answer.pieces, None))) is not None:
            body = piece.encode()
            await patient({"type": "http.response.body", "body": body, "more_body": True})
        await patient({"type": "http.response.body", "body": b"", "more_body": False})

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

    async def _read(self, request: Request) -> tuple[Any, int]:
        """The body, and its bytes.

        Raises:
            Refused: it is too large, too slow, of another type, no JSON, or not the route's.
            ClientDisconnect: the client went away.
        """
        data = await self._bytes(request)
        kind = self.endpoint.body
        if kind is None:
            return None, len(data)
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json" and not media.endswith("+json"):
            raise Refused(
                "unsupported_media_type", "Expected request with `Content-Type: application/json`"
            )
        workers: ServerThreads = self._site.models.workers
        body = await workers.sized(lambda: typed(kind, parse(data)), nbytes=len(data))
        return body, len(data)

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


def refusal(
    refused: Refused, *, openai: bool, names: Mapping[str, str] = MappingProxyType({})
) -> Response:
    """A refusal as a response.

    Args:
        refused: the refusal.
        openai: whether it has OpenAI's form.
        names: see `Endpoint`.
    """
    headers = {"retry-after": RETRY_SECONDS} if refused.kind == "overloaded" else {}
    if refused.kind == "unauthorized":
        headers["www-authenticate"] = "Bearer"
    body = refused.openai_body(names) if openai else refused.body()
    status = refused.openai_status if openai else refused.status
    return JSONResponse(body, status_code=status, headers=headers)


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
        raise Refused("validation", cause, param=where or None) from None
    except RecursionError:
        raise Refused("bad_json", "Failed to parse the request body as JSON: too deep") from None


def _later(make: Callable[[], Any]) -> Iterator[str]:
    """The pieces of a value that is made when the first is asked for."""
    yield from pieces(make())


async def _gone(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass

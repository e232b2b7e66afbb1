"""The ASGI application: the routes behind three checks: Host header, key and CORS."""

import hmac
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from quantflow.errors import InputError, ResourceError
from quantflow.server import openai, pages, tgi
from quantflow.server.errors import Refused
from quantflow.server.http import Endpoint, HttpCall, Patience, Serving, refusal
from quantflow.server.openapi import description
from quantflow.server.request_log import RequestLog
from quantflow.server.settings import ServeJob, is_loopback
from quantflow.server.site import Site


def endpoints() -> tuple[Endpoint, ...]:
    """All routes."""
    return (*tgi.ENDPOINTS, *openai.ENDPOINTS, *pages.ENDPOINTS)


def application(site: Site, *, tell: Callable[[str], None] | None = None) -> ASGIApp:
    """The application with all routes.

    Args:
        site: state that the routes share.
        tell: function that takes a line for each request; None takes none.
    """
    job = site.job
    routes = endpoints()
    key = read_key(job)
    text = description(routes, key=key is not None)

    async def openapi(call: HttpCall) -> Response:
        return JSONResponse(text)

    described = Endpoint(
        method="GET",
        path="/openapi.json",
        run=openapi,
        tag="This",
        summary="Return this description.",
        free=True,
        shown=False,
    )
    routes = (*routes, described)
    patience = Patience(body_bytes=job.payload_limit, seconds=job.client_timeout)
    free = {
        (one.method, one.path)
        for one in routes
        if one.free and not (one.health and job.protect_health)
    }
    middleware = [
        Middleware(
            _KeyCheck,
            key=key,
            free=free,
            hosts=allowed_hosts(job, key),
        )
    ]
    if job.cors_allow_origin:
        origins = list(job.cors_allow_origin)
        middleware.insert(
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            ),
        )
    made = Starlette(
        routes=[
            _route(path, routes, site, patience)
            for path in dict.fromkeys(endpoint.path for endpoint in routes)
        ],
        middleware=middleware,
        exception_handlers={HTTPException: _refused_by_starlette},
    )
    made.router.redirect_slashes = False  # `RequestLog` takes such slashes away
    return RequestLog(made, tell=tell)


def read_key(job: ServeJob) -> bytes | None:
    """The key that requests need; None where they need none.

    Raises:
        InputError: its file cannot be read, or its first line is empty.
    """
    if job.api_key_file is None:
        return None if job.api_key is None else job.api_key.strip().encode()
    try:
        lines = job.api_key_file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{job.api_key_file}: {error}", "give a file whose first line is the key"
        ) from error
    if not lines or not lines[0].strip():
        raise InputError(f"{job.api_key_file}: its first line is empty", "write the key there")
    return lines[0].strip().encode()


def allowed_hosts(job: ServeJob, key: bytes | None) -> frozenset[str] | None:
    """Names that a Host header may have beside addresses of the loopback; None where any may.

    Any web page can reach a server on the loopback under a name that it lets point there. A key,
    which such a page does not have, keeps it out as well. An address is no such name.
    """
    if key is not None:
        return None
    try:
        if not is_loopback(job.address):
            return None
    except ResourceError:
        pass  # a host that nobody knows cannot be bound either
    return frozenset(name.lower() for name in ("localhost", job.host, *job.allowed_host))


class _KeyCheck:
    """Refuses requests without the key, and those under another host name."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        key: bytes | None,
        free: set[tuple[str, str]],
        hosts: frozenset[str] | None,
    ) -> None:
        """Keep the key and the routes that need none.

        These are methods with paths, since a path may be a page and a question.
        """
        self._app, self._key, self._free, self._hosts = app, key, free, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refused = self._refused(Request(scope))
        if refused is None:
            await self._app(scope, receive, send)
            return
        response = refusal(refused, openai=_is_openai(scope["path"]))
        response.headers["connection"] = "close"  # its body is not read
        await response(scope, receive, send)

    def _refused(self, request: Request) -> Refused | None:
        host = request.headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        allowed = self._hosts is None or name.lower() in self._hosts
        if not allowed and not is_loopback(name.removeprefix("[").removesuffix("]")):
            return Refused(
                "forbidden_host", f"Host {name[:100]!r} is not served; allow it with --allowed-host"
            )
        method = "GET" if request.method == "HEAD" else request.method
        if self._key is None or (method, request.url.path) in self._free or method == "OPTIONS":
            return None
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        # starlette decodes headers as latin-1, so this gives the bytes that came
        right = hmac.compare_digest(key.strip().encode("latin-1"), self._key)
        return (
            None
            if right and scheme.lower() == "bearer"
            else Refused("unauthorized", "Unauthorized")
        )


def _is_openai(path: str) -> bool:
    """Whether a path is one of OpenAI's interface, also one that is not served."""
    return path == "/v1" or path.startswith("/v1/")


def _route(path: str, routes: Sequence[Endpoint], site: Site, patience: Patience) -> Route:
    """The route of a path, whose methods have an endpoint each."""
    by_method = {
        endpoint.method: Serving(endpoint, site, patience)
        for endpoint in routes
        if endpoint.path == path
    }

    class ByMethod:
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            await by_method[method](scope, receive, send)

    return Route(path, ByMethod(), methods=list(by_method))


async def _refused_by_starlette(request: Request, error: Exception) -> Response:
    """Answer an unknown path or method in the server's own form."""
    status = getattr(error, "status_code", 404)
    refused = (
        Refused("method_not_allowed", "Method not allowed")
        if status == 405
        else Refused("not_found", "Not found")
    )
    response = refusal(refused, openai=_is_openai(request.url.path))
    response.headers.update(getattr(error, "headers", None) or {})
    return response

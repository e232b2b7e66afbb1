"""Requests to an ASGI application in this process, without a socket."""

import asyncio
from collections.abc import Mapping
from typing import Any


def asked(
    app: Any,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    *,
    query: str = "",
) -> tuple[int, bytes]:
    """Return the status and the body of an answer; what the application raises is raised here."""
    return asyncio.run(ask(app, method, path, body, headers, query=query))


async def ask(
    app: Any,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    *,
    query: str = "",
) -> tuple[int, bytes]:
    """Return the status and the body of an answer, inside a loop that runs."""
    given = {
        "host": "127.0.0.1",
        "content-type": "application/json",
        "content-length": str(len(body)),
        **(headers or {}),
    }
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in given.items()
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    status, pieces, sent, gone = 0, bytearray(), False, asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            pieces.extend(message.get("body", b""))

    try:
        await app(scope, receive, send)
    finally:
        gone.set()
    return status, bytes(pieces)

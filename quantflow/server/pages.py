"""Routes for browsers: the page of quantflow/server/page, and the artifact's card that it shows."""

from collections import Counter
from importlib.resources import files
from typing import Any

from starlette.responses import JSONResponse, Response

from quantflow.server import page
from quantflow.server.http import Endpoint, HttpCall
from quantflow.server.site import Site
from quantflow.server.tgi import health

# default-src stands in for none of the last three
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_MODULES = ("app.js", "api.js", "store.js", "turns.js", "markdown.js", "marked.js")
_TYPES = {"index.html": "text/html", "style.css": "text/css"}
_TYPES |= dict.fromkeys(_MODULES, "text/javascript")
# the browser itself refuses to make HTML of a text
_NO_HTML = "require-trusted-types-for 'script'; trusted-types 'none'"


async def front(call: HttpCall) -> Response:
    """The page for a browser; for others TGI's answer at `/`, that the engine is well."""
    if "text/html" not in call.request.headers.get("accept", ""):
        return await health(call)
    return _file("index.html")


async def asset(call: HttpCall) -> Response:
    """A file of the page."""
    return _file(call.request.url.path.rpartition("/")[2])


async def card(call: HttpCall) -> Response:
    """The artifact's source, schemes, bytes, kernels and hash."""
    site: Site = call.site
    model = site.models.first
    linears = model.loaded.artifact.linears
    value: dict[str, Any] = {
        "name": model.name,
        "source": model.manifest.get("source", {}).get("name"),
        "digest": model.manifest.get("digest"),
        "schemes": Counter(linear.scheme.name for linear in linears.values()),
        "backends": sorted(set(model.loaded.backends.values())),
        "rounded_inputs": model.loaded.rounded_inputs,
        "decoder": model.loaded.name,
        "bytes": model.weight_bytes,
        "chat_template": model.has_template,
    }
    return JSONResponse(value)


def _file(name: str) -> Response:
    content = (files(page) / name).read_bytes()
    headers = {
        "content-security-policy": f"{POLICY}; {_NO_HTML}",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",  # frame-ancestors, for older browsers
        "cache-control": "no-cache",
    }
    return Response(content, media_type=_TYPES[name], headers=headers)


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/",
        run=front,
        tag="Page",
        free=True,
        summary="Return the page to a browser; to others, that the engine is well.",
    ),
    Endpoint(
        method="GET",
        path="/card",
        run=card,
        tag="Page",
        answer={"name": "llama", "schemes": {"W4A16": 28}},
        summary="Describe the artifact.",
    ),
    *(
        Endpoint(
            method="GET",
            path=f"/page/{name}",
            run=asset,
            tag="Page",
            free=True,
            shown=False,
            summary="A file of the page.",
        )
        for name in _TYPES
        if name != "index.html"
    ),
)

"""The OpenAPI description of the routes, from their table and the classes of their bodies."""

from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from quantflow import __version__
from quantflow.server.errors import STATUS
from quantflow.server.http import Endpoint

_ERROR = {
    "type": "object",
    "required": ["error", "error_type"],
    "properties": {"error": {"type": ["string", "object"]}, "error_type": {"type": "string"}},
}
_ALWAYS = ("unauthorized", "forbidden_host", "internal", "healthcheck")
_WITH_BODY = (
    "bad_json",
    "timeout",
    "payload_too_large",
    "unsupported_media_type",
    "validation",
    "generation",
    "overloaded",
    "model_not_found",
    "incomplete_generation",
)
_REF = "#/components/schemas/{model}"


def description(endpoints: Sequence[Endpoint], *, key: bool) -> dict[str, Any]:
    """The OpenAPI description.

    Args:
        endpoints: routes to describe.
        key: whether requests need a key.
    """
    bodies = list(
        dict.fromkeys(endpoint.body for endpoint in endpoints if endpoint.body is not None)
    )
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        if endpoint.shown:
            paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "quantflow serve", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**schemas.get("$defs", {}), "ErrorResponse": _ERROR}},
    }
    if key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    kinds = [*_ALWAYS, *(_WITH_BODY if endpoint.body is not None else ())]
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
    responses: dict[str, Any] = {
        str(status): {
            "description": ", ".join(kind for kind in kinds if STATUS[kind] == status),
            "content": error,
        }
        for status in sorted({STATUS[kind] for kind in kinds})
    }
    content: dict[str, Any] = (
        {} if endpoint.answer is None else {"application/json": {"example": endpoint.answer}}
    )
    if endpoint.body is not None and (
        endpoint.answer is None or "stream" in endpoint.body.model_fields
    ):
        content["text/event-stream"] = {"schema": {"type": "string"}}
    responses = {
        "200": {"description": "Answered.", **({"content": content} if content else {})},
        **responses,
    }
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": f"{endpoint.method.lower()}{endpoint.path.replace('/', '_')}",
        "tags": [endpoint.tag],
        "responses": responses,
    }
    if endpoint.body is not None:
        schema = {"$ref": _REF.format(model=endpoint.body.__name__)}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return operation

"""OpenAPI. Owns: the published description of bodies that this server validates itself."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from engine.server.schemas import ChatCompletionBody, CompletionBody, GenerationBody

_REF: Final = "#/components/schemas/{model}"
_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
                "queue_depth": {"type": "integer"},
                "max_queued_requests": {"type": "integer"},
            },
        }
    },
}
_STATUSES: Final = {
    "400": "The request cannot be served as it is",
    "401": "No valid API key",
    "403": "Without an API key only this machine is answered",
    "404": "The model is not served here",
    "408": "The body did not come in time",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "431": "The head of the request is too large",
    "429": "The queue is full: see Retry-After and x-queue-depth",
    "503": "Shutting down, or the engine stopped",
}


def operation(body: type[GenerationBody]) -> dict[str, Any]:
    """`openapi_extra` of a generation route."""
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": _REF.format(model=body.__name__)}}},
        },
        "responses": {
            "200": {
                "description": "The answer, whole or as a stream of events",
                "content": {"application/json": {"schema": {}}, "text/event-stream": {"schema": {}}},
            },
            **refusals(*_STATUSES),
        },
    }


def refusals(*statuses: str) -> dict[int | str, dict[str, Any]]:
    """Errors of a route, by status: all have one shape."""
    content = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    return {status: {"description": _STATUSES[status], "content": content} for status in statuses}


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of `app`, with the request bodies it reads by hand."""
    if app.openapi_schema is None:
        content = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = content.setdefault("components", {}).setdefault("schemas", {})
        schemas["Error"] = _ERROR
        for kind in (CompletionBody, ChatCompletionBody):
            schema = kind.model_json_schema(ref_template=_REF)
            schemas.update(schema.pop("$defs", {}))
            schemas[kind.__name__] = schema
        app.openapi_schema = content
    return app.openapi_schema

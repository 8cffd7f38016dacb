"""The read API. Owns: the read-only routes `/observe/*` and `/metrics`, and the bounds of what may be asked.

Answers are built on a worker thread, never on the event loop that carries streams. A question out of bounds gets 400
with field, value and limit; an unknown request 404; an engine that has not started 503.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from telemetry.exposition import Exposition
from telemetry.observe import (
    EngineStatus,
    Explanation,
    LanesAnswer,
    LatencyAnswer,
    LatencyBreakdown,
    ObserveError,
    PageMap,
    PassesAnswer,
    QueueAnswer,
    RequestDetail,
    RequestsAnswer,
    Value,
)
from telemetry.read_model import KEPT_STEPS, NotStarted, ReadModel

MAX_LIMIT: Final = 5_000
MAX_LANES: Final = 200
MAX_RID: Final = 200
_NO_STORE: Final = {"cache-control": "no-store"}


class _Refused(Exception):
    """A question that is out of bounds."""

    def __init__(self, error: ObserveError) -> None:
        super().__init__(error.error)
        self.error = error


def _json(value: Value, status: int = 200) -> Response:
    return Response(value.model_dump_json(), status, media_type="application/json", headers=_NO_STORE)


def _number(request: Request, field: str, *, default: int, most: int) -> int:
    """The query parameter `field`, from 1 to `most`. Raises _Refused."""
    unknown = sorted(set(request.query_params) - {field})
    if unknown:
        raise _Refused(
            ObserveError(error=f"unknown parameter {unknown[0][:64]!r}", field=unknown[0][:64], limit=f"only {field}")
        )
    text = request.query_params.get(field)
    if text is None:
        return default
    shown, limit = text[:64], f"an integer from 1 to {most}"
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= most):
        error = ObserveError(error=f"{field} is {shown!r}; {limit} is allowed", field=field, value=shown, limit=limit)
        raise _Refused(error)
    return int(text)


async def _answer(build: Callable[[], Value | None]) -> Response:
    try:
        value = await run_in_threadpool(build)
    except _Refused as refused:
        return _json(refused.error, 400)
    except NotStarted as error:
        return _json(ObserveError(error=str(error)), 503)
    if value is None:
        return _json(ObserveError(error="no live or recently finished request has this id", field="rid"), 404)
    return _json(value)


def create_router(model: ReadModel, exposition: Exposition | None = None, *, sglang: bool = False) -> APIRouter:
    """The routes over `model`; `/metrics` when there is an `exposition`, and `/metrics/sglang` where it is wanted."""
    router = APIRouter()

    async def status() -> Response:
        return await _answer(model.status)

    async def queue(request: Request) -> Response:
        return await _answer(lambda: model.queue(_number(request, "limit", default=500, most=MAX_LIMIT)))

    async def passes(request: Request) -> Response:
        return await _answer(lambda: model.passes(_number(request, "n", default=32, most=KEPT_STEPS)))

    async def latency() -> Response:
        return await _answer(model.latency)

    async def breakdown() -> Response:
        return await _answer(model.breakdown)

    async def lanes(request: Request) -> Response:
        return await _answer(lambda: model.lanes(_number(request, "n", default=40, most=MAX_LANES)))

    async def requests(request: Request) -> Response:
        return await _answer(lambda: model.requests(_number(request, "limit", default=500, most=MAX_LIMIT)))

    async def one(rid: str) -> Response:
        return await _answer(lambda: model.request(_rid(rid)))

    async def pages() -> Response:
        return await _answer(model.page_map)

    async def explain(rid: str) -> Response:
        return await _answer(lambda: model.explain(_rid(rid)))

    routes: tuple[tuple[str, Callable[..., Awaitable[Response]], type[Value], str | None, int], ...] = (
        ("/observe/status", status, EngineStatus, None, 0),
        ("/observe/queue", queue, QueueAnswer, "limit", MAX_LIMIT),
        ("/observe/passes", passes, PassesAnswer, "n", KEPT_STEPS),
        ("/observe/latency", latency, LatencyAnswer, None, 0),
        ("/observe/breakdown", breakdown, LatencyBreakdown, None, 0),
        ("/observe/lanes", lanes, LanesAnswer, "n", MAX_LANES),
        ("/observe/requests", requests, RequestsAnswer, "limit", MAX_LIMIT),
        ("/observe/requests/{rid:path}", one, RequestDetail, None, 0),
        ("/observe/pages", pages, PageMap, None, 0),
        ("/observe/explain/{rid:path}", explain, Explanation, None, 0),
    )
    for path, handler, answer, parameter, most in routes:
        router.add_api_route(
            path,
            handler,
            methods=["GET"],
            response_model=None,
            responses=_answers(answer, has_id="{rid" in path),
            openapi_extra=_asks(parameter, most),
        )
    if exposition is not None:
        _add_metrics(router, exposition, "/metrics")
        if sglang:
            _add_metrics(router, exposition, "/metrics/sglang", as_sglang=True)
    return router


def _answers(answer: type[Value], *, has_id: bool) -> dict[int | str, dict[str, Any]]:
    """What the published description says of a route's answers."""
    told: dict[int | str, dict[str, Any]] = {200: {"model": answer}}
    for status, text in ((400, "The question is out of bounds"), (503, "The engine has not started")):
        told[status] = {"model": ObserveError, "description": text}
    if has_id:
        # A path with a line break matches no route, so that the server answers in its own shape.
        shapes = [{"$ref": f"#/components/schemas/{name}"} for name in ("ObserveError", "Error")]
        told[404] = {
            "description": "No live or recently finished request has this id",
            "content": {"application/json": {"schema": {"anyOf": shapes}}},
        }
    return told


def _asks(parameter: str | None, most: int) -> dict[str, Any] | None:
    """The one query parameter of a route, which it checks itself."""
    if parameter is None:
        return None
    schema = {"type": "integer", "minimum": 1, "maximum": most}
    return {"parameters": [{"name": parameter, "in": "query", "required": False, "schema": schema}]}


def _rid(rid: str) -> str:
    if len(rid) > MAX_RID:
        limit = f"at most {MAX_RID} characters"
        raise _Refused(ObserveError(error=f"rid is longer than allowed: {limit}", field="rid", limit=limit))
    return rid


def _add_metrics(router: APIRouter, exposition: Exposition, path: str, *, as_sglang: bool = False) -> None:
    async def metrics(request: Request) -> Response:
        accept = request.headers.get("accept", "")
        body, content_type = await run_in_threadpool(exposition.render, accept, as_sglang=as_sglang)
        return Response(body, headers={"content-type": content_type, **_NO_STORE})

    text: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    text |= {"application/openmetrics-text": {"schema": {"type": "string"}}}
    router.add_api_route(
        path,
        metrics,
        methods=["GET"],
        response_model=None,
        response_class=Response,
        responses={200: {"description": "Prometheus text, or OpenMetrics for those who ask for it", "content": text}},
    )

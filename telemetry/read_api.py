"""The read API. Owns: the read-only routes `/observe/*` and `/metrics`, and the bounds of what may be asked.

Answers are built on a worker thread, never on the event loop that carries streams. A question out of bounds gets 400
with field, value and limit; an unknown request 404; an engine that has not started 503.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from telemetry.exposition import Exposition
from telemetry.law_answers import LawBook
from telemetry.observe import (
    EngineStatus,
    Explanation,
    LanesAnswer,
    LatencyAnswer,
    LatencyBreakdown,
    PageMap,
    PassesAnswer,
    QueueAnswer,
    RequestDetail,
    RequestsAnswer,
)
from telemetry.read_base import NO_STORE, add_route, answer, lang_of, number, query, rid_of, up_to
from telemetry.read_kv import add_kv_routes, add_law_routes
from telemetry.read_model import KEPT_STEPS, ReadModel
from telemetry.words import LANGUAGES

MAX_LIMIT: Final = 5_000
MAX_LANES: Final = 200
_NO_REQUEST: Final = "No live or recently finished request has this id"


def create_router(
    model: ReadModel, exposition: Exposition | None = None, *, sglang: bool = False, laws: LawBook | None = None
) -> APIRouter:
    """The routes over `model`; `/metrics` when there is an `exposition`, and `/metrics/sglang` where it is wanted.

    laws  what is known of the engine's checker; None: it has none
    """
    router = APIRouter()

    async def status(request: Request) -> Response:
        return await answer(model.status, asked=request)

    async def queue(request: Request) -> Response:
        return await answer(lambda: model.queue(number(request, "limit", default=500, most=MAX_LIMIT)))

    async def passes(request: Request) -> Response:
        return await answer(lambda: model.passes(number(request, "n", default=32, most=KEPT_STEPS)))

    async def latency(request: Request) -> Response:
        return await answer(model.latency, asked=request)

    async def breakdown(request: Request) -> Response:
        return await answer(model.breakdown, asked=request)

    async def lanes(request: Request) -> Response:
        return await answer(lambda: model.lanes(number(request, "n", default=40, most=MAX_LANES)))

    async def requests(request: Request) -> Response:
        return await answer(lambda: model.requests(number(request, "limit", default=500, most=MAX_LIMIT)))

    async def one(request: Request, rid: str) -> Response:
        return await answer(lambda: model.request(rid_of(rid)), asked=request)

    async def pages(request: Request) -> Response:
        return await answer(model.page_map, asked=request)

    async def explain(request: Request, rid: str) -> Response:
        return await answer(lambda: model.explain(rid_of(rid), lang_of(request)))

    limit = (up_to("limit", MAX_LIMIT),)
    lang = query("lang", {"type": "string", "enum": list(LANGUAGES), "description": " or ".join(LANGUAGES)})
    add_route(router, "/observe/status", status, EngineStatus)
    add_route(router, "/observe/queue", queue, QueueAnswer, parameters=limit)
    add_route(router, "/observe/passes", passes, PassesAnswer, parameters=(up_to("n", KEPT_STEPS),))
    add_route(router, "/observe/latency", latency, LatencyAnswer)
    add_route(router, "/observe/breakdown", breakdown, LatencyBreakdown)
    add_route(router, "/observe/lanes", lanes, LanesAnswer, parameters=(up_to("n", MAX_LANES),))
    add_route(router, "/observe/requests", requests, RequestsAnswer, parameters=limit)
    add_route(router, "/observe/requests/{rid:path}", one, RequestDetail, missing=_NO_REQUEST)
    add_route(router, "/observe/pages", pages, PageMap)
    add_route(router, "/observe/explain/{rid:path}", explain, Explanation, missing=_NO_REQUEST, parameters=(lang,))
    add_kv_routes(router, model)
    add_law_routes(router, laws or LawBook(model))
    if exposition is not None:
        _add_metrics(router, exposition, "/metrics")
        if sglang:
            _add_metrics(router, exposition, "/metrics/sglang", as_sglang=True)
    return router


def _add_metrics(router: APIRouter, exposition: Exposition, path: str, *, as_sglang: bool = False) -> None:
    async def metrics(request: Request) -> Response:
        accept = request.headers.get("accept", "")
        body, content_type = await run_in_threadpool(exposition.render, accept, as_sglang=as_sglang)
        return Response(body, headers={"content-type": content_type, **NO_STORE})

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

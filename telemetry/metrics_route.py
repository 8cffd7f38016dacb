"""The /metrics route. Owns: answering a scrape."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from telemetry.exposition import Exposition


def metrics_router(exposition: Exposition) -> APIRouter:
    """`GET /metrics`: the Prometheus text format, or OpenMetrics for a scraper that asks for it."""
    router = APIRouter()

    # Not async: rendering runs on a worker thread and leaves the event loop to the streams.
    @router.get("/metrics", response_class=Response)
    def metrics(request: Request) -> Response:
        body, content_type = exposition.render(request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    return router

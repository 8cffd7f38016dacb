"""Routes about memory and laws. Owns: `/observe/tree`, `/observe/pool`, `/observe/pages/{page}`, `/observe/laws`, and
`/observe/evidence`, and the bounds of what may be asked of them. Read-only, as all of the read API."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from telemetry.answers_kv import MAX_OPEN, MAX_TOP
from telemetry.law_answers import LawBook
from telemetry.observe_kv import PageFact, PoolAnswer, TreeAnswer
from telemetry.observe_laws import EvidenceAnswer, EvidenceDetail, LawsAnswer
from telemetry.read_base import add_route, answer, only, query, refuse, up_to, whole
from telemetry.read_model import ReadModel

_MOST: Final = 999_999_999
_TOP: Final = 20
_NO_PAGE: Final = "no page of the pool"
_NO_BUNDLE: Final = "no evidence bundle"


def add_kv_routes(router: APIRouter, model: ReadModel) -> None:
    """The routes about K/V memory."""

    async def tree(request: Request) -> Response:
        return await answer(lambda: _tree(model, request))

    async def pool(request: Request) -> Response:
        return await answer(model.pool_over_time, asked=request)

    async def page(request: Request, page: str) -> Response:
        def build() -> PageFact | None:
            return model.page(whole("page", page, least=0, most=_MOST))

        return await answer(build, asked=request, what=_NO_PAGE, field="page")

    asked = [
        query("node", {"type": "integer", "minimum": 0, "maximum": _MOST}),
        up_to("top", MAX_TOP),
        query("open", {"type": "string", "description": f"at most {MAX_OPEN} nodes, parted by commas"}),
    ]
    add_route(router, "/observe/tree", tree, TreeAnswer, parameters=asked)
    add_route(router, "/observe/pool", pool, PoolAnswer)
    add_route(router, "/observe/pages/{page}", page, PageFact, missing="The pool has no page of this number")


def add_law_routes(router: APIRouter, laws: LawBook) -> None:
    """The routes about the checker."""

    async def all_laws(request: Request) -> Response:
        return await answer(laws.laws, asked=request)

    async def evidence(request: Request) -> Response:
        return await answer(laws.evidence, asked=request)

    async def bundle(request: Request, bundle: str) -> Response:
        return await answer(lambda: laws.bundle(bundle), asked=request, what=_NO_BUNDLE, field="bundle")

    add_route(router, "/observe/laws", all_laws, LawsAnswer)
    add_route(router, "/observe/evidence", evidence, EvidenceAnswer)
    add_route(router, "/observe/evidence/{bundle}", bundle, EvidenceDetail, missing="No evidence bundle has this name")


def _tree(model: ReadModel, request: Request) -> TreeAnswer:
    """The tree as a question asks for it. Raises Refused."""
    only(request, "node", "top", "open")
    asked = request.query_params
    node = whole("node", asked["node"], least=0, most=_MOST) if "node" in asked else None
    top = whole("top", asked["top"], least=1, most=MAX_TOP) if "top" in asked else _TOP
    names = asked.get("open", "").split(",") if asked.get("open") else []
    if len(names) > MAX_OPEN:
        raise refuse("open", str(len(names)), f"at most {MAX_OPEN} nodes")
    return model.tree(node=node, opened=tuple(whole("open", name, least=0, most=_MOST) for name in names), top=top)

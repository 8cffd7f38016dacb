"""Base of the read API. Owns: how a question is checked, how an answer is sent, what the description says of both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from telemetry.observe import ObserveError, Value
from telemetry.read_model import NotStarted
from telemetry.words import ENGLISH, LANGUAGES, Lang, known

MAX_RID: Final = 200
NO_STORE: Final = {"cache-control": "no-store"}
_DIGITS: Final = 9


class Refused(Exception):
    """A question that is out of bounds."""

    def __init__(self, error: ObserveError) -> None:
        super().__init__(error.error)
        self.error = error


def refuse(field: str, value: str, limit: str) -> Refused:
    """The refusal of `value`; what came from outside is shown short."""
    shown = value[:64]
    return Refused(
        ObserveError(error=f"{field} is {shown!r}; {limit} is allowed", field=field, value=shown, limit=limit)
    )


def only(request: Request, *fields: str) -> None:
    """Raises Refused when another query parameter than `fields` is there."""
    unknown = sorted(set(request.query_params) - set(fields))
    if unknown:
        name, limit = unknown[0][:64], f"only {', '.join(fields)}" if fields else "none"
        raise Refused(ObserveError(error=f"unknown parameter {name!r}", field=name, limit=limit))


def whole(field: str, text: str, *, least: int, most: int) -> int:
    """`text` as an integer from `least` to `most`. Raises Refused."""
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS and least <= int(text) <= most):
        raise refuse(field, text, f"an integer from {least} to {most}")
    return int(text)


def number(request: Request, field: str, *, default: int, most: int) -> int:
    """The one query parameter `field`, from 1 to `most`. Raises Refused."""
    only(request, field)
    text = request.query_params.get(field)
    return default if text is None else whole(field, text, least=1, most=most)


def rid_of(rid: str) -> str:
    """A request id of a path. Raises Refused for one that is too long."""
    if len(rid) > MAX_RID:
        limit = f"at most {MAX_RID} characters"
        raise Refused(ObserveError(error=f"rid is longer than allowed: {limit}", field="rid", limit=limit))
    return rid


def lang_of(request: Request) -> Lang:
    """The one query parameter `lang`. Raises Refused for a language that nothing is said in."""
    only(request, "lang")
    code = request.query_params.get("lang", ENGLISH)
    language = known(code)
    if language is None:
        raise refuse("lang", code, " or ".join(LANGUAGES))
    return language


def send(value: Value, status: int = 200) -> Response:
    return Response(value.model_dump_json(), status, media_type="application/json", headers=NO_STORE)


async def answer(
    build: Callable[[], Value | None],
    *,
    asked: Request | None = None,
    what: str = "no live or recently finished request",
    field: str = "rid",
) -> Response:
    """What `build` says, made on a worker thread. None is 404: there is no `what` of this `field`.

    asked  the question to a route without query parameters; None: `build` checks its own
    """
    try:
        if asked is not None:
            only(asked)
        value = await run_in_threadpool(build)
    except Refused as refused:
        return send(refused.error, 400)
    except NotStarted as error:
        return send(ObserveError(error=str(error)), 503)
    if value is None:
        has = "has this id" if field != "page" else "has this number"
        return send(ObserveError(error=f"{what} {has}", field=field), 404)
    return send(value)


def answers(model: type[Value], *, missing: str | None) -> dict[int | str, dict[str, Any]]:
    """What the published description says of a route's answers. `missing`: when it is 404; None: never."""
    told: dict[int | str, dict[str, Any]] = {200: {"model": model}}
    for status, text in ((400, "The question is out of bounds"), (503, "The engine has not started")):
        told[status] = {"model": ObserveError, "description": text}
    if missing is not None:
        # A path with a line break matches no route, so that the server answers in its own shape.
        shapes = [{"$ref": f"#/components/schemas/{name}"} for name in ("ObserveError", "Error")]
        told[404] = {"description": missing, "content": {"application/json": {"schema": {"anyOf": shapes}}}}
    return told


def query(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A query parameter, which the route checks itself, as the published description has it."""
    return {"name": name, "in": "query", "required": False, "schema": schema}


def up_to(name: str, most: int) -> dict[str, Any]:
    """The query parameter that `number` reads."""
    return query(name, {"type": "integer", "minimum": 1, "maximum": most})


def add_route(
    router: APIRouter,
    path: str,
    handler: Callable[..., Awaitable[Response]],
    model: type[Value],
    *,
    missing: str | None = None,
    parameters: Sequence[dict[str, Any]] = (),
) -> None:
    """A question and what the published description says of it. It checks itself, and sends what `answer` made."""
    router.add_api_route(
        path,
        handler,
        methods=["GET"],
        response_model=None,
        responses=answers(model, missing=missing),
        openapi_extra={"parameters": list(parameters)} if parameters else None,
    )

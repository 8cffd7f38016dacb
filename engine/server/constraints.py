"""Constraints. Owns: what a body says its answer must be, as a grammar that can be used, or a refusal."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from typing import Any, Final

from engine.errors import RefusalCause
from engine.sampling_params import GrammarSpec
from engine.server.api_errors import ApiError, invalid, unavailable
from engine.server.schemas import GenerationBody
from engine.text.grammar import Compiled, GrammarBusy, GrammarError, Grammars

_ANY_OBJECT: Final = '{"type":"object"}'
#: Longest wait for a grammar, those before it included. What is being compiled goes on: nothing can stop it.
_MAX_WAIT_S: Final = 10.0


async def grammar_of(body: GenerationBody, grammars: Grammars | None) -> tuple[GrammarSpec, Compiled] | None:
    """The grammar of the answer to `body`, compiled; None when anything will do. Raises ApiError 400 or 503."""
    said = {
        "response_format": _of_response_format(body),
        "regex": None if body.regex is None else GrammarSpec("regex", body.regex),
        "guided_regex": None if body.guided_regex is None else GrammarSpec("regex", body.guided_regex),
    }
    asked = [(field, spec) for field, spec in said.items() if spec is not None]
    if not asked:
        return None
    (field, spec), *others = asked
    for other, differing in others:
        if differing != spec:
            raise invalid(f"{field} and {other} say two things: give one", other)
    _check_ends(body, field)
    if grammars is None:
        raise _unsupported(field, "this server makes its tokens up (executor.kind='simulated')")
    try:
        found = grammars.soon(spec)
        return spec, found if isinstance(found, Compiled) else await _wait_for(found)
    except GrammarBusy as error:
        raise _busy(str(error)) from None
    except GrammarError as error:
        if error.unavailable:
            raise _unsupported(field, str(error)) from None
        raise invalid(f"{field} cannot be followed: {error}", field) from None


async def _wait_for(promise: Future[Compiled]) -> Compiled:
    """What was promised, in time. Raises GrammarError or ApiError 503. Others may wait for the same."""
    waited = asyncio.wrap_future(promise)
    waited.add_done_callback(_look_at)
    try:
        return await asyncio.wait_for(asyncio.shield(waited), _MAX_WAIT_S)
    except TimeoutError:
        raise _busy(f"the grammar was not compiled after {_MAX_WAIT_S:g} s: simplify it, or try again later") from None


def _look_at(waited: asyncio.Future[Any]) -> None:
    """An error that comes after the time limit has nobody left to read it."""
    if not waited.cancelled():
        waited.exception()


def _busy(message: str) -> ApiError:
    return unavailable(message, "grammar_busy", RefusalCause.QUEUE_FULL)


def _of_response_format(body: GenerationBody) -> GrammarSpec | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        if wanted is not None and wanted.json_schema is not None:
            raise invalid("response_format.json_schema is for type 'json_schema', not 'text'", "response_format")
        return None
    if wanted.type == "json_object":
        if wanted.json_schema is not None:
            raise invalid("response_format.json_schema is for type 'json_schema', not 'json_object'", "response_format")
        return GrammarSpec("json_schema", _ANY_OBJECT)
    if wanted.json_schema is None:
        raise invalid(
            "response_format.json_schema is required with type 'json_schema'", "response_format", "missing_parameter"
        )
    # In the order given: properties of an answer come in the order of the schema.
    return GrammarSpec("json_schema", json.dumps(wanted.json_schema.schema_, ensure_ascii=False))


def _check_ends(body: GenerationBody, field: str) -> None:
    """A grammar says when an answer ends; nothing else may say that it must not."""
    if body.ignore_eos:
        raise invalid(f"ignore_eos=true contradicts {field}: the grammar says when the answer ends", "ignore_eos")
    if body.min_tokens:
        raise invalid(
            f"min_tokens={body.min_tokens} contradicts {field}: the grammar says when the answer ends", "min_tokens"
        )


def _unsupported(field: str, reason: str) -> ApiError:
    return ApiError(400, f"{field} is not supported: {reason}", code="unsupported_parameter", param=field)

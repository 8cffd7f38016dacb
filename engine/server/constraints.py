"""Constraints. Owns: what a body says its answer must be, as a grammar that can be used, or a refusal."""

from __future__ import annotations

import asyncio
import json
from typing import Final

from engine.sampling_params import GrammarSpec
from engine.server.api_errors import ApiError, invalid
from engine.server.schemas import GenerationBody
from engine.text.grammar import GrammarError, Grammars

_ANY_OBJECT: Final = '{"type":"object"}'


async def grammar_of(body: GenerationBody, grammars: Grammars | None) -> GrammarSpec | None:
    """The grammar of the answer to `body`, compiled and kept; None when anything will do. Raises ApiError 400."""
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
        if grammars.is_ready(spec):
            grammars.state_of(spec)
        else:
            await asyncio.to_thread(grammars.state_of, spec)
    except GrammarError as error:
        if error.unavailable:
            raise _unsupported(field, str(error)) from None
        raise invalid(f"{field} cannot be followed: {error}", field) from None
    return spec


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

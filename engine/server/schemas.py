"""Request bodies. Owns: the fields of the completion and chat interfaces, their types and their ranges.

Strict: no value is converted, unknown fields are refused, NaN and infinity are no numbers. `parse_body` turns what
pydantic finds into one ApiError that names the field and never quotes a prompt.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from engine.server.api_errors import ApiError, invalid
from engine.server.unsupported import drop_neutral
from engine.text.grammar import MAX_GRAMMAR_CHARS

MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 1000
MAX_STOP_TOKEN_IDS: Final = 64
MAX_CHOICES: Final = 8
MAX_LOGPROBS: Final = 20
MAX_LOGIT_BIASES: Final = 1024
#: Of a field's name, what a refusal says.
MAX_NAME_CHARS: Final = 80
_INT64: Final = 2**63

Prompts = list[str | list[int]]
"""Prompts as texts, or as token ids."""


def _prompts(value: object) -> Prompts:
    """A text, texts, token ids or lists of token ids -> a list of prompts, none of them empty."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise _bad("prompt must be a string, a list of strings, a list of token ids or a list of such lists")
    if not value:
        raise _bad("prompt must not be empty")
    if all(type(item) is int for item in value):
        value = [value]
    if not (all(isinstance(item, str) for item in value) or all(isinstance(item, list) for item in value)):
        raise _bad("prompt must hold only strings, only token ids, or only lists of token ids")
    for index, item in enumerate(value):
        if not item:
            raise _bad(f"prompt {index} must not be empty")
        if isinstance(item, list) and not all(type(token) is int for token in item):
            raise _bad(f"prompt {index} must hold token ids (integers) only")
    return cast("Prompts", value)


def _stops(value: object) -> object:
    """One stop or several -> a list."""
    return [value] if isinstance(value, str) else value


def _content(value: object) -> object:
    """Text or text parts; says plainly that nothing else is read here."""
    parts = value if isinstance(value, list) else []
    if not isinstance(value, str | list) or not all(isinstance(part, dict) for part in parts):
        raise _bad("content must be a string or a list of text parts")
    if any(part.get("type") != "text" for part in parts):
        raise _bad("content parts must be of type text: this model reads nothing else")
    return value


def _bad(message: str) -> PydanticCustomError:
    return PydanticCustomError("invalid_value", "{reason}", {"reason": message})


_PROMPT_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {"type": "array", "minItems": 1, "items": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
    ]
}
#: As keys of JSON objects must be: decimal digits in a string, of at most 64 bits.
_TokenId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,17})$")]
_StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """Options of a stream. Absent, empty and `include_usage: false` are three ways to say the same."""

    include_usage: bool | None = None


class JsonSchemaFormat(_Strict):
    """`response_format.json_schema`. `strict` changes nothing: an answer always follows its schema."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, JsonValue] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """What an answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class GenerationBody(_Strict):
    """Fields that both interfaces share. None means: not given."""

    model: str
    max_tokens: int | None = Field(None, ge=1, lt=_INT64)
    max_completion_tokens: int | None = Field(None, ge=1, lt=_INT64)
    min_tokens: int | None = Field(None, ge=0, lt=_INT64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=_INT64)
    min_p: float | None = Field(None, ge=0, le=1)
    # Not down to 0: logits are divided by it, and a row that is not finite would end its step.
    repetition_penalty: float | None = Field(None, ge=0.01, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[_TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MAX_LOGIT_BIASES, description="Token id, as text, to what is added to its logit."
    )
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Annotated[list[_StopText] | None, BeforeValidator(_stops)] = Field(None, max_length=MAX_STOPS)
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=_INT64)]] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    regex: str | None = Field(None, min_length=1, max_length=MAX_GRAMMAR_CHARS)
    guided_regex: str | None = Field(
        None, min_length=1, max_length=MAX_GRAMMAR_CHARS, description="Another name of `regex`."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    routing_key: str | None = Field(None, min_length=1, max_length=256)
    user: str | None = Field(None, description="Accepted and not used: it says who asks, not what for.")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[Prompts, BeforeValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class TextPart(_Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """One message; `content` as text or as text parts."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[TextPart], BeforeValidator(_content)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletionBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


Body = TypeVar("Body", bound=GenerationBody)


def parse_body(kind: type[Body], data: bytes) -> Body:
    """A validated body; raises ApiError 400 naming the first field at fault."""
    fields = drop_neutral(_object(data))
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _first_fault(error) from None


def _object(data: bytes) -> dict[str, JsonValue]:
    """The JSON object in `data`. Strict: UTF-8, no NaN or infinity, no lone surrogates."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8 (byte {error.start})", None, "invalid_encoding") from None
    try:
        content = json.loads(text, parse_constant=_no_constant)
        if "\\u" in text:  # escapes can spell half a character
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise invalid("the body spells lone surrogates, which are no text", None, "invalid_encoding") from None
    except json.JSONDecodeError as error:
        raise invalid(
            f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}", None, "invalid_json"
        ) from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise invalid(f"the body is not acceptable JSON: {reason}", None, "invalid_json") from None
    if not isinstance(content, dict):
        raise invalid("the body must be a JSON object", None, "invalid_json")
    return content


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _first_fault(error: ValidationError) -> ApiError:
    fault = error.errors(include_url=False, include_context=False)[0]
    # Members of a union are named in the path by their types; they are no part of the body.
    path = [part for part in fault["loc"] if isinstance(part, int) or (part != "str" and "[" not in part)]
    if path[:1] == ["logit_bias"]:
        path = path[:1]  # its keys are values: they may be anything, and long
    name = _in_short(".".join(map(str, path))) or None
    top = _in_short(str(path[0])) if path else None
    match fault["type"]:
        case "extra_forbidden":
            return invalid(f"{name} is not a field of this interface", name, "unknown_parameter")
        case "missing":
            return invalid(f"{name} is required", name, "missing_parameter")
        case "invalid_value":
            return invalid(f"{name}: {fault['msg']}" if len(path) > 1 else fault["msg"], top)
        case kind if kind.endswith("_type"):
            return invalid(f"{name}: {fault['msg']}", top, "invalid_type")
        case _:
            return invalid(f"{name}: {fault['msg']}{_but_is(fault['input'])}", top)


def _in_short(name: str) -> str:
    """A client may call a field anything, a megabyte of it included."""
    return name if len(name) <= MAX_NAME_CHARS else f"{name[: MAX_NAME_CHARS - 1]}…"


def _but_is(value: object) -> str:
    """A number may be quoted; a text may be somebody's prompt."""
    return f", not {value!r:.40}" if isinstance(value, int | float) and not isinstance(value, bool) else ""

"""API errors. Owns: the refusals of the HTTP interface, as values, in OpenAI's shape.

Every documented refusal is an ApiError; docs/reference/http-errors.md lists them.
"""

from __future__ import annotations

from typing import Any, Final

from engine.errors import RefusalCause, RequestRefused
from engine.request import Cause

#: Seconds after which a client should try again.
RETRY_AFTER_S: Final = 1


class ApiError(Exception):
    """A refusal with its HTTP status.

    cause    what `requests_rejected_total` counts it as
    details  further fields of the error body, such as `queue_depth`
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        kind: str = "invalid_request_error",
        cause: RefusalCause = RefusalCause.INVALID,
        headers: dict[str, str] | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind
        self.cause = cause
        self.headers = headers or {}
        self.details = details or {}

    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code", ...}}`."""
        return error_body(self.message, kind=self.kind, param=self.param, code=self.code, **self.details)


class QueueFull(RequestRefused):
    """No room for more waiting requests. `depth` wait now, `limit` may."""

    def __init__(self, depth: int, limit: int) -> None:
        super().__init__(
            RefusalCause.QUEUE_FULL,
            f"{depth} requests are waiting; server.max_queued_requests={limit}: try again later",
        )
        self.depth = depth
        self.limit = limit


def error_body(message: str, *, kind: str, param: str | None = None, code: str, **details: Any) -> dict[str, Any]:
    """The body of every error response and error event."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code, **details}}


def invalid(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """400: something in the request has to change."""
    return ApiError(400, message, code=code, param=param)


def too_long(message: str, param: str) -> ApiError:
    """400: the prompt, or prompt and output together, do not fit the context."""
    return ApiError(400, message, code="context_length_exceeded", param=param, cause=RefusalCause.TOO_LONG)


def unavailable(message: str, code: str, cause: RefusalCause = RefusalCause.SHUTTING_DOWN) -> ApiError:
    """503: this server cannot answer now."""
    headers = {"retry-after": str(RETRY_AFTER_S)}
    return ApiError(503, message, code=code, kind="server_error", cause=cause, headers=headers)


def turned_away(cause: Cause) -> ApiError:
    """503: the request was accepted and refused while it waited."""
    if cause is Cause.DISPLACED:
        return unavailable("the queue is full and a more important request took this one's place", cause.value)
    return unavailable("the request waited longer than server.queue_timeout_s for its turn", cause.value)


def from_refusal(refusal: RequestRefused) -> ApiError:
    """The HTTP face of an engine's refusal."""
    match refusal.cause:
        case RefusalCause.QUEUE_FULL:
            depth = refusal.depth if isinstance(refusal, QueueFull) else 0
            limit = refusal.limit if isinstance(refusal, QueueFull) else 0
            return ApiError(
                429,
                str(refusal),
                code="queue_full",
                kind="rate_limit_error",
                cause=refusal.cause,
                headers={"retry-after": str(RETRY_AFTER_S), "x-queue-depth": str(depth)},
                details={"queue_depth": depth, "max_queued_requests": limit},
            )
        case RefusalCause.SHUTTING_DOWN:
            return unavailable(str(refusal), "shutting_down")
        case RefusalCause.TOO_LONG:
            return too_long(str(refusal), refusal.field or "prompt")
        case RefusalCause.NEVER_FITS:
            return ApiError(400, str(refusal), code="never_fits", param=refusal.field, cause=refusal.cause)
        case RefusalCause.INVALID:
            return invalid(str(refusal), refusal.field)

"""Bodies off the wire. Owns: reading a request body under a limit, chunked or not."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from starlette.requests import Request

from engine.errors import RefusalCause
from engine.server.api_errors import ApiError
from engine.server.observer import CutCause, FrontEndObserver

#: A refused body is still read this far and this long, so that the client hears the refusal instead of a reset.
_DISCARD_BYTES: Final = 64 * 1024 * 1024
_DISCARD_S: Final = 5.0


async def read_body(request: Request, limit: int, timeout_s: float, observer: FrontEndObserver) -> bytes:
    """The body, at most `limit` bytes, within `timeout_s`. Raises ApiError 408, 413, 415, or ClientDisconnect."""
    _check_media_type(request.headers.get("content-type", ""))
    _check_encoding(request.headers.get("content-encoding", ""))
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > _DISCARD_BYTES:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request, limit)
    except TimeoutError:
        observer.on_cut(CutCause.BODY_LATE)
        raise ApiError(
            408,
            f"the body was not complete after server.receive_timeout_s={timeout_s:g}",
            code="request_timeout",
            headers={"connection": "close"},
        ) from None


async def _read(request: Request, limit: int) -> bytes:
    parts: list[bytes] = []
    size, deadline = 0, time.monotonic() + _DISCARD_S
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
        elif size > _DISCARD_BYTES or time.monotonic() > deadline:
            break
        else:
            parts.clear()
    if size > limit:
        raise _too_large(limit)
    return b"".join(parts)


def _check_media_type(value: str) -> None:
    """None at all is taken as JSON."""
    media, _, parameters = value.partition(";")
    media = media.strip().lower()
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if media not in ("", "application/json") or charset not in ("", "utf-8", "utf8"):
        raise ApiError(
            415, "content-type must be application/json, in UTF-8", code="unsupported_media_type", param="content-type"
        )


def _check_encoding(value: str) -> None:
    """Compressed bodies are refused: unpacking one would be a way around the limit."""
    if value.strip().lower() not in ("", "identity"):
        raise ApiError(
            415,
            "content-encoding must be identity: compressed bodies are not read",
            code="unsupported_media_type",
            param="content-encoding",
        )


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than server.max_body_bytes={limit}",
        code="body_too_large",
        cause=RefusalCause.INVALID,
        headers={"connection": "close"},
    )

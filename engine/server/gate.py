"""Gate. Owns: what every HTTP request passes: its ids, its head's size, the API key or the host it was meant for.

Without a key this server is open to its own machine. A page in a browser of that machine must not get in by way of a
name that its author makes point to 127.0.0.1: so the host that was asked for has to be this machine, too.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Final

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.config import ServerConfig
from engine.server.api_errors import ApiError
from engine.server.observer import CutCause, FrontEndObserver
from engine.server.trace_context import context_of

#: Probes carry no key.
OPEN_PATHS: Final = frozenset({"/health", "/ready"})
_LOOPBACK: Final = frozenset({b"localhost", b"127.0.0.1", b"[::1]"})


class Gate:
    """ASGI middleware. Puts a RequestContext into `scope["state"]["context"]`.

    Plain ASGI on purpose: a middleware that wraps the body channel would hide disconnects from streams.
    """

    def __init__(self, app: ASGIApp, *, config: ServerConfig, observer: FrontEndObserver) -> None:
        self._app = app
        self._observer = observer
        self._max_header_bytes = config.max_header_bytes
        self._expected = None if config.api_key is None else sha256(config.api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = context_of(scope["headers"])
        scope.setdefault("state", {})["context"] = context
        extra = [
            (b"x-request-id", context.request_id.encode("ascii")),
            (b"traceparent", context.traceparent.encode("ascii")),
        ]

        async def send_with_ids(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send_with_ids)
        else:
            answer = JSONResponse(refusal.body(), refusal.status, refusal.headers)
            await answer(scope, receive, send_with_ids)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = scope["headers"]
        # h11 measures a head only while it is incomplete: one that came in a single read has not been measured.
        size = len(scope.get("raw_path", b"")) + len(scope.get("query_string", b""))
        if size + sum(len(name) + len(value) for name, value in headers) > self._max_header_bytes:
            self._observer.on_cut(CutCause.HEAD_TOO_LARGE)
            return head_too_large(self._max_header_bytes)
        if scope["path"] in OPEN_PATHS:
            return None
        if self._expected is not None:
            return None if self._has_key(_first(headers, b"authorization"), self._expected) else _no_key()
        host = _first(headers, b"host")
        return None if not host or _without_port(host.lower()) in _LOOPBACK else _other_host()

    def _has_key(self, given: bytes, expected: bytes) -> bool:
        scheme, _, key = given.partition(b" ")
        # Digests are compared: equal length whatever was sent, so time tells nothing about the key.
        matches = hmac.compare_digest(sha256(key.strip(b" ")).digest(), expected)
        return matches and scheme.lower() == b"bearer"


def head_too_large(limit: int) -> ApiError:
    """431: the request line and the headers."""
    return ApiError(
        431,
        f"the head of the request is larger than server.max_header_bytes={limit}",
        code="headers_too_large",
        headers={"connection": "close"},
    )


def _no_key() -> ApiError:
    return ApiError(
        401,
        "a valid API key is needed",
        code="invalid_api_key",
        kind="authentication_error",
        headers={"www-authenticate": "Bearer"},
    )


def _other_host() -> ApiError:
    return ApiError(
        403,
        "without server.api_key only requests to localhost, 127.0.0.1 or [::1] are answered",
        code="host_not_allowed",
        param="host",
        kind="authentication_error",
    )


def _first(headers: list[tuple[bytes, bytes]], wanted: bytes) -> bytes:
    return next((value for name, value in headers if name == wanted), b"")


def _without_port(host: bytes) -> bytes:
    name, colon, port = host.rpartition(b":")
    return name if colon and port.isdigit() else host

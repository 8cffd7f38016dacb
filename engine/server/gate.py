"""Gate. Owns: what every HTTP request passes: its ids, the API key, and the headers that each response carries."""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Final

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.api_errors import error_body
from engine.server.trace_context import context_of

#: Probes carry no key.
OPEN_PATHS: Final = frozenset({"/health", "/ready"})


class Gate:
    """ASGI middleware. Puts a RequestContext into `scope["state"]["context"]`.

    Plain ASGI on purpose: a middleware that wraps the body channel would hide disconnects from streams.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None) -> None:
        self._app = app
        self._expected = None if api_key is None else sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse without the key, else pass on."""
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

        if self._is_allowed(scope):
            await self._app(scope, receive, send_with_ids)
            return
        body = error_body("a valid API key is needed", kind="authentication_error", code="invalid_api_key")
        refusal = JSONResponse(body, 401, {"www-authenticate": "Bearer"})
        await refusal(scope, receive, send_with_ids)

    def _is_allowed(self, scope: Scope) -> bool:
        if self._expected is None or scope["path"] in OPEN_PATHS:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        # Digests are compared: equal length whatever was sent, so time tells nothing about the key.
        matches = hmac.compare_digest(sha256(key.strip(b" ")).digest(), self._expected)
        return matches and scheme.lower() == b"bearer"

"""Connections. Owns: what one TCP connection may take of this server: its head, its time, its share of the places.

uvicorn's h11 protocol with limits. A client gets an answer in the shape of every other error where an answer can still
be read, and is cut otherwise. Everything cut short is told to the observer.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from http import HTTPStatus
from typing import Any, ClassVar, Final, cast

import h11
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.config import ServerConfig
from engine.server.api_errors import RETRY_AFTER_S, ApiError, error_body
from engine.server.gate import OPEN_PATHS, head_too_large
from engine.server.observer import CutCause, FrontEndObserver

#: In `scope["state"]` once a response is a stream of events: a comment may then be written between two of them.
EVENT_STREAM: Final = "event_stream"
#: Key in a request's state that is set when the connection is lost before the whole answer was written into it.
LOST: Final = "connection_lost"
#: Connections beyond the limit that are still told so; any more are closed without a word.
_TOLD: Final = 64
#: A client that closed its sending side is asked for a sign of life after these seconds, then every `_LATER_S`.
_PROBES_S: Final = (0.0, 0.02, 0.2, 1.0)
_LATER_S: Final = 5.0


class LimitedConnection(H11Protocol):
    """One connection. Made by uvicorn; `protocol_for` gives the class its limits."""

    limits: ClassVar[ServerConfig]
    observer: ClassVar[FrontEndObserver]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Take a place, or refuse: at the first request while few are being refused, else at once."""
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._half_closed = False
        self._idle_since = self.loop.time()
        self._is_refused = False
        others = [cast("LimitedConnection", one) for one in self.connections if one is not self]
        refused = sum(one._is_refused for one in others)
        if len(others) - refused < self.limits.max_connections or self._take_place_of_an_idle_one(others):
            self._watch_head()
            return
        self._is_refused = True
        self.observer.on_cut(CutCause.TOO_MANY)
        self._served_app, self.app = self.app, cast("Any", self._refuse)
        if refused < _TOLD:
            self._watch_head()
        else:
            transport.abort()

    def _take_place_of_an_idle_one(self, others: list[LimitedConnection]) -> bool:
        """Close the connection that has been idle for longest: keeping it is a courtesy. False when none is."""
        idle = [one for one in others if one.is_idle]
        if not idle:
            return False
        oldest = min(idle, key=lambda one: one._idle_since)
        self.observer.on_cut(CutCause.IDLE)
        self.connections.discard(oldest)
        oldest._close()
        return True

    @property
    def is_idle(self) -> bool:
        """It has a place, and no request on it is being read or answered."""
        is_between = not self._is_refused and (self.cycle is None or self.cycle.response_complete)
        return is_between and self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop every timer; tell the answer that is being written, whose writes return as if nothing had happened."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.scope["state"][LOST] = True
        for timer in (self._head_timer, self._send_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    # -- a head that does not come, or is no head ----------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        super().data_received(data)
        self._watch_head()

    def _watch_head(self) -> None:
        """A head that has begun, or the first one, has to be complete in time; between requests keep-alive rules."""
        waits = self.conn.their_state is h11.IDLE and (self.cycle is None or bool(self.conn.trailing_data[0]))
        if not waits and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        elif waits and self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.limits.receive_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        self.observer.on_cut(CutCause.HEAD_LATE)
        limit = self.limits.receive_timeout_s
        if self.conn.trailing_data[0]:
            message = f"the head of the request was not complete after server.receive_timeout_s={limit:g}"
            self._answer_by_hand(ApiError(408, message, code="request_timeout"))
        self._close()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 (uvicorn's words)
        """Called by uvicorn while it handles what h11 could not read."""
        hint = getattr(sys.exception(), "error_status_hint", 400)
        if hint == 431:
            self.observer.on_cut(CutCause.HEAD_TOO_LARGE)
            self._answer_by_hand(head_too_large(self.limits.max_header_bytes))
        else:
            self.observer.on_cut(CutCause.NO_HTTP)
            self._answer_by_hand(ApiError(400, "this is no HTTP request", code="invalid_http"))
        self._close()

    def _answer_by_hand(self, error: ApiError) -> None:
        """An error where no application can give one; nothing when an answer has begun."""
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            return
        content = json.dumps(error.body()).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(content))),
            ("connection", "close"),
        ]
        events = (
            h11.Response(
                status_code=error.status, headers=headers, reason=HTTPStatus(error.status).phrase.encode("ascii")
            ),
            h11.Data(data=content),
            h11.EndOfMessage(),
        )
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))

    # -- a client that does not take its answer ------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """The buffer of this connection is full."""
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        """It has drained."""
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came after the last answer, which may not have been taken either."""
        super().timeout_keep_alive_handler()
        self._watch_sending()

    def on_response_complete(self) -> None:
        """The last byte of an answer is in the buffer."""
        super().on_response_complete()
        self._idle_since = self.loop.time()
        if self._half_closed and self.cycle.response_complete:
            self.transport.close()
        self._watch_head()
        if self.transport.is_closing():
            self._watch_sending()

    def _close(self) -> None:
        self.transport.close()
        self._watch_sending()

    def _watch_sending(self) -> None:
        """Closing waits until what is buffered was taken: not for ever."""
        if self._send_timer is None and self.transport.get_write_buffer_size():
            self._send_timer = self.loop.call_later(self.limits.send_timeout_s, self._not_taken)

    def _not_taken(self) -> None:
        self._send_timer = None
        self.observer.on_cut(CutCause.NOT_TAKEN)
        self.transport.abort()

    # -- a client that has closed its sending side ---------------------------------------------------------------------

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn answers None, asyncio asks for bool
        """No more will be sent. True keeps the connection for the answer to a request that is complete.

        A client that left says the same. Only what is written to it tells the two apart: a connection that is gone
        answers with a reset. HTTP has bytes for that which mean nothing: 102, and comments in a stream of events.
        """
        cycle = self.cycle
        waits = cycle is not None and not cycle.response_complete and not cycle.more_body
        # Clients of HTTP/1.0 know no interim answers: there the end of their sending is the end of their interest.
        if not waits or self.scope["http_version"] != "1.1" or self.transport.is_closing():
            return False
        if not self._half_closed:
            self._half_closed = True
            self._probe(0)
        return True

    def _probe(self, round_: int) -> None:
        """Write something without meaning, and look whether it was answered with a reset."""
        transport = self.transport
        if transport.is_closing() or self.cycle.response_complete:
            return
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            transport.abort()
            return
        if round_ == 0 or round_ >= len(_PROBES_S):
            event: h11.Event | None = None
            if self.conn.our_state is h11.SEND_RESPONSE:
                event = h11.InformationalResponse(status_code=102, headers=[], reason=b"Processing")
            elif self.conn.our_state is h11.SEND_BODY and self.scope["state"].get(EVENT_STREAM):
                event = h11.Data(data=b":\n\n")
            if event is not None and not self.flow.write_paused:
                transport.write(self.conn.send(event) or b"")
        wait = _PROBES_S[round_ + 1] if round_ + 1 < len(_PROBES_S) else _LATER_S
        self._probe_timer = self.loop.call_later(wait, self._probe, round_ + 1)

    # -- one connection too many ---------------------------------------------------------------------------------------

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """503 and the end of this connection; probes are answered, since a crowd is no reason for a restart."""
        self.cycle.keep_alive = False
        if scope["path"] in OPEN_PATHS:
            await self._served_app(cast("Any", scope), cast("Any", receive), cast("Any", send))
            return
        limit = self.limits.max_connections
        message = f"more than server.max_connections={limit} connections are open: try again later"
        body = error_body(message, kind="server_error", code="too_many_connections")
        headers = {"retry-after": str(RETRY_AFTER_S), "connection": "close"}
        await JSONResponse(body, 503, headers)(scope, receive, send)


def protocol_for(config: ServerConfig, observer: FrontEndObserver) -> type[LimitedConnection]:
    """The class of the connections of one server."""
    return type("ServerConnection", (LimitedConnection,), {"limits": config, "observer": observer})

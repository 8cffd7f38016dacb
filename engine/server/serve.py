"""Serving. Owns: running the application under uvicorn, and an orderly end.

On a signal the engine begins to drain before uvicorn waits for connections: uvicorn's own order would let streams run
on without a deadline, because the application hears of the shutdown only after the last connection is closed. A second
signal ends what still runs; a third one ends the process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from types import FrameType
from typing import Final, cast

import uvicorn
from fastapi import FastAPI

from engine.config import ServerConfig
from engine.server.connection import LimitedConnection, protocol_for
from engine.server.engine_thread import EngineThread

_log: Final = logging.getLogger(__name__)

#: Beyond the drain: time for ends to reach their clients.
_FLUSH_S = 5
#: The part of it that is left for tasks to end by themselves once connections that still stand have been cut.
_CUT_S = 1
#: The same after a second signal.
_HURRIED_FLUSH_S = 1


class DrainingServer(uvicorn.Server):
    """A uvicorn server that tells the engine thread first."""

    def __init__(self, config: uvicorn.Config, *, engine_thread: EngineThread, drain_s: float) -> None:
        super().__init__(config)
        self._engine_thread = engine_thread
        self._drain_s = drain_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signals = 0
        #: A second signal came: live requests were ended instead of finished.
        self.was_hurried = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain or abort, close connections, then stop the application."""
        if left := self._engine_thread.open_replies:
            words = "finishing %d requests, for at most %g s; a second signal ends them at once"
            _log.info(words, left, self._drain_s)
        self._engine_thread.begin_shutdown(self._drain_s)
        # Who has not taken its end by then never will. Cut, a response ends in order; uvicorn would cancel it.
        asyncio.get_running_loop().call_later(self._drain_s + _FLUSH_S - _CUT_S, self._cut)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first drains, the second ends at once, the third does not ask the engine any more."""
        self._signals += 1
        if self._signals == 1 or self._loop is None:
            super().handle_exit(sig, frame)
        elif self._signals == 2:
            # Not from here: what this handler interrupted may hold the lock that ending the engine needs.
            self._loop.call_soon_threadsafe(self._hurry)
        else:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)

    def _hurry(self) -> None:
        self.was_hurried = True
        self._engine_thread.begin_shutdown(0)
        asyncio.get_running_loop().call_later(_HURRIED_FLUSH_S, self._cut)

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            cast("LimitedConnection", connection).transport.abort()


def build_server(app: FastAPI, config: ServerConfig, engine_thread: EngineThread) -> DrainingServer:
    """A server ready to `run()`, or to `serve()` on a running loop."""
    settings = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        http=protocol_for(config, app.state.observer),
        ws="none",
        h11_max_incomplete_event_size=config.max_header_bytes,
        log_config=None,  # its lines look like all others
        log_level="error",  # what it warns of is counted: anybody could fill a log with it
        access_log=False,  # paths are counted, not logged
        server_header=False,
        timeout_keep_alive=config.keep_alive_s,
        timeout_graceful_shutdown=math.ceil(config.drain_timeout_s) + _FLUSH_S,
        # A queue is bounded by max_queued_requests; the listen backlog only has to hold a burst of connects.
        backlog=2048,
        lifespan="on",
    )
    return DrainingServer(settings, engine_thread=engine_thread, drain_s=config.drain_timeout_s)

"""Serving. Owns: running the application under uvicorn, and an orderly end.

On a signal the engine begins to drain before uvicorn waits for connections: uvicorn's own order would let streams run
on without a deadline, because the application hears of the shutdown only after the last connection is closed.
"""

from __future__ import annotations

import socket

import uvicorn
from fastapi import FastAPI

from engine.config import ServerConfig
from engine.server.engine_thread import EngineThread

#: Beyond the drain: time for ends to reach their clients.
_FLUSH_S = 5


class DrainingServer(uvicorn.Server):
    """A uvicorn server that tells the engine thread first."""

    def __init__(self, config: uvicorn.Config, *, engine_thread: EngineThread, drain_s: float) -> None:
        super().__init__(config)
        self._engine_thread = engine_thread
        self._drain_s = drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain or abort, close connections, then stop the application."""
        self._engine_thread.begin_shutdown(self._drain_s)
        await super().shutdown(sockets)


def build_server(app: FastAPI, config: ServerConfig, engine_thread: EngineThread) -> DrainingServer:
    """A server ready to `run()`, or to `serve()` on a running loop."""
    settings = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        log_level="warning",
        access_log=False,  # paths are counted, not logged
        server_header=False,
        timeout_graceful_shutdown=round(config.drain_timeout_s) + _FLUSH_S,
        # A queue is bounded by max_queued_requests; the listen backlog only has to hold a burst of connects.
        backlog=2048,
        lifespan="on",
    )
    return DrainingServer(settings, engine_thread=engine_thread, drain_s=config.drain_timeout_s)

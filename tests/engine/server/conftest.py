"""Fixtures that start live servers and stop them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from tests.engine.server.live import LiveServer

Serve = Callable[..., LiveServer]


@pytest.fixture(scope="module")
def serve_module() -> Iterator[Serve]:
    yield from _servers()


@pytest.fixture(scope="module")
def shared(serve_module: Serve) -> Serve:
    """Like `serve_module`, but the same options give the same server; tests that use it look at answers only."""
    servers: dict[str, LiveServer] = {}

    def get(**options: Any) -> LiveServer:
        key = repr(sorted(options.items()))
        if key not in servers:
            servers[key] = serve_module(**options)
        return servers[key]

    return get


@pytest.fixture
def serve() -> Iterator[Serve]:
    yield from _servers()


def _servers() -> Iterator[Serve]:
    servers: list[LiveServer] = []

    def start(
        *,
        scheduler: dict[str, Any] | None = None,
        cache: dict[str, Any] | None = None,
        server: dict[str, Any] | None = None,
        context: int = 2048,
        step_ms: float = 0.0,
        overlap: bool = False,
        **options: Any,
    ) -> LiveServer:
        config = EngineConfig(
            scheduler=SchedulerConfig(**scheduler or {}),
            cache=CacheConfig(**({"num_pages": 512} | (cache or {}))),
            model=ModelConfig(max_context_tokens=context),
            executor={"kind": "simulated", "simulated_step_ms": step_ms, "overlap": overlap},
            server=ServerConfig(**({"port": 0, "drain_timeout_s": 1.0} | (server or {}))),
        )
        servers.append(LiveServer(config, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()

"""A whole served engine for field reports: everything that `admitscope serve` builds, with an executor of the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from engine.config import EngineConfig
from engine.executor.base import ForwardBatch, SampledToken, StepResult
from engine.executor.simulated import SimulatedExecutor
from engine.server.serve import build_server
from telemetry.launch import Instance, build_instance
from telemetry.settings import ServeCommand
from tests.engine.server.live import DEADLINE_S, until

#: What the scripted model says: "abcde", then the end token.
SCRIPT = (*b"abcde", 0)


class Script(SimulatedExecutor):
    """Says SCRIPT, for ever "e" when EOS is ignored. Holds each step while `gate` is shut; fails when told to."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.gate = threading.Event()
        self.gate.set()
        self.fail_next = False

    def execute(self, batch: ForwardBatch) -> StepResult:
        super().execute(batch)  # sleeps
        assert self.gate.wait(DEADLINE_S)
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("made to fail")
        return StepResult(batch.step, tuple(SampledToken(row.rid, _token(row)) for row in batch.sampling))


def _token(row: Any) -> int:
    token = SCRIPT[min(row.output_index, len(SCRIPT) - 1)]
    return SCRIPT[-2] if token == SCRIPT[-1] and row.params.ignore_eos else token


class Whole:
    """A served engine and a client of it."""

    def __init__(self, instance: Instance, executor: Script, port: int) -> None:
        self.instance = instance
        self.executor = executor
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=DEADLINE_S, trust_env=False)

    @property
    def status(self) -> Any:
        return self.instance.engine_thread.status

    def body(self, **fields: Any) -> dict[str, Any]:
        return {"model": "simulated", "prompt": "hello", "max_tokens": 8, "temperature": 0} | fields

    def post(self, **fields: Any) -> httpx.Response:
        """A completion; threads may ask at once."""
        return self.http.post("/v1/completions", json=self.body(**fields))

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, without the prefix."""
        text = self.http.get("/metrics").text
        lines = [line.removeprefix("admitscope_") for line in text.splitlines() if line and not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    def by_label(self, name: str) -> dict[str, float]:
        """The values above zero of a family with one label."""
        return {key.split('"')[1]: n for key, n in self.metrics().items() if key.startswith(name + "{") and n}


@contextmanager
def whole(folder: Path | None = None, *, step_ms: float = 0.0, **sections: dict[str, Any]) -> Iterator[Whole]:
    """Serve; the sections are those of the configuration, `folder` takes the journal."""
    executor = {"kind": "simulated", "simulated_step_ms": step_ms}
    server = {"port": 0, "drain_timeout_s": 1.0} | sections.pop("server", {})
    cache = {"num_pages": 256} | sections.pop("cache", {})
    command = ServeCommand(executor=executor, server=server, cache=cache, journal=folder, **sections)
    made = Script(command.engine_config())
    instance = build_instance(command, executor=made)
    uvicorn_server = build_server(instance.app, command.server, instance.engine_thread)
    runner = threading.Thread(target=lambda: asyncio.run(uvicorn_server.serve()), name="whole-http")
    runner.start()
    running = None
    try:
        until(lambda: uvicorn_server.started, "server start")
        running = Whole(instance, made, uvicorn_server.servers[0].sockets[0].getsockname()[1])
        yield running
    finally:
        made.gate.set()
        uvicorn_server.should_exit = True
        runner.join(DEADLINE_S)
        instance.close()
        if running is not None:
            running.http.close()
    assert not runner.is_alive()

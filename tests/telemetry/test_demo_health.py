"""The demo ends when the engine behind a still answering server is dead, instead of sending on."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from telemetry.demo.orchestrator import DemoFailed, _mode, _Run
from telemetry.demo.processes import Child
from telemetry.settings_page import DemoCommand


class _Server(BaseHTTPRequestHandler):
    status = 200
    body = b'{"status": "alive"}'

    def do_GET(self) -> None:
        is_health = self.path == "/health"
        self.send_response(type(self).status if is_health else 200)
        self.end_headers()
        self.wfile.write(type(self).body if is_health else b"# no samples\n")

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_dead_engine_ends_the_demo_and_shows_the_log(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _Run(Console(file=io.StringIO()), api_url=url)
    child = Child("server", "json.tool", ["--help"], log=tmp_path / "server.log")
    run.children.append(child)
    try:
        run.read_metrics()
        monkeypatch.setattr(_Server, "status", 503)
        monkeypatch.setattr(_Server, "body", b'{"status": "blocked"}')
        run.read_metrics()  # a slow step is no death
        monkeypatch.setattr(_Server, "body", b'{"status": "dead", "reason": "the engine stopped: LawBroken"}')
        with pytest.raises(DemoFailed, match="LawBroken"):
            run.read_metrics()
    finally:
        child.stop(5.0)


def test_a_demo_stops_at_the_first_broken_law_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ADMITSCOPE_ON_VIOLATION", raising=False)
    assert _mode(DemoCommand()) == ["--on-violation", "raise"]
    assert _mode(DemoCommand(on_violation="record")) == ["--on-violation", "record"]
    monkeypatch.setenv("ADMITSCOPE_ON_VIOLATION", "record")
    assert _mode(DemoCommand()) == []  # the server reads it itself
    assert _mode(DemoCommand(on_violation="off")) == ["--on-violation", "off"]

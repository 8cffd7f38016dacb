"""Journals that were altered, and disks that refuse: an export says so in a line, and ends with the status it names."""

from __future__ import annotations

import gzip
import http.server
import json
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.config import ExecutorConfig
from engine.llm_engine import EngineRequest
from engine.sampling_params import SamplingParams
from telemetry.cli import main
from telemetry.export.cookbook import main as cookbook_main
from telemetry.export.parquet_schema import TABLES
from telemetry.launch import build_instance
from telemetry.settings import ServeCommand
from telemetry.spans.config import TraceConfig

RECORDED = Path(__file__).parent / "data" / "cookbook.jsonl.gz"


def altered(path: Path, kind: str, **changes: Any) -> Path:
    """The recorded run's beginning with fields of its first `kind` replaced."""
    lines = gzip.decompress(RECORDED.read_bytes()).splitlines()[:400]
    at = next(number for number, line in enumerate(lines) if line.startswith(f'{{"type":"{kind}"'.encode()))
    lines[at] = json.dumps(json.loads(lines[at]) | changes, separators=(",", ":")).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.mark.parametrize(
    ("form", "kind", "changes"),
    [
        ("--parquet", "EngineStarted", {"t_ns": 10**30}),
        ("--parquet", "RequestArrived", {"t_ns": 10**30}),
        ("--parquet", "RequestArrived", {"prompt_len": 2**63}),
        ("--perfetto", "RequestArrived", {"parent_span_id": "no number"}),
    ],
)
def test_a_value_that_no_engine_writes_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, kind: str, changes: dict[str, Any]
) -> None:
    journal = altered(tmp_path / "run.jsonl", kind, **changes)
    assert main(["export", form, str(tmp_path / "out"), str(journal)]) == 2
    assert f"admitscope: {journal}: a value in it cannot be exported: " in capsys.readouterr().err


def test_lines_that_were_taken_out_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = gzip.decompress(RECORDED.read_bytes()).splitlines(keepends=True)
    journal, out = tmp_path / "run.jsonl", tmp_path / "out"
    events = [number for number, line in enumerate(lines[:400]) if line.startswith(b'{"type":"PagesMoved"')]
    journal.write_bytes(b"".join(line for number, line in enumerate(lines[:400]) if number not in events[:3]))
    assert main(["export", "--perfetto", str(out), str(journal)]) == 0
    assert "note: 3 events up to seq " in capsys.readouterr().out
    journal.write_bytes(b"".join(lines[:400]))
    assert main(["export", "--perfetto", str(out), str(journal)]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert len(told) == 1
    assert "no clean end" in told[0], "the end of the record was taken out, and nothing else"


@contextmanager
def small_files() -> Iterator[None]:
    """No file may grow beyond 24 KiB: a write answers EFBIG. Not for a whole test: the runner writes to a file too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (24 * 1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("form", ["--parquet", "--perfetto"])
def test_a_disk_that_refuses_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    out = tmp_path / "out"
    with small_files():
        status = main(["export", form, str(out), str(RECORDED)])
    assert status == 1
    assert f"{form[2:]}={str(out)!r}: " in (said := capsys.readouterr().err)
    assert "File too large" in said
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")], "something half-written is left"


def test_the_cookbook_names_a_folder_without_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cookbook_main([str(tmp_path)]) == 2
    assert f"cookbook: {tmp_path}: no tables of an export" in capsys.readouterr().err


def test_the_cookbook_says_why_a_running_engine_has_no_tables_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / ".2026-11-28T10-e1.parquet.part").touch()
    assert cookbook_main([str(tmp_path)]) == 2
    assert "whole once their hour is over" in capsys.readouterr().err


def test_tables_are_written_before_a_collector_that_does_not_answer_is_waited_for(tmp_path: Path) -> None:
    """Whoever waits for it longer than they like ends the process with a second signal."""
    answers = threading.Event()

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            answers.wait(60)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        traces = TraceConfig(endpoint=f"http://127.0.0.1:{collector.server_port}", sample_ratio=1.0)
        executor = ExecutorConfig(kind="simulated")
        instance = build_instance(ServeCommand(executor=executor, journal=None, parquet=tmp_path, traces=traces))
        params = SamplingParams(max_new_tokens=4)
        instance.engine.add_request(EngineRequest(rid="r1", prompt_ids=tuple(range(1, 41)), params=params))
        while instance.engine.has_work:
            instance.engine.step()
        closing = threading.Thread(target=instance.close)
        closing.start()
        deadline = time.monotonic() + 8  # the exporter gives up after ten
        while len(list(tmp_path.glob("*/*.parquet"))) < len(TABLES) and time.monotonic() < deadline:
            time.sleep(0.01)
        written = len(list(tmp_path.glob("*/*.parquet")))
        assert closing.is_alive(), "the collector was not waited for"
        answers.set()
        closing.join()
        collector.shutdown()
    assert written == len(TABLES)

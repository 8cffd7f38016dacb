"""Where JSON is asked for, every line of a log is one object, tied to requests and steps, with no prompt in it."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from engine.clock import MonotonicClock
from engine.errors import EngineDead
from engine.events import NullSink, ResponseSent
from engine.executor.simulated import SimulatedExecutor
from engine.llm_engine import LLMEngine
from engine.server.engine_thread import EngineThread
from engine.server.observer import NullObserver
from engine.server.serve import build_server
from telemetry.logs import Correlation, JsonFormatter, RequestLog, set_up
from tests.builders import engine_config
from tests.telemetry.live_run import MS, TimedRun
from tests.telemetry.served import CANARY, DEADLINE_S, ready_url

TRACE = "0af7651916cd43dd8448eb211c80319c"


def record(message: str = "hello %s", *arguments: object, **extra: object) -> logging.LogRecord:
    return logging.getLogger("tests").makeRecord(
        "tests", logging.INFO, __file__, 1, message, arguments, None, extra=extra
    )


def shown(one: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter().format(one)
    assert "\n" not in line
    parsed = json.loads(line)
    assert isinstance(parsed, dict)
    return parsed


def test_a_line_has_time_level_logger_message_and_what_it_is_about() -> None:
    line = shown(record("hello %s", "you\nthere", rid="r1", trace_id=TRACE, step=0, facts={"tokens": 3, "level": "x"}))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00", line.pop("time"))
    assert line == {
        "level": "info",
        "logger": "tests",
        "message": "hello you\nthere",
        "rid": "r1",
        "trace_id": TRACE,
        "step": 0,
        "tokens": 3,
    }
    assert set(shown(record("plain"))) == {"time", "level", "logger", "message"}


@pytest.mark.parametrize(("error", "is_told"), [(ValueError("the prompt was: sesame"), False), (EngineDead("x"), True)])
def test_an_exception_is_told_by_kind_and_place_and_in_its_own_words_only_when_they_are_ours(
    error: Exception, is_told: bool
) -> None:
    one = record("failed")
    try:
        raise error
    except Exception as raised:  # the parametrised error
        one.exc_info = (type(raised), raised, raised.__traceback__)
    told = shown(one)["exception"]
    assert told["type"] == type(error).__name__
    assert told["where"][0].startswith(__file__)
    assert ("message" in told) == is_told
    assert "sesame" not in json.dumps(told)


def test_a_line_that_names_a_request_gets_its_trace() -> None:
    correlation = Correlation()
    correlation.trace_of = {"r1": TRACE}.get
    for one, trace in ((record("a", rid="r1"), TRACE), (record("a", rid="r1", trace_id="given"), "given")):
        assert correlation.filter(one)
        assert shown(one)["trace_id"] == trace
    unknown = record("a", rid="r2")
    assert correlation.filter(unknown)
    assert "trace_id" not in shown(unknown)


@contextmanager
def bare_root_logger() -> Iterator[None]:
    """Without the handlers of the test runner; everything as it was afterwards."""
    root = logging.getLogger()
    before, level, hooks = root.handlers[:], root.level, (sys.excepthook, threading.excepthook)
    root.handlers[:] = []
    try:
        yield
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        sys.excepthook, threading.excepthook = hooks
        logging.captureWarnings(False)


def test_warnings_and_uncaught_exceptions_are_lines_too(capsys: pytest.CaptureFixture[str]) -> None:
    with bare_root_logger(), warnings.catch_warnings():
        warnings.simplefilter("always")
        set_up("json")
        warnings.warn("mind the gap", UserWarning, stacklevel=1)
        sys.excepthook(ValueError, ValueError("sesame"), None)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["logger"] for line in lines] == ["py.warnings", "telemetry.logs"]
    assert "mind the gap" in lines[0]["message"]
    assert lines[1]["exception"]["type"] == "ValueError"


def test_what_uvicorn_logs_is_a_line_like_all_others(capsys: pytest.CaptureFixture[str]) -> None:
    executor = SimulatedExecutor(engine_config())
    config = engine_config()
    thread = EngineThread(
        LLMEngine(config, executor=executor, clock=MonotonicClock(), sink=NullSink()),
        max_queued_requests=1,
        max_running_requests=1,
        clock=MonotonicClock(),
    )
    app = FastAPI()
    app.state.observer = NullObserver()
    with bare_root_logger():
        set_up("json")
        build_server(app, config.server, thread)
        logging.getLogger("uvicorn.error").error("Invalid HTTP request received.")
        logging.getLogger("uvicorn.error").warning("anybody could fill a log with it")
    [line] = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (line["logger"], line["message"]) == ("uvicorn.error", "Invalid HTTP request received.")


def test_each_request_is_logged_once_with_its_numbers_when_its_response_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "admitscope.requests")
    log = RequestLog(expects_responses=True)
    run = TimedRun(engine_config(), log)
    run.add("a", 20, 3, ignore_eos=True)
    run.add("b", 20, 3, ignore_eos=True)
    run.finish_all((0, 0, 0, 0, 0, 10 * MS, 0))
    assert not caplog.records
    run.respond("a", run.now_ns + MS)
    [line] = [shown(one) for one in caplog.records]
    assert line["rid"] == "a"
    assert line["finish_reason"] == line["cause"] == "length"
    assert (line["prompt_tokens"], line["output_tokens"], line["chunks"]) == (20, 3, 1)
    assert line["duration_ms"] >= line["ttft_ms"] > line["queue_ms"] >= 0
    assert line["step"] > 0
    log.close()
    assert [shown(one)["rid"] for one in caplog.records] == ["a", "b"]
    log.emit(ResponseSent(10**9, 0, run.now_ns, "b", None, None, 0, 0, False))
    assert len(caplog.records) == 2


def test_every_line_of_a_served_run_is_json_faults_included(tmp_path: Path) -> None:
    """The executor fails once and a law breaks once: those lines are there, and name a step."""
    command = [sys.executable, "-m", "tests.telemetry.canary_server", "serve", "--server.port", "0"]
    command += ["--executor.kind", "simulated", "--journal", str(tmp_path), "--log-format", "json", "--log-requests"]
    out, err = tmp_path / "out.log", tmp_path / "err.log"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=os.environ | {"PYTHONUNBUFFERED": "1"})
        try:
            url = ready_url(process, out)
            answered = [ask(url, number) for number in range(12)]
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 0, err.read_text()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    lines = [json.loads(line) for line in err.read_text().splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    ends = {line["rid"]: line for line in lines if line["logger"] == "admitscope.requests"}
    assert len(ends) == len(answered)
    for rid in answered:
        if rid is not None:
            assert ends[rid]["trace_id"] == TRACE
            assert re.fullmatch(r"[0-9a-f]{16}", ends[rid]["span_id"])
            assert ends[rid]["step"] >= 0
    failed = [line for line in lines if line["logger"] == "engine.executor.failure"]
    assert [type(line["step"]) for line in failed] == [int]
    broken = [line for line in lines if "broken law" in line["message"]]
    assert broken
    assert all("step" in line for line in broken)
    assert any(line["logger"].startswith("uvicorn") or line["logger"] == "asyncio" for line in lines)
    assert "Zerbinetta" in CANARY
    assert not re.search("Zerbinetta|Fugger", err.read_text())


def ask(url: str, number: int) -> str | None:
    """One completion under the caller's trace; the id of its answer, None when it failed."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": f"{CANARY} {number}", "max_tokens": 4, "stream": number % 3 == 0}
        reply = client.post("/v1/completions", json=body, headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"})
        if body["stream"] or reply.status_code != httpx.codes.OK:
            return None
        return str(reply.json()["id"])

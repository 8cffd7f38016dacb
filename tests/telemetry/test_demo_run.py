"""The demo as a person runs it: the real model, real children, a summary, and nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from telemetry.ports import bind_listener, port_of
from telemetry.replay import replay

pytestmark = pytest.mark.model


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    # As a script starts it in the background: with Ctrl-C ignored, which a child inherits.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "telemetry.cli", "demo", *flags],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "160"},
        )
    finally:
        signal.signal(signal.SIGINT, before)


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """What it says, up to a line that holds `words`."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if words in line:
            return said
    pytest.fail(f"it ended before it said {words!r}:\n{said}")


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def all_gone(processes: list[psutil.Process]) -> bool:
    """Wait for them; the time is a bound for a broken machine."""
    _, alive = psutil.wait_procs(processes, timeout=30)
    return not alive


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a demo that the test's end takes down with everything it started."""
    started: list[subprocess.Popen[str]] = []

    def run(*flags: str) -> subprocess.Popen[str]:
        started.append(start(tmp_path, *flags))
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_unattended_it_answers_all_and_exits_0(demo: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    with bind_listener("127.0.0.1", 0) as holder:
        taken = port_of(holder)
        process = demo("--duration", "6", "--api-port", str(taken), "--dashboard-port", "0")
        said = read_until(process, "dashboard")
        children = descendants(process)
        out, _ = process.communicate(timeout=240)
    said += out
    assert process.returncode == 0, said
    assert f"port {taken} is taken: the API takes" in said
    assert "/v1" in said
    assert "/metrics" in said
    assert "0 failed" in said
    assert "violations               │ none" in said
    assert "TTFT p50 / p99" in said
    assert "admitted_first_chunk" in said, "the budgets are small enough to cut prompts"
    assert "rows_exhausted" in said or "kv_total_exhausted" in said or "chunk" in said.split("refused, by reason")[1]
    assert "Q  " in said
    assert len(children) >= 2
    assert all_gone(children)
    (journal,) = (tmp_path / "journals").glob("*.jsonl")
    assert f"admitscope replay journals/{journal.name}" in said
    assert f"admitscope dashboard --journal journals/{journal.name}    # the page closes with the demo" in said
    report = replay(journal)
    assert report.verdict == "identical"
    assert report.steps > 20


def test_ctrl_c_ends_everything_with_a_summary(demo: Callable[..., subprocess.Popen[str]]) -> None:
    process = demo("--api-port", "0", "--no-dashboard", "--journal", "none")
    said = read_until(process, "waiting")
    children = descendants(process)
    assert len(children) == 2
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=180)  # what was accepted is finished, however slow the machine is
    said += out
    assert process.returncode == 0, said
    assert "cut short by Ctrl-C" in said or "0 failed" in said
    assert "Traceback" not in said
    assert all_gone(children)


def test_a_killed_demo_leaves_nobody_behind(demo: Callable[..., subprocess.Popen[str]]) -> None:
    process = demo("--api-port", "0", "--dashboard-port", "0", "--journal", "none")
    read_until(process, "load")
    while len(descendants(process)) < 4:  # server, dashboard and its Streamlit, load generator
        assert process.poll() is None
        time.sleep(0.05)
    children = descendants(process)
    process.kill()
    assert all_gone(children)


def test_a_server_that_dies_is_reported_with_its_last_words(demo: Callable[..., subprocess.Popen[str]]) -> None:
    process = demo("--duration", "60", "--api-port", "0", "--no-dashboard", "--journal", "none")
    read_until(process, "waiting")
    children = descendants(process)
    (server,) = (child for child in children if "serve" in child.cmdline())
    server.kill()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the server ended with status -9" in out
    assert all_gone(children)

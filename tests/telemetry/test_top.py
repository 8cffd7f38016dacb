"""`admitscope top` and `explain URL` on a real server: what they say is what the engine holds, now."""

from __future__ import annotations

import contextlib
import io
import threading
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from telemetry.cli import main
from telemetry.client import LiveSource, SourceUnavailable
from telemetry.settings import TopCommand, UsageError, parse
from telemetry.short_ids import shortened
from telemetry.top import Reading, frame, run_top
from tests.telemetry.served import served

SLOW = ("--executor.kind", "simulated", "--executor.simulated-step-ms", "50", "--scheduler.max-running-requests", "1")


def shown(renderable: object, width: int = 200) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(renderable)
    return out.getvalue()


def hold(url: str, number: int, tokens: int = 400) -> threading.Thread:
    """A request that runs, or waits, until its client hangs up at the server's end."""

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            body = {"model": model, "prompt": "x " * (20 + number), "max_tokens": tokens, "ignore_eos": True}
            with contextlib.suppress(httpx.HTTPError):  # the server was told to stop
                client.post("/v1/completions", json=body)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def test_top_and_explain_say_who_waits_for_what_and_who_is_ahead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(tmp_path, *SLOW, "--server.drain-timeout-s", "0.5") as url:
        threads = [hold(url, 0)]
        with LiveSource(url) as source:
            while not source.status().running:
                pass  # the others come to a pass that has no row: of one that gives it away they would hear "2 of 1"
            threads += [hold(url, number) for number in range(1, 4)]
            while not (source.status().waiting == 3 and source.queue().entries[-1].blocker == "order"):
                pass
            reading = Reading.of(source)
            text = shown(frame(reading))
            assert "running 1  waiting 3" in text
            assert "rows" in text
            assert "needs 1 row, has 0" in " ".join(text.split())
            lines = [line for line in text.splitlines() if "cmpl-" in line]
            assert [line.split()[0] for line in lines[:3]] == ["0", "1", "2"], "in the order of the queue"
            assert "decode" in lines[3]
            for width in (80, 100, 120, 200):
                narrow = shown(frame(reading, width=width), width=width)
                ids = [row.rid if width >= 130 else shortened(row.rid) for row in reading.requests.live]
                assert all(rid in narrow for rid in ids), "whole, or as `explain` takes it"
                below = narrow.rstrip().partition("why it waits")[2].splitlines()[1:]
                assert len(below) == 4, "one line each"
            by_prompt = shown(frame(reading, sort="prompt", limit=2))
            assert "2 more" in by_prompt
            last = reading.queue.entries[-1].rid

            assert main(["top", url, "--once"]) == 0
            assert "waiting 3" in capsys.readouterr().out
            assert main(["explain", url, last]) == 0
            said = capsys.readouterr().out
            assert "It is waiting now, at place 2" in said
            assert f"Ahead of it: {reading.queue.entries[0].rid}, {reading.queue.entries[1].rid}." in said
            assert "That has held it for" in said
            assert main(["explain", url, shortened(last).replace("…", "...")]) == 0
            assert f"Request {last} arrived" in capsys.readouterr().out
            assert main(["explain", url, last[:4]]) == 1
            assert all(row.rid in capsys.readouterr().err for row in reading.requests.live[:1])
            assert main(["explain", url, last, "--json"]) == 0
            assert f'"rid": "{last}"' in capsys.readouterr().out
            assert main(["explain", url, reading.queue.entries[0].rid]) == 0
            assert "it needs 1 row, and max_running_requests leaves 0" in capsys.readouterr().out
            assert main(["explain", url, "nobody"]) == 1
            said = capsys.readouterr().err
            assert "nobody" in said
            assert f"admitscope top {url}" in said
    for thread in threads:
        thread.join()


def test_a_lost_engine_is_said_once_and_the_last_table_marked(tmp_path: Path) -> None:
    with served(tmp_path, *SLOW) as url, LiveSource(url) as source:
        reading = Reading.of(source)
    assert "no live request" in shown(frame(reading))
    assert "no answer for 7 s" in shown(frame(reading, stale_s=7.0))
    out = io.StringIO()
    with LiveSource(url) as gone:
        assert run_top(TopCommand(url=url, once=True), gone, Console(file=out, width=100)) == 1
        assert "does not answer" in out.getvalue()
        with pytest.raises(SourceUnavailable):
            Reading.of(gone)


def test_a_question_that_is_refused_is_not_asked_for_ever() -> None:
    """An engine of another version, or another server, may answer 400."""
    out = io.StringIO()
    transport = httpx.MockTransport(lambda _: httpx.Response(400, json={}))
    with LiveSource("http://engine", transport=transport) as source:
        assert run_top(TopCommand(url="http://engine"), source, Console(file=out, width=100)) == 1
    assert "admitscope: refused with 400" in out.getvalue()


@pytest.mark.parametrize(
    "words",
    [
        ["top", "localhost:8000"],
        ["top", "--sort", "beauty"],
        ["top", "--limit", "0"],
        ["top", "--interval-s", "0"],
    ],
)
def test_bad_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((UsageError, SystemExit)) as refused:
        parse(words)
    assert words[-1] in str(refused.value) + capsys.readouterr().err

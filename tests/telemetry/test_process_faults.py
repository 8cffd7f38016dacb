"""A server process under load that is killed, told to stop, or cannot write: what it leaves, and how it ends."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from telemetry.check import check
from telemetry.demo.scrape import Scrape
from telemetry.journal_reader import JournalReader
from telemetry.replay import replay
from telemetry.schema_events import StepCompletedRecord
from tests.telemetry.test_launch import Served, complete, serving

DEADLINE_S = 60.0
ASK = {"model": "simulated", "prompt": [40] * 50, "ignore_eos": True, "stream": True}


class Load:
    """Streams against a server. `lines` are the events of each, `broken` counts those that were cut."""

    def __init__(self, url: str, count: int, max_tokens: int) -> None:
        self.url, self.count, self.max_tokens = url, count, max_tokens
        self.lines: list[list[str]] = [[] for _ in range(count)]
        self.broken = 0
        self.first_end = asyncio.Event()

    @property
    def tokens(self) -> int:
        return sum(len(lines) for lines in self.lines)

    def finishes(self) -> list[str | None]:
        """How each stream ended: its finish reason, the code of its error, or None when it was cut."""
        ends: list[str | None] = []
        for lines in self.lines:
            end = None
            for event in (json.loads(line) for line in lines):
                end = event["error"]["code"] if "error" in event else event["choices"][0]["finish_reason"] or end
            ends.append(end)
        return ends

    async def _one(self, client: httpx.AsyncClient, index: int) -> None:
        try:
            async with client.stream("POST", "/v1/completions", json=ASK | {"max_tokens": self.max_tokens}) as stream:
                async for line in stream.aiter_lines():
                    if line.startswith("data: {"):
                        self.lines[index].append(line.removeprefix("data: "))
        except httpx.TransportError:
            self.broken += 1
        self.first_end.set()

    async def run(self, *acts: Any) -> None:
        """All streams at once; `acts` are coroutine functions that run in order meanwhile."""
        async with httpx.AsyncClient(base_url=self.url, timeout=DEADLINE_S, trust_env=False) as client:
            streams = asyncio.gather(*(self._one(client, index) for index in range(self.count)))
            for act in acts:
                await act()
            await asyncio.wait_for(streams, DEADLINE_S)

    async def until_tokens(self, count: int) -> None:
        end = time.monotonic() + DEADLINE_S
        while self.tokens < count:
            assert time.monotonic() < end, f"{self.tokens} of {count} tokens came"
            await asyncio.sleep(0.005)


def _steps(url: str) -> int:
    return int(httpx.get(f"{url}/health", trust_env=False).json()["steps"])


def _is_waiting(url: str) -> bool:
    return bool(httpx.get(f"{url}/health", trust_env=False).json()["waiting"])


def _send(served: Served, number: signal.Signals) -> Any:
    async def act() -> None:
        served.process.send_signal(number)

    return act


def test_kill_9_leaves_a_journal_up_to_the_last_flush_and_the_next_start_is_clean(tmp_path: Path) -> None:
    with serving(tmp_path, "--executor.simulated-step-ms", "2") as served:
        load = Load(served.url, 8, 2000)
        known: list[int] = []

        async def look_and_kill() -> None:
            await load.until_tokens(400)
            known.append(await asyncio.to_thread(_steps, served.url))
            # A journal is flushed every 50 ms: what was done before has been written by then.
            await asyncio.sleep(0.5)
            served.process.kill()

        asyncio.run(load.run(look_and_kill))
        assert served.process.wait(DEADLINE_S) == -signal.SIGKILL
    assert load.broken == 8
    (journal,) = (tmp_path / "journals").glob("*.jsonl")
    reader = JournalReader(journal)
    steps = [record.step for record in reader.records() if isinstance(record, StepCompletedRecord)]
    assert steps == list(range(steps[0], steps[-1] + 1))
    assert steps[-1] >= known[0]
    report = replay(journal)
    assert (report.verdict, report.divergence) == ("identical", None)

    port = served.url.rpartition(":")[2]
    with serving(tmp_path, "--server.port", port) as again:
        assert again.url == served.url
        assert complete(again.url)["usage"]["completion_tokens"] == 20
        status = httpx.get(f"{again.url}/observe/status", trust_env=False).json()
        assert status["violations_total"] == 0
        code, _, err = again.end()
    assert (code, "Traceback" in err) == (0, False)
    assert len(list((tmp_path / "journals").glob("*.jsonl"))) == 2
    assert replay(journal).verdict == "identical", "the new run left the old journal alone"


def test_sigterm_under_load_finishes_what_was_accepted_and_takes_no_more(tmp_path: Path) -> None:
    with serving(tmp_path, "--executor.simulated-step-ms", "4") as served:
        load = Load(served.url, 12, 150)
        late: list[Any] = []

        async def try_another() -> None:
            await asyncio.sleep(0.3)
            with pytest.raises(httpx.ConnectError):
                await asyncio.to_thread(httpx.get, f"{served.url}/ready", trust_env=False)
            late.append("refused")

        asyncio.run(load.run(lambda: load.until_tokens(100), _send(served, signal.SIGTERM), try_another))
        _, said = served.process.communicate(timeout=DEADLINE_S)
        assert served.process.returncode == 0
    assert load.finishes() == ["length"] * 12
    assert late == ["refused"]
    assert "finishing 12 requests, for at most 20 s; a second signal ends them at once" in said
    (journal,) = (tmp_path / "journals").glob("*.jsonl")
    report = replay(journal)
    assert (report.verdict, report.torn) == ("identical", None)


def test_a_journal_that_cannot_follow_to_the_end_is_said_by_log_status_and_readers(tmp_path: Path) -> None:
    with serving(tmp_path, "--executor.simulated-step-ms", "1", module="tests.telemetry.slow_journal_server") as served:
        for _ in range(4):
            assert complete(served.url)["usage"]["completion_tokens"] == 20
        code, _, err = served.end()
    assert code == 1
    (told,) = re.findall(r"journal: (\d+) of (\d+) events are lost", err)
    assert 0 < int(told[0]) < int(told[1])
    (journal,) = (tmp_path / "journals").glob("*.jsonl")
    report = replay(journal)
    assert (report.verdict, report.torn) == ("identical", None), "what was written is whole"
    assert report.open_end is not None
    assert any("no clean end" in note for note in check(journal).notes)


def test_a_second_signal_ends_what_still_runs(tmp_path: Path) -> None:
    with serving(tmp_path, "--executor.simulated-step-ms", "4", "--server.drain-timeout-s", "3600") as served:
        load = Load(served.url, 6, 2000)

        async def wait() -> None:
            await asyncio.sleep(0.3)

        first, second = _send(served, signal.SIGTERM), _send(served, signal.SIGTERM)
        asyncio.run(load.run(lambda: load.until_tokens(60), first, wait, second))
        assert served.process.wait(DEADLINE_S) == 1
    assert load.finishes() == ["aborted"] * 6
    assert load.broken == 0
    (journal,) = (tmp_path / "journals").glob("*.jsonl")
    report = replay(journal)
    assert (report.verdict, report.torn) == ("identical", None), "the journal was closed in order"


def test_a_third_signal_does_not_wait_for_a_step_that_never_ends(tmp_path: Path) -> None:
    flags = ("--executor.simulated-step-ms", "3000000", "--journal", "none", "--server.drain-timeout-s", "3600")
    with serving(tmp_path, *flags) as served:
        load = Load(served.url, 1, 5)

        async def signals() -> None:
            while not await asyncio.to_thread(_is_waiting, served.url):  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.01)
            for _ in range(2):
                served.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.3)
            await asyncio.wait_for(load.first_end.wait(), DEADLINE_S)
            assert served.process.poll() is None, "it waits for the step"
            served.process.send_signal(signal.SIGTERM)

        asyncio.run(load.run(signals))
        assert served.process.wait(DEADLINE_S) == -signal.SIGTERM
    assert load.broken == 0, "the second signal had answered the client in order"


def test_an_engine_that_died_is_said_by_every_door_and_by_the_exit_status(tmp_path: Path) -> None:
    """The server breaks a law on purpose, and was told to stop at that."""
    flags = ("--on-violation", "raise", "--journal", "none")
    with serving(tmp_path, *flags, module="tests.telemetry.canary_server") as served:
        with httpx.Client(base_url=served.url, trust_env=False, timeout=DEADLINE_S) as client:
            ask = ASK | {"max_tokens": 2, "stream": False}
            assert client.post("/v1/completions", json=ask).status_code == 200
            end = time.monotonic() + DEADLINE_S
            while client.get("/health").status_code == 200:
                assert time.monotonic() < end
                time.sleep(0.02)
            assert client.get("/health").json()["status"] == "dead"
            refused = client.post("/v1/completions", json=ask)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
        assert served.end()[0] == 1


def test_a_journal_that_cannot_grow_costs_no_request(tmp_path: Path) -> None:
    """A limit on file sizes fails writes like a full disk does, at the same system call."""
    with serving(tmp_path, limits=("--fsize=65536",)) as served:
        for _ in range(30):
            assert complete(served.url)["usage"]["completion_tokens"] == 20
        deadline = time.monotonic() + DEADLINE_S
        failed = 0.0
        while not failed and time.monotonic() < deadline:
            complete(served.url)
            scrape = Scrape(httpx.get(f"{served.url}/metrics", trust_env=False).text)
            failed = scrape.total("telemetry_errors_total", component="journal")
        assert failed > 0
        assert scrape.total("telemetry_errors_total", component="metrics") == 0
        assert scrape.total("violations_total") == 0
        assert httpx.get(f"{served.url}/ready", trust_env=False).status_code == 200
        code, _, err = served.end()
    assert code == 0
    assert "journal failed while" in err
    assert err.count("journal failed while") < 10, "logged at a bounded rate"
    (journal,) = (tmp_path / "journals").glob("*.jsonl")
    assert 0 < journal.stat().st_size <= 64 * 1024
    reader = JournalReader(journal)
    assert len(list(reader.records())) > 10
    assert reader.torn is None, "whole lines only"


def test_room_for_all_connections_is_made_at_the_start_or_the_start_is_refused(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "telemetry.cli", "serve", "--server.port", "0", "--journal", "none"]
    done = subprocess.run(
        ["prlimit", "--nofile=300:300", *words], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "server.max_connections=1024 needs 1216 open files; this process may open 300" in done.stderr
    with serving(
        tmp_path, "--server.max-connections", "2000", "--journal", "none", limits=("--nofile=300:4096",)
    ) as served:
        limits = Path(f"/proc/{served.process.pid}/limits").read_text("ascii")
        (line,) = (line for line in limits.splitlines() if line.startswith("Max open files"))
        assert line.split()[3:5] == ["2192", "4096"]

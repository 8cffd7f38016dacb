"""A served run leaves a journal that replays to the identical hash, explains its requests, and holds no prompt."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.request import Cause
from telemetry.explain import explain
from telemetry.journal_reader import JournalReader, first_file
from telemetry.replay import replay
from telemetry.schema_events import RequestArrivedRecord, RequestTransitionedRecord

CANARY = "The canary called Zerbinetta sang at the Fugger house. "
STOP = "Papageno-was-here"
DEADLINE_S = 120


@contextmanager
def served(folder: Path, *flags: str) -> Iterator[str]:
    """A server of its own process, journal in `folder`; ended by SIGINT. Yields its URL."""
    log = folder / "server.log"
    command = [sys.executable, "-m", "telemetry.cli", "serve", "--server.port", "0", "--journal", str(folder), *flags]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield _ready_url(process, log)
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 0, log.read_text()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _ready_url(process: subprocess.Popen[bytes], log: Path) -> str:
    """Polls until the server says it is ready."""
    with httpx.Client(trust_env=False) as client:
        for _ in range(DEADLINE_S * 20):
            found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
            assert process.poll() is None, log.read_text()
            if found:
                try:
                    if client.get(f"{found[0]}/ready").status_code == httpx.codes.OK:
                        return found[0]
                except httpx.TransportError:
                    pass
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
    raise AssertionError(log.read_text())


async def _ask(client: httpx.AsyncClient, number: int, model: str) -> str | None:
    """One request; every fourth hangs up after its first piece. Returns the id of the answer."""
    body = {
        "model": model,
        "prompt": CANARY * (1 + number % 5) + f"Question {number}?",
        "max_tokens": 4 + number % 13,
        "stop": [STOP],
        "user": CANARY,
    }
    if number % 4:
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == httpx.codes.OK, reply.text
        return str(reply.json()["id"])
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True, "max_tokens": 200}) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                return str(json.loads(line.removeprefix("data: "))["id"])
    return None


async def _load(url: str, count: int) -> list[str]:
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        answers = await asyncio.gather(*(_ask(client, number, model) for number in range(count)))
    return [answer for answer in answers if answer is not None]


EXECUTORS: Any = [
    pytest.param(("--executor.kind", "simulated", "--executor.simulated-step-ms", "3"), 32, id="simulated"),
    pytest.param(("--executor.kind", "torch"), 8, id="model", marks=pytest.mark.model),
]


@pytest.mark.parametrize(("flags", "count"), EXECUTORS)
def test_a_served_run_replays_explains_and_leaks_nothing(tmp_path: Path, flags: tuple[str, ...], count: int) -> None:
    small = (
        "--cache.num-pages",
        "80",
        "--scheduler.chunked-prefill-size",
        "64",
        "--scheduler.max-running-requests",
        "6",
    )
    with served(tmp_path, *flags, *small) as url:
        answers = asyncio.run(_load(url, count))

    report = replay(tmp_path)
    assert (report.verdict, report.divergence) == ("identical", None)
    assert report.events > 100
    assert (report.torn, report.unchecked) == (None, 0)

    records = list(JournalReader(tmp_path).records())
    arrived = [record for record in records if isinstance(record, RequestArrivedRecord)]
    ended = {r.rid: r.cause for r in records if isinstance(r, RequestTransitionedRecord) and r.target == "finished"}
    assert len(arrived) == count
    assert set(ended) == {record.rid for record in arrived}, "every request has its one end"
    assert Cause.ABORT in ended.values()
    for answer in answers[:4]:
        story = explain(tmp_path, answer)
        assert story.life.end is not None
        assert story.life.chunks

    text = first_file(tmp_path).read_text(encoding="utf-8") + (tmp_path / "server.log").read_text(encoding="utf-8")
    for secret in ("canary", "Zerbinetta", "Fugger", "Papageno", "Question"):
        assert secret not in text
    # A prompt shared by two requests has equal keys within a run; another run salts them differently.
    assert all(abs(int(key)) > 1 << 32 for record in arrived for key in record.keys()[:3])

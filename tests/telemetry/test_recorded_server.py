"""A served run leaves a journal that replays to the identical hash, explains its requests, and holds no prompt."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.request import Cause
from telemetry.explain import explain
from telemetry.journal_reader import JournalReader, first_file
from telemetry.replay import replay
from telemetry.schema_events import RequestArrivedRecord, RequestTransitionedRecord
from tests.telemetry.served import CANARY, DEADLINE_S, served

STOP = "Papageno-was-here"


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

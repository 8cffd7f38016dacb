"""Runs of the real server. Owns: the configurations, the workload, and one recorded run of it over HTTP.

Every run is a fresh `admitscope serve` with SmolLM2 on this machine's processors, with the same requests at the same
moments. Nothing in it knows of the simulator.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from telemetry.demo.processes import Child
from telemetry.demo.stream_client import StreamRecord, failures, stream_request
from telemetry.journal_reader import runs_in
from telemetry.ports import free_port

#: The configuration that the other three change. Small sizes, since a step of this model on a processor is slow.
BASE: Final = {
    "scheduler.chunked_prefill_size": "128",
    "scheduler.max_running_requests": "8",
    "scheduler.schedule_policy": "lpm",
    "scheduler.enable_mixed_chunk": "true",
}
#: Chosen before anything was measured: one for each kind of setting that an operator turns, all within sizes that a run
#: of BASE measures.
CASES: Final = {
    "chunk 32": {"scheduler.chunked_prefill_size": "32"},
    "4 rows": {"scheduler.max_running_requests": "4"},
    "no mixed steps": {"scheduler.enable_mixed_chunk": "false"},
}
PAGE_SIZE: Final = 16
#: Of what the server can do, found by a closed loop: busy enough for a queue, not so busy that it grows for ever.
UTILISATION: Final = 0.75
_HOST: Final = "127.0.0.1"
_TOKENS: Final = (100, 47_999)
_SHARED: Final = 64
_READY_S: Final = 300.0
_SILENCE_S: Final = 600.0
_CALIBRATION: Final = 24
_CALIBRATION_CLIENTS: Final = 8


@dataclass(frozen=True, slots=True)
class Sent:
    """One request: token ids, tokens it must answer with, and when it is sent in units of the mean gap."""

    prompt: tuple[int, ...]
    output_tokens: int
    at: float


def workload(count: int, seed: int) -> list[Sent]:
    """Prompts of 32 to 224 tokens, every third beginning with the same 64; answers of 8 to 24; Poisson arrivals."""
    rng = random.Random(f"validity/{seed}")
    head = tuple(rng.randint(*_TOKENS) for _ in range(_SHARED))
    found, at = [], 0.0
    for number in range(count):
        own = tuple(rng.randint(*_TOKENS) for _ in range(rng.randint(32, 224)))
        prompt = (head + own)[:224] if number % 3 == 0 else own
        found.append(Sent(prompt, rng.randint(8, 24), at))
        at += rng.expovariate(1.0)
    return found


def serve_once(folder: Path, settings: dict[str, str], requests: Sequence[Sent], rate: float, threads: int) -> Path:
    """A fresh server, the workload at `rate` requests a second, and the journal that is left. Raises RuntimeError."""
    with _Server(folder, settings, threads) as server:
        records = asyncio.run(_open_loop(server.url, requests, rate))
    bad = failures(records)
    if bad:
        raise RuntimeError(f"{len(bad)} of {len(records)} requests failed: {bad[0]}")
    return newest(folder)


def newest(folder: Path) -> Path:
    """The journal of the last run there."""
    return folder / runs_in(folder)[-1]


def capacity(folder: Path, requests: Sequence[Sent], threads: int) -> float:
    """Requests a second that BASE answers with eight clients that never rest."""
    some = requests[:_CALIBRATION]
    with _Server(folder, {}, threads) as server:
        began = time.monotonic()
        asyncio.run(_closed_loop(server.url, some))
        return len(some) / (time.monotonic() - began)


class _Server:
    """`admitscope serve` in a child, warm when entered."""

    def __init__(self, folder: Path, settings: dict[str, str], threads: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port(_HOST, 0)
        self.url = f"http://{_HOST}:{port}"
        words = ["serve", "--server.port", str(port), "--journal", str(folder), "--executor.threads", str(threads)]
        words += ["--cache.page-size", str(PAGE_SIZE)]
        for name, value in (BASE | settings).items():
            flag = name.replace("_", "-")
            words += {"true": [f"--{flag}"], "false": [f"--no-{flag}"]}.get(value, [f"--{flag}", value])
        environment = {"OMP_NUM_THREADS": str(threads)}
        self._child = Child("server", "telemetry.cli", words, log=folder / "server.log", environment=environment)

    def __enter__(self) -> _Server:
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            if self._child.status() is not None:
                raise RuntimeError(f"the server ended with status {self._child.status()}:\n{self._child.tail()}")
            try:
                if httpx.get(f"{self.url}/ready", timeout=2.0, trust_env=False).status_code == httpx.codes.OK:
                    return self
            except httpx.TransportError:
                pass  # nobody listens yet
            time.sleep(0.2)
        raise RuntimeError(f"{self.url}/ready did not answer 200 within {_READY_S:.0f} s")

    def __exit__(self, *_: object) -> None:
        self._child.stop(60.0)


async def _open_loop(url: str, requests: Sequence[Sent], rate: float) -> list[StreamRecord]:
    async with _client(url) as client:
        model = await _model(client)

        async def one(sent: Sent) -> StreamRecord:
            await asyncio.sleep(sent.at / rate)
            return await stream_request(client, "/v1/completions", _body(sent, model))

        return await asyncio.gather(*map(one, requests))


async def _closed_loop(url: str, requests: Sequence[Sent]) -> None:
    waiting = list(requests)
    async with _client(url) as client:
        model = await _model(client)

        async def work() -> None:
            while waiting:
                await stream_request(client, "/v1/completions", _body(waiting.pop(0), model))

        await asyncio.gather(*(work() for _ in range(_CALIBRATION_CLIENTS)))


def _client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(_SILENCE_S), limits=limits, trust_env=False)


async def _model(client: httpx.AsyncClient) -> str:
    return str((await client.get("/v1/models")).json()["data"][0]["id"])


def _body(sent: Sent, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(sent.prompt),
        "max_tokens": sent.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }

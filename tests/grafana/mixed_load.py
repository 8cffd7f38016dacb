"""A load that meets every limit. Owns: what is asked of one engine, and what its clients were told.

Shared prefixes, long and short prompts, priorities, clients that hang up, calls that are refused for each cause, and a
burst that the queue cannot hold.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

CLIENTS: Final = 10
BURST: Final = 40
DEADLINE_S: Final = 120.0
#: Small on purpose: 48 pages of 16 tokens, six rows, a queue of twelve.
FLAGS: Final = (
    *("--executor.simulated-step-ms", "4", "--model.max-context-tokens", "1024"),
    *("--cache.num-pages", "48", "--cache.page-size", "16"),
    *("--scheduler.chunked-prefill-size", "64", "--scheduler.max-prefill-tokens", "128"),
    *("--scheduler.max-running-requests", "6", "--scheduler.schedule-conservativeness", "0.05"),
    *("--server.max-queued-requests", "12"),
)
#: Bodies that are refused, by the cause that must be counted, and what the client is told.
REFUSED: Final[dict[tuple[str, str], dict[str, Any]]] = {
    ("invalid", "invalid_value"): {"prompt": [50] * 10, "max_tokens": 4, "temperature": -1},
    ("too_long", "context_length_exceeded"): {"prompt": [50] * 1100, "max_tokens": 4},
    ("never_fits", "never_fits"): {"prompt": [50] * 900, "max_tokens": 4},
}


@dataclass
class Told:
    """What the clients of one engine saw. `finishes` counts complete answers, `refusals` the codes of errors."""

    asked: int = 0
    finishes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    hung_up: int = 0


class MixedLoad:
    """The load on one engine, drawn from `seed`."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._random = random.Random(seed)
        self._shared = [[self._random.randrange(40, 500) for _ in range(96)] for _ in range(4)]
        self.told = Told()

    def _body(self) -> dict[str, Any]:
        rng = self._random
        head = rng.choice(self._shared)[: rng.choice((0, 48, 96))]
        tail = rng.choice((8, 30, 120, 300))
        return {
            "prompt": head + [rng.randrange(40, 500) for _ in range(tail)],
            "max_tokens": rng.choice((1, 4, 30, 90)),
            "ignore_eos": rng.random() < 0.5,
            "priority": rng.choice((0, 0, 0, 20)),
        }

    async def _one(self, client: httpx.AsyncClient, body: dict[str, Any], *, leave: bool = False) -> None:
        told = self.told
        told.asked += 1
        body = {"model": "simulated", "stream": True, **body}
        # Every call is part of a trace that its caller keeps.
        trace, span = self._random.getrandbits(128), self._random.getrandbits(64)
        headers = {"traceparent": f"00-{trace:032x}-{span:016x}-01"}
        async with client.stream("POST", f"{self._url}/v1/completions", json=body, headers=headers) as stream:
            if stream.status_code != httpx.codes.OK:
                await stream.aread()
                told.refusals[stream.json()["error"]["code"]] += 1
                return
            async for line in stream.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if leave:
                    told.hung_up += 1
                    return
                told.finishes[event["choices"][0]["finish_reason"] or ""] += 1

    async def _client(self, client: httpx.AsyncClient, end_s: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < end_s:
            leave = self._random.random() < 0.08
            body = self._body()
            await self._one(client, body | ({"max_tokens": 200, "min_tokens": 200} if leave else {}), leave=leave)
            await asyncio.sleep(0.02)

    async def _pressure(self, client: httpx.AsyncClient) -> None:
        """Twice what the pool can hold, admitted because little is promised; then somebody more important."""
        long = {"max_tokens": 150, "min_tokens": 150, "priority": 0}
        bodies = [long | {"prompt": [100 + number] * 60} for number in range(8)]
        crowd = [asyncio.create_task(self._one(client, body)) for body in bodies]
        async with asyncio.timeout(DEADLINE_S):
            while self.told.finishes.total() < 60:  # noqa: ASYNC110 - tokens come over the network
                await asyncio.sleep(0.005)
        urgent = [self._one(client, long | {"prompt": [70] * 90, "priority": 50}) for _ in range(2)]
        await asyncio.gather(*crowd, *urgent)

    async def run(self, seconds: float) -> None:
        """All of it, and the answers of all that was accepted."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False, limits=limits) as client:
            await self._pressure(client)
            end_s = asyncio.get_running_loop().time() + seconds
            clients = [asyncio.create_task(self._client(client, end_s)) for _ in range(CLIENTS)]
            for body in REFUSED.values():
                for _ in range(3):
                    await self._one(client, body)
                    await asyncio.sleep(0.3)
            await asyncio.sleep(max(seconds / 2 - 3, 0))
            # Long enough that none of those who find room is done before all have knocked.
            long = {"prompt": [60] * 20, "max_tokens": 100, "min_tokens": 100}
            burst = [self._one(client, long) for _ in range(BURST)]
            await asyncio.gather(*burst, *clients)

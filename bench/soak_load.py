"""Requests of a soak. Owns: one request of each kind, and the ways in which a client leaves.

Everything is drawn from one seed, so that a run can be repeated. A client that leaves closes its connection: in the
middle of its upload, before the answer, in the middle of a stream, or after the end that it did not read to the end.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import httpx

_TIMEOUT_S: Final = 120.0
_SHARED: Final = "The same beginning is found in the cache by whoever comes later. " * 3


class Leave(StrEnum):
    """When a client goes; STAYS reads everything."""

    STAYS = "stays"
    UPLOAD = "in its upload"
    BEFORE = "before the answer"
    STREAM = "in the stream"
    AFTER = "after the end"


LEAVING: Final = (Leave.UPLOAD, Leave.BEFORE, Leave.STREAM, Leave.AFTER)


class _Left(Exception):
    """Raised in an upload to cut it."""


@dataclass(slots=True)
class Outcome:
    """What became of the requests: counts by (leave, ending)."""

    endings: Counter[tuple[Leave, str]] = field(default_factory=Counter)

    def total(self, leave: Leave | None = None, ending: str | None = None) -> int:
        """Requests of that kind; None counts every kind."""
        return sum(
            count for (left, ended), count in self.endings.items() if leave in (None, left) and ending in (None, ended)
        )

    @property
    def faults(self) -> dict[str, int]:
        """Endings of patient clients that are neither an answer nor a documented refusal."""
        return {
            ended: count
            for (left, ended), count in self.endings.items()
            if left is Leave.STAYS and ended not in ("answered", "429")
        }


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to come."""

    leave: Leave
    path: str
    body: dict[str, Any]
    patience_s: float
    events: int


def plan(index: int, seed: int, leaving_share: float, model: str) -> Ask:
    """The `index`-th request of a soak."""
    dice = random.Random(f"{seed}:{index}")
    leave = dice.choice(LEAVING) if dice.random() < leaving_share else Leave.STAYS
    stream = {Leave.STREAM: True, Leave.AFTER: True}.get(leave, dice.random() < 0.5)
    text = "".join(dice.choices("abcdefgh ", k=dice.randrange(1, 120)))
    text = (_SHARED if dice.random() < 0.4 else "") + text
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": dice.randrange(1, 24),
        "stream": stream,
        "temperature": dice.choice([0, 0.8]),
        "seed": dice.randrange(1000),
    }
    is_chat = dice.random() < 0.3
    if is_chat:
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = [text, text[::-1]] if dice.random() < 0.1 else text
    if dice.random() < 0.1:
        body["n"] = 2
    if leave is not Leave.STAYS:
        body |= {"max_tokens": 24 if leave is Leave.AFTER else 200, "ignore_eos": True}
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    return Ask(leave, path, body, patience_s=dice.random() * 0.05, events=dice.randrange(1, 6))


async def send(client: httpx.AsyncClient, ask: Ask) -> str:
    """Send one request and behave as planned. Returns `answered`, `left`, a status, or what went wrong."""
    try:
        match ask.leave:
            case Leave.UPLOAD:
                await client.post(ask.path, content=_cut_upload(ask.body), headers={"content-type": "application/json"})
            case Leave.BEFORE:
                async with asyncio.timeout(ask.patience_s):
                    await client.post(ask.path, json=ask.body)
            case Leave.STREAM | Leave.AFTER:
                return await _leave_stream(client, ask)
            case Leave.STAYS:
                return await _read_all(client, ask)
    except (_Left, TimeoutError):
        return "left"
    except httpx.HTTPError as error:
        return type(error).__name__
    return "answered"


async def _cut_upload(body: dict[str, Any]) -> AsyncIterator[bytes]:
    data = json.dumps(body).encode()
    yield data[: len(data) // 2]
    await asyncio.sleep(0)
    raise _Left


async def _leave_stream(client: httpx.AsyncClient, ask: Ask) -> str:
    async with client.stream("POST", ask.path, json=ask.body) as response:
        if response.status_code != httpx.codes.OK:
            await response.aread()
            return str(response.status_code)
        seen = 0
        async for line in response.aiter_lines():
            seen += line.startswith("data: {")
            is_over = '"finish_reason":"' in line
            if is_over if ask.leave is Leave.AFTER else seen >= ask.events:
                return "left"
    return "answered"


async def _read_all(client: httpx.AsyncClient, ask: Ask) -> str:
    choices = ask.body.get("n", 1) * (len(ask.body["prompt"]) if isinstance(ask.body.get("prompt"), list) else 1)
    if not ask.body["stream"]:
        response = await client.post(ask.path, json=ask.body)
        if response.status_code != httpx.codes.OK:
            return str(response.status_code)
        ended = sum(choice["finish_reason"] in ("stop", "length") for choice in response.json()["choices"])
        return "answered" if ended == choices else "incomplete"
    async with client.stream("POST", ask.path, json=ask.body) as response:
        if response.status_code != httpx.codes.OK:
            await response.aread()
            return str(response.status_code)
        lines = [line async for line in response.aiter_lines() if line]
    ended = sum('"finish_reason":"' in line for line in lines)
    return "answered" if ended == choices and lines[-1] == "data: [DONE]" else "incomplete"


def client_for(url: str, connections: int) -> httpx.AsyncClient:
    """A client with that many connections."""
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False, limits=limits)

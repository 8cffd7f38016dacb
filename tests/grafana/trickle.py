"""Endless load on many engines. Owns: clients that ask again and again until told to stop, whatever happens to them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import httpx

PAUSE_S: Final = 0.1


class Trickle(NamedTuple):
    """`clients` at a time against one engine, each with prompts of its own. `requests` in all; None: no end."""

    url: str
    clients: int = 1
    prompt_tokens: int = 50
    max_tokens: int = 20
    requests: int | None = None


async def _client(trickle: Trickle, seed: int, client: httpx.AsyncClient) -> None:
    rng = random.Random(seed)
    made = 0
    while trickle.requests is None or made < trickle.requests:
        made += 1
        body = {
            "model": "simulated",
            "prompt": [rng.randrange(40, 500) for _ in range(trickle.prompt_tokens)],
            "max_tokens": trickle.max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            async with client.stream("POST", f"{trickle.url}/v1/completions", json=body) as stream:
                async for _ in stream.aiter_lines():
                    pass
        except httpx.TransportError:
            pass  # the engine is meant to fail
        await asyncio.sleep(PAUSE_S)


async def _all(trickles: Sequence[Trickle], stop: asyncio.Event) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        tasks = [
            asyncio.create_task(_client(trickle, 1000 * number + each, client))
            for number, trickle in enumerate(trickles)
            for each in range(trickle.clients)
        ]
        await stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def trickling(trickles: Sequence[Trickle]) -> Iterator[None]:
    """Load while entered, on a thread of its own."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            loop.run_until_complete(_all(trickles, stop))
        except BaseException as error:  # told on the main thread below
            failed.append(error)
        finally:
            loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
            thread.join(30)
    assert not failed, failed

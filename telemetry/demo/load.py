"""The load generator: `python -m telemetry.demo.load`. Owns: arrivals, sending, and a line of JSON per fact.

Runs in a process of its own, so that its clock readings are those of a user and not of the server's event loop.
Rows of the trace are sent in order: first a burst, which shows how fast this machine answers and fills the queue, then
a Poisson process whose mean is a share of that, in waves, so that the queue grows and empties where one can see it.

Lines on standard output, one JSON object each, `kind` first: `rate`, `done` (one per request), `end`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from telemetry.demo.questions import ChatQuestion, question_of
from telemetry.demo.stream_client import StreamRecord, stream_request
from telemetry.demo.trace import load_rows

BURST: Final = 10
#: Mean arrival rate, as a share of the burst's speed. The burst finds an empty cache; later requests hit it, and are
#: answered faster than this.
UTILISATION: Final = 0.85
WAVE_S: Final = 20.0
WAVE_DEPTH: Final = 0.6
#: Requests under way at once beyond which arrivals wait: a machine that slows down is not buried.
MAX_OUTSTANDING: Final = 32
_TICK_S: Final = 0.1
#: Length of an answer that reads well in a summary.
_SHOWN_CHARS: Final = 110


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to send. `rate` None: measure. `duration_s` 0: until told to stop."""

    model: str
    duration_s: float
    rate: float | None
    seed: int


class LoadGenerator:
    """Sends questions until its time is over or `stop` is called, then waits for every answer.

    emit  called with each line, as a dict
    """

    def __init__(self, client: httpx.AsyncClient, plan: LoadPlan, emit: Callable[[dict[str, Any]], None]) -> None:
        self._client = client
        self._plan = plan
        self._emit = emit
        self._rows = load_rows()
        self._rng = random.Random(f"arrivals/{plan.seed}")  # noqa: S311 - a load, not a secret
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_sent = 0
        self._num_cut = 0
        self._sample: tuple[ChatQuestion, str] | None = None
        self._sample_rank = (-1, 0)

    def stop(self, *, cut: bool = False) -> None:
        """No further arrivals. `cut`: drop the answers under way as well; their connections close."""
        self._stopping.set()
        if cut:
            for task in self._tasks:
                task.cancel()

    async def run(self) -> None:
        """The whole load: burst, waves, drain, `end`."""
        started_s = time.monotonic()
        deadline_s = started_s + self._plan.duration_s if self._plan.duration_s else math.inf
        rate = self._plan.rate
        burst = [self._send() for _ in range(BURST)]
        if rate is None:
            await asyncio.wait(burst)
            rate = UTILISATION * BURST / (time.monotonic() - started_s)
        self._emit({"kind": "rate", "per_second": round(rate, 3)})
        await self._arrivals(rate, time.monotonic(), deadline_s)
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._emit({"kind": "end", "sent": self._num_sent, "cut": self._num_cut, "sample": self._sample_line()})

    async def _arrivals(self, rate: float, since_s: float, deadline_s: float) -> None:
        """A Poisson process of mean `rate` whose intensity swings with the wave, by thinning a faster one."""
        fastest = rate * (1 + WAVE_DEPTH)
        while not self._stopping.is_set():
            next_s = time.monotonic() + self._rng.expovariate(fastest)
            if not await self._sleep_until(min(next_s, deadline_s)) or next_s >= deadline_s:
                return
            wave = 1 + WAVE_DEPTH * math.sin(2 * math.pi * (time.monotonic() - since_s) / WAVE_S)
            if self._rng.random() * fastest > rate * wave:
                continue
            while len(self._tasks) >= MAX_OUTSTANDING and not self._stopping.is_set():
                await self._sleep_until(time.monotonic() + _TICK_S)
            if not self._stopping.is_set() and time.monotonic() < deadline_s:
                self._send()

    async def _sleep_until(self, when_s: float) -> bool:
        """False when told to stop before `when_s`."""
        try:
            async with asyncio.timeout(max(when_s - time.monotonic(), 0)):
                await self._stopping.wait()
        except TimeoutError:
            return True
        return False

    def _send(self) -> asyncio.Task[None]:
        number = self._num_sent
        self._num_sent += 1
        question = question_of(self._rows[number % len(self._rows)], number, self._plan.seed)
        task = asyncio.create_task(self._ask(number, question))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _ask(self, number: int, question: ChatQuestion) -> None:
        body = {
            "model": self._plan.model,
            "messages": question.messages(),
            "max_tokens": question.max_tokens,
            "temperature": 0,
        }
        try:
            record = await stream_request(self._client, "/v1/chat/completions", body)
        except asyncio.CancelledError:
            # Ctrl-C: ended by us, so it counts as cut and not as failed. Nothing is left to await in this task.
            self._num_cut += 1
            return
        self._consider_sample(question, record)
        self._emit(_done_line(number, record))

    def _consider_sample(self, question: ChatQuestion, record: StreamRecord) -> None:
        """Keep the answer that shows best: one that ended by itself, then the one nearest to two short sentences."""
        answer = "".join(record.text).strip()
        rank = (int(record.finish_reason == "stop"), -abs(len(answer) - _SHOWN_CHARS))
        if record.error is None and answer and rank > self._sample_rank:
            self._sample, self._sample_rank = (question, answer), rank

    def _sample_line(self) -> dict[str, str] | None:
        if self._sample is None:
            return None
        question, answer = self._sample
        return {"passage": question.passage, "question": question.question, "answer": answer}


def _done_line(number: int, record: StreamRecord) -> dict[str, Any]:
    ttft_ns = record.ttft_ns
    return {
        "kind": "done",
        "number": number,
        "id": record.response_id,
        "error": record.error,
        "finish": record.finish_reason,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "ttft_s": None if ttft_ns is None else ttft_ns / 1e9,
        "gaps_s": [gap / 1e9 for gap in record.gaps_ns()],
    }


def _print_line(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


async def _main(base_url: str, plan: LoadPlan) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(300.0, connect=10.0)
    async with httpx.AsyncClient(base_url=base_url, limits=limits, timeout=timeout, trust_env=False) as client:
        generator = LoadGenerator(client, plan, _print_line)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, lambda: generator.stop(cut=True))
        loop.add_signal_handler(signal.SIGTERM, lambda: generator.stop(cut=True))
        await generator.run()


def main(argv: Sequence[str] | None = None) -> None:
    """Entry of the module."""
    parser = argparse.ArgumentParser(prog="telemetry.demo.load", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--duration", type=float, default=0.0, help="seconds; 0: until SIGINT")
    parser.add_argument("--rate", type=float, help="requests per second; default: measured")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    plan = LoadPlan(options.model, options.duration, options.rate, options.seed)
    asyncio.run(_main(options.base_url, plan))


if __name__ == "__main__":
    main()

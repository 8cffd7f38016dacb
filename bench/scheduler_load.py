"""The load of the scheduler bench. Owns: prompts, listeners, and a scheduler driven step by step without a model.

Time is CPU time of the one thread that does the work, so a busy machine does not count as a slow scheduler; on an idle
machine it is wall time. Listeners are called on that thread: a record of every event is encoded to its journal line
there (a server does it on a thread of its own), metrics are counted, and the checker runs its laws at every event.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import numpy as np

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.events import SCHEMA_VERSION, AnyEvent, EngineStarted, EventSink, FanOut, NullSink
from engine.kvcache.page_keys import Keys
from engine.request import FinishReason
from engine.scheduler.plan import OutcomeRow, StepOutcome, StepPlan, StepTimes
from engine.scheduler.scheduler import Arrival, Scheduler
from invariants.checker import InvariantChecker
from telemetry.metrics import MetricsSink

PREFIXES = 8
PREFIX_TOKENS = 512
PROMPT_TOKENS = 1024
FILLER_TOKENS = 64
STEP_NS = 1_000_000


class Encoded:
    """Encodes every event to its line and drops it."""

    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder()
        self.records = self.bytes = 0

    def emit(self, event: AnyEvent) -> None:
        self.records += 1
        self.bytes += len(self._encoder.encode(event))


class Watch(msgspec.Struct, frozen=True):
    """Which listeners run: records with metrics, the checker."""

    records: bool = True
    checker: bool = True

    def sink(self) -> EventSink:
        sinks: list[EventSink] = []
        if self.checker:
            sinks.append(InvariantChecker(on_violation="raise"))
        if self.records:
            sinks += [Encoded(), MetricsSink(clock=VirtualClock())]
        return FanOut(tuple(sinks)) if sinks else NullSink()


ALL = Watch()
NONE = Watch(records=False, checker=False)


class Prompts:
    """Page keys of made-up prompts, the same in every run. Keys are drawn, not hashed: hashing is intake's business.

    As with hashed ones, no key occurs after two different beginnings.
    """

    def __init__(self, page_size: int, *, shared_tokens: int = PREFIX_TOKENS) -> None:
        self.page_size = page_size
        self._rng = np.random.default_rng(7)
        self._prefixes = [self.fresh(shared_tokens) for _ in range(PREFIXES)]
        self._drawn = 0

    def fresh(self, tokens: int) -> Keys:
        """Keys that nothing else has."""
        return self._rng.integers(-(1 << 62), 1 << 62, tokens // self.page_size, dtype=np.int64)

    def prefix(self, number: int) -> Keys:
        return self._prefixes[number % PREFIXES]

    def prompt(self, number: int, tokens: int = PROMPT_TOKENS) -> Keys:
        """One of the shared prefixes and a tail of its own."""
        prefix = self.prefix(number)
        return np.concatenate([prefix, self.fresh(tokens - len(prefix) * self.page_size)])


def cpu_ns() -> int:
    return time.thread_time_ns()


class Rig:
    """A scheduler whose batches answer at once: `add`, then `step` or its parts."""

    def __init__(
        self, *, policy: str, page_size: int, num_pages: int, watch: Watch, rows: int = 64, **scheduler: object
    ) -> None:
        self.config = EngineConfig.model_validate(
            {
                "scheduler": {
                    "schedule_policy": policy,
                    "max_running_requests": rows,
                    "enable_mixed_chunk": False,
                    **scheduler,
                },
                "cache": {"page_size": page_size, "num_pages": num_pages},
                "executor": {"kind": "simulated"},
            }
        )
        self.scheduler = Scheduler(self.config, num_pages=num_pages, sink=watch.sink(), chained_keys=True)
        self.now_ns = 0
        publisher = self.scheduler.publisher
        described = (self.config.model_dump_json(), "made-up", "none", page_size, num_pages, rows, 0, "bench")
        publisher.emit(EngineStarted(*publisher.head(), SCHEMA_VERSION, "bench", *described))

    def add(self, rid: str, keys: Keys, *, max_new_tokens: int = 1) -> None:
        self.scheduler.add(self.arrival(rid, keys, max_new_tokens=max_new_tokens), self.now_ns)

    def arrival(self, rid: str, keys: Keys, *, max_new_tokens: int = 1) -> Arrival:
        """The head key is the first page's: good enough, since every prefix here is longer than 32 tokens."""
        return Arrival(
            rid=rid,
            prompt_len=len(keys) * self.config.cache.page_size,
            max_new_tokens=max_new_tokens,
            page_keys=keys.astype("<i8").tobytes(),
            head32_key=int(keys[0]),
        )

    def order_and_plan(self) -> StepPlan:
        """The touch phase and the pure plan."""
        self.now_ns += STEP_NS
        self.scheduler.prepare(self.now_ns)
        return self.scheduler.plan(self.now_ns)

    def settle(self, plan: StepPlan) -> None:
        """Commit, one token for each sampling row, apply."""
        plan = self.scheduler.commit(plan)
        times = StepTimes(*[self.now_ns] * 7)
        self.scheduler.apply(plan, StepOutcome(plan.step, tuple(self._rows(plan)), times))
        self.scheduler.complete(times)

    def evict(self, pages: int) -> None:
        """Evict at least `pages` pages, as part of the step that is being prepared."""
        state, kv = self.scheduler.state, self.scheduler.kv
        state.evicted_in_step += kv.evict_until_free(kv.free_pages + pages)

    def step(self, *, evict_pages: int = 0) -> StepPlan:
        """A whole step; `evict_pages` go after the ordering, so that the next ordering finds out."""
        self.now_ns += STEP_NS
        self.scheduler.prepare(self.now_ns)
        if evict_pages:
            self.evict(evict_pages)
        plan = self.scheduler.plan(self.now_ns)
        self.settle(plan)
        return plan

    def run(self) -> None:
        while self.scheduler.state.requests:
            self.step()

    def _rows(self, plan: StepPlan) -> Iterator[OutcomeRow]:
        size = self.config.cache.page_size
        for rid in plan.sampling:
            request = self.scheduler.state.requests[rid]
            fills = (request.seq_len + 1) % size == 0
            ends = request.output_len + 1 >= request.max_new_tokens
            yield OutcomeRow(
                rid,
                new_page_key=request.seq_len if fills else None,
                finish=FinishReason.LENGTH if ends else None,
            )

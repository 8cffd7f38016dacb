"""Builders for tests. Owns: the real scheduler and cache driven step by step, with made-up tokens and no executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

import msgspec

from engine.config import EngineConfig
from engine.events import SCHEMA_VERSION, AnyEvent, EngineStarted, EventSink
from engine.kvcache.page_keys import PageKeyer
from engine.kvcache.snapshot import SchedulerSnapshot
from engine.request import FinishReason, Request
from engine.scheduler.flight import Flight
from engine.scheduler.plan import OutcomeRow, StepKind, StepOutcome, StepPlan, StepTimes
from engine.scheduler.scheduler import Arrival, Scheduler

#: Output token that ends a request which does not ignore it.
END_TOKEN = 0
STEP_NS = 1_000_000


def engine_config(
    *,
    num_pages: int = 64,
    page_size: int = 16,
    enable_radix: bool = True,
    overlap: bool = False,
    **scheduler: object,
) -> EngineConfig:
    """A small configuration; keywords are those of SchedulerConfig."""
    return EngineConfig.model_validate(
        {
            "scheduler": {"schedule_policy": "fcfs", "max_running_requests": 32, **scheduler},
            "cache": {"page_size": page_size, "num_pages": num_pages, "enable_radix": enable_radix},
            "executor": {"kind": "simulated", "overlap": overlap},
        }
    )


def made_up_token(rid: str, index: int, vocabulary: int) -> int:
    """Output token `index` of a request: a hash, the same in every run and every batch."""
    return crc32(f"{rid}/{index}".encode()) % vocabulary


class CoreRun:
    """A scheduler with tokens beside it: `add`, `abort`, `step`. `after_step` sees a snapshot after each step.

    end_token   whether made-up outputs may be END_TOKEN, which ends a request early
    """

    def __init__(
        self,
        config: EngineConfig,
        sink: EventSink,
        *,
        end_token: bool = False,
        after_step: Callable[[SchedulerSnapshot], None] | None = None,
    ) -> None:
        num_pages = config.cache.num_pages
        assert num_pages is not None
        self.config = config
        self.scheduler = Scheduler(config, num_pages=num_pages, sink=sink)
        self._keyer = PageKeyer(config.cache.page_size, b"")
        self._tokens: dict[str, list[int]] = {}
        self._chains: dict[str, bytes] = {}
        self._end_token = end_token
        self._after_step = after_step
        self._order_from = 0
        self.now_ns = 0
        self.steps = 0
        self._may_lag = int(config.executor.overlap)
        #: When the steps that lag were planned.
        self._planned_ns: dict[int, int] = {}
        publisher = self.scheduler.publisher
        publisher.emit(
            EngineStarted(
                *publisher.head(),
                SCHEMA_VERSION,
                "test",
                config.model_dump_json(),
                "made-up",
                "none",
                config.cache.page_size,
                num_pages,
                config.scheduler.max_running_requests,
                0,
                "test",
            )
        )

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.state.requests or self.scheduler.state.flights)

    def add(
        self,
        rid: str,
        prompt: Sequence[int] | int,
        max_new_tokens: int = 4,
        *,
        ignore_eos: bool = False,
        priority: int | None = None,
    ) -> Request:
        """Queue a request. A number stands for that many tokens which no other request has."""
        if isinstance(prompt, int):
            start = crc32(rid.encode()) << 20
            prompt = range(start, start + prompt)
        tokens = list(prompt)
        keys, chain = self._keyer.of(tokens)
        request = self.scheduler.add(
            Arrival(
                rid=rid,
                prompt_len=len(tokens),
                max_new_tokens=max_new_tokens,
                page_keys=keys.astype("<i8").tobytes(),
                head32_key=self._keyer.head32(tokens),
                ignore_eos=ignore_eos,
                priority=priority,
            ),
            self.now_ns,
        )
        self._tokens[rid], self._chains[rid] = tokens, chain
        return request

    def abort(self, rid: str) -> bool | None:
        return self.scheduler.abort(rid, self.now_ns)

    def step(self, *, fail: bool = False) -> StepPlan:
        """One step; `fail`: the executor raised. With overlap: the next plan, then the outcome of the one before."""
        flights = self.scheduler.state.flights
        self.now_ns += STEP_NS
        self.steps += 1
        self.scheduler.prepare(self.now_ns)
        plan = self.scheduler.commit(self.scheduler.plan(self.now_ns))
        planned_ns = self.now_ns
        self.now_ns += STEP_NS
        while flights and (flights[0].plan is not plan or plan.kind is StepKind.IDLE or len(flights) > self._may_lag):
            self._apply(flights[0], fail=fail)
        self._planned_ns[plan.step] = planned_ns
        if self._after_step is not None:
            snapshot = self.scheduler.snapshot(order_from=self._order_from)
            self._order_from = snapshot.order.next_start if snapshot.order is not None else 0
            self._after_step(snapshot)
        return plan

    def _apply(self, flight: Flight, *, fail: bool) -> None:
        plan = flight.plan
        begun_ns = self._planned_ns.pop(plan.step, self.now_ns)
        times = StepTimes(*[begun_ns] * 5, self.now_ns, self.now_ns)
        rows = () if fail else tuple(self._row(rid) for rid in flight.wanted(plan.sampling))
        self.scheduler.apply(plan, StepOutcome(plan.step, rows, times, fail and plan.kind is not StepKind.IDLE))
        self.scheduler.complete(times)

    def run(self, max_steps: int = 10_000) -> int:
        """Step until nobody is left; returns the steps taken. Fails the test when that takes too many."""
        for count in range(max_steps):
            if not self.has_work:
                return count
            self.step()
        raise AssertionError(f"unfinished after {max_steps} steps: {sorted(self.scheduler.state.requests)[:8]}")

    def _row(self, rid: str) -> OutcomeRow:
        request, tokens, size = self.scheduler.state.requests[rid], self._tokens[rid], self.config.cache.page_size
        told = request.output_len - request.ahead_outputs
        token = made_up_token(rid, told, 12)
        tokens.append(token if self._end_token else token + 1)
        key = None
        if len(tokens) % size == 0:
            key, self._chains[rid] = self._keyer.next(self._chains[rid], tokens[-size:])
        finish = None
        if told + 1 >= request.max_new_tokens:
            finish = FinishReason.LENGTH
        elif tokens[-1] == END_TOKEN and not request.ignore_eos:
            finish = FinishReason.STOP
        return OutcomeRow(rid, key, self._keyer.head32(tokens) if len(tokens) == 32 else None, finish)


class Tap:
    """A sink that may change, drop or repeat events on their way: `edit` returns what goes on instead of each.

    renumber   close the gaps in `seq` that the edits leave, so that only the edit itself is wrong
    """

    def __init__(
        self, sink: EventSink, edit: Callable[[AnyEvent], Sequence[AnyEvent]], *, renumber: bool = True
    ) -> None:
        self._sink = sink
        self._edit = edit
        self._renumber = renumber
        self._seq = 0

    def emit(self, event: AnyEvent) -> None:
        for out in self._edit(event):
            gap = self._renumber and out.seq != self._seq
            self._sink.emit(msgspec.structs.replace(out, seq=self._seq) if gap else out)
            self._seq += 1

"""The real scheduler under a clock that moves as told. Owns: timed steps, random schedules, reports of responses."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.events import EventSink, FanOut, RecordingSink, ResponseSent
from engine.scheduler.plan import StepOutcome, StepPlan, StepTimes
from tests.builders import CoreRun, engine_config

MS = 1_000_000


class TimedRun(CoreRun):
    """CoreRun whose steps take the times they are given. `events` records all; `sinks` listen live."""

    def __init__(self, config: EngineConfig, *sinks: EventSink) -> None:
        self.recorded = RecordingSink()
        super().__init__(config, FanOut((self.recorded, *sinks)))
        self._sinks = sinks

    def timed_step(self, cuts: Sequence[int] = (0, 0, 0, 0, 0, MS, 0)) -> StepPlan:
        """One step. `cuts`: wait before it, then drain, plan, commit, prepare, forward, apply, in nanoseconds."""
        times, now = [], self.now_ns
        for cut in cuts:
            now += cut
            times.append(now)
        self.steps += 1
        self.scheduler.prepare(times[1])
        plan = self.scheduler.commit(self.scheduler.plan(times[1]))
        rows = tuple(self._row(rid) for rid in plan.sampling)
        self.now_ns = now
        self.scheduler.apply(plan, StepOutcome(plan.step, rows, StepTimes(*times)))
        self.scheduler.complete(StepTimes(*times))
        return plan

    def finish_all(self, cuts: Sequence[int] = (0, 0, 0, 0, 0, MS, 0)) -> None:
        for _ in range(10_000):
            if not self.has_work:
                return
            self.timed_step(cuts)
        raise AssertionError("unfinished after 10,000 steps")

    def respond(self, rid: str, first_byte_ns: int | None, *, disconnected: bool = False) -> None:
        """What the front end reports when a response is over."""
        publisher = self.scheduler.publisher
        publisher.t_ns = self.now_ns
        publisher.emit(
            ResponseSent(*publisher.head(), rid, first_byte_ns, first_byte_ns, 100, 1000, disconnected),
        )


configs = st.builds(
    lambda pages, size, rows, chunk, budget, policy, mixed: engine_config(
        num_pages=pages,
        page_size=size,
        max_running_requests=rows,
        chunked_prefill_size=chunk and max(chunk, size),
        max_prefill_tokens=budget,
        schedule_policy=policy,
        enable_mixed_chunk=mixed,
    ),
    pages=st.integers(12, 60),
    size=st.sampled_from([1, 4]),
    rows=st.integers(1, 6),
    chunk=st.sampled_from([None, 6, 16, 24]),
    budget=st.sampled_from([8, 24, 64]),
    policy=st.sampled_from(["fcfs", "lpm", "shortest-prefill-first"]),
    mixed=st.booleans(),
)

_cuts = st.tuples(*[st.integers(0, 5) for _ in range(7)])

#: ("add", prompt length, shared family, outputs, priority?) | ("abort", which) | ("step", cuts) | ("wait", ns)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30), st.integers(0, 2), st.integers(1, 12)),
        st.tuples(st.just("step"), _cuts),
        st.tuples(st.just("step"), _cuts),
        st.tuples(st.just("step"), _cuts),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("wait"), st.integers(0, 9)),
    ),
    min_size=4,
    max_size=60,
)


def busy(seed: int) -> tuple[EngineConfig, list[tuple[object, ...]]]:
    """A small pool under heavy load: full flags, cut prompts, parked continuations, retractions, preemptions."""
    rng = random.Random(seed)
    preempting = seed % 3 == 0
    size = rng.choice([1, 4])
    config = engine_config(
        # A request gives way to a more important one for its row, not for pages.
        num_pages=(400 if preempting else rng.randint(60, 120)) // size,
        page_size=size,
        max_running_requests=2 if preempting else rng.randint(3, 12),
        chunked_prefill_size=rng.choice([8, 12, 20]),
        max_prefill_tokens=rng.choice([16, 64]),
        schedule_policy="fcfs" if preempting else rng.choice(["fcfs", "lpm", "shortest-prefill-first"]),
        enable_priority_scheduling=preempting,
        enable_priority_preemption=preempting,
        priority_preemption_threshold=1,
        enable_mixed_chunk=rng.random() < 0.7,
        schedule_conservativeness=rng.choice([0.05, 0.3, 1.0]),
    )
    ops: list[tuple[object, ...]] = []
    for _ in range(rng.randint(20, 80)):
        kind = rng.choices(["add", "step", "abort", "wait"], [5, 8, 1, 1])[0]
        ops.append(
            {
                "add": ("add", rng.randint(1, 60), rng.randint(0, 3), rng.randint(1, 30), rng.randint(0, 9)),
                "step": ("step", tuple(rng.randint(0, 5) for _ in range(7))),
                "abort": ("abort", rng.randint(0, 20)),
                "wait": ("wait", rng.randint(0, 9)),
            }[kind]
        )
    return config, ops


def play(run: TimedRun, ops: Sequence[tuple[object, ...]], *, check: object = None) -> list[str]:
    """Do `ops`, then finish; `check`, a callable, runs after each. Returns the rids in order of arrival."""
    rids: list[str] = []
    for op in ops:
        match op:
            case ("add", int(length), int(family), int(outputs), *priority):
                # A request that the empty pool cannot hold is refused at the door and has no timeline.
                if run.scheduler.largest_output(length) >= 1:
                    rids.append(f"r{len(rids)}")
                    prompt = range(family * 100_000, family * 100_000 + length)
                    run.add(rids[-1], prompt, outputs, priority=priority[0] if priority else None)
            case ("step", tuple(cuts)):
                run.timed_step([int(cut) for cut in cuts])
            case ("abort", int(which)):
                if rids:
                    run.abort(rids[which % len(rids)])
            case ("wait", int(ns)):
                run.now_ns += ns
        if callable(check):
            check()
    run.finish_all()
    if callable(check):
        check()
    return rids

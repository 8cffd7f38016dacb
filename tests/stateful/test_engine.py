"""The whole engine under random arrivals, aborts, allocation misses and executor failures, in random configurations.

After every step the state is checked from scratch, the invariant checker audits it, and the stub model notices any read
of memory that was not written for that very prefix. At the end everything drains in bounded time and nothing is held.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.config import EngineConfig, Policy
from engine.errors import RefusalCause, RequestRefused
from engine.events import AnyEvent, EngineStarted, RecordingSink, StepPlanned
from engine.llm_engine import TokenOutput
from invariants import InvariantChecker
from telemetry.replay import INPUTS, Driver
from tests.engine.stub_model import StubRun
from tests.stateful.effort import effort
from tests.stateful.laws import check_state

#: Steps without a token, a computed piece or an end, while somebody is unfinished.
IDLE_BOUND = 8


class Asked(NamedTuple):
    """One arrival; `share`, `own` and `max_new` in percent of the pool."""

    family: int
    share: int
    own: int
    max_new: int
    ignore_eos: bool
    stops: bool
    minimum: int
    priority: int | None


ASKED: dict[str, Any] = {
    "family": st.integers(0, 2),
    "share": st.sampled_from([0, 10, 30, 60]),
    "own": st.integers(0, 40),
    "max_new": st.sampled_from([0, 1, 5, 20, 50, 200]),
    "ignore_eos": st.booleans(),
    "stops": st.booleans(),
    "minimum": st.sampled_from([0, 5]),
    "priority": st.sampled_from([None, 0, 1, 9]),
}


@st.composite
def configurations(draw: st.DrawFn) -> EngineConfig:
    """Small pools, every policy, chunking off, tight or wide."""
    page_size = draw(st.sampled_from([1, 2, 16, 64]))
    radix = draw(st.booleans())
    policies = [policy for policy in Policy if radix or policy is not Policy.SHORTEST_PREFILL_FIRST]
    chunk = draw(st.sampled_from([None, page_size, 3 * page_size, 3 * page_size + 1, 4096]))
    priorities = draw(st.booleans())
    accounting = draw(st.sampled_from(["reference", "exact"]))
    smallest = page_size if accounting == "exact" else 1
    scheduler = {
        "kv_accounting": accounting,
        "schedule_policy": draw(st.sampled_from(policies)),
        "chunked_prefill_size": chunk,
        "max_prefill_tokens": max(smallest, draw(st.sampled_from([8, 64, 8192]))),
        "max_running_requests": draw(st.sampled_from([1, 2, 4, 6])),
        "prefill_max_requests": draw(st.sampled_from([None, None, 1, 2])),
        "enable_mixed_chunk": draw(st.booleans()),
        "schedule_conservativeness": draw(st.sampled_from([0.01, 0.01, 0.3, 1.0])),
        "clip_max_new_tokens": draw(st.sampled_from([1, 8, 4096])),
        "enable_priority_scheduling": priorities,
        "enable_priority_preemption": priorities and draw(st.booleans()),
        "priority_preemption_threshold": 0,
    }
    fewest = 4 if page_size == 1 else 3  # below, an engine refuses to start
    pages = draw(st.integers(fewest, {1: 60, 2: 40, 16: 20, 64: 6}[page_size]))
    cache = {"page_size": page_size, "num_pages": pages, "enable_radix": radix}
    executor = {"kind": "simulated", "overlap": draw(st.booleans())}
    return EngineConfig.model_validate({"scheduler": scheduler, "cache": cache, "executor": executor})


def replayed(events: list[AnyEvent]) -> list[AnyEvent]:
    """What a fresh scheduler says to the recorded inputs."""
    started, again = events[0], RecordingSink()
    assert isinstance(started, EngineStarted)
    driver = Driver(started, again, Path("recorded"))
    for event in events:
        if isinstance(event, INPUTS):
            driver.feed(event)
    return again.events


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.serial = 0
        self.idle = 0
        self.progress: Any = None

    @initialize(config=configurations())
    def build(self, config: EngineConfig) -> None:
        self.config = config
        self.sink = RecordingSink()
        self.checker = InvariantChecker(progress_steps=4 * IDLE_BOUND)
        self.box = StubRun(config, self.sink, self.checker)
        self.aborted: set[str] = set()

    @rule(asked=st.lists(st.builds(Asked, **ASKED), min_size=1, max_size=5))
    def add(self, asked: list[Asked]) -> None:
        """A burst. Requests of a family share a beginning; sizes are shares of the pool."""
        pool = self.config.cache.num_pages * self.config.cache.page_size
        for one in asked:
            self.serial += 1
            share, own = one.share * pool // 100, one.own * pool // 100
            prompt = [32 + (one.family * 7 + i * i) % 90 for i in range(share)]
            prompt += [33 + (self.serial * 31 + i * 17) % 90 for i in range(own)]
            self._add(f"r{self.serial}", prompt, max(1, one.max_new * pool // 100), one)

    def _add(self, rid: str, prompt: list[int], max_new: int, one: Asked) -> None:
        before = len(self.box.state.requests)
        largest = self.box.engine.scheduler.largest_output(len(prompt))
        stop = (40, 41, 42) if one.stops else ()
        minimum = min(one.minimum, max_new)

        def put() -> None:
            self.box.add(
                rid,
                prompt,
                max_new,
                ignore_eos=one.ignore_eos,
                stop_token_ids=stop,
                min_new_tokens=minimum,
                priority=one.priority,
            )

        if prompt and largest >= 1:
            put()
            return
        with pytest.raises(RequestRefused) as refused:
            put()
        assert refused.value.cause is (RefusalCause.NEVER_FITS if prompt else RefusalCause.INVALID)
        assert len(self.box.state.requests) == before == len(self.box.engine.tokens)

    @precondition(lambda self: self.box.state.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.box.state.requests)))
        self.aborted.add(rid)
        in_flight = self.box.state.requests[rid].in_flight
        assert self.box.engine.abort_request(rid, "test")
        assert self.box.engine.abort_request(rid) is bool(in_flight), "its end is on the way, or was at once"

    @rule()
    def miss_the_next_allocation(self) -> None:
        left = [True]
        self.box.kv.allocation_fault = lambda _kind: bool(left) and left.pop()

    @rule()
    def fail_the_next_step(self) -> None:
        self.box.model.fail_next = True

    @rule()
    def fail_the_next_launch(self) -> None:
        self.box.late.fail_next_launch = True

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    def _step(self) -> list[TokenOutput]:
        seen = len(self.sink.events)
        live = set(self.box.state.requests)
        outputs = self.box.step()
        assert not self.box.engine.is_dead
        planned = [event for event in self.sink.events[seen:] if isinstance(event, StepPlanned)]
        for plan in planned:
            self._check_plan(plan)
        check_state(self.box.state)
        assert self.checker.audit(self.box.engine.snapshot())
        moved = bool(outputs) or any(plan.prefills or plan.decodes for plan in planned)
        missed = any(plan.claim_failed for plan in planned)
        self.idle = 0 if moved or missed or not live else self.idle + 1
        assert self.idle <= IDLE_BOUND, f"{self.idle} steps without progress; waiting for {sorted(live)}"
        return outputs

    def _check_plan(self, plan: StepPlanned) -> None:
        assert all(row.extend_len > 0 for row in plan.prefills)
        middle = {row.rid for row in plan.prefills if not row.is_last}
        assert len(middle) <= 1
        assert not middle & set(plan.sampling)
        assert len(set(plan.sampling)) == len(plan.sampling)
        batch = [row.rid for row in plan.prefills] + list(plan.decodes)
        assert len(set(batch)) == len(batch) <= self.config.scheduler.max_running_requests
        assert set(plan.sampling) == set(batch) - middle
        victims = {victim.rid for victim in plan.retractions} | set(plan.preempted)
        assert not victims & set(batch), "scheduled and retracted in one step"

    @invariant()
    def state_is_whole(self) -> None:
        if hasattr(self, "box"):
            check_state(self.box.state)

    def teardown(self) -> None:
        if not hasattr(self, "box"):
            return
        box = self.box
        box.kv.allocation_fault = None
        box.model.fail_next = box.late.fail_next_launch = False
        work = sum(len(r.prompt_ids) + box.limits[rid] for rid, r in box.requests.items())
        for _ in range(20 + 10 * work):
            if not box.engine.has_work:
                break
            self._step()
        box.assert_nothing_held()
        for rid in box.requests:
            box.assert_right_tokens(rid)
            end = box.end(rid)
            assert end is not None
            asked = {"abort", "error"} if box.config.executor.overlap else {"abort"}  # its step may fail before
            assert end[0] in asked if rid in self.aborted else end[0] != "abort"
        assert self.checker.total_violations == 0
        assert replayed(self.sink.events) == self.sink.events


TestEngine = EngineMachine.TestCase
TestEngine.settings = effort(100)

"""Planning is pure, a plan holds for one state only, and an allocation miss leaves everything as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.errors import LawBroken, RequestRefused, StalePlan
from engine.events import RecordingSink
from engine.scheduler.plan import OutcomeRow, StepKind, StepOutcome
from tests.builders import CoreRun, engine_config


def picture(value: Any, seen: set[int] | None = None) -> Any:
    """Everything reachable from `value`, by value: what a write anywhere would change."""
    seen = set() if seen is None else seen
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, (str, bytes, int, float, bool, type(None))):
        return value
    if callable(value) or id(value) in seen:
        return "…"
    seen.add(id(value))
    if isinstance(value, dict):
        return [(picture(key, seen), picture(item, seen)) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [picture(item, seen) for item in value]
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    names += list(getattr(value, "__dict__", ()))
    return type(value).__name__, [(name, picture(getattr(value, name, None), seen)) for name in names]


def busy(**changes: Any) -> Iterator[tuple[CoreRun, RecordingSink]]:
    """A run in which everything happens, handed out between steps."""
    config = {
        "num_pages": 24,
        "chunked_prefill_size": 96,
        "max_running_requests": 4,
        "schedule_policy": "lpm",
        "schedule_conservativeness": 0.05,
    }
    sink = RecordingSink()
    run = CoreRun(engine_config(**(config | changes)), sink)
    for index in range(10):
        common = range(1000, 1000 + (0, 40, 72)[index % 3])
        own = range(10_000 * (index + 1), 10_000 * (index + 1) + (30, 150, 9, 61)[index % 4])
        run.add(f"r{index}", [*common, *own], (9, 30, 60)[index % 3])
        yield run, sink
        run.step()
    while run.has_work:
        yield run, sink
        run.step()


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "shortest-prefill-first"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_planning_writes_nothing(policy: str, page_size: int) -> None:
    steps = 0
    for run, sink in busy(schedule_policy=policy, page_size=page_size, num_pages=384 // page_size):
        run.scheduler.prepare(run.now_ns)
        before, events = picture(run.scheduler), len(sink.events)
        plan = run.scheduler.plan(run.now_ns)
        assert run.scheduler.plan(run.now_ns) == plan
        assert picture(run.scheduler) == before
        assert len(sink.events) == events
        # Finish this step by hand, so that the run goes on.
        plan = run.scheduler.commit(plan)
        rows = tuple(run._row(rid) for rid in plan.sampling)
        run.scheduler.apply(plan, StepOutcome(plan.step, rows))
        run.scheduler.complete(StepOutcome(plan.step, ()).times)
        steps += 1
    assert steps > 20


def test_the_picture_sees_a_write() -> None:
    """The comparison above can fail."""
    run, _ = next(busy())
    before = picture(run.scheduler)
    run.scheduler.state.ratio += 1e-9
    assert picture(run.scheduler) != before
    run.scheduler.state.ratio -= 1e-9
    run.scheduler.kv.tree._tick()
    assert picture(run.scheduler) != before


@pytest.mark.parametrize("what", ["arrival", "abort", "commit"])
def test_a_plan_on_another_state_is_refused(what: str) -> None:
    run, sink = next(busy())
    run.add("other", 20)
    run.scheduler.prepare(0)
    plan = run.scheduler.plan(0)
    if what == "arrival":
        run.add("late", 5)
    elif what == "abort":
        run.abort("other")
    else:
        run.scheduler.commit(plan)
    before, events = picture(run.scheduler), len(sink.events)
    with pytest.raises(StalePlan, match="planned on version"):
        run.scheduler.commit(plan)
    assert picture(run.scheduler) == before
    assert len(sink.events) == events


def test_phases_out_of_order_are_refused() -> None:
    run, _ = next(busy())
    scheduler = run.scheduler
    scheduler.prepare(0)
    plan = scheduler.commit(scheduler.plan(0))
    with pytest.raises(LawBroken, match="not applied yet"):
        scheduler.prepare(0)
    with pytest.raises(LawBroken, match="in flight is"):
        scheduler.apply(plan, StepOutcome(plan.step + 1, ()))
    with pytest.raises(LawBroken, match="are not the sampled"):
        scheduler.apply(plan, StepOutcome(plan.step, (OutcomeRow("nobody"),)))
    with pytest.raises(LawBroken, match="complete without apply"):
        scheduler.complete(StepOutcome(plan.step, ()).times)


def test_a_member_is_never_given_a_prefix_that_is_not_cached() -> None:
    run = CoreRun(engine_config(num_pages=64), RecordingSink())
    run.add("a", 5)
    run.scheduler.prepare(0)
    plan = run.scheduler.plan(0)
    (row,) = plan.prefills
    wrong = msgspec.structs.replace(row, prefix_len=1, extend_len=row.extend_len - 1)
    with pytest.raises(LawBroken, match="member a: planned on 1 cached tokens, 0 pages match"):
        run.scheduler.commit(msgspec.structs.replace(plan, prefills=(wrong,)))


def test_a_middle_chunk_is_never_sampled() -> None:
    seen = 0
    for run, _ in busy(chunked_prefill_size=32):
        run.scheduler.prepare(run.now_ns)
        plan = run.scheduler.commit(run.scheduler.plan(run.now_ns))
        middle = {row.rid for row in plan.prefills if not row.is_last}
        seen += len(middle)
        assert not middle & set(plan.sampling)
        assert plan.sampling == (*(row.rid for row in plan.prefills if row.is_last), *plan.decodes)
        outputs = {rid: run.scheduler.state.requests[rid].output_len for rid in middle}
        rows = tuple(run._row(rid) for rid in plan.sampling)
        run.scheduler.apply(plan, StepOutcome(plan.step, rows))
        run.scheduler.complete(StepOutcome(plan.step, ()).times)
        assert {rid: run.scheduler.state.requests[rid].output_len for rid in middle} == outputs
    assert seen > 5


def test_a_miss_leaves_everything_but_the_record() -> None:
    """Whenever it strikes: holdings, queue, lists, lengths and ratio stay, and the run ends as one without a miss."""
    misses = 0
    for run, _ in busy():
        left = [True]
        run.scheduler.kv.allocation_fault = lambda _kind, left=left: bool(left) and left.pop()
        run.scheduler.prepare(run.now_ns)
        state, kv = run.scheduler.state, run.scheduler.kv
        before = (kv.snapshot(), [r.rid for r in state.waiting], [r.rid for r in state.running], state.ratio)
        lengths = [(r.rid, r.state, r.computed_len, r.output_len) for r in state.requests.values()]
        wanted = run.scheduler.plan(run.now_ns)
        plan = run.scheduler.commit(wanted)
        if not left:
            misses += 1
            assert plan.kind is StepKind.IDLE
            assert (plan.prefills, plan.decodes, plan.sampling, plan.retractions) == ((), (), (), ())
            after = (kv.snapshot(), [r.rid for r in state.waiting], [r.rid for r in state.running], state.ratio)
            assert after == before
            assert [(r.rid, r.state, r.computed_len, r.output_len) for r in state.requests.values()] == lengths
        rows = tuple(run._row(rid) for rid in plan.sampling)
        run.scheduler.apply(plan, StepOutcome(plan.step, rows))
        run.scheduler.complete(StepOutcome(plan.step, ()).times)
        kv.allocation_fault = None
    assert misses > 20
    assert run.scheduler.kv.leases == {}


def test_a_refused_arrival_leaves_nothing() -> None:
    run, sink = next(busy())
    before, events = picture(run.scheduler), len(sink.events)
    for rid, tokens, match in (("r0", 5, "live request"), ("huge", 24 * 16, "do not fit the KV pool of 384 tokens")):
        with pytest.raises(RequestRefused, match=match):
            run.add(rid, tokens)
    assert picture(run.scheduler) == before
    assert len(sink.events) == events


def test_a_plan_is_a_value() -> None:
    run, _ = next(busy())
    run.scheduler.prepare(0)
    plan = run.scheduler.plan(0)
    with pytest.raises(AttributeError):
        plan.step = 7
    assert msgspec.structs.replace(plan, step=7) != plan

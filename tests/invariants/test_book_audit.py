"""The state of the engine is compared with the books wherever both know something: one altered value is noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from engine.kvcache.snapshot import SchedulerSnapshot
from engine.request import RequestState
from invariants import InvariantChecker
from invariants.book_audit import SAMPLE
from tests.builders import CoreRun, engine_config

Change = Callable[[SchedulerSnapshot], SchedulerSnapshot]
CHANGES: list[tuple[str, str, Change]] = []


def pictured(**settings: object) -> tuple[InvariantChecker, CoreRun]:
    """Two that run with a prefix in common, one half-prefilled, three that wait; every list has somebody."""
    checker = InvariantChecker(on_violation="record")
    config = engine_config(
        num_pages=40, chunked_prefill_size=32, max_running_requests=3, enable_mixed_chunk=True, **settings
    )
    run = CoreRun(config, checker)
    run.add("a", 40, 60)
    run.step()
    run.step()
    run.add("b", range(500, 530), 60)
    run.step()
    run.step()
    for rid in ("c", "d", "e", "f"):
        run.add(rid, 130, 8)
    run.step()
    return checker, run


def altered(name: str, law: str) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        CHANGES.append((name, law, change))
        return change

    return register


def _one(views: Sequence[Any], when: Callable[[Any], bool], **change: Any) -> tuple[Any, ...]:
    """The views with the first for which `when` holds changed; a callable value gets the view."""
    place = next(place for place, view in enumerate(views) if when(view))
    view = views[place]
    values = {key: value(view) if callable(value) else value for key, value in change.items()}
    return (*views[:place], replace(view, **values), *views[place + 1 :])


def _request(state: RequestState, **change: Any) -> Change:
    def apply(snapshot: SchedulerSnapshot) -> SchedulerSnapshot:
        return replace(snapshot, requests=_one(snapshot.requests, lambda view: view.state == state, **change))

    return apply


def _waiting(**change: Any) -> Change:
    return lambda snapshot: replace(snapshot, waiting=_one(snapshot.waiting, lambda view: True, **change))


altered("a ratio that moved without a plan", "INV-BUDGET-04")(
    lambda snapshot: replace(snapshot, new_token_ratio=snapshot.new_token_ratio / 2)
)
altered("a flag that was set afterwards", "INV-FLAG-02")(
    lambda snapshot: replace(snapshot, batch_is_full=not snapshot.batch_is_full)
)
altered("a continuation that was forgotten", "INV-CHUNK-04")(lambda snapshot: replace(snapshot, continuation=None))
altered("a running request that left its list", "INV-STEP-04")(
    lambda snapshot: replace(snapshot, running=snapshot.running[1:])
)
altered("a waiting request that left the queue", "INV-STEP-04")(
    lambda snapshot: replace(snapshot, waiting=snapshot.waiting[1:])
)
altered("a queue out of order", "INV-REQ-03")(
    lambda snapshot: replace(snapshot, waiting=(*snapshot.waiting[1:], snapshot.waiting[0]))
)
altered("a cursor that moved", "INV-CHUNK-02")(
    _request(RequestState.PREFILL, computed_len=lambda view: view.computed_len - 16)
)
altered("a decode that is a token ahead", "INV-CHUNK-02")(
    _request(RequestState.DECODE, computed_len=lambda view: view.computed_len + 1)
)
altered("computed tokens of one that waits", "INV-CHUNK-02")(_request(RequestState.WAITING, computed_len=16))
altered("a limit that grew", "INV-BUDGET-04")(
    _request(RequestState.DECODE, max_new_tokens=lambda view: view.max_new_tokens + 1)
)
altered("a prompt that shrank", "INV-BUDGET-04")(
    _request(RequestState.WAITING, prompt_len=lambda view: view.prompt_len - 1)
)
altered("a step that is still in flight", "INV-STEP-01")(_request(RequestState.DECODE, in_flight=1))
altered("an output that no event told", "INV-STEP-01")(_waiting(output_len=1))
altered("tokens that wait uncounted", "INV-STEP-04")(_waiting(prompt_len=lambda view: view.prompt_len + 5))
altered("a way back that no event told", "INV-REQ-05")(_waiting(num_retractions=1))
altered("an overtake that no pass made", "INV-REQ-04")(_waiting(times_passed_over=1))


@altered("a lease that moved up its path", "INV-LOCK-03")
def shorter_path(snapshot: SchedulerSnapshot) -> SchedulerSnapshot:
    leases = _one(snapshot.kv.leases, lambda lease: lease.node != 0, node=0)
    return replace(snapshot, kv=replace(snapshot.kv, leases=leases))


@altered("two leases that changed rows", "INV-LOCK-02")
def rows_swapped(snapshot: SchedulerSnapshot) -> SchedulerSnapshot:
    first, second, *others = snapshot.kv.leases
    leases = (replace(first, row=second.row), replace(second, row=first.row), *others)
    return replace(snapshot, kv=replace(snapshot.kv, leases=leases))


@altered("a private page that is called shared", "INV-PAGE-02")
def shared_page(snapshot: SchedulerSnapshot) -> SchedulerSnapshot:
    leases = _one(
        snapshot.kv.leases,
        lambda lease: len(lease.pages) > lease.shared_pages,
        shared_pages=lambda lease: lease.shared_pages + 1,
    )
    return replace(snapshot, kv=replace(snapshot.kv, leases=leases))


def test_the_picture_itself_is_right() -> None:
    checker, run = pictured()
    snapshot = run.scheduler.snapshot()
    assert snapshot.continuation is not None
    assert len(snapshot.running) == 2
    assert len(snapshot.waiting) == 3
    assert checker.audit(snapshot)
    assert checker.total_violations == 0


@pytest.mark.parametrize(("name", "law", "change"), CHANGES, ids=[name for name, _, _ in CHANGES])
def test_an_altered_value_is_noticed(name: str, law: str, change: Change) -> None:
    checker, run = pictured()
    checker.audit(change(run.scheduler.snapshot()))
    named = [violation for violation in checker.violations if violation.id == law]
    assert named, f"{name}: {[str(violation) for violation in checker.violations]}"
    assert all(violation.by == "audit" for violation in named)
    assert checker.internal_errors == 0, checker.last_internal_error


def test_the_sample_of_the_queue_reaches_everyone() -> None:
    checker = InvariantChecker(on_violation="record")
    run = CoreRun(engine_config(max_running_requests=1, num_pages=64), checker)
    for index in range(SAMPLE + 40):
        run.add(f"r{index}", 20, 4)
    run.step()
    snapshot = run.scheduler.snapshot()
    last = replace(snapshot.waiting[-1], times_passed_over=9)
    wrong = replace(snapshot, waiting=(*snapshot.waiting[:-1], last))
    checker.audit(wrong)
    assert checker.violations_by_id["INV-REQ-04"] == 0
    checker.audit(wrong)
    assert checker.violations_by_id["INV-REQ-04"] == 1

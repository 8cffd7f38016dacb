"""The checker itself: modes, counters, evidence, and that record mode never stops a loop."""

from __future__ import annotations

from itertools import count

import pytest
from msgspec.structs import replace

from engine.events import AnyEvent, PagesMoved, RecordingSink, RequestArrived, StepCompleted
from invariants import CATALOG, LAWS, AuditPart, Group, InvariantChecker, InvariantViolation, Violation
from invariants.checker import EVIDENCE_EVENTS, KEPT_VIOLATIONS
from tests.builders import CoreRun, engine_config


def recorded(steps: int = 12) -> list[AnyEvent]:
    """A true stream of a short run."""
    sink = RecordingSink()
    run = CoreRun(engine_config(), sink)
    run.add("a", 40, 20)
    run.add("b", 70, 20)
    for _ in range(steps):
        run.step()
    return sink.events


def feed(checker: InvariantChecker, events: list[AnyEvent]) -> None:
    for event in events:
        checker.emit(event)


def with_lost_event(events: list[AnyEvent]) -> list[AnyEvent]:
    lost = next(index for index, event in enumerate(events) if type(event) is PagesMoved)
    return events[:lost] + events[lost + 1 :]


def test_raise_names_law_request_step_and_events() -> None:
    checker = InvariantChecker()
    events = recorded()
    for event in events[:5]:
        checker.emit(event)
    late = replace(events[5], t_ns=-5)
    with pytest.raises(InvariantViolation) as caught:
        checker.emit(late)
    violation = caught.value.violation
    assert (violation.id, violation.step) == ("INV-STEP-02", late.step)
    assert violation.evidence == (events[4].seq, late.seq)
    assert violation.law == LAWS["INV-STEP-02"].sentence
    assert "t_ns -5" in violation.found
    assert "INV-STEP-02" in str(caught.value)


def test_record_keeps_counts_and_tells_the_listener() -> None:
    told: list[Violation] = []
    checker = InvariantChecker(on_violation="record", listener=told.append)
    for event in with_lost_event(recorded()):
        checker.emit(event)
    assert checker.total_violations == len(told) > 0
    assert list(checker.violations) == told
    assert checker.violations_by_id["INV-STEP-02"] == 1
    assert checker.violations_by_id.keys() == LAWS.keys()


def test_overrides_turn_single_laws() -> None:
    events = with_lost_event(recorded())
    checker = InvariantChecker(overrides={"INV-STEP-02": "record"})
    with pytest.raises(InvariantViolation) as caught:
        feed(checker, events)
    assert caught.value.violation.id != "INV-STEP-02"
    assert checker.violations_by_id["INV-STEP-02"] == 1

    checker = InvariantChecker(on_violation="record", overrides={"INV-STEP-02": "raise"})
    with pytest.raises(InvariantViolation, match="INV-STEP-02"):
        feed(checker, events)


def test_a_law_that_is_off_is_not_judged() -> None:
    events = with_lost_event(recorded())
    checker = InvariantChecker(on_violation="record", overrides={"INV-STEP-02": "off"})
    feed(checker, events)
    assert checker.violations_by_id["INV-STEP-02"] == 0
    assert checker.total_violations > 0
    assert not checker.is_off

    checker = InvariantChecker(on_violation="off", overrides={"INV-STEP-02": "record"})
    feed(checker, events)
    assert checker.total_violations == checker.violations_by_id["INV-STEP-02"] == 1
    assert not checker.is_off
    assert (checker.mode_of("INV-STEP-02"), checker.mode_of("INV-PAGE-01")) == ("record", "off")
    assert InvariantChecker(on_violation="off").is_off


def test_parts_of_an_audit_are_made_as_often_as_asked() -> None:
    checker = InvariantChecker(audit_every={AuditPart.PAGE_TABLES: 3, AuditPart.LOCKS: 2})
    run = CoreRun(engine_config(), checker, after_step=checker.audit)
    run.add("a", 30, 9)
    for _ in range(7):
        run.step()
    assert checker.audits == 7
    parts = checker.audits_by_part
    assert (parts["ownership"], parts["locks"], parts["page_tables"]) == (7, 4, 3)
    assert parts.keys() == {part.value for part in AuditPart}


def test_a_part_that_is_left_out_finds_nothing() -> None:
    run = CoreRun(engine_config(), RecordingSink())
    run.add("a", 30, 3)
    run.step()
    snapshot = run.scheduler.snapshot()
    lost = replace(snapshot, kv=replace(snapshot.kv, free_list=snapshot.kv.free_list[1:]))
    checker = InvariantChecker(on_violation="record", audit_every={AuditPart.OWNERSHIP: 2})
    checker.audit(lost)
    checker.audit(lost)
    assert checker.violations_by_id["INV-PAGE-02"] == 1
    assert checker.violations[0].by == "audit"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"overrides": {"INV-NONE-01": "raise"}}, "INV-NONE-01"),
        ({"progress_steps": 0}, "progress_steps is 0"),
        ({"gap_steps": 0}, "gap_steps is 0"),
        ({"audit_every": {AuditPart.LOCKS: 0}}, "locks"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        InvariantChecker(**arguments)


def test_record_mode_survives_a_claim_it_cannot_follow() -> None:
    checker = InvariantChecker(on_violation="record")
    for event in recorded():
        checker.emit(event)
        last = event
    broken = PagesMoved(last.seq + 1, last.step, last.t_ns, b"\1\0\0\0", "free", "private", None, "claim")
    checker.emit(broken)
    # Claims are judged together, with the next event that asks where pages are; that one is judged nevertheless.
    checker.emit(StepCompleted(last.seq + 2, last.step, last.t_ns, last.kind, (), last.times, False, (0,) * 4, 9, 9))
    assert checker.internal_errors == 1
    assert checker.violations_by_id["INV-PAGE-01"] == 1


def test_record_mode_survives_a_stream_it_cannot_follow() -> None:
    checker = InvariantChecker(on_violation="record")
    events = recorded()
    for event in events:
        checker.emit(event)
    last = events[-1]
    broken = PagesMoved(last.seq + 1, last.step, last.t_ns, b"\1\0\0\0", "private", "evictable", None, "insert")
    checker.emit(broken)
    assert checker.internal_errors == 1
    assert checker.last_internal_error is not None
    assert "TypeError" in checker.last_internal_error
    assert checker.total_violations == 0
    checker.emit(
        StepCompleted(last.seq + 2, last.step, last.t_ns, last.kind, (), last.times, False, (0, 0, 0, 0), 9, 9)
    )
    assert checker.violations_by_id["INV-STEP-01"] == 1  # nothing was in flight: it still checks

    strict = InvariantChecker()
    for event in events:
        strict.emit(event)
    with pytest.raises(TypeError, match="subscriptable"):
        strict.emit(broken)


def test_first_event_must_be_the_start() -> None:
    checker = InvariantChecker(on_violation="record")
    for event in recorded()[1:]:
        checker.emit(event)
    assert checker.violations_by_id["INV-STEP-02"] > 0
    assert checker.total_violations == checker.violations_by_id["INV-STEP-02"]


def test_a_second_start_opens_new_books() -> None:
    checker = InvariantChecker()
    events = recorded()
    for event in [*events, *events]:
        checker.emit(event)
    assert checker.total_violations == 0


def test_evidence_and_kept_violations_are_bounded() -> None:
    checker = InvariantChecker(on_violation="record")
    events = recorded()
    for event in events:
        checker.emit(event)
    arrival = next(event for event in events if type(event) is RequestArrived)
    for seq in range(10_000, 10_000 + 2 * EVIDENCE_EVENTS, 2):  # every number missing its neighbour
        checker.emit(replace(arrival, seq=seq, rid="c", step=999, t_ns=1 << 60))
    evidence = checker.evidence()
    assert len(evidence) == EVIDENCE_EVENTS
    assert evidence[-1].seq == 10_000 + 2 * EVIDENCE_EVENTS - 2
    assert len(checker.violations) == KEPT_VIOLATIONS < checker.total_violations


def test_cost_is_measured_only_with_a_time_source() -> None:
    ticks = count(step=1_000_000_000)
    timed, untimed = InvariantChecker(time_ns=lambda: next(ticks)), InvariantChecker()
    run = CoreRun(engine_config(), timed, after_step=timed.audit)
    run.add("a", 30, 3)
    steps = run.run()
    for event in recorded():
        untimed.emit(event)
    assert timed.seconds_by_tier[1] == len(timed.evidence())
    assert timed.seconds_by_tier[2] == steps
    assert untimed.seconds_by_tier == {1: 0.0, 2: 0.0}


def test_checks_are_counted_by_group() -> None:
    checker = InvariantChecker()
    for event in recorded():
        checker.emit(event)
    assert checker.checks_by_group.keys() == {group.value for group in Group}
    # The waiting order, and what listeners show and have, are looked at by audits only.
    by_audits = {Group.INDEX, Group.METER, Group.SPAN}
    assert all(count for group, count in checker.checks_by_group.items() if group not in by_audits)


def test_audit_waits_for_the_end_of_a_step() -> None:
    """A request in transit is not a leak: in the middle of a step nothing is checked, and the answer says so."""
    checker = InvariantChecker()
    run = CoreRun(engine_config(), checker)
    run.add("a", 30, 3)
    scheduler = run.scheduler
    scheduler.prepare(5)
    plan = scheduler.commit(scheduler.plan(5))
    assert not checker.audit(scheduler.snapshot())
    assert plan.prefills
    other = InvariantChecker()
    run = CoreRun(engine_config(), other)
    run.add("a", 30, 3)
    run.step()
    assert other.audit(run.scheduler.snapshot())


def test_audit_without_events_still_compares_a_snapshot_with_itself() -> None:
    run = CoreRun(engine_config(), RecordingSink())
    run.add("a", 30, 3)
    run.step()
    snapshot = run.scheduler.snapshot()
    checker = InvariantChecker(on_violation="record")
    assert checker.audit(snapshot)
    assert checker.total_violations == 0
    checker.audit(replace(snapshot, kv=replace(snapshot.kv, free_list=snapshot.kv.free_list[1:])))
    assert checker.violations_by_id["INV-PAGE-02"] == 1


def test_catalogue_is_well_formed() -> None:
    assert len(LAWS) == len(CATALOG)
    for law in CATALOG:
        assert law.id.startswith("INV-")
        assert law.sentence.endswith(".")
        assert law.tier in (1, 2)
        assert all((law.cost, law.applies, law.fails))

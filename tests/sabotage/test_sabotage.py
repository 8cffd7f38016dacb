"""Every law notices when it is broken, and a healthy run breaks none."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.events import AdmissionDecided, AnyEvent, PagesMoved, RequestTransitioned, StepPlanned
from invariants import CATALOG, InvariantChecker, InvariantViolation, Violation
from tests.builders import CoreRun, Tap
from tests.sabotage import cache_faults, engine_faults, event_faults, index_faults, meter_faults, watch_faults
from tests.sabotage.scenario import FAULTS, GAP_STEPS, PROGRESS_STEPS, Fault, config, run_with, workload

MODULES = (
    cache_faults,
    engine_faults,
    event_faults,
    index_faults,
    meter_faults,
    watch_faults,
)  # imported for the faults they register


def fault_id(fault: Fault) -> str:
    return f"{fault.law}: {fault.name}"


def test_healthy_run_breaks_no_law() -> None:
    checker = InvariantChecker(progress_steps=PROGRESS_STEPS, gap_steps=GAP_STEPS)
    run_with(None, checker)
    assert checker.total_violations == 0
    assert all(checker.checks_by_group.values())


def test_scenario_shows_what_the_faults_break() -> None:
    seen: Counter[str] = Counter()

    def look(event: AnyEvent) -> tuple[AnyEvent]:
        match event:
            case AdmissionDecided():
                seen[event.reason] += 1
                seen.update(event.overdrafts)
            case StepPlanned():
                seen[event.kind] += 1
                seen["retracted"] += len(event.retractions)
            case RequestTransitioned():
                seen[event.cause] += 1
            case PagesMoved():
                seen[f"{event.cause} {event.source}"] += 1
        return (event,)

    workload(CoreRun(config(), Tap(InvariantChecker(progress_steps=PROGRESS_STEPS, gap_steps=GAP_STEPS), look)))
    for what in (
        "admitted_whole",
        "admitted_first_chunk",
        "admitted_next_chunk",
        "admitted_last_chunk",
        "kv_total_exhausted",
        "input_by_chunk",
        "chunk_page_rounding",
        "mixed",
        "decode",
        "extend",
        "retracted",
        "abort",
        "error",
        "length",
        "claim free",
        "insert private",
        "split protected",
        "lock evictable",
        "unlock protected",
        "evict evictable",
        "free private",
    ):
        assert seen[what], f"the scenario shows no {what}: {dict(seen)}"


@pytest.mark.parametrize("fault", FAULTS, ids=fault_id)
def test_fault_trips_its_law(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Violation] = []
    checker = InvariantChecker(
        on_violation="record", progress_steps=PROGRESS_STEPS, gap_steps=GAP_STEPS, listener=seen.append
    )
    run_with(fault, checker, monkeypatch)
    named = [violation for violation in seen if violation.id == fault.law]
    assert named, f"{fault.law} did not notice; noticed: {[str(violation) for violation in seen[:5]]}"
    assert named[0].expected != named[0].found
    assert named[0].evidence
    assert checker.violations_by_id[fault.law] == len(named)
    assert checker.internal_errors == 0, checker.last_internal_error


@pytest.mark.parametrize("fault", FAULTS, ids=fault_id)
def test_fault_stops_a_checker_that_raises(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    checker = InvariantChecker(progress_steps=PROGRESS_STEPS, gap_steps=GAP_STEPS)
    with pytest.raises(InvariantViolation) as caught:
        run_with(fault, checker, monkeypatch)
    assert caught.value.violation.id in str(caught.value)


def test_every_law_has_a_fault() -> None:
    faults = Counter(fault.law for fault in FAULTS)
    assert faults.keys() == {law.id for law in CATALOG}, "a law without sabotage, or a sabotage without law"

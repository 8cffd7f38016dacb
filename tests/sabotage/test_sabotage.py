"""Every law notices when it is broken, and a healthy run breaks none."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from engine.events import AdmissionDecided, AnyEvent, PagesMoved, RequestTransitioned, StepPlanned
from invariants import CATALOG, InvariantChecker, InvariantViolation, Violation
from tests.builders import CoreRun, Tap
from tests.sabotage import run
from tests.sabotage.every import FAULTS, KNOWN
from tests.sabotage.measure import Measure, kind_of
from tests.sabotage.scenario import GAP_STEPS, PROGRESS_STEPS, Fault, config, run_with, same, workload

#: Not a fault: the same run with steps that overlap.
OVERLAPPED = Fault("none", "none", settings={"overlap": True})
#: Faults that cannot be where steps overlap. The hang-up that leaks a row: it comes between two steps, when whoever
#: decodes has a row in flight, so nothing is given back by it.
NOT_OVERLAPPED = frozenset({"a row that a hang-up leaks"})


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


def test_healthy_run_whose_steps_overlap_breaks_no_law() -> None:
    checker = InvariantChecker(progress_steps=PROGRESS_STEPS, gap_steps=GAP_STEPS)
    run_with(OVERLAPPED, checker)
    assert checker.total_violations == 0
    assert all(checker.checks_by_group.values())


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name not in NOT_OVERLAPPED], ids=fault_id)
def test_fault_trips_its_law_where_steps_overlap_too(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    checker = InvariantChecker(on_violation="record", progress_steps=PROGRESS_STEPS, gap_steps=GAP_STEPS)
    run_with(replace(fault, settings=fault.settings | {"overlap": True}), checker, monkeypatch)
    assert checker.violations_by_id[fault.law], f"noticed: {[str(violation) for violation in checker.violations][:5]}"
    assert checker.internal_errors == 0, checker.last_internal_error


def test_known_faults_of_such_engines_have_a_sabotage() -> None:
    names = {fault.name for fault in FAULTS}
    assert set(KNOWN.values()) <= names
    # Sums that balance and the like are told to the checker in events; what engines really did is broken in the engine.
    broken = {fault.name for fault in FAULTS if kind_of(fault) != "events"}
    assert set(KNOWN.values()) <= broken


@pytest.mark.parametrize(
    "name", ["an admission charged twice", "a full flag that stays latched", "a counter that is reset"]
)
def test_a_fault_is_noticed_within_one_step_of_when_it_could_be(name: str) -> None:
    fault = next(fault for fault in FAULTS if fault.name == name)
    result = Measure().of(fault)
    assert result.lag is not None
    assert result.lag <= 1
    assert result.laws[0] == fault.law or fault.law in result.laws


def test_without_audits_some_faults_stay_unseen() -> None:
    """Otherwise the second column of `make sabotage` would say nothing."""
    fault = next(fault for fault in FAULTS if fault.name == "a free page in a page table")
    result = Measure().of(fault)
    assert result.lag == 0
    assert result.alone is None
    assert result.alone_laws == ()


def test_the_runner_prints_a_table_and_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["INV-CHUNK-05"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"a first cut three tokens short +engine +INV-CHUNK-05 +0 +0  CHUNK-05", out)
    assert "2 faults in" in out
    assert "tier 1 alone: 2 of 2" in out
    assert out.endswith("sabotage: caught 2 of 2\n")


def test_the_runner_fails_for_a_miss(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = Fault("INV-CHUNK-05", "nothing at all", edit=lambda: same)
    monkeypatch.setattr(run, "FAULTS", [harmless])
    assert run.main(["nothing at all"]) == 1
    out = capsys.readouterr().out
    assert "missed: nothing at all (INV-CHUNK-05)" in out
    assert out.endswith("sabotage: caught 0 of 1\n")


def test_the_runner_fails_for_a_law_without_sabotage(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [fault for fault in FAULTS if fault.law != "INV-CHUNK-05" and fault.name != "an admission charged twice"]
    monkeypatch.setattr(run, "FAULTS", [*kept, Fault("INV-NONE-01", "of no law")])
    complaints = "\n".join(run.complaints([], whole=True))
    assert "a law without a sabotage: INV-CHUNK-05" in complaints
    assert "a sabotage of a law that is none: INV-NONE-01" in complaints
    assert "a known fault without its sabotage: double charge" in complaints


def test_every_law_has_a_fault() -> None:
    faults = Counter(fault.law for fault in FAULTS)
    assert faults.keys() == {law.id for law in CATALOG}, "a law without sabotage, or a sabotage without law"

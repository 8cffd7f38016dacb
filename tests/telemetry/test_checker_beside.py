"""A checker that only records judges on a worker: behind the events, in order, and never from books with holes."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.config import ExecutorConfig
from engine.events import AnyEvent, RecordingSink
from engine.llm_engine import EngineRequest
from engine.sampling_params import SamplingParams
from invariants import InvariantChecker
from telemetry.auditor import Auditor
from telemetry.buffered import BufferedSink
from telemetry.launch import Instance, build_instance
from telemetry.settings import ServeCommand
from telemetry.shared_sink import SharedSink
from tests.builders import CoreRun, engine_config

LONG_S = 3_600.0


def run_events(steps: int = 12) -> tuple[CoreRun, list[AnyEvent]]:
    sink = RecordingSink()
    run = CoreRun(engine_config(), sink)
    run.add("a", 40, 20)
    run.add("b", 70, 20)
    for _ in range(steps):
        run.step()
    return run, sink.events


class Held:
    """A listener that stands until `gate` opens."""

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate

    def emit(self, event: AnyEvent) -> None:
        assert self._gate.wait(30)


# --- work in between ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 1, 7, 8, 9, 500])
def test_what_is_asked_for_in_between_runs_in_its_place(numbered: Any, before: int) -> None:
    heard = RecordingSink()
    sink = BufferedSink(heard, "journal", period_s=LONG_S)
    events = [numbered.planned(step) for step in range(before + 20)]
    seen: list[int] = []
    for number, event in enumerate(events):
        if number == before:
            sink.call(lambda: seen.append(len(heard.events)))
        sink.emit(event)
    sink.call(lambda: seen.append(len(heard.events)))
    sink.call(lambda: seen.append(-1))
    assert sink.flush(30)
    assert seen == [before, len(events), -1]
    assert sink.close()
    assert heard.events == events


def test_it_runs_on_the_thread_that_feeds_and_its_fault_is_counted(numbered: Any) -> None:
    sink = BufferedSink(RecordingSink(), "journal")
    threads: list[str] = []

    def fail() -> None:
        threads.append(threading.current_thread().name)
        raise ValueError("of an audit")

    sink.call(fail)
    sink.emit(numbered.planned(1))
    assert sink.flush(30)
    assert threads == ["admitscope-journal"]
    stats = sink.stats()
    assert (stats.errors, stats.last_error, stats.delivered) == (1, "ValueError: of an audit", 1)
    assert sink.close()
    sink.call(fail)
    assert len(threads) == 1, "nobody is left to run it"


def test_calls_and_events_from_a_busy_thread_keep_their_order(numbered: Any) -> None:
    heard = RecordingSink()
    sink = BufferedSink(heard, "journal", period_s=0.001)
    wrong: list[tuple[int, int]] = []

    def look(expected: int) -> None:
        if len(heard.events) != expected:
            wrong.append((expected, len(heard.events)))

    for number in range(20_000):
        sink.emit(numbered.planned(number))
        if number % 3 == 0:
            sink.call(lambda expected=number + 1: look(expected))
    assert sink.flush(60)
    assert sink.close()
    assert wrong == []
    assert len(heard.events) == 20_000


# --- loss -----------------------------------------------------------------------------------------------------------


def test_a_loss_ends_judging_by_books_and_accuses_nobody() -> None:
    run, events = run_events()
    lost = [0]
    checker = InvariantChecker(on_violation="record", lost=lambda: lost[0])
    for event in events[:20]:
        checker.emit(event)
    lost[0] = 5
    judged = sum(checker.checks_by_group.values())
    for event in events[25:]:
        checker.emit(event)
    assert checker.is_blind
    assert checker.total_violations == 0
    assert checker.internal_errors == 1, "it is told once"
    assert "5 events were lost" in str(checker.last_internal_error)
    assert sum(checker.checks_by_group.values()) == judged
    # A snapshot is still held against itself.
    run.scheduler.kv.pool._owners[int(run.scheduler.kv.leases["a"].pages[0])] += 1
    checker.audit(run.scheduler.snapshot())
    assert {law for law, count in checker.violations_by_id.items() if count} == {"INV-PAGE-02"}


def test_a_gap_without_a_loss_is_a_broken_law() -> None:
    _, events = run_events()
    checker = InvariantChecker(on_violation="record", lost=lambda: 0)
    for event in (*events[:20], *events[25:]):
        checker.emit(event)
    assert not checker.is_blind
    assert checker.violations_by_id["INV-STEP-02"] == 1


def test_a_life_whose_beginning_was_lost_is_not_judged() -> None:
    _, events = run_events()
    checker = InvariantChecker(on_violation="record", lost=lambda: 1)
    for event in events[1:]:
        checker.emit(event)
    assert checker.is_blind
    assert checker.total_violations == 0


def test_a_queue_that_overflows_blinds_the_checker_behind_it() -> None:
    _, events = run_events()
    checker = InvariantChecker(on_violation="record")
    gate = threading.Event()
    sink = SharedSink([("metrics", Held(gate)), ("checker", checker)], capacity=16)
    checker.lost = lambda: sink.dropped
    for event in events:
        sink.emit(event)
    gate.set()
    assert sink.flush(30)
    assert sink.dropped > 0
    sink.emit(events[-1])
    assert sink.close()
    assert checker.is_blind
    assert checker.total_violations == 0
    assert next(stats.dropped for stats in sink.stats() if stats.component == "checker") == sink.dropped


def audited(run: CoreRun, sink: SharedSink, checker: InvariantChecker) -> Auditor:
    """An auditor of `run` whose checker `sink` feeds. It is asked by hand, so it needs no engine thread."""
    engine = SimpleNamespace(steps_done=1, snapshot=lambda order_from: run.scheduler.snapshot())
    return Auditor(cast("Any", engine), cast("Any", None), checker, period_s=None, behind=sink.call)


def test_an_audit_after_a_loss_that_no_event_has_shown_yet_accuses_nobody() -> None:
    run, events = run_events()
    checker, gate = InvariantChecker(on_violation="record"), threading.Event()
    sink = SharedSink([("metrics", Held(gate)), ("checker", checker)], capacity=len(events) - 6)
    checker.lost = lambda: sink.dropped
    for event in events:
        sink.emit(event)
    assert sink.dropped > 0
    audited(run, sink, checker).audit()
    gate.set()
    assert sink.close()
    assert checker.is_blind
    assert checker.audits == 1
    assert checker.total_violations == 0


def test_a_worker_that_stands_holds_one_snapshot_at_most() -> None:
    run, _ = run_events()
    checker, gate = InvariantChecker(on_violation="record"), threading.Event()
    sink = SharedSink([("metrics", Held(gate)), ("checker", checker)])
    for event in run_events()[1]:
        sink.emit(event)
    auditor = audited(run, sink, checker)
    for _ in range(50):
        auditor.audit()
    gate.set()
    assert sink.flush(30)
    assert checker.audits == 1
    auditor.audit()
    assert sink.close()
    assert checker.audits == 2, "the next one is made as before"
    assert checker.total_violations == 0


# --- the composition root -------------------------------------------------------------------------------------------


def instance_of(**fields: Any) -> Instance:
    return build_instance(ServeCommand(executor=ExecutorConfig(kind="simulated"), **({"journal": None} | fields)))


@pytest.mark.parametrize(
    ("fields", "beside"),
    [
        ({"on_violation": "record"}, True),
        ({"on_violation": "raise"}, False),
        ({"on_violation": "off"}, False),
        ({"on_violation": "record", "checker": {"overrides": "INV-PROG-01=raise"}}, False),
        ({"on_violation": "raise", "checker": {"overrides": "INV-PROG-01=off"}}, False),
        ({"on_violation": "record", "checker": {"overrides": "INV-PROG-01=off"}}, True),
    ],
)
def test_one_law_that_may_stop_a_step_keeps_the_checker_in_it(fields: dict[str, Any], beside: bool) -> None:
    instance = instance_of(**fields)
    try:
        components = [stats.component for stats in instance.listeners.stats()]
        assert instance.checking.is_beside is beside
        assert components.count("checker") == (fields["on_violation"] != "off")
    finally:
        instance.close()


def test_what_breaks_in_the_last_step_still_gets_its_evidence(tmp_path: Path) -> None:
    instance = instance_of(on_violation="record", journal=tmp_path)
    instance.engine.add_request(EngineRequest(rid="r", prompt_ids=(1, 2, 3), params=SamplingParams(max_new_tokens=2)))
    instance.engine.scheduler.publisher.seq += 3
    instance.engine.step()
    assert instance.close()
    assert instance.checker.violations_by_id["INV-STEP-02"] == 1
    assert [path.name.split("-INV")[1] for path in (tmp_path / "evidence").iterdir()] == ["-STEP-02-1"]

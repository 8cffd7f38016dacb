"""Laws know the configuration they apply to: what the reference may do with guards off, what a guard does, misses."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from engine.events import AdmissionDecided, AnyEvent, RecordingSink, StepPlanned
from engine.scheduler.decision import Guard, Reason
from invariants import InvariantChecker
from tests.builders import CoreRun, Tap, engine_config


def watched(seen: Counter[str], checker: InvariantChecker) -> Tap:
    """Counts guards, reasons and cuts that are not aligned on their way to the checker."""

    def look(event: AnyEvent) -> tuple[AnyEvent]:
        if type(event) is StepPlanned:
            seen.update(event.guards)
            seen["claim_failed"] += event.claim_failed
            seen["retracted"] += len(event.retractions)
        elif type(event) is AdmissionDecided:
            seen[event.reason] += 1
            seen.update(event.overdrafts)
            seen["unaligned"] += event.reason is Reason.ADMITTED_FIRST_CHUNK and event.extend_end % 16 != 0
        return (event,)

    return Tap(checker, look)


@pytest.mark.parametrize(("guards", "expected"), [(True, ["INV-CHUNK-01"]), (False, [])])
def test_a_continuation_of_nothing_is_legal_without_guards_only(guards: bool, expected: list[str]) -> None:
    """When decode rows fill the slice the reference goes on with an extend of 0; a guard of this engine must not."""
    sink = RecordingSink()
    run = CoreRun(engine_config(chunked_prefill_size=32, guards=guards), sink)
    run.add("long", 100, 4)
    run.step()
    run.step()
    decision = next(event for event in sink.events if type(event) is AdmissionDecided and event.is_continuation)
    empty = replace(decision, selected_extend=0, extend_end=decision.prefix_len, is_chunked=True)
    checker = InvariantChecker(on_violation="record")
    for event in sink.events:
        if event is decision:
            break
        checker.emit(event)
    checker.emit(empty)
    chunk_laws = [law for law, count in checker.violations_by_id.items() if count and law.startswith("INV-CHUNK")]
    assert chunk_laws == expected


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_an_allocation_miss_changes_nothing(kind: str) -> None:
    seen: Counter[str] = Counter()
    checker = InvariantChecker()
    run = CoreRun(engine_config(chunked_prefill_size=64), watched(seen, checker), after_step=checker.audit)
    misses = iter([True, False, True, False, False, True])
    run.scheduler.kv.allocation_fault = lambda what: what == kind and next(misses, False)
    for index in range(4):
        run.add(f"r{index}", 50, 20)
    run.run()
    assert seen["claim_failed"] == 3
    assert seen[Guard.ALLOC_MISS] == 3
    assert checker.total_violations == 0


def test_known_lengths_without_a_tree_are_not_bounded_by_input() -> None:
    """The walk that replaces the reference's size tests has no test against the input ledger."""
    checker = InvariantChecker()
    config = engine_config(enable_radix=False, chunked_prefill_size=None, max_prefill_tokens=32)
    seen: Counter[str] = Counter()
    run = CoreRun(config, watched(seen, checker), after_step=checker.audit)
    run.add("first", 4, 2)
    run.add("known", 60, 2, ignore_eos=True)
    run.run()
    assert seen["first_unchunked"]
    assert checker.total_violations == 0


def test_cuts_without_a_tree_are_not_rounded() -> None:
    seen: Counter[str] = Counter()
    checker = InvariantChecker()
    config = engine_config(enable_radix=False, chunked_prefill_size=50)
    run = CoreRun(config, watched(seen, checker), after_step=checker.audit)
    run.add("known", 120, 8, ignore_eos=True)
    run.run()
    assert seen["unaligned"]
    assert checker.total_violations == 0


def test_a_full_pool_parks_and_retracts_without_a_violation() -> None:
    seen: Counter[str] = Counter()
    checker = InvariantChecker()
    config = engine_config(num_pages=13, chunked_prefill_size=32, schedule_conservativeness=0.01, clip_max_new_tokens=1)
    run = CoreRun(config, watched(seen, checker), after_step=checker.audit)
    for index in range(2):
        run.add(f"r{index}", 15, 60)
        run.step()
    run.add("long", 150, 5)
    run.run()
    assert checker.total_violations == 0
    assert seen[Guard.CONTINUATION_PARKED]
    assert seen["retracted"]

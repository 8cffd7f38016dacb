"""Guards: each acts where its page says, is recorded, and the page is current."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from engine.events import AdmissionDecided, AnyEvent, RecordingSink, RequestTransitioned, StepPlanned
from engine.request import Cause
from engine.scheduler.decision import Guard, Reason
from engine.scheduler.guards import GUARDS, PAGE, render
from engine.scheduler.plan import StepKind
from invariants import InvariantChecker
from tests.builders import CoreRun, engine_config


class Kept:
    def __init__(self, *, check: bool = True) -> None:
        self.checker = InvariantChecker() if check else None
        self.record = RecordingSink()

    def emit(self, event: AnyEvent) -> None:
        if self.checker is not None:
            self.checker.emit(event)
        self.record.emit(event)

    @property
    def guards(self) -> Counter[Guard]:
        return Counter(guard for plan in self.plans() for guard in plan.guards)

    def plans(self) -> list[StepPlanned]:
        return [event for event in self.record.events if isinstance(event, StepPlanned)]

    def decisions(self) -> list[AdmissionDecided]:
        return [event for event in self.record.events if isinstance(event, AdmissionDecided)]

    def causes(self) -> Counter[Cause]:
        return Counter(event.cause for event in self.record.events if isinstance(event, RequestTransitioned))


def made(*, check: bool = True, **config: Any) -> tuple[CoreRun, Kept]:
    kept = Kept(check=check)
    return CoreRun(engine_config(**config), kept), kept


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_is_current() -> None:
    assert PAGE.read_text("utf-8") == render(), "run: python -m engine.scheduler.guards"


def test_every_guard_has_one_entry() -> None:
    assert [entry.guard for entry in GUARDS] == list(dict.fromkeys(entry.guard for entry in GUARDS))
    assert {entry.guard for entry in GUARDS} == set(Guard)
    assert all(entry.when and entry.reference and entry.here and entry.worked for entry in GUARDS)


# --- decode rows that fill the slice ----------------------------------------------------------------------------------


def crowded(**scheduler: Any) -> tuple[CoreRun, Kept]:
    """18 requests decode, a long prompt is half through, and the slice is 16 tokens: rem_chunk would be -2."""
    run, kept = made(num_pages=200, chunked_prefill_size=64, **scheduler)
    for index in range(18):
        run.add(f"d{index}", 8, 60)
    while len(run.scheduler.state.live_running) < 18:
        run.step()
    run.add("long", 200, 4)
    run.step()
    # A slice this small cannot be reached by arrivals alone, so it shrinks while they run.
    config = run.scheduler.state.config.model_copy(update={"chunked_prefill_size": 16})
    run.scheduler.state.config = config
    if kept.checker is not None:
        judge = kept.checker._judge
        assert judge is not None
        books = judge.books
        books.config = books.config.model_copy(update={"scheduler": config})
    return run, kept


def test_decodes_and_a_prompt_take_turns() -> None:
    run, kept = crowded()
    first = run.steps
    kinds = []
    while run.scheduler.state.continuation is not None:
        kinds.append(run.step().kind)
    # Fair: the prompt has every second step, the decodes the other, and neither twice in a row.
    assert kinds[:8] == [StepKind.EXTEND, StepKind.DECODE] * 4
    assert all(row.extend_len > 0 for plan in kept.plans() for row in plan.prefills)
    assert kept.guards[Guard.MIXED_SAT_OUT] == kinds.count(StepKind.EXTEND)
    assert run.steps - first <= 2 * (200 // 16 + 1)
    run.run()
    assert kept.checker is not None
    assert kept.checker.total_violations == 0


def test_without_guards_the_piece_is_negative_as_in_the_reference() -> None:
    run, _ = crowded(guards=False, check=False)
    run.scheduler.prepare(run.now_ns)
    plan = run.scheduler.plan(run.now_ns)
    assert [row.extend_len for row in plan.prefills] == [-2]


def test_new_prompts_take_turns_with_decodes_under_exact() -> None:
    """Short prompts keep coming: the decodes still have every second step."""
    run, _ = made(num_pages=200, chunked_prefill_size=24, kv_accounting="exact")
    for index in range(10):
        run.add(f"d{index}", 8, 80)
    while len(run.scheduler.state.live_running) < 10:
        run.step()
    for index in range(20):
        run.add(f"late{index}", 8, 2)
    rows = []
    for _ in range(16):
        plan = run.step()
        rows.append((bool(plan.prefills), bool(plan.decodes)))
    assert rows.count((False, True)) + rows.count((True, True)) >= 8
    assert not any(one == two == (True, False) for one, two in pairwise(rows))
    run.run()


# --- parking ----------------------------------------------------------------------------------------------------------


def squeezed() -> tuple[CoreRun, Kept]:
    """A prompt of 237 gets 7 tokens a step beside one decode row, in a pool of 256 that promised that row nothing."""
    run, kept = made(
        num_pages=256,
        page_size=1,
        chunked_prefill_size=8,
        enable_radix=False,
        schedule_conservativeness=0.01,
        clip_max_new_tokens=1,
    )
    run.add("d", 15, 120)
    while not run.scheduler.state.live_running:
        run.step()
    run.add("long", 237, 2)
    return run, kept


def test_a_continuation_without_pages_is_parked_and_comes_through() -> None:
    run, kept = squeezed()
    run.run()
    parked = [d for d in kept.decisions() if d.reason is Reason.PARKED_BY_GUARD]
    assert kept.guards[Guard.CONTINUATION_PARKED] == len(parked) > 0
    assert all(d.need is not None and d.have is not None and d.need > d.have for d in parked)
    assert all(d.selected_extend == 0 and d.is_continuation for d in parked)
    assert kept.causes()[Cause.LENGTH] == 2


def test_the_last_runner_is_pushed_back_for_a_half_done_prompt() -> None:
    run, kept = squeezed()
    run.run()
    assert kept.guards[Guard.LAST_PUSHED_BACK] == kept.causes()[Cause.RETRACT] == 1
    assert kept.guards[Guard.KV_POOL_EXHAUSTED] == 0
    assert kept.causes()[Cause.LENGTH] == 2


def test_the_last_runner_at_the_wall_ends() -> None:
    run, kept = made(num_pages=4, check=False)
    # The door lets nobody in who could reach the wall: open it wider, as a recorded case may.
    run.scheduler.largest_output = lambda prompt_len: 1 << 30
    run.add("r", 40, 60)
    run.scheduler.state.requests["r"].max_new_tokens = 5
    run.step()
    run.scheduler.state.requests["r"].max_new_tokens = 60
    run.run()
    assert kept.guards[Guard.KV_POOL_EXHAUSTED] == 1
    assert kept.causes()[Cause.KV_POOL_EXHAUSTED] == 1


# --- cuts -------------------------------------------------------------------------------------------------------------


def three_prompts(**scheduler: Any) -> tuple[CoreRun, Kept]:
    """The situation of the recorded case pass/232: 64 whole, 64 of 200, and then 2 of 83."""
    run, kept = made(num_pages=502, chunked_prefill_size=130, enable_radix=False, **scheduler)
    run.add("a", 64, 10)
    run.add("b", 200, 10)
    run.add("c", 83, 10, ignore_eos=True)
    return run, kept


def test_a_second_cut_is_refused() -> None:
    run, kept = three_prompts()
    plan = run.step()
    assert [(row.rid, row.extend_len) for row in plan.prefills] == [("a", 64), ("b", 64)]
    refused = kept.decisions()[-1]
    assert (refused.rid, refused.reason, refused.need, refused.have) == ("c", Reason.CHUNK_SLOT_TAKEN, 83, 2)
    assert kept.guards[Guard.SECOND_CUT] == 1
    run.run()
    assert kept.causes()[Cause.LENGTH] == 3


def test_without_guards_the_first_cut_is_forgotten() -> None:
    run, _ = three_prompts(guards=False, check=False)
    run.scheduler.prepare(run.now_ns)
    plan = run.scheduler.plan(run.now_ns)
    assert [(row.rid, row.extend_len, row.is_last) for row in plan.prefills] == [
        ("a", 64, True), ("b", 64, False), ("c", 2, False),
    ]  # fmt: skip
    assert plan.continuation_after == "c"


# --- never admitted ---------------------------------------------------------------------------------------------------


def lone(**scheduler: Any) -> tuple[CoreRun, Kept]:
    """The largest output that intake lets through, in a walk that wants one token more."""
    run, kept = made(num_pages=38, enable_radix=False, **scheduler)
    assert run.scheduler.largest_output(50) == 527
    run.add("r", 50, 527, ignore_eos=True)
    return run, kept


def test_a_lone_request_that_intake_accepted_is_admitted() -> None:
    run, kept = lone()
    assert run.step().kind is StepKind.IDLE
    refused = kept.decisions()[0]
    assert refused.reason is Reason.KV_TOTAL_EXHAUSTED
    assert not kept.guards  # the first refusal is the reference's own
    assert run.step().prefills
    assert kept.guards[Guard.LONE_REFUSED] == 1
    run.run()
    assert kept.causes()[Cause.LENGTH] == 1


def test_without_guards_it_waits_for_ever() -> None:
    run, kept = lone(guards=False)
    for _ in range(20):
        assert run.step().kind is StepKind.IDLE
    assert len(kept.decisions()) == 20


# --- allocation misses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accounting", ["reference", "exact"])
def test_an_allocation_that_misses_costs_one_step(accounting: str) -> None:
    run, kept = made(num_pages=20, kv_accounting=accounting)
    for index in range(3):
        run.add(f"r{index}", 50, 2)
    misses = iter([True])
    run.scheduler.kv.allocation_fault = lambda _kind: next(misses, False)
    assert run.step().kind is StepKind.IDLE
    assert [request.rid for request in run.scheduler.state.waiting] == ["r0", "r1", "r2"]
    assert [row.rid for row in run.step().prefills] == ["r0", "r1", "r2"]
    assert kept.guards == {Guard.ALLOC_MISS: 1}
    run.run()

"""Exact accounting, number by number: what a request needs, what stays promised, and the field reports under it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from engine.errors import RefusalCause, RequestRefused
from engine.events import AdmissionDecided, AnyEvent, RecordingSink, RequestTransitioned, StepPlanned
from engine.request import Cause
from engine.scheduler.decision import Guard, Reason
from invariants import InvariantChecker
from tests.builders import CoreRun, engine_config
from tests.engine.stub_model import StubRun


class Kept:
    """Checker and recording."""

    def __init__(self) -> None:
        self.checker = InvariantChecker()
        self.record = RecordingSink()

    def emit(self, event: AnyEvent) -> None:
        self.checker.emit(event)
        self.record.emit(event)

    def decisions(self, step: int | None = None) -> list[AdmissionDecided]:
        found = [event for event in self.record.events if isinstance(event, AdmissionDecided)]
        return found if step is None else [event for event in found if event.step == step]

    def plans(self) -> list[StepPlanned]:
        return [event for event in self.record.events if isinstance(event, StepPlanned)]

    def causes(self, cause: Cause) -> int:
        return sum(isinstance(event, RequestTransitioned) and event.cause is cause for event in self.record.events)


def exact(*, num_pages: int, page_size: int, **scheduler: Any) -> tuple[CoreRun, Kept]:
    kept = Kept()
    config = engine_config(num_pages=num_pages, page_size=page_size, kv_accounting="exact", **scheduler)
    return CoreRun(config, kept), kept


# --- what a request needs ---------------------------------------------------------------------------------------------


def test_need_is_the_pages_of_the_longest_kv_and_fits_to_the_last_page() -> None:
    """Prompt 33 and 16 outputs: 48 tokens of K/V, since the last is never written: 3 pages of 16, all there are."""
    run, kept = exact(num_pages=3, page_size=16)
    run.add("r", 33, 16)
    run.step()
    (decision,) = kept.decisions()
    assert (decision.reason, decision.need, decision.have) == (Reason.ADMITTED_WHOLE, 48, 48)
    assert (decision.remaining_total_after, decision.remaining_current_after) == (0, 0)
    assert run.run() > 0
    assert kept.causes(Cause.LENGTH) == 1


def test_one_page_less_is_refused_with_both_sides() -> None:
    run, kept = exact(num_pages=4, page_size=16)
    run.add("a", 33, 16)
    run.add("b", 17, 8)  # 24 tokens: 2 pages, 1 is left
    run.step()
    refused = kept.decisions()[1]
    assert (refused.reason, refused.need, refused.have) == (Reason.KV_TOTAL_EXHAUSTED, 32, 16)
    run.run()


def test_a_cached_prefix_is_not_needed_twice_but_its_lock_is_counted() -> None:
    run, kept = exact(num_pages=6, page_size=16)
    prompt = list(range(100, 164))
    run.add("a", prompt, 1)
    run.run()
    run.add("b", [*prompt, 1, 2, 3], 2)
    run.step()
    decision = kept.decisions()[-1]
    # 68 tokens are 5 pages, 4 of them cached. 96 tokens can be free, 64 of them are the prefix that it locks.
    assert (decision.prefix_len, decision.need, decision.have) == (64, 16, 32)
    assert (decision.remaining_total_after, decision.remaining_current_after) == (16, 16)


def test_growth_of_the_running_is_the_pages_they_do_not_hold_yet() -> None:
    run, kept = exact(num_pages=64, page_size=16, schedule_conservativeness=1.0)
    run.add("known", 20, 41, ignore_eos=True)
    run.add("open", 20, 41)
    run.step()
    run.add("next", 10, 1)
    run.step()
    opened = kept.plans()[-1].budget_open
    assert opened is not None
    # Each holds 2 pages with 20 tokens. known: pages(20 + 40) = 4, 2 to come; open: pages(20 + 40 x 0.7) = 3, 1.
    assert kept.plans()[-1].promised_tokens == 48
    assert opened.remaining_total == (64 - 4 - 3) * 16
    # Neither starts a page with its next token, so riding along they claim nothing now.
    assert opened.remaining_current == (64 - 4) * 16


def test_decode_rows_that_start_a_page_claim_it_now() -> None:
    run, kept = exact(num_pages=64, page_size=16)
    run.add("a", 32, 8)  # K/V of 32 tokens: the next one starts a page
    run.add("b", 20, 8)
    run.step()
    run.add("c", 10, 1)
    run.step()
    opened = kept.plans()[-1].budget_open
    assert opened is not None
    assert opened.remaining_current == (64 - 4) * 16 - 16
    assert (opened.rem_input, opened.rem_chunk) == (8192 - 2, 4096 - 2)


# --- the continuation -------------------------------------------------------------------------------------------------


def test_the_rest_of_a_prompt_stays_promised_and_later_pieces_cost_nothing_more() -> None:
    run, kept = exact(num_pages=20, page_size=16, chunked_prefill_size=64)
    run.add("long", 200, 25)  # 224 tokens: 14 pages
    totals = []
    for _ in range(4):
        run.step()
        plan = kept.plans()[-1]
        assert plan.budget_open is not None
        assert plan.budget_close is not None
        totals.append((plan.budget_open.remaining_total, plan.budget_close.remaining_total))
    assert totals == [(320, 96), (96, 96), (96, 96), (96, 96)]
    assert [d.selected_extend for d in kept.decisions()] == [64, 64, 64, 8]
    assert [d.reserved_new_tokens for d in kept.decisions()] == [25, 0, 0, 0]
    run.run()


def test_a_request_waits_for_what_the_continuation_was_promised() -> None:
    """Reference accounting lets it in here, because only 4 of 14 pages are claimed so far."""
    reasons = {}
    for accounting in ("reference", "exact"):
        kept = Kept()
        config = engine_config(num_pages=20, chunked_prefill_size=96, kv_accounting=accounting)
        run = CoreRun(config, kept)
        run.add("long", 200, 25)
        run.step()
        run.add("other", 100, 10)  # 109 tokens: 7 pages; 6 are not promised
        run.step()
        run.step()
        other = [d for d in kept.decisions() if d.rid == "other"]
        reasons[accounting] = (other[0].reason, other[0].need, other[0].have) if other else None
    assert reasons["exact"] == (Reason.KV_TOTAL_EXHAUSTED, 112, 96)
    assert reasons["reference"] != reasons["exact"]


def test_a_continuation_that_others_outgrew_waits_and_says_why() -> None:
    run, kept = exact(
        num_pages=16, page_size=16, chunked_prefill_size=32, schedule_conservativeness=0.01, enable_radix=False
    )
    for index in range(2):
        run.add(f"r{index}", 28, 60)  # promised 6 pages to begin with, and next to nothing while they run
    run.step()
    run.step()
    run.add("long", 170, 4)  # 11 of the 12 pages left; it is half through when the two need a third page each
    parked = []
    for _ in range(400):
        if not run.has_work:
            break
        run.step()
        parked = parked or [d for d in kept.decisions() if d.is_continuation and not d.selected_extend]
    assert not run.has_work
    assert parked
    assert parked[0].reason is Reason.KV_TOTAL_EXHAUSTED
    assert parked[0].need is not None
    assert parked[0].have is not None
    assert parked[0].need > parked[0].have
    end = next(plan.pass_end for plan in kept.plans() if plan.step == parked[0].step)
    assert end is not None
    assert (end.stopped_by, end.rid) == (Reason.KV_TOTAL_EXHAUSTED, "long")
    assert not any(plan.guards for plan in kept.plans())


# --- the door ---------------------------------------------------------------------------------------------------------


def test_the_whole_pool_may_be_asked_for() -> None:
    run, kept = exact(num_pages=4, page_size=16)
    entered = run.add("all", 60, 100)
    assert entered.max_new_tokens == 5  # 60 + 5 - 1 = 64
    run.run()
    assert kept.causes(Cause.RETRACT) == kept.causes(Cause.KV_POOL_EXHAUSTED) == 0
    with pytest.raises(RequestRefused) as refused:
        run.add("more", 65, 1)
    assert refused.value.cause is RefusalCause.NEVER_FITS


def test_an_input_limit_below_a_page_is_a_typed_error() -> None:
    with pytest.raises(ValidationError, match=r"max_prefill_tokens=8 .*page_size=16"):
        engine_config(kv_accounting="exact", max_prefill_tokens=8)
    engine_config(kv_accounting="exact", max_prefill_tokens=8, chunked_prefill_size=None)


# --- field reports ----------------------------------------------------------------------------------------------------


def test_fr_01_four_pages_take_four_short_prompts() -> None:
    run, kept = exact(num_pages=4, page_size=16, enable_radix=False)
    for index in range(5):
        run.add(f"r{index}", 3, 2)
    assert [row.rid for row in run.step().prefills] == ["r0", "r1", "r2", "r3"]
    assert kept.decisions()[-1].reason is Reason.ADMITTED_WHOLE
    run.step()
    refused = next(d for d in kept.decisions() if d.rid == "r4")
    assert (refused.reason, refused.need, refused.have) == (Reason.KV_TOTAL_EXHAUSTED, 16, 0)
    assert [row.rid for row in run.step().prefills] == ["r4"]
    run.run()


def test_fr_02_every_piece_is_within_its_budgets_and_output_is_the_same() -> None:
    kept = Kept()
    config = engine_config(
        num_pages=460, page_size=1, chunked_prefill_size=16, kv_accounting="exact", schedule_conservativeness=0.05
    )
    box = StubRun(config, kept)
    box.add("L", [40 + i % 50 for i in range(400)], 4)
    box.step()
    box.add("R1", [33 + i % 50 for i in range(20)], 60)
    box.add("R2", [34 + i % 50 for i in range(20)], 60)
    box.run()
    for rid in ("L", "R1", "R2"):
        assert len(box.tokens(rid)) == box.limits[rid]
        box.assert_right_tokens(rid)
    for decision in kept.decisions():
        if decision.selected_extend:
            assert min(decision.remaining_total_after, decision.remaining_current_after) >= 0
    assert kept.causes(Cause.KV_POOL_EXHAUSTED) == 0


def test_fr_06_the_second_long_prompt_waits_for_the_first() -> None:
    run, kept = exact(num_pages=1000, page_size=1, chunked_prefill_size=128, enable_radix=False)
    run.add("a", 700, 50)
    run.add("b", 700, 50)
    run.run()
    computed = sum(row.extend_len for plan in kept.plans() for row in plan.prefills)
    assert computed == 1400
    assert kept.causes(Cause.RETRACT) == 0
    assert {row.rid for plan in kept.plans()[:6] for row in plan.prefills} == {"a"}


def test_fr_24_a_slice_below_a_page_is_shared_by_turns() -> None:
    run, kept = exact(num_pages=200, page_size=16, chunked_prefill_size=24, max_running_requests=16)
    for index in range(10):
        run.add(f"d{index}", 8, 100)
    while len(run.scheduler.state.live_running) < 10:
        run.step()
    start = run.steps
    run.add("p", 100, 4)
    pieces, decode_steps = [], 0
    while not any(row.rid == "p" and row.is_last for plan in kept.plans() for row in plan.prefills):
        plan = run.step()
        pieces += [row.extend_len for row in plan.prefills]
        decode_steps += bool(plan.decodes)
    assert run.steps - start <= 20
    assert pieces == [16] * 5 + [20]
    assert decode_steps >= 5
    sat_out = [plan for plan in kept.plans() if Guard.MIXED_SAT_OUT in plan.guards and plan.step > start]
    assert len(sat_out) == 6
    assert not any(plan.decodes for plan in sat_out)
    run.run()


def test_fr_24_the_input_limit_bounds_pieces_too() -> None:
    run, kept = exact(num_pages=400, page_size=16, max_prefill_tokens=2048, chunked_prefill_size=4096)
    run.add("p", 4096, 2)
    run.run()
    assert [row.extend_len for plan in kept.plans() for row in plan.prefills] == [2048, 2048]
    assert all(plan.budget_close.rem_input >= 0 for plan in kept.plans() if plan.budget_close is not None)


# --- what is evicted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("accounting", "evicted"), [("exact", 2), ("reference", 3)])
def test_an_admission_evicts_the_pages_that_it_lacks(accounting: str, evicted: int) -> None:
    """Eight pages, five cached in leaves of one: three are free, and 80 tokens take five of them."""
    run = CoreRun(engine_config(num_pages=8, page_size=16, kv_accounting=accounting), kept := Kept())
    for number in range(5):
        run.add(f"old{number}", 16, 1)
        run.run()
    assert run.scheduler.kv.pool.counts == (3, 0, 0, 5)
    run.add("new", 80, 1)
    run.step()
    assert run.scheduler.state.evicted_in_step == evicted
    run.run()
    assert kept.checker.total_violations == 0


@pytest.mark.parametrize(("accounting", "evicted"), [("exact", [0, 0, 4]), ("reference", [2, 1, 1])])
def test_decode_rows_evict_only_for_the_pages_that_they_begin(accounting: str, evicted: list[int]) -> None:
    """Eight pages, four of them cached; four prompts of 15 tokens: their second output begins a page each."""
    run = CoreRun(
        engine_config(num_pages=8, page_size=16, kv_accounting=accounting, schedule_conservativeness=0.01),
        kept := Kept(),
    )
    for number in range(4):
        run.add(f"old{number}", 16, 1)
        run.run()
    for number in range(4):
        run.add(f"new{number}", 15, 4)
    seen = []
    for _ in evicted:
        run.step()
        seen.append(run.scheduler.state.evicted_in_step)
    assert seen == evicted
    run.run()
    assert kept.checker.total_violations == 0

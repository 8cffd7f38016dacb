"""Ledgers: a charge is arithmetic on values, and the state says which of the three budgets is spent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.events import AdmissionDecided, RecordingSink, StepPlanned
from engine.scheduler.decision import ADMITTED, VERDICTS, LedgerView, Reason, Result, Verdict
from engine.scheduler.ledgers import Budget, ChunkLedger, ComputeLedger, Cost, KvLedger
from tests.builders import CoreRun, engine_config

small = st.integers(0, 200)
budgets = st.builds(
    Budget,
    st.builds(ComputeLedger, small, small),
    st.builds(ChunkLedger, st.none() | small, small),
    st.builds(KvLedger, small, small, small, st.floats(0, 200, width=16)),
)
costs = st.builds(Cost, small, small, small, small, st.floats(0, 200, width=16))


def numbers(view: LedgerView) -> list[float | None]:
    return [view.rem_input, view.rem_chunk, view.remaining_total, view.remaining_current]


@given(budget=budgets, cost=costs)
def test_a_charge_takes_its_cost_from_each_ledger(budget: Budget, cost: Cost) -> None:
    before = numbers(budget.view())
    after = numbers(budget.charge(cost).view())
    taken = [cost.compute, cost.chunk, cost.pinned + cost.total, cost.pinned + cost.current]
    for old, new, paid in zip(before, after, taken, strict=True):
        assert (old is None) == (new is None)
        if old is not None and new is not None:
            assert abs(old - paid - new) < 1e-9
    assert numbers(budget.view()) == before, "dropping the result is the rollback"


@given(budget=budgets, first=costs, second=costs)
def test_the_order_of_charges_does_not_matter(budget: Budget, first: Cost, second: Cost) -> None:
    one = numbers(budget.charge(first).charge(second).view())
    two = numbers(budget.charge(second).charge(first).view())
    assert all(a == b or (a is not None and b is not None and abs(a - b) < 1e-9) for a, b in zip(one, two, strict=True))


@given(budget=budgets)
def test_the_state_is_the_rule(budget: Budget) -> None:
    view = budget.view()
    if view.remaining_total <= 0 or view.remaining_current <= 0:
        expected = Result.NO_TOKEN
    elif view.rem_input <= 0 or (view.rem_chunk is not None and view.rem_chunk <= 0):
        expected = Result.OTHER
    else:
        expected = Result.CONTINUE
    assert budget.state() is expected


@given(
    page=st.sampled_from([1, 2, 16]),
    clip=st.integers(1, 300),
    prompt=st.integers(1, 300),
    limit=st.integers(1, 300),
    chunk=st.none() | st.integers(16, 200),
)
def test_reference_prices(*, page: int, clip: int, prompt: int, limit: int, chunk: int | None) -> None:
    """Rule book 4e and 4g: need is unrounded; the charge is rounded up, one page more, outputs unless it is cut."""
    sink = RecordingSink()
    settings = engine_config(
        page_size=page, num_pages=4096 // page, clip_max_new_tokens=clip, chunked_prefill_size=chunk
    )
    run = CoreRun(settings, sink)
    run.add("r", prompt, limit)
    run.step()
    one = next(event for event in sink.events if isinstance(event, AdmissionDecided))
    promise = min(limit, clip)
    assert (one.need, one.have) == (prompt + promise + page, 4096)
    extend = one.selected_extend
    if chunk is None or -(-prompt // page) * page <= chunk:
        assert (extend, one.is_chunked) == (prompt, False)
    else:
        assert (extend, one.is_chunked) == (chunk // page * page, True)
    rounded = -(-extend // page) * page
    reserved = 0 if one.is_chunked else promise
    assert one.reserved_new_tokens == reserved
    assert one.rem_input_before - one.rem_input_after == rounded
    if chunk is not None:
        assert one.rem_chunk_before is not None
        assert one.rem_chunk_after is not None
        assert one.rem_chunk_before - one.rem_chunk_after == rounded
    assert one.remaining_current_before - one.remaining_current_after == rounded + page
    assert one.remaining_total_before - one.remaining_total_after == rounded + page + reserved


@pytest.mark.parametrize(("ignore_eos", "promised"), [(True, 50.0), (False, 35.0)])
def test_running_growth_weighs_by_the_ratio_unless_the_length_is_known(ignore_eos: bool, promised: float) -> None:
    """64 outputs less the first are left, clipped to 50; the ratio starts at 0.7."""
    sink = RecordingSink()
    run = CoreRun(engine_config(page_size=1, num_pages=500, clip_max_new_tokens=50), sink)
    run.add("r", 10, 64, ignore_eos=ignore_eos)
    run.step()
    run.step()
    planned = [event for event in sink.events if isinstance(event, StepPlanned)]
    assert planned[1].promised_tokens == pytest.approx(promised)


def test_every_reason_has_a_verdict() -> None:
    assert set(VERDICTS) == set(Reason)
    assert {reason for reason in Reason if reason.verdict is Verdict.ADMIT} == set(ADMITTED)

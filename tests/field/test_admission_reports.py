"""Faults that people reported of public serving engines, each as the smallest scenario that brings out its class.

This file: admission and budgets (FR-01, 02, 04, 05, 06, 07, 09, 10, 24). Numbers that hold only where pages are counted
exactly are left out: under reference accounting what must hold is the end state and the laws.
"""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.errors import RefusalCause, RequestRefused
from engine.events import AdmissionDecided, RecordingSink, StepPlanned
from engine.scheduler.decision import Guard, Reason
from invariants import InvariantChecker
from tests.builders import engine_config
from tests.engine.stub_model import StubRun

#: Steps that an acceptable request may wait on an idle engine.
WAIT_BOUND = 3

pages_1_and_16 = pytest.mark.parametrize("page_size", [1, 16])
mixed_on_and_off = pytest.mark.parametrize("enable_mixed_chunk", [True, False])


def started(config: EngineConfig) -> tuple[StubRun, RecordingSink]:
    sink = RecordingSink()
    return StubRun(config, sink, InvariantChecker()), sink


def prompt(number: int, tokens: int) -> list[int]:
    """A prompt that shares no page with another one's."""
    return [32 + number, *(32 + (number * 7 + i * 3) % 95 for i in range(tokens - 1))]


def plans(sink: RecordingSink) -> list[StepPlanned]:
    return [event for event in sink.events if isinstance(event, StepPlanned)]


def decisions(sink: RecordingSink, step: int | None = None) -> list[AdmissionDecided]:
    found = [event for event in sink.events if isinstance(event, AdmissionDecided)]
    return [event for event in found if step is None or event.step == step]


def computed_tokens(sink: RecordingSink, rid: str | None = None) -> int:
    return sum(row.extend_len for plan in plans(sink) for row in plan.prefills if rid in (None, row.rid))


def retractions(sink: RecordingSink) -> list[str]:
    return [victim.rid for plan in plans(sink) for victim in plan.retractions]


def all_end_well(run: StubRun) -> None:
    run.assert_nothing_held()
    for rid in run.requests:
        run.assert_right_tokens(rid)


def test_fr_01_short_requests_are_priced_in_whole_pages() -> None:
    """Five requests of a page each, four pages: never more than four at once, and no allocation misses."""
    run, sink = started(engine_config(page_size=16, num_pages=4, enable_radix=False))
    for number in range(5):
        run.add(f"r{number}", prompt(number, 3), 2, ignore_eos=False, min_new_tokens=2)
    run.step()
    admitted = [event.rid for event in decisions(sink, 1) if event.selected_extend]
    assert 1 <= len(admitted) <= 4
    refused = [event for event in decisions(sink, 1) if not event.selected_extend]
    if len(decisions(sink, 1)) > len(admitted):
        assert refused[0].reason in {Reason.KV_TOTAL_EXHAUSTED, Reason.KV_NOW_EXHAUSTED}
        assert refused[0].need is not None
        assert refused[0].have is not None
        assert refused[0].need >= refused[0].have
    run.run()
    assert not any(plan.claim_failed for plan in plans(sink))
    assert Guard.ALLOC_MISS not in [guard for plan in plans(sink) for guard in plan.guards]
    all_end_well(run)


@pytest.mark.parametrize("radix", [True, False])
@mixed_on_and_off
def test_fr_02_a_continuation_never_gets_less_than_a_token(enable_mixed_chunk: bool, radix: bool) -> None:
    """Decodes grow into the memory that a half-prefilled prompt counts on: it waits, or somebody is retracted."""
    config = engine_config(
        page_size=1,
        num_pages=460,
        chunked_prefill_size=16,
        enable_mixed_chunk=enable_mixed_chunk,
        enable_radix=radix,
        schedule_conservativeness=0.01,
    )
    run, sink = started(config)
    run.add("L", prompt(0, 400), 4)
    run.step()
    run.add("R1", prompt(1, 20), 60)
    run.add("R2", prompt(2, 20), 60)
    run.run()
    pieces = [row for plan in plans(sink) for row in plan.prefills]
    assert all(row.extend_len >= 1 for row in pieces)
    parked = [event for event in decisions(sink) if event.reason is Reason.PARKED_BY_GUARD]
    assert all(event.need is not None and event.have is not None and event.need > event.have for event in parked)
    all_end_well(run)
    assert {run.end(rid) for rid in run.requests} == {("length", "")}


@pytest.mark.parametrize("ignore_eos", [True, False])
@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_fr_04_an_accepted_request_fits_the_empty_pool(page_size: int, radix: bool, ignore_eos: bool) -> None:
    """The output limit is clamped so that the reservation fits: admitted alone, at once, finished at the wall."""
    run, sink = started(engine_config(page_size=page_size, num_pages=64 // page_size, enable_radix=radix))
    run.add("r", prompt(0, 10), 200, ignore_eos=ignore_eos, min_new_tokens=200)
    for _ in range(WAIT_BOUND):
        run.step()
    assert [event.rid for event in decisions(sink) if event.selected_extend] == ["r"]
    run.run(max_steps=300)
    assert run.end("r") == ("length", "kv_pool_exhausted")
    assert len(run.tokens("r")) == run.limits["r"] < 200
    all_end_well(run)


@pytest.mark.parametrize("radix", [True, False])
@pages_1_and_16
def test_fr_04_every_request_that_intake_takes_is_admitted_by_an_idle_engine(page_size: int, radix: bool) -> None:
    """Whatever the prompt and the output limit: nothing that waits alone waits for ever."""
    for tokens in range(1, 6 * page_size):
        run, _ = started(engine_config(page_size=page_size, num_pages=8, enable_radix=radix))
        if run.engine.scheduler.largest_output(tokens) < 1:
            continue
        run.add("r", prompt(0, tokens), 1000)
        for _ in range(WAIT_BOUND):
            run.step()
        assert run.tokens("r"), f"a prompt of {tokens} tokens waits on an idle engine"


def test_fr_05_a_prompt_without_room_for_its_slack_page_is_refused() -> None:
    """40 tokens are 3 pages, one page is kept as slack: nothing is left of 4, and the refusal names the limit."""
    run, _ = started(engine_config(page_size=16, num_pages=4))
    with pytest.raises(RequestRefused, match="KV pool of 64 tokens") as refused:
        run.add("r", prompt(0, 40), 60)
    assert refused.value.cause is RefusalCause.NEVER_FITS
    assert not run.engine.has_work


@pytest.mark.parametrize("ignore_eos", [True, False])
@pytest.mark.parametrize("radix", [True, False])
def test_fr_05_a_lone_request_ends_at_the_wall(radix: bool, ignore_eos: bool) -> None:
    """Prompt fits, prompt and output do not: one end, no second prefill, and the next request is served."""
    run, sink = started(engine_config(page_size=16, num_pages=6, enable_radix=radix))
    run.add("r", prompt(0, 40), 60, ignore_eos=ignore_eos, min_new_tokens=60)
    run.run(max_steps=200)
    assert run.end("r") == ("length", "kv_pool_exhausted")
    assert computed_tokens(sink) <= 2 * 40
    assert len(retractions(sink)) <= 1
    run.add("s", prompt(1, 10), 3)
    run.run()
    assert run.end("s") == ("length", "")
    all_end_well(run)


@pages_1_and_16
@pytest.mark.parametrize("radix", [True, False])
def test_fr_06_two_long_prompts_do_not_throw_each_other_out(page_size: int, radix: bool) -> None:
    """The second is started only when it can be finished: next to nothing is computed twice."""
    config = engine_config(
        page_size=page_size, num_pages=1000 // page_size, chunked_prefill_size=128, enable_radix=radix
    )
    run, sink = started(config)
    run.add("a", prompt(0, 700), 50)
    run.add("b", prompt(1, 700), 50)
    run.run()
    assert computed_tokens(sink) <= 1.2 * 1400
    gone = retractions(sink)
    assert all(gone.count(rid) <= 1 for rid in ("a", "b"))
    all_end_well(run)


def test_fr_06_a_retraction_raises_the_new_token_ratio() -> None:
    """After a retraction less is promised than hoped: the ratio of the following steps is higher."""
    config = engine_config(page_size=1, num_pages=60, enable_radix=True, schedule_conservativeness=0.01)
    run, sink = started(config)
    for number in range(4):
        run.add(f"r{number}", prompt(number, 5), 30, ignore_eos=False, min_new_tokens=30)
    run.run()
    found = [index for index, plan in enumerate(plans(sink)) if plan.retractions]
    assert found, "the scenario must retract"
    before, after = plans(sink)[found[0] - 1], plans(sink)[found[0]]
    assert after.new_token_ratio > before.new_token_ratio
    all_end_well(run)


@pages_1_and_16
@pytest.mark.parametrize("chunk", [None, 64])
def test_fr_07_a_prompt_that_is_wholly_cached_computes_one_token(page_size: int, chunk: int | None) -> None:
    """At least one token is computed; cached and computed are the prompt; outputs are those without a cache."""
    run, sink = started(engine_config(page_size=page_size, num_pages=1024 // page_size, chunked_prefill_size=chunk))
    base = prompt(0, 40)
    for rid, length in (("first", 32), ("second", 32), ("longer", 33), ("shorter", 31)):
        run.add(rid, base[:length], 3)
        run.run()
    run.add("twin1", base[:32], 3)
    run.add("twin2", base[:32], 3)
    run.run()
    for event in decisions(sink):
        if event.selected_extend:
            assert event.selected_extend >= 1
            assert event.prefix_len + event.selected_extend == len(run.requests[event.rid].prompt_ids)
    by_rid = {event.rid: event.prefix_len for event in decisions(sink) if event.selected_extend}
    assert by_rid["second"] == (31 if page_size == 1 else 16)
    all_end_well(run)


def test_fr_09_the_input_budget_is_spent() -> None:
    """Chunking off: 40 + 40 of 100; the third would need 40 of the 20 left."""
    run, sink = started(engine_config(page_size=1, num_pages=4096, chunked_prefill_size=None, max_prefill_tokens=100))
    for number in range(5):
        run.add(f"r{number}", prompt(number, 40), 2)
    run.step()
    first = decisions(sink, 1)
    assert [event.rid for event in first if event.selected_extend] == ["r0", "r1"]
    assert (first[2].reason, first[2].rem_input_before, first[2].need) == (Reason.COMPUTE_EXHAUSTED, 20, 40)
    assert [event.rem_input_after for event in first] == [60, 20, 20]
    run.run()
    all_end_well(run)


def test_fr_09_with_chunks_the_third_gets_what_is_left() -> None:
    run, sink = started(engine_config(page_size=1, num_pages=4096, chunked_prefill_size=100, max_prefill_tokens=100))
    for number in range(5):
        run.add(f"r{number}", prompt(number, 40), 2)
    run.step()
    assert [(event.rid, event.selected_extend) for event in decisions(sink, 1)] == [("r0", 40), ("r1", 40), ("r2", 20)]
    run.run()
    all_end_well(run)


@pages_1_and_16
@mixed_on_and_off
def test_fr_10_free_slots_are_used(page_size: int, enable_mixed_chunk: bool) -> None:
    """Nothing but rows limits: all four run before any of them ends."""
    config = engine_config(
        page_size=page_size,
        num_pages=4096 // page_size,
        chunked_prefill_size=64,
        max_running_requests=4,
        enable_mixed_chunk=enable_mixed_chunk,
    )
    run, _ = started(config)
    for number in range(4):
        run.add(f"r{number}", prompt(number, 60), 50)
    for _ in range(10):
        run.step()
        assert not any(run.end(rid) for rid in run.requests)
    assert len(run.state.live_running) == 4
    run.run()
    all_end_well(run)


@pages_1_and_16
@pytest.mark.parametrize("chunk", [None, 64])
def test_fr_10_requests_that_end_at_their_prefill_free_the_slots(page_size: int, chunk: int | None) -> None:
    config = engine_config(
        page_size=page_size, num_pages=4096 // page_size, chunked_prefill_size=chunk, max_running_requests=2
    )
    run, _ = started(config)
    for number in range(7):
        run.add(f"r{number}", prompt(number, 10), 1)
    steps = run.run(max_steps=30)
    assert steps <= 12
    assert all(run.end(rid) == ("length", "") for rid in run.requests)
    all_end_well(run)


def test_fr_10_a_full_flag_does_not_outlive_its_reason() -> None:
    """Memory refuses one request and sets the flag; an abort of a waiting request, or a cache that has become
    evictable, gives room without any running request ending: admission goes on within a few steps."""
    config = engine_config(page_size=1, num_pages=200, max_running_requests=8, chunked_prefill_size=64)
    run, sink = started(config)
    run.add("keeps", prompt(0, 20), 150)
    run.step()
    run.step()
    run.add("big", prompt(1, 100), 60)
    run.step()
    assert decisions(sink)[-1].reason is Reason.KV_TOTAL_EXHAUSTED
    run.add("small", prompt(2, 5), 2)
    run.engine.abort_request("big")
    for _ in range(5):
        run.step()
    assert run.end("small") is not None, "a small request waits behind a flag whose reason is gone"
    run.run()
    all_end_well(run)


def test_fr_10_a_latched_flag_falls_with_the_first_end() -> None:
    """The flag is set while L is charged its whole output, which later weighs only the ratio: the reference keeps it.

    Legal, but no longer than until anybody leaves, and the record names the flag and the one who waits.
    """
    config = engine_config(page_size=1, num_pages=240, chunked_prefill_size=64, enable_mixed_chunk=False)
    run, sink = started(config)
    run.add("K", prompt(0, 10), 20, ignore_eos=False, min_new_tokens=20)
    run.step()
    run.step()
    run.add("L", prompt(1, 60), 120, ignore_eos=False, min_new_tokens=120)
    run.add("W", prompt(2, 10), 40)
    run.step()
    assert decisions(sink)[-1].reason is Reason.KV_TOTAL_EXHAUSTED
    while run.end("K") is None:
        run.step()
        end = plans(sink)[-1].pass_end
        assert end is not None
        if not run.tokens("W"):
            assert (end.stopped_by, end.rid) == (Reason.FULL_FLAG_SET, "W")
    for _ in range(WAIT_BOUND):
        run.step()
    assert run.tokens("W")
    run.run()
    all_end_well(run)


@mixed_on_and_off
@pytest.mark.parametrize(
    ("page_size", "chunk", "decodes", "tokens"),
    [
        pytest.param(16, 24, 9, 5, id="less than a page is left"),
        pytest.param(1, 16, 16, 1, id="nothing is left"),
    ],
)
def test_fr_24_decodes_that_eat_the_slice_do_not_stop_a_prompt(
    page_size: int, chunk: int, decodes: int, tokens: int, enable_mixed_chunk: bool
) -> None:
    """(a) Decode tokens count in the same budget, and what they leave is below a page as long as they run."""
    config = engine_config(
        page_size=page_size,
        num_pages=16384 // page_size,
        chunked_prefill_size=chunk,
        max_running_requests=32,
        enable_mixed_chunk=enable_mixed_chunk,
    )
    run, sink = started(config)
    for number in range(decodes):
        run.add(f"d{number}", prompt(number, tokens), 300)
    for _ in range(20):
        run.step()
    assert len(run.state.live_running) == decodes
    run.add("L", prompt(50, 100), 4)
    arrived = run.engine.steps_done
    while not run.tokens("L"):
        run.step()
        assert run.engine.steps_done - arrived <= 320, "the queue does not move although decodes ended"
    if not enable_mixed_chunk:
        assert run.engine.steps_done - arrived <= 20
    # Reference accounting: a wait, with its reason in the record, until fewer decode; nobody is admitted meanwhile.
    waits = [plan.pass_end for plan in plans(sink)[arrived:] if not plan.prefills and plan.pass_end is not None]
    reasons = {end.stopped_by for end in waits if end.rid == "L"}
    assert reasons <= {Reason.CHUNK_BELOW_PAGE, Reason.CHUNK_EXHAUSTED}
    run.run()
    all_end_well(run)


def test_fr_24_a_chunk_below_a_page_is_refused_at_the_start() -> None:
    """(b)"""
    with pytest.raises(ValueError, match=r"chunked_prefill_size=8 is below cache\.page_size=16"):
        engine_config(page_size=16, chunked_prefill_size=8)


@pages_1_and_16
def test_fr_24_a_chunk_above_the_input_budget_completes(page_size: int) -> None:
    """(c) The chunk bounds the piece; the record names the overdraft of the input budget."""
    config = engine_config(
        page_size=page_size, num_pages=8192 // page_size, chunked_prefill_size=4096, max_prefill_tokens=2048
    )
    run, sink = started(config)
    run.add("L", prompt(0, 4096), 2)
    run.run()
    over = [event for event in decisions(sink) if event.rem_input_after < 0]
    assert all("input_by_chunk" in event.overdrafts for event in over)
    assert run.end("L") == ("length", "")
    all_end_well(run)

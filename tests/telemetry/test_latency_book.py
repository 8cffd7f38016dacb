"""The latency book: parts add up over many requests as over one, and what is sent is bounded and says what it left."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.clock import VirtualClock
from engine.config import EngineConfig
from telemetry import latency_book as book
from telemetry.observe import BLOCKERS, TTFT_PARTS, LatencyBreakdown
from telemetry.read_model import ReadModel
from tests.builders import engine_config
from tests.telemetry.live_run import MS, TimedRun, busy, configs, operations, play

LATE_NS = 3 * MS


def watched(config: EngineConfig) -> tuple[VirtualClock, ReadModel, TimedRun]:
    clock = VirtualClock()
    model = ReadModel(clock=clock, objectives=book.Objectives(ttft_ns=20 * MS, gap_ns=LATE_NS))
    return clock, model, TimedRun(config, model)


def asked(clock: VirtualClock, model: ReadModel, run: TimedRun) -> LatencyBreakdown:
    clock.advance_ns(max(run.now_ns - clock.now_ns(), 0))
    return model.breakdown()


def adds_up(answer: LatencyBreakdown) -> None:
    """Every sum of parts is the TTFT it came from, to the nanosecond."""
    for sums in (*answer.slots, *answer.tails):
        assert sum(sums.parts_ns.values()) == sums.ttft_ns
        assert sum(sums.blockers_ns.values()) == sums.parts_ns.get("queue", 0) + sums.refused_between_ns
        assert sum(sums.order_ns.values()) == sums.blockers_ns.get("order", 0)
    assert sum(answer.gap_counts) == answer.gaps == sum(slot.gaps for slot in answer.slots)
    assert answer.late == dict(sum((Counter(slot.late) for slot in answer.slots), Counter()))
    assert sum(decile.count for decile in answer.deciles) == answer.firsts_total
    assert all(one.prompt_to < two.prompt_from for one, two in itertools.pairwise(answer.deciles))


@given(config=configs, ops=operations)
@settings(max_examples=30)
def test_parts_and_blockers_add_up_in_every_slot_and_tail(config: EngineConfig, ops: list[tuple[object, ...]]) -> None:
    clock, model, run = watched(config)
    play(run, ops)
    answer = asked(clock, model, run)
    adds_up(answer)
    assert answer.firsts_total == sum(slot.count for slot in answer.slots)


def test_they_add_up_under_pressure_with_retractions_too() -> None:
    retracted = 0
    for seed in range(6):
        config, ops = busy(seed)
        clock, model, run = watched(config)
        play(run, ops)
        adds_up(asked(clock, model, run))
        retracted += model.totals["retractions"]
    assert retracted > 0


def test_a_request_counts_at_its_first_token_and_emit_joins_at_its_first_byte() -> None:
    clock = VirtualClock()
    model = ReadModel(clock=clock, expects_responses=True)
    run = TimedRun(engine_config(page_size=1, chunked_prefill_size=16), model)
    run.add("short", 4, 2, ignore_eos=True)
    run.add("long", 4, 20, ignore_eos=True)
    for _ in range(6):
        run.timed_step()
    before = asked(clock, model, run)
    adds_up(before)
    assert before.firsts_total == sum(point.ttft_count for point in model.latency().points) == 2
    model.first_byte("long", run.now_ns + 5 * MS)
    after = asked(clock, model, run)
    adds_up(after)
    assert after.firsts_total == 2
    rows = [*model.requests(9).live, *model.requests(9).finished]
    assert max(after.tails, key=lambda tail: tail.q).ttft_s == max(row.ttft_s or 0 for row in rows)
    assert after.slots[0].parts_ns["emit"] == after.slots[0].ttft_ns - before.slots[0].ttft_ns > 0


def test_a_late_token_is_counted_under_the_cause_that_the_request_s_lane_names() -> None:
    clock, model, run = watched(engine_config(page_size=1, chunked_prefill_size=16, enable_mixed_chunk=True))
    run.add("decodes", 4, 20, ignore_eos=True)
    for _ in range(3):
        run.timed_step()
    run.add("long", 12, 2, ignore_eos=True)
    run.timed_step((0, 0, 0, 0, 0, 10 * MS, 0))
    run.timed_step()
    answer = asked(clock, model, run)
    assert answer.late == {"long_prefill": 1}
    found = model.request("decodes")
    assert found is not None
    assert found.lane is not None
    (stall,) = found.lane.stalls
    assert (stall.cause, stall.end_ns - stall.start_ns) == ("long_prefill", 10 * MS)


def test_a_gap_falls_in_the_bucket_whose_bound_it_does_not_exceed() -> None:
    told = book.LatencyBook(book.Objectives())
    for gap_ns in (100_000, 100_001, 150_000, 100_000_000_001):
        told.gaps(10**12, gap_ns, 1, queued=False)
    counts = told.histogram(10**12)
    assert (counts[0], counts[1], counts[-1], sum(counts)) == (1, 2, 1, 4)


def test_what_is_older_than_the_window_is_gone() -> None:
    told = book.LatencyBook(book.Objectives())
    told.gaps(10**9, MS, 3, queued=False)
    now_ns = 10**9 + book.WINDOW_NS + book.SLOT_NS
    assert sum(told.histogram(now_ns)) == 0
    assert told.slots(now_ns, float) == []


def first(at: int, prompt_len: int = 10, ttft_ns: int = MS, part: int = 3) -> book.First:
    parts = [0] * len(TTFT_PARTS)
    parts[part] = ttft_ns
    return book.First(at, f"r{at}", prompt_len, 0, ttft_ns, tuple(parts), (0,) * len(BLOCKERS), 0)


@given(st.lists(st.integers(1, 10**10), min_size=1, max_size=300))
@settings(max_examples=50)
def test_a_sample_is_bounded_ordered_and_keeps_the_slowest_hundredth(times: list[int]) -> None:
    firsts = [first(at, ttft_ns=ttft_ns) for at, ttft_ns in enumerate(times)]
    kept = book.sample(firsts, 40)
    assert len(kept) == min(len(firsts), 40)
    assert [one.at_ns for one in kept] == sorted({one.at_ns for one in kept})
    slowest = max(firsts, key=lambda one: one.ttft_ns)
    assert slowest.ttft_ns in {one.ttft_ns for one in kept}


@given(st.lists(st.integers(1, 30), min_size=1, max_size=120))
@settings(max_examples=50)
def test_deciles_part_the_requests_and_never_one_length(lengths: list[int]) -> None:
    firsts = [first(at, prompt_len=length) for at, length in enumerate(lengths)]
    groups = book.deciles(firsts, MS)
    assert len(groups) <= book.DECILES
    assert sum(group.count for group in groups) == len(lengths)
    assert all(one.prompt_to < two.prompt_from for one, two in itertools.pairwise(groups))
    assert all(group.within == group.count for group in groups)


def test_deciles_are_ten_where_lengths_allow() -> None:
    lengths = [at // 3 for at in range(350)]
    groups = book.deciles([first(at, prompt_len=length) for at, length in enumerate(lengths)], MS)
    assert len(groups) == book.DECILES
    assert all(33 <= group.count <= 38 for group in groups)


def test_the_tail_is_of_those_at_or_above_the_quantile() -> None:
    firsts = [first(at, ttft_ns=(at + 1) * MS) for at in range(200)]
    everyone, tenth, hundredth = book.tails(firsts)
    assert (everyone.q, everyone.count, everyone.ttft_s) == (0.0, 200, 0.001)
    assert (tenth.count, tenth.ttft_s) == (21, 0.18)
    assert (hundredth.count, hundredth.ttft_s) == (3, 0.198)
    assert book.tails([]) == []


@pytest.mark.parametrize(
    ("part", "blockers", "expected"),
    [(3, {}, ("chunk_forward", None)), (1, {"kv_total": 2, "order": 5}, ("queue", "order"))],
)
def test_the_dominant_cause_names_the_blocker_of_a_queue(
    part: int, blockers: dict[str, int], expected: tuple[str, str | None]
) -> None:
    held = tuple(blockers.get(name, 0) for name in BLOCKERS)
    told = book.first_token(first(1, part=part)._replace(blockers=held), 5.0)
    assert (told.part, told.blocker) == expected


def test_memory_is_bounded_however_many_there_were() -> None:
    told = book.LatencyBook(book.Objectives(gap_ns=1))
    for at in range(12_000):
        told.keep(first(at))
        told.gaps(at * book.SLOT_NS, 10, 1, queued=True)
    assert len(told._firsts) == book.KEPT_FIRSTS
    assert len(told._slots) == book.SLOTS
    assert len(told._late) == book.KEPT_LATE


def test_who_waits_beyond_a_quantile_is_counted_among_all_not_among_those_that_are_sent() -> None:
    """620 requests behind one row: an answer about requests has 500 of them, the count has all."""
    clock = VirtualClock()
    model = ReadModel(clock=clock)
    run = TimedRun(engine_config(num_pages=4096, page_size=1, max_running_requests=1), model)
    for number in range(620):
        run.add(f"r{number}", 4, 2, ignore_eos=True)
    for _ in range(12):
        run.timed_step()
    answer = asked(clock, model, run)
    rows = model.requests(5_000)
    assert len(model.requests(500).live) == 500
    for tail in answer.tails:
        beyond = [row for row in rows.live if row.ttft_s is None and rows.t_wall_s - row.accepted_wall_s > tail.ttft_s]
        assert tail.waiting_longer == len(beyond) > 500
    assert answer.recent is not None
    assert answer.recent.waiting_longer == next(tail for tail in answer.tails if tail.q == 0.99).waiting_longer


@given(config=configs, ops=operations)
@settings(max_examples=20)
def test_the_latest_minute_is_the_same_from_the_book_as_from_the_requests(
    config: EngineConfig, ops: list[tuple[object, ...]]
) -> None:
    clock, model, run = watched(config)
    play(run, ops)
    recent, rows = asked(clock, model, run).recent, model.requests(5_000)
    assert recent is not None
    assert recent.window_s == 60.0
    since = rows.t_wall_s - recent.window_s
    # An id may be used again; the book counts each use, the answer about requests has the last of them.
    seen = sorted(
        row.ttft_s
        for row in (*rows.live, *rows.finished)
        if row.ttft_s is not None and row.accepted_wall_s + row.ttft_s > since
    )
    if len(seen) == recent.count and seen:
        assert recent.p99_s == pytest.approx(seen[-(-99 * len(seen) // 100) - 1])
        assert recent.p50_s == pytest.approx(seen[-(-len(seen) // 2) - 1])
    assert (recent.p99_s is None) is (recent.count == 0)
    assert recent.queue_share is None or 0 <= recent.queue_share <= 1

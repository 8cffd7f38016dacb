"""The read model shows what the engine is: queue with causes, passes with ledgers, latencies, pages by owner."""

from __future__ import annotations

import base64
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.events import AdmissionDecided, StepPlanned
from engine.kvcache.snapshot import KvSnapshot
from engine.scheduler.decision import Reason
from telemetry.latency_ring import SLOTS, LatencyRing, quantile
from telemetry.observe import BLOCKERS, PAGE_STATES, QueueEntry
from telemetry.read_model import KEPT_FINISHED, KEPT_STEPS, NotStarted, ReadModel
from tests.builders import engine_config
from tests.telemetry.live_run import MS, TimedRun, busy, configs, operations, play


class Watched:
    """A run with a read model."""

    def __init__(self, config: EngineConfig | None = None, *, expects_responses: bool = False) -> None:
        self.clock = VirtualClock()
        self.model = ReadModel(clock=self.clock, expects_responses=expects_responses)
        self.run = TimedRun(config or engine_config(), self.model)

    def tick(self) -> None:
        """Bring the clock of the readers up to the engine's."""
        self.clock.advance_ns(max(self.run.now_ns - self.clock.now_ns(), 0))

    def entries(self) -> dict[str, QueueEntry]:
        self.tick()
        return {entry.rid: entry for entry in self.model.queue(500).entries}


def _same_pool(watched: Watched) -> None:
    """The page map, told by events, is the pool itself."""
    kv: KvSnapshot = watched.run.scheduler.snapshot().kv
    shown = watched.model.page_map()
    assert base64.b64decode(shown.states_b64) == kv.states
    counts = shown.counts
    assert (counts.free, counts.private, counts.protected, counts.evictable) == kv.counts
    index = np.frombuffer(base64.b64decode(shown.owners_b64), dtype="<u2")
    owners = np.frombuffer(kv.owners, dtype="<i8")
    rid_of_row = {lease.row: lease.rid for lease in kv.leases}
    locks = {node.node: node.lock_count for node in kv.nodes}
    for page, place in enumerate(index):
        state = PAGE_STATES[kv.states[page]]
        if state == "free":
            assert place == 0
            continue
        owner = shown.owners[place - 1]
        assert owner.state == state
        if state == "private":
            assert (owner.owner, owner.label) == (f"r:{owners[page]}", rid_of_row[int(owners[page])])
        else:
            assert owner.owner == f"n:{owners[page]}"
            assert owner.lock_count == len(owner.holders) == locks[int(owners[page])]
    held = Counter(index.tolist())
    assert [owner.pages for owner in shown.owners] == [held[at + 1] for at in range(len(shown.owners))]
    assert shown.owners_total == len(shown.owners)


@given(config=configs, ops=operations)
@settings(max_examples=40)
def test_the_page_map_and_the_queue_equal_the_engine_s_own(config: EngineConfig, ops: list[tuple[object, ...]]) -> None:
    watched = Watched(config)
    play(watched.run, ops, check=lambda: _agrees(watched))


def test_they_are_equal_under_pressure_too() -> None:
    for seed in range(8):
        config, ops = busy(seed)
        watched = Watched(config)
        faults = random.Random(seed)
        watched.run.scheduler.kv.allocation_fault = lambda _caller, faults=faults: faults.random() < 0.05
        play(watched.run, ops, check=lambda watched=watched: _agrees(watched))


def _agrees(watched: Watched) -> None:
    _same_pool(watched)
    entries = watched.entries()
    waiting = watched.run.scheduler.state.waiting
    assert set(entries) == {request.rid for request in waiting}
    answer = watched.model.queue(500)
    assert answer.total == sum(answer.by_blocker.values()) == len(waiting)
    assert Counter(entry.blocker for entry in entries.values()) == answer.by_blocker
    assert [entry.position for entry in entries.values()] == list(range(len(entries)))
    overtakes = watched.run.scheduler.state.overtakes
    assert {rid: entry.times_passed_over for rid, entry in entries.items()} == {
        request.rid: overtakes.count(request) for request in waiting
    }, "the engine's own count, also of those that no pass looked at"
    for entry in entries.values():
        if entry.blocker != "engine_busy":
            assert entry.reason is not None
        if entry.reason in {"kv_now_exhausted", "kv_total_exhausted"} and entry.need is not None:
            # The reference's own test: admitted only with more room than needed.
            assert entry.have is not None
            assert entry.need >= entry.have
    status = watched.model.status()
    assert status.waiting == len(waiting)
    assert status.running == len(watched.run.scheduler.state.requests) - len(waiting)
    detail = [watched.model.request(request.rid) for request in waiting]
    assert all(d is not None and d.queue == entries[d.request.rid] for d in detail)


# Each limit binds alone, and one request waits at it.


def _held(watched: Watched, rid: str = "waits") -> QueueEntry:
    watched.run.timed_step()
    return watched.entries()[rid]


def test_fr_33_a_request_held_by_the_rows_says_so() -> None:
    watched = Watched(engine_config(max_running_requests=1))
    watched.run.add("runs", 8, 50, ignore_eos=True)
    watched.run.timed_step()
    watched.run.add("waits", 8, 4)
    entry = _held(watched)
    assert (entry.blocker, entry.reason) == ("rows", "rows_exhausted")
    watched.run.now_ns += 5_000 * MS
    assert watched.entries()["waits"].age_s == pytest.approx(5.001)


def test_fr_33_a_request_held_by_its_future_names_need_and_have() -> None:
    watched = Watched(engine_config(num_pages=20, page_size=4))
    watched.run.add("runs", 30, 30, ignore_eos=True)
    watched.run.timed_step()
    watched.run.add("waits", 30, 10)
    entry = _held(watched)
    assert (entry.blocker, entry.reason) == ("kv_total", "kv_total_exhausted")
    assert entry.need is not None
    assert entry.have is not None
    assert entry.need >= entry.have
    assert entry.last_evaluated_step == 2
    watched.run.timed_step()
    assert watched.entries()["waits"].blocker == "kv_total", "a latched full flag does not hide what filled it"


def test_each_step_at_the_full_flag_knows_the_refusal_that_set_it() -> None:
    watched = Watched(engine_config(num_pages=20, page_size=4))
    watched.run.add("runs", 30, 30, ignore_eos=True)
    watched.run.timed_step()
    watched.run.add("waits", 30, 10)
    for _ in range(4):
        watched.run.timed_step()
    refused, *later = watched.model.passes(4).passes
    assert (refused.end_reason, refused.full_by, refused.full_since) == ("kv_total_exhausted", None, None)
    assert {(row.end_reason, row.full_by, row.full_since) for row in later} == {
        ("full_flag_set", "kv_total_exhausted", refused.step)
    }
    # What is asked for may begin after the refusal.
    assert watched.model.passes(1).passes[0].full_by == "kv_total_exhausted"


def test_fr_33_requests_behind_the_stopper_are_held_by_the_order_and_know_who_stopped() -> None:
    watched = Watched(engine_config(num_pages=20, page_size=4))
    watched.run.add("runs", 30, 30, ignore_eos=True)
    watched.run.timed_step()
    for rid in ("waits", "behind", "last"):
        watched.run.add(rid, 30, 10)
    _held(watched)
    entries = watched.entries()
    assert [(rid, e.blocker) for rid, e in entries.items()] == [
        ("waits", "kv_total"),
        ("behind", "order"),
        ("last", "order"),
    ]
    assert entries["last"].who_stopped == "waits"
    assert entries["last"].reason == "kv_total_exhausted"
    assert entries["last"].last_evaluated_step is None


def test_fr_33_the_order_is_split_by_what_ended_the_passes_and_steps_without_one() -> None:
    watched = Watched(engine_config(num_pages=20, page_size=4, schedule_policy="fcfs"))
    watched.run.add("runs", 30, 12, ignore_eos=True)
    watched.run.timed_step()
    for rid in ("first", "behind"):
        watched.run.add(rid, 30, 10, ignore_eos=True)
    for _ in range(6):
        watched.run.timed_step()
    watched.tick()
    told = watched.model.explain("behind")
    assert told is not None
    waited = next(line for line in told.sentences if line.startswith("That has held it"))
    assert "ended by KV total exhausted; no pass in 5 more steps, still for KV total exhausted" in waited
    watched.run.finish_all()
    detail = watched.model.request("behind")
    assert detail is not None
    assert sum(detail.timeline.order_ns.values()) == detail.timeline.blockers_ns["order"]
    assert max(detail.timeline.order_ns, key=detail.timeline.order_ns.__getitem__) == "kv_total_exhausted"
    stretches = [wait for wait in detail.timeline.waits if wait.blocker == "order"]
    assert all(sum(by.ns for by in one.ended_by) == one.end_ns - one.start_ns for one in stretches)
    after = watched.model.explain("behind")
    assert after is not None
    assert any("tokens in all" in line for line in after.sentences)


def test_fr_33_a_request_that_nobody_has_looked_at_yet_waits_for_the_engine() -> None:
    watched = Watched()
    watched.run.add("new", 8, 4)
    entry = watched.entries()["new"]
    assert (entry.blocker, entry.reason, entry.passes_waited) == ("engine_busy", None, 0)


def test_fr_33_a_spent_budget_holds_the_next_one() -> None:
    watched = Watched(engine_config(max_prefill_tokens=16, chunked_prefill_size=None))
    watched.run.add("fills", 16, 4)
    watched.run.add("waits", 16, 4)
    entry = _held(watched)
    assert (entry.blocker, entry.reason, entry.who_stopped) == ("order", "compute_exhausted", "fills")


def test_fr_33_a_prompt_that_takes_the_whole_slice_holds_the_next_one() -> None:
    watched = Watched(engine_config(page_size=4, num_pages=200, chunked_prefill_size=16, max_prefill_tokens=64))
    watched.run.add("long", 60, 4)
    watched.run.add("waits", 40, 4)
    entry = _held(watched)
    assert (entry.blocker, entry.reason, entry.who_stopped) == ("order", "chunk_exhausted", "long")


# Passes, latencies, bounds.


def test_a_pass_shows_the_ledgers_of_each_candidate() -> None:
    watched = Watched(engine_config(max_prefill_tokens=128, chunked_prefill_size=96))
    watched.run.add("a", 160, 4)
    watched.run.add("b", 16, 4)
    watched.run.timed_step()
    (row,) = watched.model.passes(8).passes
    plan = next(e for e in watched.run.recorded.events if isinstance(e, StepPlanned))
    decided = [e for e in watched.run.recorded.events if isinstance(e, AdmissionDecided)]
    assert [c.rid for c in row.candidates] == [d.rid for d in decided]
    first = row.candidates[0]
    assert (first.before.rem_input, first.before.rem_chunk) == (128, 96)
    assert first.after.rem_chunk == decided[0].rem_chunk_after
    assert (first.selected_extend, first.is_chunked, first.admitted) == (96, True, True)
    assert row.limits.rem_input == 128
    assert row.limits.rem_chunk == 96
    assert plan.pass_end is not None
    assert (row.end_reason, row.end_rid, row.not_considered) == (
        plan.pass_end.stopped_by,
        plan.pass_end.rid,
        plan.pass_end.not_considered,
    )
    assert row.step_s == 0.001
    assert row.prefill_tokens == 96


def test_fr_49_memory_is_bounded_by_steps_finished_requests_and_seconds() -> None:
    watched = Watched(engine_config(num_pages=100, page_size=16))
    for at in range(KEPT_FINISHED + 40):
        watched.run.add(f"r{at}", 4, 2)
        if at % 16 == 0:
            watched.run.finish_all((0, 0, 0, 0, 0, 700 * MS, 0))
    watched.run.finish_all()
    while watched.run.steps <= KEPT_STEPS:
        watched.run.add(f"s{watched.run.steps}", 4, 2)
        watched.run.finish_all((0, 0, 0, 0, 0, 2_500 * MS, 0))
    watched.tick()
    model = watched.model
    assert len(model.passes(KEPT_STEPS).passes) == KEPT_STEPS
    answer = model.requests(5_000)
    assert len(answer.finished) == KEPT_FINISHED
    assert not answer.live
    assert answer.finished[0].accepted_wall_s >= answer.finished[-1].accepted_wall_s
    assert model.request("r0") is None
    assert model.request(answer.finished[-1].rid) is not None
    assert len(model.latency().points) <= SLOTS


def test_latency_points_show_quantiles_rates_and_quiet_seconds() -> None:
    watched = Watched()
    watched.run.add("a", 8, 20, ignore_eos=True)
    for _ in range(20):
        watched.run.timed_step((0, 0, 0, 0, 0, 10 * MS, 0))
    watched.run.now_ns += 3_000 * MS
    watched.tick()
    points = watched.model.latency().points
    assert [point.tokens_per_s for point in points] == [20, 0, 0, 0]
    first = points[0]
    assert (first.ttft_count, first.ttft_p50_s, first.tbt_count, first.tbt_p50_s) == (1, 0.01, 19, 0.01)
    assert (points[-1].ttft_p50_s, points[-1].running) == (None, 0)
    (row,) = watched.model.requests(10).finished
    assert (row.outputs, row.ttft_s, row.tbt_p50_s, row.tbt_max_s, row.finish) == (20, 0.01, 0.01, 0.01, "length")
    assert watched.model.status().tokens_per_s == 2.0


def test_quantiles_are_observations() -> None:
    counts = Counter({10: 98, 500: 1, 2_000: 1})
    assert quantile(counts, 0.5) == 10
    assert quantile(counts, 0.99) == 500
    assert quantile(counts, 1.0) == 2_000
    assert quantile(Counter(), 0.5) is None


def test_a_second_with_very_many_different_values_stays_small() -> None:
    ring = LatencyRing()
    for at in range(20_000):
        ring.add_gaps(0, at, 2)
        ring.add_ttft(0, at)
    (point,) = ring.points(0, lambda t_ns: t_ns / 1e9)
    assert (point.tbt_count, point.ttft_count) == (40_000, 20_000)
    slot = ring.at(0)
    assert len(slot.gaps) == len(slot.ttft) == 4096
    ring.at(2_000_000_000)
    assert not slot.gaps
    assert not slot.ttft
    assert next(iter(ring.points(2_000_000_000, lambda t_ns: t_ns / 1e9))) == point


def test_one_request_is_told_in_full_and_in_sentences() -> None:
    watched = Watched(engine_config(num_pages=20, page_size=4))
    watched.run.add("runs", 30, 10, ignore_eos=True)
    watched.run.timed_step()
    watched.run.add("waits", 30, 10)
    watched.run.timed_step()
    watched.tick()
    told = watched.model.explain("waits")
    assert told is not None
    assert "waiting now" in " ".join(told.sentences)
    assert "remaining_total" in " ".join(told.sentences)
    watched.run.finish_all()
    detail = watched.model.request("waits")
    assert detail is not None
    timeline = detail.timeline
    assert sum(timeline.parts_ns.values()) == timeline.ttft_ns
    assert sum(timeline.blockers_ns.values()) == timeline.parts_ns["queue"]
    assert {span.blocker for span in timeline.waits} <= set(BLOCKERS)
    assert timeline.waits[0].start_ns == timeline.enqueued_ns
    assert timeline.waits[-1].end_ns == timeline.admitted_ns
    assert [d.reason for d in detail.decisions][-1] == Reason.ADMITTED_WHOLE
    after = watched.model.explain("waits")
    assert after is not None
    assert any("first token came after" in line for line in after.sentences)
    assert "It ended after" in after.sentences[-1]


def test_a_waiter_is_told_who_got_the_slice() -> None:
    """The refusal names only who was refused, and a prompt that takes every slice does not wait."""
    watched = Watched(engine_config(num_pages=100, page_size=4, chunked_prefill_size=16, schedule_policy="fcfs"))
    watched.run.add("long", 80, 4)
    watched.run.timed_step()
    watched.run.add("short", 8, 4)
    for _ in range(2):
        watched.run.timed_step()
    watched.tick()
    told = watched.model.explain("short")
    assert told is not None
    assert "The last pass gave long 16 of the 48 tokens it lacked." in told.sentences


def test_who_was_pushed_back_is_told_how_long_it_is_back_not_how_old_it_is() -> None:
    watched = Watched(engine_config(num_pages=12, page_size=4, schedule_conservativeness=0.05, clip_max_new_tokens=1))
    for name in ("one", "two"):
        watched.run.add(name, 8, 30)
    back: list[QueueEntry] = []
    while not back:
        watched.run.timed_step()
        back = [entry for entry in watched.entries().values() if entry.state == "retracted"]
    watched.run.timed_step()
    watched.tick()
    told, detail = watched.model.explain(back[0].rid), watched.model.request(back[0].rid)
    assert told is not None
    assert detail is not None
    assert detail.queue is not None
    [now] = [line for line in told.sentences if line.startswith("It is waiting now")]
    assert "for 2.0 ms since it was pushed back" in now
    assert detail.queue.age_s > 0.01


def test_while_the_sequence_number_stays_the_answers_stay() -> None:
    watched = Watched()
    before = watched.model.status()
    assert watched.model.status() == before
    watched.run.add("a", 8, 4)
    assert watched.model.status().observe_seq > before.observe_seq
    assert watched.model.status().engine_id == "test"


def test_before_the_engine_starts_there_is_nothing_to_tell() -> None:
    with pytest.raises(NotStarted):
        ReadModel(clock=VirtualClock()).status()


def test_before_the_first_step_every_answer_is_empty() -> None:
    model = Watched().model
    assert model.passes(KEPT_STEPS).passes == ()
    assert (model.queue(10).entries, model.requests(10).live, model.lanes(10).lanes) == ((), (), ())
    for ask in (model.status, model.latency, model.breakdown, model.page_map, model.pool_over_time):
        assert ask().step == 0
    assert model.tree(node=None, opened=(), top=10).nodes_total == 0

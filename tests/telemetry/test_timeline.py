"""Timelines are exact: parts add up to time to first token, blockers to waiting, gaps to tokens minus one."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict

from hypothesis import given, settings

from engine.config import EngineConfig
from engine.events import (
    AdmissionDecided,
    AnyEvent,
    RequestArrived,
    RequestTransitioned,
    StepCompleted,
    StepPlanned,
)
from engine.request import Cause, RequestState
from engine.scheduler.decision import Reason
from telemetry.blockers import INDEX, OF_REASON
from telemetry.observe import BLOCKERS, TTFT_PARTS
from telemetry.request_timeline import BETWEEN, QUEUE, RequestTimeline
from telemetry.timeline import TimelineTracker
from tests.builders import engine_config
from tests.telemetry.live_run import MS, TimedRun, busy, configs, operations, play


class Listener:
    """Keeps what a tracker announces; feeds the tracker as a sink."""

    def __init__(self, *, expects_responses: bool = False) -> None:
        self.tracker = TimelineTracker(self, expects_responses=expects_responses, keep_detail=True)
        self.gaps: Counter[int] = Counter()
        self.ttft: dict[str, RequestTimeline] = {}
        self.finished: dict[str, RequestTimeline] = {}
        self.first_tokens: list[str] = []
        self.preempted = 0

    def emit(self, event: AnyEvent) -> None:
        if isinstance(event, StepPlanned):
            self.preempted += len(event.preempted)
        self.tracker.apply(event)

    def on_admitted(self, request: RequestTimeline) -> None:
        assert request.queue_ns is not None

    def on_first_token(self, request: RequestTimeline) -> None:
        self.first_tokens.append(request.rid)

    def on_ttft(self, request: RequestTimeline) -> None:
        assert request.rid not in self.ttft, "announced twice"
        self.ttft[request.rid] = request

    def on_gaps(self, gap_ns: int, count: int, *, queued: bool = False) -> None:
        self.gaps[gap_ns] += count

    def on_finished(self, request: RequestTimeline) -> None:
        assert request.rid not in self.finished, "ended twice"
        self.finished[request.rid] = request


class SlowBooks:
    """The same accounts kept the slow way: every waiting request is charged at every pass."""

    def __init__(self) -> None:
        self.waiting: dict[str, str] = {}
        self.since: dict[str, int] = {}
        self.waited: dict[str, Counter[str]] = defaultdict(Counter)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.queued: Counter[str] = Counter()
        self.entered: dict[str, int] = {}
        self._decisions: list[AdmissionDecided] = []
        self._late: set[str] = set()

    def _charge(self, rid: str, t_ns: int) -> None:
        self.waited[rid][self.waiting[rid]] += t_ns - self.since[rid]
        self.since[rid] = t_ns

    def _enter(self, rid: str, t_ns: int) -> None:
        self.waiting[rid], self.since[rid], self.entered[rid] = "engine_busy", t_ns, t_ns
        self._late.add(rid)

    def _leave(self, rid: str, t_ns: int) -> None:
        if rid in self.waiting:
            self._charge(rid, t_ns)
            self.queued[rid] += t_ns - self.entered[rid]
            del self.waiting[rid]

    def emit(self, event: AnyEvent) -> None:
        if isinstance(event, RequestArrived):
            self._enter(event.rid, event.t_ns)
            self._late.discard(event.rid)
        elif isinstance(event, AdmissionDecided):
            self._decisions.append(event)
        elif isinstance(event, RequestTransitioned):
            if event.target is RequestState.WAITING and event.source is not None:
                self._enter(event.rid, event.t_ns)
            elif event.target is not RequestState.WAITING:
                self._leave(event.rid, event.t_ns)
        elif isinstance(event, StepPlanned):
            self._pass(event)
        elif isinstance(event, StepCompleted):
            for row in event.rows:
                self.tokens[row.rid].append(event.times.applied_ns)

    def _pass(self, event: StepPlanned) -> None:
        decisions, self._decisions = {d.rid: d for d in self._decisions}, []
        late, self._late = self._late, set()
        end = event.pass_end
        if end is None:
            return
        found = {rid: BLOCKERS[OF_REASON[d.reason]] for rid, d in decisions.items() if d.reason in OF_REASON}
        if event.claim_failed:  # the whole pass was put back
            found |= {rid: "kv_now" for rid, d in decisions.items() if d.reason not in OF_REASON}
        if end.stopped_by is Reason.FULL_FLAG_SET:
            held = {rid: b for rid, b in self.waiting.items() if b not in {"order", "engine_busy"}}
            found = held | found
        flag_is_explained = end.stopped_by is Reason.FULL_FLAG_SET and any(rid in found for rid in self.waiting)
        if end.rid is not None and end.stopped_by in OF_REASON and not flag_is_explained:
            found.setdefault(end.rid, BLOCKERS[OF_REASON[end.stopped_by]])
        for rid in self.waiting:
            if rid not in late:
                self._charge(rid, event.t_ns)
                self.waiting[rid] = found.get(rid, "order")


def _blockers(request: RequestTimeline) -> Counter[str]:
    both = zip(BLOCKERS, request.blockers, request.late_blockers, strict=True)
    return Counter({name: early + late for name, early, late in both if early + late})


def _add_up(config: EngineConfig, ops: list[tuple[object, ...]], *, faults: random.Random | None = None) -> Listener:
    listener, slow = Listener(), SlowBooks()
    run = TimedRun(config, listener, slow)
    if faults is not None:
        run.scheduler.kv.allocation_fault = lambda _caller: faults.random() < 0.1
    tracker = listener.tracker

    def books_agree() -> None:
        assert set(tracker.queue.waiting) == {request.rid for request in run.scheduler.state.waiting}
        assert sum(tracker.queue.counts) == len(tracker.queue.waiting)
        now = Counter(BLOCKERS[r.blocker] for r in tracker.queue.waiting.values() if r.blocker is not None)
        assert now == Counter(slow.waiting.values())
        assert {b: n for b, n in zip(BLOCKERS, tracker.queue.counts, strict=True) if n} == dict(now)

    rids = play(run, ops, check=books_agree)
    assert not tracker.live
    assert set(listener.finished) == set(rids)
    for rid, request in listener.finished.items():
        # The law of time to first token.
        if request.ttft_ns is not None:
            assert request.first_token_ns == slow.tokens[rid][0]
            assert request.ttft_ns == request.first_token_ns - request.accepted_ns
            assert sum(request.parts) == request.ttft_ns
        assert (request.ttft_ns is not None) == (rid in slow.tokens)
        assert min(request.parts) >= 0
        assert sum(request.blockers) == request.parts[QUEUE] + request.refused_between_ns
        assert request.refused_between_ns <= request.parts[BETWEEN]
        # The quick books against the slow ones; a refused continuation is not waiting, so it is taken out.
        waited = _blockers(request)
        assert sum(waited.values()) == slow.queued[rid] + request.refused_between_ns
        if not request.refused_between_ns:
            assert waited == +slow.waited[rid]
        assert sum(span.end_ns - span.start_ns for span in request.held) == sum(waited.values())
        # Tokens.
        assert list(request.token_ns) == slow.tokens[rid]
    per_request = sum(sum(slow.waited[rid].values()) for rid in rids)
    assert sum(tracker.queue.waited_ns) == per_request
    gaps: Counter[int] = Counter()
    for times in slow.tokens.values():
        gaps.update(b - a for a, b in itertools.pairwise(times))
    assert +listener.gaps == gaps
    return listener


@given(config=configs, ops=operations)
@settings(max_examples=100)
def test_parts_blockers_and_gaps_add_up_exactly(config: EngineConfig, ops: list[tuple[object, ...]]) -> None:
    _add_up(config, ops)


def test_they_add_up_under_pressure_too() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        listener = _add_up(*busy(seed), faults=random.Random(seed) if seed % 2 else None)
        seen["preempted"] += listener.preempted
        for request in listener.finished.values():
            seen["refused continuation"] += request.refused_between_ns > 0
            seen["retracted"] += request.num_retractions > 0
            seen["cut in chunks"] += len(request.chunks) > 1
            seen.update(f"held by {name}" for name in _blockers(request))
    # The load must have shown what it is for, or the laws above were not tried.
    for what in ("refused continuation", "retracted", "preempted", "cut in chunks"):
        assert seen[what] > 5, (what, seen)
    for blocker in ("kv_now", "kv_total", "rows", "order", "engine_busy", "chunk", "compute"):
        assert seen[f"held by {blocker}"] > 0, (blocker, seen)


def test_two_chunks_and_a_decode_step_between_are_cut_at_the_named_instants() -> None:
    listener = Listener(expects_responses=True)
    run = TimedRun(engine_config(max_prefill_tokens=16, chunked_prefill_size=16), listener)
    run.now_ns = 1_000
    run.add("a", 32, 3)
    #               wait drain plan commit prepare forward apply
    run.timed_step((70, 7, 1, 2, 3, 40, 5))
    run.timed_step((11, 4, 1, 2, 3, 50, 6))
    (request,) = listener.tracker.live.values()
    parts = dict(zip(TTFT_PARTS, request.parts, strict=True))
    assert parts == {
        "intake": 0,
        "queue": 77,
        "prepare": 2 * (1 + 2 + 3),
        "chunk_forward": 90,
        "commit": 11,
        "between_chunks": 15,
        "emit": 0,
    }
    assert [(c.prefix_len, c.extend_len, c.is_last) for c in request.chunks] == [(0, 16, False), (16, 16, True)]
    assert request.blockers[INDEX["engine_busy"]] == 77
    assert not listener.ttft, "the first byte is still to come"
    run.finish_all()
    assert run.now_ns > request.accepted_ns + 500
    first_byte = request.first_token_ns + 25
    run.respond("a", first_byte)
    assert listener.ttft["a"].ttft_ns == first_byte - 1_000
    assert request.parts[TTFT_PARTS.index("emit")] == 25
    assert sum(request.parts) == request.ttft_ns


def test_the_first_byte_of_a_stream_may_be_told_before_the_response_is_over() -> None:
    listener = Listener(expects_responses=True)
    run = TimedRun(engine_config(), listener)
    run.add("a", 8, 3)
    run.timed_step()
    listener.tracker.first_byte("a", run.now_ns + 9)
    assert listener.ttft["a"].ttft_ns == run.now_ns + 9
    run.finish_all()
    assert list(listener.tracker.emitting) == ["a"]
    run.respond("a", run.now_ns)
    assert not listener.tracker.emitting
    assert listener.ttft["a"].ttft_ns == MS + 9


def test_a_response_that_is_not_streamed_has_its_first_token_when_the_engine_had_it() -> None:
    listener = Listener(expects_responses=True)
    run = TimedRun(engine_config(), listener)
    run.add("a", 8, 5)
    run.finish_all()
    run.respond("a", run.now_ns + 50)
    assert listener.ttft["a"].ttft_ns == MS
    assert listener.ttft["a"].parts[TTFT_PARTS.index("emit")] == 0


def test_a_disconnect_before_the_first_byte_leaves_no_time_to_first_token() -> None:
    listener = Listener(expects_responses=True)
    run = TimedRun(engine_config(), listener)
    run.add("a", 8, 5)
    run.timed_step()
    run.respond("a", None, disconnected=True)
    run.abort("a")
    assert listener.finished["a"].ttft_ns is None
    assert not listener.tracker.emitting
    assert not listener.tracker.live


def test_a_retraction_before_the_first_token_adds_to_the_queue_and_resets_nothing() -> None:
    listener = Listener()
    run = TimedRun(engine_config(max_prefill_tokens=16, chunked_prefill_size=16), listener)
    run.add("a", 32, 3)
    run.timed_step((10, 0, 0, 0, 0, 40, 0))
    publisher, now = run.scheduler.publisher, run.now_ns
    publisher.t_ns = now + 5
    # No policy of this engine preempts a prefill, so the event is made by hand.
    listener.emit(
        RequestTransitioned(
            *publisher.head(), "a", RequestState.PREFILL, RequestState.WAITING, Cause.PREEMPT, 32, 0, 0, 0, 1
        )
    )
    (request,) = listener.tracker.live.values()
    assert request.parts[BETWEEN] == 5
    assert listener.tracker.queue.retracted == 1
    publisher.t_ns = now + 35
    listener.emit(
        RequestTransitioned(
            *publisher.head(), "a", RequestState.WAITING, RequestState.PREFILL, Cause.ADMIT, 32, 0, 0, 0, 1
        )
    )
    assert request.parts[QUEUE] == 10 + 30
    assert request.queue_ns == 10, "the first admission was the first"
    assert sum(request.blockers) == 40


def test_a_stall_is_one_long_gap_and_gaps_are_tokens_minus_one() -> None:
    listener = Listener()
    run = TimedRun(engine_config(), listener)
    run.add("a", 8, 20, ignore_eos=True)
    for _ in range(10):
        run.timed_step((0, 0, 0, 0, 0, 10 * MS, 0))
    run.timed_step((0, 0, 0, 0, 0, 2_000 * MS, 0))
    run.finish_all((0, 0, 0, 0, 0, 10 * MS, 0))
    assert listener.gaps == {10 * MS: 18, 2_000 * MS: 1}
    assert sorted(listener.finished["a"].gaps_ns())[-2:] == [10 * MS, 2_000 * MS]


def test_token_times_survive_being_handed_over_in_a_long_run() -> None:
    listener = Listener()
    run = TimedRun(engine_config(num_pages=64, page_size=16), listener)
    run.add("a", 8, 300, ignore_eos=True)
    run.add("b", 8, 200, ignore_eos=True)
    while run.has_work:
        run.timed_step()
        if run.steps % 37 == 0:
            listener.tracker._trim()
    assert listener.finished["a"].gaps_ns() == [MS] * 299
    assert listener.finished["b"].gaps_ns() == [MS] * 199
    assert listener.gaps == {MS: 498}


def test_whoever_looks_at_the_tokens_changes_no_gap() -> None:
    looked_at, left_alone = Listener(), Listener()
    run = TimedRun(engine_config(chunked_prefill_size=16, enable_mixed_chunk=False), looked_at, left_alone)
    run.add("a", 8, 30, ignore_eos=True)
    for at in range(6):
        for _ in range(3):
            run.timed_step()
            for request in looked_at.tracker.live.values():
                looked_at.tracker.settle_tokens(request)
        run.add(f"b{at}", 8, 2, ignore_eos=True)  # whose prompt is a step without a token for the others
    run.finish_all()
    assert looked_at.gaps == left_alone.gaps
    assert looked_at.finished["a"].gaps_ns() == left_alone.finished["a"].gaps_ns()
    assert looked_at.gaps[2 * MS] >= 6


def _touched_in_five_passes(waiting: int) -> int:
    listener = Listener()
    run = TimedRun(engine_config(num_pages=20, page_size=4, max_running_requests=4), listener)
    run.add("runs", 30, 30, ignore_eos=True)
    run.timed_step()
    for at in range(waiting):
        run.add(f"r{at}", 30, 10)
    run.timed_step()
    queue, calls = listener.tracker.queue, []
    original = queue._set

    def counting(request: RequestTimeline, *rest: object) -> None:
        calls.append(request.rid)
        original(request, *rest)

    queue._set = counting
    for _ in range(5):
        run.timed_step()
    assert len(queue.waiting) == waiting
    return len(calls)


def test_fr_38_a_pass_touches_only_those_it_looked_at_however_many_wait() -> None:
    assert _touched_in_five_passes(2_000) == _touched_in_five_passes(10) == 5

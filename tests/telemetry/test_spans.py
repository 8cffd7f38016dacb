"""Span trees from the real scheduler: they hold what the records say, and every child lies within its parent."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings

from engine.config import EngineConfig
from engine.events import EngineStarted
from engine.scheduler.plan import StepKind
from invariants.violation import Violation
from telemetry.spans.draft import SpanDraft, derived_id, request_span_id, request_trace_id, step_ids
from telemetry.spans.keep import TokenBucket
from telemetry.spans.sink import SpanSink
from tests.builders import engine_config
from tests.telemetry.live_run import MS, TimedRun, busy, configs, operations, play


class Collected:
    """Where spans of a test go."""

    def __init__(self) -> None:
        self.trees: list[list[SpanDraft]] = []
        self.refused = 0
        self.engines: list[EngineStarted] = []
        self.closed = 0

    def start(self, engine: EngineStarted) -> None:
        self.engines.append(engine)

    def send(self, spans: list[SpanDraft]) -> None:
        self.trees.append(spans)

    def refuse(self, spans: int) -> None:
        self.refused += spans

    def close(self) -> None:
        self.closed += 1

    def of(self, rid: str) -> list[SpanDraft]:
        found = [tree for tree in self.trees if tree[0].attributes.get("gen_ai.response.id") == rid]
        assert len(found) == 1, f"{len(found)} trees of {rid}"
        return found[0]

    @property
    def steps(self) -> list[list[SpanDraft]]:
        return [tree for tree in self.trees if tree[0].name == "engine.step"]


def started(
    config: EngineConfig | None = None, *, responses: bool = False, **rule: float
) -> tuple[TimedRun, SpanSink, Collected]:
    output = Collected()
    options = {"sample_ratio": 1.0, "max_traces_per_s": 1e9, **rule}
    sink = SpanSink(output, expects_responses=responses, **options)
    return TimedRun(config or engine_config(), sink), sink, output


def named(tree: list[SpanDraft], name: str) -> list[SpanDraft]:
    return [span for span in tree if span.name == name]


def within_parents(tree: list[SpanDraft]) -> None:
    by_id = {span.span_id: span for span in tree}
    assert len(by_id) == len(tree), "two spans with one id"
    for span in tree[1:]:
        parent = by_id[span.parent_id or 0]
        assert parent.start_ns <= span.start_ns <= span.end_ns <= parent.end_ns, (span.name, parent.name)
        assert span.trace_id == tree[0].trace_id


def test_a_chunked_request_has_a_span_for_every_stretch() -> None:
    run, _, output = started(engine_config(chunked_prefill_size=32))
    run.add("r1", 80, 3, ignore_eos=True)
    run.finish_all((1, 2, 3, 4, 5, MS, 6))
    tree = output.of("r1")
    within_parents(tree)
    assert Counter(span.name for span in tree[1:]) == {
        "engine.intake": 1,
        "engine.queue": 1,
        "engine.prefill.chunk": 3,
        "engine.between_chunks": 2,
        "engine.decode": 1,
    }
    chunks = named(tree, "engine.prefill.chunk")
    assert [chunk.attributes["selected_extend"] for chunk in chunks] == [32, 32, 16]
    assert [chunk.attributes["prefix_len"] for chunk in chunks] == [0, 32, 64]
    assert [chunk.attributes["reason"] for chunk in chunks] == [
        "admitted_first_chunk",
        "admitted_next_chunk",
        "admitted_last_chunk",
    ]
    assert [chunk.attributes["pages_claimed"] for chunk in chunks] == [2, 2, 1]
    assert chunks[0].attributes["chunk.before"] == 32
    assert chunks[0].attributes["chunk.after"] == 0
    assert all(chunk.attributes["forward_ms"] == 1.0 for chunk in chunks)
    root = tree[0]
    assert root.attributes["gen_ai.usage.input_tokens"] == 80
    assert root.attributes["gen_ai.usage.output_tokens"] == 3
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert named(tree, "engine.decode")[0].attributes["tokens"] == 3


def test_queue_names_what_blocked_and_says_each_refusal_once() -> None:
    run, _, output = started(engine_config(max_running_requests=1))
    run.add("r1", 16, 6, ignore_eos=True)
    run.timed_step()
    run.add("r2", 16, 1)
    run.finish_all()
    queue = named(output.of("r2"), "engine.queue")[0]
    blocked = {name: value for name, value in queue.attributes.items() if name.startswith("blocked_by.")}
    assert sum(blocked.values()) == pytest.approx((queue.end_ns - queue.start_ns) / MS)
    assert "blocked_by.rows_ms" in blocked
    assert "blocked_by.not_kept_ms" not in blocked


def test_refusals_carry_the_ledgers_and_need_and_have() -> None:
    run, _, output = started(engine_config(num_pages=8, max_running_requests=4))
    run.add("r1", 64, 60, ignore_eos=True)
    run.timed_step()
    run.add("r2", 64, 20, ignore_eos=True)
    run.finish_all()
    refused = [event for span in output.of("r2") for event in span.events if event.name == "engine.admission.refused"]
    assert refused
    assert refused[0].attributes["reason"] in {"kv_total_exhausted", "kv_now_exhausted"}
    assert refused[0].attributes["need"] > refused[0].attributes["have"]
    assert "kv_total.before" in refused[0].attributes
    reasons = [event.attributes["reason"] for event in refused]
    assert all(one != other for one, other in pairwise(reasons))


def test_a_retraction_is_a_span_around_the_second_wait() -> None:
    run, _, output = started(engine_config(num_pages=16, schedule_conservativeness=0.05))
    rids = [f"r{number}" for number in range(4)]
    for rid in rids:  # each finds room beside those that run, but not for their growth
        run.add(rid, 40, 60)
        run.timed_step()
    run.finish_all()
    trees = [output.of(rid) for rid in rids]
    retracted = [tree for tree in trees if named(tree, "engine.retracted")]
    assert retracted, "nobody was pushed back"
    for tree in retracted:
        within_parents(tree)
        around = named(tree, "engine.retracted")[0]
        assert around.attributes["cause"] == "retract"
        assert around.attributes["tokens_lost"] > 0
        inner = [span for span in named(tree, "engine.queue") if span.parent_id == around.span_id]
        assert [(span.start_ns, span.end_ns) for span in inner] == [(around.start_ns, around.end_ns)]
        assert len(named(tree, "engine.decode")) == 2
        assert tree[0].attributes["admitscope.kept_because"] == "retracted"
    assert any(tree[0].attributes["retractions"] for tree in output.steps)


@settings(max_examples=60, deadline=None)
@given(config=configs, program=operations)
def test_spans_of_any_schedule_lie_within_their_parents_and_leave_no_gap(
    config: EngineConfig, program: list[tuple[object, ...]]
) -> None:
    run, sink, output = started(config)
    play(run, program)
    sink.close()
    sink.close()
    assert output.closed == 1
    ended = Counter(tree[0].attributes.get("gen_ai.response.id") for tree in output.trees)
    del ended[None]
    arrived = Counter(event.rid for event in run.recorded.events if type(event).__name__ == "RequestArrived")
    assert ended == arrived, "one tree for each request"
    for tree in output.trees:
        within_parents(tree)
    for tree in output.trees:
        if tree[0].name != "engine.step":
            covered(tree)


@pytest.mark.parametrize("seed", range(20))
def test_spans_of_a_pool_under_pressure(seed: int) -> None:
    config, program = busy(seed)
    run, sink, output = started(config)
    play(run, program)
    sink.close()
    for tree in output.trees:
        within_parents(tree)
        if tree[0].name != "engine.step":
            covered(tree)


def covered(tree: list[SpanDraft]) -> None:
    """Up to the first token, waits, chunks and the time between them follow each other without a hole."""
    names = ("engine.queue", "engine.prefill.chunk", "engine.between_chunks")
    spans = sorted((span for span in tree if span.name in names), key=lambda span: (span.start_ns, span.end_ns))
    last = next((span for span in spans if span.attributes.get("is_last")), None)
    at = tree[1].end_ns
    for span in spans:
        assert span.start_ns == at, (span.name, span.start_ns, at)
        at = span.end_ns
        if span is last:
            break


def test_ordinary_requests_are_kept_by_ratio_and_the_same_trace_always_alike() -> None:
    kept = []
    for _ in range(2):
        run, _, output = started(sample_ratio=0.2)
        for number in range(200):
            run.add(f"r{number}", 8, 1)
        run.finish_all()
        kept.append({tree[0].attributes["gen_ai.response.id"] for tree in output.trees if len(tree[0].name) > 11})
    assert kept[0] == kept[1]
    assert 15 <= len(kept[0]) <= 70


def test_slow_first_tokens_and_long_gaps_are_kept_though_the_ratio_is_zero() -> None:
    run, _, output = started(sample_ratio=0.0, ttft_ns=10 * MS, gap_ns=5 * MS)
    run.add("quick", 8, 3, ignore_eos=True)
    run.finish_all()
    assert not output.trees
    run.add("late", 8, 1)
    run.timed_step((0, 0, 0, 0, 0, 20 * MS, 0))
    run.add("uneven", 8, 3, ignore_eos=True)
    run.timed_step()
    run.timed_step((0, 0, 0, 0, 0, 8 * MS, 0))
    run.finish_all()
    why = {
        tree[0].attributes["gen_ai.response.id"]: tree[0].attributes["admitscope.kept_because"] for tree in output.trees
    }
    assert why == {"late": "ttft", "uneven": "gap"}
    decode = named(output.of("uneven"), "engine.decode")[0]
    assert decode.attributes["worst_gap_ms"] == 8.0
    assert decode.attributes["worst_gap_cause"] == "kernel"
    assert [event.name for event in decode.events] == ["engine.late_token"]


def test_the_rate_bounds_traces_and_counts_the_others() -> None:
    run, _, output = started(max_traces_per_s=3.0)
    for number in range(10):
        run.add(f"r{number}", 8, 1)
    run.finish_all()
    assert len([tree for tree in output.trees if tree[0].name != "engine.step"]) == 3
    assert output.refused >= 7 * 4


def test_token_bucket_refills_with_time_and_never_beyond_its_size() -> None:
    bucket = TokenBucket(2.0)
    second = 1_000_000_000
    assert [bucket.take(second) for _ in range(3)] == [True, True, False]
    assert bucket.take(second + second // 2)
    assert not bucket.take(second + second // 2)
    assert [bucket.take(100 * second) for _ in range(3)] == [True, True, False]
    assert not bucket.take(50 * second), "a clock that jumps back earns nothing"


def test_a_broken_law_is_an_event_on_the_step_and_on_the_request() -> None:
    run, sink, output = started(sample_ratio=0.0)
    run.add("r1", 8, 3, ignore_eos=True)
    run.timed_step()
    sink.note_violation(Violation(id="INV-PAGE-01", law="", expected="8", found="7", step=2, rid="r1", evidence=()))
    run.finish_all()
    root = output.of("r1")[0]
    assert root.attributes["admitscope.kept_because"] == "violation"
    assert [(event.name, event.attributes["id"]) for event in root.events] == [
        ("engine.invariant.violation", "INV-PAGE-01")
    ]
    steps = [tree for tree in output.steps if tree[0].attributes["admitscope.kept_because"] == "violation"]
    assert [tree[0].attributes["step"] for tree in steps] == [2]
    assert steps[0][0].events[0].attributes == {"id": "INV-PAGE-01", "expected": "8", "observed": "7"}
    assert steps[0][0].links == ((root.trace_id, root.span_id),)


def test_a_law_that_broke_ahead_of_the_spans_waits_for_its_request() -> None:
    """A worker hands the checker some steps before it hands them to the spans."""
    run, sink, output = started(sample_ratio=0.0)
    run.add("r1", 8, 3, ignore_eos=True)
    run.timed_step()
    ahead = sink.now_seq + 6
    sink.note_violation(
        Violation(id="INV-PAGE-01", law="", expected="8", found="7", step=2, rid="r2", evidence=(ahead,))
    )
    run.timed_step()
    run.add("r2", 8, 3, ignore_eos=True)
    run.finish_all()
    assert output.of("r2")[0].attributes["admitscope.kept_because"] == "violation"


def test_a_slow_step_is_kept_and_linked_with_its_requests() -> None:
    run, _, output = started(sample_ratio=1.0)
    run.add("r1", 8, 60, ignore_eos=True)
    for _ in range(30):
        run.timed_step()
    run.timed_step((0, 0, 0, 0, 0, 50 * MS, 0))
    slow = [tree for tree in output.steps if tree[0].attributes["admitscope.kept_because"] == "slow"]
    assert len(slow) == 1
    within_parents(slow[0])
    assert [span.name for span in slow[0][1:]] == [
        f"engine.step.{phase}" for phase in ("plan", "commit", "prepare", "forward", "apply")
    ]
    assert slow[0][0].attributes["kind"] == StepKind.DECODE
    run.finish_all()
    assert slow[0][0].links == ((output.of("r1")[0].trace_id, output.of("r1")[0].span_id),)


def test_an_answer_that_is_sent_late_belongs_to_a_span_until_then() -> None:
    """A whole answer is written after its last token: what passes in between is its `engine.emit`."""
    run, _, output = started(responses=True)
    run.add("r1", 8, 3)
    run.finish_all()
    applied_ns = run.now_ns
    run.respond("r1", applied_ns + 7_000_000)
    tree = output.of("r1")
    [emit], [stream], [decode] = (named(tree, name) for name in ("engine.emit", "engine.stream", "engine.decode"))
    assert emit.start_ns == decode.start_ns
    assert decode.end_ns < emit.end_ns == stream.start_ns == applied_ns + 7_000_000


def test_the_tree_waits_for_the_end_of_the_response() -> None:
    run, sink, output = started(responses=True)
    run.add("r1", 8, 1)
    run.finish_all()
    assert not [tree for tree in output.trees if tree[0].name != "engine.step"]
    run.respond("r1", run.now_ns)
    tree = output.of("r1")
    within_parents(tree)
    assert len(named(tree, "engine.stream")) == 1
    assert not named(tree, "engine.emit"), "it was sent in the moment in which it was there"
    run.add("r2", 8, 1)
    run.timed_step()
    run.add("r3", 8, 50, ignore_eos=True)
    run.timed_step()
    sink.close()
    assert output.of("r2")[0].error is None, "it had ended; only its response was never reported"
    assert output.of("r3")[0].error == "shutdown"


def test_ids_follow_from_the_request_and_are_what_the_caller_was_told() -> None:
    rid = "chatcmpl-00112233445566778899aabbccddeeff"
    trace = request_trace_id("0af7651916cd43dd8448eb211c80319c", "e", rid, 5)
    assert trace == 0x0AF7651916CD43DD8448EB211C80319C
    assert request_span_id(trace, rid) == 0x0011223344556677
    assert request_span_id(trace, f"{rid}.0") == 0x0011223344556677
    assert request_span_id(trace, f"{rid}.1") not in {0, 0x0011223344556677}
    assert request_span_id(trace, "r17") == derived_id(trace, "r17")
    assert request_trace_id("", "e", "r17", 5) == request_trace_id("", "e", "r17", 5) != 0
    assert request_trace_id("", "e", "r17", 6) != request_trace_id("", "e", "r17", 5)
    assert step_ids("e", 3)[0] >> 64, "128 bits"

"""Reported faults of traces: FR-34 and FR-35. More: tests/telemetry/test_spans.py, test_traced_server.py."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import pairwise

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from engine.errors import RequestRefused
from engine.request import Cause
from telemetry.spans.draft import SpanDraft
from tests.builders import engine_config
from tests.engine.server.live import until
from tests.field.whole import Whole, whole
from tests.telemetry.live_run import TimedRun
from tests.telemetry.otlp import Receiver, attributes
from tests.telemetry.test_spans import Collected, named, started, within_parents

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


def _cancel(run: TimedRun, rid: str, phase: str) -> None:
    """Add a request and abort it `phase`."""
    run.add(rid, 90, 5, ignore_eos=True)
    request = run.scheduler.state.requests[rid]
    for _ in range(200):
        here = {
            "queued": request.computed_len == 0 and request.state == "waiting",
            "chunked": request.state == "prefill" and 0 < request.computed_len < 90,
            "decoding": request.output_len == 2,
            "finishing": request.output_len == 4,
        }[phase]
        if here:
            break
        run.timed_step()
    assert here, f"{rid} never was {phase}"
    assert run.abort(rid)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("chunk", [None, 32])
def test_fr_34_every_accepted_request_has_one_ended_span_however_it_ends(
    page_size: int, mixed: bool, chunk: int | None
) -> None:
    """40 end by themselves, some of them retracted, 60 are cancelled in every phase, 5 are refused: 100 root spans."""
    config = engine_config(
        page_size=page_size,
        num_pages=256 // page_size,
        chunked_prefill_size=chunk,
        enable_mixed_chunk=mixed,
        schedule_conservativeness=0.05,
    )
    run, _, output = started(config)
    for start in range(0, 40, 4):
        for number in range(start, start + 4):
            run.add(f"n{number}", 40, 60)
            run.timed_step()
        run.finish_all()
    phases = ["queued", "chunked" if chunk else "decoding", "decoding", "finishing"]
    for number in range(60):
        _cancel(run, f"c{number}", phases[number % 4])
        run.finish_all()
    for _ in range(5):
        with pytest.raises(RequestRefused):
            run.add("too-large", 1000, 4)
    roots = _roots(output)
    assert Counter(root.attributes["gen_ai.response.id"] for root in roots) == dict.fromkeys(
        [f"n{number}" for number in range(40)] + [f"c{number}" for number in range(60)], 1
    )
    for tree in output.trees:
        within_parents(tree)
    for root in roots:
        assert root.end_ns >= root.start_ns
        aborted = str(root.attributes["gen_ai.response.id"]).startswith("c")
        assert (root.error is not None) == aborted, "an end has a status"
        assert root.attributes["admitscope.kept_because"]
    retracted = [tree for tree in output.trees if named(tree, "engine.retracted")]
    assert retracted, "the scenario must retract"
    assert all(span.parent_id for tree in retracted for span in named(tree, "engine.retracted"))
    assert run.scheduler.state.requests == {}


def _roots(output: Collected) -> list[SpanDraft]:
    return [tree[0] for tree in output.trees if tree[0].name != "engine.step"]


@pytest.mark.parametrize("cause", [Cause.QUEUE_TIMEOUT, Cause.DISPLACED])
def test_fr_34_who_is_turned_away_from_the_queue_has_a_span_too(cause: Cause) -> None:
    run, sink, output = started(engine_config(max_running_requests=1), sample_ratio=0.0)
    run.add("runs", 20, 30, ignore_eos=True)
    run.timed_step()
    run.add("waits", 20, 4)
    run.timed_step()
    assert run.scheduler.abort("waits", run.now_ns, cause=cause)
    tree = output.of("waits")
    within_parents(tree)
    assert tree[0].error is not None
    assert named(tree, "engine.queue")
    sink.close()


def test_fr_34_nothing_stays_open_in_memory() -> None:
    """After a thousand requests that came and went, what the sink keeps of them is nothing."""
    run, sink, _ = started(engine_config(num_pages=64), sample_ratio=0.0)
    for number in range(1_000):
        run.add(f"r{number}", 8, 1)
        if number % 10 == 9:
            run.finish_all()
    run.finish_all()
    assert (len(sink._facts), len(sink._ended), len(sink._row_of)) == (0, 0, 0)
    assert not sink._timeline.live


def _server_spans(receiver: Receiver) -> list[Span]:
    return [span for span in receiver.spans if span.kind == Span.SPAN_KIND_SERVER]


def _ask(live: Whole, traceparent: str | None, **fields: object) -> str:
    headers = {} if traceparent is None else {"traceparent": traceparent}
    reply = live.http.post("/v1/completions", json=live.body(**fields), headers=headers)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def test_fr_35_the_span_hangs_under_the_callers_and_its_children_leave_no_gap() -> None:
    """Held in the queue for a while: the queue is a child with its reason, and all children cover the whole."""
    with (
        Receiver() as receiver,
        whole(
            step_ms=5,
            scheduler={"max_running_requests": 1, "chunked_prefill_size": 64},
            traces={"endpoint": receiver.url, "sample_ratio": 0.0},
        ) as live,
    ):
        holder = threading.Thread(target=lambda: live.post(max_tokens=80, ignore_eos=True))
        holder.start()
        until(lambda: live.status.running == 1, "the row is taken")
        _ask(live, f"00-{TRACE}-{PARENT}-01", prompt="p" * 150, max_tokens=5, ignore_eos=True)
        holder.join(30)
        # The root, three chunks and two stretches between them, intake, queue, decode, emit and stream.
        spans = receiver.wait_for(lambda spans: sum(s.trace_id.hex() == TRACE for s in spans) >= 11)
        mine = [span for span in spans if span.trace_id.hex() == TRACE]
        [root] = [span for span in mine if span.kind == Span.SPAN_KIND_SERVER]
    assert root.parent_span_id.hex() == PARENT
    children = sorted((s for s in mine if s.parent_span_id == root.span_id), key=lambda s: s.start_time_unix_nano)
    assert Counter(span.name for span in children)["engine.prefill.chunk"] == 3
    assert {"engine.intake", "engine.queue", "engine.decode", "engine.emit", "engine.stream"} <= {
        span.name for span in children
    }
    queue = next(span for span in children if span.name == "engine.queue")
    assert queue.end_time_unix_nano - queue.start_time_unix_nano > 50_000_000
    assert any("rows" in key or "rows" in str(value) for key, value in attributes(queue).items()), attributes(queue)
    total = root.end_time_unix_nano - root.start_time_unix_nano
    gaps, at = 0, root.start_time_unix_nano
    for span in children:
        gaps += max(0, span.start_time_unix_nano - at)
        at = max(at, span.end_time_unix_nano)
    gaps += max(0, root.end_time_unix_nano - at)
    assert gaps < total / 100, f"{gaps} of {total} ns belong to no child"


def test_fr_35_unsampled_malformed_and_absent_contexts() -> None:
    """Unsampled: no spans. Malformed or absent: a root of its own, and no error."""
    with (
        Receiver() as receiver,
        whole(traces={"endpoint": receiver.url, "sample_ratio": 0.0}) as live,
    ):
        _ask(live, f"00-{TRACE}-{PARENT}-00")
        last = _ask(live, f"00-{TRACE}-{PARENT}-01")
        receiver.wait_for(lambda spans: any(attributes(s).get("gen_ai.response.id") == last for s in spans))
        assert len(_server_spans(receiver)) == 1
    with (
        Receiver() as receiver,
        whole(traces={"endpoint": receiver.url, "sample_ratio": 1.0}) as live,
    ):
        for header in (f"00-{TRACE}-{PARENT}", "rubbish", f"00-{'0' * 32}-{PARENT}-01", None):
            _ask(live, header)
        receiver.wait_for(lambda spans: sum(s.kind == Span.SPAN_KIND_SERVER for s in spans) == 4)
        roots = _server_spans(receiver)
    assert {root.parent_span_id for root in roots} == {b""}
    assert len({root.trace_id for root in roots}) == 4
    assert TRACE not in {root.trace_id.hex() for root in roots}
    assert all(a.trace_id != b.trace_id for a, b in pairwise(roots))

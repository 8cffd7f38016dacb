"""Faults of spans. Owns: one method of those that build spans broken at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.request import FinishReason
from telemetry.request_timeline import RequestTimeline
from telemetry.spans import request_tree
from telemetry.spans.draft import SpanDraft
from telemetry.spans.keep import TokenBucket
from telemetry.spans.ledger import REFUSED, SpanLedger
from telemetry.spans.sink import SpanSink
from tests.sabotage.scenario import FAULTS, Fault

Break = Callable[[SpanSink, pytest.MonkeyPatch], None]


def misbuilds(law: str, name: str) -> Callable[[Break], Break]:
    """Register a function that breaks the sink of spans."""

    def register(function: Break) -> Break:
        FAULTS.append(Fault(law, name, spans=function))
        return function

    return register


# -- closed once -----------------------------------------------------------------------------------------------------


@misbuilds("INV-SPAN-01", "a span left open by an abort")
def left_open(sink: SpanSink, patch: pytest.MonkeyPatch) -> None:
    original = sink.on_finished

    def broken(request: RequestTimeline) -> None:
        if request.finish is not FinishReason.ABORT:
            original(request)

    patch.setattr(sink, "on_finished", broken)


@misbuilds("INV-SPAN-01", "a span closed twice")
def closed_twice(sink: SpanSink, patch: pytest.MonkeyPatch) -> None:
    original = sink._finish

    def broken(request: RequestTimeline) -> None:
        facts = sink._facts[request.rid]
        original(request)
        if request.num_retractions:
            sink._facts[request.rid] = facts
            original(request)

    patch.setattr(sink, "_finish", broken)


@misbuilds("INV-SPAN-01", "a finished request whose trace is never counted")
def uncounted(sink: SpanSink, patch: pytest.MonkeyPatch) -> None:
    original = sink._finish

    def broken(request: RequestTimeline) -> None:
        if request.rid == "r4":
            del sink._facts[request.rid]
        original(request)

    patch.setattr(sink, "_finish", broken)


@misbuilds("INV-SPAN-01", "one trace counted for another")
def swapped(sink: SpanSink, patch: pytest.MonkeyPatch) -> None:
    """The sums balance: one is closed twice and another never."""
    original = SpanLedger.close

    def broken(self: SpanLedger, rid: str) -> None:
        original(self, "r0" if rid == "r4" else rid)

    patch.setattr(SpanLedger, "close", broken)


@misbuilds("INV-SPAN-01", "a trace that the rate refuses, without a count")
def refused_uncounted(sink: SpanSink, patch: pytest.MonkeyPatch) -> None:
    original = SpanLedger.decide
    patch.setattr(TokenBucket, "take", lambda _self, _now_ns: False)

    def broken(self: SpanLedger, decision: str) -> None:
        if decision != REFUSED:
            original(self, decision)

    patch.setattr(SpanLedger, "decide", broken)


@misbuilds("INV-SPAN-01", "a live request without a span")
def never_opened(sink: SpanSink, patch: pytest.MonkeyPatch) -> None:
    original = sink._arrived

    def broken(event: Any) -> None:
        original(event)
        if event.rid == "r3":
            del sink._facts["r3"]

    patch.setattr(sink, "_arrived", broken)


# -- times and places ------------------------------------------------------------------------------------------------


@misbuilds("INV-SPAN-02", "a span whose end precedes its start")
def backwards(sink: SpanSink, patch: pytest.MonkeyPatch) -> None:
    original = request_tree._chunk

    def broken(*args: Any) -> SpanDraft:
        span = original(*args)
        return span._replace(start_ns=span.end_ns, end_ns=span.start_ns)

    patch.setattr(request_tree, "_chunk", broken)


@misbuilds("INV-SPAN-02", "a child that outlives its parent")
def outlives(sink: SpanSink, patch: pytest.MonkeyPatch) -> None:
    original = request_tree._queue

    def broken(*args: Any) -> list[SpanDraft]:
        around, *within = original(*args)
        return [around._replace(end_ns=around.start_ns) if within else around, *within]

    patch.setattr(request_tree, "_queue", broken)


@misbuilds("INV-SPAN-02", "a child under a parent of another tree")
def adopted(sink: SpanSink, patch: pytest.MonkeyPatch) -> None:
    original = request_tree._chunk
    patch.setattr(request_tree, "_chunk", lambda *args: original(*args)._replace(parent_id=1))


@misbuilds("INV-SPAN-02", "a trace that begins at the admission")
def begins_late(sink: SpanSink, patch: pytest.MonkeyPatch) -> None:
    original = request_tree.RequestTree._root

    def broken(self: Any, builder: Any, end: int, kept_because: str) -> SpanDraft:
        root = original(self, builder, end, kept_because)
        return root._replace(start_ns=builder.request.admitted_ns or root.start_ns)

    patch.setattr(request_tree.RequestTree, "_root", broken)


@misbuilds("INV-SPAN-02", "a trace that ends with the first token")
def ends_early(sink: SpanSink, patch: pytest.MonkeyPatch) -> None:
    original = request_tree._end_of
    patch.setattr(request_tree, "_end_of", lambda request: request.first_token_ns or original(request))

"""SharedTimeline. Owns: one timeline for the read model and for spans, and the wall between the two.

Both follow every request in full, by the same code from the same events: a second timeline is a third of what either
costs. A fault of the timeline itself was a fault of both before, at the same event, and is counted for both. A fault of
one of them stays its own: it is counted under its name, and neither the timeline nor the other hears of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.events import AnyEvent, EngineStarted, EventSink
from telemetry.isolation import IsolatedSink
from telemetry.phases import Handler, calls_of
from telemetry.read_model import ReadModel
from telemetry.request_timeline import RequestTimeline
from telemetry.spans.sink import SpanSink
from telemetry.timeline import TimelineTracker


class SharedTimeline:
    """Feeds a read model and a span sink, neither of which has heard an event yet.

    others  hear each event after the read model, under its name; what they wait for, nobody who asks does
    sinks   both, for their counters, `flush` and `close`
    """

    def __init__(
        self, model: ReadModel, spans: SpanSink, *, expects_responses: bool, others: Sequence[EventSink] = ()
    ) -> None:
        self.sinks = (IsolatedSink(model, "read_model"), IsolatedSink(spans, "spans"))
        self._model, self._spans, self._others = model, spans, tuple(others)
        self._event: AnyEvent | None = None
        self._faults: list[tuple[IsolatedSink, Exception, AnyEvent]] = []
        announced = _Announced(model, spans, self._fault)
        self._tracker = TimelineTracker(announced, expects_responses=expects_responses, keep_detail=True)
        self._lock = model.share(self._tracker)
        spans.share(self._tracker)
        self._calls: dict[type, tuple[tuple[int, Handler], ...]] = {}
        self._look_up()

    def _look_up(self) -> None:
        self._calls.clear()
        self._calls |= calls_of(self._tracker, (self._model.phases(), self._spans.phases()))
        self._calls[EngineStarted] += ((0, self._began),)

    def _began(self, _event: EngineStarted) -> None:
        """An engine began, for which both have put up new books."""
        self._look_up()

    def take(self, events: Sequence[AnyEvent]) -> None:
        """Hand several over. Never raises."""
        if not events:
            return
        for sink in self.sinks:
            sink.hear(len(events))
        spans = self._spans
        with self._lock:
            # While nobody asks for a reading, what comes after an event can wait for the last of them.
            is_run, calls = spans.is_run(events), self._calls.get
            for event in events:
                its = calls(type(event))
                if its is not None:
                    self._event = event
                    spans.now_ns, spans.now_seq = event.t_ns, event.seq
                    for place, handle in its:
                        try:
                            handle(event)
                        except Exception as error:  # a listener must not end the thread by what it raises: counted
                            self._fault(place, error)
                if not is_run:
                    self._note(event)
            spans.now_ns, spans.now_seq = events[-1].t_ns, events[-1].seq
            if is_run:
                spans.note_run(events)
            self._model.note_run(events)
            faults, self._faults = self._faults, []
        faults += [(self.sinks[0], error, event) for error, event in self._model.late_faults()]
        # Written where others may wait, as for whoever reads a log: not while readers wait for the lock.
        last: dict[IsolatedSink, AnyEvent] = {}
        for sink, fault, event in faults:
            if last.get(sink) is not event:  # an event is counted once, however often a listener failed at it
                last[sink] = event
                sink.fault(fault, event)
        self._tell_others(events)

    def _tell_others(self, events: Sequence[AnyEvent]) -> None:
        if not self._others:
            return
        for event in events:
            for other in self._others:
                try:
                    other.emit(event)
                except Exception as error:  # as in `take`
                    self.sinks[0].fault(error, event)

    def _note(self, event: AnyEvent) -> None:
        self._event = event
        try:
            self._spans.note(event)
        except Exception as error:  # as in `take`
            self._fault(1, error)

    def _fault(self, place: int, error: Exception) -> None:
        """One of them failed, or, below 0, the timeline of both."""
        assert self._event is not None, "nothing is called between two events"
        for sink in self.sinks if place < 0 else (self.sinks[place],):
            self._faults.append((sink, error, self._event))
        if place:
            self._spans.miss()


class _Announced:
    """Passes on what the timeline announces, to each behind its own wall. Spans are told of ends alone."""

    def __init__(self, model: ReadModel, spans: SpanSink, fault: Callable[[int, Exception], None]) -> None:
        self._model, self._spans, self._fault = model, spans, fault

    def on_admitted(self, request: RequestTimeline) -> None:
        self._tell(0, self._model.on_admitted, request)

    def on_first_token(self, request: RequestTimeline) -> None:
        self._tell(0, self._model.on_first_token, request)

    def on_ttft(self, request: RequestTimeline) -> None:
        self._tell(0, self._model.on_ttft, request)

    def on_gaps(self, gap_ns: int, count: int, *, queued: bool = False) -> None:
        try:
            self._model.on_gaps(gap_ns, count, queued=queued)
        except Exception as error:  # as in `take`
            self._fault(0, error)

    def on_finished(self, request: RequestTimeline) -> None:
        self._tell(0, self._model.on_finished, request)
        self._tell(1, self._spans.on_finished, request)

    def _tell(self, place: int, listener: Callable[[Any], None], request: RequestTimeline) -> None:
        try:
            listener(request)
        except Exception as error:  # as in `take`
            self._fault(place, error)

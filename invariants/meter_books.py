"""Books of what listeners count. Owns: the totals that metrics must show, counted a second time, from events alone.

The names are those of the metric families, so that the two can be laid side by side; nothing of the listener that keeps
the metrics is known here. Gauges are not kept: what they must show follows from the other books when somebody asks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from engine.events import AdmissionDecided, RequestTransitioned, StepCompleted, StepPlanned
from engine.request import Cause, FinishReason
from engine.scheduler.decision import ADMITTED
from invariants.members import ADMIT, FINISHED
from invariants.queue_books import QueueBooks, Track
from invariants.shadow import Shadow
from invariants.time_laws import LifeReading

Key = tuple[str, str]
"""A metric family and the value of its label, "" when it has none."""

_REASONS: Final = {reason.value for reason in FinishReason}


class Readings(NamedTuple):
    """What a listener shows, in its stored units; families that it does not have are not compared.

    observations  of each histogram: how many in all
    lives         some requests that are live or have just ended
    """

    counters: Mapping[Key, int] = {}
    gauges: Mapping[Key, int] = {}
    observations: Mapping[Key, int] = {}
    lives: Sequence[LifeReading] = ()


def finish_reason(cause: Cause) -> str:
    """Under which reason an end is counted."""
    if cause.value in _REASONS:
        return cause.value
    return (FinishReason.LENGTH if cause is Cause.KV_POOL_EXHAUSTED else FinishReason.REFUSED).value


class MeterBooks:
    """Totals of one engine life.

    totals        counters; those that most steps or lives raise are kept apart:
    steps, examined, ends   by kind, by reason, by cause; tokens: of outputs; chosen_tokens, cached_tokens: of admitted
                  pieces; found_tokens, new_tokens: of prompts, cached or not at the first admission
    arrived, admitted, first_tokens, many_tokens   requests: all; admitted once; with a token; ended with two or more
    last_plan, closing   the last plan, and the last that made a pass
    promising     the last plan, None once everybody it promised something to has left
    """

    def __init__(self) -> None:
        self.totals: dict[Key, int] = {}
        self.steps: dict[str, int] = {}
        self.examined: dict[str, int] = {}
        self.ends: dict[str, int] = dict.fromkeys(Cause, 0)
        self.tokens = self.chosen_tokens = self.cached_tokens = self.found_tokens = self.new_tokens = 0
        self.arrived = self.admitted = self.first_tokens = self.many_tokens = self.ended = self.pieces = 0
        self.last_plan: StepPlanned | None = None
        self.promising: StepPlanned | None = None
        self.closing: StepPlanned | None = None
        #: Step in flight -> whose prompt it completes for the first time.
        self.firsts: dict[int, list[str]] = {}

    def _add(self, family: str, label: str, amount: int = 1) -> None:
        key = (family, label)
        self.totals[key] = self.totals.get(key, 0) + amount

    def on_decision(self, event: AdmissionDecided) -> None:
        """What a pass examined, and the pieces it chose."""
        reason = event.reason
        self.examined[reason] = self.examined.get(reason, 0) + 1
        if event.overdrafts:
            for overdraft in event.overdrafts:
                self._add("overdrafts_total", overdraft.value)
        if reason in ADMITTED:
            self.pieces += 1
            self.chosen_tokens += event.selected_extend
            if not event.is_continuation:
                self.cached_tokens += event.prefix_len

    def on_transition(self, track: Track, event: RequestTransitioned) -> None:
        """First admissions and ends. After the queue's books."""
        if event.cause is ADMIT:
            if not track.ways_back:
                self.admitted += 1
                self.found_tokens += event.cached_len
                self.new_tokens += event.prompt_len - event.cached_len
        elif event.target is FINISHED:
            self.ended += 1
            self.many_tokens += event.output_len > 1
            self.ends[event.cause] += 1

    def on_plan(self, books: Shadow, event: StepPlanned) -> None:
        """What a plan does, and what it left in its ledgers."""
        self.last_plan = self.promising = event
        if event.budget_close is not None:
            self.closing = event
        if event.prefills:
            requests = books.requests
            self.firsts[event.step] = [
                row.rid
                for row in event.prefills
                if row.is_last and row.rid in requests and not requests[row.rid].outputs
            ]
        for victim in event.retractions:
            if not victim.aborted:
                self._add("retractions_total", victim.cause)
                self._add("retracted_tokens_total", "output", victim.output_len)
        if event.preempted:
            self._add("retractions_total", "priority", len(event.preempted))
        for guard in event.guards:
            self._add("guard_activations_total", guard.value)
        if event.evicted_pages:
            self._add("kv_pages_evicted_total", "", event.evicted_pages)

    def on_first_tokens(self, queue: QueueBooks, event: StepCompleted, void: Collection[str] = ()) -> None:
        """The step that brings the first tokens of `firsts` is over; a failed one brings none, nor do `void` rows."""
        firsts = [rid for rid in self.firsts.pop(event.step, ()) if rid not in void]
        if event.failed:
            return
        self.first_tokens += len(firsts)
        for rid in firsts:
            track = queue.live.get(rid) or queue.ended.get(rid)
            if track is not None:
                track.first_token_ns = event.t_ns

"""Laws of single requests. Owns: INV-REQ-01 to 06 - nobody is left waiting, overtaken, pushed back twice or miscounted.

Each costs what a pass looked at, never what waits: gaps are running counts, overtakes a search in a sorted list, and
the queue is walked from its oldest entry only as far as somebody is due.
"""

from __future__ import annotations

from typing import Final

from engine.config import EngineConfig, Policy
from engine.events import AdmissionDecided, RequestTransitioned, StepPlanned
from engine.request import Cause
from engine.scheduler.decision import ADMITTED
from invariants.members import ADMIT, FINISHED, PREEMPT, PREFILL
from invariants.queue_books import PUSHED_BACK, QueueBooks, Track
from invariants.shadow import Shadow
from invariants.violation import Report

#: Requests that are due which one pass is held to; the others are as due in the next one.
MOST_DUE: Final = 16
#: Steps without work that an engine may take before it admits a request that has it to itself (guard `lone_refused`).
LONE_STEPS: Final = 1
#: A failed step computes nothing; who is pushed back has nothing.
_NOT_COUNTED: Final = PUSHED_BACK | {Cause.ERROR}


class RequestLaws:
    """The laws and their running counts.

    gap_steps  N: steps in a row that may compute prompts while running requests wait for their next token
    """

    def __init__(self, config: EngineConfig, *, gap_steps: int) -> None:
        scheduler = config.scheduler
        self._guards = scheduler.guards
        self._gap_limit = gap_steps
        fcfs = scheduler.schedule_policy is Policy.FCFS and not scheduler.enable_priority_scheduling
        #: Overtakes after which a request comes first; under fcfs it does from the beginning.
        self._overtakes = 0 if fcfs else scheduler.max_overtakes
        limit_s = scheduler.starvation_limit_s
        self._starved_ns = None if limit_s is None else limit_s * 1e9
        self._is_bounded = self._overtakes is not None or limit_s is not None
        self._gap = 0
        self._lone = 0

    def on_decision(self, queue: QueueBooks, event: AdmissionDecided, report: Report) -> None:
        """The count of overtakes that a decision carries."""
        track = queue.waiting.get(event.rid)
        if track is None or event.is_continuation:
            return
        due = queue.overtakes(track)
        if event.times_passed_over != due:
            report("INV-REQ-04", f"passed over {due} times", f"{event.times_passed_over}", rid=event.rid)

    def on_transition(self, track: Track, event: RequestTransitioned, report: Report, *, ahead: int = 0) -> None:
        """Ways back are counted, and what a prompt found and computed adds up when it is complete.

        ahead  tokens of it in steps in flight that are not the one applied: an end leaves them out
        """
        if event.num_retractions != track.ways_back:
            report("INV-REQ-05", f"pushed back {track.ways_back} times", f"{event.num_retractions}", rid=event.rid)
            track.ways_back = event.num_retractions
        if event.source is PREFILL and event.cause not in _NOT_COUNTED:
            due = event.computed_len + (ahead if event.target is FINISHED else 0)
            if track.cached + track.computed != due:
                report(
                    "INV-REQ-06",
                    f"cached + computed = {due} tokens of the prompt",
                    f"{track.cached} cached + {track.computed} computed",
                    rid=event.rid,
                )
        if event.cause is not ADMIT and event.cached_len:
            report("INV-REQ-06", "tokens found cached told at an admission only", f"{event.cached_len}", rid=event.rid)

    def on_plan(self, books: Shadow, queue: QueueBooks, event: StepPlanned, report: Report) -> None:
        """A committed plan: what it leaves undone, whom it passes over, whom it pushes back."""
        if event.decodes or not books.running:
            self._gap = 0
        else:
            self._no_token(books, event, report)
        if queue.victims or event.retractions or event.preempted:
            _victims(books, queue, event, report)
        if event.prefills:
            self._lone = 0
            self._admitted(books, queue, event, report)
        elif queue.waiting and not event.claim_failed:
            self._nobody_admitted(books, queue, event, report)
        else:
            self._lone = 0

    def _no_token(self, books: Shadow, event: StepPlanned, report: Report) -> None:
        """Somebody runs and gets no token in this step."""
        if not event.prefills and not event.claim_failed:
            report(
                "INV-REQ-01",
                f"a token for each of {len(books.running)} running requests, or prompts computed",
                f"a step of kind {event.kind}",
                rid=next(iter(books.running)),
            )
        self._gap += 1
        if self._gap > self._gap_limit:
            report(
                "INV-REQ-01",
                f"a next token within {self._gap_limit} steps",
                f"{self._gap} steps without one for {len(books.running)} running requests",
                rid=next(iter(books.running)),
            )
            self._gap = 0

    def _nobody_admitted(self, books: Shadow, queue: QueueBooks, event: StepPlanned, report: Report) -> None:
        """Somebody waits and nobody was admitted: is anything in their way?"""
        leaving = books.overlap is not None and bool(books.overlap.spent)  # they hold memory until their outcome
        if books.view.running or books.view.continuation is not None or leaving or not self._guards:
            self._lone = 0
            return
        self._lone += 1
        if self._lone > LONE_STEPS:
            rid = next(iter(queue.waiting))
            end = event.pass_end
            why = "no pass" if end is None else end.stopped_by
            report(
                "INV-REQ-02",
                f"an admission within {LONE_STEPS + 1} steps, since nobody runs",
                f"{self._lone} steps without, {len(queue.waiting)} waiting ({why})",
                rid=rid,
            )
            self._lone = 0

    def _admitted(self, books: Shadow, queue: QueueBooks, event: StepPlanned, report: Report) -> None:
        """Whom this pass admitted, and past whom."""
        latest = newest = -1
        held = books.view.continuation
        for row in event.prefills:
            track = queue.live.get(row.rid)
            if track is None:
                continue
            track.computed += row.extend_len
            latest = max(latest, track.entry)
            if row.rid != held:
                newest = max(newest, track.entry)
        if self._is_bounded and newest >= 0 and queue.waiting:
            self._overtaken(books, queue, event, newest, report)
        if latest >= 0:
            queue.admitted(latest)

    def _overtaken(self, books: Shadow, queue: QueueBooks, event: StepPlanned, newest: int, report: Report) -> None:
        """Who is due and entered before an admitted one was examined before it."""
        examined: dict[str, int] | None = None
        for seen, track in enumerate(queue.waiting.values()):
            if track.entry > newest or seen >= MOST_DUE or not self._is_due(queue, track, event.t_ns):
                return
            if examined is None:
                examined = {decision.rid: decision.order for decision in books.decisions}
            later = [
                decision
                for decision in books.decisions
                if decision.reason in ADMITTED
                and not decision.is_continuation
                and decision.rid in queue.live
                and queue.live[decision.rid].entry > track.entry
            ]
            if later and examined.get(track.rid, later[0].order) >= later[0].order:
                report(
                    "INV-REQ-03",
                    f"{track.rid}, passed over {queue.overtakes_in_stay(track)} times, waiting "
                    f"{(event.t_ns - track.entered_ns) / 1e9:g} s, looked at first",
                    f"{later[0].rid}, which entered later, admitted without a look at it",
                    rid=track.rid,
                    seqs=(later[0].seq,),
                )

    def _is_due(self, queue: QueueBooks, track: Track, now_ns: int) -> bool:
        """Whether a request comes before all that entered after it. If one is, every older one is."""
        if self._starved_ns is not None and now_ns - track.entered_ns >= self._starved_ns:
            return True
        return self._overtakes is not None and queue.overtakes_in_stay(track) >= self._overtakes


def _victims(books: Shadow, queue: QueueBooks, event: StepPlanned, report: Report) -> None:
    """Those pushed back in this step are those that the plan names, each once, with what they lose."""
    due = sorted([victim.rid for victim in event.retractions if not victim.aborted] + list(event.preempted))
    found = sorted(rid for rid, _ in queue.victims)
    if due != found:
        odd = sorted(set(due) ^ set(found)) or [rid for rid in found if found.count(rid) > 1] or due
        report("INV-REQ-05", f"pushed back once, as planned: {due[:8]}", f"{found[:8]}", rid=odd[0])
    causes = dict(queue.victims)
    for rid in event.preempted:
        if causes.get(rid, PREEMPT) is not PREEMPT:
            report("INV-REQ-05", f"{rid} pushed back by {PREEMPT}", causes[rid], rid=rid)
    for victim in event.retractions:
        if victim.aborted:
            continue
        if causes.get(victim.rid, Cause.RETRACT) is not Cause.RETRACT:
            report("INV-REQ-05", f"{victim.rid} pushed back by {Cause.RETRACT}", causes[victim.rid], rid=victim.rid)
        request = books.requests.get(victim.rid)
        # The last output token has no K/V yet.
        if request is not None and (victim.output_len, victim.lost_tokens) != (request.outputs, request.seq_len - 1):
            report(
                "INV-REQ-05",
                f"{request.outputs} outputs and {request.seq_len - 1} computed tokens lost",
                f"{victim.output_len} and {victim.lost_tokens}",
                rid=victim.rid,
            )
    queue.victims.clear()

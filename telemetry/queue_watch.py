"""The queue as a listener sees it. Owns: the blocker of each waiting request, and how long each blocker held anyone.

After a pass, the requests it refused are held by what refused them and all others by `order`; so only the refused ones
of this pass and of the last, and the newcomers, change. That keeps a pass O(what it looked at) with any queue length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import islice

from engine.events import AdmissionDecided, StepPlanned
from engine.scheduler.decision import Reason
from engine.scheduler.plan import PassEnd
from telemetry.blockers import ENGINE_BUSY, OF_REASON, ORDER
from telemetry.observe import BLOCKERS
from telemetry.overtakes import OvertakeBook, Overtaken
from telemetry.pass_ends import EndShare, PassEnds
from telemetry.request_timeline import Held, RequestTimeline


class QueueWatch:
    """Waiting requests and their blockers.

    waiting      by rid, in order of arrival; a retracted request goes to the end
    counts       waiting requests by blocker
    waited_ns    integral of `counts` over time, up to the last change or pass
    passes       passes made so far
    ends         what ended them
    """

    def __init__(self, *, keep_spans: bool) -> None:
        self._keep_spans = keep_spans
        self.waiting: dict[str, RequestTimeline] = {}
        self.counts = [0] * len(BLOCKERS)
        self.waited_ns = [0] * len(BLOCKERS)
        self._came_back: dict[str, None] = {}
        self.passes = 0
        self.ends = PassEnds()
        self.last_pass: PassEnd | None = None
        self.last_pass_step = 0
        self._newcomers: dict[str, None] = {}
        self._refused: dict[str, None] = {}
        self._at_ns = 0
        # Numbers of the waiting requests' entries, rising: the place of one is found without walking the queue.
        self._entries: list[int] = []
        self._entered = 0
        self._overtakes = OvertakeBook()
        #: Entries of those that left for the pass whose plan is still to come.
        self._admitted: list[int] = []

    @property
    def retracted(self) -> int:
        """Waiting requests that had been admitted before."""
        return len(self._came_back)

    def in_order(self) -> list[RequestTimeline]:
        """Waiting requests: those the last pass refused, as it looked at them, then the others as they came."""
        first = [self.waiting[rid] for rid in self._refused]
        return first + [request for rid, request in self.waiting.items() if rid not in self._refused]

    def place(self, rid: str) -> int | None:
        """Place of a waiting request by entry to the queue, 0 for the first; None when it does not wait."""
        request = self.waiting.get(rid)
        return None if request is None else bisect_left(self._entries, request.enqueued_as)

    def first(self, n: int) -> tuple[str, ...]:
        """The first `n` by entry to the queue."""
        return tuple(islice(self.waiting, n))

    def advance(self, t_ns: int) -> None:
        """Move the integrals to `t_ns`; an earlier time changes nothing."""
        delta = t_ns - self._at_ns
        if delta <= 0:
            return
        self._at_ns = t_ns
        self.ends.advance(delta)
        if self.waiting:
            for at, count in enumerate(self.counts):
                if count:
                    self.waited_ns[at] += count * delta

    def oldest_ns(self) -> int | None:
        """When the longest-waiting request came to the queue for the first time; None when nobody waits.

        Requests that arrived in order stand in order, and retracted ones, which came earlier, at the end: so the first
        and the retracted are the only candidates.
        """
        if not self.waiting:
            return None
        oldest = next(iter(self.waiting.values())).enqueued_ns
        if self.retracted:
            oldest = min([oldest, *(self.waiting[rid].enqueued_ns for rid in self._came_back)])
        return oldest

    def enter(self, request: RequestTimeline, t_ns: int) -> None:
        """`request` came (back) to the queue: nobody has looked at it, so the engine itself is in its way."""
        self.advance(t_ns)
        self.waiting[request.rid] = request
        if request.admitted_ns is not None:
            self._came_back[request.rid] = None
        if self._keep_spans:
            self._entered += 1
            request.enqueued_as = self._entered
            self._entries.append(self._entered)
        self.counts[ENGINE_BUSY] += 1
        self._newcomers[request.rid] = None
        request.blocker = ENGINE_BUSY
        request.blocker_since_ns = max(t_ns, request.cursor_ns)
        request.blocker_passes = request.pass_at_entry = self.passes
        request.reason = None

    def leave(self, request: RequestTimeline, t_ns: int, *, is_admitted: bool = False) -> None:
        """`request` was admitted, or ended, at `t_ns`."""
        if request.rid not in self.waiting or request.blocker is None:
            return
        self.advance(t_ns)
        if self._keep_spans:
            del self._entries[bisect_left(self._entries, request.enqueued_as)]
            # The pass that takes it is not counted yet, and does not pass it over.
            request.overtaken = self.overtaken(request)
            if is_admitted:
                self._admitted.append(request.enqueued_as)
        del self.waiting[request.rid]
        self._close(request, t_ns)
        self.counts[request.blocker] -= 1
        self._came_back.pop(request.rid, None)
        self._newcomers.pop(request.rid, None)
        self._refused.pop(request.rid, None)
        request.blocker = None

    def overtaken(self, request: RequestTimeline) -> Overtaken:
        """What passed over `request` so far, before its retractions too. Needs `keep_spans`."""
        if request.rid not in self.waiting:
            return request.overtaken
        return request.overtaken.plus(self._overtakes.since(request.enqueued_as))

    def passed(self, latest_entry: int) -> None:
        """A pass computed prompts; `latest_entry` is the last to enter of all of them, begun ones included."""
        if self._keep_spans:
            admitted, self._admitted = self._admitted, []
            self._overtakes.passed(latest_entry, admitted, self._entries[0] if self._entries else latest_entry)

    def apply_pass(self, event: StepPlanned, decisions: Iterable[AdmissionDecided], admitted: set[str]) -> None:
        """Give every waiting request the blocker that this pass found, touching only those it changes."""
        end = event.pass_end
        assert end is not None, "a step without a pass decides nothing"
        t_ns = event.t_ns
        self.advance(t_ns)
        if not self.waiting:
            self._note_pass(end, event.step)
            return
        refused: dict[str, tuple[int, Reason]] = {}
        for decision in decisions:
            if decision.rid in self.waiting and decision.rid not in admitted:
                # Admitted, and still waiting: the pages were not there at commit, so the whole pass was put back.
                reason = decision.reason if decision.reason in OF_REASON else Reason.PARKED_BY_GUARD
                refused[decision.rid] = (OF_REASON[reason], reason)
        self._add_stopper(end, refused)
        # Retractions of this step came to the queue after its pass: they are newcomers to the next one.
        late = {victim.rid for victim in event.retractions}.union(event.preempted)
        for rid in [*self._refused, *self._newcomers]:
            if rid not in refused and rid not in late:
                self._set(self.waiting[rid], ORDER, None, t_ns)
        for rid, (blocker, reason) in refused.items():
            self._set(self.waiting[rid], blocker, reason, t_ns)
        self._note_pass(end, event.step)
        self._refused = dict.fromkeys(refused)
        self._newcomers = {rid: None for rid in late if rid in self.waiting}

    def _note_pass(self, end: PassEnd, step: int) -> None:
        """A step that skips its pass makes none; and a full flag only repeats what an earlier pass found."""
        self.passes += end.stop != "skipped"
        self.ends.passed(end, step)
        if end.stopped_by is not Reason.FULL_FLAG_SET or self.last_pass is None:
            self.last_pass = end
        self.last_pass_step = step

    def _add_stopper(self, end: PassEnd, refused: dict[str, tuple[int, Reason]]) -> None:
        """The request at which the pass ended without an examination: no row, or the full flag, or a spent budget."""
        if end.stopped_by is Reason.QUEUE_END or end.stopped_by not in OF_REASON or not self.waiting:
            return
        if end.stopped_by is Reason.FULL_FLAG_SET:
            # The flag only repeats what an earlier pass found: whoever was refused then is still held by that.
            for rid in self._refused:
                request = self.waiting[rid]
                if rid not in refused and request.blocker is not None and request.reason is not None:
                    refused[rid] = (request.blocker, request.reason)
            if refused:
                return
        stopper = end.rid
        if stopper is None and end.stop == "skipped":
            stopper = next(iter(self.waiting))
        if stopper is not None and stopper in self.waiting and stopper not in refused:
            refused[stopper] = (OF_REASON[end.stopped_by], end.stopped_by)

    def _set(self, request: RequestTimeline, blocker: int, reason: Reason | None, t_ns: int) -> None:
        if request.blocker == blocker and request.reason == reason:
            return
        assert request.blocker is not None, "a waiting request always has a blocker"
        self._close(request, t_ns)
        self.counts[request.blocker] -= 1
        self.counts[blocker] += 1
        request.blocker = blocker
        request.blocker_passes = self.passes
        request.reason = reason
        if blocker == ORDER and self._keep_spans:
            request.ends_before = self.ends.stand()

    def refuse_continuation(self, request: RequestTimeline, blocker: int, reason: Reason, t_ns: int) -> None:
        """A pass kept back a request that is between two chunks; it is not waiting, so it is not in `counts`."""
        self.close_refusal(request, t_ns)
        request.mark(request.phase, t_ns)
        request.blocker = blocker
        request.blocker_since_ns = request.cursor_ns
        request.blocker_passes = self.passes
        request.reason = reason

    def close_refusal(self, request: RequestTimeline, t_ns: int) -> None:
        """End the stretch that `refuse_continuation` began, if one is open."""
        if request.blocker is None or request.rid in self.waiting:
            return
        before = request.blocker_since_ns
        self._close(request, t_ns)
        request.refused_between_ns += request.blocker_since_ns - before
        request.blocker = request.reason = None

    def _close(self, request: RequestTimeline, t_ns: int) -> None:
        """Charge the stretch since the blocker was set to it."""
        assert request.blocker is not None, "no stretch is open"
        start, end = request.blocker_since_ns, max(t_ns, request.blocker_since_ns)
        target = request.blockers if request.first_token_ns is None else request.late_blockers
        target[request.blocker] += end - start
        request.blocker_since_ns = end
        if self._keep_spans and end > start:
            who, reason = None, request.reason
            ends: tuple[EndShare, ...] = ()
            if request.blocker == ORDER and self.last_pass is not None:
                who, reason = self.last_pass.rid, self.last_pass.stopped_by
                ends = self.ends.since(request.ends_before or {}, end - start)
                if request.first_token_ns is None:
                    for share in ends:
                        request.order_ns[share.reason] = request.order_ns.get(share.reason, 0) + share.ns
            passes = self.passes - request.blocker_passes
            request.held.append(Held(start, end, request.blocker, reason, who, passes, ends))

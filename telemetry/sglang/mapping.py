"""Mapping. Owns: making this engine's events of SGLang's facts, on the worker's thread.

Events come out in the order in which SGLang did things. Under its overlapped scheduling the outcome of a step comes
after the plan of the next one, and so do its events. What SGLang does not tell is not made up: see `support.ABSENT`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final, assert_never

from engine.events import (
    AbortRequested,
    AdmissionDecided,
    AnyEvent,
    EngineStarted,
    RequestArrived,
    RequestTransitioned,
    StepCompleted,
    StepPlanned,
)
from engine.request import TRANSITIONS, Cause, FinishReason, RequestState
from engine.scheduler.decision import Overdraft
from engine.scheduler.pass_state import overdrafts
from engine.scheduler.plan import OutcomeRow, PassEnd, PrefillRow, Retraction, StepKind, StepTimes
from invariants.queue_books import QueueBooks
from telemetry.sglang.facts import AbortAsked, AnyFact, Arrived, Back, Done, Ended, Gone, Pass, Planned, Tried
from telemetry.sglang.lives import DECODE, FINISHED, PREFILL, WAITING, Life, Lives
from telemetry.sglang.reasons import End, Verdict, end_of, verdict_of

_FINISH: Final = {
    "stop": (FinishReason.STOP, Cause.STOP),
    "length": (FinishReason.LENGTH, Cause.LENGTH),
    "abort": (FinishReason.ABORT, Cause.ABORT),
    "error": (FinishReason.ERROR, Cause.ERROR),
}


class Mapper:
    """Facts in, events out, one life of one scheduler.

    started   the first event, which `take` puts before all others
    clip      SGLang's cap of one request's promised output
    lost      facts that never came: a full queue dropped them
    unmapped  facts about requests that are not known, by kind
    """

    def __init__(self, started: EngineStarted, *, clip: int, out: Callable[[AnyEvent], None]) -> None:
        self._out = out
        self._page = started.page_size
        self._num_pages = started.num_pages
        self._clip = clip
        self._seq = 1
        self._step = 0
        self._t_ns = started.t_ns
        self._next_number = 0
        self.lost = 0
        self.unmapped: Counter[str] = Counter()
        self._lives = Lives()
        self._queue = QueueBooks()
        self._plans: dict[int, Planned] = {}
        #: The new-token ratio that the last step left, and the next one begins with.
        self._ratio: float | None = None
        out(started)

    def take(self, fact: AnyFact) -> None:
        """Map one fact."""
        if fact.number > self._next_number:
            # The journal says where events are missing by a hole in their numbers; a fact makes at least one event.
            self.lost += fact.number - self._next_number
            self._seq += fact.number - self._next_number
        self._next_number = fact.number + 1
        self._t_ns = max(self._t_ns, fact.t_ns)
        match fact:
            case Planned():
                self._planned(fact)
            case Done():
                self._done(fact)
            case Arrived():
                self._arrived(fact)
            case AbortAsked():
                for rid in [rid for rid in self._lives.by_rid if rid.startswith(_prefixes(fact.prefix))]:
                    self._out(AbortRequested(*self._head(), rid, "", Cause(fact.cause)))
            case Gone():
                self._gone(fact)
            case _:
                assert_never(fact)

    def _head(self, step: int | None = None) -> tuple[int, int, int]:
        seq = self._seq
        self._seq += 1
        return seq, self._step if step is None else step, self._t_ns

    # -- requests --------------------------------------------------------------------------------------------------

    def _arrived(self, fact: Arrived) -> None:
        known = self._lives.by_rid.get(fact.rid)
        if known is not None and fact.retractions > known.retractions:
            self._back(Back(fact.rid, "retract", fact.output_len, fact.retractions, fact.t_ns))
            return
        if known is not None:
            self.unmapped["id used twice"] += 1
            self._finish(known, Cause.ERROR, known.output_len, detail="id_used_again")
        arrived = RequestArrived(
            *self._head(),
            fact.rid,
            fact.prompt_len,
            fact.max_new_tokens,
            fact.max_new_tokens,
            b"",
            None,
            fact.ignore_eos,
            fact.priority,
            fact.routing_key,
            min(fact.accepted_ns, self._t_ns),
        )
        life = Life(fact.rid, fact.prompt_len, fact.max_new_tokens, fact.ignore_eos, fact.output_len, fact.retractions)
        self._lives.add(life)
        self._queue.arrive(arrived)
        self._out(arrived)
        self._transition(life, None, Cause.ARRIVE)

    def _transition(
        self,
        life: Life,
        source: RequestState | None,
        cause: Cause,
        *,
        step: int | None = None,
        row: int | None = None,
        cached_len: int = 0,
        detail: str = "",
    ) -> None:
        event = RequestTransitioned(
            *self._head(step),
            life.rid,
            source,
            life.state,
            cause,
            life.prompt_len,
            life.output_len,
            life.computed_len,
            row,
            life.retractions,
            cached_len,
            detail,
        )
        if cause is not Cause.ARRIVE:
            self._queue.transition(event)
        self._out(event)

    def _finish(self, life: Life, cause: Cause, output_len: int, *, step: int | None = None, detail: str = "") -> None:
        source, row = life.state, life.row
        if cause not in TRANSITIONS[source, FINISHED]:
            cause = Cause.ABORT
        self._lives.end(life)
        life.output_len, life.row = output_len, None
        self._transition(life, source, cause, step=step, row=row, detail=detail)

    def _gone(self, fact: Gone) -> None:
        life = self._lives.by_rid.get(fact.rid)
        if life is not None:  # else it was turned away at the door, and never came to the queue
            self._finish(life, Cause(fact.cause), max(fact.output_len, life.output_len))

    def _back(self, back: Back) -> Retraction | None:
        """A running request is waiting again; what the plan says of it."""
        life = self._lives.by_rid.get(back.rid)
        if life is None or life.state is WAITING:
            self.unmapped["pushed back, not running"] += 1
            return None
        cause, source, row = Cause(back.cause), life.state, life.row
        lost = max(life.seq_len - 1, 0) if source is DECODE else life.computed_len
        self._lives.requeue(life, output_len=back.output_len, retractions=back.retractions)
        self._transition(life, source, cause, row=row)
        return Retraction(back.rid, "kv_now" if cause is Cause.RETRACT else "priority", back.output_len, lost)

    # -- a plan ----------------------------------------------------------------------------------------------------

    def _planned(self, fact: Planned) -> None:
        self._step = fact.step
        passed = fact.pass_
        promised = self._promised(passed, fact)
        end = self._decisions(passed) if passed is not None else None
        preempted = tuple(back.rid for back in fact.backs if back.cause == "preempt")
        for back in fact.backs:
            if back.cause == "preempt":
                self._back(back)
        self._admit(fact)
        retractions = [self._back(back) for back in fact.backs if back.cause != "preempt"]
        if not fact.is_idle:
            self._plans[fact.step] = fact
        prefills = tuple(
            PrefillRow(row.rid, row.prefix_len, row.extend_end - row.prefix_len, row.is_last) for row in fact.rows
        )
        kind = StepKind.MIXED if prefills and fact.decodes else StepKind.EXTEND if prefills else StepKind.DECODE
        self._out(
            StepPlanned(
                *self._head(),
                StepKind.IDLE if fact.is_idle else kind,
                passed.policy if passed is not None and passed.skipped is None else None,
                prefills,
                fact.decodes,
                (*(row.rid for row in fact.rows if row.is_last), *fact.decodes),
                tuple(retraction for retraction in retractions if retraction is not None),
                preempted,
                passed.mixed if passed is not None else 0,
                passed.opened if passed is not None else None,
                passed.closed if passed is not None else None,
                PassEnd(end.stop, end.reason, end.rid, end.not_considered) if end is not None else None,
                passed.chunk_limit if passed is not None else None,
                fact.continuation,
                fact.batch_is_full,
                fact.new_token_ratio,
                fact.num_waiting,
                fact.num_running,
                self._lives.waiting_tokens,
                promised,
                0,
                self._pages(fact.tokens),
            )
        )
        self._ratio = fact.new_token_ratio
        if fact.is_idle:
            cuts = (fact.t_ns, fact.t_ns, fact.planned_ns, fact.planned_ns, fact.planned_ns, fact.planned_ns)
            self._completed(fact.step, StepKind.IDLE, (), cuts, fact.planned_ns, fact.num_waiting, fact.tokens)

    def _promised(self, passed: Pass | None, fact: Planned) -> float:
        """What running requests are promised: the adder's own sum, or, without an adder, the same made here."""
        if passed is not None and passed.skipped is None:
            return passed.promised
        ratio = fact.new_token_ratio if self._ratio is None else self._ratio
        return float(
            sum(
                min(life.max_new - life.output_len, self._clip) * (1.0 if life.ignore_eos else ratio)
                for life in self._lives.running.values()
            )
        )

    def _decisions(self, passed: Pass) -> End:
        verdicts = [verdict_of(tried, passed, page_size=self._page) for tried in passed.tried]
        end = end_of(passed, verdicts)
        ends_at = len(verdicts) - 1 if end.stop == "result" else -1
        for order, (tried, verdict) in enumerate(zip(passed.tried, verdicts, strict=True)):
            self._decided(order, tried, verdict, is_last=order == ends_at)
        if end.untried is not None and passed.untried is not None:
            left = passed.tried[-1].after if passed.tried else passed.opened
            assert left is not None, "an adder was made, so it had ledgers"
            found = passed.untried
            tried = Tried(
                found.rid, False, found.prefix_len, found.candidate, 0, found.candidate, False, left, left, ""
            )
            self._decided(len(verdicts), tried, end.untried, is_last=True)
        return end

    def _decided(self, order: int, tried: Tried, verdict: Verdict, *, is_last: bool) -> None:
        life = self._lives.by_rid.get(tried.rid)
        track = self._queue.waiting.get(tried.rid)
        is_cut = tried.is_admitted and tried.rest > 0
        reserved = min(life.max_new, self._clip) if life is not None and tried.is_admitted and not is_cut else 0
        before, after = tried.before, tried.after if tried.is_admitted else tried.before
        named: tuple[Overdraft, ...] = ()
        if tried.is_admitted:
            named = overdrafts(before, after, is_continuation=tried.is_continuation)
        self._out(
            AdmissionDecided(
                *self._head(),
                tried.rid,
                order,
                tried.is_continuation,
                tried.prefix_len,
                tried.candidate,
                tried.selected,
                tried.prefix_len + tried.selected,
                before.rem_input,
                after.rem_input,
                before.rem_chunk,
                after.rem_chunk,
                before.remaining_total,
                after.remaining_total,
                before.remaining_current,
                after.remaining_current,
                reserved,
                is_cut,
                verdict.result,
                verdict.reason,
                verdict.need,
                verdict.have,
                is_last,
                self._queue.overtakes(track) if track is not None else 0,
                named,
            )
        )

    def _admit(self, fact: Planned) -> None:
        latest = -1
        for row in fact.rows:
            life = self._lives.by_rid.get(row.rid)
            if life is None:
                self.unmapped["admitted, not known"] += 1
                continue
            track = self._queue.live.get(row.rid)
            latest = max(latest, track.entry if track is not None else -1)
            if life.state is WAITING:
                self._lives.move(life, PREFILL)
                life.computed_len, life.row = row.prefix_len, row.row
                self._transition(life, WAITING, Cause.ADMIT, row=row.row, cached_len=row.prefix_len)
        if latest >= 0:
            self._queue.admitted(latest)

    def _pages(self, tokens: tuple[int, int, int]) -> tuple[int, int, int, int]:
        """[free, private, protected, evictable] pages: private is what the pool has beyond what SGLang names."""
        free, evictable, protected = (count // self._page for count in tokens)
        return free, max(self._num_pages - free - evictable - protected, 0), protected, evictable

    # -- its outcome -----------------------------------------------------------------------------------------------

    def _done(self, fact: Done) -> None:
        plan = self._plans.pop(fact.step, None)
        if plan is None:
            self.unmapped["done, not planned"] += 1
            return
        ended = {each.rid: each for each in fact.ended}
        rows: list[OutcomeRow] = []
        for row in plan.rows:
            life = self._lives.by_rid.get(row.rid)
            if life is None or life.state is not PREFILL:
                continue  # ended, or pushed back, while its piece was computed
            life.computed_len = row.extend_end
            if row.is_last:
                self._token(life, ended.get(row.rid), fact.step, rows)
            else:
                self._transition(life, PREFILL, Cause.NEXT_CHUNK, step=fact.step)
        for rid in plan.decodes:
            life = self._lives.by_rid.get(rid)
            if life is not None and life.state is DECODE:
                life.computed_len += 1
                self._token(life, ended.get(rid), fact.step, rows)
        kind = StepKind.MIXED if plan.rows and plan.decodes else StepKind.EXTEND if plan.rows else StepKind.DECODE
        cuts = (plan.t_ns, plan.t_ns, plan.planned_ns, plan.planned_ns, fact.launched_ns, fact.ready_ns)
        self._completed(fact.step, kind, tuple(rows), cuts, fact.t_ns, fact.num_waiting, fact.tokens)

    def _token(self, life: Life, end: Ended | None, step: int, rows: list[OutcomeRow]) -> None:
        """One output token of `life`, and what it ends."""
        if end is not None:
            finish, cause = _FINISH[end.kind]
            if end.output_len > life.output_len:
                rows.append(OutcomeRow(life.rid, finish=finish))
            self._finish(life, cause, end.output_len, step=step)
            return
        life.output_len += 1
        rows.append(OutcomeRow(life.rid))
        if life.state is PREFILL:
            self._lives.move(life, DECODE)
            self._transition(life, PREFILL, Cause.FINAL_CHUNK, step=step)

    def _completed(
        self,
        step: int,
        kind: StepKind,
        rows: tuple[OutcomeRow, ...],
        cuts: tuple[int, int, int, int, int, int],
        applied_ns: int,
        num_waiting: int,
        tokens: tuple[int, int, int],
    ) -> None:
        self._t_ns = max(self._t_ns, applied_ns)
        self._out(
            StepCompleted(
                *self._head(step),
                kind,
                rows,
                StepTimes(*cuts, self._t_ns),
                False,
                self._pages(tokens),
                num_waiting,
                len(self._lives.running),
            )
        )


def _prefixes(asked: str | list[str] | None) -> tuple[str, ...]:
    """What ids may begin with: of a batch each of its ids, of nothing nothing."""
    if asked is None:
        return ()
    return (asked,) if isinstance(asked, str) else tuple(one for one in asked if isinstance(one, str))

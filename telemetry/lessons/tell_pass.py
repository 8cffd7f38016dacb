"""Telling a pass. Owns: order, opening, each candidate, the verdicts and the end, out of one plan."""

from __future__ import annotations

from typing import Final

import msgspec

from engine.scheduler.accounting import cut_units
from engine.scheduler.decision import AdmissionDecision, LedgerView, Reason, Result
from engine.scheduler.plan import StepPlan
from telemetry.lessons import formulas, questions
from telemetry.lessons.moment import LedgerBar, QueueRow, Segment, Text
from telemetry.lessons.narrator import Narrator
from telemetry.lessons.words import REASONS, listed, number, say

LEDGERS: Final = ("rem_input", "rem_chunk", "remaining_current", "remaining_total")

#: The ledger whose test a refusal speaks of.
TESTED: Final[dict[Reason, str]] = {
    Reason.KV_TOTAL_EXHAUSTED: "remaining_total",
    Reason.KV_NOW_EXHAUSTED: "remaining_current",
    Reason.COMPUTE_EXHAUSTED: "rem_input",
    Reason.CHUNK_EXHAUSTED: "rem_chunk",
    Reason.CHUNK_BELOW_PAGE: "rem_chunk",
    Reason.CHUNK_SLOT_TAKEN: "rem_chunk",
}


class Told(msgspec.Struct):
    """What a pass left to be shown with the commit: the ledgers at its end. `queue`: as it was ordered."""

    ledgers: tuple[LedgerBar, ...]
    queue: tuple[QueueRow, ...]


def tell_pass(narrator: Narrator, plan: StepPlan, before: tuple[QueueRow, ...]) -> Told:
    """The moments of a pass, or of the reason why none was made. `before`: the queue before it was ordered."""
    if plan.budget_open is None:
        _skipped(narrator, plan)
        return Told((), narrator.queue())
    narrator.skipped = None
    told = _Pass(narrator, plan)
    told.order(before)
    told.open()
    for place, found in enumerate(plan.decisions):
        if found.is_continuation:
            told.continuation(place, found)
        else:
            told.candidate(place, found)
    told.end()
    return Told(told.bars(len(plan.decisions)), told.queue)


def _skipped(narrator: Narrator, plan: StepPlan) -> None:
    end, state = plan.pass_end, narrator.core.state
    before, narrator.skipped = narrator.skipped, state.skip_reason
    if end is None or end.stopped_by is Reason.QUEUE_END or state.skip_reason is None or state.skip_reason == before:
        return
    rows = narrator.stage.config.scheduler.max_running_requests
    narrator.add(
        "skip",
        say(f"skip_{state.skip_reason}", n=len(state.waiting), rows=rows),
        reason=end.stopped_by.value,
        decided=end.stopped_by.value,
    )


class _Pass:
    """One pass, decision by decision."""

    def __init__(self, narrator: Narrator, plan: StepPlan) -> None:
        self._narrator = narrator
        self._plan = plan
        self._state = narrator.core.state
        free, _, _, evictable = narrator.core.kv.pool.counts
        self._free, self._evictable = free, evictable
        self._size = narrator.core.kv.page_size
        self.queue = narrator.queue(plan)

    # -- parts -----------------------------------------------------------------------------------------------------

    def order(self, before: tuple[QueueRow, ...]) -> None:
        plan, config = self._plan, self._state.config
        if len(self.queue) < 2:
            return
        then = {row.rid: place for place, row in enumerate(before, 1)}
        now = {row.rid: place for place, row in enumerate(self.queue, 1)}
        keys = {row.rid: row.key for row in self.queue}
        sentences = [say("order_is", policy=plan.active_policy, names=listed(list(now)))]
        moved = [rid for rid in now if now[rid] != then.get(rid, now[rid])]
        sentences += [
            say("order_moved", rid=rid, a=then[rid], b=now[rid], key=keys[rid]) for rid in moved[:4] if rid in then
        ]
        sentences += [say("order_back", rid=rid) for rid in plan.deprioritized or ()]
        considered = [request.rid for request in self._state.candidates(plan.now_ns)]
        for rid in considered:
            if considered.index(rid) < now[rid] - 1 and (config.max_overtakes or config.starvation_limit_s):
                request = self._state.requests[rid]
                waited = number((plan.now_ns - request.entered_ns) / 1e9)
                sentences.append(
                    say("order_urgent", rid=rid, passed=self._state.overtakes.count(request), waited=waited)
                )
        if len(sentences) == 1:
            sentences.append(say("order_same"))
        self._narrator.add(
            "order",
            *sentences,
            decided=" ".join(considered),
            queue=self.queue,
            question=questions.first_of(considered),
        )

    def open(self) -> None:
        plan = self._plan
        sentences = [say("opened")]
        if plan.mixed_rows:
            sentences.append(say("opened_mixed", n=plan.mixed_rows))
        lines = formulas.opening(self._state, plan, free=self._free, evictable=self._evictable)
        self._narrator.add("open", *sentences, formulas=lines, ledgers=self.bars(0), queue=self.queue)

    def continuation(self, place: int, found: AdmissionDecision) -> None:
        plan = self._plan
        first = say("continues", rid=found.rid, done=found.prefix_len, rest=found.candidate_extend)
        second = say(
            "continued", rid=found.rid, n=found.selected_extend, why=REASONS[found.reason], code=found.reason.value
        )
        lines = formulas.continued(plan, found)
        if found.is_admitted:
            lines += formulas.charges(self._state, found)
        else:
            lines += formulas.refused(found, size=self._size)
        self._narrator.add(
            "continuation",
            first,
            second,
            *_promise(found),
            *_overdrafts(found),
            rid=found.rid,
            reason=found.reason.value,
            decided=f"{found.reason.value} {found.selected_extend}",
            formulas=lines,
            ledgers=self.bars(place + 1, found),
            queue=self.queue,
            question=questions.continuation(found, page_size=self._size),
        )

    def candidate(self, place: int, found: AdmissionDecision) -> None:
        self._look(place, found)
        if found.is_admitted:
            self._admitted(place, found)
        else:
            self._refused(place, found)

    def _look(self, place: int, found: AdmissionDecision) -> None:
        request = self._state.requests[found.rid]
        key = "looks_again" if request.num_retractions else "looks"
        seq = found.prefix_len + found.candidate_extend
        sentences = [say(key, rid=found.rid, seq=seq, prefix=found.prefix_len, extend=found.candidate_extend)]
        if found.times_passed_over:
            sentences.append(say("looks_passed", n=found.times_passed_over))
        self._narrator.add(
            "look",
            *sentences,
            rid=found.rid,
            formulas=formulas.asked(self._state, request, found),
            ledgers=self.bars(place, found, tested="remaining_total"),
            queue=self.queue,
            question=questions.what_next(self._plan, place),
        )

    def _admitted(self, place: int, found: AdmissionDecision) -> None:
        align = self._state.config.truncation_align_size
        unit = cut_units(self._state.accounting, page_size=self._size, align=align).first
        if found.is_chunked:
            first = say(
                "admitted_cut",
                rid=found.rid,
                n=found.selected_extend,
                all=found.candidate_extend,
                code=found.reason.value,
            )
        else:
            first = say("admitted_whole", rid=found.rid, n=found.selected_extend, code=found.reason.value)
        self._narrator.add(
            "admission",
            first,
            *_promise(found),
            say("answers", result=found.result.value),
            *_overdrafts(found),
            rid=found.rid,
            reason=found.reason.value,
            decided=f"{found.reason.value} {found.selected_extend}",
            formulas=formulas.admitted(self._state, found, unit=unit),
            ledgers=self.bars(place + 1),
            queue=self.queue,
            question=questions.verdict(found, is_chunking=found.before.rem_chunk is not None),
        )

    def _refused(self, place: int, found: AdmissionDecision) -> None:
        self._narrator.add(
            "refusal",
            say(
                "refused",
                rid=found.rid,
                why=REASONS[found.reason],
                code=found.reason.value,
                result=found.result.value,
            ),
            rid=found.rid,
            reason=found.reason.value,
            decided=f"{found.reason.value} {found.selected_extend}",
            formulas=formulas.refused(found, size=self._size),
            ledgers=self.bars(place, found, tested=TESTED.get(found.reason)),
            queue=self.queue,
            question=questions.verdict(found, is_chunking=found.before.rem_chunk is not None),
        )

    def end(self) -> None:
        plan, end = self._plan, self._plan.pass_end
        assert end is not None, f"step {plan.step}: a pass without an end"
        sentences = [say("ended", why=REASONS[end.stopped_by], code=end.stopped_by.value)]
        if end.not_considered:
            sentences.append(say("ended_left", n=end.not_considered))
        if not plan.prefills:
            sentences.append(say("nothing_admitted"))
        if plan.full_after and not self._state.full and self._state.accounting.latches_full:
            sentences.append(say("ended_full"))
        self._narrator.add(
            "end",
            *sentences,
            reason=end.stopped_by.value,
            decided=end.stopped_by.value,
            ledgers=self.bars(len(plan.decisions)),
            queue=self.queue,
            question=questions.what_next(plan, len(plan.decisions)),
        )

    # -- ledgers ---------------------------------------------------------------------------------------------------

    def bars(
        self, decided: int, found: AdmissionDecision | None = None, *, tested: str | None = None
    ) -> tuple[LedgerBar, ...]:
        """The ledgers after `decided` decisions; with `found`, what it needs on the ledger that is tested."""
        plan, config = self._plan, self._state.config
        opened = plan.budget_open
        assert opened is not None, f"step {plan.step} made no pass"
        size = self._size
        pool = self._narrator.core.kv.num_pages * size
        available = (self._free + self._evictable) * size
        chunk = plan.chunk_size if plan.chunk_size is not None else config.chunked_prefill_size
        limits = {"rem_input": config.max_prefill_tokens, "rem_chunk": chunk}
        bars = []
        for name in LEDGERS:
            limit = limits.get(name, pool)
            if limit is None:
                continue
            segments = []
            at = formulas.ledger(opened, name)
            assert at is not None, f"{name} has a limit and no value"
            if name.startswith("remaining"):
                segments.append(Segment("held", "", pool - available))
                segments.append(Segment("decode rows", "", available - opened.remaining_current))
            else:
                segments.append(Segment("decode rows", "", limit - at))
            if name == "remaining_total":
                segments.append(Segment("promised", "", plan.promised_tokens))
            for each in plan.decisions[:decided]:
                kind = "continuation" if each.is_continuation else "admission"
                segments.append(Segment(kind, each.rid, _spent(each.before, each.after, name)))
            left = formulas.ledger(plan.decisions[decided - 1].after, name) if decided else at
            need, have = _sides(found, name, tested)
            bars.append(
                LedgerBar(name, limit, tuple(each for each in segments if each.tokens), left, need=need, have=have)
            )
        return tuple(bars)


def _spent(before: LedgerView, after: LedgerView, name: str) -> float:
    then, now = formulas.ledger(before, name), formulas.ledger(after, name)
    return 0.0 if then is None or now is None else then - now


def _sides(found: AdmissionDecision | None, name: str, tested: str | None) -> tuple[float | None, float | None]:
    """Need and have on one ledger, where the moment's test is made there."""
    if found is None or tested != name:
        return None, None
    if found.reason in TESTED and TESTED[found.reason] == name and found.need is not None:
        return found.need, found.have
    return found.kv_need, found.kv_limit


def _promise(found: AdmissionDecision) -> list[Text]:
    if not found.is_admitted:
        return []
    if found.reserved_new_tokens:
        return [say("reserved", n=found.reserved_new_tokens)]
    return [say("reserved_none")] if found.result in {Result.CONTINUES} or found.is_chunked else []


def _overdrafts(found: AdmissionDecision) -> list[Text]:
    return [say("overdraft", names=listed([each.value for each in found.overdrafts]))] if found.overdrafts else []

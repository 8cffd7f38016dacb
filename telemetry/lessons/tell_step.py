"""Telling a step. Owns: growth, eviction, retraction, commit and result, out of a plan and its events."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from engine.events import PagesMoved, RequestTransitioned
from engine.request import END_CAUSES, Cause
from engine.scheduler.plan import Retraction, StepKind, StepPlan
from engine.scheduler.retraction import needed_pages
from telemetry.lessons import formulas, questions
from telemetry.lessons.moment import Formula, NodeRow, PageRow, QueueRow, RunRow, Text
from telemetry.lessons.narrator import Narrator, names
from telemetry.lessons.stage import Seen
from telemetry.lessons.tell_pass import Told
from telemetry.lessons.words import listed, say


class Before(msgspec.Struct, frozen=True):
    """What a commit is about to change.

    needed       pages that the next token of every running request takes; None when no decode step is planned
    outputs      rid -> (outputs, max_new_tokens) of who runs
    """

    needed: int | None
    free: int
    evictable: int
    running: tuple[RunRow, ...]
    pages: tuple[PageRow, ...]
    nodes: tuple[NodeRow, ...]
    queue: tuple[QueueRow, ...]
    outputs: dict[str, tuple[int, int]]

    @property
    def fits(self) -> bool:
        return self.needed is None or self.needed <= self.free + self.evictable


def before_commit(narrator: Narrator, plan: StepPlan) -> Before:
    """The picture before a plan is committed."""
    state, kv = narrator.core.state, narrator.core.kv
    free, _, _, evictable = kv.pool.counts
    decodes = plan.kind is StepKind.DECODE or bool(plan.retractions)
    return Before(
        needed_pages(state.running, kv.page_size) if decodes else None,
        free,
        evictable,
        narrator.running(),
        narrator.stage.pages(),
        narrator.stage.nodes(),
        narrator.queue(),
        {request.rid: (request.output_len, request.max_new_tokens) for request in state.running},
    )


def tell_commit(narrator: Narrator, plan: StepPlan, told: Told, before: Before) -> None:
    """What the commit of `plan` wrote: evictions, retractions, preemptions, then the commit itself."""
    seen = narrator.stage.take_seen()
    evicts = any(isinstance(each.event, PagesMoved) and each.event.cause == "evict" for each in seen)
    narrator.is_quiet = False
    if plan.kind is StepKind.IDLE and not plan.retractions:
        if narrator.core.state.has_work and not narrator.told_in_step:
            narrator.add("commit", say("idle"))
        return
    if before.needed is not None:
        if before.needed == 0 and not narrator.told_in_step:
            # Told with the result: nothing else happens in it.
            narrator.is_quiet = True
            narrator.computed(plan)
            return
        if not before.fits or evicts:
            _growth(narrator, before)
    _changes(narrator, plan, told, before, seen)
    narrator.computed(plan)
    if before.needed is None:
        _commit(narrator, plan, told, seen)
    elif before.fits and not evicts:
        _growth(narrator, before, plan=plan)
    else:
        _commit_decode(narrator, plan, before, seen)


def _growth(
    narrator: Narrator,
    before: Before,
    *,
    plan: StepPlan | None = None,
) -> None:
    """The test of a decode step. With `plan` it was committed too; else the picture is that before the commit."""
    assert before.needed is not None, "no decode step is planned"
    lines = [formulas.growth(needed=before.needed, free=before.free, evictable=before.evictable, fits=before.fits)]
    sentences = [
        say("grows", n=len(before.outputs), pages=before.needed),
        say("grows_fit" if before.fits else "grows_not"),
    ]
    if plan is not None:
        sentences += _ratio(plan)
    narrator.add(
        "growth",
        *sentences,
        decided="fits" if before.fits else "retract",
        formulas=lines,
        running=before.running if plan is None else None,
        pages=before.pages if plan is None else None,
        nodes=before.nodes if plan is None else None,
        queue=before.queue if plan is None else None,
        question=questions.growth(fits=before.fits, is_tight=before.needed > 0),
    )


def _ratio(plan: StepPlan) -> list[Text]:
    if plan.ratio_after >= plan.ratio:
        return []
    return [say("ratio_falls", a=f"{plan.ratio:.4g}", b=f"{plan.ratio_after:.4g}")]


def _changes(narrator: Narrator, plan: StepPlan, told: Told, before: Before, seen: Sequence[Seen]) -> None:
    """Evictions and those who lose their place, in the order in which the commit wrote them."""
    pages = before.pages
    running = before.running
    victims = {victim.rid: victim for victim in plan.retractions}
    for each in seen:
        event = each.event
        if isinstance(event, PagesMoved) and event.cause == "evict":
            owners = [pages[page].owner for page in np.frombuffer(event.pages, dtype="<i4").tolist()]
            _evicted(narrator, told, before, owners, running=running, pages=each.pages)
        elif isinstance(event, RequestTransitioned) and event.cause in (Cause.RETRACT, Cause.KV_POOL_EXHAUSTED):
            now = tuple(row for row in running if row.rid != event.rid)
            _pushed_back(narrator, victims[event.rid], before, running=running, left=now, pages=each.pages)
            running = now
        elif isinstance(event, RequestTransitioned) and event.cause is Cause.PREEMPT:
            running = tuple(row for row in running if row.rid != event.rid)
            narrator.add(
                "preemption",
                say("preempted", rid=event.rid),
                rid=event.rid,
                decided=f"preempt {event.rid}",
                running=running,
                pages=each.pages,
            )
        pages = each.pages


def _evicted(
    narrator: Narrator,
    told: Told,
    before: Before,
    owners: Sequence[str],
    *,
    running: tuple[RunRow, ...],
    pages: tuple[PageRow, ...],
) -> None:
    label = "+".join(dict.fromkeys(owners))
    rank = min((node.age_rank for node in before.nodes if node.label == label), default=0)
    older = [node.label for node in before.nodes if node.age_rank < rank and node.lock_count and node.label != label]
    sentences = [say("evicted", pages=len(owners), names=label)]
    if older:
        sentences.append(say("evicted_locked", names=names(list(dict.fromkeys(older)))))
    lines = [
        Formula(
            f"{node.label}[{node.start}:{node.end}]: pages {node.pages}, locks {node.lock_count}, "
            f"age rank {node.age_rank + 1}"
        )
        for node in before.nodes
    ]
    narrator.add(
        "eviction",
        *sentences,
        decided=f"{label} {len(owners)}",
        formulas=lines[:8],
        ledgers=told.ledgers,
        running=running,
        pages=pages,
        nodes=tuple(node for node in before.nodes if node.label != label),
        queue=before.queue,
        question=questions.eviction([node.label for node in before.nodes], label),
    )


def _pushed_back(
    narrator: Narrator,
    victim: Retraction,
    before: Before,
    *,
    running: tuple[RunRow, ...],
    left: tuple[RunRow, ...],
    pages: tuple[PageRow, ...],
) -> None:
    if victim.aborted:
        narrator.add(
            "retraction",
            say("ended_pool", rid=victim.rid),
            rid=victim.rid,
            reason="kv_pool_exhausted",
            decided=f"kv_pool_exhausted {victim.rid}",
        )
        return
    rids = [row.rid for row in running if row.rid in before.outputs]
    lines = [Formula(f"{row.rid}: outputs {row.output_len}, prompt {row.prompt_len}") for row in running]
    narrator.add(
        "retraction",
        say("retracted", rid=victim.rid, outputs=victim.output_len, lost=victim.lost_tokens),
        rid=victim.rid,
        decided=f"retract {victim.rid}",
        formulas=lines,
        running=left,
        pages=pages,
        question=questions.retraction(rids, victim.rid),
    )


def _claimed(seen: Sequence[Seen]) -> int:
    moves = [each.event for each in seen if isinstance(each.event, PagesMoved)]
    return sum(len(move.pages) // 4 for move in moves if move.cause == "claim")


def _guards(plan: StepPlan) -> list[Text]:
    return [say("guards", names=listed([guard.value for guard in plan.guards]))] if plan.guards else []


def _commit(narrator: Narrator, plan: StepPlan, told: Told, seen: Sequence[Seen]) -> None:
    rows = [say("commit_row", rid=row.rid, a=row.prefix_len, b=row.extend_end) for row in plan.prefills]
    if plan.decodes:
        rows.append(say("commit_decodes", n=len(plan.decodes)))
    sentences = [say("committed", rows=listed(rows), pages=_claimed(seen)), *_guards(plan)]
    if plan.mixed_rows and not plan.decodes:
        sentences.append(say("sat_out", n=plan.mixed_rows))
    narrator.add("commit", *sentences, ledgers=told.ledgers)


def _commit_decode(narrator: Narrator, plan: StepPlan, before: Before, seen: Sequence[Seen]) -> None:
    rows = listed([say("commit_decodes", n=len(plan.decodes))])
    sentences = [say("committed", rows=rows, pages=_claimed(seen)), *_guards(plan), *_ratio(plan)]
    lines = []
    if plan.retractions and plan.decodes:
        sentences.append(say("ratio_rises", a=f"{plan.ratio:.4g}", b=f"{plan.ratio_after:.4g}"))
        lines.append(formulas.ratio_after_retraction(plan, before.outputs))
    narrator.add("commit", *sentences, formulas=lines)


def tell_result(narrator: Narrator, plan: StepPlan, told: Told) -> None:
    """What a step brought: tokens, middle chunks without one, and ends."""
    moved = [each.event for each in narrator.stage.take_seen() if isinstance(each.event, RequestTransitioned)]
    ends = [event for event in moved if event.cause in END_CAUSES]
    if narrator.is_quiet and not ends:
        narrator.add("quiet", say("quiet_one", a=narrator.step, names=names(list(plan.decodes))))
        return
    narrator.is_quiet = False
    sentences: list[Text] = []
    first = [event.rid for event in moved if event.cause is Cause.FINAL_CHUNK]
    if first:
        sentences.append(say("first_token", names=listed(first)))
    sentences += [
        say("no_token", rid=event.rid, done=event.computed_len, all=event.prompt_len + event.output_len)
        for event in moved
        if event.cause is Cause.NEXT_CHUNK
    ]
    if plan.decodes and (sentences or ends):
        sentences.append(say("decoded", n=len(plan.decodes)))
    kept = narrator.stage.lesson.engine.enable_radix
    for event in ends:
        key = "finished" if kept and event.cause in (Cause.STOP, Cause.LENGTH) else "finished_off"
        sentences.append(say(key, rid=event.rid, n=event.output_len, cause=event.cause.value))
    if sentences:
        narrator.add("result", *sentences, ledgers=told.ledgers if plan.prefills else ())

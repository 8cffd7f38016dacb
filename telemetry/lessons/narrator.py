"""The narrator. Owns: the moments told so far, and the picture of the state that each of them carries."""

from __future__ import annotations

from typing import Final

import msgspec

from engine.config import Policy
from engine.errors import RequestRefused
from engine.request import Request
from engine.scheduler.plan import StepKind, StepPlan
from engine.scheduler.policies.hrrn import response_ratio
from engine.scheduler.policies.shortest_prefill_first import uncached_work
from telemetry.lessons.model import LessonRequest, Note
from telemetry.lessons.moment import (
    Formula,
    Kind,
    LedgerBar,
    Moment,
    NodeRow,
    PageRow,
    Piece,
    Question,
    QueueRow,
    RunRow,
    State,
    Text,
)
from telemetry.lessons.stage import Stage
from telemetry.lessons.words import KIND_TITLES, listed, number, say

#: Names that a sentence lists before it only counts.
_NAMED: Final = 6


class Narrator:
    """Moments of one lesson, in order."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.core = stage.core
        self.moments: list[Moment] = []
        self.step = 0
        self.pieces: list[Piece] = []
        self._notes: list[Note] = list(stage.lesson.note)
        self._step_from = 0
        self._was_quiet = False
        #: Why the last step made no pass: told once, not in every step.
        self.skipped: str | None = None
        #: The step that is told does what the one before did, and moves no page.
        self.is_quiet = False

    # -- moments ---------------------------------------------------------------------------------------------------

    def add(  # noqa: PLR0913 - one moment, every part named by its caller
        self,
        kind: Kind,
        *sentences: Text,
        rid: str | None = None,
        reason: str | None = None,
        decided: str = "",
        formulas: list[Formula] | None = None,
        question: Question | None = None,
        ledgers: tuple[LedgerBar, ...] = (),
        queue: tuple[QueueRow, ...] | None = None,
        running: tuple[RunRow, ...] | None = None,
        pages: tuple[PageRow, ...] | None = None,
        nodes: tuple[NodeRow, ...] | None = None,
    ) -> None:
        """Tell one moment; parts of the picture that are not given are as they are now."""
        title = KIND_TITLES[kind]
        state = State(
            queue=self.queue() if queue is None else queue,
            ledgers=ledgers,
            running=self.running() if running is None else running,
            pages=self.stage.pages() if pages is None else pages,
            nodes=self.stage.nodes() if nodes is None else nodes,
            pieces=tuple(self.pieces),
            ratio=self.core.state.ratio,
            is_full=self.core.state.full,
        )
        self.moments.append(
            Moment(
                index=len(self.moments),
                step=self.step,
                time_ms=self.stage.clock.now_ns() / 1e6,
                kind=kind,
                rid=rid,
                reason=reason,
                decided=decided,
                title=say("title_of", rid=rid, what=title) if rid is not None else title,
                sentences=sentences,
                formulas=tuple(formulas or ()),
                note=self._note(kind, rid),
                question=question,
                state=state,
            )
        )

    def _note(self, kind: Kind, rid: str | None) -> Text | None:
        """The author's text for this moment; each is said once."""
        for note in self._notes:
            if note.step == self.step and note.kind in (None, kind) and note.rid in (None, rid):
                self._notes.remove(note)
                return note.say.text
        return None

    def start(self) -> None:
        """The situation before step 1."""
        lesson = self.stage.lesson
        cached = [f"{prefix.name} {prefix.tokens}" for prefix in lesson.prefix if prefix.cached]
        running = [request.rid for request in lesson.request if request.already]
        self.add(
            "start",
            lesson.about.text,
            say(
                "pool",
                pages=lesson.engine.pages,
                page=lesson.engine.page_size,
                cached=say("pool_cached", names=listed(cached)) if cached else "",
                running=say("pool_running", n=len(running), names=names(running)) if running else "",
            ),
        )

    def arrivals(self, come: list[tuple[LessonRequest, RequestRefused | None]]) -> None:
        """Who came before this step."""
        if not come:
            return
        shared = {prefix.name: prefix.tokens for prefix in self.stage.lesson.prefix}
        sentences = []
        for request, refusal in come:
            facts = {"rid": request.rid, "prompt": request.prompt, "max_new": request.max_new}
            if refusal is not None:
                sentences.append(say("turned_away", rid=request.rid, why=str(refusal)))
            elif request.prefix is None:
                sentences.append(say("arrived", **facts))
            else:
                sentences.append(say("arrived_prefix", **facts, prefix=request.prefix, shared=shared[request.prefix]))
        self.add("arrive", *sentences, rid=come[0][0].rid if len(come) == 1 else None)

    # -- quiet steps -----------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """A step begins, with those who came before it."""
        self.step = step
        self._step_from = len(self.moments)
        self._was_quiet, self.is_quiet = self.is_quiet, False

    @property
    def told_in_step(self) -> bool:
        """Whether this step has told anything yet."""
        return len(self.moments) > self._step_from

    def merge_quiet(self) -> None:
        """A step of nothing but decodes inside pages that are there becomes one moment with those before it."""
        if not (self.is_quiet and self._was_quiet):
            return
        # This step told exactly one moment, and so did the last one.
        latest, before = self.moments.pop(), self.moments.pop()
        first = before.state.pieces[-1].step - before.state.pieces[-1].steps + 1
        now = [piece for piece in self.pieces if piece.step == self.step]
        earlier = [piece for piece in self.pieces if piece.step != self.step - 1]
        older = {piece.rid: piece for piece in self.pieces if piece.step == self.step - 1}
        merged = [
            msgspec.structs.replace(piece, start=older[piece.rid].start, steps=older[piece.rid].steps + 1)
            for piece in now
        ]
        self.pieces = [piece for piece in earlier if piece.step != self.step] + merged
        sentence = say("quiet", a=first, b=self.step, names=names([piece.rid for piece in merged]))
        self.moments.append(
            msgspec.structs.replace(
                latest,
                index=before.index,
                sentences=(sentence, *latest.sentences[1:]),
                note=before.note or latest.note,
                state=msgspec.structs.replace(latest.state, pieces=tuple(self.pieces)),
            )
        )

    # -- pictures --------------------------------------------------------------------------------------------------

    def queue(self, plan: StepPlan | None = None) -> tuple[QueueRow, ...]:
        """The waiting requests in their order, and what the policy went by when `plan` ordered them."""
        state = self.core.state
        policy = None if plan is None else plan.active_policy
        return tuple(
            QueueRow(
                rid=request.rid,
                prompt_len=request.prompt_len,
                output_len=request.output_len,
                matched_len=request.matched_len,
                times_passed_over=state.overtakes.count(request),
                num_retractions=request.num_retractions,
                key=order_key(policy, request, state.processed_tokens),
            )
            for request in state.waiting
        )

    def running(self) -> tuple[RunRow, ...]:
        """Who holds K/V: those that decode, then the one that is half computed."""
        state = self.core.state
        half = [] if state.continuation is None else [state.continuation]
        return tuple(
            RunRow(
                request.rid,
                request.state.value,
                request.prompt_len,
                request.computed_len,
                request.output_len,
                request.max_new_tokens,
            )
            for request in [*state.live_running, *half]
        )

    def computed(self, plan: StepPlan) -> None:
        """Note what a step computes, for the timeline."""
        if plan.kind is StepKind.IDLE:
            return
        requests = self.core.state.requests
        self.pieces += [Piece(self.step, row.rid, "prefill", row.prefix_len, row.extend_end) for row in plan.prefills]
        self.pieces += [
            Piece(self.step, rid, "decode", requests[rid].output_len, requests[rid].output_len + 1)
            for rid in plan.decodes
        ]


def order_key(policy: str | None, request: Request, processed: int) -> str:
    """What a policy goes by, of one request, in the words of the record. Empty where it goes by nothing."""
    match policy:
        case Policy.LPM | Policy.DFS_WEIGHT:
            return f"cached {request.matched_len}"
        case Policy.SHORTEST_PREFILL_FIRST:
            return f"to compute {uncached_work(request)}"
        case Policy.LOF:
            return f"max_new {request.max_new_tokens}"
        case Policy.HRRN:
            waited = max(0, processed - request.processed_at_entry)
            uncached = max(0, request.prompt_len - request.matched_len)
            return f"waited {waited} / uncached {uncached} = {number(response_ratio(request, processed))}"
        case Policy.FCFS:
            return "" if request.priority is None else f"priority {request.priority}"
        case _:
            return ""


def names(rids: list[str]) -> Text:
    """A few names, or how many there are."""
    if len(rids) <= _NAMED:
        return listed(rids)
    shown = listed(rids[: _NAMED - 1])
    more = len(rids) - _NAMED + 1
    return Text(f"{shown.en} and {more} more", f"{shown.zh} 等 {len(rids)} 个")

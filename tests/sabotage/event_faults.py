"""Faults of what the engine says. Owns: one lie per law, told in an otherwise true stream of events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec.structs import replace

from engine.events import (
    AdmissionDecided,
    AnyEvent,
    LockChanged,
    PagesMoved,
    RequestArrived,
    RequestTransitioned,
    StepCompleted,
    StepPlanned,
)
from engine.request import Cause, RequestState
from engine.scheduler.decision import ADMITTED, LedgerView, Reason
from tests.sabotage.scenario import FAULTS, Edit, Fault


def _once(kind: type, when: Callable[[Any], bool], change: Callable[[Any], Sequence[AnyEvent]]) -> Callable[[], Edit]:
    """An edit of the first event of `kind` for which `when` holds."""

    def make() -> Edit:
        done = False

        def edit(event: AnyEvent) -> Sequence[AnyEvent]:
            nonlocal done
            if done or type(event) is not kind or not when(event):
                return (event,)
            done = True
            return change(event)

        return edit

    return make


def lie(law: str, name: str, kind: type, when: Callable[[Any], bool], *, renumber: bool = True, **change: Any) -> None:
    """Register: the first such event says something else. A callable value gets the event."""

    def changed(event: AnyEvent) -> Sequence[AnyEvent]:
        values = {key: value(event) if callable(value) else value for key, value in change.items()}
        return (replace(event, **values),)

    FAULTS.append(Fault(law, name, edit=_once(kind, when, changed), renumber=renumber))


def swap(
    law: str,
    name: str,
    kind: type,
    when: Callable[[Any], bool],
    change: Callable[[Any], Sequence[AnyEvent]],
    *,
    renumber: bool = True,
) -> None:
    """Register: other events come in the place of the first such one."""
    FAULTS.append(Fault(law, name, edit=_once(kind, when, change), renumber=renumber))


def admitted(event: AdmissionDecided) -> bool:
    return event.reason in ADMITTED


def refused(event: AdmissionDecided) -> bool:
    return event.reason not in ADMITTED


def reason(*reasons: Reason) -> Callable[[AdmissionDecided], bool]:
    return lambda event: event.reason in reasons


def cause(*causes: Cause) -> Callable[[RequestTransitioned], bool]:
    return lambda event: event.cause in causes


def moved(*causes: str) -> Callable[[PagesMoved], bool]:
    return lambda event: event.cause in causes


#: Rows that decode need a page each in the same step.
SMALL_PAGES: Final[dict[str, object]] = {"page_size": 1, "num_pages": 24 * 16}


def grown(event: PagesMoved) -> bool:
    """One claim that serves several rows."""
    return len(event.owners) > 4


def _held_then_evicted(event: PagesMoved) -> Sequence[AnyEvent]:
    # Node ids are small numbers: hold each of them, so that the evicted one is among them.
    holds = [LockChanged(event.seq, event.step, event.t_ns, node, "r0", 1, 1) for node in range(1, 200)]
    return (*holds, event)


lie(
    "INV-CHUNK-01",
    "an admission of nothing",
    AdmissionDecided,
    admitted,
    selected_extend=0,
    extend_end=lambda e: e.prefix_len,
)
lie("INV-CHUNK-02", "an end that is not the sum", AdmissionDecided, admitted, extend_end=lambda e: e.extend_end + 1)
lie(
    "INV-CHUNK-02",
    "the next piece one page early",
    AdmissionDecided,
    reason(Reason.ADMITTED_NEXT_CHUNK, Reason.ADMITTED_LAST_CHUNK),
    prefix_len=lambda e: e.prefix_len - 16,
    extend_end=lambda e: e.extend_end - 16,
)
lie(
    "INV-CHUNK-02",
    "a plan row that was not decided",
    StepPlanned,
    lambda e: e.prefills,
    prefills=lambda e: (replace(e.prefills[0], extend_len=e.prefills[0].extend_len + 16), *e.prefills[1:]),
)
lie(
    "INV-CHUNK-02",
    "computed tokens that were not planned",
    RequestTransitioned,
    cause(Cause.NEXT_CHUNK),
    computed_len=lambda e: e.computed_len + 1,
)
lie(
    "INV-CHUNK-03",
    "a token of a middle piece",
    RequestTransitioned,
    cause(Cause.NEXT_CHUNK),
    output_len=lambda e: e.output_len + 1,
)
lie(
    "INV-CHUNK-03",
    "two tokens of the last piece",
    RequestTransitioned,
    cause(Cause.FINAL_CHUNK),
    output_len=lambda e: e.output_len + 1,
)
lie(
    "INV-CHUNK-03",
    "a sampled row of a middle piece",
    StepPlanned,
    lambda e: any(not p.is_last for p in e.prefills),
    sampling=lambda e: (*e.sampling, next(p.rid for p in e.prefills if not p.is_last)),
)
lie(
    "INV-CHUNK-04",
    "a continuation nobody cut",
    StepPlanned,
    lambda e: e.prefills and e.continuation is None,
    continuation=lambda e: e.prefills[0].rid,
)
lie("INV-CHUNK-04", "a continuation considered second", AdmissionDecided, lambda e: e.is_continuation, order=1)
lie(
    "INV-CHUNK-05",
    "a first cut inside a page",
    AdmissionDecided,
    reason(Reason.ADMITTED_FIRST_CHUNK),
    selected_extend=lambda e: e.selected_extend - 3,
    extend_end=lambda e: e.extend_end - 3,
)

lie(
    "INV-BUDGET-01",
    "an overdraft without a name",
    AdmissionDecided,
    lambda e: admitted(e) and e.rem_input_after < 0,
    overdrafts=(),
)
lie(
    "INV-BUDGET-01",
    "a slice exceeded by more than rounding",
    AdmissionDecided,
    admitted,
    rem_chunk_before=0,
    rem_chunk_after=-16,
)
lie(
    "INV-BUDGET-02",
    "decode rows charged twice",
    StepPlanned,
    lambda e: e.budget_open and e.mixed_rows,
    budget_open=lambda e: _less(e.budget_open, e.mixed_rows),
)
lie(
    "INV-BUDGET-02",
    "decode rows not charged",
    StepPlanned,
    lambda e: e.budget_open and e.mixed_rows,
    budget_open=lambda e: _less(e.budget_open, -e.mixed_rows),
)
lie(
    "INV-BUDGET-03",
    "a refusal that costs a page",
    AdmissionDecided,
    refused,
    remaining_current_after=lambda e: e.remaining_current_after - 16,
)
lie(
    "INV-BUDGET-03",
    "an admission charged unrounded",
    AdmissionDecided,
    lambda e: admitted(e) and e.selected_extend % 16,
    rem_input_after=lambda e: e.rem_input_before - e.selected_extend,
)
lie(
    "INV-BUDGET-03",
    "a second decision from the first one's budget",
    AdmissionDecided,
    lambda e: e.order == 1,
    rem_input_before=lambda e: e.rem_input_before + 16,
)
lie(
    "INV-BUDGET-03",
    "nothing reserved for the output",
    AdmissionDecided,
    reason(Reason.ADMITTED_WHOLE),
    remaining_total_after=lambda e: e.remaining_total_after + e.reserved_new_tokens,
    reserved_new_tokens=0,
)
lie("INV-BUDGET-04", "a promise without running growth", StepPlanned, lambda e: e.promised_tokens, promised_tokens=0.0)
lie(
    "INV-BUDGET-04",
    "remaining_total without running growth",
    StepPlanned,
    lambda e: e.budget_open and e.promised_tokens,
    budget_open=lambda e: replace(e.budget_open, remaining_total=float(e.budget_open.remaining_current)),
)


def _less(view: LedgerView, tokens: int) -> LedgerView:
    chunk = None if view.rem_chunk is None else view.rem_chunk - tokens
    return LedgerView(view.rem_input - tokens, chunk, view.remaining_total - tokens, view.remaining_current - tokens)


lie(
    "INV-LOCK-01",
    "a refused request in the plan",
    StepPlanned,
    lambda e: (
        e.prefills
        and e.pass_end
        and e.pass_end.stop == "result"
        and e.pass_end.rid not in {row.rid for row in e.prefills}
    ),
    decodes=lambda e: (*e.decodes, e.pass_end.rid),
)
swap(
    "INV-LOCK-01",
    "a refused request with a lock",
    AdmissionDecided,
    reason(Reason.KV_TOTAL_EXHAUSTED),
    lambda e: (e, LockChanged(e.seq, e.step, e.t_ns, 99, e.rid, 1, 1)),
)
lie("INV-LOCK-02", "an admission without a row", RequestTransitioned, cause(Cause.ADMIT), row=None)
lie("INV-LOCK-02", "a row that does not exist", RequestTransitioned, cause(Cause.ADMIT), row=4)
lie("INV-LOCK-02", "another row given back", RequestTransitioned, cause(Cause.LENGTH), row=lambda e: e.row + 1)
lie("INV-LOCK-03", "a count that is one too high", LockChanged, lambda e: e.delta > 0, count=lambda e: e.count + 1)
swap(
    "INV-LOCK-03",
    "a lock released twice",
    LockChanged,
    lambda e: e.delta < 0 and e.count == 0,
    lambda e: (e, replace(e, count=-1)),
)

lie(
    "INV-PAGE-01",
    "a free page that is not there",
    StepCompleted,
    lambda e: True,
    pages=lambda e: (e.pages[0] + 1, *e.pages[1:]),
)
lie(
    "INV-PAGE-01",
    "sums that balance over wrong counts",
    StepPlanned,
    lambda e: e.pages[1],
    pages=lambda e: (e.pages[0] + 1, e.pages[1] - 1, *e.pages[2:]),
)
lie("INV-PAGE-02", "a move that the table lacks", PagesMoved, moved("claim"), source="evictable", cause="claim")
lie("INV-PAGE-02", "a free of someone else's pages", PagesMoved, moved("free"), source="protected")
lie("INV-PAGE-02", "a lock under another node's name", PagesMoved, moved("lock"), owner="n:9999")
lie("INV-PAGE-02", "a split that names the old owner", PagesMoved, moved("unlock"), cause="split", target="protected")
lie("INV-PAGE-02", "a claim for nobody's row", PagesMoved, moved("claim"), owner="r:3000")
swap("INV-PAGE-02", "the same pages claimed twice", PagesMoved, moved("claim"), lambda e: (e, e))
lie("INV-PAGE-02", "half a page id", PagesMoved, moved("claim"), pages=b"\1\0")
lie("INV-PAGE-02", "pages beyond the pool", PagesMoved, moved("claim"), pages=b"\xff\x7f\x00\x00")
lie("INV-PAGE-02", "rows of pages that are freed", PagesMoved, moved("free"), owners=lambda e: bytes(len(e.pages)))
for _name, _change in (
    ("from where no page is", lambda e: replace(e, source="evictable")),
    ("of nobody's row", lambda e: replace(e, owners=e.owners[:-4] + b"\xb8\x0b\0\0")),
    ("of a row below 0", lambda e: replace(e, owners=e.owners[:-4] + b"\xff" * 4)),
    ("of a row too few", lambda e: replace(e, owners=e.owners[:-4])),
    ("with an owner beside the rows", lambda e: replace(e, owner="r:0")),
    ("under each other's rows", lambda e: replace(e, owners=e.owners[4:] + e.owners[:4])),
    ("beyond the pool", lambda e: replace(e, pages=e.pages[:-4] + b"\xff\x7f\0\0")),
    ("by one page twice", lambda e: replace(e, pages=e.pages[:-4] + e.pages[:4])),
):
    FAULTS.append(
        Fault(
            "INV-PAGE-02",
            f"growth {_name}",
            edit=_once(PagesMoved, grown, lambda e, change=_change: (change(e),)),
            settings=SMALL_PAGES,
        )
    )
swap(
    "INV-PAGE-03",
    "a claimed page made evictable in the same commit",
    PagesMoved,
    moved("claim"),
    lambda e: (e, replace(e, source="private", target="evictable", owner="n:77", cause="insert")),
)
swap("INV-PAGE-03", "an eviction of what someone holds", PagesMoved, moved("evict"), _held_then_evicted)


swap("INV-STEP-01", "a step applied twice", StepCompleted, lambda e: e.rows, lambda e: (e, e))
swap("INV-STEP-01", "a step never applied", StepCompleted, lambda e: e.rows, lambda e: ())
lie("INV-STEP-01", "a row too few", StepCompleted, lambda e: e.rows, rows=lambda e: e.rows[1:])
lie(
    "INV-STEP-01",
    "a sampled row too few",
    StepPlanned,
    lambda e: len(e.decodes) > 1 and not e.prefills,
    sampling=lambda e: e.sampling[1:],
)
swap("INV-STEP-02", "a lost event", PagesMoved, lambda e: True, lambda e: (), renumber=False)
lie("INV-STEP-02", "a clock that went back", StepCompleted, lambda e: True, t_ns=-1)
lie("INV-STEP-02", "a step that went back", StepCompleted, lambda e: e.step > 3, step=lambda e: e.step - 1)
lie(
    "INV-STEP-03",
    "a running request without its turn",
    StepPlanned,
    lambda e: len(e.decodes) > 1,
    decodes=lambda e: e.decodes[1:],
    sampling=lambda e: tuple(r for r in e.sampling if r != e.decodes[0]),
)
lie(
    "INV-STEP-03",
    "a victim that also runs",
    StepPlanned,
    lambda e: e.retractions and e.decodes,
    decodes=lambda e: (*e.decodes, e.retractions[0].rid),
    sampling=lambda e: (*e.sampling, e.retractions[0].rid),
)
lie(
    "INV-STEP-04",
    "a waiting request that is not",
    StepCompleted,
    lambda e: True,
    num_waiting=lambda e: e.num_waiting + 1,
)
lie(
    "INV-STEP-04", "a running request that is not", StepPlanned, lambda e: True, num_running=lambda e: e.num_running + 1
)
lie("INV-STEP-05", "a transition from elsewhere", RequestTransitioned, cause(Cause.ADMIT), source=RequestState.DECODE)
lie("INV-STEP-05", "a cause the table lacks", RequestTransitioned, cause(Cause.FINAL_CHUNK), cause=Cause.ADMIT, row=0)
lie(
    "INV-STEP-04",
    "waiting tokens that drift",
    StepPlanned,
    lambda e: True,
    waiting_tokens=lambda e: e.waiting_tokens + 1,
)
lie("INV-PAGE-01", "an eviction nobody saw", StepPlanned, lambda e: True, evicted_pages=lambda e: e.evicted_pages + 1)
lie(
    "INV-BUDGET-04",
    "a ratio that decays twice",
    StepPlanned,
    lambda e: True,
    new_token_ratio=lambda e: e.new_token_ratio / 2,
)
swap("INV-EXIT-01", "an abort without an end", RequestTransitioned, cause(Cause.ABORT), lambda e: ())
swap("INV-EXIT-01", "two ends", RequestTransitioned, cause(Cause.LENGTH), lambda e: (e, e))
swap("INV-EXIT-01", "an end that was lost", RequestTransitioned, cause(Cause.LENGTH), lambda e: ())
swap(
    "INV-EXIT-01",
    "an id used again while alive",
    RequestArrived,
    lambda e: e.rid == "r3",
    lambda e: (replace(e, rid="r2"),),
)
swap(
    "INV-EXIT-01",
    "a lock left behind by an end",
    RequestTransitioned,
    cause(Cause.LENGTH),
    lambda e: (LockChanged(e.seq, e.step, e.t_ns, 99, e.rid, 1, 1), e),
)

"""Laws of steps and lives. Owns: INV-STEP-01 to 05, INV-EXIT-01, INV-PROG-01 — order, recounts, one end, progress."""

from __future__ import annotations

from typing import Final

from engine.events import AnyEvent, RequestArrived, RequestTransitioned, StepCompleted, StepPlanned
from engine.request import TRANSITIONS, RequestState
from invariants.members import ARRIVE, DECODE, PREFILL, WAITING
from invariants.running_book import ShadowRequest
from invariants.shadow import Shadow
from invariants.violation import Report


def on_order(last: AnyEvent | None, event: AnyEvent, report: Report, *, is_late: bool = False) -> None:
    """Numbers, steps and times of two events in a row.

    is_late  it is of the outcome of a step in flight, behind the next plan: it has the number of its own step
    """
    if last is None:
        return
    if event.seq != last.seq + 1:
        report("INV-STEP-02", f"seq {last.seq + 1}", f"seq {event.seq}", seqs=(last.seq,))
    if (event.step < last.step and not is_late) or event.t_ns < last.t_ns:
        report(
            "INV-STEP-02",
            f"step {last.step} and t_ns {last.t_ns} or later",
            f"step {event.step}, t_ns {event.t_ns}",
            seqs=(last.seq,),
        )


def on_arrival(books: Shadow, event: RequestArrived, report: Report) -> None:
    """A new request: nobody by that name is alive."""
    if event.rid in books.requests:
        report("INV-EXIT-01", "the end of a request before its name is used again", "a second arrival", rid=event.rid)
        return
    books.ended.pop(event.rid, None)
    books.requests[event.rid] = ShadowRequest(event)


_LEGAL: Final = frozenset(
    {(source, target, cause) for (source, target), causes in TRANSITIONS.items() for cause in causes}
    | {(None, WAITING, ARRIVE)}
)


def on_transition(books: Shadow, event: RequestTransitioned, report: Report) -> ShadowRequest | None:
    """Known, alive, from where it is, along the table. Returns the request, None when there is none to follow."""
    request = books.requests.get(event.rid)
    if request is None:
        ended = books.ended.get(event.rid)
        found = "an unknown request" if ended is None else "a request that ended already"
        report(
            "INV-EXIT-01",
            "a live request",
            f"{found}: {event.cause} to {event.target}",
            rid=event.rid,
            seqs=() if ended is None else (ended,),
        )
        return None
    legal = (event.source, event.target, event.cause) in _LEGAL
    if not legal and books.overlap is not None:
        legal = books.overlap.may_end_late(event)
    if event.source is not request.state or not legal:
        report(
            "INV-STEP-05",
            f"a transition of the table from {request.state}",
            f"{event.source} -> {event.target} by {event.cause}",
            rid=event.rid,
        )
    return request


def on_end(books: Shadow, event: RequestTransitioned, request: ShadowRequest, report: Report) -> None:
    """The last counts of a request."""
    due = books.outputs_due(request, event)
    if event.output_len != due:
        law = "INV-CHUNK-03" if request.state is RequestState.PREFILL else "INV-STEP-01"
        report(law, f"output_len {due} at the end", f"{event.output_len}", rid=event.rid)
    if event.output_len > request.max_new:
        report(
            "INV-EXIT-01", f"an end at {request.max_new} output tokens or before", f"{event.output_len}", rid=event.rid
        )


def on_plan(books: Shadow, event: StepPlanned, report: Report) -> None:
    """Order of plans, who decodes, counts, progress."""
    if books.plan is not None:
        report(
            "INV-STEP-01",
            f"step {books.plan.step} applied before the next plan",
            f"plan of step {event.step}",
            seqs=(books.plan.seq,),
        )
    if event.step <= books.last_plan_step:
        report("INV-STEP-01", f"a step after {books.last_plan_step}", f"plan of step {event.step}")
    due = event.decodes
    if event.prefills:
        due = tuple([row.rid for row in event.prefills if row.is_last]) + due
    books.is_sampled_as_due = event.sampling == due
    if not books.is_sampled_as_due:
        report("INV-STEP-01", f"sampling = finished prefills, then decodes: {due}", f"{event.sampling}")
    running = books.running
    if event.decodes and not running.are(event.decodes):
        odd = sorted(set(running.order) ^ set(event.decodes))
        if odd:
            report("INV-STEP-03", f"all {len(running)} running requests or none", f"not so for {odd[:8]}", rid=odd[0])
    if event.retractions or event.preempted:
        _victims(event, report)


def _victims(event: StepPlanned, report: Report) -> None:
    for rid in (*[victim.rid for victim in event.retractions], *event.preempted):
        if rid in event.sampling or any(row.rid == rid for row in event.prefills):
            report("INV-STEP-03", "a victim that is not scheduled", "both in one step", rid=rid)


def recount(books: Shadow, event: StepPlanned | StepCompleted, report: Report) -> None:
    """Reported numbers of waiting and running requests."""
    waiting = books.in_state[WAITING]
    running = books.in_state[DECODE]
    if books.overlap is not None:
        running -= len(books.overlap.spent)
    if type(event) is StepPlanned:  # members of the batch count, the continuation does not
        running += books.in_state[PREFILL] - (books.cut is not None)
        if event.waiting_tokens != books.waiting_tokens:
            report("INV-STEP-04", f"{books.waiting_tokens} tokens waiting", f"{event.waiting_tokens}")
    if (event.num_waiting, event.num_running) != (waiting, running):
        report(
            "INV-STEP-04",
            f"{waiting} waiting, {running} running",
            f"{event.num_waiting} waiting, {event.num_running} running",
        )


def progress(books: Shadow, event: StepPlanned, limit: int, report: Report) -> None:
    """An idle step with someone unfinished counts; any work ends the count."""
    if event.prefills or event.decodes or not books.requests:
        books.idle_steps = 0
        return
    books.idle_steps += 1
    if books.idle_steps > limit:
        rid = next(iter(books.requests))
        report(
            "INV-PROG-01",
            f"work within {limit} steps, {len(books.requests)} unfinished",
            f"{books.idle_steps} steps without any",
            rid=rid,
        )
        books.idle_steps = 0


def ends_followed(books: Shadow, plan: StepPlanned, event: StepCompleted, report: Report) -> None:
    """INV-EXIT-01: whose row says so has ended."""
    for row in event.rows:
        request = None if row.finish is None else books.requests.get(row.rid)
        if request is not None:
            report(
                "INV-EXIT-01",
                f"the end ({row.finish}) that its last token brought",
                f"still {request.state}",
                rid=row.rid,
                seqs=(plan.seq,),
            )


def _rows(books: Shadow, plan: StepPlanned, event: StepCompleted, report: Report) -> None:
    """One row per sampled request, one output per row, and an end for each row that says so."""
    rows = event.rows
    # Whoever ended in this step has not been settled yet; with nobody gone, one look at the rows is enough.
    rids = () if books.leaving else tuple([row.rid for row in rows if row.finish is None])
    if len(rids) != len(rows):  # rows that end
        rids = tuple([row.rid for row in rows])
        ends_followed(books, plan, event, report)
    if rids != plan.sampling:
        odd = sorted(set(rids).symmetric_difference(plan.sampling)) or ["order"]
        report(
            "INV-STEP-01",
            f"one row per sampled request, {len(plan.sampling)}",
            f"{len(rids)} rows, differs for {odd[:8]}",
            rid=odd[0],
            seqs=(plan.seq,),
        )
    _count_tokens(books, plan, event.step, rids)


def _are_all_running(books: Shadow, plan: StepPlanned, rids: tuple[str, ...]) -> bool:
    """Whether the rows are those of all who run now, and of some who ended: by what changed since the plan named all
    that ran then. False: they may be all the same, in another order."""
    running, requests = books.running, books.requests
    if rids != plan.sampling or not books.is_sampled_as_due or running.named is not plan.decodes:
        return False
    completed = {row.rid for row in plan.prefills if row.is_last and row.rid in requests} if plan.prefills else set()
    return completed == set(running.came) and not any(rid in requests for rid in running.went)


def _count_tokens(books: Shadow, plan: StepPlanned, step: int, rids: tuple[str, ...]) -> None:
    """One output per row whose request is alive; a tick when these are exactly the running ones."""
    requests, running = books.requests, books.running
    is_all = _are_all_running(books, plan, rids)
    if not is_all:
        rids = tuple([rid for rid in rids if rid in requests])
        is_all = running.are(rids)
    if is_all:
        running.tick()
        for row in plan.prefills:
            request = running.get(row.rid)
            if request is not None and request.token_step == step:  # its transition to decode told this token
                running.hold_back(request)
        return
    for rid in rids:
        books.add_output(requests[rid], step)


def on_completed(books: Shadow, event: StepCompleted, report: Report) -> StepPlanned | None:
    """The outcome against its plan; counts the tokens. Returns the plan it applies, None when there is none."""
    plan = books.plan
    if plan is None or plan.step != event.step:
        report(
            "INV-STEP-01",
            f"step {plan.step} applied" if plan else "no step in flight",
            f"step {event.step} applied",
            seqs=(plan.seq,) if plan else (),
        )
        return None
    books.plan = None
    requests = books.requests
    if event.failed:
        if event.rows:
            report("INV-STEP-01", "no rows in a failed step", f"{len(event.rows)} rows", seqs=(plan.seq,))
    else:
        _rows(books, plan, event, report)
    for rid in plan.decodes if event.failed else ():
        if rid in requests:
            report("INV-EXIT-01", "an end by error of every row of a failed step", f"{requests[rid].state}", rid=rid)
    for rid, seq in books.aborting.items():
        if rid in requests:
            report("INV-EXIT-01", "the end that was asked for", f"still {requests[rid].state}", rid=rid, seqs=(seq,))
    books.aborting.clear()
    recount(books, event, report)
    if books.in_state[PREFILL] > 1:
        report("INV-CHUNK-04", "at most one request partly prefilled", f"{books.in_state[PREFILL]}")
    return plan

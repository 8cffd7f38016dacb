"""Runs recorded multi-round traces. Owns: the loop of rule book section 6 and the rows it compares."""

from __future__ import annotations

from typing import Any

from engine.scheduler.decision import Reason
from engine.scheduler.plan import StepKind, StepOutcome, StepPlan
from tests.conformance.build import Virtual
from tests.conformance.compare import Difference, first_difference

_UNTRIED = (Reason.ROWS_EXHAUSTED, Reason.FULL_FLAG_SET)


def ledger_rows(plan: StepPlan) -> list[list[Any]]:
    """Candidate rows in the recorded layout (rule book section 3)."""
    rows = []
    for d in plan.decisions:
        if d.reason in _UNTRIED:
            continue
        rows.append(
            [
                d.rid,
                "continue" if d.is_continuation else "new",
                d.prefix_len,
                d.candidate_extend,
                d.selected_extend,
                int(d.is_chunked),
                d.result.value,
                d.before.rem_input,
                d.after.rem_input,
                d.before.rem_chunk,
                d.after.rem_chunk,
                d.before.remaining_total,
                d.after.remaining_total,
                d.before.remaining_current,
                d.after.remaining_current,
                d.kv_need,
                d.kv_limit,
            ]
        )
    return rows


def pass_fields(plan: StepPlan) -> dict[str, Any]:
    """order … candidates of one pass; empty when no pass was made."""
    if plan.order is None or plan.budget_open is None:
        return {}
    budget = plan.budget_open
    return {
        "order": list(plan.order),
        "active_policy": plan.active_policy,
        "deprioritized": None if plan.deprioritized is None else list(plan.deprioritized),
        "budget0": [budget.rem_input, budget.rem_chunk, budget.remaining_total, budget.remaining_current],
        "chunk_limit": plan.chunk_limit,
        "candidates": ledger_rows(plan),
    }


_MODES = {StepKind.EXTEND: "prefill", StepKind.MIXED: "mixed", StepKind.DECODE: "decode", StepKind.IDLE: "idle"}


def play_round(virtual: Virtual, number: int, acted: set[str]) -> dict[str, Any]:
    """One round; returns it in the recorded layout, every field present."""
    scheduler = virtual.scheduler
    state = scheduler.state
    entry: dict[str, Any] = {"round": number, "ratio": state.ratio, "processed": state.processed_tokens}
    scheduler.prepare(0)
    plan = scheduler.commit(scheduler.plan(0))
    acted.update(plan.guards)
    entry["mode"] = _MODES[plan.kind]
    entry |= pass_fields(plan)
    entry["at_launch"] = virtual.counts()
    entry["mixed"] = []
    if plan.kind is StepKind.MIXED:
        entry["mixed"] = [[rid, state.requests[rid].computed_len, 1] for rid in plan.decodes]
    entry["full"] = state.full
    entry["chunked_req"] = state.continuation.rid if state.continuation is not None else None
    if plan.kind is StepKind.DECODE:
        entry["batch"] = list(plan.decodes)
    elif plan.kind in (StepKind.EXTEND, StepKind.MIXED):
        entry["batch"] = [[row.rid, row.prefix_len, row.extend_len] for row in plan.prefills]
    rows = tuple(virtual.result(rid) for rid in plan.sampling)
    scheduler.apply(plan, StepOutcome(plan.step, rows))
    entry["finished"] = [row.rid for row in rows if row.finish is not None]
    entry["preempted"] = list(plan.preempted)
    entry["retracted"] = [victim.rid for victim in plan.retractions if not victim.aborted]
    entry["aborted"] = [victim.rid for victim in plan.retractions if victim.aborted]
    entry["evicted"] = state.evicted_in_step * virtual.page_size
    entry["at_end"] = virtual.counts()
    return entry


#: Fields that a recorded round carries only when they say something.
_OPTIONAL_EMPTY: dict[str, Any] = {"finished": [], "retracted": [], "aborted": [], "preempted": [], "evicted": 0}


def check_round(recorded: dict[str, Any], played: dict[str, Any], where: str) -> Difference | None:
    """First field of `recorded` that `played` does not have alike."""
    want = {**_OPTIONAL_EMPTY, **recorded}
    want.pop("n", None)
    for name, expected in want.items():
        actual = played.get(name)
        if name in ("batch",) and recorded["mode"] == "mixed":
            actual = [*played["batch"], *played["mixed"]]
        difference = first_difference(expected, actual, f"{where}.{name}")
        if difference is not None:
            return difference
    return None


def run_trace(case: dict[str, Any], *, guards: bool, acted: set[str]) -> Difference | None:
    """Play a trace; the first difference, or None when all of it agrees. `acted` gets the guards that acted."""
    scenario, expected = case["scenario"], case["expected"]
    virtual = Virtual(scenario, guards=guards)
    pending = sorted(scenario["requests"], key=lambda spec: spec["arrival_round"])
    number = 0
    for recorded in expected["rounds"]:
        repeat = recorded.get("n", 1)
        for index in range(repeat):
            while pending and pending[0]["arrival_round"] <= number:
                virtual.arrive(pending.pop(0))
            played = play_round(virtual, number, acted)
            number += 1
            if repeat > 1:
                first, last = index == 0, index == repeat - 1
                view = dict(recorded)
                if not first:
                    for name in ("round", "ratio", "processed", "at_launch"):
                        view.pop(name, None)
                if not last:
                    view.pop("at_end", None)
                difference = check_round(view, played, f"rounds[{number - 1}]")
            else:
                difference = check_round(recorded, played, f"rounds[{number - 1}]")
            if difference is not None:
                return difference
    if number != expected["num_rounds"]:
        return Difference("num_rounds", expected["num_rounds"], number)
    difference = first_difference(expected["final"], virtual.counts(), "final")
    if difference is not None:
        return difference
    unfinished = sorted([*virtual.scheduler.state.requests, *(spec["rid"] for spec in pending)])
    return first_difference(sorted(expected["unfinished"]), unfinished, "unfinished")

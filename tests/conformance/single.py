"""Runs recorded single passes. Owns: building the state of rule book section 2, and the fields of section 3."""

from __future__ import annotations

from typing import Any

from engine.request import Cause, Request, RequestState
from engine.scheduler.decision import Result
from engine.scheduler.plan import StepPlan
from tests.conformance.build import Virtual, tokens_of
from tests.conformance.compare import Difference, first_difference
from tests.conformance.trace import ledger_rows


def _cache(virtual: Virtual, segments: list[list[int]]) -> None:
    """Insert a list, floored to pages, as an unlocked path."""
    kv = virtual.scheduler.kv
    keys = virtual.keys(segments)
    lease = kv.acquire("cached", keys[:0])
    kv.extend(lease, len(keys) * virtual.page_size)
    kv.release(lease, keys)


def _holding(virtual: Virtual, spec: dict[str, Any], computed: int, outputs: int) -> Request:
    """A request that has `computed` tokens of K/V: matched, locked, the rest allocated, whole prompt pages inserted."""
    scheduler, size = virtual.scheduler, virtual.page_size
    virtual.arrive(spec)
    state, kv = scheduler.state, scheduler.kv
    request = state.requests[spec["rid"]]
    state.dequeue([request])
    keys = request.keys.first((request.prompt_len - 1) // size)
    kv.tree.touch(keys) if kv.enable_radix else None
    prefix = kv.match(keys).pages
    request.lease = kv.acquire(request.rid, keys[:prefix])
    request.transition(RequestState.PREFILL, Cause.ADMIT)
    for _ in range(outputs):
        virtual.result(request.rid)
        request.output_len += 1
    kv.extend(request.lease, computed)
    request.computed_len = computed
    inserted = min(computed, request.prompt_len) // size
    kv.insert(request.lease, request.keys.first(inserted))
    return request


def build(scenario: dict[str, Any], *, guards: bool) -> Virtual:
    """The state a recorded pass starts from."""
    virtual = Virtual(scenario, guards=guards)
    state = virtual.scheduler.state
    for entry in scenario.get("cached", []):
        _cache(virtual, entry["tokens"])
    for spec in scenario.get("running", []):
        outputs = spec["num_output"]
        request = _holding(virtual, spec, len(tokens_of(spec["tokens"])) + outputs - 1, outputs)
        request.transition(RequestState.DECODE, Cause.FINAL_CHUNK)
        state.running.append(request)
    chunked = scenario.get("chunked")
    if chunked:
        state.continuation = _holding(virtual, chunked, chunked["computed"], 0)
    for segments in scenario.get("touch", []):
        virtual.scheduler.kv.tree.touch(virtual.keys(segments))
    for spec in scenario.get("waiting", []):
        virtual.arrive(spec)
        request = state.requests[spec["rid"]]
        request.processed_at_entry = spec.get("arrival_processed_tokens") or 0
        for _ in range(spec.get("num_output") or 0):
            row = virtual.result(spec["rid"])
            request.output_len += 1
            if row.new_page_key is not None:
                request.keys.append(row.new_page_key)
            if row.head32_key is not None:
                request.head32_key = row.head32_key
    state.full = bool(scenario.get("batch_is_full"))
    return virtual


def _stop(plan: StepPlan) -> str:
    assert plan.pass_end is not None
    stop = plan.pass_end.stop
    last = plan.decisions[-1] if plan.decisions else None
    if stop == "result" and last is not None and last.is_continuation and last.result is Result.LAST:
        return "queue_end"
    return stop


def run_pass(case: dict[str, Any], *, guards: bool, acted: set[str]) -> Difference | None:
    """Make the pass and build its batch; the first difference, or None. `acted` gets the guards that acted."""
    scenario, expected = case["scenario"], case["expected"]
    virtual = build(scenario, guards=guards)
    scheduler, state = virtual.scheduler, virtual.scheduler.state
    played: dict[str, Any] = {"initial": virtual.counts()}
    scheduler.prepare(0)
    plan = scheduler.plan(0)
    acted.update(plan.guards)
    skipped = plan.pass_end is not None and plan.pass_end.stop == "skipped"
    members = [[row.rid, row.prefix_len, row.extend_len] for row in plan.prefills]
    if plan.prefills:
        plan = scheduler.commit(plan)
    played |= {
        "order": None if skipped else list(plan.order or ()),
        "matched": None if skipped else list(plan.matched),
        "deprioritized": None if plan.deprioritized is None else list(plan.deprioritized),
        "active_policy": None if skipped else plan.active_policy,
        "budget0": None,
        "chunk_limit": plan.chunk_limit,
        "candidates": ledger_rows(plan),
        "stop": _stop(plan),
        "batch": members or None,
        "mixed_decodes": list(plan.decodes) if plan.prefills else [],
        "chunked_req": plan.continuation_after,
        "batch_is_full": plan.full_after,
        "waiting_after": [request.rid for request in state.waiting],
        "preempted": list(plan.preempted),
        "final": virtual.counts(),
        "cached_after": [virtual.cached(entry["tokens"]) for entry in scenario.get("cached", [])],
    }
    if plan.budget_open is not None:
        b = plan.budget_open
        played["budget0"] = [b.rem_input, b.rem_chunk, b.remaining_total, b.remaining_current]
    for name, value in expected.items():
        difference = first_difference(value, played.get(name), name)
        if difference is not None:
            return difference
    return None

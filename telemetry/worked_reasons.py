"""Worked numbers of reasons, results and delays. Owns: one situation for each, played, and the sentence that says it.

Page 16 and a pool of 64 pages unless a sentence says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from engine.errors import RequestRefused
from engine.scheduler.decision import AdmissionDecision, Reason, Result
from engine.scheduler.plan import PassEnd, StepPlan
from telemetry.worked import World, decision


def _sides(found: AdmissionDecision) -> str:
    return f"need {found.need:g}, have {found.have:g}"


def _ended(plan: StepPlan, reason: Reason) -> PassEnd:
    """The end of a pass that `reason` ended; an error of the example when it was another."""
    if plan.pass_end is None or plan.pass_end.stopped_by is not reason:
        raise LookupError(f"no end {reason}: {plan.pass_end}")
    return plan.pass_end


def _whole() -> tuple[StepPlan, str]:
    world = World()
    world.cache("head", 64)
    world.add("a", 96, head=("head", 64))
    plan = world.step()
    found = decision(plan, Reason.ADMITTED_WHOLE)
    return plan, (
        f"A prompt of 96 tokens finds {found.prefix_len} cached: {found.selected_extend} of {found.candidate_extend} "
        f"are computed, the slice falls from {found.before.rem_chunk:,} to {found.after.rem_chunk:,}."
    )


def _pieces(steps: int, reason: Reason) -> tuple[StepPlan, str]:
    world = World(chunked_prefill_size=128)
    world.add("a", 300)
    plan = world.steps(steps)
    found = decision(plan, reason)
    return plan, (
        f"Slice 128, prompt 300: step {steps} computes tokens {found.prefix_len} to {found.extend_end}, "
        f"{300 - found.extend_end} are left."
    )


def _short_of_memory() -> World:
    world = World(pages=16)
    world.add("a", 96, max_new=80)
    world.add("b", 64, max_new=70)
    return world


def _kv_total() -> tuple[StepPlan, str]:
    plan = _short_of_memory().step()
    found = decision(plan, Reason.KV_TOTAL_EXHAUSTED)
    return plan, (
        f"Pool of 256 tokens. The first prompt takes 96, a page of slack and its 80 promised outputs: {found.have:g} "
        f"remain. A prompt of 64 that may answer 70 tokens asks for 64 + 70 + 16: {_sides(found)}."
    )


def _kv_now() -> tuple[StepPlan, str]:
    world = World()
    world.add("a", 50, max_new=1)
    plan = world.step()
    found = decision(plan, Reason.ADMITTED_WHOLE)
    pages = -(-found.selected_extend // 16)
    return plan, (
        f"Rare, since the test before it is the stricter one: a prompt of 50 with one output claims {pages} pages, "
        f"{pages * 16} tokens, and was tested with a need of {found.kv_need:g}. The guard behind it "
        "catches a pool that disagrees with its ledger."
    )


def _prefill_max() -> tuple[StepPlan, str]:
    world = World(prefill_max_requests=1)
    world.add("a", 32)
    world.add("b", 32)
    plan = world.step()
    found = decision(plan, Reason.PREFILL_MAX_REACHED)
    return plan, f"`prefill_max_requests=1`, two prompts of 32: the second would be number 2. {_sides(found)}."


def _full_flag() -> tuple[StepPlan, str]:
    world = _short_of_memory()
    world.steps(2)
    plan = world.step()
    end = _ended(plan, Reason.FULL_FLAG_SET)
    return plan, (
        f"Two steps after the situation of `kv_total_exhausted`: memory was short again, nobody left since, so no pass "
        f"is made. {end.not_considered} request waits unexamined while {len(plan.decodes)} decodes."
    )


def _delayed() -> tuple[StepPlan, str]:
    world = World(max_running_requests=4, min_free_rows=4)
    world.add("a", 32)
    world.step()
    world.add("b", 32)
    plan = world.step()
    found = decision(plan, Reason.DELAYED)
    return plan, f"`min_free_rows=4`, four rows, one decoding: three are free. {_sides(found)}."


def _parked() -> tuple[StepPlan, str]:
    world = World(
        pages=256,
        page_size=1,
        radix=False,
        chunked_prefill_size=8,
        schedule_conservativeness=0.01,
        clip_max_new_tokens=1,
    )
    world.add("d", 15, max_new=120)
    world.steps(2)
    world.add("long", 237, max_new=2)
    for step in range(200):
        plan = world.step()
        found = [each for each in plan.decisions if each.reason is Reason.PARKED_BY_GUARD]
        if found:
            return plan, (
                f"Page 1, pool of 256, slice 8, a prompt of 237 beside a decode that nothing was promised to: in step "
                f"{step + 3}, with {found[0].prefix_len} tokens done, its piece has no pages. {_sides(found[0])}."
            )
    raise LookupError("nobody was parked")


def _preempted() -> tuple[StepPlan, str]:
    world = World(max_running_requests=1, enable_priority_scheduling=True, enable_priority_preemption=True)
    world.add("low", 64, max_new=50, priority=0)
    world.steps(3)
    outputs = world.core.state.requests["low"].output_len
    world.add("high", 64, priority=11)
    plan = world.step()
    assert world.core.state.requests["low"].num_retractions == 1, f"preempted {plan.preempted}"
    return plan, (
        f"One row, threshold 10: priority 11 arrives while priority 0 decodes. 11 - 0 > 10, so `low` goes back to the "
        f"queue with the {outputs} outputs that it has, and `high` computes {plan.prefills[0].extend_len} tokens."
    )


def _compute() -> tuple[StepPlan, str]:
    world = World(max_prefill_tokens=128, chunked_prefill_size=None)
    world.add("a", 96)
    world.add("b", 64)
    plan = world.step()
    found = decision(plan, Reason.COMPUTE_EXHAUSTED)
    return plan, f"Chunking off, input limit 128, prompts of 96 and 64: {_sides(found)}."


def _chunk() -> tuple[StepPlan, str]:
    world = World(chunked_prefill_size=64)
    world.add("a", 64)
    world.add("b", 32)
    plan = world.step()
    end, last = _ended(plan, Reason.CHUNK_EXHAUSTED), plan.decisions[-1]
    return plan, (
        f"Slice 64, prompts of 64 and 32: the first leaves {last.after.rem_chunk}, and {end.not_considered} waits "
        "unexamined."
    )


def _below_page() -> tuple[StepPlan, str]:
    world = World(chunked_prefill_size=72)
    world.add("a", 64)
    world.add("b", 40)
    plan = world.step()
    return plan, f"Slice 72, page 16, prompts of 64 and 40: {_sides(decision(plan, Reason.CHUNK_BELOW_PAGE))}."


def _slot() -> tuple[StepPlan, str]:
    world = World(pages=502, radix=False, chunked_prefill_size=130)
    world.add("a", 64)
    world.add("b", 200)
    world.add("c", 83, ignore_eos=True)
    plan = world.step()
    pieces = ", ".join(str(row.extend_len) for row in plan.prefills)
    return plan, (
        f"No prefix tree, slice 130, prompts of 64, 200 and 83 (`ignore_eos`): the first two compute {pieces}, the "
        f"second of them in pieces. The third would be cut too: {_sides(decision(plan, Reason.CHUNK_SLOT_TAKEN))}."
    )


def _rows() -> tuple[StepPlan, str]:
    world = World(max_running_requests=2)
    for rid in "abc":
        world.add(rid, 32)
    plan = world.step()
    return plan, f"Two rows, three prompts: {_sides(decision(plan, Reason.ROWS_EXHAUSTED))}, in requests."


def _cold() -> tuple[StepPlan, str]:
    world = World(schedule_policy="lpm")
    world.add("a", 64, head=("head", 48))
    world.add("b", 64, head=("head", 48))
    world.add("c", 64)
    plan = world.step()
    order, back = ", ".join(plan.order or ()), ", ".join(plan.deprioritized or ())
    return plan, (
        f"Policy lpm, nothing cached. a and b begin with the same 48 tokens, c does not: the order is {order}; put "
        f"back: {back}."
    )


def _never() -> tuple[StepPlan, str]:
    world = World(pages=16)
    try:
        world.add("a", 300)
    except RequestRefused as refusal:
        return world.plan(), f"Refused at the door: “{refusal}”."
    raise LookupError("a prompt of 300 was let into a pool of 256")


def _queue_end() -> tuple[StepPlan, str]:
    world = World()
    world.add("a", 32)
    world.add("b", 32)
    plan = world.step()
    end = _ended(plan, Reason.QUEUE_END)
    return plan, f"Two prompts of 32, room for both: {len(plan.prefills)} admitted, {end.not_considered} left."


REASONS: Final[dict[Reason, Callable[[], tuple[StepPlan, str]]]] = {
    Reason.ADMITTED_WHOLE: _whole,
    Reason.ADMITTED_FIRST_CHUNK: lambda: _pieces(1, Reason.ADMITTED_FIRST_CHUNK),
    Reason.ADMITTED_NEXT_CHUNK: lambda: _pieces(2, Reason.ADMITTED_NEXT_CHUNK),
    Reason.ADMITTED_LAST_CHUNK: lambda: _pieces(3, Reason.ADMITTED_LAST_CHUNK),
    Reason.KV_NOW_EXHAUSTED: _kv_now,
    Reason.KV_TOTAL_EXHAUSTED: _kv_total,
    Reason.PREFILL_MAX_REACHED: _prefill_max,
    Reason.FULL_FLAG_SET: _full_flag,
    Reason.DELAYED: _delayed,
    Reason.PARKED_BY_GUARD: _parked,
    Reason.PREEMPTED_FOR: _preempted,
    Reason.COMPUTE_EXHAUSTED: _compute,
    Reason.CHUNK_EXHAUSTED: _chunk,
    Reason.CHUNK_BELOW_PAGE: _below_page,
    Reason.CHUNK_SLOT_TAKEN: _slot,
    Reason.ROWS_EXHAUSTED: _rows,
    Reason.SHARES_COLD_PREFIX: _cold,
    Reason.NEVER_FITS: _never,
    Reason.QUEUE_END: _queue_end,
}

#: Result -> the situation that shows it.
_SHOWN_BY: Final[dict[Result, Reason]] = {
    Result.CONTINUE: Reason.QUEUE_END,
    Result.NO_TOKEN: Reason.KV_TOTAL_EXHAUSTED,
    Result.OTHER: Reason.CHUNK_EXHAUSTED,
    Result.LAST: Reason.ADMITTED_LAST_CHUNK,
    Result.CONTINUES: Reason.ADMITTED_NEXT_CHUNK,
}


def of_result(result: Result) -> str:
    """The number of a result: the ledgers after the decision that carries it."""
    plan, _ = REASONS[_SHOWN_BY[result]]()
    found = next(each for each in plan.decisions if each.result is result)
    after = found.after
    said = "admitted" if found.is_admitted else "refused"
    return (
        f"`{found.reason.value}`: {found.rid} is {said} with {found.selected_extend} of {found.candidate_extend} "
        f"tokens; left are rem_input {after.rem_input:,}, rem_chunk {after.rem_chunk:,}, remaining_total "
        f"{after.remaining_total:g}, remaining_current {after.remaining_current:,}."
    )

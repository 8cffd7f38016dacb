"""Worked numbers of policies and ledgers. Owns: the situations, played, and the sentences and tables that say them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from engine.config import Policy
from engine.scheduler.plan import StepPlan
from engine.scheduler.policies.hrrn import response_ratio
from engine.scheduler.policies.shortest_prefill_first import uncached_work
from telemetry.worked import World

#: The queue of the policies page: (rid, prompt tokens, cached head, max_new_tokens, priority, routing key).
QUEUE: Final[tuple[tuple[str, int, tuple[str, int] | None, int, int, str], ...]] = (
    ("r1", 96, None, 8, 0, "blue"),
    ("r2", 96, ("A", 64), 32, 5, "red"),
    ("r3", 144, ("B", 128), 4, 0, "red"),
    ("r4", 80, ("A", 64), 16, 9, "blue"),
)


def _queued(**scheduler: object) -> World:
    world = World(**scheduler)  # type: ignore[arg-type]  # keywords of SchedulerConfig
    world.cache("A", 64)
    world.cache("B", 128)
    return world


def _fill(world: World) -> None:
    for rid, tokens, head, max_new, priority, key in QUEUE:
        world.add(rid, tokens, head=head, max_new=max_new, priority=priority, routing_key=key)


def _order(plan: StepPlan) -> str:
    return ", ".join(plan.order or ())


def _numbers(plan: StepPlan, value: Callable[[str], object]) -> str:
    return ", ".join(f"{rid} {value(rid)}" for rid in plan.order or ())


def _plain(policy: Policy, value: Callable[[World, str], object], what: str) -> str:
    world = _queued(schedule_policy=policy)
    _fill(world)
    plan = world.plan()
    return f"{what}: {_numbers(plan, lambda rid: value(world, rid))}. Order **{_order(plan)}**."


def fcfs() -> str:
    return _plain(Policy.FCFS, lambda world, rid: world.core.state.requests[rid].entry_seq, "Place of arrival")


def lpm() -> str:
    return _plain(Policy.LPM, lambda world, rid: world.core.state.requests[rid].matched_len, "Cached tokens")


def shortest_prefill_first() -> str:
    return _plain(
        Policy.SHORTEST_PREFILL_FIRST,
        lambda world, rid: uncached_work(world.core.state.requests[rid]),
        "Tokens left to compute",
    )


def lof() -> str:
    return _plain(Policy.LOF, lambda world, rid: world.core.state.requests[rid].max_new_tokens, "max_new_tokens")


def dfs_weight() -> str:
    world = _queued(schedule_policy=Policy.DFS_WEIGHT)
    _fill(world)
    plan = world.plan()
    weights: dict[int, int] = {}
    for matched in plan.matched:
        weights[matched] = weights.get(matched, 0) + 1
    return (
        f"The subtree of head A (64 tokens) weighs {weights[64]}, that of head B (128 tokens) {weights[128]}, and "
        f"{weights[0]} matches nothing, which ends at the root and comes after its subtrees. Order **{_order(plan)}**."
    )


def hrrn() -> str:
    world = _queued(schedule_policy=Policy.HRRN, max_running_requests=1)
    world.add("busy", 160, max_new=5)
    world.step()
    for rid, tokens, head, max_new, _, _ in QUEUE[:3]:
        world.add(rid, tokens, head=head, max_new=max_new)
        world.step()
    plan = world.plan()
    while not plan.order:
        world.settle(plan)
        plan = world.plan()
    processed = world.core.state.processed_tokens
    waited = _numbers(plan, lambda rid: processed - world.core.state.requests[rid].processed_at_entry)
    ratios = _numbers(plan, lambda rid: f"{response_ratio(world.core.state.requests[rid], processed):.3g}")
    return (
        f"r1, r2 and r3 arrive one step apart behind a busy row. The engine has processed {processed} tokens; of "
        f"these, while it waited: {waited}. Divided by its uncached prompt: {ratios}. Order **{_order(plan)}**."
    )


def random_order() -> str:
    orders = []
    for seed in (0, 1):
        world = _queued(schedule_policy=Policy.RANDOM, random_seed=seed)
        _fill(world)
        orders.append(f"**{_order(world.plan())}** with seed {seed}")
    return f"First pass: {', '.join(orders)}; the same in every run."


def routing_key() -> str:
    world = _queued(schedule_policy=Policy.ROUTING_KEY)
    world.add("busy", 16, max_new=50, routing_key="blue")
    world.step()
    _fill(world)
    plan = world.plan()
    keys = {rid: key for rid, _, _, _, _, key in QUEUE}
    return f"One `blue` request decodes. Keys: {_numbers(plan, keys.__getitem__)}. Order **{_order(plan)}**."


def priority() -> str:
    world = _queued(schedule_policy=Policy.FCFS, enable_priority_scheduling=True)
    _fill(world)
    plan = world.plan()
    priorities = {rid: value for rid, _, _, _, value, _ in QUEUE}
    return f"fcfs, priorities {_numbers(plan, priorities.__getitem__)}. Order **{_order(plan)}**."


def preemption() -> str:
    gives_way = []
    for urgent in (10, 11):
        world = World(max_running_requests=1, enable_priority_scheduling=True, enable_priority_preemption=True)
        world.add("low", 64, max_new=50, priority=0)
        world.steps(2)
        world.add("high", 64, priority=urgent)
        gives_way.append("gives way" if world.step().preempted else "stays")
    tie, more = gives_way
    return f"One row, threshold 10, priority 0 decodes: against priority 10 it {tie}, against 11 it {more}."


def _steps_until_long(**scheduler: object) -> tuple[int | None, int]:
    """In which step a prompt of 300 is admitted against one newcomer of 32 a step, and how often it was passed over."""
    world = World(
        schedule_policy=Policy.SHORTEST_PREFILL_FIRST,
        prefill_max_requests=1,
        **scheduler,  # type: ignore[arg-type]  # keywords of SchedulerConfig
    )
    world.add("long", 300, max_new=1)
    for step in range(1, 13):
        world.add(f"s{step}", 32, max_new=1)
        for each in world.step().decisions:
            if each.rid == "long" and each.is_admitted:
                return step, each.times_passed_over
    return None, 12


def overtakes() -> str:
    free, bounded = _steps_until_long(), _steps_until_long(max_overtakes=2)
    assert free[0] is None, f"the long prompt got through in step {free[0]}"
    return (
        f"shortest-prefill-first, one admission a step, a prompt of 300 and a newcomer of 32 in every step: not "
        f"admitted in {free[1]} steps; with `max_overtakes=2` in step {bounded[0]}, passed over {bounded[1]} times."
    )


def starvation() -> str:
    step, passed = _steps_until_long(starvation_limit_s=4)
    return (
        f"The same queue, steps of one second, `starvation_limit_s=4`: admitted in step {step}, passed over {passed} "
        "times."
    )


def continuation_cap() -> str:
    world = World(schedule_policy=Policy.SHORTEST_PREFILL_FIRST, chunked_prefill_size=64)
    world.add("long", 300)
    world.step()
    world.add("short", 10)
    plan = world.step()
    pieces = ", ".join(f"{row.rid} {row.extend_len}" for row in plan.prefills)
    return (
        f"Slice 64: a prompt of 300 has {plan.prefills[0].prefix_len} tokens done when one of 10 arrives. Its page of "
        f"16 is kept free: the cap is {plan.chunk_limit}, the step computes {pieces}."
    )


# --- ledgers ----------------------------------------------------------------------------------------------------------


def ledger_pass(accounting: str) -> StepPlan:
    """Two decode rows ride in a step of input limit 128 and slice 96; two prompts come up."""
    world = World(pages=32, max_prefill_tokens=128, chunked_prefill_size=96, kv_accounting=accounting)
    world.cache("head", 32)
    world.add("d1", 30, max_new=40)
    world.add("d2", 20, max_new=20)
    world.steps(3)
    world.add("p1", 72, head=("head", 32), max_new=24)
    world.add("p2", 90, max_new=16)
    return world.step()


def ledger_table(plan: StepPlan) -> str:
    """One line for the opening and each decision."""
    opened = plan.budget_open
    assert opened is not None, "no pass was made"
    lines = [
        "| | prefix | extend | rem_input | rem_chunk | remaining_current | remaining_total | need | have |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines.append(
        f"| open, {plan.mixed_rows} decode rows charged | | | {opened.rem_input} | {opened.rem_chunk} | "
        f"{opened.remaining_current} | {opened.remaining_total:.1f} | | |"
    )
    for found in plan.decisions:
        after = found.after
        sides = f"{found.kv_need:.1f} | {found.kv_limit:.1f}" if found.kv_need is not None else " | "
        lines.append(
            f"| {found.rid}: `{found.reason.value}` | {found.prefix_len} | {found.selected_extend} of "
            f"{found.candidate_extend} | {after.rem_input} | {after.rem_chunk} | {after.remaining_current} | "
            f"{after.remaining_total:.1f} | {sides} |"
        )
    return "\n".join(lines)


def decode_ratio() -> str:
    """How the new-token ratio falls."""
    world = World()
    first = world.core.state.ratio
    world.add("a", 16, max_new=200)
    world.steps(101)
    decodes = 100
    return (
        f"Conservativeness 1: it starts at {first:g} and is {world.core.state.ratio:.4f} after {decodes} decode steps; "
        f"a request with 100 tokens left is then promised {100 * world.core.state.ratio:.1f}."
    )

"""The worked example as steps of the real scheduler. Owns: its scenario, and the text in which one reads decisions."""

from __future__ import annotations

from typing import Any

from engine.scheduler.decision import AdmissionDecision
from engine.scheduler.plan import StepOutcome, StepPlan
from tests.conformance.build import Virtual
from tests.conformance.single import build

#: Page 16, input 128, chunk 96, pool 4096 tokens. Eight requests decode: 32 prompt tokens and 4 outputs of 64 each.
DECODES = [
    {"rid": f"d{n}", "tokens": [[50 + n, 0, 32]], "num_output": 4, "max_new_tokens": 64, "out_seed": 1050 + n}
    for n in range(8)
]
#: B has 80 prompt tokens of which 64 are cached, so 16 are left to compute.
PROMPTS = {"A": [[1, 0, 160]], "B": [[2, 0, 80]], "C": [[3, 0, 48]], "D": [[4, 0, 32]]}
CACHED = [[2, 0, 64]]


def scenario(policy: str, *, computed_of_a: int = 0) -> dict[str, Any]:
    """A, B, C and D wait, in this order; with `computed_of_a`, A is the continuation and has that many tokens done."""
    waiting = [{"rid": rid, "tokens": tokens, "max_new_tokens": 16} for rid, tokens in PROMPTS.items()]
    chunked = {"chunked": waiting.pop(0) | {"computed": computed_of_a}} if computed_of_a else {}
    return {
        "id": f"article/pass{2 if computed_of_a else ''}/{policy}",
        "kind": "pass",
        "config": {
            "page_size": 16,
            "kv_pool_tokens": 4096,
            "max_prefill_tokens": 128,
            "chunked_prefill_size": 96,
            "new_token_ratio": 0.7,
            "policy": policy,
            "enable_mixed_chunk": True,
            "max_running_requests": 64,
            "prefill_max_requests": None,
            "radix": True,
            "priority_scheduling": False,
            "priority_preemption": False,
            "clip_max_new_tokens": 4096,
        },
        "cached": [{"tokens": CACHED}],
        "running": DECODES,
        **chunked,
        "waiting": waiting,
    }


class Play:
    """Steps of the example, each as lines of text."""

    def __init__(self, policy: str, *, computed_of_a: int = 0) -> None:
        self._virtual: Virtual = build(scenario(policy, computed_of_a=computed_of_a), guards=True)
        for spec in self._virtual.specs.values():
            spec.setdefault("out_seed", 1200)

    def step(self) -> str:
        """Run one step; returns its decisions as text."""
        virtual = self._virtual
        scheduler, state = virtual.scheduler, virtual.scheduler.state
        scheduler.prepare(0)
        free, evictable, _ = virtual.counts()
        plan = scheduler.commit(scheduler.plan(0))
        text = _text(plan, free=free, evictable=evictable)
        scheduler.apply(plan, StepOutcome(plan.step, tuple(virtual.result(rid) for rid in plan.sampling)))
        waiting = " ".join(request.rid for request in state.waiting) or "nobody"
        return text + f"\nleft      continues {plan.continuation_after or 'nobody'}, waits {waiting}"


def _change(before: float | None, after: float | None) -> str:
    return f"{before:g}" if before == after else f"{before:g}->{after:g}"


def _decided(d: AdmissionDecision) -> list[str]:
    over = f" (overdraft {' '.join(d.overdrafts)})" if d.overdrafts else ""
    test = f", need {d.kv_need:g} < {d.kv_limit:g}" if d.kv_need is not None else ""
    asked = f"has {d.prefix_len}, wants {d.candidate_extend}, gets {d.selected_extend}"
    ledgers = [
        f"input {_change(d.before.rem_input, d.after.rem_input)}",
        f"chunk {_change(d.before.rem_chunk, d.after.rem_chunk)}",
        f"total {_change(d.before.remaining_total, d.after.remaining_total)}",
        f"current {_change(d.before.remaining_current, d.after.remaining_current)}",
    ]
    return [f"{d.rid:10}{asked}: {d.reason}{over}{test}", f"{'':10}{', '.join(ledgers)}"]


def _text(plan: StepPlan, *, free: int, evictable: int) -> str:
    opened = plan.budget_open
    assert opened is not None
    opens = f"opens     free {free} + evictable {evictable}, {plan.mixed_rows} decode rows"
    ledgers = f"          input {opened.rem_input}, chunk {opened.rem_chunk}, total {opened.remaining_total:g}"
    lines = [f"{opens}, promised {plan.promised_tokens:g}", f"{ledgers}, current {opened.remaining_current}"]
    for decision in plan.decisions:
        lines += _decided(decision)
    rows = [f"{row.rid}[{row.prefix_len}:{row.extend_end}]" for row in plan.prefills]
    order = " ".join(["order", *(plan.order or ())])
    cap = "" if plan.chunk_limit is None else f", cap {plan.chunk_limit}"
    lines.append(f"batch     {' '.join(rows)} + {len(plan.decodes)} decodes, {order}{cap}")
    return "\n".join(lines)

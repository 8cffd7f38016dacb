"""The span tree of one step. Owns: its phases as children, its ledgers as attributes, its requests as links."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from typing import Final

from engine.events import StepCompleted, StepPlanned
from telemetry.spans.draft import Attributes, DraftEvent, SpanDraft, derived_id, step_ids

MAX_LINKS: Final = 32
#: A step this many times as long as the median of its kind is kept.
SLOW_FACTOR: Final = 4
#: One step in so many is kept whatever it was.
ONE_IN: Final = 1_000
_MEDIAN_OF: Final = 101
_MIN_FOR_MEDIAN: Final = 20
_STATES: Final = ("free", "private", "protected", "evictable")


#: What `StepKeeper.why` may say, in the order in which it asks.
STEP_KEPT_BECAUSE: Final[dict[str, str]] = {
    "violation": "A law broke in it.",
    "failed": "The executor raised.",
    "retraction": "It pushed a request back.",
    "slow": "It took much longer than others of its kind.",
    "ratio": "One in so many.",
}


class RunningMedian:
    """Median of the last 101 values; None before there are 20."""

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, value: int) -> None:
        """One more value; the oldest of 102 is forgotten."""
        self._order.append(value)
        insort(self._sorted, value)
        if len(self._order) > _MEDIAN_OF:
            # By search, not by a walk: most of the numbers are in no cache by now.
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]

    @property
    def value(self) -> int | None:
        """The median now."""
        return self._sorted[len(self._sorted) // 2] if len(self._sorted) >= _MIN_FOR_MEDIAN else None


class StepKeeper:
    """Which steps get a span."""

    def __init__(self) -> None:
        self._medians: dict[str, RunningMedian] = {}

    def why(self, plan: StepPlanned, event: StepCompleted, *, violated: bool) -> str | None:
        """The reason to keep it, None when it is not kept. Call it once for every step."""
        spent = event.times.applied_ns - event.times.started_ns
        median = self._medians.setdefault(plan.kind.value, RunningMedian())
        typical = median.value
        median.add(spent)
        if violated:
            return "violation"
        if event.failed:
            return "failed"
        if plan.retractions or plan.preempted:
            return "retraction"
        if typical is not None and spent > SLOW_FACTOR * typical:
            return "slow"
        return "ratio" if plan.step % ONE_IN == 0 else None


def step_spans(
    plan: StepPlanned,
    event: StepCompleted,
    *,
    engine_id: str,
    kept_because: str,
    violations: list[tuple[str, str, str]],
    span_of: Callable[[str], tuple[int, int] | None],
) -> list[SpanDraft]:
    """The step's span and one child per phase.

    violations  (law, expected, found)
    span_of     (trace id, span id) of a request's root span, None when it is not known
    """
    times = event.times
    trace_id, root_id = step_ids(engine_id, plan.step)
    rids = dict.fromkeys([row.rid for row in plan.prefills] + list(plan.decodes))
    links = [link for rid in rids if (link := span_of(rid)) is not None]
    attributes = _attributes(plan, rows=len(rids), links=len(links))
    attributes |= {"admitscope.engine_id": engine_id, "admitscope.kept_because": kept_because}
    started, applied = times.started_ns or plan.t_ns, times.applied_ns or event.t_ns
    root = SpanDraft(
        name="engine.step",
        trace_id=trace_id,
        span_id=root_id,
        parent_id=None,
        start_ns=started,
        end_ns=max(started, applied),
        attributes=attributes,
        events=tuple(
            DraftEvent("engine.invariant.violation", applied, {"id": law, "expected": expected, "observed": found})
            for law, expected, found in violations
        ),
        links=tuple(links[:MAX_LINKS]),
        error="step_failed" if event.failed else None,
    )
    cuts = (
        ("plan", times.plan_from_ns, times.planned_ns),
        ("commit", times.planned_ns, times.committed_ns),
        ("prepare", times.committed_ns, times.launched_ns),
        ("forward", times.launched_ns, times.ready_ns),
        ("apply", times.ready_ns, times.applied_ns),
    )
    children = [
        SpanDraft(
            name=f"engine.step.{name}",
            trace_id=trace_id,
            span_id=derived_id(trace_id, name),
            parent_id=root_id,
            start_ns=start,
            end_ns=end,
            attributes={},
        )
        for name, start, end in cuts
        if start and end >= start
    ]
    return [root, *children]


def _attributes(plan: StepPlanned, *, rows: int, links: int) -> Attributes:
    """What a step did, and what was left in each ledger."""
    attributes: Attributes = {
        "step": plan.step,
        "kind": plan.kind.value,
        "rows": rows,
        "decode_rows": len(plan.decodes),
        "prefill_tokens": sum(row.extend_len for row in plan.prefills),
        "waiting": plan.num_waiting,
        "running": plan.num_running,
        "new_token_ratio": plan.new_token_ratio,
        "evicted_pages": plan.evicted_pages,
        "retractions": len(plan.retractions),
        "links_omitted": max(0, links - MAX_LINKS),
    }
    attributes |= {f"pages.{state}": count for state, count in zip(_STATES, plan.pages, strict=True)}
    if plan.pass_end is not None:
        attributes |= {"pass_end": plan.pass_end.stopped_by.value, "not_considered": plan.pass_end.not_considered}
    for name, ledger in (("open", plan.budget_open), ("close", plan.budget_close)):
        if ledger is not None:
            attributes |= {
                f"compute.{name}": ledger.rem_input,
                f"kv_total.{name}": ledger.remaining_total,
                f"kv_now.{name}": ledger.remaining_current,
            }
            if ledger.rem_chunk is not None:
                attributes[f"chunk.{name}"] = ledger.rem_chunk
    return attributes

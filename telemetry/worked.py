"""Worked examples. Owns: a small scheduler to play situations on, for the reference pages. No model, no clock.

A prompt is its own tokens, or a named head that others share and own tokens after it. Steps answer one token a row at
once. Everything a page says in numbers comes out of a plan made here.
"""

from __future__ import annotations

from zlib import crc32

from engine.config import EngineConfig
from engine.events import NullSink
from engine.kvcache.page_keys import PageKeyer
from engine.request import FinishReason
from engine.scheduler.decision import AdmissionDecision, Reason
from engine.scheduler.plan import OutcomeRow, StepOutcome, StepPlan
from engine.scheduler.scheduler import Arrival, Scheduler

STEP_NS = 1_000_000_000


class World:
    """One scheduler. Keywords are those of SchedulerConfig; the pool is `pages` pages of `page_size` tokens."""

    def __init__(self, *, pages: int = 64, page_size: int = 16, radix: bool = True, **scheduler: object) -> None:
        self.config = EngineConfig.model_validate(
            {
                "scheduler": {"schedule_policy": "fcfs", "max_running_requests": 8, **scheduler},
                "cache": {"page_size": page_size, "num_pages": pages, "enable_radix": radix},
                "executor": {"kind": "simulated"},
            }
        )
        self.core = Scheduler(self.config, num_pages=pages, sink=NullSink())
        self.core.state.record_order = True
        self.now_ns = 0
        self._keyer = PageKeyer(page_size, b"")

    def add(
        self,
        rid: str,
        tokens: int,
        *,
        head: tuple[str, int] | None = None,
        max_new: int = 8,
        ignore_eos: bool = False,
        priority: int | None = None,
        routing_key: str | None = None,
    ) -> None:
        """Queue a prompt of `tokens` tokens, of which the first are a shared head (name, length)."""
        shared = [] if head is None else _ids(head[0], head[1])
        ids = shared + _ids(rid, tokens - len(shared))
        self.core.add(
            Arrival(
                rid=rid,
                prompt_len=tokens,
                max_new_tokens=max_new,
                page_keys=self._keyer.of(ids)[0].astype("<i8").tobytes(),
                head32_key=self._keyer.head32(ids),
                ignore_eos=ignore_eos,
                priority=priority,
                routing_key=routing_key,
            ),
            self.now_ns,
        )

    def cache(self, name: str, tokens: int) -> None:
        """Put a head into the cache, held by nobody."""
        kv, keys = self.core.kv, self._keyer.of(_ids(name, tokens))[0]
        lease = kv.acquire("cached", keys[:0])
        kv.extend(lease, tokens)
        kv.release(lease, keys)

    def plan(self) -> StepPlan:
        """Order and plan the next step; `settle` has to follow."""
        self.now_ns += STEP_NS
        self.core.prepare(self.now_ns)
        return self.core.plan(self.now_ns)

    def settle(self, plan: StepPlan) -> None:
        """Commit; each sampled row gets a token, and ends when it has all it asked for."""
        plan = self.core.commit(plan)
        self.core.apply(plan, StepOutcome(plan.step, tuple(self._row(rid) for rid in plan.sampling)))

    def step(self) -> StepPlan:
        plan = self.plan()
        self.settle(plan)
        return plan

    def steps(self, count: int) -> StepPlan:
        """Several steps; the last plan."""
        for _ in range(count - 1):
            self.step()
        return self.step()

    def _row(self, rid: str) -> OutcomeRow:
        request = self.core.state.requests[rid]
        length = request.seq_len + 1
        return OutcomeRow(
            rid,
            new_page_key=crc32(f"{rid} {length}".encode()) if length % self.config.cache.page_size == 0 else None,
            finish=FinishReason.LENGTH if request.output_len + 1 >= request.max_new_tokens else None,
        )


def decision(plan: StepPlan, reason: Reason) -> AdmissionDecision:
    """The first decision of a plan with this reason; an error of the example when there is none."""
    found = [each for each in plan.decisions if each.reason is reason]
    if not found:
        raise LookupError(f"no decision {reason}: {[each.reason.value for each in plan.decisions]}")
    return found[0]


def _ids(name: str, count: int) -> list[int]:
    start = crc32(name.encode()) << 20
    return list(range(start, start + count))

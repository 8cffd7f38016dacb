"""SchedulerState. Owns: the one place where requests, queue, running list and flags live.

Every live request is in `requests`, and in exactly one of: the waiting list, the running list, the last prefill
batch, or it is the continuation (which may also be a member of the last batch). Written by `scheduler.py` and
`commit.py` only.
"""

from __future__ import annotations

from typing import Final

from engine.config import Policy, SchedulerConfig
from engine.kvcache.kv_cache import KvCache
from engine.request import Request
from engine.scheduler.accounting import KvAccounting
from engine.scheduler.indexed_queue import IndexedQueue
from engine.scheduler.plan import StepPlan
from engine.scheduler.policies import Ordering
from engine.scheduler.waiting_queue import Overtakes, PlainQueue, WaitingQueue
from engine.scheduler.weight_queue import WeightQueue

LEAST_IMPORTANT: Final = 1 << 62


def _queue_for(config: SchedulerConfig, kv: KvCache) -> WaitingQueue:
    """The queue whose order is kept up to date by what changed, where the policy has one."""
    if config.incremental_order and kv.enable_radix:
        if config.schedule_policy in {Policy.LPM, Policy.SHORTEST_PREFILL_FIRST}:
            return IndexedQueue(config.schedule_policy, kv.tree)
        if config.schedule_policy is Policy.DFS_WEIGHT:
            return WeightQueue(kv.tree)
    return PlainQueue(config.schedule_policy)


class SchedulerState:
    """Mutable state between steps. `version` counts writes; a plan is valid for one version only."""

    def __init__(self, config: SchedulerConfig, kv: KvCache, accounting: KvAccounting) -> None:
        self.config = config
        self.kv = kv
        self.accounting = accounting
        self.requests: dict[str, Request] = {}
        self.waiting: WaitingQueue = _queue_for(config, kv)
        self.overtakes = Overtakes()
        #: Fill the order of every plan: costs a walk of the queue per pass. For conformance and teaching.
        self.record_order = False
        #: Prefill tokens queued: what waiting requests would compute without any cache hit.
        self.waiting_tokens = 0
        self.running: list[Request] = []
        #: Members of the last prefill or mixed batch, until the next step appends them to `running`.
        self.last_prefill: list[Request] = []
        self.continuation: Request | None = None
        self.chunk_to_insert = False
        #: The reference's latched full flag.
        self.full = False
        self.shrank = False
        self.ratio = config.initial_new_token_ratio
        #: HRRN's processed-token counter and the extend count that the running list carries (rule book section 6).
        self.processed_tokens = 0
        self.sticky_extend_tokens = 0
        self.last_extend_tokens = 0
        self.entry_counter = 0
        self.order_calls = 0
        self.ordering: Ordering | None = None
        self.skip_reason: str | None = None
        self.sat_out_last = False
        self.in_flight: StepPlan | None = None
        self.evicted_in_step = 0
        self.step = 0
        self.version = 0

    @property
    def live_running(self) -> list[Request]:
        """Requests that decode next: the running list and the unfinished last batch, without the continuation."""
        return self.running + [request for request in self.last_prefill if request is not self.continuation]

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.last_prefill or self.continuation)

    def importance(self, request: Request) -> int:
        """Smaller is more important; a request without a priority is the least important."""
        if request.priority is None:
            return LEAST_IMPORTANT
        return request.priority if self.config.low_priority_values_first else -request.priority

    def next_entry(self) -> int:
        self.entry_counter += 1
        return self.entry_counter

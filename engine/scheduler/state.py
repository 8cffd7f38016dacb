"""SchedulerState. Owns: the one place where requests, queue, running list and flags live.

Every live request is in `requests`, and in exactly one of: the waiting list, the running list, the last prefill
batch, those that leave, or it is the continuation (which may also be a member of the last batch). Written by
`scheduler.py`, `commit.py`, `advance.py` and `apply.py` only.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Final

from engine.config import Policy, SchedulerConfig
from engine.kvcache.kv_cache import KvCache
from engine.request import Request
from engine.scheduler.accounting import KvAccounting
from engine.scheduler.delays import StepHistory
from engine.scheduler.flight import Flight
from engine.scheduler.indexed_queue import IndexedQueue
from engine.scheduler.plan import StepPlan
from engine.scheduler.policies import Ordering
from engine.scheduler.waiting_queue import Overtakes, PlainQueue, WaitingQueue
from engine.scheduler.weight_queue import WeightQueue

LEAST_IMPORTANT: Final = 1 << 62


def _queue_for(config: SchedulerConfig, kv: KvCache, *, chained_keys: bool) -> WaitingQueue:
    """The queue whose order is kept up to date by what changed, where the policy has one."""
    if config.incremental_order and kv.enable_radix:
        if config.schedule_policy in {Policy.LPM, Policy.SHORTEST_PREFILL_FIRST}:
            return IndexedQueue(config.schedule_policy, kv.tree, chained_keys=chained_keys)
        if config.schedule_policy is Policy.DFS_WEIGHT:
            return WeightQueue(kv.tree, chained_keys=chained_keys)
    return PlainQueue(config.schedule_policy)


class SchedulerState:
    """Mutable state between steps. `version` counts writes; a plan is valid for one version only.

    overlaps  a step may be planned while the one before it is still in flight
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KvCache,
        accounting: KvAccounting,
        *,
        chained_keys: bool = False,
        overlaps: bool = False,
    ) -> None:
        self.config = config
        self.kv = kv
        self.accounting = accounting
        self.overlaps = overlaps
        self.requests: dict[str, Request] = {}
        self.waiting: WaitingQueue = _queue_for(config, kv, chained_keys=chained_keys)
        self.overtakes = Overtakes()
        #: Fill the order of every plan: costs a walk of the queue per pass. For conformance and teaching.
        self.record_order = False
        #: Prefill tokens queued: what waiting requests would compute without any cache hit.
        self.waiting_tokens = 0
        #: The same requests by entry, oldest first; linked, so that leaving the head costs nothing.
        self.by_entry: OrderedDict[str, Request] = OrderedDict()
        self.running: list[Request] = []
        #: Members of the last prefill or mixed batch, until the next step appends them to `running`.
        self.last_prefill: list[Request] = []
        self.continuation: Request | None = None
        self.chunk_to_insert = False
        #: Overlap: those whose last token is under way. Nothing is planned for them, but they hold their memory still.
        self.leaving: dict[str, Request] = {}
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
        #: Passes in a row that the prefill delayer held back; shapes and times of past steps, for the dynamic chunk.
        self.delayed_passes = 0
        self.history = StepHistory()
        #: When the last applied step was ready: a step behind it had the executor to itself from then on.
        self.last_ready_ns = 0
        #: The last step did nothing although somebody waited.
        self.stuck = False
        #: Committed and not yet applied, oldest first: at most one without overlap, at most two with it.
        self.flights: deque[Flight] = deque()
        self.evicted_in_step = 0
        self.step = 0
        self.version = 0

    @property
    def live_running(self) -> list[Request]:
        """Requests that decode next: the running list and the unfinished last batch, without the continuation."""
        return self.running + [request for request in self.last_prefill if request is not self.continuation]

    @property
    def in_flight(self) -> StepPlan | None:
        """The plan whose outcome is applied next."""
        return self.flights[0].plan if self.flights else None

    @property
    def has_step_to_await(self) -> bool:
        """Whether an outcome has to be applied before the next plan."""
        return len(self.flights) > self.overlaps

    @property
    def is_plannable(self) -> bool:
        """Whether there is anybody for whom a step could do something."""
        return bool(self.waiting or self.running or self.last_prefill or self.continuation)

    @property
    def has_work(self) -> bool:
        return self.is_plannable or bool(self.flights)

    def enqueue(self, request: Request, now_ns: int) -> None:
        """Put a request at the queue's tail."""
        request.entered_ns = now_ns
        self.waiting.add(request)
        self.by_entry[request.rid] = request
        self.waiting_tokens += request.seq_len

    def dequeue(self, requests: list[Request]) -> None:
        """Take waiting requests out of the queue."""
        self.waiting.remove([request.rid for request in requests])
        for request in requests:
            del self.by_entry[request.rid]
            self.waiting_tokens -= request.seq_len

    def candidates(self, now_ns: int) -> Iterator[Request]:
        """Waiting requests as a pass considers them: who waited too long, then the policy's order."""
        urgent: dict[str, Request] = {}
        limit_s, overtakes = self.config.starvation_limit_s, self.config.max_overtakes
        if limit_s is not None or overtakes is not None:
            # Both conditions hold for older entries first, so the urgent are a head of the arrival order.
            for request in self.by_entry.values():
                is_old = limit_s is not None and now_ns - request.entered_ns >= limit_s * 1e9
                is_passed = overtakes is not None and self.overtakes.in_this_stay(request) >= overtakes
                if not (is_old or is_passed):
                    break
                urgent[request.rid] = request
                yield request
        for request in self.waiting:
            if request.rid not in urgent:
                yield request

    def importance(self, request: Request) -> int:
        """Smaller is more important; a request without a priority is the least important."""
        return self.importance_of(request.priority)

    def importance_of(self, priority: int | None) -> int:
        """The same for a priority as a client gives it."""
        if priority is None:
            return LEAST_IMPORTANT
        return priority if self.config.low_priority_values_first else -priority

    def next_entry(self) -> int:
        self.entry_counter += 1
        return self.entry_counter

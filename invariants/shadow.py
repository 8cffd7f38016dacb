"""The second set of books. Owns: what the engine must look like, rebuilt from events alone.

Only events enter here, never a live object or a counter that the engine reports: those are what is compared. The laws
read the books and call the small writers below; after a violation the books follow the engine, so that one fault is
reported once and not at every later event.
"""

from __future__ import annotations

import math
from typing import Final

from engine.config import EngineConfig
from engine.events import AdmissionDecided, EngineStarted, PagesMoved, RequestTransitioned, StepPlanned
from engine.request import Cause, RequestState
from engine.scheduler.decision import ADMITTED, LedgerView
from invariants.members import DECODE, FINISHED, PREFILL, WAITING
from invariants.overlap_book import OverlapBook
from invariants.page_book import EVICTABLE, FREE, PageBook
from invariants.running_book import Running, ShadowRequest, growth_of

#: Requests whose end is remembered, to tell a second end from an unknown request.
REMEMBERED_ENDS: Final = 10_000


class PlanView:
    """What a plan was made on: page counts and growth of the running, as they stood before its commit."""

    __slots__ = (
        "continuation",
        "eos_growth",
        "evictable",
        "exact_claim",
        "exact_promise",
        "free",
        "plain_growth",
        "ratio",
        "running",
    )

    def __init__(self) -> None:
        self.free = self.evictable = self.running = self.plain_growth = self.eos_growth = 0
        self.ratio = 0.0
        self.continuation: str | None = None
        #: Under exact accounting: what is promised in all, and what decode rows would claim now.
        self.exact_promise = 0.0
        self.exact_claim = 0


class Shadow:
    """Books of one engine life."""

    def __init__(self, started: EngineStarted) -> None:
        self.config = EngineConfig.model_validate_json(started.config)
        scheduler = self.config.scheduler
        self.page_size = started.page_size
        self.num_pages = started.num_pages
        self.max_rows = started.max_running_requests
        #: Whose prices are recomputed: the reference's, or the exact ones.
        self.reference: bool = str(scheduler.kv_accounting) == "reference"
        self.clip = scheduler.clip_max_new_tokens
        self.chunking = scheduler.chunked_prefill_size is not None
        self.mixing = self.chunking and scheduler.enable_mixed_chunk
        #: Steps in flight, where they overlap; None where one follows the other.
        self.overlap = OverlapBook() if self.config.executor.overlap else None
        # -- pages
        self.pool = PageBook(self.num_pages, self.max_rows)
        #: Another engine decided: its pages are not in the events (`InvariantChecker.is_foreign`).
        self.is_foreign = False
        #: Claims that are not followed yet: see `page_laws.on_claims`.
        self.claims: list[PagesMoved] = []
        # -- locks
        self.holders: dict[int, dict[str, int]] = {}
        self.node_locks: dict[int, int] = {}
        # -- requests
        self.requests: dict[str, ShadowRequest] = {}
        self.rows: dict[int, str] = {}
        self.ended: dict[str, int] = {}
        #: rid -> seq of the abort that must end it before the next step is applied
        self.aborting: dict[str, int] = {}
        self.in_state: dict[RequestState, int] = dict.fromkeys(RequestState, 0)
        self.running = Running(self.clip)
        self.waiting_tokens = 0
        # -- the step
        # Properties of the settings, each worked out from the others at every look.
        self.first_ratio = self.ratio = scheduler.initial_new_token_ratio
        self.least_ratio, self.ratio_decay = scheduler.min_new_token_ratio, scheduler.new_token_ratio_decay
        self.view = PlanView()
        self.in_commit = False
        self.decisions: list[AdmissionDecided] = []
        #: Of them, those that admitted and those that refused.
        self.admitted: list[AdmissionDecided] = []
        self.refused: list[AdmissionDecided] = []
        #: The ledgers that the last of them left.
        self.left: LedgerView | None = None
        #: rid -> prefix_len of its first decision in the open pass
        self.decided_prefix: dict[str, int] = {}
        #: The request that is partly prefilled once the step in flight is applied.
        self.cut: str | None = None
        self.pinned_tokens = 0
        self.gained_current = 0
        self.gained_total = 0.0
        self.preempted_growth = 0.0
        self.preempted_claim = 0
        self.locked_pages = 0
        self.released_pages = 0
        self.evicted_pages = 0
        #: Rows of the claims since the counts were last compared.
        self.claimed_rows: set[int] = set()
        #: rid -> (request, row it had, seq of the transition, whether it ended): to be found holding nothing
        self.leaving: dict[str, tuple[ShadowRequest, int, int, bool]] = {}
        self.plan: StepPlanned | None = None
        #: Whether the last plan sampled its finished prompts and all its decodes, in this order.
        self.is_sampled_as_due = False
        self.last_plan_step = -1
        self.idle_steps = 0

    @property
    def counts(self) -> list[int]:
        """Pages by state."""
        return self.pool.counts

    # -- requests ------------------------------------------------------------------------------------------------

    def growth(self, request: ShadowRequest) -> int:
        """Tokens that a running request may still add, as far as they are promised."""
        return min(request.max_new - request.outputs, self.clip)

    def set_state(self, request: ShadowRequest, state: RequestState) -> None:
        """Move a request, keeping the counts by state and the growth of the running."""
        before, in_state = request.state, self.in_state
        if before is not None:
            in_state[before] -= 1
            if before is WAITING:
                self.waiting_tokens -= request.seq_len
            elif before is DECODE:
                self.running.leave(request)
        request.state = state
        if state is FINISHED:
            del self.requests[request.rid]
            self.aborting.pop(request.rid, None)  # its id may be used again before the step ends
            return
        in_state[state] += 1
        if state is DECODE:
            self.running.join(request)
        elif state is WAITING:
            self.waiting_tokens += request.seq_len

    def count_preempted(self, rid: str) -> None:
        """Remember the promise that a preempted request gives back, and the page that it would have claimed now."""
        request = self.running.get(rid)
        if request is None:
            return
        if self.reference:
            self.preempted_growth += self.growth(request) * (1.0 if request.ignore_eos else self.view.ratio)
            return
        page = self.page_size
        self.preempted_growth += growth_of(request, clip=self.clip, ratio=self.view.ratio, page_size=page)
        if (request.seq_len - 1) % page == 0:
            self.preempted_claim += page

    def decide(self, event: AdmissionDecided) -> None:
        """Remember a decision of the open pass."""
        self.decisions.append(event)
        (self.admitted if event.reason in ADMITTED else self.refused).append(event)
        self.decided_prefix.setdefault(event.rid, event.prefix_len)

    def remember_end(self, rid: str, seq: int) -> None:
        self.ended[rid] = seq
        if len(self.ended) > REMEMBERED_ENDS:
            del self.ended[next(iter(self.ended))]

    def add_output(self, request: ShadowRequest, step: int) -> None:
        """One output token, counted once per step."""
        if request.token_step != step:
            request.token_step = step
            request.outputs += 1

    def outputs_due(self, request: ShadowRequest, event: RequestTransitioned) -> int:
        """Output tokens that an end has to tell: those that came, and none that is only under way."""
        failed = event.cause is Cause.ERROR
        if self.overlap is not None:
            return request.outputs - self.overlap.under_way(request.rid, event.step, is_failed=failed)[0]
        # Whoever is aborted while its row is under way waits for its token; only a failed step brings none.
        return request.outputs + (not failed and self.is_token_due(request, event.step))

    def is_token_due(self, request: ShadowRequest, step: int) -> bool:
        """Whether the step in flight samples a row of `request` whose token is not counted yet."""
        plan, running = self.plan, self.running
        if plan is None or request.token_step == step:
            return False
        if request.state is DECODE and running.named is plan.decodes and request.rid not in running.came:
            return self.is_sampled_as_due or request.rid in plan.sampling
        return request.rid in plan.sampling

    # -- exact accounting ------------------------------------------------------------------------------------------

    def pages(self, tokens: float) -> int:
        """Tokens of the pages that `tokens` tokens occupy."""
        return math.ceil(tokens / self.page_size) * self.page_size

    def whole(self, request: ShadowRequest) -> int:
        """Pages of a request at its longest: the last output token is never written."""
        return self.pages(request.seq_len + max(self.growth(request) - 1, 0))

    def exact_future(self) -> tuple[int, int]:
        """What is promised to the running beyond the pages they hold, and to the rest of the half-prefilled request;
        and what the running would claim with one token more each."""
        promised, claimed = self.running.pages_promised(self.ratio, self.page_size)
        rid = self.continuation()
        if rid is not None:
            request = self.requests[rid]
            promised += self.whole(request) - self.pages(request.cursor or 0)
        return promised, claimed

    # -- locks ---------------------------------------------------------------------------------------------------

    def add_lock(self, node: int, rid: str, delta: int) -> int:
        """Change one hold; returns the request's holds on this node afterwards (negative shows a fault)."""
        holders, node_locks = self.holders, self.node_locks
        holds = holders.get(node)
        if holds is None:
            holds = holders[node] = {}
        mine = holds.get(rid, 0) + delta
        if mine > 0:
            holds[rid] = mine
        else:
            holds.pop(rid, None)
        total = node_locks.get(node, 0) + delta
        if total > 0:
            node_locks[node] = total
        else:
            node_locks.pop(node, None)
            holders.pop(node, None)
        request = self.requests.get(rid)
        if request is None and rid in self.leaving:
            request = self.leaving[rid][0]
        if request is not None:
            request.locks += delta
        return mine

    def split_locks(self, old: int, new: int) -> None:
        """The new half of a split node is held by whoever holds the old one."""
        holds = self.holders.get(old)
        if not holds or new in self.holders:
            return
        self.holders[new] = dict(holds)
        self.node_locks[new] = self.node_locks[old]
        for rid, count in holds.items():
            request = self.requests.get(rid)
            if request is not None:
                request.locks += count

    def locks_of(self, rid: str) -> list[int]:
        """Nodes that a request holds; a scan, for reports and audits."""
        return [node for node, holds in self.holders.items() if rid in holds]

    # -- the step ------------------------------------------------------------------------------------------------

    def continuation(self) -> str | None:
        """The request that is partly prefilled, between steps; None when there is none."""
        if not self.in_state[PREFILL]:
            return None
        return next((rid for rid in self.rows.values() if self.requests[rid].state is PREFILL), None)

    def take_view(self) -> None:
        """Remember what the next plan will be made on."""
        view = self.view
        counts = self.pool.counts
        view.free, view.evictable = counts[FREE], counts[EVICTABLE]
        view.running, view.ratio = len(self.running), self.ratio
        view.plain_growth, view.eos_growth = self.running.growth
        view.continuation = self.continuation() if self.in_state[PREFILL] else None
        if not self.reference:
            view.exact_promise, view.exact_claim = self.exact_future()
        self.locked_pages = self.released_pages = 0

    def close_plan(self, ratio: float) -> None:
        """The plan is committed: forget its decisions, remember the ratio it left."""
        self.decisions.clear()
        self.admitted.clear()
        self.refused.clear()
        self.left = None
        self.decided_prefix.clear()
        self.pinned_tokens = self.locked_pages = self.released_pages = self.gained_current = 0
        self.gained_total = self.preempted_growth = 0.0
        self.preempted_claim = 0
        self.evicted_pages = 0
        self.in_commit = False
        self.pool.close_commit()
        self.ratio = ratio

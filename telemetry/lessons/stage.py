"""The stage. Owns: one scheduler with its cache, token store and simulated executor, driven phase by phase.

The same phases as `LLMEngine.step`, held apart so that a lesson can look between them. A virtual clock: a lesson gives
the same moments in every run.
"""

from __future__ import annotations

from collections import deque
from typing import Final
from zlib import crc32

import msgspec
import numpy as np

from engine.clock import VirtualClock
from engine.events import AnyEvent, LockChanged, PagesMoved
from engine.executor.forward_batch import from_plan
from engine.executor.simulated import SimulatedExecutor
from engine.kvcache.page_keys import PageKeyer
from engine.sampling_params import SamplingParams
from engine.scheduler.plan import OutcomeRow, PrefillRow, StepKind, StepOutcome, StepPlan, StepTimes
from engine.scheduler.scheduler import Arrival, Scheduler
from engine.token_store import TokenStore
from telemetry.lessons.load import LessonError
from telemetry.lessons.model import Lesson, LessonRequest
from telemetry.lessons.moment import NodeRow, PageRow
from telemetry.lessons.outcome import OutcomeBook

#: Every id that the simulated executor answers: a request that is to end after n outputs stops at any of them.
_ANY_TOKEN: Final = tuple(range(32, 127))


class Seen(msgspec.Struct, frozen=True):
    """One event, and the pool as it stood then: pages that a commit moves are shown as they move."""

    event: AnyEvent
    pages: tuple[PageRow, ...]


class Stage:
    """The core of an engine under a lesson's settings. Raises RequestRefused from `arrive`, as the core does."""

    def __init__(self, lesson: Lesson) -> None:
        self.lesson = lesson
        self.config = lesson.engine.config()
        self.page_size = lesson.engine.page_size
        self.clock = VirtualClock()
        self._executor = SimulatedExecutor(self.config)
        self._tokens = TokenStore(
            page_size=self.page_size, secret=b"", eos_token_ids=self._executor.info().eos_token_ids
        )
        self._keyer = PageKeyer(self.page_size, b"")
        self._step_ns = round(lesson.step_ms * 1e6)
        self._states = ["free"] * lesson.engine.pages
        self._labels = [""] * lesson.engine.pages
        self._prefix_of: dict[str, tuple[str, int]] = {}
        self._putting = ""
        self._pages: tuple[PageRow, ...] | None = None
        self._seen: list[Seen] = []
        self._is_set_up = False
        self.outcomes = OutcomeBook()
        self.core = Scheduler(
            self.config, num_pages=lesson.engine.pages, sink=self, chained_keys=self._tokens.chained_keys
        )
        self.core.state.record_order = True
        self._to_come = deque(sorted((r for r in lesson.request if not r.already), key=lambda r: r.arrives))
        self._set_up()
        self._steps_before = self.core.state.step
        self._is_set_up = True

    @property
    def step(self) -> int:
        """The lesson's step: those that brought running requests to where they are do not count."""
        return self.core.state.step - self._steps_before

    @property
    def is_over(self) -> bool:
        return not self._to_come and not self.core.state.has_work

    # -- phases ----------------------------------------------------------------------------------------------------

    def arrivals(self, step: int) -> list[LessonRequest]:
        """Who comes before `step`; call `arrive` for each."""
        come = []
        while self._to_come and self._to_come[0].arrives <= step:
            come.append(self._to_come.popleft())
        return come

    def arrive(self, request: LessonRequest) -> None:
        """Through the front door. Raises RequestRefused."""
        shared = self._shared(request)
        ids = _ids(request.prefix or "", shared) + _ids(request.rid, request.prompt - shared)
        # It ends at any token from then on; until then, or to its limit, no end token is sampled.
        outputs = request.outputs or request.max_new
        params = SamplingParams(
            max_new_tokens=request.max_new, min_new_tokens=outputs, stop_token_ids=_ANY_TOKEN if request.outputs else ()
        )
        keys = self._tokens.add(request.rid, ids, params)
        self._prefix_of[request.rid] = (request.prefix or "", shared)
        entered = self.core.add(
            Arrival(
                rid=request.rid,
                prompt_len=request.prompt,
                max_new_tokens=request.max_new,
                page_keys=keys.page_keys,
                head32_key=keys.head32_key,
                priority=request.priority,
            ),
            self.clock.now_ns(),
        )
        self._tokens.clamp(request.rid, entered.max_new_tokens)

    def prepare(self) -> None:
        self.core.prepare(self.clock.now_ns())

    def plan(self) -> StepPlan:
        return self.core.plan(self.clock.now_ns())

    def finish_step(self, plan: StepPlan) -> None:
        """Compute and apply a committed plan."""
        started = self.clock.now_ns()
        rows: tuple[OutcomeRow, ...] = ()
        if plan.kind is not StepKind.IDLE:
            batch = from_plan(
                plan, tokens=self._tokens, leases=self.core.kv.leases, page_size=self.config.cache.page_size
            )
            answered = self._executor.execute(batch)
            rows = tuple(self._tokens.settle(token.rid, token.token_id).row for token in answered.tokens)
        self.clock.advance_ns(self._step_ns)
        ready = self.clock.now_ns()
        times = StepTimes(started, started, started, started, started, ready, ready)
        self.core.apply(plan, StepOutcome(plan.step, rows, times))
        self.core.complete(times)

    # -- pictures --------------------------------------------------------------------------------------------------

    def emit(self, event: AnyEvent) -> None:
        """The sink of the core."""
        if isinstance(event, PagesMoved):
            self._move(event)
        if self._is_set_up and not isinstance(event, LockChanged):
            self.outcomes.see(event, self.step)
            self._seen.append(Seen(event, self.pages()))

    def take_seen(self) -> list[Seen]:
        """Events since the last call."""
        seen, self._seen = self._seen, []
        return seen

    def pages(self) -> tuple[PageRow, ...]:
        """The pool, page by page."""
        if self._pages is None:
            self._pages = tuple(map(PageRow, self._states, self._labels))
        return self._pages

    def nodes(self) -> tuple[NodeRow, ...]:
        """The tree, node by node, the one that was used longest ago first."""
        nodes = sorted(self.core.kv.snapshot().nodes, key=lambda node: node.stamp)
        return tuple(
            NodeRow(
                label="+".join(dict.fromkeys(self._labels[page] for page in node.pages)),
                start=(node.depth_pages - len(node.pages)) * self.page_size,
                end=node.depth_pages * self.page_size,
                pages=len(node.pages),
                lock_count=node.lock_count,
                age_rank=rank,
            )
            for rank, node in enumerate(nodes)
        )

    # -- inside ----------------------------------------------------------------------------------------------------

    def _shared(self, request: LessonRequest) -> int:
        return next((prefix.tokens for prefix in self.lesson.prefix if prefix.name == request.prefix), 0)

    def _move(self, event: PagesMoved) -> None:
        """A page is named after what it holds when it is claimed, and keeps the name until it is free."""
        self._pages = None
        rid_of = {lease.row: rid for rid, lease in self.core.kv.leases.items()} if event.source == "free" else {}
        for owner, packed in event.parts():
            pages = np.frombuffer(packed, dtype="<i4").tolist()
            for place, page in enumerate(pages):
                self._states[page] = event.target
                if event.target == "free":
                    self._labels[page] = ""
                elif event.source == "free":
                    rid = rid_of[int(owner.removeprefix("r:"))]
                    self._labels[page] = self._putting or self._name_of(rid, self.core.kv.leases[rid].count + place)

    def _name_of(self, rid: str, page: int) -> str:
        name, shared = self._prefix_of[rid]
        return name if (page + 1) * self.page_size <= shared else rid

    def _set_up(self) -> None:
        """What is there before step 1: cached prefixes, and requests that run already."""
        self._check_room()
        kv = self.core.kv
        cached = {
            prefix.name: self._keyer.of(_ids(prefix.name, prefix.tokens))[0]
            for prefix in self.lesson.prefix
            if prefix.cached
        }
        for name, keys in cached.items():
            self._putting = name
            lease = kv.acquire("cached", keys[:0])
            kv.extend(lease, len(keys) * self.page_size)
            kv.release(lease, keys)
        self._putting = ""
        running = [request for request in self.lesson.request if request.already]
        for count in range(max((request.already for request in running), default=0), 0, -1):
            starting = [request for request in running if request.already == count]
            for request in starting:
                self.arrive(request)
            self._warm_step(starting)
        for keys in cached.values():
            # Used later than by those that run: what only the cache holds is newer.
            kv.tree.touch(keys)

    def _check_room(self) -> None:
        """Raise LessonError when what is to be there before step 1 does not fit the pool or the rows."""
        lesson, size = self.lesson, self.page_size
        running = [request for request in lesson.request if request.already]
        cached = sum(prefix.tokens // size for prefix in lesson.prefix if prefix.cached)
        pages = cached + sum(-(-(request.prompt + request.already - 1) // size) for request in running)
        if pages > lesson.engine.pages:
            raise LessonError(
                f"lesson {lesson.id}: what is there before step 1 takes {pages} pages of {size} tokens; "
                f"engine.pool_tokens={lesson.engine.pool_tokens} has {lesson.engine.pages}"
            )
        if len(running) > lesson.engine.max_running_requests:
            raise LessonError(
                f"lesson {lesson.id}: {len(running)} requests run before step 1; "
                f"engine.max_running_requests is {lesson.engine.max_running_requests}"
            )

    def _warm_step(self, starting: list[LessonRequest]) -> None:
        """One step in which `starting` are prefilled whole and everyone else decodes, at an unchanged ratio.

        The plan is written here, since the lesson's limits need not let all of them in at once; commit and apply are
        the core's.
        """
        self.prepare()
        plan, state, kv = self.plan(), self.core.state, self.core.kv
        rows, touches = [], []
        for request in starting:
            keys = state.requests[request.rid].keys.first((request.prompt - 1) // self.page_size)
            cached = kv.match(keys).pages * self.page_size
            rows.append(PrefillRow(request.rid, cached, request.prompt - cached, True))
            touches.append((request.rid, len(keys)))
        decodes = tuple(request.rid for request in state.running)
        kind = StepKind.DECODE if not rows else StepKind.MIXED if decodes else StepKind.EXTEND
        names = tuple(row.rid for row in rows)
        plan = msgspec.structs.replace(
            plan,
            kind=kind,
            prefills=tuple(rows),
            decodes=decodes,
            sampling=(*names, *decodes),
            decisions=(),
            touches=tuple(touches),
            retractions=(),
            preempted=(),
            considered=(),
            continuation_after=None,
            full_after=False,
            ratio_after=state.ratio,
            guards=(),
        )
        self.finish_step(self.core.commit(plan))


def _ids(name: str, count: int) -> list[int]:
    start = crc32(name.encode()) << 20
    return list(range(start, start + count))

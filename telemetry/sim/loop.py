"""The loop. Owns: one simulated engine — real scheduler, real cache, made-up time.

`LLMEngine.step` makes the same calls around an executor. Here there is none: no token ids exist, since a journal holds
none, so what a step brings follows from lengths, and how long it takes from a cost model. Arrivals enter between two
steps, as they do in a server.
"""

from __future__ import annotations

import heapq
from typing import Final

import numpy as np

from engine.config import EngineConfig
from engine.errors import RequestRefused
from engine.events import SCHEMA_VERSION, EngineStarted, EventSink
from engine.kvcache.page_keys import HEAD_TOKENS
from engine.request import Cause, FinishReason
from engine.scheduler.plan import OutcomeRow, StepKind, StepOutcome, StepPlan, StepTimes
from engine.scheduler.scheduler import Arrival, Scheduler
from telemetry.sim.arrivals import Arrivals
from telemetry.sim.cost_model import Cost, Shape
from telemetry.sim.workload import FEW, Ask

#: Steps in a row without work while somebody waits and nobody will come: no setting makes that happen on purpose.
_MOST_IDLE: Final = 1_000_000
#: How long a server rests after a step that did nothing although somebody waits.
_IDLE_NS: Final = 5_000_000


class Stuck(RuntimeError):
    """Requests wait, no step does anything, and nothing will change: a fault of the scheduler."""


class _Live:
    """What the loop knows of a request that has not ended."""

    __slots__ = ("ask", "max_new", "own_keys", "page")

    def __init__(self, ask: Ask, max_new: int) -> None:
        self.ask = ask
        self.max_new = max_new
        self.page = -1
        self.own_keys: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None


class Loop:
    """One simulation. `step` until it says that nothing is left.

    plan    the plan of the last step; None when it was none (somebody came and was refused)
    """

    def __init__(  # noqa: PLR0913 - all that an engine and its recorded start consist of
        self,
        config: EngineConfig,
        *,
        num_pages: int,
        arrivals: Arrivals,
        cost: Cost,
        sink: EventSink,
        engine_id: str = "sim",
        version: str = "",
        model: str = "simulated",
        wall_ns: int = 0,
    ) -> None:
        # A simulated step has no host time to hide: what a record with overlap hid is not in its cost either.
        self.config = config = config.model_copy(
            update={"executor": config.executor.model_copy(update={"overlap": False})}
        )
        self.scheduler = Scheduler(config, num_pages=num_pages, sink=sink, chained_keys=True)
        self.now_ns = 0
        self.steps = 0
        self.arrived = 0
        self.refused = 0
        self.plan: StepPlan | None = None
        self._arrivals = arrivals
        self._cost = cost
        self._page = config.cache.page_size
        self._live: dict[str, _Live] = {}
        self._aborts: list[tuple[int, int, str, Cause]] = []
        self._was_idle = True
        self._idle = 0
        self._publish_start(engine_id=engine_id, version=version, model=model, num_pages=num_pages, wall_ns=wall_ns)

    @property
    def ended(self) -> int:
        """Requests that came and are over, refused ones included."""
        return self.arrived + self.refused - len(self._live)

    def step(self) -> bool:
        """One step, at the next moment at which there is something to do. False: nothing is left to do."""
        self.plan = None
        if not self.scheduler.state.has_work and self._was_idle and not self._jump():
            return False
        self._enter()
        self._leave()
        if not self.scheduler.state.has_work and self._was_idle:
            return self._arrivals.next_ns() is not None  # whoever came was refused, or left at once
        self._run()
        return True

    def _jump(self) -> bool:
        """With nothing at hand, go to the next arrival; False when there is none."""
        following = self._arrivals.next_ns()
        if following is None:
            return False
        self.now_ns = max(self.now_ns, following)
        return True

    def _enter(self) -> None:
        """Everybody who has come by now."""
        while (comes := self._arrivals.next_ns()) is not None and comes <= self.now_ns:
            ask = self._arrivals.take()
            if ask.rid in self._live:
                self._refuse()
                continue
            try:
                request = self.scheduler.add(self._arrival(ask), self.now_ns)
            except RequestRefused:
                self._refuse()
                continue
            self.arrived += 1
            self._live[ask.rid] = _Live(ask, request.max_new_tokens)
            if ask.abort_ns is not None:
                heapq.heappush(self._aborts, (ask.abort_ns, self.arrived, ask.rid, ask.abort_cause))

    def _refuse(self) -> None:
        self.refused += 1
        self._arrivals.ended(self.now_ns)

    def _leave(self) -> None:
        """Clients that have left by now."""
        while self._aborts and self._aborts[0][0] <= self.now_ns:
            _, _, rid, cause = heapq.heappop(self._aborts)
            if rid in self._live and self.scheduler.abort(rid, self.now_ns, cause=cause):
                self._forget(rid)

    def _arrival(self, ask: Ask) -> Arrival:
        head = _head(ask) if ask.prompt_len >= HEAD_TOKENS else None
        return Arrival(
            rid=ask.rid,
            prompt_len=ask.prompt_len,
            max_new_tokens=ask.max_new_tokens,
            page_keys=ask.blocks.packed(self._page, ask.prompt_len // self._page),
            head32_key=head,
            ignore_eos=ask.ignore_eos,
            priority=ask.priority,
            routing_key=ask.routing_key,
            accepted_ns=ask.arrival_ns,
        )

    def _run(self) -> None:
        scheduler, began = self.scheduler, self.now_ns
        scheduler.prepare(began)
        plan = scheduler.commit(scheduler.plan(began))
        self.plan = plan
        self.steps += 1
        host_ns, forward_ns = (0, 0) if plan.kind is StepKind.IDLE else self._cost.of(self._shape(plan))
        launched = began + host_ns
        ready = launched + forward_ns
        times = StepTimes(began, began, launched, launched, launched, ready, ready)
        self._end_early(plan)
        rows = tuple(map(self._row, plan.sampling))
        scheduler.apply(plan, StepOutcome(plan.step, rows, times))
        scheduler.complete(times)
        self.now_ns = ready
        for row in rows:
            if row.finish is not None:
                self._forget(row.rid)
        self._was_idle = plan.kind is StepKind.IDLE and not scheduler.state.has_work
        self._watch_idle(plan)

    def _watch_idle(self, plan: StepPlan) -> None:
        """While somebody waits and a step does nothing, time has to pass as it does in a server."""
        if plan.kind is not StepKind.IDLE or self._was_idle:
            self._idle = 0
            return
        self._idle += 1
        self.now_ns += _IDLE_NS
        if self._idle > _MOST_IDLE:
            raise Stuck(f"{self._idle} steps in a row did nothing while {len(self._live)} requests wait")

    def _end_early(self, plan: StepPlan) -> None:
        """Whom the plan itself ended: the last one running that can never fit."""
        for victim in plan.retractions:
            if victim.aborted:
                self._forget(victim.rid)

    def _shape(self, plan: StepPlan) -> Shape:
        requests = self.scheduler.state.requests
        tokens = context = 0
        for row in plan.prefills:
            tokens += row.extend_len
            context += row.extend_len * row.prefix_len + row.extend_len * (row.extend_len + 1) // 2
        read = sum([requests[rid].computed_len for rid in plan.decodes]) + len(plan.decodes)
        return Shape(tokens, context, len(plan.prefills), len(plan.decodes), read)

    def _row(self, rid: str) -> OutcomeRow:
        """One token: the key of the page that it fills, and whether the request is over."""
        request, live = self.scheduler.state.requests[rid], self._live[rid]
        ask = live.ask
        outputs = request.output_len + 1
        count = request.prompt_len + outputs
        key = head = finish = None
        if count % self._page == 0:
            key = self._key(live, count // self._page - 1)
        if count == HEAD_TOKENS:
            head = _head(ask)
        detail = ""
        if outputs >= ask.output_len and (ask.stops or ask.output_len < live.max_new):
            finish, detail = FinishReason.STOP, ask.stop_detail
        elif outputs >= live.max_new:
            finish = FinishReason.LENGTH
            detail = "kv_pool_exhausted" if live.max_new < ask.max_new_tokens else ""
        elif request.abort_requested:
            finish = FinishReason.ABORT
        return OutcomeRow(rid, key, head, finish, detail)

    def _key(self, live: _Live, page: int) -> int:
        """Key of a page with output tokens. A long answer has them made for 64 pages at once."""
        if live.own_keys is None or not live.page <= page < live.page + len(live.own_keys):
            ask = live.ask
            if (ask.prompt_len + ask.output_len) // self._page - page <= FEW:
                return ask.blocks.page(self._page, page)
            live.page, live.own_keys = page, ask.blocks.pages(self._page, page, 64)
        return live.own_keys.item(page - live.page)

    def _forget(self, rid: str) -> None:
        if self._live.pop(rid, None) is not None:
            self._arrivals.ended(self.now_ns)

    def _publish_start(self, *, engine_id: str, version: str, model: str, num_pages: int, wall_ns: int) -> None:
        publisher = self.scheduler.publisher
        publisher.emit(
            EngineStarted(
                *publisher.head(),
                SCHEMA_VERSION,
                version,
                self.config.model_dump_json(exclude={"server"}),
                model,
                "simulated",
                self._page,
                num_pages,
                self.config.scheduler.max_running_requests,
                wall_ns,
                engine_id,
            )
        )


def _head(ask: Ask) -> int:
    """The key of the in-batch rule."""
    return ask.blocks.head(HEAD_TOKENS) if ask.head32_key is None else ask.head32_key

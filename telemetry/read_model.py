"""The read model. Owns: a bounded view of one engine, kept from its events, from which observers are answered.

Bounds: the last 512 steps, 500 finished requests and 600 seconds; live requests and the queue as they are. Feed it
from a worker thread (`BufferedSink`): the engine thread then never meets its lock. Readers build an answer from whole
events, under that lock, and get immutable values.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from engine.clock import Clock
from engine.config import EngineConfig
from engine.events import (
    AdmissionDecided,
    AnyEvent,
    EngineStarted,
    RequestArrived,
    StepCompleted,
    StepPlanned,
)
from engine.kvcache.snapshot import SchedulerSnapshot
from engine.request import FinishReason
from telemetry import answers, answers_kv, answers_lanes, answers_latency, answers_pass
from telemetry.fresh import Fresh
from telemetry.heard_pages import PagesHeard
from telemetry.latency_book import LatencyBook, Objectives
from telemetry.latency_ring import LatencyRing
from telemetry.metric_books import CheckerCounts
from telemetry.observe import (
    EngineStatus,
    Explanation,
    Head,
    LanesAnswer,
    LatencyAnswer,
    LatencyBreakdown,
    PageMap,
    PassesAnswer,
    QueueAnswer,
    RequestDetail,
    RequestsAnswer,
)
from telemetry.observe_kv import PageFact, PoolAnswer, TreeAnswer
from telemetry.page_book import PageBook
from telemetry.phases import Handler, Phases, handlers_of
from telemetry.pool_ring import PoolRing
from telemetry.request_timeline import RequestTimeline
from telemetry.step_row import SeenPass, StepRow
from telemetry.timeline import TimelineTracker
from telemetry.words import ENGLISH, Lang

KEPT_STEPS: Final = 512
KEPT_FINISHED: Final = 500


class NotStarted(Exception):
    """No engine has been heard of yet."""


def _nothing() -> None:
    """No audit is made."""


class ReadModel:
    """An EventSink that can be asked.

    clock              the engine's, for ages
    expects_responses  a server reports first bytes; see `TimelineTracker`
    heartbeat          engine-clock nanoseconds when the loop last turned; None: the last event
    objectives         what counts as late
    rejected           requests turned away at the door, by cause; the core never hears of them
    audited            the state that the latest audit looked at, None when there was none; never taken for this model
    """

    def __init__(
        self,
        *,
        clock: Clock,
        expects_responses: bool = False,
        heartbeat: Callable[[], int] | None = None,
        checker: CheckerCounts | None = None,
        rejected: Callable[[], Mapping[str, int]] = dict,
        objectives: Objectives = Objectives(),  # noqa: B008 - immutable
        audited: Callable[[], SchedulerSnapshot | None] = _nothing,
    ) -> None:
        self._lock = threading.Lock()
        self.asked = Fresh(self._lock)
        self.clock = clock
        self.heartbeat = heartbeat
        self.checker = checker
        #: The run's journal, for whoever wants to read or simulate it.
        self.journal: str | None = None
        self.rejected = rejected
        self.audited = audited
        self.tracker = TimelineTracker(self, expects_responses=expects_responses, keep_detail=True)
        self.started: EngineStarted | None = None
        self.config = EngineConfig()
        self._page_size = self.config.cache.page_size
        self._pages = PagesHeard()
        self.steps: deque[StepRow] = deque(maxlen=KEPT_STEPS)
        self.finished: OrderedDict[str, RequestTimeline] = OrderedDict()
        self.ring = LatencyRing()
        self.book = LatencyBook(objectives)
        self.pool = PoolRing()
        self.last: AnyEvent | None = None
        self.step = 0
        self.totals: Counter[str] = Counter()
        self.finish_counts: Counter[FinishReason] = Counter()
        self._pass: SeenPass | None = None
        self._at_ns = 0
        self._handlers: dict[type, tuple[Handler, ...]] = {}
        self._look_up_handlers()

    def _look_up_handlers(self) -> None:
        """What takes an event of a type. In the same table as before: `feed` may be at work with it."""
        self._handlers.clear()
        self._handlers |= handlers_of(self.tracker, self.phases())

    def phases(self) -> Phases:
        """What this does around its timeline, beside `note`."""
        after: dict[type, Handler] = {
            EngineStarted: self._started,
            RequestArrived: self._arrived,
            AdmissionDecided: self._decided,
            StepPlanned: self._planned,
            StepCompleted: self._completed,
        }
        return Phases({StepCompleted: self._applied}, after)

    def share(self, tracker: TimelineTracker) -> threading.Lock:
        """From now on somebody else feeds `tracker`, this and others: between `note` and what `phases` says.

        Returns what to hold meanwhile. Before the first event.
        """
        self.tracker = tracker
        self._look_up_handlers()
        return self._lock

    @property
    def pages(self) -> PageBook:
        """Pages and tree as of the last event. With the lock, as all that is read."""
        return self._pages.book

    def note(self, event: AnyEvent) -> None:
        """`event` comes next."""
        self._pages.hear(event)
        self.last, self._at_ns = event, event.t_ns
        if event.step > self.step:  # noqa: PLR1730 - `max` is a call for each event
            self.step = event.step

    def note_run(self, events: Sequence[AnyEvent]) -> None:
        """All of `events` were taken: as `note` before each of them."""
        self._pages.hear_all(events)
        self._pages.settle()
        self.last, self._at_ns = events[-1], events[-1].t_ns
        self.step = max(self.step, events[-1].step)

    def late_faults(self) -> list[tuple[Exception, AnyEvent]]:
        """What failed after its event was taken, and at which, once. Any thread."""
        return self._pages.late_faults()

    def __getstate__(self) -> dict[str, Any]:
        """What a kept state holds: all but what only says where to look."""
        return {name: value for name, value in self.__dict__.items() if name != "_handlers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._handlers = {}
        self._look_up_handlers()

    def emit(self, event: AnyEvent) -> None:
        """Take one event. Raises what went wrong with it, the books of pages included."""
        self.feed(iter((event,)))
        with self._lock:
            self._pages.check()

    def feed(self, events: Iterator[AnyEvent]) -> None:
        """Take several. Raises what one of them raises; those after it are still in `events`."""
        handlers = self._handlers
        with self._lock:
            for event in events:
                self.note(event)
                for handle in handlers.get(type(event), ()):
                    handle(event)
            self._pages.settle()

    def _arrived(self, event: RequestArrived) -> None:
        self.totals["received"] += 1
        self.ring.at(event.t_ns).waiting = len(self.tracker.queue.waiting)

    def _started(self, event: EngineStarted) -> None:
        self.started = event
        self.config = EngineConfig.model_validate_json(event.config)
        self._page_size = self.config.cache.page_size
        self.book.started(self.config.scheduler.chunked_prefill_size)

    def _planned(self, event: StepPlanned) -> None:
        seen, self._pass = self._pass or SeenPass(self.tracker.queue), None
        self.steps.append(StepRow(event, seen, self.tracker.queue.ends.full_by))
        if event.retractions or event.preempted:
            self.totals["retractions"] += sum(not victim.aborted for victim in event.retractions) + len(event.preempted)
        if event.evicted_pages:
            self.totals["evicted_pages"] += event.evicted_pages
        self.pool.planned(event, self._page_size)
        slot = self.ring.at(event.t_ns)
        for row in event.prefills:
            slot.prefill += row.extend_len

    def _decided(self, event: AdmissionDecided) -> None:
        # All decisions of a pass come before anybody leaves the queue because of it.
        if self._pass is None:
            self._pass = SeenPass(self.tracker.queue)
        self._pass.decisions.append(event)
        self._pass.places.append(self.tracker.queue.place(event.rid))

    def _applied(self, event: StepCompleted) -> None:
        """The step's plan has its end; the book hears of it before the step's tokens are told."""
        self._at_ns = event.times.applied_ns or event.t_ns
        for row in reversed(self.steps):
            if row.planned.step == event.step:
                row.completed = msgspec.structs.replace(event, rows=())
                self.book.stepped(row.planned, event)
                break

    def _completed(self, event: StepCompleted) -> None:
        tokens = 0 if event.failed else len(event.rows)
        self.totals["steps"] += 1
        self.totals["generation_tokens"] += tokens
        self.pool.completed(event, self._at_ns)
        slot = self.ring.at(self._at_ns)
        slot.steps += 1
        slot.tokens += tokens
        slot.waiting = event.num_waiting
        slot.running = self.tracker.prefilling + self.tracker.decoding

    # -- what the timelines announce ---------------------------------------------------------------------------------

    def on_admitted(self, request: RequestTimeline) -> None:
        cached = request.cached_len or 0
        self.totals["prompt_cached"] += cached
        self.totals["prompt_computed"] += request.prompt_len - cached

    def on_first_token(self, request: RequestTimeline) -> None:
        # The live view shows a first token when the engine has it: a slow client does not hold the curve back.
        assert request.first_token_ns is not None, "announced without a time"
        self.ring.add_ttft(self._at_ns, request.first_token_ns - request.accepted_ns)
        self.book.first_token(request)

    def on_ttft(self, request: RequestTimeline) -> None:
        self.book.sent(request)

    def on_gaps(self, gap_ns: int, count: int, *, queued: bool = False) -> None:
        self.ring.add_gaps(self._at_ns, gap_ns, count)
        self.book.gaps(self._at_ns, gap_ns, count, queued=queued)

    def on_finished(self, request: RequestTimeline) -> None:
        assert request.finish is not None, "announced before its end"
        self.finish_counts[request.finish] += 1
        self.finished[request.rid] = request
        self.finished.move_to_end(request.rid)
        if len(self.finished) > KEPT_FINISHED:
            self.finished.popitem(last=False)

    # -- answers; any thread -----------------------------------------------------------------------------------------

    def first_byte(self, rid: str, t_ns: int) -> None:
        """The server wrote the first byte of a response."""
        with self._lock:
            self.tracker.first_byte(rid, t_ns)

    def status(self) -> EngineStatus:
        """One look at the engine. Every answer raises NotStarted before the engine's first event."""
        with self.asked:
            return answers.status(self, self._head())

    def queue(self, limit: int) -> QueueAnswer:
        """The waiting queue, at most `limit` entries."""
        with self.asked:
            return answers.queue(self, self._head(), limit)

    def passes(self, n: int) -> PassesAnswer:
        """The last `n` steps."""
        with self.asked:
            return answers_pass.passes(self, self._head(), n)

    def latency(self) -> LatencyAnswer:
        with self.asked:
            return answers.latency(self, self._head())

    def breakdown(self) -> LatencyBreakdown:
        """Where the time of first tokens and of gaps went."""
        with self.asked:
            return answers_latency.breakdown(self, self._head())

    def lanes(self, n: int) -> LanesAnswer:
        """The latest `n` arrivals as lanes of spans."""
        with self.asked:
            return answers_lanes.lanes(self, self._head(), n)

    def requests(self, limit: int) -> RequestsAnswer:
        """Live and finished requests, at most `limit` of each."""
        with self.asked:
            return answers.requests(self, self._head(), limit)

    def request(self, rid: str) -> RequestDetail | None:
        """One live or recently finished request."""
        with self.asked:
            return answers.request(self, self._head(), rid)

    def page_map(self) -> PageMap:
        with self.asked:
            return answers.page_map(self, self._head())

    def page(self, page: int) -> PageFact | None:
        """Who holds one page, and since when; None when the pool has none of this number."""
        with self.asked:
            return answers_kv.page(self, self._head(), page)

    def pool_over_time(self) -> PoolAnswer:
        """Pages by state, and what is promised, of the last ten minutes."""
        with self.asked:
            return answers_kv.pool(self, self._head())

    def tree(self, *, node: int | None, opened: tuple[int, ...], top: int) -> TreeAnswer:
        """The radix tree: the `top` largest children of the root and of each opened node; `node` in full."""
        snapshot = self.audited()
        with self.asked:
            order = None if snapshot is None else answers_kv.order_of(self, snapshot)
            return answers_kv.tree(self, self._head(), order, node=node, opened=opened, top=top)

    def explain(self, rid: str, lang: Lang = ENGLISH) -> Explanation | None:
        """Sentences about one live or recently finished request, in `lang`."""
        with self.asked:
            return answers.explain(self, self._head(), rid, lang)

    def wall_s(self, t_ns: int) -> float:
        """Unix seconds of an engine-clock time."""
        started = self.started
        return t_ns / 1e9 if started is None else (t_ns - started.t_ns + started.wall_ns) / 1e9

    def find(self, rid: str) -> RequestTimeline | None:
        """A live request, or one of the last finished."""
        return self.tracker.live.get(rid) or self.finished.get(rid)

    def head(self) -> Head:
        """What every answer begins with."""
        with self.asked:
            return self._head()

    def uptime_s(self) -> float:
        """Since the engine started; 0 before."""
        return 0.0 if self.started is None else max(self.clock.now_ns() - self.started.t_ns, 0) / 1e9

    def _head(self) -> Head:
        if self.started is None or self.last is None:
            raise NotStarted("no engine has started yet")
        return Head(
            engine_id=self.started.engine_id,
            observe_seq=self.last.seq + 1,
            step=self.step,
            t_ns=self.last.t_ns,
            t_wall_s=self.wall_s(self.last.t_ns),
        )

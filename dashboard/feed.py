"""The page's view of one engine. Owns: fetching, sharing and keeping the last good answers.

One `Feed` per engine serves every viewer: a look that is fresh enough is handed to all, so N viewers cost one fetch. A
look keeps the last good answers when the engine is gone and says so. Nothing here grows: one look, and details of at
most 16 requests.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from dashboard.words import ENGLISH, LANGUAGES, Lang
from telemetry.client import BadQuestion, Source, SourceUnavailable
from telemetry.observe import (
    EngineStatus,
    EvidenceAnswer,
    Explanation,
    LanesAnswer,
    LatencyAnswer,
    LatencyBreakdown,
    LawsAnswer,
    PageMap,
    PassesAnswer,
    PoolAnswer,
    QueueAnswer,
    RequestDetail,
    RequestsAnswer,
)
from telemetry.recorded import Moment

#: Rows that a table shows at most, and passes that the page looks back.
MAX_ROWS: Final = 500
MAX_PASSES: Final = 48
MAX_LANES: Final = 80

#: How each part of a look is asked for. A part is a field of `Look`.
ASKS: Final[dict[str, Callable[[Source], Any]]] = {
    "queue": lambda source: source.queue(MAX_ROWS),
    "passes": lambda source: source.passes(MAX_PASSES),
    "latency": lambda source: source.latency(),
    "requests": lambda source: source.requests(MAX_ROWS),
    "pages": lambda source: source.pages(),
    "breakdown": lambda source: source.breakdown(),
    "lanes": lambda source: source.lanes(MAX_LANES),
    "pool": lambda source: source.pool(),
    "laws": lambda source: source.laws(),
    "evidence": lambda source: source.evidence(),
}
PARTS: Final = frozenset(ASKS)

#: A part that nobody asked for in this time is not fetched.
_WANTED_S: Final = 12.0
_MAX_DETAILS: Final = 16
_MAX_ASKED: Final = 32

#: Tries to get a look of one step from an engine that goes on.
_MOMENT_TRIES: Final = 3

_A = TypeVar("_A")

#: What a view asks beside a look: the question to the source, by its key.
Questions = Mapping[tuple[object, ...], Callable[[Source], Any]]


@dataclass(frozen=True, slots=True)
class Look:
    """What is known of the engine at one moment. Parts are None until they were asked for, or where it has no such.

    contact_wall_s  time of the last good answer; None before the first, and for a recording
    contact_mono_s  the same, on the monotonic clock of this process
    error           why the latest try failed; None when it succeeded
    error_kind      what a person can do about it: see `SourceUnavailable`
    failing_wall_s  time of the first try that failed since the last good answer
    moment          where in a recording this is; None for a live engine
    held            the parts that were asked for, with or without an answer
    """

    contact_wall_s: float | None = None
    contact_mono_s: float | None = None
    error: str | None = None
    error_kind: str | None = None
    failing_wall_s: float | None = None
    moment: Moment | None = None
    held: frozenset[str] = frozenset()
    status: EngineStatus | None = None
    queue: QueueAnswer | None = None
    passes: PassesAnswer | None = None
    latency: LatencyAnswer | None = None
    requests: RequestsAnswer | None = None
    pages: PageMap | None = None
    breakdown: LatencyBreakdown | None = None
    lanes: LanesAnswer | None = None
    pool: PoolAnswer | None = None
    laws: LawsAnswer | None = None
    evidence: EvidenceAnswer | None = None

    def has(self, parts: frozenset[str]) -> bool:
        """Whether all `parts` were asked for."""
        return parts <= self.held


@dataclass(frozen=True, slots=True)
class Detail:
    """One request in full, explained in `lang`. Both are None when the engine does not know it (any more)."""

    rid: str
    contact_mono_s: float
    detail: RequestDetail | None = None
    explanation: Explanation | None = None
    error: str | None = None
    lang: Lang = ENGLISH


@dataclass(frozen=True, slots=True)
class Asked(Generic[_A]):
    """The answer to a question of one view: `value` is None when the source does not know, or when it failed."""

    contact_mono_s: float
    value: _A | None = None
    error: str | None = None


class Feed:
    """Answers of one engine, shared by all viewers of this process. Safe between threads."""

    def __init__(
        self, source: Source, *, wall: Callable[[], float] = time.time, mono: Callable[[], float] = time.monotonic
    ) -> None:
        self._source = source
        self._wall = wall
        self._mono = mono
        self._fetching = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=len(PARTS) + 3, thread_name_prefix="feed")
        self._look = Look()
        self._later: Future[Look] | None = None
        self._tried_mono_s = float("-inf")
        self._wanted: dict[str, float] = {}
        self._details: OrderedDict[tuple[str, Lang], Detail] = OrderedDict()
        self._asking = threading.Lock()
        self._asked: OrderedDict[tuple[object, ...], Asked[Any]] = OrderedDict()

    def look(self, parts: frozenset[str], *, max_age_s: float) -> Look:
        """The latest look with `parts`, fetched when the last try is older than `max_age_s` or a part is missing.

        Never raises for an engine that is gone. While another thread fetches, a viewer that already has its parts gets
        the previous look instead of waiting.
        """
        now = self._mono()
        for part in parts:
            self._wanted[part] = now
        if self._is_fresh(parts, max_age_s):
            return self._look
        must_wait = not self._look.has(parts) and self._look.error is None
        if not self._fetching.acquire(blocking=must_wait):
            return self._look
        try:
            if not self._is_fresh(parts, max_age_s):
                self._look = self._fetched(parts)
                self._tried_mono_s = self._mono()
            return self._look
        finally:
            self._fetching.release()

    def look_later(self, parts: frozenset[str], *, max_age_s: float) -> Look:
        """The last look, at once; a newer one is fetched beside, for the next time."""
        now = self._mono()
        for part in parts:
            self._wanted[part] = now
        is_due = not self._is_fresh(parts, max_age_s) and (self._later is None or self._later.done())
        if is_due:
            self._later = self._pool.submit(self.look, parts, max_age_s=max_age_s)
        return self._look

    def detail(self, rid: str, lang: Lang = ENGLISH, *, max_age_s: float) -> Detail:
        """One request, explained in `lang`, at most `max_age_s` old. Never raises for an engine that is gone."""
        key = (rid, lang)
        with self._fetching:
            known = self._details.get(key)
            if known is not None and self._mono() - known.contact_mono_s < max_age_s:
                self._details.move_to_end(key)
                return known
            try:
                now, found = self._mono(), self._source.request(rid)
                fetched = Detail(rid, now, found, self._source.explain(rid, lang), lang=lang)
            except (SourceUnavailable, BadQuestion) as error:
                # Rather in another language than not at all.
                told = (known, *(self._details.get((rid, other)) for other in LANGUAGES))
                kept = next((one for one in told if one is not None), Detail(rid, self._mono()))
                fetched = Detail(rid, self._mono(), kept.detail, kept.explanation, str(error), lang)
            self._details[key] = fetched
            self._details.move_to_end(key)
            while len(self._details) > _MAX_DETAILS:
                self._details.popitem(last=False)
            return fetched

    def ask(self, key: tuple[object, ...], question: Callable[[Source], _A | None], *, max_age_s: float) -> Asked[_A]:
        """What the source says to `question`, at most `max_age_s` old; `key` names it with its parameters.

        Never raises for an engine that is gone: the last answer stays, and `error` says why there is no newer one.
        """
        with self._asking:
            known: Asked[_A] | None = self._asked.get(key)
            if known is None or self._mono() - known.contact_mono_s >= max_age_s:
                try:
                    known = Asked(self._mono(), question(self._source))
                except (SourceUnavailable, BadQuestion) as error:
                    known = Asked(self._mono(), None if known is None else known.value, str(error))
                self._asked[key] = known
            self._asked.move_to_end(key)
            while len(self._asked) > _MAX_ASKED:
                self._asked.popitem(last=False)
            return known

    def moment(self, parts: frozenset[str], questions: Questions) -> tuple[Look, dict[tuple[object, ...], Asked[Any]]]:
        """A look with `parts` and the answers to `questions`, by key, all asked at once: of one step if the engine can.

        A busy engine answers between two of its steps, and may make one meanwhile: then it is asked again, a few times.
        """
        for _ in range(_MOMENT_TRIES):
            asking = {
                key: self._pool.submit(self.ask, key, question, max_age_s=0.0) for key, question in questions.items()
            }
            look = self.look(parts, max_age_s=0.0)
            asked = {key: each.result() for key, each in asking.items()}
            values = [look.status, *(getattr(look, part) for part in parts), *(each.value for each in asked.values())]
            if look.error is not None or len({value.step for value in values if value is not None}) < 2:
                break
        return look, asked

    def _is_fresh(self, parts: frozenset[str], max_age_s: float) -> bool:
        tried_lately = self._mono() - self._tried_mono_s < max_age_s
        # After a failed try the missing parts are no reason to try again at once.
        return tried_lately and (self._look.has(parts) or self._look.error is not None)

    def _fetched(self, parts: frozenset[str]) -> Look:
        last = self._look
        now = self._mono()
        # What nobody looks at is dropped, so that it is never shown later as if it were new.
        wanted = parts | {part for part, at in self._wanted.items() if now - at < _WANTED_S}
        try:
            status = self._source.status()
            is_same = last.status is not None and (
                (status.engine_id, status.observe_seq) == (last.status.engine_id, last.status.observe_seq)
            )
            kept = wanted & last.held if is_same else frozenset()
            # All at once: a busy engine answers each only between two of its steps.
            asked = {part: self._pool.submit(ASKS[part], self._source) for part in wanted - kept}
            answers = {part: getattr(last, part) for part in kept}
            answers |= {part: future.result() for part, future in asked.items()}
            return Look(
                contact_wall_s=self._wall(),
                contact_mono_s=self._mono(),
                held=wanted,
                status=_told_by_queue(status, answers.get("queue")),
                **answers,
            )
        except (SourceUnavailable, BadQuestion) as error:
            return dataclasses.replace(
                last,
                error=str(error),
                error_kind=error.kind if isinstance(error, SourceUnavailable) else "refused",
                failing_wall_s=last.failing_wall_s or self._wall(),
            )


def _told_by_queue(status: EngineStatus, queue: QueueAnswer | None) -> EngineStatus:
    """`status` with what `queue` says of the waiting requests: asked a little later, it may know of other ones, and the
    head stands above the very table. An engine that sends a part of a long queue tells their age and number itself.
    """
    if queue is None:
        return status
    told: dict[str, Any] = {"waiting": queue.total, "waiting_by_blocker": queue.by_blocker}
    if len(queue.entries) == queue.total:
        retracted = sum(entry.state == "retracted" for entry in queue.entries)
        told["waiting_oldest_s"] = max((entry.age_s for entry in queue.entries), default=0.0)
        told["requests"] = {**status.requests, "waiting": queue.total - retracted, "retracted": retracted}
    return status.model_copy(update=told)

"""When a worker beside the engine may run. Owns: the turns of workers, and the engine's forward.

Work beside the engine thread is cheapest while the model computes: then the engine wants neither the interpreter's lock
nor what lies in the caches. `Forward` follows that by what the engine publishes; nobody asks the engine. `Pace` cuts
work into slices.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from engine.executor.base import LendCore

#: How long a worker that has its turn may stand before the others go on without one.
TURN_S: Final = 0.02
#: An engine that publishes nothing for as long does nothing that a worker could disturb.
IDLE_S: Final = 0.005
#: How long a worker that somebody asks waits for a forward: long enough to see that the engine is idle, and two such
#: rounds are a small part of what whoever asks waits for.
HURRIED_S: Final = 2 * IDLE_S
#: How long before the expected end of a forward work beside it ends: as long as a worker may be in one
#: batch, and what follows it. And as a share of the forward: once the layers are through, the engine thread calls one
#: short operation after another, to multiply by the vocabulary and to sample, and wants the interpreter after each.
MARGIN_NS: Final = 600_000
MARGIN: Final = 0.3
#: The share at its beginning in which an executor lays out its batch.
LEAD: Final = 0.06
#: How many times as long as the shortest of the last few one has to last until nobody expects its end any more. Work
#: beside it, on the same processors, makes it half as long again.
OVERDUE: Final = 2
#: A shorter forward is over before whoever is rung for has woken up.
OF_USE_NS: Final = 200_000
#: How long a worker that has woken up waits for a forward to work beside; HURRIED_S where somebody asks.
PATIENCE_S: Final = 0.05
#: Longest stretch of work between two breaks, and the break.
SLICE_NS: Final = 400_000
BREAK_S: Final = 0.000_1
#: The stretch on a processor that the engine has lent, beside a forward whose end is known: the engine wants nothing
#: of the worker meanwhile, and each time that it lends one costs it the rest of a task.
LENT_SLICE_NS: Final = 3_000_000
#: What is asked for: the break, the stretch, and what began at its end. Longer, and a worker that stands would cost the
#: engine a processor.
LOAN_NS: Final = 4_000_000
#: Forwards whose shortest says how long the next one will last at least.
_REMEMBERED: Final = 4
_NEVER: Final = 1 << 63


def _never() -> bool:
    """Nobody waits for the worker."""
    return False


class Bell:
    """Wakes one worker. Ringing twice before it looks is ringing once."""

    def __init__(self) -> None:
        #: Held while nobody rings.
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Any thread; waits for nobody."""
        if self._lock.locked():
            try:
                self._lock.release()
            except RuntimeError:  # another thread rang in between
                return

    def wait(self, timeout_s: float) -> bool:
        """Until somebody rings; False after `timeout_s`. The worker alone."""
        return self._lock.acquire(timeout=timeout_s)


class Turns:
    """One worker of this process drains its queue at a time: two would take the interpreter's lock from each other for
    each slice, which doubles the processor time of both. One that stands in its listener holds up nobody for long.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moved: Callable[[], int] | None = None

    def take(self, moved: Callable[[], int]) -> bool:
        """Wait for a turn; `moved` rises while it is used. False: whoever has it stands, so go on without."""
        seen = None
        while not self._lock.acquire(timeout=TURN_S):
            holder = self._moved
            now = (holder, holder()) if holder is not None else None
            if now is not None and now == seen:
                return False
            seen = now
        self._moved = moved
        return True

    def give_back(self) -> None:
        """After a turn that was taken."""
        self._moved = None
        self._lock.release()


class Forward:
    """When the engine's model computes, by what the engine published last: a plan opens it, anything else shuts it.

    The engine thread opens and shuts it. Who works meanwhile begins when the batch is put together, which takes as long
    as it did last time, and stops in time: the next forward lasts as long as the shortest of the last few, for all one
    knows. Where that is too short to be of use, it is no limit, and its end interrupts the work. Times are those of
    `time.monotonic_ns`.
    """

    def __init__(self) -> None:
        self.is_open = self._is_long = False
        self._opened_ns = self._begins_ns = self._overdue_ns = 0
        self._ends_ns = _NEVER
        self._lasted_ns: deque[int] = deque(maxlen=_REMEMBERED)
        self._shortest_ns = 0

    def open(self, now_ns: int, prepare_ns: int = 0) -> None:
        """A step was planned; its batch took `prepare_ns` to prepare the last time."""
        self._opened_ns = now_ns
        shortest = self._shortest_ns
        # A little later than expected: who begins too early holds up the preparation itself.
        self._begins_ns = now_ns + prepare_ns * 3 // 2 + round(LEAD * shortest)
        self._overdue_ns = now_ns + OVERDUE * shortest
        margin_ns = max(MARGIN_NS, round(MARGIN * shortest))
        self._ends_ns = now_ns + shortest - margin_ns if shortest > prepare_ns + 2 * MARGIN_NS else _NEVER
        self.is_open, self._is_long = True, False

    def shut(self, now_ns: int) -> None:
        """Something else was published."""
        if self.is_open:
            self.is_open = False
            self._lasted_ns.append(now_ns - self._opened_ns)
            self._shortest_ns = min(self._lasted_ns)

    @property
    def is_of_use(self) -> bool:
        """Whether it lasts long enough to wake somebody up for it, which takes the engine's time. Unknown: it does."""
        return self._shortest_ns > OF_USE_NS or self._is_long or not self._lasted_ns

    def outlast(self) -> None:
        """Nothing was published for IDLE_S. One that is overdue lasts longer than the last few, or the engine stands:
        nothing is to be held up until it shuts."""
        if not self.ends_known or time.monotonic_ns() >= self._overdue_ns:
            self._ends_ns, self._is_long = _NEVER, True

    @property
    def leaves_time(self) -> bool:
        """Whether work that begins now will not hold up the engine, for all one knows. Any thread."""
        return self.is_open and self._begins_ns <= time.monotonic_ns() < self._ends_ns

    @property
    def ends_known(self) -> bool:
        """Whether it leaves time up to an end that is expected, and not until it is there."""
        return self._ends_ns != _NEVER

    @property
    def is_worth_a_loan(self) -> bool:
        """Whether it leaves time, and is known to be long."""
        return (self.ends_known or self._is_long) and self.leaves_time

    @property
    def begins_in_s(self) -> float:
        """Seconds until the batch is put together; not above 0 where it is, or no step is planned."""
        return (self._begins_ns - time.monotonic_ns()) / 1e9 if self.is_open else 0.0


class ForwardWindow:
    """One worker before the engine's forward, which others look at too.

    is_awaited  it waits for the next one, so whoever opens that rings
    """

    def __init__(self, bell: Bell) -> None:
        self.forward = Forward()
        self.is_awaited = False
        self._bell = bell

    def wait(self, published: Callable[[], int], patience_s: float, *, is_hurried: Callable[[], bool] = _never) -> bool:
        """Wait until it opens, opens anew, or lasts longer than expected. False: the engine is idle (`published`
        stands), or it did not open for `patience_s`; where somebody waits for the worker, for HURRIED_S."""
        # Not counted by what is waited for: a ring that comes too late for a short forward is no answer.
        began_s = time.perf_counter()
        self.is_awaited = True
        try:
            while time.perf_counter() - began_s < (min(patience_s, HURRIED_S) if is_hurried() else patience_s):
                # One that is over at once is not worth to wait for: the engine would hand the interpreter over for it.
                if self.forward.is_of_use:
                    if self.forward.leaves_time:
                        return True
                    soon_s = self.forward.begins_in_s
                    if soon_s > 0:
                        time.sleep(min(soon_s, IDLE_S))
                        continue
                before = published()
                if not self._bell.wait(IDLE_S):
                    if published() != before:
                        continue
                    if not self.forward.is_open:
                        return False
                    self.forward.outlast()
            return self.forward.is_of_use and self.forward.leaves_time
        finally:
            self.is_awaited = False


class Pace:
    """When one worker takes a break, waits for a forward, and asks for one of the processors that it computes on.

    published  counts what the engine published
    is_asked   somebody waits for the worker

    A sleep of zero would give the interpreter's lock back and take it again before the engine thread has woken up to
    it; so a step that comes back meanwhile waits for one slice at most.

    A worker that wakes up beside an engine whose threads fill all processors puts one of them aside in the middle of a
    task, for which the others then wait. One that asks first (`lend_core`), and takes its break then, finds a processor
    that nobody else wants.
    """

    def __init__(
        self, window: ForwardWindow, *, published: Callable[[], int], is_asked: Callable[[], bool] = _never
    ) -> None:
        #: See LendingExecutor. None: the engine fills no processors, or not all.
        self.lend_core: LendCore | None = None
        self._window, self._published, self._is_asked = window, published, is_asked
        self._waits, self._has_core = True, False
        self._began_ns = self._asked_ns = 0
        #: Wall time in which the engine computed with one thread fewer for this worker.
        self.lent_ns = 0

    def begin(self) -> None:
        """There is work. Once it has waited in vain it goes on without waiting until `end`: the engine is idle, or its
        forward passes are too short to wait for."""
        self._waits = True
        # The first stretch too wants a processor of its own: a break comes first, in which one gets free.
        self._began_ns = 0 if self._may_ask else time.perf_counter_ns()

    def end(self) -> None:
        """There is none any more, or none that may be done now."""
        if self._has_core and self.lend_core is not None:
            self._count_loan()
            self.lend_core(0)
        self._has_core = False

    def before_work(self, *, is_polite: bool) -> None:
        """Before a part of the work: a break where the last was long ago, and the engine's forward where it is waited
        for. `is_polite`: the engine comes first."""
        slice_ns = LENT_SLICE_NS if self._has_core and self._window.forward.ends_known else SLICE_NS
        if time.perf_counter_ns() - self._began_ns > slice_ns:
            self._take_break(is_polite=is_polite)
        if self._waits and is_polite and not self._window.forward.leaves_time:
            self.end()
            self._waits = self._window.wait(self._published, PATIENCE_S, is_hurried=self._is_asked)
            self._began_ns = time.perf_counter_ns()
            if self._may_ask:
                self._take_break(is_polite=True)

    def _take_break(self, *, is_polite: bool) -> None:
        """In which the engine thread gets the interpreter if it wants it, and a thread that computes ends its task."""
        if is_polite and self._may_ask and self.lend_core is not None:
            if self._has_core:
                self._count_loan()
            self.lend_core(LOAN_NS)
            self._has_core, self._asked_ns = True, time.perf_counter_ns()
        else:
            self.end()
        # Not left out for whoever waits to be caught up with: a scrape must not hold up a step either.
        time.sleep(BREAK_S if is_polite else 0)
        self._began_ns = time.perf_counter_ns()

    def _count_loan(self) -> None:
        self.lent_ns += min(time.perf_counter_ns() - self._asked_ns, LOAN_NS)

    @property
    def _may_ask(self) -> bool:
        forward = self._window.forward
        return self._waits and self.lend_core is not None and forward.is_worth_a_loan

"""Pages heard. Owns: which events the books of pages and tree have still to follow, and when they do.

Nobody but an answer looks into these books. So events are kept as they come and followed some steps later, together,
in a fraction of the time that it takes one by one; or at once, when somebody looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from engine.events import AnyEvent, EngineStarted, LockChanged, PagesMoved, RequestTransitioned
from telemetry.page_book import PageBook

#: Events that are followed together: what one listener does without a break is to remain short.
MOST: Final = 192


class PagesHeard:
    """A page book that is behind by up to MOST events, or not at all for whoever asks for it.

    hear  take the next event, of any type
    """

    def __init__(self) -> None:
        self._book = PageBook(0)
        self._handlers: dict[type, Callable[[Any], None]] = {}
        self._waiting: list[AnyEvent] = []
        self._faults: deque[tuple[Exception, AnyEvent]] = deque()
        self._look_up()

    def _began(self, event: EngineStarted) -> None:
        """A new engine has new pages."""
        self._book = PageBook(event.num_pages)
        self._look_up()

    def _look_up(self) -> None:
        book = self._book
        # The same table: `follow` may be at work with it.
        self._handlers |= {
            EngineStarted: self._began,
            LockChanged: book.lock_changed,
            PagesMoved: book.moved,
            RequestTransitioned: book.transitioned,
        }
        self.hear = self._waiting.append
        #: The same for several.
        self.hear_all = self._waiting.extend

    @property
    def book(self) -> PageBook:
        """The book, as of the last event."""
        self.follow()
        return self._book

    def settle(self) -> None:
        """Follow what waits, if it is worth it."""
        if len(self._waiting) >= MOST:
            self.follow()

    def late_faults(self) -> list[tuple[Exception, AnyEvent]]:
        """What failed since the last call, and at which event."""
        faults, found = self._faults, []
        while faults:
            found.append(faults.popleft())
        return found

    def check(self) -> None:
        """Follow all that waits, and raise what failed."""
        self.follow()
        for error, _ in self.late_faults():
            raise error

    def follow(self) -> None:
        """Follow all that waits."""
        get = self._handlers.get
        for event in self._waiting:
            handle = get(type(event))
            if handle is not None:
                try:
                    handle(event)
                except Exception as error:  # one event that cannot be followed is counted, and the next one comes
                    self._faults.append((error, event))
        self._waiting.clear()

    def __getstate__(self) -> dict[str, Any]:
        """What a kept state holds: the book as of the last event."""
        return {"_book": self.book, "_waiting": [], "_handlers": {}, "_faults": deque()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._look_up()

"""Queue limits. Owns: who may no longer wait: whoever waited too long, and who gives way to somebody more important.

Lives on the engine thread. What it decides reaches the core as an input with its cause, so that a replay needs no clock
and no configuration of the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from engine.llm_engine import EngineRequest
from engine.request import Cause


class QueueEngine(Protocol):
    """The part of LLMEngine that this needs."""

    def overdue(self, limit_ns: int, /) -> list[str]: ...
    def displaceable(self, priority: int | None, count: int, /) -> list[str]: ...
    def turn_away(self, rid: str, cause: Cause, /) -> bool: ...


class QueueLimits:
    """Turns waiting requests away. `displaces`: a full queue makes room for more important requests."""

    def __init__(self, engine: QueueEngine, *, timeout_s: float | None, displaces: bool) -> None:
        self._engine = engine
        self._timeout_ns = None if timeout_s is None else round(timeout_s * 1e9)
        self._displaces = displaces
        #: Who had waited before the engine knew it: when its time is up, and how long it is in the engine then.
        self._waited_before: dict[str, tuple[int, int]] = {}

    @property
    def turns_away(self) -> bool:
        """May a request that was accepted be refused after all?"""
        return self._displaces or self._timeout_ns is not None

    def count_from(self, rid: str, since_ns: int, now_ns: int) -> None:
        """A request that the engine has just got began to wait earlier."""
        if self._timeout_ns is not None:
            self._waited_before[rid] = (since_ns + self._timeout_ns, max(0, self._timeout_ns - (now_ns - since_ns)))

    def expire(self, now_ns: int) -> bool:
        """End every request that has waited too long for its first admission. True when there was one."""
        if self._timeout_ns is None:
            return False
        late = self._engine.overdue(self._timeout_ns)
        for rid in [rid for rid, (due_ns, _) in self._waited_before.items() if due_ns <= now_ns]:
            if rid in self._engine.overdue(self._waited_before.pop(rid)[1]) and rid not in late:
                late.append(rid)
        return self._turn_away(late, Cause.QUEUE_TIMEOUT)

    def find_room(self, requests: Sequence[EngineRequest], places: int) -> list[str] | None:
        """Who would have to leave so that `requests`, which lack `places`, may wait; None when they may not."""
        if not self._displaces or places > len(requests):
            return None
        # All choices of one call carry its priority.
        return self._engine.displaceable(requests[0].priority, places) or None

    def displace(self, rids: Iterable[str]) -> bool:
        """End these. True when there was one."""
        return self._turn_away(rids, Cause.DISPLACED)

    def _turn_away(self, rids: Iterable[str], cause: Cause) -> bool:
        turned_away = [self._engine.turn_away(rid, cause) for rid in rids]
        return any(turned_away)

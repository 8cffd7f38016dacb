"""Mailbox. Owns: the way into the engine thread: bounded for new requests, always open for everything else."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from engine.llm_engine import EngineRequest
from engine.server.reply import Reply


@dataclass(frozen=True, slots=True)
class Add:
    """Take all of these requests, or none."""

    requests: tuple[EngineRequest, ...]
    reply: Reply


@dataclass(frozen=True, slots=True)
class Abort:
    """End these requests; unknown ones are no fault."""

    rids: tuple[str, ...]
    detail: str


@dataclass(frozen=True, slots=True)
class Sent:
    """Arguments of `LLMEngine.record_response`, for each of `rids`."""

    rids: tuple[str, ...]
    first_byte_ns: int | None
    last_byte_ns: int | None
    bytes_sent: int
    worst_send_ns: int
    disconnected: bool


@dataclass(frozen=True, slots=True)
class Call:
    """Run this between two steps."""

    function: Callable[[], Any]
    future: Future[Any]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Take no more; let live requests run until `deadline_ns`, then abort them."""

    deadline_ns: int


Message = Add | Abort | Sent | Call | Shutdown


class Mailbox:
    """A queue of messages with one reader. `pending_requests` of the Adds inside it stay at or below `capacity`."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._messages: deque[Message] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._pending_requests = 0

    @property
    def pending_requests(self) -> int:
        return self._pending_requests

    def post(self, message: Message) -> bool:
        """Put a message in; False when the mailbox is closed, or full and `message` is an Add."""
        with self._changed:
            if self._closed:
                return False
            if isinstance(message, Add):
                if self._pending_requests + len(message.requests) > self._capacity:
                    return False
                self._pending_requests += len(message.requests)
            self._messages.append(message)
            self._changed.notify()
            return True

    def take(self, timeout_s: float | None) -> list[Message]:
        """Everything inside, in order. Waits up to `timeout_s` for a first message; 0 does not wait."""
        with self._changed:
            if not self._messages and timeout_s != 0:
                self._changed.wait(timeout_s)
            messages = list(self._messages)
            self._messages.clear()
            self._pending_requests = 0
            return messages

    def close(self) -> list[Message]:
        """Refuse everything from now on; what was still inside."""
        with self._changed:
            self._closed = True
        return self.take(0)

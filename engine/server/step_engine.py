"""StepEngine. Owns: what the engine thread needs of an engine, and what it lets other threads know of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.kvcache.snapshot import SchedulerSnapshot
from engine.llm_engine import EngineRequest, TokenOutput
from engine.server.queue_limits import QueueEngine


class StepEngine(QueueEngine, Protocol):
    """The part of LLMEngine that this thread drives."""

    @property
    def has_work(self) -> bool: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def is_dead(self) -> bool: ...
    @property
    def steps_done(self) -> int: ...
    @property
    def moves(self) -> int: ...

    def add_request(self, request: EngineRequest, /) -> None: ...
    def abort_request(self, rid: str, detail: str = "") -> bool: ...
    def step(self) -> list[TokenOutput]: ...
    def snapshot(self) -> SchedulerSnapshot: ...
    def record_response(
        self,
        rid: str,
        first_byte_ns: int | None,
        last_byte_ns: int | None,
        bytes_sent: int,
        worst_send_ns: int,
        disconnected: bool,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What other threads may know, replaced whole after each turn of the loop. Times are monotonic nanoseconds.

    heartbeat_ns      the loop turned
    progress_ns       tokens were computed or a request ended; or there was nothing to do
    last_token_ns     a token came out; 0 before the first
    """

    heartbeat_ns: int
    progress_ns: int
    last_token_ns: int
    steps: int
    waiting: int
    running: int
    has_work: bool
    in_step: bool = False
    dead: str = ""
    draining: bool = False
    stopped: bool = False

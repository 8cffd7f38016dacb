"""Lives. Owns: what the recorder knows of the requests that are live, and two sums over them.

The sums are kept as requests move, so that a step costs the same however many wait or run.
"""

from __future__ import annotations

from typing import Final

import msgspec

from engine.request import RequestState

WAITING: Final = RequestState.WAITING
PREFILL: Final = RequestState.PREFILL
DECODE: Final = RequestState.DECODE
FINISHED: Final = RequestState.FINISHED


class Life(msgspec.Struct):
    """What is known of one live request. Lengths in tokens."""

    rid: str
    prompt_len: int
    max_new: int
    ignore_eos: bool
    output_len: int
    retractions: int
    state: RequestState = WAITING
    computed_len: int = 0
    row: int | None = None

    @property
    def seq_len(self) -> int:
        return self.prompt_len + self.output_len


class Lives:
    """Live requests.

    running         those that decode
    waiting_tokens  prompt and kept output tokens in the queue
    """

    def __init__(self) -> None:
        self.by_rid: dict[str, Life] = {}
        self.running: dict[str, Life] = {}
        self.waiting_tokens = 0

    def add(self, life: Life) -> None:
        """A new request, waiting."""
        self.by_rid[life.rid] = life
        self.waiting_tokens += life.seq_len

    def move(self, life: Life, state: RequestState) -> None:
        """Change its state; `requeue` is the way back to the queue."""
        if life.state is WAITING:
            self.waiting_tokens -= life.seq_len
        if state is DECODE:
            self.running[life.rid] = life
        else:
            self.running.pop(life.rid, None)
        life.state = state

    def requeue(self, life: Life, *, output_len: int, retractions: int) -> None:
        """Back to the queue, with `output_len` tokens kept and nothing computed."""
        self.move(life, WAITING)
        life.output_len, life.retractions = output_len, retractions
        life.computed_len, life.row = 0, None
        self.waiting_tokens += life.seq_len

    def end(self, life: Life) -> None:
        """It has ended."""
        self.move(life, FINISHED)
        del self.by_rid[life.rid]

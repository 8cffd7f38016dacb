"""Base of the read API's answers. Owns: their version, their words, and what each of them begins with."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict

OBSERVE_VERSION: Final = 1

#: Page states in the order of their byte in `PageMap.states_b64`.
PAGE_STATES: Final = ("free", "private", "protected", "evictable")

#: Why a waiting request waits; exactly one at every moment.
BLOCKERS: Final = (
    *("compute", "chunk", "kv_now", "kv_total", "rows", "chunk_slot"),
    *("order", "cold_prefix", "engine_busy", "delay", "prefill_max"),
)

#: The parts that time to first token is cut into, in the order they first occur.
TTFT_PARTS: Final = ("intake", "queue", "prepare", "chunk_forward", "commit", "between_chunks", "emit")


class Value(BaseModel):
    """Base of every value here."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Head(Value):
    """What every answer begins with.

    observe_seq  rises with every event of the engine: while it is the same, only ages differ between answers
    step         last step of the engine that this answer includes
    t_ns         engine clock of the last event included
    """

    observe_version: int = OBSERVE_VERSION
    engine_id: str
    observe_seq: int
    step: int
    t_ns: int
    t_wall_s: float


class Ledgers(Value):
    """What is left (or allowed) in each ledger. None: no such limit, or no pass yet."""

    rem_input: float | None = None
    rem_chunk: float | None = None
    remaining_total: float | None = None
    remaining_current: float | None = None
    rows: int | None = None


class KvPages(Value):
    """Pages of the pool by state; the four add up to `capacity`."""

    free: int = 0
    private: int = 0
    protected: int = 0
    evictable: int = 0
    capacity: int = 0

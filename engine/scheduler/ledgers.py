"""Ledgers. Owns: what is left of the three budgets of a pass, as immutable values.

Three questions, three ledgers, never merged: how much prefill compute this step (input), how long a slice before decode
gets a turn (chunk), how much KV memory may be promised (kv). A charge returns a new Budget; the pair before / after is
the record. Units are tokens; only the promised total is fractional, since estimates are scaled by the new-token ratio.
"""

from __future__ import annotations

import msgspec

from engine.scheduler.decision import LedgerView, Result


class ComputeLedger(msgspec.Struct, frozen=True, gc=False):
    """Prefill compute of this step."""

    limit_tokens: int
    spent_tokens: int = 0

    @property
    def remaining(self) -> int:
        return self.limit_tokens - self.spent_tokens


class ChunkLedger(msgspec.Struct, frozen=True, gc=False):
    """The prefill slice of this step. `limit_tokens` None: chunking is off and the ledger never says no."""

    limit_tokens: int | None
    spent_tokens: int = 0

    @property
    def remaining(self) -> int | None:
        return None if self.limit_tokens is None else self.limit_tokens - self.spent_tokens


class KvLedger(msgspec.Struct, frozen=True, gc=False):
    """KV memory. `available` is free + evictable when the pass opened; pins only ever take from it.

    remaining_current = available - pinned - current_offset     room at this moment
    remaining_total   = available - pinned - total_offset       room once everything promised has grown
    """

    available_tokens: int
    pinned_tokens: int = 0
    current_offset: int = 0
    total_offset: float = 0.0

    @property
    def remaining_current(self) -> int:
        return self.available_tokens - self.pinned_tokens - self.current_offset

    @property
    def remaining_total(self) -> float:
        return self.available_tokens - self.pinned_tokens - self.total_offset


class Cost(msgspec.Struct, frozen=True, gc=False):
    """What one admission takes from each ledger, in tokens."""

    compute: int
    chunk: int
    pinned: int
    current: int
    total: float


class Budget(msgspec.Struct, frozen=True, gc=False):
    """The three ledgers at one moment of a pass."""

    compute: ComputeLedger
    chunk: ChunkLedger
    kv: KvLedger

    def charge(self, cost: Cost) -> Budget:
        """The budget after `cost`. Nothing is written: dropping the result is the rollback."""
        return Budget(
            ComputeLedger(self.compute.limit_tokens, self.compute.spent_tokens + cost.compute),
            ChunkLedger(self.chunk.limit_tokens, self.chunk.spent_tokens + cost.chunk),
            KvLedger(
                self.kv.available_tokens,
                self.kv.pinned_tokens + cost.pinned,
                self.kv.current_offset + cost.current,
                self.kv.total_offset + cost.total,
            ),
        )

    def release(self, available_tokens: int, promised_tokens: float, taken_tokens: int = 0) -> Budget:
        """The budget after a running request gave back memory, its promise, and what it would have taken now."""
        kv = self.kv
        return Budget(
            self.compute,
            self.chunk,
            KvLedger(
                kv.available_tokens + available_tokens,
                kv.pinned_tokens,
                kv.current_offset - taken_tokens,
                kv.total_offset - promised_tokens,
            ),
        )

    def view(self) -> LedgerView:
        kv = self.kv
        room = kv.available_tokens - kv.pinned_tokens
        return LedgerView(
            self.compute.limit_tokens - self.compute.spent_tokens,
            self.chunk.remaining,
            room - kv.total_offset,
            room - kv.current_offset,
        )

    def state(self) -> Result:
        """Rule book 4a, of what is left."""
        return self.view().state()

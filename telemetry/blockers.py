"""Blockers. Owns: which ledger or rule each reason code blames, so that every waiting request has exactly one blocker.

`order` is never a reason's blocker: it is what a request has when the pass ended before it was looked at. `engine_busy`
is what it has until the first pass after it came (back) to the queue.
"""

from __future__ import annotations

from typing import Final

from engine.scheduler.decision import ADMITTED, Reason
from telemetry.observe import BLOCKERS

#: Index of each blocker, for arrays of counts and times.
INDEX: Final = {name: at for at, name in enumerate(BLOCKERS)}
ORDER: Final = INDEX["order"]
ENGINE_BUSY: Final = INDEX["engine_busy"]
CHUNK: Final = INDEX["chunk"]
KV_NOW: Final = INDEX["kv_now"]

_NAMES: Final[dict[Reason, str]] = {
    Reason.KV_NOW_EXHAUSTED: "kv_now",
    Reason.KV_TOTAL_EXHAUSTED: "kv_total",
    Reason.PREFILL_MAX_REACHED: "prefill_max",
    # The batch is full. What filled it is kept where it is known: see `QueueWatch`.
    Reason.FULL_FLAG_SET: "rows",
    Reason.DELAYED: "delay",
    # A guard keeps back a waiting request only when the pages promised to it are not there.
    Reason.PARKED_BY_GUARD: "kv_now",
    Reason.PREEMPTED_FOR: "order",
    Reason.COMPUTE_EXHAUSTED: "compute",
    Reason.CHUNK_EXHAUSTED: "chunk",
    Reason.CHUNK_BELOW_PAGE: "chunk",
    Reason.CHUNK_SLOT_TAKEN: "chunk_slot",
    Reason.ROWS_EXHAUSTED: "rows",
    Reason.SHARES_COLD_PREFIX: "cold_prefix",
    Reason.NEVER_FITS: "kv_total",
    Reason.QUEUE_END: "order",
}

#: Blocker index of each reason that is not an admission.
OF_REASON: Final = {reason: INDEX[name] for reason, name in _NAMES.items()}

assert set(OF_REASON) == set(Reason) - ADMITTED, "a reason code has no blocker"

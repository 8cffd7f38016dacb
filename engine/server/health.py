"""Health. Owns: when this server is alive, and when it wants traffic.

Alive: the loop turns and, with work at hand, makes progress. Ready: alive, taking requests, and with room in the queue.
A full queue is no reason to restart a server; a loop that spins without result is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.server.step_engine import EngineStatus


@dataclass(frozen=True, slots=True)
class Health:
    """`state` is alive | dead | stopped | blocked | stalled | draining | queue_full; `reason` says it in words."""

    ok: bool
    state: str
    reason: str
    body: dict[str, Any]


def liveness(status: EngineStatus, now_ns: int, stall_after_s: float) -> Health:
    """Judged from what the engine thread last said about itself."""
    turn_s = (now_ns - status.heartbeat_ns) / 1e9
    progress_s = (now_ns - status.progress_ns) / 1e9
    state, reason = "alive", ""
    if status.dead:
        state, reason = "dead", f"the engine stopped: {status.dead}"
    elif status.stopped:
        state, reason = "stopped", "the engine has been shut down"
    elif turn_s > stall_after_s:
        state = "blocked"
        reason = (
            f"step {status.steps + 1} has not come back for {turn_s:.1f} s (server.stall_after_s={stall_after_s:g})"
        )
    elif status.has_work and progress_s > stall_after_s:
        state = "stalled"
        reason = (
            f"{status.waiting} waiting, {status.running} running, and no token computed for {progress_s:.1f} s "
            f"(server.stall_after_s={stall_after_s:g})"
        )
    last_token_s = round((now_ns - status.last_token_ns) / 1e9, 3) if status.last_token_ns else None
    body = {
        "status": state,
        "reason": reason,
        "steps": status.steps,
        "waiting": status.waiting,
        "running": status.running,
        "last_step_age_s": round(turn_s, 3),
        "last_progress_age_s": round(progress_s, 3),
        "last_token_age_s": last_token_s,
    }
    return Health(state == "alive", state, reason, body)


def readiness(status: EngineStatus, now_ns: int, stall_after_s: float, max_queued_requests: int) -> Health:
    """Liveness, and room for one more request."""
    live = liveness(status, now_ns, stall_after_s)
    if not live.ok:
        return live
    state, reason = "ready", ""
    if status.draining:
        state, reason = "draining", "the server is shutting down"
    elif status.waiting >= max_queued_requests:
        state = "queue_full"
        reason = f"{status.waiting} requests are waiting; server.max_queued_requests={max_queued_requests}"
    return Health(state == "ready", state, reason, live.body | {"status": state, "reason": reason})

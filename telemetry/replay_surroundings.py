"""Surroundings of a divergence. Owns: what is told of the replayed scheduler, and of the lines in front of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

from engine.request import Request
from engine.scheduler.scheduler import Scheduler
from telemetry.observe import PAGE_STATES
from telemetry.replay_report import Divergence, RequestThen, Surroundings

_MOST_NAMED: Final = 8
_MOST_TEXT: Final = 160
#: Fields of a line that tell what it is about, where it has them.
_TOLD: Final = (
    *("kind", "rid", "reason", "result", "cause", "source", "target", "prefix_len", "selected_extend", "need", "have"),
    *("node", "delta", "count", "num_waiting", "num_running", "events"),
)


def with_surroundings(divergence: Divergence, scheduler: Scheduler, agreed: Iterable[bytes]) -> Divergence:
    """The same, with the state of `scheduler` and the lines that were still equal."""
    state = scheduler.state
    about = _rid(divergence)
    found = None if about is None else state.requests.get(about)
    running = state.live_running
    around = Surroundings(
        step=state.step,
        waiting=len(state.waiting),
        first_waiting=tuple(request.rid for request in islice(state.by_entry.values(), _MOST_NAMED)),
        running=len(running),
        first_running=tuple(request.rid for request in running[:_MOST_NAMED]),
        continuation=None if state.continuation is None else state.continuation.rid,
        pages=dict(zip(PAGE_STATES, state.kv.pool.counts, strict=True)),
        new_token_ratio=state.ratio,
        batch_is_full=state.full,
        request=None if found is None else _then(found),
        agreed=tuple(map(_told, agreed)),
    )
    return divergence.model_copy(update={"around": around})


def _then(request: Request) -> RequestThen:
    return RequestThen(
        rid=request.rid,
        state=request.state.value,
        prompt_len=request.prompt_len,
        output_len=request.output_len,
        computed_len=request.computed_len,
        num_retractions=request.num_retractions,
        times_passed_over=request.times_passed_over,
    )


def _rid(divergence: Divergence) -> str | None:
    """Whom it is about, by either side."""
    for line in (divergence.recorded, divergence.replayed):
        rid = json.loads(line).get("rid") if line else None
        if isinstance(rid, str):
            return rid
    return None


def _told(raw: bytes) -> str:
    """One line of a journal, short."""
    line: dict[str, Any] = json.loads(raw.decode(errors="replace"))
    head = " ".join(f"{name} {line[name]}" for name in ("step", "seq") if name in line)
    rest = " ".join(f"{name}={line[name]}" for name in _TOLD if line.get(name) is not None)
    return f"{head} {line['type']} {rest}".strip()[:_MOST_TEXT]

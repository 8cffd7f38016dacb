"""One request's timeline. Owns: the times, parts and blockers of one request, as `telemetry.timeline` fills them in."""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.events import AdmissionDecided, RequestArrived
from engine.request import Cause, FinishReason, RequestState
from engine.scheduler.decision import Reason
from telemetry.observe import BLOCKERS, TTFT_PARTS
from telemetry.overtakes import NOT_OVERTAKEN
from telemetry.pass_ends import EndShare, Stand

INTAKE, QUEUE, PREPARE, CHUNK_FORWARD, COMMIT, BETWEEN, EMIT = range(len(TTFT_PARTS))
#: Spans of waiting and decisions kept for one request; a request that waits for hours keeps its latest.
KEPT: Final = 256

#: The reason of an end, by its cause.
FINISH_OF: Final = {
    Cause.STOP: FinishReason.STOP,
    Cause.LENGTH: FinishReason.LENGTH,
    Cause.ABORT: FinishReason.ABORT,
    Cause.ERROR: FinishReason.ERROR,
    Cause.NEVER_FITS: FinishReason.REFUSED,
    Cause.KV_POOL_EXHAUSTED: FinishReason.LENGTH,
    Cause.QUEUE_TIMEOUT: FinishReason.REFUSED,
    Cause.DISPLACED: FinishReason.REFUSED,
}


class Held(NamedTuple):
    """One stretch of waiting under one blocker. `who` and `reason` of `order` are those of the last pass in it.

    ends  of `order`: what ended its passes
    """

    start_ns: int
    end_ns: int
    blocker: int
    reason: Reason | None
    who: str | None
    passes: int
    ends: tuple[EndShare, ...] = ()


class Chunk:
    """One prefill chunk. Times in nanoseconds, None until reached; `applied_ns` stays None when its step failed.

    launched_ns  when its computation could begin: its step was launched, and the one before it was ready
    """

    __slots__ = (
        "admitted_ns",
        "applied_ns",
        "decode_rows",
        "extend_len",
        "is_last",
        "launched_ns",
        "prefix_len",
        "ready_ns",
        "step",
    )

    def __init__(self, *, step: int, prefix_len: int, extend_len: int, is_last: bool, now: int, decodes: int) -> None:
        self.step = step
        self.prefix_len = prefix_len
        self.extend_len = extend_len
        self.is_last = is_last
        self.admitted_ns = now
        self.decode_rows = decodes
        self.launched_ns: int | None = None
        self.ready_ns: int | None = None
        self.applied_ns: int | None = None


#: For who keeps no detail; they hold nothing. An empty deque has room for 64, so each request would pay for 128.
_NO_DECISIONS: Final[deque[AdmissionDecided]] = deque(maxlen=0)
_NO_SPANS: Final[deque[Held]] = deque(maxlen=0)


class RequestTimeline:
    """What is known about one request. Times in nanoseconds of the engine clock.

    parts      indexed like TTFT_PARTS; closed at the first token, but for `emit`
    blockers   indexed like BLOCKERS; waiting and refused continuation before the first token
    late_blockers  the same for waiting after the first token (retracted while decoding)
    order_ns   of the blocker `order` in `blockers`, by what ended the passes; nothing without `keep_detail`
    ends_before  where the sums of passes' ends stood when the present stretch under `order` began
    decisions  examinations, the latest KEPT; like `held`, nothing without `keep_detail`
    held       each closed stretch of waiting, the latest KEPT
    retracted_ns  when it was pushed back to the queue
    enqueued_as   number of its entry to the queue: rises with each request that enters
    overtaken     what passed it over in earlier stays; of the present one `QueueWatch.overtaken` knows
    token_ns   when each token was applied; complete only after `TimelineTracker.settle_tokens`
    """

    __slots__ = (
        "accepted_ns",
        "admitted_ns",
        "blocker",
        "blocker_passes",
        "blocker_since_ns",
        "blockers",
        "cached_len",
        "chunks",
        "computed_len",
        "cursor_ns",
        "decided",
        "decisions",
        "decisions_left_out",
        "end_cause",
        "ends_before",
        "enqueued_as",
        "enqueued_ns",
        "finish",
        "finished_ns",
        "first_byte_ns",
        "first_token_ns",
        "held",
        "last_byte_ns",
        "last_token_ns",
        "late_blockers",
        "matched_len",
        "max_new_tokens",
        "num_retractions",
        "order_ns",
        "output_len",
        "overtaken",
        "parts",
        "pass_at_entry",
        "phase",
        "priority",
        "prompt_len",
        "reason",
        "refused_between_ns",
        "response_done",
        "retracted_ns",
        "rid",
        "run_from",
        "runs",
        "state",
        "token_ns",
        "trace_id",
        "trace_sampled",
        "ttft_ns",
    )

    def __init__(self, event: RequestArrived, *, keep_detail: bool = True) -> None:
        self.rid = event.rid
        self.prompt_len = event.prompt_len
        self.max_new_tokens = event.max_new_tokens
        self.priority = event.priority
        self.trace_id = event.trace_id
        self.trace_sampled = event.trace_sampled
        # A caller without a server has no moment of acceptance of its own.
        self.accepted_ns = min(event.accepted_ns or event.t_ns, event.t_ns)
        self.enqueued_ns = event.t_ns
        self.cursor_ns = self.accepted_ns
        self.phase = INTAKE
        self.parts = [0] * len(TTFT_PARTS)
        self.blockers = [0] * len(BLOCKERS)
        self.late_blockers = [0] * len(BLOCKERS)
        self.order_ns: dict[Reason, int] = {}
        self.ends_before: Stand | None = None
        self.refused_between_ns = 0
        self.state = RequestState.WAITING
        self.num_retractions = 0
        self.retracted_ns: list[int] = []
        self.enqueued_as = 0
        self.overtaken = NOT_OVERTAKEN
        self.cached_len: int | None = None
        self.computed_len = 0
        self.output_len = 0
        self.matched_len = 0
        self.blocker: int | None = None
        self.blocker_since_ns = event.t_ns
        self.blocker_passes = 0
        self.pass_at_entry = 0
        self.reason: Reason | None = None
        self.decided: AdmissionDecided | None = None
        self.decisions: deque[AdmissionDecided] = deque(maxlen=KEPT) if keep_detail else _NO_DECISIONS
        self.decisions_left_out = 0
        self.held: deque[Held] = deque(maxlen=KEPT) if keep_detail else _NO_SPANS
        self.chunks: list[Chunk] = []
        self.admitted_ns: int | None = None
        self.first_token_ns: int | None = None
        self.first_byte_ns: int | None = None
        self.last_token_ns: int | None = None
        self.last_byte_ns: int | None = None
        self.finished_ns: int | None = None
        self.ttft_ns: int | None = None
        self.finish: FinishReason | None = None
        self.end_cause: Cause | None = None
        self.response_done = False
        self.run_from: int | None = None
        self.runs: list[tuple[int, int]] = []
        self.token_ns: array[int] = array("q")

    def chunk_of(self, step: int) -> Chunk | None:
        """The piece that `step` computed: the latest, or where steps overlap the one before it."""
        return next((chunk for chunk in reversed(self.chunks[-2:]) if chunk.step == step), None)

    def mark(self, part: int, t_ns: int) -> None:
        """Charge the time since the cursor to `part`; an instant before the cursor charges nothing."""
        if t_ns > self.cursor_ns:
            self.parts[part] += t_ns - self.cursor_ns
            self.cursor_ns = t_ns

    @property
    def is_retracted(self) -> bool:
        return self.state is RequestState.WAITING and self.admitted_ns is not None

    @property
    def queue_ns(self) -> int | None:
        """Enqueued to first admission; None while it has not been admitted."""
        return None if self.admitted_ns is None else self.admitted_ns - self.enqueued_ns

    def gaps_ns(self) -> list[int]:
        """Time between consecutive tokens, oldest first."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_ns)]

    def worst_gap_ns(self) -> int:
        """The longest of them, 0 when there is none; quicker than looking at each."""
        if len(self.token_ns) < 2:
            return 0
        times: NDArray[np.int64] = np.frombuffer(self.token_ns, dtype=np.int64)
        return int((times[1:] - times[:-1]).max())

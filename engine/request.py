"""Requests as the scheduler sees them. Owns: the states, the transition table, the counts of one request.

No token ids, no text, no times: lengths, page keys and counters only. Latencies are derived from events by
`telemetry.timeline`. Only `scheduler`, `commit` and `apply` of `engine.scheduler` write here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine.codes import Code
from engine.errors import IllegalTransition

if TYPE_CHECKING:
    from engine.kvcache.kv_cache import KvLease
    from engine.kvcache.page_keys import PageKeys


class RequestState(Code):
    """Where a request is. A lease exists exactly in PREFILL and DECODE."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class FinishReason(Code):
    """The one end of a request (`requests_finished_total{finish_reason}`)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REFUSED = "refused"


#: Detail of an abort by the engine: the last token did not follow the request's grammar.
GRAMMAR_FAILED: Final = "grammar_failed"


class Cause(Code):
    """Why a request changed state."""

    ARRIVE = "arrive"
    ADMIT = "admit"
    NEXT_CHUNK = "next_chunk"
    FINAL_CHUNK = "final_chunk"
    RETRACT = "retract"
    PREEMPT = "preempt"
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    NEVER_FITS = "never_fits"
    KV_POOL_EXHAUSTED = "kv_pool_exhausted"
    QUEUE_TIMEOUT = "queue_timeout"
    DISPLACED = "displaced"


_ENDS: Final = frozenset({Cause.STOP, Cause.LENGTH, Cause.ABORT, Cause.ERROR, Cause.KV_POOL_EXHAUSTED})

#: Ends of requests that were accepted, never admitted, and then not wanted any more (`engine.scheduler.turn_away`).
TURNED_AWAY: Final = frozenset({Cause.QUEUE_TIMEOUT, Cause.DISPLACED})

#: (source, target) -> the causes that may take a request from one to the other.
TRANSITIONS: Final[dict[tuple[RequestState, RequestState], frozenset[Cause]]] = {
    (RequestState.WAITING, RequestState.PREFILL): frozenset({Cause.ADMIT}),
    (RequestState.WAITING, RequestState.FINISHED): frozenset({Cause.ABORT, Cause.ERROR, Cause.NEVER_FITS})
    | TURNED_AWAY,
    (RequestState.PREFILL, RequestState.PREFILL): frozenset({Cause.NEXT_CHUNK}),
    (RequestState.PREFILL, RequestState.DECODE): frozenset({Cause.FINAL_CHUNK}),
    (RequestState.PREFILL, RequestState.WAITING): frozenset({Cause.RETRACT, Cause.PREEMPT}),
    (RequestState.PREFILL, RequestState.FINISHED): _ENDS,
    (RequestState.DECODE, RequestState.WAITING): frozenset({Cause.RETRACT, Cause.PREEMPT}),
    (RequestState.DECODE, RequestState.FINISHED): _ENDS,
}


#: With overlapped steps a request may be back in the queue when the token arrives that ends it.
LATE_ENDS: Final = frozenset({Cause.STOP, Cause.LENGTH})

#: Every cause that may end a request.
END_CAUSES: Final = frozenset().union(
    *(causes for (_, target), causes in TRANSITIONS.items() if target is RequestState.FINISHED)
)


class Request:
    """One request of the scheduler.

    prompt_len, output_len  tokens; `seq_len` is their sum
    computed_len            tokens whose K/V exists or is being computed by a step in flight; 0 while WAITING
    ahead_len, ahead_outputs  of both lengths: what steps in flight have yet to bring; 0 where steps do not overlap
    entered_ns      when it entered the queue, on the engine's clock
    entry_seq               place in arrival order; renewed by a retraction
    processed_at_entry      HRRN snapshot of the processed-token counter
    last_candidate_extend   tokens left to compute when it was last considered; 0 if it never was, or since a retraction
    in_flight               steps sent to the executor and not yet applied (0 or 1 without overlap, else up to 2)
    """

    __slots__ = (
        "abort_requested",
        "ahead_len",
        "ahead_outputs",
        "computed_len",
        "entered_ns",
        "entry_seq",
        "finish_reason",
        "head32_key",
        "ignore_eos",
        "in_flight",
        "keys",
        "last_candidate_extend",
        "last_extend_end",
        "lease",
        "matched_len",
        "max_new_tokens",
        "num_retractions",
        "output_len",
        "priority",
        "processed_at_entry",
        "prompt_len",
        "rid",
        "routing_key",
        "state",
        "times_passed_over",
    )

    def __init__(
        self,
        *,
        rid: str,
        prompt_len: int,
        max_new_tokens: int,
        keys: PageKeys,
        head32_key: int | None = None,
        ignore_eos: bool = False,
        priority: int | None = None,
        routing_key: str | None = None,
    ) -> None:
        self.rid = rid
        self.prompt_len = prompt_len
        self.max_new_tokens = max_new_tokens
        self.keys = keys
        self.head32_key = head32_key
        self.ignore_eos = ignore_eos
        self.priority = priority
        self.routing_key = routing_key
        self.state = RequestState.WAITING
        self.finish_reason: FinishReason | None = None
        self.output_len = 0
        self.computed_len = 0
        self.ahead_len = 0
        self.ahead_outputs = 0
        self.matched_len = 0
        self.last_extend_end = 0
        self.last_candidate_extend = 0
        self.lease: KvLease | None = None
        self.in_flight = 0
        self.abort_requested = False
        self.num_retractions = 0
        self.times_passed_over = 0
        self.entry_seq = 0
        self.entered_ns = 0
        self.processed_at_entry = 0

    @property
    def seq_len(self) -> int:
        """Prompt and outputs, in tokens: what a prefill of this request must compute or find cached."""
        return self.prompt_len + self.output_len

    @property
    def applied_len(self) -> int:
        """Tokens whose K/V exists because the step that computed it was applied."""
        return self.computed_len - self.ahead_len

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def transition(self, target: RequestState, cause: Cause, *, is_late: bool = False) -> None:
        """Move to `target`; raises IllegalTransition when the table has no such edge for `cause`.

        is_late  by a token that was under way when the request went back to the queue: LATE_ENDS are legal too
        """
        if cause not in TRANSITIONS.get((self.state, target), ()):
            late = is_late and (self.state, target) == (RequestState.WAITING, RequestState.FINISHED)
            if not (late and cause in LATE_ENDS):
                raise IllegalTransition(self.rid, self.state, target, cause)
        self.state = target

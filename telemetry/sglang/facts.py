"""Facts. Owns: what the scheduler's thread hands over, as plain frozen values.

Numbers and ids only: no token, no text, and no reference to an object of SGLang's, so that nothing is kept alive. Times
are `time.perf_counter_ns`, which is the clock of SGLang's own request times. Lengths and ledgers are tokens.
"""

from __future__ import annotations

import msgspec

from engine.scheduler.decision import LedgerView


class MemoryTest(msgspec.Struct, frozen=True, gc=False):
    """The adder's memory test as it was made, with the prefix locked.

    is_known_length  the test of radix off and `ignore_eos`, which a walk over all known ends follows
    limited_by_now   its smaller right side was `remaining_current`
    """

    need: float
    have: float
    passed: bool
    is_known_length: bool = False
    limited_by_now: bool = False


class Tried(msgspec.Struct, frozen=True, gc=False):
    """One call of the adder.

    candidate, selected  tokens it would like to compute, and was given
    prefix_len     tokens that need no computing: found on the device, and loaded from a host tier at an admission
    rest           tokens beyond `prefix_len + selected`
    result         the adder's answer; None for a continuation, which has none
    had_continuation  the adder was told that a prompt is half done
    batch          requests in the batch before
    delayer        a prefill delayer was asked, or would have been
    """

    rid: str
    is_continuation: bool
    prefix_len: int
    candidate: int
    selected: int
    rest: int
    is_admitted: bool
    before: LedgerView
    after: LedgerView
    result: str | None
    test: MemoryTest | None = None
    had_continuation: bool = False
    batch: int = 0
    delayer: bool = False


class Row(msgspec.Struct, frozen=True, gc=False):
    """One prompt piece of a batch, and the row that its request holds, counted from 0."""

    rid: str
    prefix_len: int
    extend_end: int
    is_last: bool
    row: int | None


class Untried(msgspec.Struct, frozen=True, gc=False):
    """The waiting request in front of which the pass ended. `rows` None: nobody asked for rows."""

    rid: str
    prefix_len: int
    candidate: int
    rows: int | None


class Pass(msgspec.Struct, frozen=True, gc=False):
    """One prefill pass.

    skipped      why no adder was made: queue_empty | full_flag | rows | delayed; None: one was made
    head         first waiting request of a skipped pass
    waiting      requests that waited when it began, after ordering
    promised     growth that the adder counts for running requests
    untried      set when the pass ended before the end of the queue without a refusal
    was_full     the full flag as the candidates found it
    chunk_limit  cap on the continuation
    prefill_max  `prefill_max_requests`
    align        `truncation_align_size`
    """

    skipped: str | None
    head: str | None
    waiting: int
    policy: str | None = None
    opened: LedgerView | None = None
    closed: LedgerView | None = None
    mixed: int = 0
    promised: float = 0.0
    tried: tuple[Tried, ...] = ()
    untried: Untried | None = None
    was_full: bool = False
    chunk_limit: int | None = None
    prefill_max: int | None = None
    align: int | None = None


class Fact(msgspec.Struct, frozen=True, tag=True):
    """Common head. `number` counts what the scheduler's thread handed over, dropped ones included."""

    number: int
    t_ns: int


class Arrived(Fact, frozen=True):
    """A request came to the queue, or came back to it outside of a plan (a pause).

    accepted_ns  when SGLang's HTTP layer made it; 0: not told
    retractions  how often SGLang pushed it back so far
    """

    rid: str
    prompt_len: int
    output_len: int
    max_new_tokens: int
    ignore_eos: bool
    priority: int | None
    routing_key: str | None
    accepted_ns: int
    retractions: int = 0


class AbortAsked(Fact, frozen=True):
    """Someone asked to end the requests whose id begins with `prefix`, as SGLang reads it; "" means all.

    prefix  a list for a batch; None asks for nobody
    cause  abort | queue_timeout
    """

    prefix: str | list[str] | None
    cause: str


class Gone(Fact, frozen=True):
    """A request ended outside of a step: taken from the queue, or between two pieces of its prompt.

    cause  abort | queue_timeout | displaced | kv_pool_exhausted
    """

    rid: str
    cause: str
    output_len: int


class Back(msgspec.Struct, frozen=True, gc=False):
    """A running request pushed back while a step was planned. `cause`: retract | preempt."""

    rid: str
    cause: str
    output_len: int
    retractions: int
    t_ns: int


class Planned(Fact, frozen=True):
    """A step was planned, or a pass ended in nothing. `t_ns` is when planning began.

    planned_ns  the batch stood
    tokens      [free, evictable, protected] of the pool, after planning
    is_idle     nothing is launched: the step is over at once
    """

    step: int
    planned_ns: int
    pass_: Pass | None
    rows: tuple[Row, ...]
    decodes: tuple[str, ...]
    backs: tuple[Back, ...]
    continuation: str | None
    batch_is_full: bool
    new_token_ratio: float
    num_waiting: int
    num_running: int
    tokens: tuple[int, int, int]
    is_idle: bool = False


class Ended(msgspec.Struct, frozen=True, gc=False):
    """A request that a step ended. `kind`: stop | length | abort | error."""

    rid: str
    kind: str
    output_len: int


class Done(Fact, frozen=True):
    """The result of a step was processed. `t_ns` is when that was over.

    launched_ns, ready_ns  the batch was handed to the model; its result was taken up
    """

    step: int
    launched_ns: int
    ready_ns: int
    ended: tuple[Ended, ...]
    num_waiting: int
    tokens: tuple[int, int, int]


AnyFact = Arrived | AbortAsked | Gone | Planned | Done

"""Facts of one request's life. Owns: the values that `telemetry.life` finds in a journal and `telemetry.explain` tells.

Times are integer nanoseconds on the engine's clock; lengths and ledgers are tokens.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from engine.request import Cause, RequestState
from engine.scheduler.decision import Overdraft, Reason
from engine.scheduler.plan import StepKind
from telemetry.schema_parts import LedgerPart


class _Fact(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Refusals(_Fact):
    """In how many steps one reason refused it. `need` and `have` are those of the last one.

    first_ns  when it began; None where the record does not say
    """

    reason: Reason
    count: int
    first_step: int
    last_step: int
    need: float | None
    have: float | None
    first_ns: int | None = None


class NotReached(_Fact):
    """Passes that ended before its turn: `rid` is where they ended."""

    reason: Reason
    rid: str | None
    count: int
    first_step: int
    last_step: int
    first_ns: int | None = None


class NoPass(_Fact):
    """Steps without a prefill pass. `set_by` is the refusal that marked the batch full, when that was the cause."""

    reason: Reason
    count: int
    first_step: int
    last_step: int
    first_ns: int | None = None
    set_by: Refusals | None = None
    set_by_rid: str | None = None


class HeldShare(_Fact):
    """How much of a stay one reason held it, from each step's plan to the next: what the page has by blocker.

    reason  what refused it, or ended the pass ahead of it; None: no pass had been made since it came
    is_own  whether it was refused itself
    """

    reason: Reason | None
    is_own: bool
    ns: int


class SliceShare(_Fact):
    """Prompt tokens of one request that were computed in steps whose prefill budget was spent."""

    rid: str
    tokens: int


class Wait(_Fact):
    """One stay in the queue.

    ahead        requests that were waiting when it came
    running      requests that held KV memory then
    passes       prefill passes made meanwhile, the one that admitted it included
    ahead_admitted   of those ahead, how many were admitted meanwhile
    overtaken_by     later comers that were admitted meanwhile, in that order
    overtaken_passes  passes that computed prompt of later comers: what `max_overtakes` counts
    overtaken_under  policies that ordered those passes
    slices_taken     who got the prefill budget in the steps where it was spent before this one's turn; most first
    overtaken_ns, slices_ns   when either began
    held             the stay by what held it, longest first; they add up to it
    end          admitted | ended | waiting (the record ends)
    """

    from_ns: int
    to_ns: int
    from_step: int
    to_step: int
    after: Cause
    ahead: int
    running: int
    passes: int
    refusals: tuple[Refusals, ...]
    not_reached: tuple[NotReached, ...]
    no_pass: tuple[NoPass, ...]
    ahead_admitted: int
    overtaken_by: tuple[str, ...]
    overtaken_passes: int = 0
    overtaken_under: tuple[str, ...] = ()
    slices_taken: tuple[SliceShare, ...] = ()
    overtaken_ns: int | None = None
    slices_ns: int | None = None
    held: tuple[HeldShare, ...] = ()
    end: Literal["admitted", "ended", "waiting"]


class ChunkFact(_Fact):
    """One admitted piece of the prompt, with every ledger before and after.

    seq_len      prompt and kept outputs: what has to be computed or found
    decode_rows  requests that decoded in the same step; `other_prompts` that prefilled in it
    step_ns      how long the step took; None when the record ends before
    behind_ns    part of it in which the step before was still computed; 0 where steps do not overlap
    done_ns      when it was over; None when the record ends before
    """

    step: int
    at_ns: int
    reason: Reason
    prefix_len: int
    extend_len: int
    extend_end: int
    seq_len: int
    before: LedgerPart
    after: LedgerPart
    reserved_new_tokens: int
    need: float | None
    have: float | None
    overdrafts: tuple[Overdraft, ...]
    other_prompts: int = 0
    decode_rows: int = 0
    step_ns: int | None = None
    behind_ns: int = 0
    done_ns: int | None = None
    failed: bool = False


class RetractionFact(_Fact):
    """It was pushed back to the queue."""

    step: int
    at_ns: int
    cause: str
    output_len: int
    lost_tokens: int


class GapFact(_Fact):
    """The longest time between two of its tokens, and what the step that ended it did."""

    ns: int
    step: int
    kind: StepKind
    prefill_tokens: int
    was_retracted: bool


class EndFact(_Fact):
    """How it ended."""

    step: int
    at_ns: int
    cause: Cause
    detail: str
    output_len: int


class ResponseFact(_Fact):
    """What the HTTP layer saw."""

    first_byte_ns: int | None
    last_byte_ns: int | None
    bytes_sent: int
    disconnected: bool


class Life(_Fact):
    """Everything that the record says about one request.

    accepted_ns      when the caller handed it over; 0 ns of its own time
    arrived_wall_ns  Unix time of that moment
    times_used       how many requests of the record had this id; this is the last of them
    cached_len       prompt tokens found in the cache at the first admission
    parked           refusals while its prompt was half done
    """

    rid: str
    state: RequestState
    times_used: int
    accepted_ns: int
    arrived_ns: int
    arrived_wall_ns: int
    prompt_len: int
    prompt_pages: int
    max_new_tokens: int
    requested_new_tokens: int
    cached_len: int | None
    waits: tuple[Wait, ...]
    chunks: tuple[ChunkFact, ...]
    parked: tuple[Refusals, ...]
    retractions: tuple[RetractionFact, ...]
    abort_asked_ns: int | None
    first_token_ns: int | None
    first_token_step: int | None
    last_token_ns: int | None
    output_len: int
    worst_gap: GapFact | None
    end: EndFact | None
    response: ResponseFact | None
    record_ends_ns: int
    record_ends_step: int

    @property
    def ttft_ns(self) -> int | None:
        """Acceptance to first token."""
        return None if self.first_token_ns is None else self.first_token_ns - self.accepted_ns

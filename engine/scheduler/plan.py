"""Plans and outcomes. Owns: what one step will do, and what came back, as frozen values."""

from __future__ import annotations

import msgspec

from engine.codes import Code
from engine.request import FinishReason
from engine.scheduler.decision import AdmissionDecision, Guard, LedgerView, Reason


class StepKind(Code):
    """What a step computes (`steps_total{kind}`)."""

    IDLE = "idle"
    EXTEND = "extend"
    MIXED = "mixed"
    DECODE = "decode"


class PassEnd(msgspec.Struct, frozen=True, gc=False):
    """Why a prefill pass ended. `stop` is the rule book's word for it (queue_end, result, budget, slots, skipped)."""

    stop: str
    stopped_by: Reason
    rid: str | None = None
    not_considered: int = 0


class PrefillRow(msgspec.Struct, frozen=True, gc=False):
    """One prompt piece of a step: tokens [prefix_len, prefix_len + extend_len) are computed."""

    rid: str
    prefix_len: int
    extend_len: int
    is_last: bool

    @property
    def extend_end(self) -> int:
        return self.prefix_len + self.extend_len


class Retraction(msgspec.Struct, frozen=True, gc=False):
    """One running request pushed back to the queue. `aborted`: the last one, which can never fit, ends instead."""

    rid: str
    cause: str
    output_len: int
    lost_tokens: int
    aborted: bool = False


class StepPlan(msgspec.Struct, frozen=True):
    """Everything one step will do, decided before anything is written.

    state_version   the version of the state this was planned on; commit asserts it
    order           waiting rids as ordered for this pass (None: no pass was made)
    touches         (rid, pages) matches to stamp at commit, in the order they were made
    sampling        rids that yield exactly one token: finished prefills in row order, then decodes
    ratio_after     new_token_ratio after this step
    full_after      the reference's full flag after this step
    mixed_tested    whether the decode-fit test of a mixed step was made (it evicts even when it fails)
    preempted       running requests that give way, in the order they were chosen
    considered      (rid, candidate extend) of waiting requests that were matched
    delayed_passes  passes in a row that the prefill delayer held back, this one included
    chunk_size, predicted_step_ns  what the dynamic chunk chose and expects; None when it is off
    """

    step: int
    now_ns: int
    state_version: int
    kind: StepKind
    prefills: tuple[PrefillRow, ...] = ()
    decodes: tuple[str, ...] = ()
    sampling: tuple[str, ...] = ()
    retractions: tuple[Retraction, ...] = ()
    decisions: tuple[AdmissionDecision, ...] = ()
    order: tuple[str, ...] | None = None
    matched: tuple[int, ...] = ()
    deprioritized: tuple[str, ...] | None = None
    active_policy: str | None = None
    chunk_limit: int | None = None
    budget_open: LedgerView | None = None
    budget_close: LedgerView | None = None
    mixed_rows: int = 0
    pass_end: PassEnd | None = None
    touches: tuple[tuple[str, int], ...] = ()
    continuation_after: str | None = None
    full_after: bool = False
    ratio: float = 0.0
    ratio_after: float = 0.0
    mixed_tested: bool = False
    preempted: tuple[str, ...] = ()
    considered: tuple[tuple[str, int], ...] = ()
    guards: tuple[Guard, ...] = ()
    promised_tokens: float = 0.0
    delayed_passes: int = 0
    chunk_size: int | None = None
    predicted_step_ns: int | None = None


class OutcomeRow(msgspec.Struct, frozen=True, gc=False):
    """What one sampled row did to its request: one output token, whose value the scheduler never sees.

    new_page_key   key of the page this token filled, if it filled one
    head32_key     set when this token completed the first 32 tokens of the sequence
    """

    rid: str
    new_page_key: int | None = None
    head32_key: int | None = None
    finish: FinishReason | None = None
    detail: str = ""


class StepTimes(msgspec.Struct, frozen=True, gc=False):
    """Cuts of one step on the engine's monotonic clock, integer nanoseconds, non-decreasing.

    drain [started, planned_from) · plan [planned_from, planned) · commit [planned, committed) ·
    prepare [committed, launched) · forward [launched, ready) · apply [ready, applied)

    Where steps overlap: launched behind the step before, it is computed from when that one is ready; ready when the
    host has its tokens, which is after it launched the next one.
    """

    started_ns: int = 0
    plan_from_ns: int = 0
    planned_ns: int = 0
    committed_ns: int = 0
    launched_ns: int = 0
    ready_ns: int = 0
    applied_ns: int = 0


class StepOutcome(msgspec.Struct, frozen=True):
    """Result of one step, as the scheduler, the events and the journal see it: no token values.

    failed   the executor raised: every request of the step ends with `error`, its K/V is discarded
    """

    step: int
    rows: tuple[OutcomeRow, ...]
    times: StepTimes = StepTimes()
    failed: bool = False

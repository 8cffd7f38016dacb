"""Why a token was late: the largest share of the steps in between names the cause."""

from __future__ import annotations

from engine.events import StepCompleted, StepPlanned
from engine.scheduler.plan import PrefillRow, StepKind, StepTimes
from telemetry.stalls import (
    CHUNK_OVERHEAD,
    KEPT_STEPS,
    KERNEL,
    LONG_PREFILL,
    MIXED_SAT_OUT,
    QUEUE_POSITION,
    STALL_CAUSES,
    StepLog,
)


def planned(kind: StepKind, *, tokens: int = 0, chunk_size: int | None = None) -> StepPlanned:
    prefills = (PrefillRow("p", 0, tokens, True),) if tokens else ()
    return StepPlanned(
        0, 1, 0, kind, "fcfs", prefills, ("d",), ("d",), (), (), 0, None, None, None, None, None, False,
        0.5, 0, 1, 0, 0.0, 0, (0, 0, 0, 0), chunk_size=chunk_size,
    )  # fmt: skip


def completed(applied_ns: int) -> StepCompleted:
    return StepCompleted(0, 1, 0, StepKind.DECODE, (), StepTimes(applied_ns=applied_ns), False, (0, 0, 0, 0), 0, 1)


def log_of(*steps: tuple[StepPlanned, int], chunk_size: int | None = 64) -> StepLog:
    log = StepLog(chunk_size)
    for plan, applied in steps:
        log.add(plan, completed(applied))
    return log


def test_the_cause_is_that_of_the_longest_share() -> None:
    log = log_of(
        (planned(StepKind.DECODE), 100),
        (planned(StepKind.EXTEND, tokens=64), 400),
        (planned(StepKind.MIXED, tokens=8), 500),
        (planned(StepKind.MIXED, tokens=64), 900),
        (planned(StepKind.DECODE), 1000),
    )
    assert log.cause(100, 500, queued=False) == MIXED_SAT_OUT
    assert log.cause(400, 500, queued=False) == CHUNK_OVERHEAD
    assert log.cause(400, 900, queued=False) == LONG_PREFILL
    assert log.cause(900, 1000, queued=False) == KERNEL
    assert log.cause(100, 500, queued=True) == QUEUE_POSITION


def test_half_of_the_chunk_limit_is_a_long_prefill_and_so_is_any_without_a_limit() -> None:
    assert log_of((planned(StepKind.MIXED, tokens=32), 10)).cause(0, 10, queued=False) == LONG_PREFILL
    assert log_of((planned(StepKind.MIXED, tokens=31), 10)).cause(0, 10, queued=False) == CHUNK_OVERHEAD
    one = planned(StepKind.MIXED, tokens=1)
    assert log_of((one, 10), chunk_size=None).cause(0, 10, queued=False) == LONG_PREFILL
    dynamic = planned(StepKind.MIXED, tokens=31, chunk_size=48)
    assert log_of((dynamic, 10)).cause(0, 10, queued=False) == LONG_PREFILL


def test_gaps_outside_the_log_are_put_down_to_the_kernel() -> None:
    assert StepLog().cause(0, 10, queued=False) == KERNEL
    log = log_of(*[(planned(StepKind.EXTEND, tokens=1), at) for at in range(1, KEPT_STEPS + 50)])
    assert log.cause(KEPT_STEPS + 49, KEPT_STEPS + 60, queued=False) == KERNEL
    assert log.cause(0, KEPT_STEPS, queued=False) == MIXED_SAT_OUT
    assert len(STALL_CAUSES) == 5

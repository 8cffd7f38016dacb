"""Reasons: which test of SGLang's adder said no, worked out from the numbers that it had."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.scheduler.decision import LedgerView, Reason, Result
from telemetry.sglang.facts import MemoryTest, Pass, Tried, Untried
from telemetry.sglang.reasons import end_of, verdict_of

LEFT = LedgerView(512, 256, 1000.0, 1000)
PASS = Pass(None, None, 3, policy="fcfs", opened=LEFT, closed=LEFT)


def tried(**changes: Any) -> Tried:
    base = Tried("r0", False, 0, 300, 0, 300, False, LEFT, LEFT, "OTHER", MemoryTest(400, 1000, True))
    return msgspec.structs.replace(base, **changes)


def left(**changes: Any) -> LedgerView:
    return msgspec.structs.replace(LEFT, **changes)


REFUSALS = {
    "memory": (
        tried(result="NO_TOKEN", test=MemoryTest(1200, 1000.5, False)),
        PASS,
        (Result.NO_TOKEN, Reason.KV_TOTAL_EXHAUSTED, 1200, 1000.5),
    ),
    "memory now": (
        tried(result="NO_TOKEN", test=MemoryTest(80, 64, False, True, True)),
        PASS,
        (Result.NO_TOKEN, Reason.KV_NOW_EXHAUSTED, 80, 64),
    ),
    "the walk over known ends": (
        tried(result="NO_TOKEN", test=MemoryTest(80, 640, True, True)),
        PASS,
        (Result.NO_TOKEN, Reason.KV_TOTAL_EXHAUSTED, None, None),
    ),
    "a load from the host": (
        tried(result="NO_TOKEN"),
        PASS,
        (Result.NO_TOKEN, Reason.KV_NOW_EXHAUSTED, None, None),
    ),
    "requests of a batch": (
        tried(test=None, batch=2),
        msgspec.structs.replace(PASS, prefill_max=2),
        (Result.OTHER, Reason.PREFILL_MAX_REACHED, 3, 2),
    ),
    "the input ledger without chunks": (
        tried(batch=1, before=left(rem_chunk=None, rem_input=100)),
        PASS,
        (Result.OTHER, Reason.COMPUTE_EXHAUSTED, 304, 100),
    ),
    "less than a page": (
        tried(before=left(rem_chunk=9)),
        PASS,
        (Result.OTHER, Reason.CHUNK_BELOW_PAGE, 16, 9),
    ),
    "less than an alignment": (
        tried(before=left(rem_chunk=200)),
        msgspec.structs.replace(PASS, align=256),
        (Result.OTHER, Reason.CHUNK_BELOW_PAGE, 256, 200),
    ),
    "the slot of the half-done prompt": (
        tried(had_continuation=True),
        msgspec.structs.replace(PASS, policy="shortest-prefill-first"),
        (Result.OTHER, Reason.CHUNK_SLOT_TAKEN, 304, 256),
    ),
    "a spent slice and known lengths": (
        tried(before=left(rem_chunk=-2), test=MemoryTest(80, 640, True, True)),
        PASS,
        (Result.OTHER, Reason.CHUNK_BELOW_PAGE, 1, -2),
    ),
    "none of the tests that have numbers": (
        tried(candidate=100, rest=100),
        PASS,
        (Result.OTHER, Reason.DELAYED, None, None),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_names_the_test_that_said_no_and_its_two_sides(name: str) -> None:
    found, passed, due = REFUSALS[name]
    assert tuple(verdict_of(found, passed, page_size=16)) == due


@pytest.mark.parametrize(
    ("is_continuation", "rest", "reason", "result"),
    [
        (False, 0, Reason.ADMITTED_WHOLE, Result.CONTINUE),
        (False, 44, Reason.ADMITTED_FIRST_CHUNK, Result.CONTINUE),
        (True, 44, Reason.ADMITTED_NEXT_CHUNK, Result.CONTINUES),
        (True, 0, Reason.ADMITTED_LAST_CHUNK, Result.LAST),
    ],
)
def test_an_admission_is_told_by_what_is_left_of_its_prompt(
    is_continuation: bool, rest: int, reason: Reason, result: Result
) -> None:
    answer = None if is_continuation else "CONTINUE"
    found = tried(is_admitted=True, is_continuation=is_continuation, rest=rest, selected=256, result=answer)
    verdict = verdict_of(found, PASS, page_size=16)
    assert (verdict.reason, verdict.result) == (reason, result)


def ended(passed: Pass) -> tuple[Any, ...]:
    end = end_of(passed, [verdict_of(each, passed, page_size=16) for each in passed.tried])
    return (end.stop, end.reason, end.rid, end.not_considered)


def test_the_end_of_a_pass_follows_from_what_was_tried_and_what_was_not() -> None:
    admitted = tried(is_admitted=True, rest=0, selected=300, result="CONTINUE")
    replace = msgspec.structs.replace
    assert ended(replace(PASS, tried=(admitted,), waiting=1)) == ("queue_end", Reason.QUEUE_END, None, 0)
    refused = tried(rid="r1", result="NO_TOKEN", test=MemoryTest(1200, 1000, False))
    assert ended(replace(PASS, tried=(admitted, refused))) == ("result", Reason.KV_TOTAL_EXHAUSTED, "r1", 1)
    spent = replace(admitted, result="OTHER", after=left(rem_chunk=0))
    assert ended(replace(PASS, tried=(spent,))) == ("result", Reason.CHUNK_EXHAUSTED, "r0", 2)
    behind = Untried("r2", 0, 40, 1)
    assert ended(replace(PASS, tried=(admitted,), untried=behind)) == ("slots", Reason.ROWS_EXHAUSTED, "r2", 1)
    assert ended(replace(PASS, tried=(), untried=behind, was_full=True)) == ("slots", Reason.FULL_FLAG_SET, "r2", 2)
    opened = left(rem_input=0)
    assert ended(replace(PASS, opened=opened, untried=behind)) == ("budget", Reason.COMPUTE_EXHAUSTED, "r2", 3)


@pytest.mark.parametrize(
    ("skipped", "reason"),
    [
        ("queue_empty", Reason.QUEUE_END),
        ("full_flag", Reason.FULL_FLAG_SET),
        ("rows", Reason.ROWS_EXHAUSTED),
        ("delayed", Reason.DELAYED),
    ],
)
def test_a_pass_that_was_not_made_says_why(skipped: str, reason: Reason) -> None:
    assert ended(Pass(skipped, "r0", 4)) == ("skipped", reason, "r0", 4)

"""docs/reference/{policies,ledgers,reasons}.md are what the scheduler does, and leave nothing out."""

from __future__ import annotations

import re

import pytest

from engine.config import Policy
from engine.scheduler.decision import Reason, Result
from telemetry import worked_policies as played
from telemetry.scheduler_pages import FOLDER, PAGES, policies, reasons
from telemetry.worked import World, decision
from telemetry.worked_reasons import REASONS


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_current(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "run: make docs"


def test_every_policy_reason_and_result_has_its_heading() -> None:
    for policy in Policy:
        assert f"## `{policy.value}`" in policies()
    page = reasons()
    for each in (*Reason, *Result):
        assert f"### `{each.value}`" in page
    assert REASONS.keys() == set(Reason)


@pytest.mark.parametrize("reason", REASONS)
def test_a_situation_shows_its_reason(reason: Reason) -> None:
    """In a decision, or in the end of the pass; three reasons are told elsewhere, and one situation shows why not."""
    plan, number = REASONS[reason]()
    assert re.search(r"\d", number)
    told = {each.reason for each in plan.decisions}
    if plan.pass_end is not None:
        told.add(plan.pass_end.stopped_by)
    if reason in {Reason.PREEMPTED_FOR, Reason.SHARES_COLD_PREFIX, Reason.NEVER_FITS, Reason.KV_NOW_EXHAUSTED}:
        assert reason not in told
    else:
        assert reason in told


def test_the_pass_of_the_ledgers_page_adds_up() -> None:
    """Two decode rows are charged; p1 takes three pages of compute, a page more of memory, its output, its head."""
    plan = played.ledger_pass("reference")
    opened, (first, second) = plan.budget_open, plan.decisions
    assert opened is not None
    assert (opened.rem_input, opened.rem_chunk) == (128 - 2, 96 - 2)
    assert first.after.rem_chunk == 94 - 48
    assert first.after.remaining_current == opened.remaining_current - 48 - 16 - 32
    assert first.after.remaining_total == pytest.approx(opened.remaining_total - 48 - 16 - 32 - 24)
    assert (first.kv_need, second.selected_extend) == (40 + 24 + 16, 32)


def test_a_shared_head_is_found_and_own_tokens_are_not() -> None:
    world = World()
    world.cache("head", 64)
    world.add("a", 96, head=("head", 64))
    world.add("b", 96)
    plan = world.step()
    assert [each.prefix_len for each in plan.decisions] == [64, 0]
    with pytest.raises(LookupError, match="no decision delayed"):
        decision(plan, Reason.DELAYED)

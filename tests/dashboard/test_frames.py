"""Frames: every number on the page follows from the answers, and adds up."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from dashboard import frames
from telemetry import observe as o

HEAD = {"engine_id": "e", "observe_seq": 1, "step": 1, "t_ns": 0, "t_wall_s": 1000.0}


def ledgers(rem_input: float, rem_chunk: float | None, total: float, current: float) -> o.Ledgers:
    return o.Ledgers(rem_input=rem_input, rem_chunk=rem_chunk, remaining_total=total, remaining_current=current)


def decision(rid: str, order: int, before: o.Ledgers, after: o.Ledgers, reason: str, **more: object) -> o.DecisionRow:
    fields = {
        "step": 7,
        "t_wall_s": 1000.0,
        "is_continuation": False,
        "prefix_len": 0,
        "candidate_extend": 96,
        "selected_extend": 96,
        "extend_end": 96,
        "reserved_new_tokens": 0,
        "is_chunked": False,
        "result": "CONTINUE",
        "admitted": reason.startswith("admitted"),
        **more,
    }
    return o.DecisionRow(rid=rid, order=order, before=before, after=after, reason=reason, **fields)


@pytest.fixture
def worked_pass() -> o.PassRow:
    """Input 128, chunk 96, 8 decode rows; a continuation and an admission go in, a third request is refused."""
    limit, opened = ledgers(128, 96, 1000, 1200), ledgers(120, 88, 992, 1192)
    second, third = ledgers(72, 40, 944, 1144), ledgers(40, 8, 880, 1112)
    rows = (
        decision("A", 0, opened, second, "admitted_last_chunk", is_continuation=True, selected_extend=48),
        decision("B", 1, second, third, "admitted_whole", selected_extend=32),
        decision("C", 2, third, third, "chunk_exhausted", need=48, have=8, stopped_pass=True, selected_extend=0),
    )
    return o.PassRow(
        step=7,
        t_wall_s=1000.0,
        kind="mixed",
        limits=limit,
        budget_open=opened,
        budget_close=third,
        candidates=rows,
        prefill_tokens=80,
        decode_rows=8,
        end="result",
        end_reason="chunk_exhausted",
        end_rid="C",
    )


def test_ledger_bars_show_decode_rows_continuation_admissions_and_what_is_left(worked_pass: o.PassRow) -> None:
    segments = frames.ledger_segments(worked_pass)
    chunk = segments[segments["ledger"] == "chunk"]
    assert list(zip(chunk["kind"], chunk["rid"], chunk["start"], chunk["end"], strict=True)) == [
        ("running", "", 0, 8),
        ("continuation", "A", 8, 56),
        ("admission", "B", 56, 88),
        ("left", "", 88, 96),
    ]
    # The admission of B reserves future output in the total ledger only.
    total = segments[(segments["ledger"] == "KV total") & (segments["rid"] == "B")]
    assert list(total["tokens"]) == [64]


def test_the_refused_candidate_is_drawn_in_the_ledger_that_refused_it(worked_pass: o.PassRow) -> None:
    need = frames.ledger_need(worked_pass)
    assert need.to_dict("records") == [
        {
            "ledger": "chunk",
            "rid": "C",
            "reason": "chunk_exhausted",
            "need": 48,
            "have": 8,
            "start": 88,
            "end": 136,
            "limit": 96,
        }
    ]


def test_a_refusal_that_compared_no_tokens_is_told_but_not_drawn(worked_pass: o.PassRow) -> None:
    refused = worked_pass.candidates[2].model_copy(update={"reason": "rows_exhausted", "need": 1, "have": 0})
    row = worked_pass.model_copy(update={"candidates": (*worked_pass.candidates[:2], refused)})
    assert frames.ledger_need(row).empty
    assert frames.refusal_of(row) == frames.Refusal("C", "rows_exhausted", None, 1, 0)
    everyone_in = worked_pass.model_copy(update={"candidates": worked_pass.candidates[:2]})
    assert frames.refusal_of(everyone_in) is None
    assert frames.ledger_need(everyone_in).empty


def test_a_ledger_without_a_limit_has_no_bar(worked_pass: o.PassRow) -> None:
    row = worked_pass.model_copy(update={"limits": ledgers(128, None, 1000, 1200)})
    assert set(frames.ledger_segments(row)["ledger"]) == {"input", "KV total", "KV current"}


def test_an_over_promised_ledger_has_no_bar(worked_pass: o.PassRow) -> None:
    row = worked_pass.model_copy(update={"limits": ledgers(128, 96, -40, 1200)})
    assert "KV total" not in set(frames.ledger_segments(row)["ledger"])


def test_an_overdraft_lies_beyond_the_limit(worked_pass: o.PassRow) -> None:
    row = worked_pass.model_copy(
        update={"limits": ledgers(64, 96, 1000, 1200), "budget_open": ledgers(56, 88, 992, 1192)}
    )
    spent = frames.ledger_segments(row)
    over = spent[(spent["ledger"] == "input") & (spent["kind"] == "overdraft")]
    assert list(zip(over["start"], over["end"], strict=True)) == [(64, 88)]


def test_bars_of_every_pass_are_whole_and_end_at_what_the_engine_says_is_left(engine: FakeEngine) -> None:
    for row in engine.passes:
        for name, group in frames.ledger_segments(row).groupby("ledger"):
            field = next(key for key, title in frames.LEDGER_TITLES.items() if title == name)
            inside = group[group["kind"] != "overdraft"]
            edges = sorted(zip(inside["start"], inside["end"], strict=True))
            assert edges[0][0] == 0
            assert all(math.isclose(a[1], b[0]) for a, b in pairwise(edges))
            left = getattr(row.budget_close, field)
            spent = group[~group["kind"].isin(["left", "overdraft"])]["tokens"].sum()
            assert math.isclose(getattr(row.limits, field) - spent, left)


def test_steps_show_each_computed_token_once(engine: FakeEngine) -> None:
    answer = engine.answer("/observe/passes", {"n": ["48"]})
    frame = frames.steps_frame(answer)
    for row in answer.passes:
        parts = frame[frame["step"] == row.step]
        assert parts["tokens"].sum() == row.prefill_tokens + row.decode_rows
        assert not parts["part"].duplicated().any()


def test_a_slot_in_which_nothing_was_observed_draws_no_point() -> None:
    points = (
        o.LatencyPoint(t_wall_s=1.0, ttft_count=2, ttft_p50_s=0.1, ttft_p99_s=0.2),
        o.LatencyPoint(t_wall_s=2.0),
        o.LatencyPoint(t_wall_s=3.0, ttft_count=1, ttft_p50_s=0.3, ttft_p99_s=0.3),
    )
    frame = frames.latency_frame(o.LatencyAnswer(**HEAD, slot_s=1.0, points=points))
    assert list(frames.quantile_frame(frame, "ttft")["seconds"]) == [0.1, 0.3, 0.2, 0.3]
    assert frames.quantile_frame(frame, "tbt").empty


def test_fr_49_a_series_never_has_more_than_600_points() -> None:
    points = tuple(o.LatencyPoint(t_wall_s=float(i), waiting=i) for i in range(1000))
    frame = frames.latency_frame(o.LatencyAnswer(**HEAD, slot_s=1.0, points=points))
    assert len(frame) == frames.MAX_POINTS == 600
    assert list(frame["waiting"][[0, 599]]) == [400, 999]


def test_key_quantiles_look_at_the_last_minute_only() -> None:
    def row(rid: str, accepted: float, ttft: float | None) -> o.RequestRow:
        return o.RequestRow(
            rid=rid, state="decode", accepted_wall_s=accepted, prompt_len=1, max_new_tokens=1, ttft_s=ttft
        )

    answer = o.RequestsAnswer(
        **HEAD,
        live=(row("new", 990.0, 2.0), row("none yet", 999.0, None)),
        finished=(row("a", 950.0, 1.0), row("edge", 930.0, 10.0), row("old", 900.0, 39.0)),
    )
    assert frames.ttft_quantiles(answer) == frames.Quantiles(2.0, 10.0, 3)


def test_the_queue_share_weighs_the_ttft_of_the_same_requests() -> None:
    def row(rid: str, accepted: float, ttft: float | None, queue: float | None) -> o.RequestRow:
        return o.RequestRow(
            rid=rid, state="", accepted_wall_s=accepted, prompt_len=1, max_new_tokens=1, ttft_s=ttft, queue_s=queue
        )

    answer = o.RequestsAnswer(
        **HEAD | {"t_wall_s": 1000.0},
        live=(row("a", 990.0, 2.0, 0.0), row("waits", 999.0, None, 1.0)),
        finished=(row("b", 950.0, 6.0, 6.0), row("old", 900.0, 39.0, 39.0)),
    )
    assert frames.queue_share(answer) == 0.75
    assert frames.queue_share(o.RequestsAnswer(**HEAD, live=(), finished=())) is None


def test_key_gaps_are_those_of_the_latest_slot_that_has_any() -> None:
    points = (
        o.LatencyPoint(t_wall_s=1.0, tbt_count=4, tbt_p50_s=0.02, tbt_p99_s=0.09),
        o.LatencyPoint(t_wall_s=2.0),
    )
    assert frames.tbt_quantiles(o.LatencyAnswer(**HEAD, slot_s=1.0, points=points)) == frames.Quantiles(0.02, 0.09, 4)
    assert frames.tbt_quantiles(o.LatencyAnswer(**HEAD, slot_s=1.0, points=())) == frames.Quantiles(None, None, 0)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_a_quantile_is_a_value_that_was_observed_with_enough_below_it(values: list[float], q: float) -> None:
    found = frames.quantile(values, q)
    assert found in values
    assert sum(v <= found for v in values) >= q * len(values) - 1e-9
    assert sum(v < found for v in values) < q * len(values) + 1e-9


def test_mixes_are_ordered_so_that_equal_counts_do_not_jump() -> None:
    assert frames.blocker_mix({"order": 2, "kv_now": 5, "chunk": 2, "rows": 0}) == [
        ("kv_now", 5),
        ("chunk", 2),
        ("order", 2),
    ]


def test_the_queue_keeps_the_engines_order(engine: FakeEngine) -> None:
    answer = engine.answer("/observe/queue", {})
    shuffled = answer.model_copy(update={"entries": answer.entries[::-1]})
    assert list(frames.queue_frame(shuffled)["rid"]) == [entry.rid for entry in answer.entries]
    assert "blocker" in frames.queue_frame(answer.model_copy(update={"entries": ()})).columns


def test_each_page_names_its_owner(engine: FakeEngine) -> None:
    pages = engine.answer("/observe/pages", {})
    for page in range(0, pages.num_pages, 37):
        facts = frames.page_facts(pages, page)
        assert facts.state == o.PAGE_STATES[engine.states[page]]
        assert (facts.owner.owner if facts.owner else "") == engine.owners[page]
    assert frames.page_facts(pages, pages.num_pages) is None
    assert frames.page_facts(pages, -1) is None


def test_an_owner_that_was_not_sent_is_not_taken_for_nobody(engine: FakeEngine) -> None:
    pages = engine.answer("/observe/pages", {})
    held = next(i for i, owner in enumerate(engine.owners) if owner)
    facts = frames.page_facts(pages.model_copy(update={"owners": ()}), held)
    assert facts.owner is None
    assert not facts.is_listed


def test_a_torn_page_map_is_refused(engine: FakeEngine) -> None:
    pages = engine.answer("/observe/pages", {})
    with pytest.raises(ValueError, match="page map of 1025 pages came with 1024 states"):
        frames.page_bytes(pages.model_copy(update={"num_pages": 1025}))


def test_parts_of_ttft_follow_each_other_and_add_up(engine: FakeEngine) -> None:
    line = engine.detail(engine.finished[0].rid).timeline
    parts = frames.parts_frame(line)
    assert list(parts["start"][1:]) == list(parts["end"][:-1])
    assert math.isclose(parts["end"].iloc[-1], line.ttft_ns / 1e9)

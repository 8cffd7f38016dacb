"""Frames: every number on the page follows from the answers, and adds up."""

from __future__ import annotations

import math

import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from dashboard import frames
from telemetry import observe as o

HEAD = {"engine_id": "e", "observe_seq": 1, "step": 1, "t_ns": 0, "t_wall_s": 1000.0}


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


def test_who_waits_is_told_the_queue_so_far(engine: FakeEngine) -> None:
    line = engine.detail(engine.finished[0].rid).timeline
    wait = o.WaitSpan(start_ns=10, end_ns=2_000_000_010, blocker="chunk")
    waiting = line.model_copy(
        update={"admitted_ns": None, "ttft_ns": None, "parts_ns": {"intake": 10}, "waits": (wait,)}
    )
    assert frames.parts_frame(waiting).set_index("part")["seconds"].to_dict() == {"intake": 1e-8, "chunk": 2.0}

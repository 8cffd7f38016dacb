"""Where latency goes: every share on the page adds up to the TTFT it is of, and empty seconds stay empty."""

from __future__ import annotations

import itertools
import math

import pandas as pd
import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from dashboard import frames
from dashboard import frames_latency as fl
from telemetry import observe as o

HEAD = {"engine_id": "e", "observe_seq": 1, "step": 1, "t_ns": 0, "t_wall_s": 1000.0}


def breakdown(**fields: object) -> o.LatencyBreakdown:
    given_fields = {
        "slot_s": 5.0,
        "window_s": 600.0,
        "slots": (),
        "ttft_objective_s": 1.0,
        "gap_objective_s": 0.25,
        "gap_bounds_s": (0.1, 0.2, 0.3),
        "gap_counts": (0, 0, 0, 0),
        "gaps": 0,
        "late": {},
        "firsts": (),
        "firsts_total": 0,
        "deciles": (),
        "tails": (),
        **fields,
    }
    return o.LatencyBreakdown(**HEAD, **given_fields)


@pytest.fixture
def told(engine: FakeEngine) -> o.LatencyBreakdown:
    return engine.answer("/observe/breakdown", {})


times = st.integers(0, 10**12)


@given(
    parts=st.dictionaries(st.sampled_from(o.TTFT_PARTS), times),
    blockers=st.dictionaries(st.sampled_from(o.BLOCKERS), times, min_size=1),
    refused=times,
)
def test_causes_add_up_to_ttft(parts: dict[str, int], blockers: dict[str, int], refused: int) -> None:
    refused = min(refused, sum(blockers.values()))
    # As the engine promises: blockers are the queue and what was refused between two chunks.
    parts = {**parts, "queue": sum(blockers.values()) - refused}
    parts["between_chunks"] = parts.get("between_chunks", 0) + refused
    causes = fl.causes_ns(parts, blockers, refused)
    assert sum(causes.values()) == sum(parts.values())
    assert "queue" not in causes
    assert [cause for cause in fl.CAUSES if cause in causes] == list(causes)


def test_a_word_of_a_newer_engine_is_kept() -> None:
    assert fl.causes_ns({"intake": 1, "warming": 2}, {"moon": 3}, 0) == {"intake": 1, "moon": 3, "warming": 2}


def test_each_bar_of_the_stack_is_the_mean_ttft_of_its_slot(told: o.LatencyBreakdown) -> None:
    frame = fl.stack_frame(told)
    slots = {round(slot.t_wall_s, 3): slot for slot in told.slots if slot.count}
    assert len(slots) > 2
    for at, bars in frame.groupby("at"):
        slot = slots.pop(round(pd.Timestamp(at).timestamp(), 3))
        edges = bars[["low", "high"]].to_numpy()
        assert edges[0][0] == 0
        assert all(math.isclose(one[1], two[0]) for one, two in itertools.pairwise(edges))
        assert math.isclose(edges[-1][1], slot.ttft_ns / slot.count / 1e9, rel_tol=1e-9)
        assert (bars["at"] - bars["from"]).dt.total_seconds().to_list() == [told.slot_s] * len(bars)
    assert slots == {}


def test_a_slot_without_first_tokens_has_no_bar() -> None:
    slots = (o.PartsSlot(t_wall_s=5.0, gaps=4), o.PartsSlot(t_wall_s=15.0, count=1, ttft_ns=7, parts_ns={"emit": 7}))
    frame = fl.stack_frame(breakdown(slots=slots))
    assert frame["at"].dt.second.to_list() == [15]


def test_shares_of_all_causes_are_the_whole(told: o.LatencyBreakdown) -> None:
    for tail in told.tails:
        assert math.isclose(sum(share for _, _, share in fl.shares(tail)), 1.0)


def test_the_sentence_about_p99_carries_its_numbers() -> None:
    tail = {"q": 0.99, "ttft_s": 8.0, "count": 2, "ttft_ns": 20_000_000_000}
    tails = (
        o.TailShare(q=0.0, ttft_s=0.1, count=150, ttft_ns=9, parts_ns={"queue": 9}, blockers_ns={"rows": 9}),
        o.TailShare(
            **tail,
            parts_ns={"queue": 15_000_000_000, "chunk_forward": 5_000_000_000},
            blockers_ns={"kv_total": 12_000_000_000, "order": 3_000_000_000},
        ),
    )
    said = fl.queue_sentence(breakdown(tails=tails))
    assert said is not None
    assert said[0] == "75\u00a0% of p99 TTFT is queueing"
    for number in ("slowest 2 of 150", "8.00\u00a0s or longer", "10.0\u00a0s on average", "7.50\u00a0s were spent"):
        assert number in said[1]
    assert "KV total (future output of running requests is promised the rest), 6.00\u00a0s" in said[1]
    assert fl.queue_sentence(breakdown()) is None


def test_the_order_names_what_ended_the_passes() -> None:
    spent = {"kv_total_exhausted": 9, "chunk_exhausted": 1}
    said = fl.with_order("order", spent)
    assert said == "order (passes ended by KV total exhausted 90\u00a0%, chunk exhausted 10\u00a0%)"
    assert fl.with_order("chunk", spent) == "chunk"
    assert fl.with_order("order", {}) == "order"


def test_the_histogram_has_every_gap_once_and_ends_where_gaps_end(told: o.LatencyBreakdown) -> None:
    frame = fl.gap_frame(told)
    assert frame["count"].sum() == told.gaps > 0
    assert frame["share"].sum() == pytest.approx(1)
    assert frame["count"].iloc[0] > 0
    assert frame["count"].iloc[-1] > 0
    assert (frame["from"] < frame["to"]).all()
    assert list(frame["to"][:-1]) == list(frame["from"][1:])


def test_gaps_beyond_both_ends_have_a_bar_of_their_own() -> None:
    frame = fl.gap_frame(breakdown(gap_counts=(3, 0, 0, 1), gaps=4))
    assert (frame["from"].iloc[0], frame["to"].iloc[-1]) == (pytest.approx(0.1 / 1.5), pytest.approx(0.45))
    assert frame["late"].to_list() == [False, False, False, True, True]


def test_the_bar_that_holds_the_objective_is_cut_there_with_the_late_ones_beyond() -> None:
    frame = fl.gap_frame(breakdown(gap_counts=(3, 0, 5, 1), gaps=9, late={"kernel": 2, "emit": 1}))
    assert frame["from"].to_list()[2:4] == [0.2, 0.25]
    assert frame["to"].to_list()[2:4] == [0.25, 0.3]
    assert frame["count"].to_list() == [3, 0, 3, 2, 1]
    assert frame[frame["late"]]["count"].sum() == 3


def test_late_tokens_are_told_by_cause_most_frequent_first() -> None:
    frame = fl.stall_frame(breakdown(late={"kernel": 1, "long_prefill": 3}))
    assert frame["cause"].to_list() == ["long_prefill", "kernel"]
    assert frame["said"][0] == "long prefill: a long piece of a prompt in its step · 3 tok, 75\u00a0%"
    assert fl.stall_frame(breakdown()).empty


def test_objectives_count_what_is_within(told: o.LatencyBreakdown) -> None:
    deciles = (
        o.ObjectiveShare(prompt_from=1, prompt_to=9, count=4, within=3),
        o.ObjectiveShare(prompt_from=10, prompt_to=10, count=1, within=0),
    )
    some = breakdown(deciles=deciles, firsts_total=5, gaps=200, late={"kernel": 3})
    assert fl.objective_lines(some) == [
        ("60\u00a0%", "3 of 5 first tokens within 1\u00a0s"),
        ("98\u00a0%", "197 of 200 gaps between tokens within 250\u00a0ms"),
    ]
    frame = fl.decile_frame(some)
    assert list(zip(frame["prompts"], frame["share"], strict=True)) == [("1–9", 0.75), ("10", 0.0)]
    assert fl.objective_lines(breakdown()) == []
    assert fl.decile_frame(told)["count"].sum() == told.firsts_total


def test_each_point_has_its_dominant_cause(told: o.LatencyBreakdown) -> None:
    frame = fl.first_frame(told)
    assert len(frame) == len(told.firsts) <= 1000
    assert set(frame["cause"]) <= set(fl.CAUSES)
    assert sum(n for _, n in fl.cause_mix(frame)) == len(frame)
    waiting = {first.rid for first in told.firsts if first.blocker}
    assert set(frame[frame["kind"] == "waiting"]["rid"]) == waiting


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "250\u00a0ms"), (1.0, "1\u00a0s"), (5.0, "5\u00a0s"), (600.0, "10\u00a0min")]
)
def test_durations_that_were_chosen_are_said_plainly(seconds: float, text: str) -> None:
    assert fl.plain(seconds) == text


def test_no_line_joins_over_seconds_in_which_nothing_was_observed() -> None:
    seen = [0.1, 0.2, None, None, 0.3, 0.4, None]
    points = tuple(
        o.LatencyPoint(t_wall_s=1000.0 + at, tbt_count=0 if one is None else 1, tbt_p50_s=one, tbt_p99_s=one)
        for at, one in enumerate(seen)
    )
    frame = frames.latency_frame(o.LatencyAnswer(**HEAD, slot_s=1.0, points=points))
    long = frames.quantile_frame(frame, "tbt")
    p50 = long[long["quantile"] == "p50"]
    runs = {number: part["seconds"].to_list() for number, part in p50.groupby("run")}
    assert list(runs.values()) == [[0.1, 0.2], [0.3, 0.4]]
    assert frames.quantile_frame(frame, "ttft").empty

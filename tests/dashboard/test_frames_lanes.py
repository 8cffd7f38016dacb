"""Lanes drawn: which are shown, each stretch with its own cause and times, and what is left out is said."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine

from dashboard import charts_lanes
from dashboard import frames_lanes as fl
from dashboard.theme import DARK, LIGHT, Palette
from telemetry import observe as o

S = 1_000_000_000


def lane(rid: str, accepted: int = 0, **fields: object) -> o.Lane:
    given = {"state": "finished", "end_ns": accepted + 10 * S, "accepted_wall_s": 1000.0, "prompt_len": 4, **fields}
    return o.Lane(rid=rid, accepted_ns=accepted, **given)


def span(kind: str, start: int, end: int, **fields: object) -> o.LaneSpan:
    return o.LaneSpan(kind=kind, start_ns=start * S, end_ns=end * S, **fields)


@pytest.fixture
def three() -> list[o.Lane]:
    """`quick` came first and waited least; `slow` had its first token last; `stuck` still waits."""
    return [
        lane("quick", 0, spans=(span("waiting", 0, 1, blocker="rows"),), first_token_ns=2 * S),
        lane("slow", S, spans=(span("waiting", 1, 4, blocker="chunk"), span("chunk", 4, 9)), first_token_ns=9 * S),
        lane("stuck", 2 * S, spans=(span("waiting", 2, 9, blocker="kv_total"),), end_ns=9 * S),
    ]


@pytest.mark.parametrize(
    ("by", "n", "expected"),
    [
        ("arrival", 2, ["slow", "stuck"]),
        ("ttft", 1, ["slow"]),
        ("ttft", 2, ["slow", "stuck"]),
        ("waiting", 1, ["stuck"]),
        ("waiting", 9, ["quick", "slow", "stuck"]),
    ],
)
def test_lanes_are_picked_by_an_order_and_shown_by_arrival(
    three: list[o.Lane], by: str, n: int, expected: list[str]
) -> None:
    assert [one.rid for one in fl.chosen_lanes(three, n, by)] == expected
    assert set(fl.ORDERS) == set(fl._RANKS)


def test_a_stretch_has_its_cause_and_both_clocks(three: list[o.Lane]) -> None:
    frame = fl.span_frame(three)
    slow = frame[frame["rid"] == "slow"]
    # The blocker `chunk` is not a prefill chunk.
    assert slow["cause"].to_list() == ["chunk", "prefill"]
    assert slow["from_s"].to_list() == [0, 3]
    assert slow["to"].dt.second.to_list() == [1003 % 60, 1008 % 60]
    assert slow["seconds"].to_list() == [3, 5]


def test_words_of_a_stretch_carry_its_numbers() -> None:
    waited = span("waiting", 0, 1, blocker="order", reason="kv_total_exhausted", who="other", passes=3)
    assert fl.span_words(waited) == "order · KV total exhausted at other, 3 passes"
    assert (
        fl.span_words(span("chunk", 0, 1, step=7, tokens=96, decode_rows=8)) == "step 7: 96 tok, beside 8 decode rows"
    )
    assert fl.span_words(span("between", 0, 1)) == "between chunks"


def test_late_tokens_lie_over_the_decode_with_their_cause() -> None:
    late = o.Stall(start_ns=3 * S, end_ns=5 * S, cause="long_prefill")
    frame = fl.span_frame([lane("r", spans=(span("decode", 2, 8),), stalls=(late,))])
    assert list(zip(frame["kind"], frame["words"], frame["seconds"], strict=True)) == [
        ("decode", "decode", 6),
        ("late", "late token: long prefill", 2),
    ]


def test_moments_of_a_life_are_marked() -> None:
    frame = fl.mark_frame([lane("r", retracted_ns=(4 * S,), first_token_ns=2 * S, finish="stop")])
    assert dict(zip(frame["mark"], frame["at_s"], strict=True)) == {"retracted": 4, "first token": 2, "end": 10}
    assert fl.mark_frame([lane("r")]).empty


def test_totals_are_the_sums_of_stretches(engine: FakeEngine) -> None:
    lanes = engine.answer("/observe/lanes", {"n": ["80"]}).lanes
    totals = dict(fl.cause_totals(lanes))
    spans = [one for each in lanes for one in each.spans]
    waited = sum(one.end_ns - one.start_ns for one in spans if one.kind == "waiting") / S
    assert sum(totals[name] for name in o.BLOCKERS if name in totals) == pytest.approx(waited)
    assert set(totals) <= {*o.BLOCKERS, *fl.DONE}


def test_what_is_left_out_is_said() -> None:
    assert fl.left_out_words([lane("r")]) == ""
    assert fl.left_out_words([lane("r", spans_left_out=3), lane("q", spans_left_out=2)]) == (
        "5 short stretches are left out."
    )


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_no_two_causes_share_a_colour_in_one_picture(colours: Palette) -> None:
    causes = [*o.BLOCKERS, *charts_lanes.work_colours(colours)]
    assert len(set(causes)) == len(causes), "a blocker and a kind of work have one name"
    assert len({charts_lanes.lane_colour(colours, cause) for cause in causes}) == len(causes)
    assert set(charts_lanes.work_colours(colours)) == set(fl.DONE)

"""One pass drawn: bars end where its ledgers ended, places are its own, and nothing is of another pass."""

from __future__ import annotations

import json
import math

import pytest
from fake_engine import FakeEngine

from dashboard import frames, tables
from dashboard import frames_pass as fp
from dashboard.theme import DARK, LIGHT
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


def of(row: o.PassRow, ledger: str) -> fp.Waterfall:
    return next(one for one in fp.waterfalls(row) if one.ledger == ledger)


def test_a_waterfall_falls_from_the_limit_over_everyone_to_what_is_left(worked_pass: o.PassRow) -> None:
    chunk = of(worked_pass, "rem_chunk")
    assert [(bar.kind, bar.label, bar.start, bar.end) for bar in chunk.bars] == [
        ("limit", "limit", 0, 96),
        ("running", "decode rows", 88, 96),
        ("continuation", "A", 40, 88),
        ("admission", "B", 8, 40),
        ("left", "left", 0, 8),
        ("need", "C", 0, 48),
    ]
    assert (chunk.refused, chunk.bars[-1].have) == (True, 8)
    # The admission of B reserves future output in the total ledger only.
    total = {bar.label: bar.amount for bar in of(worked_pass, "remaining_total").bars}
    assert total["B"] == -64


def test_only_the_ledger_that_refused_shows_the_need(worked_pass: o.PassRow) -> None:
    assert [one.ledger for one in fp.waterfalls(worked_pass) if one.refused] == ["rem_chunk"]
    needs = [one.ledger for one in fp.waterfalls(worked_pass) if any(bar.kind == "need" for bar in one.bars)]
    assert needs == ["rem_chunk"]


def test_a_refusal_that_compared_no_tokens_is_told_but_not_drawn(worked_pass: o.PassRow) -> None:
    refused = worked_pass.candidates[2].model_copy(update={"reason": "rows_exhausted", "need": 1, "have": 0})
    row = worked_pass.model_copy(update={"candidates": (*worked_pass.candidates[:2], refused)})
    assert not any(one.refused for one in fp.waterfalls(row))
    assert frames.refusal_of(row) == frames.Refusal("C", "rows_exhausted", None, 1, 0)
    assert (
        "rows exhausted (rows: needs 1 with those of its pass, max_running_requests leaves 0)"
        in fp.story(row, LIGHT)["ending"]
    )


def test_a_ledger_without_a_limit_says_so(worked_pass: o.PassRow) -> None:
    row = worked_pass.model_copy(update={"limits": ledgers(128, None, 1000, 1200)})
    panel = next(panel for panel in fp.story(row, LIGHT)["ledgers"] if panel["code"] == "rem_chunk")
    assert (panel["limit"], panel["bars"], panel["none"]) == (None, [], "no limit")


def _refused(row: o.PassRow, reason: str, need: float, have: float, prefix: int) -> o.PassRow:
    a, b, c = row.candidates
    changes = {"reason": reason, "need": need, "have": have, "prefix_len": prefix}
    return row.model_copy(update={"candidates": (a, b, c.model_copy(update=changes))})


def _told(row: o.PassRow, ledger: str) -> tuple[list[tuple[str, float, float]], dict[str, str]]:
    """Bars from `left` on, and the amounts that stand beside them."""
    bars = [(bar.label, bar.start, bar.end) for bar in of(row, ledger).bars if bar.kind != "limit"]
    panel = next(panel for panel in fp.story(row, LIGHT)["ledgers"] if panel["code"] == ledger)
    at = next(at for at, (label, _, _) in enumerate(bars) if label == "left")
    return bars[at:], {bar["label"]: bar["amount"] for bar in panel["bars"]}


@pytest.mark.parametrize("have", [300.0, -286.0])
def test_what_is_left_less_its_locked_prefix_is_what_the_refused_request_has(
    worked_pass: o.PassRow, have: float
) -> None:
    """Below zero too: `left 880` stood above `has −286`, and nothing between them."""
    row = _refused(worked_pass, "kv_total_exhausted", 392, have, 1200)
    bars, amounts = _told(row, "remaining_total")
    assert bars == [("left", 0, 880), ("its cached prefix, locked", have, 880), ("C", 0, 392)]
    locked, says = fp.f.tokens(880 - have), fp.f.tokens(have)
    assert amounts["its cached prefix, locked"] == f"−{locked}"
    assert amounts["C"] == f"needs 392, has {says}"
    assert of(row, "remaining_total").low == min(0, have)
    assert fp.story(row, LIGHT)["ending"].endswith(
        f"It needs 392 tok, there are {says}: the 880 left, less {locked} of its cached prefix, which count as room "
        "until it locks them."
    )


def test_other_differences_between_left_and_have_have_other_names(worked_pass: o.PassRow) -> None:
    """A test in whole pages may find more than the ledger says, and one of known lengths looks ahead."""
    bars, amounts = _told(_refused(worked_pass, "kv_now_exhausted", 1200, 1120, 64), "remaining_current")
    assert bars == [("left", 0, 1112), ("counted in whole pages", 1112, 1120), ("C", 0, 1200)]
    assert amounts["counted in whole pages"] == "+8"
    bars, amounts = _told(_refused(worked_pass, "kv_total_exhausted", 900, 600, 0), "remaining_total")
    assert bars == [("left", 0, 880), ("at the tightest moment to come", 600, 880), ("C", 0, 900)]
    assert amounts["at the tightest moment to come"] == "−280"


def test_one_that_was_refused_before_others_took_more_had_what_was_left_then(worked_pass: o.PassRow) -> None:
    row = worked_pass.model_copy(update={"budget_close": ledgers(40, 2, 880, 1112)})
    bars, _ = _told(row, "rem_chunk")
    assert bars == [("left", 0, 2), ("left for it", 0, 8), ("C", 0, 48)]


def test_what_was_overdrawn_lies_below_zero(worked_pass: o.PassRow) -> None:
    row = worked_pass.model_copy(update={"budget_close": ledgers(40, -6, 880, 1112)})
    chunk = of(row, "rem_chunk")
    over = next(bar for bar in chunk.bars if bar.kind == "overdraft")
    assert (over.start, over.end, chunk.low) == (-6, 0, -6)


def test_a_charge_in_whole_pages_says_for_how_many_tokens(worked_pass: o.PassRow) -> None:
    """Without it a piece of 21 tokens takes 32 from a ledger, and nothing says why."""
    a, b, c = worked_pass.candidates
    short = worked_pass.model_copy(update={"candidates": (a, b.model_copy(update={"selected_extend": 21}), c)})
    panels = {panel["code"]: panel for panel in fp.story(short, LIGHT)["ledgers"]}
    for ledger in ("rem_input", "rem_chunk"):
        bars = {bar["label"]: bar for bar in panels[ledger]["bars"]}
        assert bars["B"]["amount"] == "−32 for 21"
        assert bars["B"]["title"].endswith("charged in whole pages")
        assert bars["A"]["amount"] == "−48"
    memory = {bar["label"]: bar for bar in panels["remaining_total"]["bars"]}
    assert memory["B"]["amount"] == "−64", "there its promise is charged too"


def test_many_admissions_are_summed_in_the_middle(worked_pass: o.PassRow) -> None:
    opened = ledgers(120, 88, 992, 1192)
    rows = tuple(
        decision(f"r{at}", at, ledgers(120 - at, 88, 992, 1192), ledgers(119 - at, 88, 992, 1192), "admitted_whole")
        for at in range(40)
    )
    row = worked_pass.model_copy(
        update={"candidates": rows, "budget_open": opened, "budget_close": ledgers(80, 88, 992, 1192)}
    )
    bars = [bar for bar in of(row, "rem_input").bars if bar.kind == "admission"]
    assert len(bars) == fp.SHOWN_ADMISSIONS
    assert sum(bar.amount for bar in bars) == -40
    assert bars[-2].label == "35 more"
    assert (bars[-2].start, bars[-2].end) == (bars[-1].end, bars[-3].start)


def test_bars_of_every_pass_meet_and_end_at_what_the_engine_says_is_left(engine: FakeEngine) -> None:
    drawn = 0
    for row in engine.passes:
        for one in fp.waterfalls(row):
            taken = [bar for bar in one.bars if bar.kind in {"running", "continuation", "admission"}]
            left = getattr(row.budget_close, one.ledger)
            at = one.limit
            for bar in taken:
                assert math.isclose(bar.end, at)
                at = bar.start
            assert math.isclose(at, left)
            drawn += len(taken)
    assert drawn > 100


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_title_bars_queue_and_table_are_of_one_pass(engine: FakeEngine, colours: object) -> None:
    for row in list(engine.passes)[-60:]:
        story = fp.story(row, colours)
        table = tables.candidates_table(row, colours)
        assert story["step"] == row.step
        digits = str(row.step) if row.step < 1000 else f"{row.step:,}".replace(",", "\u202f")
        assert story["title"] == f"Step {digits}"
        assert table.note.startswith(f"step {digits} · ")
        assert {one["id"].split("/")[0] for one in table.rows} <= {str(row.step)}
        assert {move["rid"] for move in story["queue"]["rows"]} == {move.rid for move in row.moves}
        for panel in story["ledgers"]:
            close = getattr(row.budget_close, panel["code"])
            left = next(bar for bar in panel["bars"] if bar["kind"] in {"left", "overdraft"})
            assert float(left["amount"].replace("\u202f", "").replace("−", "-")) == pytest.approx(close, abs=0.06)
        json.dumps(story, allow_nan=False)


def test_bars_stay_within_their_track_and_a_longer_need_is_cut(worked_pass: o.PassRow) -> None:
    refused = worked_pass.candidates[2].model_copy(update={"need": 4000})
    row = worked_pass.model_copy(update={"candidates": (*worked_pass.candidates[:2], refused)})
    bars = [bar for panel in fp.story(row, LIGHT)["ledgers"] for bar in panel["bars"]]
    assert all(0 <= bar["from"] <= bar["to"] <= 1 for bar in bars)
    (need,) = [bar for bar in bars if bar["kind"] == "need"]
    assert (need["cut"], need["to"], need["amount"]) == (True, 1.0, "needs 4\u202f000, has 8")


@pytest.mark.parametrize(
    ("end", "reason", "words"),
    [
        ("skipped", "queue_end", "the queue was empty"),
        ("skipped", "full_flag_set", "an earlier one found the batch full"),
        ("skipped", "rows_exhausted", "8 requests ran, as many as may at once. 3 wait"),
        ("skipped", "chunk_exhausted", "decode rows sat out the last step"),
        ("budget", "compute_exhausted", "before it looked at anybody: compute exhausted"),
        (None, None, "made no pass"),
    ],
)
def test_an_empty_pass_says_why(worked_pass: o.PassRow, end: str | None, reason: str | None, words: str) -> None:
    row = worked_pass.model_copy(
        update={"candidates": (), "end": end, "end_reason": reason, "num_running": 8, "num_waiting": 3}
    )
    said = fp.why_empty(row)
    assert said is not None
    assert words in said
    assert fp.why_empty(worked_pass) is None


def test_empty_passes_of_one_reason_in_a_row_are_one_line(worked_pass: o.PassRow) -> None:
    def empty(step: int, reason: str) -> o.PassRow:
        return worked_pass.model_copy(update={"step": step, "candidates": (), "end": "skipped", "end_reason": reason})

    rows = (empty(1, "queue_end"), empty(2, "queue_end"), worked_pass.model_copy(update={"step": 3}))
    rows += (empty(4, "full_flag_set"), empty(5, "queue_end"), empty(6, "queue_end"))
    groups = fp.pass_groups(o.PassesAnswer(**HEAD, passes=rows))
    assert [[row.step for row in group.rows] for group in groups] == [[6, 5], [4], [3], [2, 1]]
    table = tables.passes_table(groups, 6)
    assert [row["cells"][0][0] for row in table.rows] == ["5–6", "4", "3", "1–2"]


def test_a_folded_line_tells_the_decode_rows_and_the_kinds_of_all_its_steps(worked_pass: o.PassRow) -> None:
    def empty(step: int, decode_rows: int) -> o.PassRow:
        kind = "decode" if decode_rows else "idle"
        update = {"step": step, "candidates": (), "end": "skipped", "decode_rows": decode_rows, "kind": kind}
        return worked_pass.model_copy(update=update)

    rows = (empty(1, 2), empty(2, 1), empty(3, 0))
    (line,) = tables.passes_table(fp.pass_groups(o.PassesAnswer(**HEAD, passes=rows)), 3).rows
    assert line["cells"][5] == ["0–2", 2]
    assert line["cells"][6] == "decode, idle"
    (line,) = tables.passes_table(fp.pass_groups(o.PassesAnswer(**HEAD, passes=rows[:1])), 1).rows
    assert line["cells"][5] == ["2", 2]


def test_the_queue_says_who_moved_and_by_what(worked_pass: o.PassRow) -> None:
    moves = (
        o.QueueMove(rid="a", before=2, after=0, key=64),
        o.QueueMove(rid="b", before=0, after=1, key=16),
        o.QueueMove(rid="c", before=1),
    )
    row = worked_pass.model_copy(
        update={"policy": "lpm", "order_key": "cached_tokens", "moves": moves, "waiting_before": 9}
    )
    queue = fp.story(row, LIGHT)["queue"]
    assert queue["heads"][2] == "Cached prefix tok"
    assert "the longest cached prefix first" in queue["rule"]
    assert "2 of 2 looked at stood elsewhere by entry; 9 waited." in queue["rule"]
    shown = [(one["after"], one["rid"], one["key"], one["before"], one["moved"], one["way"]) for one in queue["rows"]]
    assert shown == [
        ("1", "a", "64", "3", "▲ 2", "up"),
        ("2", "b", "16", "1", "▼ 1", "down"),
        ("–", "c", "–", "2", "not reached", ""),
    ]


def test_an_order_that_no_record_explains_is_said_to_be_so(worked_pass: o.PassRow) -> None:
    row = worked_pass.model_copy(update={"policy": "random", "order_key": ""})
    assert "What random sorts by is not in the records." in fp.story(row, LIGHT)["queue"]["rule"]


def test_a_pass_of_an_older_engine_has_no_queue_and_no_error(worked_pass: o.PassRow) -> None:
    old = o.PassRow.model_validate(worked_pass.model_dump(exclude={"moves", "order_key", "waiting_before"}))
    assert fp.story(old, LIGHT)["queue"]["rows"] == []


def test_a_request_whose_own_prefix_is_the_room_is_shown_what_locking_it_takes(worked_pass: o.PassRow) -> None:
    closed = worked_pass.budget_close
    assert closed is not None
    assert closed.remaining_total == 880
    last = worked_pass.candidates[-1].model_copy(
        update={"reason": "kv_total_exhausted", "need": 850.0, "have": 800.0, "result": "NO_TOKEN"}
    )
    row = worked_pass.model_copy(
        update={"candidates": (*worked_pass.candidates[:-1], last), "end_reason": "kv_total_exhausted"}
    )
    panel = next(one for one in fp.story(row, LIGHT)["ledgers"] if one["code"] == "remaining_total")
    assert [bar["amount"] for bar in panel["bars"]][-3:] == ["880", "−80", "needs 850, has 800"]


def test_a_step_that_overlaps_says_how_long_the_one_before_was_computed(worked_pass: o.PassRow) -> None:
    alone = worked_pass.model_copy(update={"step_s": 0.06})
    assert "took 60\N{NO-BREAK SPACE}ms" in fp.story(alone, LIGHT)["facts"]
    overlapped = alone.model_copy(update={"behind_s": 0.03})
    assert (
        "took 60\N{NO-BREAK SPACE}ms, 30\N{NO-BREAK SPACE}ms of it behind the step before"
        in fp.story(overlapped, LIGHT)["facts"]
    )

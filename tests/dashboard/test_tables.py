"""Tables: rows fit their columns, totals are told, and ids of strangers stay text."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from fake_engine import FakeEngine

from dashboard import frames, tables
from dashboard.frames_pass import pass_groups
from dashboard.page_map import OWNERS_ALWAYS_BELOW, page_map_data
from dashboard.theme import DARK, LIGHT
from telemetry import observe as o


def all_tables(engine: FakeEngine) -> list[tables.Table]:
    queue = engine.answer("/observe/queue", {})
    requests = engine.answer("/observe/requests", {})
    passes = engine.answer("/observe/passes", {"n": ["48"]})
    examined = next(row for row in passes.passes if row.candidates)
    pages = engine.answer("/observe/pages", {})
    return [
        tables.queue_table(frames.queue_frame(queue), queue.total, LIGHT),
        tables.requests_table(frames.requests_frame(requests.live), LIGHT, note="", live=True),
        tables.requests_table(frames.requests_frame(requests.finished), DARK, note="", live=False),
        tables.passes_table(pass_groups(passes), 48),
        tables.candidates_table(examined, LIGHT),
        tables.decisions_table(engine.finished[0].decisions, DARK, with_step=True),
        tables.owners_table(pages.owners, pages.num_pages, pages.owners_total, LIGHT),
    ]


def test_every_row_has_a_cell_per_column_and_travels_as_json(engine: FakeEngine) -> None:
    for table in all_tables(engine):
        assert table.rows
        assert all(len(row["cells"]) == len(table.columns) for row in table.rows)
        assert len({row["id"] for row in table.rows}) == len(table.rows)
        json.dumps(table.rows, allow_nan=False)


def test_an_empty_table_says_what_to_do() -> None:
    fresh = FakeEngine(busy=False)
    queue = fresh.answer("/observe/queue", {})
    tables_of_nothing = [
        tables.queue_table(frames.queue_frame(queue), 0, LIGHT),
        tables.requests_table(frames.requests_frame(()), LIGHT, note="", live=True),
        tables.requests_table(frames.requests_frame(()), LIGHT, note="", live=False),
        tables.passes_table([], 0),
        tables.owners_table([], 10, 0, LIGHT),
    ]
    for table in tables_of_nothing:
        assert table.rows == []
        assert all(table.empty)


def test_a_cut_queue_tells_its_total(engine: FakeEngine) -> None:
    for _ in range(800):
        engine.add(16, 4)
    queue = engine.answer("/observe/queue", {"limit": ["500"]})
    table = tables.queue_table(frames.queue_frame(queue), queue.total, LIGHT)
    assert len(table.rows) == 500
    assert table.note == f"500 of {queue.total} waiting"
    assert len(json.dumps(table.rows)) < 300_000, "a refresh must stay under 300 kB"


def test_a_queue_row_shows_reason_need_have_and_who_stopped_the_pass() -> None:
    entries = (
        o.QueueEntry(
            rid="first", position=0, age_s=4.0, prompt_len=800, matched_len=64, blocker="kv_total",
            reason="kv_total_exhausted", need=912.5, have=300, times_passed_over=3,
        ),
        o.QueueEntry(
            rid="second", position=1, state="retracted", age_s=1.0, prompt_len=100, output_len=7, blocker="order",
            reason="kv_total_exhausted", who_stopped="first",
        ),
    )  # fmt: skip
    head = {"engine_id": "e", "observe_seq": 1, "step": 1, "t_ns": 0, "t_wall_s": 1.0}
    queue = o.QueueAnswer(**head, entries=entries, total=2, by_blocker={"kv_total": 1, "order": 1})
    first, second = tables.queue_table(frames.queue_frame(queue), 2, LIGHT).rows

    def texts(row: dict[str, list[str | list[object]]]) -> list[object]:
        return [cell[0] if isinstance(cell, list) else cell for cell in row["cells"]]

    assert texts(first) == ["0", "first", "KV total", "912.5", "300", "4.00\u00a0s", "3", "800", "64", "–"]
    assert texts(second) == ["1", "second", "order · retracted", "–", "–", "1.00\u00a0s", "0", "107", "0", "first"]
    assert first["cells"][5][2] == 1.0
    assert second["cells"][5][2] == 0.25


def test_a_test_that_counts_requests_says_so_beside_tokens() -> None:
    frame = pd.DataFrame(
        [
            o.QueueEntry(
                rid="r", position=0, age_s=1.0, prompt_len=1, blocker="rows", reason="rows_exhausted", need=2, have=1
            ).model_dump()
        ]
    )
    cells = tables.queue_table(frame, 1, LIGHT).rows[0]["cells"]
    assert [cells[3], cells[4]] == [["2 rows", 2.0], ["1 row", 1.0]]


def test_a_word_of_a_newer_engine_is_shown_as_it_is() -> None:
    frame = pd.DataFrame(
        [o.QueueEntry(rid="r", position=0, age_s=1.0, prompt_len=1, blocker="lunar_phase").model_dump()]
    )
    row = tables.queue_table(frame, 1, LIGHT).rows[0]
    assert row["cells"][2][0] == "lunar phase"


def test_a_decision_shows_each_ledger_before_and_after(engine: FakeEngine) -> None:
    row = next(p for p in reversed(engine.passes) if any(c.admitted for c in p.candidates))
    chosen = next(c for c in row.candidates if c.admitted)
    cells = tables.decisions_table([chosen], LIGHT).rows[0]["cells"]
    assert cells[8][0] == f"{chosen.before.rem_input:g} → {chosen.after.rem_input:g}"
    assert cells[9][0] == f"{chosen.before.rem_chunk:g} → {chosen.after.rem_chunk:g}"


@pytest.mark.parametrize("mode", ["state", "owner"])
def test_the_page_map_counts_every_page_in_its_legend(engine: FakeEngine, mode: str) -> None:
    pages = engine.answer("/observe/pages", {})
    data = page_map_data(pages, LIGHT, mode=mode, chosen=5)
    counted = sum(int(str(amount).replace("\u202f", "")) for _, _, amount in data["legend"])
    assert counted == pages.num_pages
    assert data["chosen"] == 5


def test_fr_49_a_large_pool_travels_in_under_300_kb_by_state() -> None:
    pages = FakeEngine(num_pages=100_000, busy=False).answer("/observe/pages", {})
    assert pages.num_pages > OWNERS_ALWAYS_BELOW
    assert len(json.dumps(page_map_data(pages, LIGHT, mode="state", chosen=None))) < 300_000
    assert page_map_data(pages, LIGHT, mode="owner", chosen=None)["owners_b64"]


def test_a_chosen_page_that_the_pool_no_longer_has_is_forgotten(engine: FakeEngine) -> None:
    pages = engine.answer("/observe/pages", {})
    assert page_map_data(pages, LIGHT, mode="state", chosen=pages.num_pages)["chosen"] is None

"""docs/cookbook.md is what its queries answer, and what they answer is what the journal says."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from engine.errors import ConfigError
from telemetry.export.cookbook import (
    COOKBOOK,
    RECORDED,
    TABLES_PAGE,
    ask,
    connect,
    cookbook,
    main,
    recorded_tables,
    tables_page,
)
from telemetry.export.parquet_schema import TABLES
from telemetry.export.queries import RECIPES
from telemetry.journal_reader import JournalReader
from telemetry.replay import replay
from telemetry.schema import Record
from telemetry.schema_events import (
    AdmissionDecidedRecord,
    RequestTransitionedRecord,
    StepPlannedRecord,
)
from tests.telemetry.recorded_run import JOURNAL, record


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded_tables(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def database(folder: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    with connect(folder) as connection:
        yield connection


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return list(JournalReader(RECORDED).records())


def answer(database: duckdb.DuckDBPyConnection, words: str) -> list[dict[str, object]]:
    """The rows of the one question with `words` in it."""
    (recipe,) = [recipe for recipe in RECIPES if words in recipe.question]
    found = ask(database, recipe)
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


def test_the_page_is_what_the_queries_answer(folder: Path) -> None:
    assert COOKBOOK.read_text(encoding="utf-8") == cookbook(folder), "run: make docs"


def test_the_page_of_tables_is_current() -> None:
    assert TABLES_PAGE.read_text(encoding="utf-8") == tables_page(), "run: make docs"


def test_ten_questions_have_answers_with_rows(database: duckdb.DuckDBPyConnection) -> None:
    assert len(RECIPES) == 10
    for recipe in RECIPES:
        assert ask(database, recipe).rows, recipe.question


def test_the_queries_as_printed_run_on_the_views_as_printed(folder: Path) -> None:
    """Copied from the page, in a fresh database."""
    page = COOKBOOK.read_text(encoding="utf-8")
    setup, *queries = re.findall(r"```sql\n(.*?)```", page, flags=re.DOTALL)
    with duckdb.connect() as fresh:
        fresh.execute(setup.replace("'tables/", f"'{folder}/"))
        for query in queries:
            assert fresh.execute(query).fetchall()


def test_the_recorded_run_is_whole() -> None:
    """Where the scheduler decides otherwise by now: python -m tests.telemetry.recorded_run, then make docs."""
    report = replay(JOURNAL)
    assert report.torn is None
    assert report.verdict != "incomplete"


def test_recording_is_deterministic(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    record(first, requests=12)
    record(second, requests=12)
    assert first.read_bytes() == second.read_bytes()


def test_request_seconds_are_the_stretches_hour_by_hour(database: duckdb.DuckDBPyConnection) -> None:
    """All stretches, cut at ten o'clock: two seconds after the start, by the clock of the engine."""
    told: dict[str, float] = defaultdict(float)
    for row in answer(database, "request-seconds"):
        told[str(row["hour"])] += float(str(row["request_s"]))
    ten_ns = 1_000_000_000 + 2_000_000_000
    stretches = database.execute("SELECT start_ns, end_ns FROM waits").fetchall()
    before = sum(max(0, min(end, ten_ns) - start) for start, end in stretches) / 1e9
    after = sum(max(0, end - max(start, ten_ns)) for start, end in stretches) / 1e9
    assert list(told.values()) == [pytest.approx(before, abs=0.05), pytest.approx(after, abs=0.05)]
    assert [hour[-5:] for hour in told] == ["09:00", "10:00"]
    held = " + ".join(
        column.name for column in TABLES["lives"].columns if column.name.startswith(("held_", "late_held_"))
    )
    row = database.execute(f"SELECT sum({held}) FROM lives").fetchone()
    assert row is not None
    assert row[0] == sum(end - start for start, end in stretches)


def test_overtaken_is_the_largest_count_of_a_request(
    database: duckdb.DuckDBPyConnection, records: list[Record]
) -> None:
    most: Counter[str] = Counter()
    for record_ in records:
        if isinstance(record_, AdmissionDecidedRecord):
            most[record_.rid] = max(most[record_.rid], record_.times_passed_over)
    rows = answer(database, "overtaken")
    assert [row["overtaken"] for row in rows] == sorted(most.values(), reverse=True)[: len(rows)]
    assert all(most[str(row["rid"])] == row["overtaken"] for row in rows)


def test_retractions_cost_what_the_plans_say(database: duckdb.DuckDBPyConnection, records: list[Record]) -> None:
    plans = [record_ for record_ in records if isinstance(record_, StepPlannedRecord)]
    victims = [(plan.step, row) for plan in plans for row in plan.retractions]
    (row,) = answer(database, "retractions cost")
    assert (row["retractions"], row["lost"]) == (len(victims), sum(victim.lost_tokens for _, victim in victims))
    again = 0
    for step, victim in victims:
        later = [other for other, row_ in victims if row_.rid == victim.rid and other > step]
        for plan in plans:
            if step < plan.step < min(later, default=1 << 60):
                again += sum(piece.extend_len for piece in plan.prefills if piece.rid == victim.rid)
    assert row["recomputed"] == again


def test_pass_ends_are_counted_by_minute(database: duckdb.DuckDBPyConnection, records: list[Record]) -> None:
    ends = Counter(
        str(record_.pass_end.stopped_by.value)
        for record_ in records
        if isinstance(record_, StepPlannedRecord) and record_.pass_end is not None
    )
    told: Counter[str] = Counter()
    for row in answer(database, "minute by minute"):
        told[str(row["ended_by"])] += int(str(row["passes"]))
    assert told == ends


def test_what_a_chunk_put_off_is_what_the_decisions_say(
    database: duckdb.DuckDBPyConnection, records: list[Record]
) -> None:
    cut = [
        record_.candidate_extend - record_.selected_extend
        for record_ in records
        if isinstance(record_, AdmissionDecidedRecord) and record_.selected_extend > 0 and record_.is_chunked
    ]
    rows = answer(database, "cut off by the chunk")
    assert sum(int(str(row["pieces"])) for row in rows) == len(cut) > 10
    assert sum(int(str(row["put_off"])) for row in rows) == sum(cut)


def test_pages_of_the_scarcest_moment_are_the_request_s_own(
    database: duckdb.DuckDBPyConnection, records: list[Record]
) -> None:
    """A request has a page for each 16 tokens that it computed by itself, or a few."""
    rows = answer(database, "scarcest")
    rids = {record_.rid for record_ in records if isinstance(record_, RequestTransitionedRecord)}
    named = [row for row in rows if row["who"] in rids]
    assert named
    plans = {record_.step: record_ for record_ in records if isinstance(record_, StepPlannedRecord)}
    scarce = plans[int(str(rows[0]["step"]))]
    assert scarce.pages[0] + scarce.pages[3] == min(plan.pages[0] + plan.pages[3] for plan in plans.values())
    assert all(row["who"] in scarce.decodes or row["who"] in {each.rid for each in scarce.prefills} for row in named)


def test_the_answers_for_a_folder_are_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder)]) == 0
    printed = capsys.readouterr().out
    assert all(recipe.question in printed for recipe in RECIPES)


def test_a_folder_without_tables_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        connect(tmp_path)

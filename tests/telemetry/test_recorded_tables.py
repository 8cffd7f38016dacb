"""Tables as a recording: exported and read back, a journal gives the same events and the same answers; odd files are
named, and what tables lack is said.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="needs pyarrow: pip install -e '.[parquet]'")

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from engine.events import AnyEvent, EngineStarted, PagesMoved
from telemetry.export.parquet_sink import ParquetSink
from telemetry.export.source import feed
from telemetry.journal import JournalError
from telemetry.recorded import RecordedSource, Recording
from telemetry.recorded_tables import TableEvents, refuse_one_table
from telemetry.schema import LineUnion

JOURNAL = Path(__file__).parent / "data" / "cookbook.jsonl.gz"
HOUR_NS = 3_600_000_000_000


@pytest.fixture(scope="module")
def events() -> list[AnyEvent]:
    heard: list[AnyEvent] = []
    feed(JOURNAL, lambda event: None if isinstance(event, LineUnion) else heard.append(event))
    return heard


def written(events: list[AnyEvent], folder: Path) -> Path:
    sink = ParquetSink(folder, expects_responses=True, is_live=False)
    for event in events:
        sink.emit(event)
    sink.close()
    return folder


@pytest.fixture(scope="module")
def tables(events: list[AnyEvent], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(events, tmp_path_factory.mktemp("tables") / "run")


def test_tables_give_back_every_event_that_was_exported(events: list[AnyEvent], tables: Path) -> None:
    assert any(isinstance(event, PagesMoved) and event.owners for event in events), "a claim for several requests"
    assert list(TableEvents(tables).all_events()) == events
    assert TableEvents(tables).lacks() == []


def test_an_hour_that_rolls_parts_files_and_nothing_else(events: list[AnyEvent], tmp_path: Path) -> None:
    (started, *rest) = events
    assert isinstance(started, EngineStarted)
    half_ns = (rest[-1].t_ns - started.t_ns) // 2
    late = replace(started, wall_ns=480_000 * HOUR_NS - half_ns)
    folder = written([late, *rest], tmp_path / "run")
    assert len(list((folder / "step_rows").glob("*.parquet"))) == 2
    assert list(TableEvents(folder).all_events()) == [late, *rest]


def test_the_answers_of_tables_are_those_of_the_journal(tables: Path) -> None:
    of_journal, of_tables = (Recording(path, in_background=False) for path in (JOURNAL, tables))
    assert of_tables.progress() == of_journal.progress()
    for index in (0, 300, 600, 854):
        both = []
        for recording in (of_journal, of_tables):
            with RecordedSource(recording) as source:
                source.seek(recording.moment(index))
                both.append(
                    [
                        each.model_dump_json()
                        for each in (
                            *(source.status(), source.queue(), source.passes(8), source.requests(), source.lanes()),
                            *(source.latency(), source.breakdown(), source.pages(), source.pool(), source.tree()),
                        )
                    ]
                )
        assert both[0] == both[1], f"moment {index}"


def test_tables_are_not_judged_and_say_by_what(tables: Path) -> None:
    recording = Recording(tables, in_background=False)
    with RecordedSource(recording) as source:
        source.seek(recording.moment(100))
        assert "check` needs the journal that they were made of" in source.laws().words


def first(folder: Path, table: str) -> Path:
    return min((folder / table).glob("*.parquet"))


def truncated(folder: Path) -> None:
    file = first(folder, "steps")
    file.write_bytes(file.read_bytes()[:-200])


def foreign(folder: Path) -> None:
    file = first(folder, "locks")
    pq.write_table(pa.table({"a": [1, 2]}), file)


def without_rows(folder: Path) -> None:
    file = first(folder, "step_rows")
    pq.write_table(pq.read_table(file).slice(0, 5), file)


def no_word_of_ours(folder: Path) -> None:
    file = first(folder, "admissions")
    table = pq.read_table(file)
    at = table.schema.get_field_index("reason")
    odd = pa.array(["because"] * table.num_rows)
    pq.write_table(table.set_column(at, table.schema.field(at), odd), file)


def empty(folder: Path) -> None:
    for file in (folder / "engines").glob("*.parquet"):
        file.unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (truncated, r"steps-.*\.parquet: no Parquet file that can be read"),
        (foreign, r"locks-.*\.parquet: not a table `locks` of this engine"),
        (without_rows, r"steps-.*: row \d+: step_rows has \d+ rows of step \d+, steps counts \d+"),
        (no_word_of_ours, r"admissions-.*: row 1: Invalid enum value 'because'"),
        (empty, "no engine in it: engines has no whole Parquet file"),
    ],
)
def test_odd_tables_are_named(tables: Path, tmp_path: Path, spoil: Callable[[Path], None], said: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(tables, folder)
    spoil(folder)
    with pytest.raises(JournalError, match=said):
        list(TableEvents(folder).all_events())
    progress = Recording(folder, in_background=False).progress()
    assert progress.is_read
    assert progress.error is not None


def test_what_tables_lack_is_said(tables: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(tables, folder)
    shutil.rmtree(folder / "locks")
    whole = first(folder, "steps")
    (folder / "steps" / f".{whole.name.replace('steps-', 'steps-9')}.part").write_bytes(b"PAR1")
    assert TableEvents(folder).lacks() == [
        "no file of locks: what they tell is not shown",
        "an hour was never finished: steps end in .part files, which are not read",
    ]


def test_one_table_alone_is_no_recording(tables: Path) -> None:
    file = first(tables, "steps")
    with pytest.raises(JournalError, match=f"one table of several: give the folder of all of them, {tables}"):
        refuse_one_table(file)

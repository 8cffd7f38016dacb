"""Parquet tables say what the records say: of any journal and live, for DuckDB and for pandas."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from engine.config import ExecutorConfig, Policy
from engine.events import PagesMoved
from engine.llm_engine import EngineRequest
from engine.sampling_params import SamplingParams
from telemetry.buffered import BufferedSink
from telemetry.cli import main
from telemetry.export.command import write_tables
from telemetry.export.cookbook import connect
from telemetry.export.parquet_files import ExportError
from telemetry.export.parquet_rows import check_width
from telemetry.export.parquet_schema import LEFT_OUT, TABLES, unit_of
from telemetry.export.parquet_sink import ParquetSink
from telemetry.journal import JournalSink
from telemetry.journal_reader import JournalReader
from telemetry.launch import build_instance
from telemetry.schema import EventUnion
from telemetry.schema_events import (
    AbortRequestedRecord,
    AdmissionDecidedRecord,
    EngineStartedRecord,
    LockChangedRecord,
    PagesMovedRecord,
    RequestArrivedRecord,
    RequestTransitionedRecord,
    ResponseSentRecord,
    StepCompletedRecord,
    StepPlannedRecord,
)
from telemetry.settings import ServeCommand

Rows = list[dict[str, Any]]
FACTS: dict[str, Any] = {
    "engines": EngineStartedRecord,
    "requests": RequestArrivedRecord,
    "aborts": AbortRequestedRecord,
    "transitions": RequestTransitionedRecord,
    "admissions": AdmissionDecidedRecord,
    "page_moves": PagesMovedRecord,
    "locks": LockChangedRecord,
    "responses": ResponseSentRecord,
}


class Run:
    """A simulated engine with cuts, aborts and retractions: its journal, its live tables, its exported tables."""

    def __init__(self, folder: Path, simulated_run: Any) -> None:
        self.journal = folder / "run.jsonl"
        live = ParquetSink(folder / "live", expects_responses=True, is_live=False)
        buffered = BufferedSink(live, "parquet", capacity=10_000_000)
        self.run = simulated_run(self.journal, 1, policy=Policy.FCFS, listeners=(buffered,))
        self.run.play(60)
        assert buffered.close(60)
        self.stats = buffered.stats()
        self.live, self.exported = folder / "live", folder / "exported"
        self.told, self.sink = write_tables(self.journal, self.exported)

    @property
    def events(self) -> list[Any]:
        return list(self.run.recorded.events)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, simulated_run: Any) -> Run:
    return Run(tmp_path_factory.mktemp("tables"), simulated_run)


def rows_of(folder: Path, table: str) -> Rows:
    """Of all files of a table, as plain values, in the order written."""
    files = sorted((folder / table).glob("*.parquet"), key=lambda file: file.stat().st_mtime_ns)
    return [row for file in files for row in pq.read_table(file, partitioning=None).to_pylist()]


def one_owner_each(moves: list[PagesMoved]) -> list[PagesMoved]:
    return [
        msgspec.structs.replace(move, pages=pages, owner=owner, owners=b"")
        for move in moves
        for owner, pages in move.parts()
    ]


def as_sets(rows: Rows) -> Counter[str]:
    return Counter(json.dumps(row, sort_keys=True, default=str) for row in rows)


# --- the schema and the records ---------------------------------------------------------------------------------------


def test_every_event_has_a_table_and_every_field_a_column_or_a_reason() -> None:
    homes = {*FACTS.values(), StepPlannedRecord, StepCompletedRecord}
    assert homes == set(get_args(EventUnion))
    for name, record in FACTS.items():
        columns = {column.name for column in TABLES[name].columns}
        for field in record.model_fields:
            held = {field, f"num_{field}", f"num_{field.removesuffix('s')}_ids", f"{field}_free"} & columns
            is_left_out = field in LEFT_OUT or f"{record.__name__}.{field}" in LEFT_OUT
            assert held or is_left_out or field == "pages", f"{name}.{field}"
    steps = {column.name for column in TABLES["steps"].columns}
    for field in (*StepPlannedRecord.model_fields, *StepCompletedRecord.model_fields):
        prefixes = {"budget_open": "open_rem_input", "budget_close": "close_rem_input", "pass_end": "pass_stop"}
        others = {"times": "applied_ns", "pages": "pages_free", "rows": "done_num_rows"}
        names = {field, f"num_{field}", prefixes.get(field, ""), others.get(field, "")}
        assert names & steps or field in LEFT_OUT, field


def test_every_number_has_a_unit_and_every_column_a_meaning() -> None:
    for table in TABLES.values():
        assert table.group_rows >= 4096
        names = [column.name for column in table.columns]
        assert len(names) == len(set(names))
        for column in table.columns:
            assert column.doc, f"{table.name}.{column.name}"
            assert column.unit or column.kind in {"string", "bool", "list<string>"}, f"{table.name}.{column.name}"
            field = table.arrow().field(column.name)
            assert field.metadata[b"unit"].decode() == column.unit


def test_a_number_of_a_new_kind_is_refused_until_its_unit_is_said() -> None:
    with pytest.raises(KeyError, match="furlongs"):
        unit_of("furlongs")


def test_a_row_of_the_wrong_width_is_refused() -> None:
    with pytest.raises(ValueError, match="locks: 1 values"):
        check_width("locks", ("engine",))


# --- facts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FACTS)
def test_a_table_of_facts_holds_every_record_field_by_field(run: Run, name: str) -> None:
    events = [event for event in run.events if type(event).__name__ + "Record" == FACTS[name].__name__]
    if name == "page_moves":
        events = one_owner_each(events)
    rows = rows_of(run.exported, name)
    assert len(rows) == len(events) > 0
    shared = [column.name for column in TABLES[name].columns if hasattr(events[0], column.name)]
    assert len(shared) >= 5
    for row, event in zip(rows, events, strict=True):
        for field in shared:
            value = getattr(event, field)
            if isinstance(value, bytes):
                value = np.frombuffer(value, dtype="<i8").tolist()
            assert row[field] == (list(value) if isinstance(value, tuple) else value), field


def test_steps_hold_plan_and_completion(run: Run) -> None:
    plans = [event for event in run.events if type(event).__name__ == "StepPlanned"]
    done = {event.step: event for event in run.events if type(event).__name__ == "StepCompleted"}
    rows = rows_of(run.exported, "steps")
    assert len(rows) == len(plans)
    for row, plan in zip(sorted(rows, key=lambda row: row["seq"]), plans, strict=True):
        assert (row["step"], row["kind"], row["num_prefills"]) == (plan.step, plan.kind, len(plan.prefills))
        assert [row[f"pages_{state}"] for state in ("free", "private", "protected", "evictable")] == list(plan.pages)
        assert row["open_rem_input"] == (plan.budget_open.rem_input if plan.budget_open else None)
        assert row["pass_stopped_by"] == (plan.pass_end.stopped_by if plan.pass_end else None)
        completed = done[plan.step]
        assert row["applied_ns"] == completed.times.applied_ns
        assert (row["done_seq"], row["done_num_rows"]) == (completed.seq, len(completed.rows))


def test_step_rows_are_the_batches_and_their_tokens(run: Run) -> None:
    batches = {
        event.step: [*[row.rid for row in event.prefills], *event.decodes]
        for event in run.events
        if type(event).__name__ == "StepPlanned"
    }
    tokens = Counter(
        row.rid
        for event in run.events
        if type(event).__name__ == "StepCompleted" and not event.failed
        for row in event.rows
    )
    rows = sorted(rows_of(run.exported, "step_rows"), key=lambda row: (row["step"], row["place"]))
    found = {step: [row["rid"] for row in group] for step, group in groupby(rows, key=lambda row: row["step"])}
    assert found == {step: batch for step, batch in batches.items() if batch}
    assert Counter(row["rid"] for row in rows if row["token_ns"] is not None) == tokens
    keys = Counter(
        (row.rid, row.new_page_key)
        for event in run.events
        if type(event).__name__ == "StepCompleted"
        for row in event.rows
        if row.new_page_key is not None
    )
    assert Counter((row["rid"], row["new_page_key"]) for row in rows if row["new_page_key"] is not None) == keys
    assert keys


def test_retractions_are_listed(run: Run) -> None:
    rows = rows_of(run.exported, "retractions")
    victims = [
        (event.step, victim.rid, victim.lost_tokens)
        for event in run.events
        if type(event).__name__ == "StepPlanned"
        for victim in event.retractions
    ]
    assert [(row["step"], row["rid"], row["lost_tokens"]) for row in rows] == victims
    assert victims


# --- what is derived --------------------------------------------------------------------------------------------------


def test_parts_of_time_to_first_token_add_up(run: Run) -> None:
    rows = rows_of(run.exported, "lives")
    assert {row["rid"] for row in rows} == {row["rid"] for row in rows_of(run.exported, "requests")}
    timed = [row for row in rows if row["ttft_ns"] is not None]
    assert timed
    for row in timed:
        parts = [value for name, value in row.items() if name.startswith("ttft_") and name != "ttft_ns"]
        assert sum(parts) == row["ttft_ns"]


def test_stretches_of_waiting_are_what_lives_say_however_long(run: Run) -> None:
    waited: Counter[tuple[str, str]] = Counter()
    for row in rows_of(run.exported, "waits"):
        assert row["end_ns"] > row["start_ns"]
        waited[row["rid"], row["blocker"]] += row["end_ns"] - row["start_ns"]
    held: Counter[tuple[str, str]] = Counter()
    for row in rows_of(run.exported, "lives"):
        for name, value in row.items():
            if name.startswith(("held_", "late_held_")) and value:
                held[row["rid"], name.removeprefix("late_").removeprefix("held_").removesuffix("_ns")] += value
    assert waited == held
    assert len({blocker for _, blocker in held}) > 2


# --- live, journals of all sorts --------------------------------------------------------------------------------------


def test_live_tables_and_exported_ones_are_the_same(run: Run) -> None:
    """The journal folds refusals; the export makes them again."""
    assert (run.stats.dropped, run.stats.errors) == (0, 0)
    assert run.told.events == len(run.events)
    assert run.told.notes == []
    folded = [record for record in JournalReader(run.journal).records() if record.type == "refusals_folded"]
    assert folded, "this run proves nothing"
    for name in TABLES:
        assert as_sets(rows_of(run.live, name)) == as_sets(rows_of(run.exported, name)), name


def test_a_torn_and_rotated_journal_is_read_as_far_as_it_goes(tmp_path: Path, simulated_run: Any, run: Run) -> None:
    path = tmp_path / "rotated.jsonl"
    sink = JournalSink(path, rotate_bytes=40_000)
    for event in run.events:
        sink.emit(event)
    sink.close()
    *_, last = sorted(tmp_path.glob("rotated.0*.jsonl"))
    last.write_bytes(last.read_bytes()[:-700])
    told, _ = write_tables(path, tmp_path / "tables")
    assert any("ends before its time" in note for note in told.notes)
    assert 0 < told.events < len(run.events)
    rows = rows_of(tmp_path / "tables", "requests")
    assert as_sets(rows) <= as_sets(rows_of(run.exported, "requests"))
    assert {row["finish"] for row in rows_of(tmp_path / "tables", "lives")} >= {"stop"}


def test_lost_events_are_a_row_and_a_note(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "holed.jsonl"
    sink = JournalSink(path)
    for event in run.events:
        if not 400 <= event.seq < 420:
            sink.emit(event)
    sink.close()
    told, _ = write_tables(path, tmp_path / "tables")
    (hole,) = rows_of(tmp_path / "tables", "holes")
    assert (hole["after_seq"], hole["before_seq"], hole["missing"]) == (399, 420, 20)
    assert any("20 events never reached the journal" in note for note in told.notes)
    last = max(row["seq"] for row in rows_of(tmp_path / "tables", "transitions"))
    assert last == max(event.seq for event in run.events if type(event).__name__ == "RequestTransitioned")


def test_where_a_replay_decides_otherwise_the_record_is_told_alone(tmp_path: Path, run: Run) -> None:
    """As for a journal of another version: what it only counts is a table of its own, and a note says so."""
    lines = run.journal.read_bytes().splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith(b'{"type":"RequestArrived"'))
    lines[at] = lines[at].replace(b',"trace_sampled":false', b"")
    path = tmp_path / "older.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    told, sink = write_tables(path, tmp_path / "tables")
    folded = rows_of(tmp_path / "tables", "refusals_folded")
    count = sum(row["count"] for row in folded)
    assert told.events + count == len(run.events)
    assert any(f"{count} refusals" in note for note in told.notes)
    assert sink.rows_lost == 0


def test_a_folder_takes_several_runs_but_each_only_once(tmp_path: Path, run: Run, simulated_run: Any) -> None:
    write_tables(run.journal, tmp_path)
    with pytest.raises(ExportError, match=r"holds .*simulated-run\.parquet already"):
        write_tables(run.journal, tmp_path)
    write_tables(Path(__file__).parent / "data" / "cookbook.jsonl.gz", tmp_path)
    assert {row["engine_id"] for row in rows_of(tmp_path, "engines")} == {"simulated-run", "cookbook"}


# --- readers ----------------------------------------------------------------------------------------------------------


def test_duckdb_reads_every_table(run: Run) -> None:
    with connect(run.exported) as database:
        for name in TABLES:
            found = database.execute(f"SELECT count(*) FROM {name}").fetchone()
            assert found is not None
            assert found[0] == len(rows_of(run.exported, name))
        utc = database.execute("SELECT typeof(utc) FROM steps LIMIT 1").fetchone()
        assert utc == ("TIMESTAMP WITH TIME ZONE",)


def test_pandas_reads_a_table_and_its_times(run: Run) -> None:
    frame = pd.read_parquet(run.exported / "steps")
    assert len(frame) == len(rows_of(run.exported, "steps"))
    assert str(frame["utc"].dt.tz) == "UTC"
    assert frame["utc"].iloc[0].timestamp() == pytest.approx(1_700_000_000, abs=60)
    moves = pd.read_parquet(run.exported / "page_moves")
    assert (moves["page_ids"].map(len) == moves["num_page_ids"]).all()


# --- the command and the server ---------------------------------------------------------------------------------------


def test_the_command_says_what_it_wrote(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--parquet", str(tmp_path / "t"), str(run.journal)]) == 0
    said = capsys.readouterr().out
    assert f"{run.sink.rows_written:,} rows of {len(run.events):,} events" in said
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "J"], "nothing to write"),
        (["export", "--parquet", "T", "/nosuch/run.jsonl"], "/nosuch/run.jsonl: no such journal"),
        (["export", "--parquet", "/proc/tables", "J"], "parquet='/proc/tables'"),
        (["export", "--parquet", "T", "--rid", "r1", "J"], "--perfetto"),
    ],
)
def test_what_a_person_must_change_is_named(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    places = {"J": str(run.journal), "T": str(tmp_path / "t")}
    assert main([places.get(word, word) for word in words]) == 2
    assert said in capsys.readouterr().err


def test_a_server_writes_tables_and_closes_them(tmp_path: Path) -> None:
    command = ServeCommand(executor=ExecutorConfig(kind="simulated"), journal=None, parquet=tmp_path / "tables")
    instance = build_instance(command)
    assert {"parquet", "read_model", "metrics"} <= {stats.component for stats in instance.listeners.stats()}
    request = EngineRequest(rid="r1", prompt_ids=tuple(range(1, 41)), params=SamplingParams(max_new_tokens=4))
    instance.engine.add_request(request)
    while instance.engine.has_work:
        instance.engine.step()
    instance.close()
    assert [row["rid"] for row in rows_of(tmp_path / "tables", "requests")] == ["r1"]
    assert rows_of(tmp_path / "tables", "lives")[0]["output_len"] >= 1
    assert not list((tmp_path / "tables").rglob("*.part"))


def test_no_tables_are_written_unless_asked_for() -> None:
    assert ServeCommand.model_fields["parquet"].default is None


def test_both_tables_of_a_property_are_made_from_one_schema(maker: Callable[[], Any]) -> None:
    """A hand-made event becomes a row whose width is its table's."""
    seen: dict[str, int] = {}
    from telemetry.export.parquet_rows import RowMaker  # the maker alone, without files

    numbered = maker()
    rows = RowMaker(numbered.started(), lambda table, row: seen.update({table: len(row)}), expects_responses=True)
    made = (numbered.arrived("r"), numbered.refused("r", 1), numbered.planned(1), numbered.completed(1))
    for event in (*numbered.events[:1], *made, numbered.sent("r", 1)):
        rows.take(event)
    rows.close()
    assert {"engines", "requests", "admissions", "steps", "responses", "lives", "waits"} <= seen.keys()
    assert all(width == len(TABLES[table].columns) for table, width in seen.items())

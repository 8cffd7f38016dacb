"""Parquet tables as input: the same requests, costs and runs as from the journal that they were made of."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from telemetry.cli import main
from telemetry.export.command import write_tables
from telemetry.journal import JournalError
from telemetry.sim.journal_workload import JournalWorkload
from telemetry.sim.run import fit_journal
from telemetry.sim.tables import TableRecording, is_tables
from telemetry.sim.workload import Ask
from tests.telemetry.sim.recordings import config_of, cost_file, record


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(journal, tables) of a run short of memory, whose clients leave now and then."""
    folder = tmp_path_factory.mktemp("run")
    journal = record(folder, config_of(num_pages=60), leaves_after_ms=150.0)
    write_tables(journal, folder / "tables")
    return journal, folder / "tables"


def told(ask: Ask) -> dict[str, Any]:
    """Everything of a request, its keys as numbers."""
    values = {field.name: getattr(ask, field.name) for field in fields(ask) if field.name != "blocks"}
    return values | {"keys": ask.blocks.pages(16, 0, 60).tolist()}


def test_tables_give_the_requests_that_the_journal_gives(recorded: tuple[Path, Path]) -> None:
    journal, tables = (JournalWorkload(path) for path in recorded)
    of_tables = list(map(told, tables.asks()))
    assert of_tables == list(map(told, journal.asks()))
    assert len(of_tables) == tables.total() == journal.total() == 40
    assert any(ask["abort_ns"] is not None for ask in of_tables)
    assert tables.recorded == journal.recorded
    assert len(list(JournalWorkload(recorded[1], limit=7).asks())) == 7


def test_a_window_takes_the_requests_that_came_in_it(recorded: tuple[Path, Path]) -> None:
    for path in recorded:
        every = list(JournalWorkload(path).asks())
        begins, ends = every[3].arrival_ns / 1e9, every[9].arrival_ns / 1e9
        inside = [ask.rid for ask in every if begins <= ask.arrival_ns / 1e9 < ends]
        workload = JournalWorkload(path, window=(begins, ends))
        assert [ask.rid for ask in workload.asks()] == inside
        assert workload.total() == len(inside) >= 5
        assert JournalWorkload(path, window=(None, ends), limit=4).total() == 4
        assert list(JournalWorkload(path, window=(1e6, None)).asks()) == []


def test_tables_give_the_costs_that_the_journal_gives(recorded: tuple[Path, Path]) -> None:
    journal, tables = (fit_journal(path) for path in recorded)
    assert (tables.forward, tables.host, tables.held_out) == (journal.forward, journal.host, journal.held_out)


def test_a_simulated_run_of_tables_is_that_of_the_journal(
    recorded: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = []
    for path in recorded:
        words = [
            "sim",
            str(path),
            "--cost",
            cost_file(tmp_path),
            "--hash",
            "--json",
            "--set",
            "chunked_prefill_size=64",
        ]
        assert main(words) == 0
        results.append(json.loads(capsys.readouterr().out))
    for result in results:
        del result["wall_s"], result["workload"]
    assert results[0] == results[1]
    assert results[0]["event_hash"]


def test_a_hole_in_the_record_is_told(recorded: tuple[Path, Path], tmp_path: Path) -> None:
    lines = recorded[0].read_bytes().splitlines(keepends=True)
    at = next(index for index, line in enumerate(lines) if index > len(lines) // 2 and b'"StepCompleted"' in line)
    seq = json.loads(lines[at])["seq"]
    hole = json.dumps({"type": "events_missing", "after_seq": seq, "before_seq": seq + 1, "missing": 5}).encode()
    (tmp_path / "run.jsonl").write_bytes(b"".join([*lines[: at + 1], hole + b"\n", *lines[at + 1 :]]))
    write_tables(tmp_path / "run.jsonl", tmp_path / "tables")
    workload = JournalWorkload(tmp_path / "tables")
    list(workload.asks())
    assert workload.missing == 5


def test_of_several_engines_the_last_one_is_read_and_said(recorded: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    shutil.copytree(recorded[1], folder)
    for file in folder.glob("*/*.parquet"):
        table = pq.read_table(file)
        other = table.set_column(0, table.schema.field(0), pa.array(["other"] * table.num_rows, pa.string()))
        if file.parent.name == "engines":
            at = other.schema.get_field_index("wall_ns")
            other = other.set_column(at, other.schema.field(at), pa.array([2**62], pa.int64()))
        pq.write_table(other.slice(0, 3), file.with_name(file.name.replace("-test", "-other")))
    recording = TableRecording(folder)
    assert recording.notes == [f"{folder} holds tables of 2 engines: this is the last one, other"]
    assert recording.arrivals() == 3


def altered(recorded: tuple[Path, Path], folder: Path, table: str, change: Any) -> Path:
    """A copy of the tables, one of them changed."""
    copy = folder / "tables"
    shutil.copytree(recorded[1], copy)
    [file] = (copy / table).glob("*.parquet")
    pq.write_table(change(pq.read_table(file)), file)
    return copy


def retyped(name: str, kind: pa.DataType) -> Any:
    def change(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index(name)
        return table.set_column(at, name, table.column(name).cast(kind)).replace_schema_metadata(table.schema.metadata)

    return change


def with_value(name: str, value: Any, *, rows: slice = slice(3, 4)) -> Any:
    def change(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index(name)
        values = table.column(name).to_pylist()
        values[rows] = [value] * len(values[rows])
        return table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type))

    return change


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        ("requests", lambda t: t.drop_columns(["page_keys"]), "no column page_keys: an older version wrote these"),
        ("requests", retyped("prompt_len", pa.int32()), "column prompt_len is int32; int64 is expected"),
        ("requests", lambda t: t.replace_schema_metadata({}), "not a table `requests` of this engine"),
        ("requests", with_value("prompt_len", 0), "prompt_len of 'r3' is 0; 1 to"),
        ("requests", with_value("seq", 0), r"row 4: seq is 0, after"),
        ("requests", with_value("seq", None), "row 4: seq is null"),
        ("transitions", with_value("cause", "boredom", rows=slice(None)), r"row \d+: 'boredom' is not a valid Cause"),
        ("requests", with_value("page_keys", None), "row 4: page_keys is null"),
        ("steps", with_value("ready_ns", None), "row 4: ready_ns is null, but done_seq is"),
        ("steps", with_value("kind", "dance"), "row 4: 'dance' is not a valid StepKind"),
        ("step_rows", lambda t: t.slice(0, t.num_rows - 1), r"step_rows has \d rows of step \d+, steps counts \d"),
        ("engines", lambda t: t.slice(0, 0), "no engine in it"),
        ("engines", with_value("num_pages", 0, rows=slice(1)), "num_pages is 0; 1 to"),
        ("engines", with_value("schema_version", 999, rows=slice(1)), "row 1: schema_version is 999; this version of"),
        ("requests", with_value("t_ns", -5), r"row 4: t_ns is -5; 0 to"),
        ("requests", with_value("t_ns", 2**62), r"row 4: t_ns is \d+; 0 to"),
        ("requests", with_value("t_ns", 1), r"row 4: t_ns is 1, after"),
        ("requests", with_value("seq", 1, rows=slice(3)), r"row 2: seq is 1, after 1"),
        ("steps", with_value("done_t_ns", 0), r"row 4: done_t_ns is 0, after"),
        ("steps", with_value("seq", 1, rows=slice(1)), r"two events have seq 1"),
        ("step_rows", with_value("extend_len", 2**31), r"row 4: extend_len is 2147483648; 0 to 16777216"),
        ("step_rows", with_value("role", "x", rows=slice(3, 5)), r"row 4: 'x' is not a valid Role"),
        ("step_rows", with_value("prefix_len", None, rows=slice(1)), r"row 1: prefix_len is null in a row of a prompt"),
        (
            "requests",
            with_value("rid", "r2"),
            r"requests-.*\.parquet: row 4: rid is 'r2', as of a request that has not",
        ),
        ("transitions", with_value("target", "zz"), r"row 4: 'zz' is not a valid RequestState"),
    ],
)
def test_odd_tables_are_named(
    recorded: tuple[Path, Path], tmp_path: Path, table: str, change: Any, message: str
) -> None:
    folder = altered(recorded, tmp_path, table, change)
    assert is_tables(folder)
    with pytest.raises(JournalError, match=message):
        list(JournalWorkload(folder).asks())


def test_an_id_is_free_again_after_its_request_ended_and_after_a_hole(
    recorded: tuple[Path, Path], tmp_path: Path
) -> None:
    asks = list(JournalWorkload(recorded[1]).asks())
    again = with_value("rid", "r0", rows=slice(len(asks) - 1, len(asks)))
    folder = altered(recorded, tmp_path / "ended", "requests", again)
    assert [ask.rid for ask in JournalWorkload(folder).asks()].count("r0") == 2
    doubled = altered(recorded, tmp_path / "lost", "requests", with_value("rid", "r2"))
    [file] = (doubled / "holes").glob("*.parquet")
    holes, [requests] = pq.read_table(file), (doubled / "requests").glob("*.parquet")
    seqs = pq.read_table(requests).column("seq").to_pylist()
    hole = {"engine_id": "test", "after_seq": seqs[2], "before_seq": seqs[3], "missing": 1}
    values = [pa.array([hole.get(field.name, 0)], field.type) for field in holes.schema]
    pq.write_table(pa.Table.from_arrays(values, schema=holes.schema), file)
    assert [ask.rid for ask in JournalWorkload(doubled).asks()].count("r2") == 2, "its end may have been lost"


def test_a_byte_that_broke_on_disk_is_found(recorded: tuple[Path, Path], tmp_path: Path) -> None:
    """Every page has a checksum: a byte of data cannot change without it."""
    copy = tmp_path / "tables"
    shutil.copytree(recorded[1], copy)
    [file] = (copy / "steps").glob("*.parquet")
    at = pq.ParquetFile(file).metadata.row_group(0).column(7)
    raw = bytearray(file.read_bytes())
    raw[at.data_page_offset + at.total_compressed_size // 2] ^= 1
    raw[(at.dictionary_page_offset or at.data_page_offset) + 40] ^= 1
    file.write_bytes(raw)
    with pytest.raises(JournalError, match=r"steps-.*: (damaged|no Parquet file that can be read)"):
        list(JournalWorkload(copy).asks())


def test_files_that_are_no_tables_are_named(
    recorded: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tables"
    shutil.copytree(recorded[1], folder)
    [file] = (folder / "requests").glob("*.parquet")
    assert main(["sim", str(file)]) == 2
    assert "name the folder that holds the tables" in capsys.readouterr().err.replace("\n", " ")
    file.write_bytes(file.read_bytes()[:-40])
    assert main(["sim", str(folder)]) == 2
    assert "no Parquet file that can be read" in capsys.readouterr().err.replace("\n", " ")

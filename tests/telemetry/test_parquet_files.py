"""Files of a table: row groups, hours, names, and what a disk that refuses costs."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from telemetry.buffered import BufferedSink
from telemetry.export.parquet_files import PatientFile, TableFiles
from telemetry.export.parquet_schema import TABLES
from telemetry.export.parquet_sink import ParquetSink

LOCKS = TABLES["locks"]
HOUR = 490_000


def lock(seq: int) -> tuple[Any, ...]:
    # A rid that does not compress: a disk must be able to be full.
    return ("engine", seq, seq, 1, seq, seq, f"{hash((seq, 'x')) & (1 << 62) - 1:x}", 1, 1)


def files_of(folder: Path) -> list[Path]:
    return sorted((folder / "locks").glob("*.parquet"))


def parts_of(folder: Path) -> list[Path]:
    return sorted((folder / "locks").glob(".*.part"))


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_row_groups_are_large_and_compressed_with_zstd(tmp_path: Path) -> None:
    files = TableFiles(tmp_path, LOCKS, "engine", hour=HOUR)
    rows = 2 * LOCKS.group_rows + 100
    for seq in range(rows):
        files.add(lock(seq), HOUR)
    files.finish()
    (path,) = files_of(tmp_path)
    assert path.name == "locks-20251124T16Z-engine.parquet"
    metadata = pq.ParquetFile(path).metadata
    groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
    assert [group.num_rows for group in groups] == [LOCKS.group_rows, LOCKS.group_rows, 100]
    assert {group.column(0).compression for group in groups} == {"ZSTD"}
    assert (files.rows_written, files.rows_lost, files.bytes) == (rows, 0, path.stat().st_size)


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    files = TableFiles(tmp_path, LOCKS, "engine", hour=HOUR)
    for seq in range(LOCKS.group_rows):
        files.add(lock(seq), HOUR)
    assert files_of(tmp_path) == []
    assert len(parts_of(tmp_path)) == 1
    files.finish()
    assert len(files_of(tmp_path)) == 1
    assert parts_of(tmp_path) == []


def test_memory_holds_at_most_one_row_group(tmp_path: Path) -> None:
    files = TableFiles(tmp_path, LOCKS, "engine", hour=HOUR)
    for seq in range(3 * LOCKS.group_rows):
        files.add(lock(seq), HOUR)
        assert files.rows_waiting < LOCKS.group_rows


def test_a_table_without_rows_has_a_file_with_its_columns(tmp_path: Path) -> None:
    files = TableFiles(tmp_path, LOCKS, "engine", hour=HOUR)
    files.finish()
    assert files_of(tmp_path) == []
    files.finish(even_empty=True)
    (path,) = files_of(tmp_path)
    assert pq.read_schema(path).names == [column.name for column in LOCKS.columns]
    files.finish(even_empty=True)
    assert files_of(tmp_path) == [path]


def test_each_hour_has_its_file(numbered: Any, tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path, expects_responses=False, is_live=False)
    started = numbered.started()
    sink.emit(started)
    import msgspec

    hour_ns = 3_600_000_000_000
    for hour in range(3):
        sink.emit(msgspec.structs.replace(numbered.planned(hour + 1), t_ns=hour * hour_ns + 5))
        sink.emit(msgspec.structs.replace(numbered.completed(hour + 1), t_ns=hour * hour_ns + 6))
    names = sorted(path.name for path in (tmp_path / "steps").glob("*.parquet"))
    assert names == ["steps-20231114T22Z-engine-1.parquet", "steps-20231114T23Z-engine-1.parquet"]
    sink.close()
    sink.close()
    tables = [pq.read_table(path, partitioning=None) for path in sorted((tmp_path / "steps").glob("*.parquet"))]
    assert [table.column("step").to_pylist() for table in tables] == [[1], [2], [3]]
    assert not list(tmp_path.rglob("*.part"))


def test_an_hour_that_is_over_is_finished_without_an_event(numbered: Any, tmp_path: Path) -> None:
    """The engine of the test began years ago by the wall clock."""
    sink = ParquetSink(tmp_path, expects_responses=False)
    sink.emit(numbered.started())
    assert not list((tmp_path / "engines").glob("*.parquet")) if (tmp_path / "engines").exists() else True
    sink.flush()
    assert len(list((tmp_path / "engines").glob("*.parquet"))) == 1
    sink.close()


# --- a disk that refuses ----------------------------------------------------------------------------------------------


def test_a_disk_that_is_full_for_a_while_costs_nothing(tmp_path: Path) -> None:
    files = TableFiles(tmp_path, LOCKS, "engine", hour=HOUR)
    with no_file_beyond(1_000):
        for seq in range(LOCKS.group_rows):
            files.add(lock(seq), HOUR)
    for seq in range(LOCKS.group_rows, 2 * LOCKS.group_rows):
        files.add(lock(seq), HOUR)
    files.finish()
    (path,) = files_of(tmp_path)
    assert pq.read_table(path, partitioning=None).column("seq").to_pylist() == list(range(2 * LOCKS.group_rows))
    assert files.rows_lost == 0


def test_a_disk_that_stays_full_costs_rows_that_are_counted_and_the_next_file_is_whole(tmp_path: Path) -> None:
    files = TableFiles(tmp_path, LOCKS, "engine", hour=HOUR)
    for seq in range(LOCKS.group_rows):
        files.add(lock(seq), HOUR)
    with no_file_beyond(100), pytest.raises(OSError, match="File too large"):
        files.finish()
    assert (files.rows_written, files.rows_lost) == (0, LOCKS.group_rows)
    assert files_of(tmp_path) == parts_of(tmp_path) == []
    files.add(lock(1), HOUR)
    files.finish()
    (path,) = files_of(tmp_path)
    assert pq.read_metadata(path).num_rows == 1
    assert (files.rows_written, files.rows_lost) == (1, LOCKS.group_rows)


def test_what_waits_for_a_disk_is_bounded(tmp_path: Path) -> None:
    file = PatientFile(tmp_path / "f", max_pending=1_000)
    with no_file_beyond(10):
        for _ in range(20):
            file.write(b"x" * 100)
        assert file.is_broken
        with pytest.raises(OSError, match="File too large"):
            file.finish()
    file.close()


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    for _ in range(2):
        files = TableFiles(tmp_path, LOCKS, "engine", hour=HOUR)
        files.add(lock(1), HOUR)
        files.finish()
    assert [path.name for path in files_of(tmp_path)] == [
        "locks-20251124T16Z-engine-1.parquet",
        "locks-20251124T16Z-engine.parquet",
    ]


def test_a_full_disk_behind_the_buffer_is_counted_and_ends_nothing(numbered: Any, tmp_path: Path) -> None:
    tables = ParquetSink(tmp_path, expects_responses=False, is_live=False)
    sink = BufferedSink(tables, "parquet", period_s=0.001)
    sink.emit(numbered.started())
    for step in range(1, 200):
        sink.emit(numbered.planned(step))
        sink.emit(numbered.completed(step))
    assert sink.flush()
    with no_file_beyond(100):
        assert sink.close()
    stats = sink.stats()
    assert stats.errors > 0
    assert "rows lost" in stats.last_error
    assert tables.rows_lost > 199
    assert not list(tmp_path.rglob("*.part"))

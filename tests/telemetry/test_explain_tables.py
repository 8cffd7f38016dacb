"""A life by tables is the life by the journal that they were made of, word by word, whatever either of them counts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="needs pyarrow: pip install -e '.[parquet]'")

from engine.config import Policy
from telemetry import explain_tables
from telemetry.cli import main
from telemetry.explain import AmbiguousRequest, UnknownRequest, explain
from telemetry.explain_life import told
from telemetry.export.parquet_sink import ParquetSink
from telemetry.export.source import feed
from telemetry.journal import JournalSink
from telemetry.journal_reader import JournalReader
from telemetry.life import LifeBuilder
from telemetry.recorded_tables import TableEvents
from telemetry.replay import Tape
from telemetry.schema import LineUnion, Record
from telemetry.schema_events import RequestArrivedRecord
from telemetry.schema_journal import RefusalsFoldedRecord
from telemetry.words import CHINESE
from tests.telemetry.live_run import TimedRun, busy, play
from tests.telemetry.sim.recordings import config_of, record

DATA = Path(__file__).parent / "data"
COOKBOOK = DATA / "cookbook.jsonl.gz"


def exported(journal: Path, folder: Path) -> Path:
    """As `admitscope export --parquet` does: refusals that the journal counts are made again."""
    sink = ParquetSink(folder, expects_responses=True, is_live=False)
    feed(journal, sink.emit)
    sink.close()
    return folder


def as_written(journal: Path, folder: Path) -> Path:
    """As an export whose replay parts from the record at once: what the journal counts, the tables count."""
    sink = ParquetSink(folder, expects_responses=True, is_live=False)
    tape = Tape(JournalReader(journal))
    while (entry := tape.peek()) is not None:
        tape.pop()
        if isinstance(entry[1], RefusalsFoldedRecord) or not isinstance(entry[1], LineUnion):
            sink.emit(entry[1])
    sink.close()
    return folder


def stories(records: list[Record]) -> dict[str, tuple[str, ...]]:
    """The sentences about every request, from one reading."""
    builders = {each.rid: LifeBuilder(each.rid) for each in records if isinstance(each, RequestArrivedRecord)}
    for each in records:
        for builder in builders.values():
            builder.feed(each)
    found = {}
    for rid, builder in builders.items():
        life = builder.life()
        assert life is not None
        found[rid] = tuple(f"{one.at_ns} {one.step} {one.text}" for one in told(life))
    return found


def counted_run(folder: Path) -> Path:
    """A run whose journal counts some refusals: equal ones, in one pass after the other, are rarer than they seem."""
    config = config_of(num_pages=100, chunked_prefill_size=64, max_running_requests=8)
    return record(folder, config, gap_ms=4.0, outputs=(20, 60))


@pytest.fixture(scope="module", params=["counted refusals", "lpm with retractions", "busy"])
def journal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, simulated_run: Any) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    if request.param == "counted refusals":
        return counted_run(path.parent)
    if request.param == "busy":
        settings, operations = busy(5)
        sink = JournalSink(path)
        play(TimedRun(settings, sink), operations)
        sink.close()
        return path
    simulated_run(path, 2, policy=Policy.LPM, page_size=16).play(40, fail_at_step=100)
    return path


def read(journal: Path) -> list[Record]:
    return list(JournalReader(journal).records(without=("PagesMoved", "LockChanged")))


@pytest.mark.parametrize("how", [exported, as_written])
def test_every_life_is_told_in_the_same_sentences(journal: Path, tmp_path: Path, how: Any) -> None:
    tables = TableEvents(how(journal, tmp_path / "tables"))
    from_journal = stories(read(journal))
    assert len(from_journal) > 5
    assert any("Refused" in line for lines in from_journal.values() for line in lines)
    assert stories(list(explain_tables._records(tables))) == from_journal


def test_counts_of_refusals_are_of_both_kinds(tmp_path: Path) -> None:
    """What the test above would not show if no refusal were folded."""
    journal = counted_run(tmp_path)
    counted = [each for each in read(journal) if isinstance(each, RefusalsFoldedRecord)]
    assert len(counted) > 3
    assert list(TableEvents(exported(journal, tmp_path / "exported")).folds()) == []
    found = list(TableEvents(as_written(journal, tmp_path / "written")).folds())
    assert sorted(found, key=lambda fold: fold.first_seq) == sorted(counted, key=lambda fold: fold.first_seq)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(COOKBOOK, tmp_path_factory.mktemp("cookbook") / "run")


def test_the_command_takes_a_folder_of_tables(tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["r9", "--lang", CHINESE], ["r9", "--json"]):
        assert main(["explain", str(COOKBOOK), *words]) == 0
        by_journal = capsys.readouterr()
        assert main(["explain", str(tables), *words]) == 0
        assert capsys.readouterr() == by_journal
    assert by_journal.err == ""


def test_what_the_tables_lack_is_said_beside_the_story(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = counted_run(tmp_path)
    rid = next(each.rid for each in read(journal) if isinstance(each, RequestArrivedRecord))
    assert main(["explain", str(as_written(journal, tmp_path / "tables")), rid]) == 0
    said = capsys.readouterr()
    assert "refusals are only counted in refusals_folded" in said.err
    assert f"Request {rid} arrived" in said.out


def test_ids_are_looked_up_as_in_a_journal(tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = f"{explain(COOKBOOK, 'r9').rid[:1]}..."
    with pytest.raises(AmbiguousRequest, match="may be"):
        explain_tables.explain_tables(tables, short)
    with pytest.raises(UnknownRequest, match="nearest ids"):
        explain_tables.explain_tables(tables, "nobody")
    assert main(["explain", str(tables), "nobody"]) == 1
    assert "no request 'nobody' in this record" in capsys.readouterr().err


def test_one_table_alone_is_no_run(tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = next((tables / "steps").glob("*.parquet"))
    assert main(["explain", str(file), "r9"]) == 2
    assert f"give the folder of all of them, {tables}" in capsys.readouterr().err


def test_without_steps_nothing_is_told(tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wait of fifteen passes would be told as a wait for the first."""
    kept = shutil.copytree(tables, tmp_path / "kept", ignore=shutil.ignore_patterns("steps"))
    assert main(["explain", str(kept), "r9"]) == 2
    assert f"{kept}: no file of steps: it cannot be told what a request waited for" in capsys.readouterr().err

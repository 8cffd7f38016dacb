"""The journal: what is written, when, in which files, and what a failing disk or a crash does to it."""

from __future__ import annotations

import gzip
import json
import resource
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.clock import VirtualClock
from engine.events import SCHEMA_VERSION, ResponseSent
from engine.request import Cause, RequestState
from telemetry.journal import JournalError, JournalSink, new_journal_path, segment_path
from telemetry.journal_reader import JournalReader
from telemetry.schema import encode
from telemetry.schema_journal import CheckpointRecord, EventsMissingRecord, HeaderRecord, RefusalsFoldedRecord


def write(path: Path, events: list[Any], **settings_: Any) -> JournalSink:
    sink = JournalSink(path, **settings_)
    for event in events:
        sink.emit(event)
    sink.close()
    return sink


def a_run(numbered: Any, steps: int) -> list[Any]:
    numbered.started()
    for step in range(1, steps + 1):
        numbered.refused("a", step)
        numbered.planned(step)
        numbered.completed(step)
    return list(numbered.events)


def test_header_events_folds_and_checkpoint_in_order(numbered: Any, tmp_path: Path) -> None:
    events = a_run(numbered, 3)
    write(tmp_path / "run.jsonl", events)
    reader = JournalReader(tmp_path / "run.jsonl")
    records = list(reader.records())
    assert reader.torn is None
    header, *middle, fold, checkpoint = records
    assert isinstance(header, HeaderRecord)
    assert (header.segment, header.first_seq, header.config) == (0, 0, {"cache": {"page_size": 16}})
    assert (header.wall_ns, header.mono_ns) == (events[0].wall_ns, events[0].t_ns)
    written = [event for event in events if event.seq not in (4, 7)]  # the two repeated refusals
    assert [encode(record) for record in middle] == [msgspec.json.encode(event) for event in written]
    assert isinstance(fold, RefusalsFoldedRecord)
    assert fold.count == 2
    assert isinstance(checkpoint, CheckpointRecord)
    assert (checkpoint.events, checkpoint.seq, checkpoint.step) == (len(events), events[-1].seq, 3)


def test_the_checkpoint_hash_can_be_computed_by_hand(numbered: Any, tmp_path: Path) -> None:
    events = a_run(numbered, 2)
    events += [numbered.sent("a", 2), numbered.completed(3)]
    write(tmp_path / "run.jsonl", events)
    core = [event for event in events if not isinstance(event, ResponseSent)]
    by_hand = blake2b(b"".join(msgspec.json.encode(event) + b"\n" for event in core), digest_size=16)
    *_, checkpoint = JournalReader(tmp_path / "run.jsonl").records()
    assert isinstance(checkpoint, CheckpointRecord)
    assert (checkpoint.hash, checkpoint.events) == (by_hand.hexdigest(), len(core))


@pytest.mark.parametrize("size", [2, 3, 7, 1_000])
def test_events_taken_together_are_written_as_one_by_one(maker: Any, tmp_path: Path, size: int) -> None:
    """Folds, checkpoints, their hashes and gaps included."""
    numbered = maker()
    events = [*a_run(numbered, 9), numbered.sent("a", 9)]
    del events[11]  # one never came
    write(tmp_path / "one.jsonl", events, checkpoint_steps=2)
    together = JournalSink(tmp_path / "many.jsonl", checkpoint_steps=2)
    for at in range(0, len(events), size):
        together.take(events[at : at + size])
    together.close()
    assert (tmp_path / "many.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_checkpoints_come_every_so_many_steps_and_flush_folds(numbered: Any, tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl", a_run(numbered, 10), checkpoint_steps=4)
    records = list(JournalReader(tmp_path / "run.jsonl").records())
    steps = [record.step for record in records if isinstance(record, CheckpointRecord)]
    folds = [record.count for record in records if isinstance(record, RefusalsFoldedRecord)]
    assert steps == [4, 8, 10]
    assert folds == [3, 4, 2]


def test_rotation_keeps_every_event_and_counts_segments(numbered: Any, tmp_path: Path) -> None:
    numbered.started()
    for step in range(1, 1500):
        numbered.planned(step)
    path = tmp_path / "run.jsonl"
    sink = write(path, numbered.events, rotate_bytes=100_000)
    assert sink.segment >= 3
    reader = JournalReader(path)
    assert reader.files == tuple(segment_path(path, n) for n in range(sink.segment + 1))
    records = list(reader.records())
    headers = [record for record in records if isinstance(record, HeaderRecord)]
    assert [header.segment for header in headers] == list(range(sink.segment + 1))
    assert len({header.engine_id for header in headers}) == 1
    seqs = [record.seq for record in records if record.type in ("EngineStarted", "StepPlanned")]
    assert seqs == list(range(1500))
    for header, following in zip(headers, _first_events(path, sink.segment), strict=True):
        assert following in (header.first_seq, None)


def _first_events(path: Path, last: int) -> list[int | None]:
    out = []
    for segment in range(last + 1):
        lines = segment_path(path, segment).read_bytes().splitlines()[1:]
        seqs = [json.loads(line)["seq"] for line in lines if b'"StepPlanned"' in line or b'"EngineStarted"' in line]
        out.append(seqs[0] if seqs else None)
    return out


def test_gzip_segments_read_like_plain_ones(numbered: Any, tmp_path: Path) -> None:
    for step in range(600):
        numbered.started() if step == 0 else numbered.planned(step)
    path = tmp_path / "run.jsonl"
    sink = write(path, numbered.events, rotate_bytes=100_000)
    plain = list(JournalReader(path).records())
    for segment in range(sink.segment):
        file = segment_path(path, segment)
        with gzip.open(f"{file}.gz", "wb") as packed:
            packed.write(file.read_bytes())
        file.unlink()
    assert list(JournalReader(path).records()) == plain
    assert list(JournalReader(Path(f"{path}.gz")).records()) == plain


def test_batches_wait_for_256_records_or_50_ms(numbered: Any, tmp_path: Path) -> None:
    clock, path = VirtualClock(), tmp_path / "run.jsonl"
    sink = JournalSink(path, clock=clock)
    sink.emit(numbered.started())
    assert path.stat().st_size == 0
    clock.advance_ns(49_000_000)
    sink.emit(numbered.planned(1))
    assert path.stat().st_size == 0
    clock.advance_ns(1_000_000)
    sink.emit(numbered.planned(2))
    lines = path.read_bytes().count(b"\n")
    assert lines == 4  # header and three events
    for step in range(3, 258):
        sink.emit(numbered.planned(step))
    assert path.read_bytes().count(b"\n") == lines
    sink.emit(numbered.planned(258))
    assert path.read_bytes().count(b"\n") == lines + 256
    sink.close()


def test_a_hole_in_seq_is_written_down(numbered: Any, tmp_path: Path) -> None:
    events = a_run(numbered, 2)
    del events[3:5]
    write(tmp_path / "run.jsonl", events)
    gaps = [r for r in JournalReader(tmp_path / "run.jsonl").records() if isinstance(r, EventsMissingRecord)]
    assert gaps == [EventsMissingRecord(after_seq=2, before_seq=5, missing=2)]


@pytest.fixture
def small_disk() -> Any:
    """A real limit on file size: writes beyond it fail with OSError, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))

    yield limit
    limit(None)


def test_after_a_full_disk_nothing_is_torn_and_nothing_is_lost(numbered: Any, tmp_path: Path, small_disk: Any) -> None:
    events, path = a_run(numbered, 40), tmp_path / "run.jsonl"
    sink = JournalSink(path, clock=VirtualClock())
    for event in events[:20]:
        sink.emit(event)
    sink.flush()
    whole = path.read_bytes()
    small_disk(len(whole) + 700)
    for event in events[20:]:
        sink.emit(event)
    for _ in range(2):
        with pytest.raises(OSError, match="File too large"):
            sink.flush()
        assert path.read_bytes() == whole, "a half-written batch must be cut off"
    small_disk(None)
    sink.flush()
    sink.close()
    written = list(JournalReader(path).records())
    seqs = [record.seq for record in written if hasattr(record, "t_ns")]
    folds = sum(record.count for record in written if isinstance(record, RefusalsFoldedRecord))
    assert len(seqs) + folds == len(events)
    assert not any(isinstance(record, EventsMissingRecord) for record in written)


def test_what_a_long_outage_drops_is_counted_in_the_journal(numbered: Any, tmp_path: Path, small_disk: Any) -> None:
    path = tmp_path / "run.jsonl"
    sink = JournalSink(path, clock=VirtualClock(), max_pending_bytes=2_000)
    sink.emit(numbered.started())
    sink.flush()
    small_disk(path.stat().st_size + 10)
    for step in range(1, 30):
        sink.emit(numbered.planned(step))
        with pytest.raises(OSError, match="File too large"):
            sink.flush()
    small_disk(None)
    sink.flush()
    sink.emit(numbered.planned(30))
    sink.close()
    records = list(JournalReader(path).records())
    [gap] = [record for record in records if isinstance(record, EventsMissingRecord)]
    kept = sum(record.type == "StepPlanned" for record in records)
    assert gap.missing > 0
    assert kept + gap.missing == 30


def test_nothing_is_overwritten_and_the_first_event_must_start_an_engine(numbered: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("precious")
    with pytest.raises(JournalError, match=r"run\.jsonl exists already"):
        JournalSink(path).emit(numbered.started())
    assert path.read_text() == "precious"
    with pytest.raises(JournalError, match="first event is StepPlanned"):
        JournalSink(tmp_path / "other.jsonl").emit(numbered.planned(1))
    sink = write(tmp_path / "closed.jsonl", [numbered.started()])
    sink.close()
    with pytest.raises(JournalError, match="after close"):
        sink.emit(numbered.planned(1))


def test_new_names_sort_by_start_time(tmp_path: Path) -> None:
    walls = [1_700_000_000_000_000_000 + 1_000_000 * k for k in (0, 1, 5, 10_000)]
    names = [new_journal_path(tmp_path, wall).name for wall in walls]
    assert names == sorted(set(names))
    assert names[0] == "admitscope-20231114T221320.000000Z.jsonl"


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(min_value=0))
def test_any_truncation_is_reported_and_reads_up_to_the_tear(
    maker: Any, tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    numbered, folder = maker(), tmp_path_factory.mktemp("cut")
    write(folder / "run.jsonl", a_run(numbered, 5))
    data = (folder / "run.jsonl").read_bytes()
    header_end = data.index(b"\n") + 1
    kept = data[: header_end + cut % (len(data) - header_end)]
    (folder / "torn.jsonl").write_bytes(kept)
    whole = list(JournalReader(folder / "run.jsonl").records())
    reader = JournalReader(folder / "torn.jsonl")
    read = list(reader.records())
    assert read == whole[: len(read)]
    if kept.endswith(b"\n"):
        assert reader.torn is None
        assert len(read) == kept.count(b"\n")
    else:
        assert len(read) >= kept.count(b"\n")
        assert (reader.torn is not None) == (len(read) == kept.count(b"\n"))
        if reader.torn:
            assert reader.torn.number == len(read) + 1


def test_a_garbage_last_line_is_reported_and_garbage_before_it_is_an_error(numbered: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(path, a_run(numbered, 3))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, b"\0" * 100 + b"\n"]))
    reader = JournalReader(path)
    assert len(list(reader.records())) == len(lines)
    assert reader.torn is not None
    assert (reader.torn.file, reader.torn.number) == (path, len(lines) + 1)
    path.write_bytes(b"".join([*lines[:3], b"{nonsense}\n", *lines[4:]]))
    with pytest.raises(JournalError, match=r"run\.jsonl:4: the line is damaged: "):
        list(JournalReader(path).records())


def test_segments_must_be_complete_and_in_their_places(numbered: Any, tmp_path: Path) -> None:
    numbered.started()
    for step in range(1, 1500):
        numbered.planned(step)
    path = tmp_path / "run.jsonl"
    sink = write(path, numbered.events, rotate_bytes=100_000)
    assert sink.segment >= 3
    second = segment_path(path, 2)
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(JournalError, match=r"run\.0002\.jsonl is missing"):
        JournalReader(path)
    second.write_bytes(segment_path(path, 1).read_bytes())
    with pytest.raises(JournalError, match="segment is 1, but by its name it is 2"):
        list(JournalReader(path).records())
    second.write_bytes(content.replace(b'"engine-1"', b'"engine-2"', 1))
    with pytest.raises(JournalError, match="engine_id is 'engine-2'"):
        list(JournalReader(path).records())
    second.write_bytes(content)
    last = segment_path(path, sink.segment)
    last.write_bytes(b'{"type":"head')
    reader = JournalReader(path)
    assert list(reader.records())
    assert reader.torn is not None
    assert reader.torn.file == last


def test_the_engines_start_agrees_with_the_header_and_comes_once(numbered: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(path, a_run(numbered, 2))
    head, start, *rest = path.read_bytes().splitlines(keepends=True)
    altered = start.replace(b'"schema_version":%d' % SCHEMA_VERSION, b'"schema_version":99')
    path.write_bytes(head + altered + b"".join(rest))
    says = f"schema_version is 99, the journal's header says {SCHEMA_VERSION}"
    with pytest.raises(JournalError, match=rf"run\.jsonl:2: {says}"):
        list(JournalReader(path).records())
    path.write_bytes(head + start + start)
    with pytest.raises(JournalError, match=r"run\.jsonl:3: a second EngineStarted"):
        list(JournalReader(path).records())


def test_what_is_no_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"absent\.jsonl: no such journal$"):
        JournalReader(tmp_path / "absent.jsonl")
    with pytest.raises(
        JournalError, match=r"^127\.0\.0\.1:8000: no such journal; a live engine is http://127\.0\.0\.1:8000$"
    ):
        JournalReader(Path("127.0.0.1:8000"))
    other = tmp_path / "other.jsonl"
    other.write_text('{"some": "file"}\n')
    with pytest.raises(JournalError, match=r"other\.jsonl:1: no journal header"):
        JournalReader(other)
    other.write_text("")
    with pytest.raises(JournalError, match=r"other\.jsonl: the file is empty"):
        JournalReader(other)
    other.write_text('{"type":"LockChanged","seq":1,"step":2,"t_ns":3,"node":4,"rid":"a","delta":1,"count":1}\n')
    with pytest.raises(JournalError, match="LockChanged, not a header"):
        JournalReader(other)


def test_truncated_gzip_is_a_torn_tail(numbered: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(path, a_run(numbered, 200))
    packed = tmp_path / "run2.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes())[:-200])
    reader = JournalReader(packed)
    read = list(reader.records())
    assert 1 < len(read) < 500
    assert reader.torn is not None


def test_the_journal_of_a_request_that_ends_has_its_refusals_before_its_end(numbered: Any, tmp_path: Path) -> None:
    numbered.started()
    numbered.refused("a", 1)
    numbered.refused("a", 2)
    numbered.transition("a", 2, RequestState.FINISHED, Cause.ABORT)
    write(tmp_path / "run.jsonl", numbered.events)
    kinds = [record.type for record in JournalReader(tmp_path / "run.jsonl").records()]
    assert kinds[2:5] == ["AdmissionDecided", "refusals_folded", "RequestTransitioned"]


@pytest.mark.parametrize("name", ["x" * 5000, "absent", "."])
def test_a_path_that_cannot_be_a_journal_is_said(tmp_path: Path, name: str) -> None:
    with pytest.raises(JournalError):
        JournalReader(tmp_path / name)


def test_devices_and_endless_lines_are_no_journals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither may be read into memory without end."""
    with pytest.raises(JournalError, match="no such journal"):
        JournalReader(Path("/dev/zero"))
    monkeypatch.setattr("telemetry.journal_reader.MAX_LINE_BYTES", 1000)
    path = tmp_path / "weights.bin"
    path.write_bytes(b"x" * 5000)
    with pytest.raises(JournalError, match=r"weights\.bin:1: longer than 1000 bytes"):
        JournalReader(path)


def test_a_journal_that_was_not_closed_says_that_its_end_is_open(numbered: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    sink = JournalSink(path)
    sink.emit(numbered.started())
    sink.emit(numbered.planned(1))
    sink.flush()
    reader = JournalReader(path)
    assert len(list(reader.records())) == 3
    assert (reader.torn, reader.open_end is not None) == (None, True)
    assert f"{path}:3 is no closing checkpoint" in str(reader.open_end)
    sink.close()
    assert len(list(reader.records())) == 4
    assert (reader.torn, reader.open_end) == (None, None)

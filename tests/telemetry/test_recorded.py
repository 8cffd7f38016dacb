"""Recorded sources: at every step a journal answers as the engine did, in whatever order the steps are asked for."""

from __future__ import annotations

import gc
import gzip
from array import array
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.clock import VirtualClock
from engine.events import AnyEvent
from telemetry import recorded
from telemetry.export.source import feed
from telemetry.observe import Value
from telemetry.read_model import NotStarted, ReadModel
from telemetry.recorded import RecordedSource, Recording
from telemetry.recorded_states import UNCOLLECTED, RecordedClock, kept, restored
from telemetry.request_timeline import RequestTimeline
from telemetry.schema import LineUnion

JOURNAL = Path(__file__).parent / "data" / "cookbook.jsonl.gz"


@pytest.fixture(scope="module")
def recording() -> Recording:
    """The cookbook's journal with many kept states, so that they are used."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recorded, "SPACING", 300)
        return Recording(JOURNAL, in_background=False)


@pytest.fixture(scope="module")
def events() -> list[AnyEvent]:
    heard: list[AnyEvent] = []
    feed(JOURNAL, lambda event: None if isinstance(event, LineUnion) else heard.append(event))
    return heard


def answers(source: RecordedSource | ReadModel, rids: list[str]) -> list[Value | None]:
    pages = source.pages() if isinstance(source, RecordedSource) else source.page_map()
    told = [each for rid in rids for each in (source.request(rid), source.explain(rid))]
    return [
        source.status(),
        source.queue(500),
        source.passes(48),
        source.latency(),
        source.requests(500),
        source.breakdown(),
        source.lanes(40),
        pages,
        *told,
    ]


def test_every_event_is_kept_and_every_step_is_a_place(recording: Recording, events: list[AnyEvent]) -> None:
    told = recording.progress()
    assert told.is_read
    assert told.error is None
    assert told.events == len(events)
    assert [recording.event(i) for i in (0, 77, len(events) - 1)] == [events[0], events[77], events[-1]]
    assert recording.event_of(events[500].seq) == events[500]
    assert told.steps[0] == 1
    assert recording.moment(10**9).step == told.steps[1]
    assert recording.at_step(17).step == 17
    assert recording.at_step(0) == recording.at_time(-1.0) == recording.moment(0)
    assert recording.at_time(recording.at_step(100).at_s).step == 100
    for odd in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(ValueError, match=f"seconds={odd}: a finite number is needed"):
            recording.at_time(odd)
    assert len(recording._states) > 5


@settings(max_examples=12, deadline=None)
@given(steps=st.lists(st.integers(1, 855), min_size=1, max_size=4))
def test_in_any_order_it_answers_as_a_model_that_was_told_everything_up_to_there(
    recording: Recording, events: list[AnyEvent], steps: list[int]
) -> None:
    source = RecordedSource(recording)
    for step in steps:
        moment = recording.at_step(step)
        source.seek(moment)
        clock = VirtualClock(recording.time_ns(moment))
        straight = ReadModel(clock=clock, expects_responses=True)
        for event in events[: recording.events_until(moment)]:
            straight.emit(event)
        rids = [*list(straight.tracker.live)[:2], *list(straight.finished)[-2:]]
        assert answers(source, rids) == answers(straight, rids)
        assert source.status().step == step


def test_a_kept_state_holds_no_events(recording: Recording) -> None:
    assert max(len(state) for _, state in recording._states) < 400_000
    assert b"StepPlanned" not in recording._states[-1][1]


@pytest.mark.parametrize("step", [3, 200, 600])
def test_a_request_of_a_kept_state_is_the_same_in_every_field_and_shares_none(
    recording: Recording, events: list[AnyEvent], step: int
) -> None:
    """Only what differs from a fresh request is written: a field that is left out must come back all the same."""
    clock = RecordedClock()
    model = ReadModel(clock=clock, expects_responses=True)
    for event in events[: recording.events_until(recording.at_step(step))]:
        clock.t_ns = event.t_ns
        model.emit(event)
    back = restored(kept(model, clock), recording.event_of, clock)
    for before, after in ((model.tracker.live, back.tracker.live), (model.finished, back.finished)):
        assert list(after) == list(before)
        for rid, request in after.items():
            for name in RequestTimeline.__slots__:
                own, kept_one = getattr(before[rid], name), getattr(request, name)
                assert type(kept_one) is type(own), name
                if name in {"chunks", "held"}:
                    assert len(kept_one) == len(own), name
                else:
                    assert kept_one == own, name
                assert not isinstance(own, deque) or kept_one.maxlen == own.maxlen, name
    containers = [
        id(value)
        for request in back.tracker.live.values()
        for value in (getattr(request, name) for name in RequestTimeline.__slots__)
        if isinstance(value, list | dict | deque | array)
    ]
    assert containers
    assert len(set(containers)) == len(containers)


def test_what_is_made_uncollected_is_old_when_collections_go_on() -> None:
    """Else the next one would go through a whole restored model, and hold up the step of a recording."""
    assert gc.isenabled()
    with UNCOLLECTED:
        assert not gc.isenabled()
        made = [[number] for number in range(2_000)]
    assert gc.isenabled()
    young = {id(each) for generation in (0, 1) for each in gc.get_objects(generation)}
    assert not young & {id(each) for each in made}
    assert gc.get_freeze_count() == 0, "nothing is kept from collections for good"


def test_kept_states_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "SPACING", 20)
    monkeypatch.setattr(recorded, "MAX_STATES", 6)
    recording = Recording(JOURNAL, in_background=False)
    assert len(recording._states) <= 6
    assert recording._spacing > 20


def test_before_the_first_place_there_is_no_answer(recording: Recording) -> None:
    with pytest.raises(NotStarted):
        RecordedSource(recording).status()


def test_an_altered_line_is_named_with_file_and_number(tmp_path: Path) -> None:
    lines = gzip.decompress(JOURNAL.read_bytes()).splitlines(keepends=True)
    altered = tmp_path / "altered.jsonl"
    altered.write_bytes(b"".join([*lines[:900], b'{"type":"StepPlanned","seq":\n', *lines[901:]]))
    told = Recording(altered, in_background=False).progress()
    assert told.error is not None
    assert "altered.jsonl:901" in told.error
    assert told.is_read


def test_a_torn_journal_is_shown_up_to_its_end_with_a_note(tmp_path: Path) -> None:
    whole = gzip.decompress(JOURNAL.read_bytes())
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(whole[: len(whole) // 2])
    recording = Recording(torn, in_background=False)
    told = recording.progress()
    assert told.error is None
    assert any("ends before its time" in note for note in told.notes)
    source = RecordedSource(recording)
    source.seek(recording.moment(told.moments - 1))
    assert source.status().step == told.steps[1] > 100


def test_a_journal_that_was_cut_at_a_whole_line_is_shown_with_a_note(tmp_path: Path) -> None:
    lines = gzip.decompress(JOURNAL.read_bytes()).splitlines(keepends=True)
    notes = []
    for part in (lines, lines[:400]):
        path = tmp_path / f"{len(part)}.jsonl"
        path.write_bytes(b"".join(part))
        notes.append(" ".join(Recording(path, in_background=False).progress().notes))
    assert ["no clean end" in note for note in notes] == [False, True]


@pytest.mark.parametrize("text", [b"", b"no journal\n", b'{"type":"header"}\n'])
def test_what_is_no_journal_is_an_error_and_no_place(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(text)
    recording = Recording(path, in_background=False)
    assert str(path) in (recording.progress().error or "")
    with pytest.raises(LookupError):
        recording.moment(0)


def test_a_fault_of_ours_is_told_and_ends_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: ReadModel, event: AnyEvent) -> None:
        raise AttributeError("no such field")

    monkeypatch.setattr(ReadModel, "emit", fails)
    told = Recording(JOURNAL, in_background=False).progress()
    assert told.is_read
    assert f"{JOURNAL}: a fault of admitscope, not of the file: AttributeError" in (told.error or "")

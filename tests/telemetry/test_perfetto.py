"""A Perfetto trace says what the records and the span trees say, is sorted, nested and whole, for any window."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.events import EngineStarted
from telemetry.export.perfetto import ENGINE, REQUESTS, Trace, export_trace, lanes
from telemetry.export.source import feed, survey
from telemetry.export.trace_file import TraceFile
from telemetry.journal_reader import JournalReader
from telemetry.schema import LineUnion
from telemetry.schema_events import StepCompletedRecord, StepPlannedRecord
from telemetry.settings import ExportCommand
from telemetry.spans.draft import SpanDraft
from telemetry.spans.sink import SpanSink

JOURNAL = Path(__file__).parent / "data" / "cookbook.jsonl.gz"
Entry = dict[str, Any]

_NUMBER = {"type": "number"}
_ID = {"type": "integer", "minimum": 0}
_COMMON = {"name": {"type": "string"}, "pid": _ID}
_ARGS = {"type": "object"}
_WHAT = ("process", "thread")
#: The trace-event format, of the phases that are written.
SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "additionalProperties": False,
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object", "additionalProperties": {"type": ["string", "integer"]}},
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    {
                        "additionalProperties": False,
                        "required": ["name", "cat", "ph", "ts", "dur", "pid", "tid"],
                        "properties": {
                            **_COMMON,
                            "ph": {"const": "X"},
                            "cat": {"type": "string"},
                            "tid": _ID,
                            "args": _ARGS,
                            "ts": {**_NUMBER, "minimum": 0},
                            "dur": {**_NUMBER, "minimum": 0},
                        },
                    },
                    {
                        "additionalProperties": False,
                        "required": ["name", "ph", "ts", "pid", "tid", "s"],
                        "properties": {
                            **_COMMON,
                            "ph": {"const": "i"},
                            "s": {"const": "t"},
                            "cat": {"type": "string"},
                            "tid": _ID,
                            "ts": {**_NUMBER, "minimum": 0},
                            "args": _ARGS,
                        },
                    },
                    {
                        "additionalProperties": False,
                        "required": ["name", "ph", "ts", "pid", "args"],
                        "properties": {
                            **_COMMON,
                            "ph": {"const": "C"},
                            "ts": {**_NUMBER, "minimum": 0},
                            "args": {"type": "object", "minProperties": 1, "additionalProperties": _NUMBER},
                        },
                    },
                    {
                        "additionalProperties": False,
                        "required": ["name", "ph", "pid", "tid", "args"],
                        "properties": {
                            **_COMMON,
                            "ph": {"const": "M"},
                            "tid": _ID,
                            "args": _ARGS,
                            "name": {
                                "enum": ["process_name", "process_sort_index", "thread_name", "thread_sort_index"]
                            },
                        },
                    },
                ]
            },
        },
    },
}


def exported(path: Path, journal: Path = JOURNAL, *, spill: int = 100_000, **fields: Any) -> tuple[Trace, list[Entry]]:
    """A trace and its entries, checked in every way that holds for all of them."""
    command = ExportCommand(journal=journal, perfetto=path, **fields)
    trace = export_trace(command, path, spill=spill)
    text = path.read_text(encoding="utf-8")
    whole = json.loads(text, parse_float=Decimal)
    entries: list[Entry] = whole["traceEvents"]
    assert trace.entries == len(entries)
    assert trace.bytes == path.stat().st_size
    is_sorted(entries)
    is_nested(entries)
    is_named(entries)
    return trace, entries


def ns(value: Decimal | int) -> int:
    """Microseconds as nanoseconds; none is a fraction of one."""
    exact = value * 1_000
    assert exact == int(exact)
    return int(exact)


def is_sorted(entries: list[Entry]) -> None:
    times = [entry.get("ts", -1) for entry in entries]
    assert times == sorted(times)


def is_nested(entries: list[Entry]) -> None:
    """On one track, spans lie in one another or apart; instants lie in a span."""
    open_ends: dict[tuple[int, int], list[int]] = defaultdict(list)
    for entry in entries:
        if entry["ph"] != "X":
            continue
        start, end = ns(entry["ts"]), ns(entry["ts"]) + ns(entry["dur"])
        ends = open_ends[entry["pid"], entry["tid"]]
        while ends and ends[-1] <= start:
            ends.pop()
        assert not ends or end <= ends[-1], entry
        ends.append(end)


def is_named(entries: list[Entry]) -> None:
    tracks = {(entry["pid"], entry["tid"]) for entry in entries if entry["ph"] in "Xi"}
    named = [(entry["pid"], entry["tid"]) for entry in entries if entry["name"] == "thread_name"]
    assert tracks <= set(named)
    assert len(named) == len(set(named))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, list[Entry]]:
    return exported(tmp_path_factory.mktemp("trace") / "run.json")


def spans_of(entries: list[Entry], pid: int) -> list[Entry]:
    return [entry for entry in entries if entry["ph"] == "X" and entry["pid"] == pid]


class Trees:
    """The span trees that a collector would get."""

    def __init__(self) -> None:
        self.spans: list[SpanDraft] = []

    def start(self, engine: EngineStarted) -> None:
        self.zero_ns = engine.t_ns

    def send(self, spans: list[SpanDraft]) -> None:
        if spans[0].name != "engine.step":
            self.spans += spans

    def refuse(self, spans: int) -> None:
        raise AssertionError("no limit")

    def close(self) -> None:
        pass


def test_requests_have_the_cuts_that_a_collector_gets(whole: tuple[Trace, list[Entry]]) -> None:
    trees = Trees()
    sink = SpanSink(trees, expects_responses=True, sample_ratio=1.0, max_traces_per_s=1e12)
    feed(JOURNAL, lambda event: None if isinstance(event, LineUnion) else sink.emit(event))
    sink.close()
    expected = sorted((max(0, span.start_ns - trees.zero_ns), span.end_ns - trees.zero_ns) for span in trees.spans)
    shown = [entry for entry in spans_of(whole[1], REQUESTS) if not entry["name"].startswith("held: ")]
    assert sorted((ns(entry["ts"]), ns(entry["ts"]) + ns(entry["dur"])) for entry in shown) == expected
    names = {entry["name"] for entry in shown if not re.fullmatch(r"r\d+", entry["name"])}
    assert names == {"intake", "queue", "retracted", "prefill.chunk", "between_chunks", "decode", "emit", "stream"}


def test_the_file_is_of_the_trace_event_format(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    exported(path, from_step=40, to_step=70)
    document = json.loads(path.read_text(encoding="utf-8"))
    assert {entry["ph"] for entry in document["traceEvents"]} == {"X", "i", "C", "M"}
    jsonschema.Draft202012Validator(SCHEMA).validate(document)


def test_every_moment_of_a_queue_is_held_by_one_blocker(whole: tuple[Trace, list[Entry]]) -> None:
    queued = sum(ns(entry["dur"]) for entry in spans_of(whole[1], REQUESTS) if entry["name"] == "queue")
    between = [entry for entry in spans_of(whole[1], REQUESTS) if entry["name"] == "between_chunks"]
    held = [entry for entry in spans_of(whole[1], REQUESTS) if entry["name"].startswith("held: ")]
    paused = sum(
        ns(entry["dur"])
        for entry in held
        if any(
            around["tid"] == entry["tid"]
            and around["ts"] <= entry["ts"]
            and entry["ts"] + entry["dur"] <= around["ts"] + around["dur"]
            for around in between
        )
    )
    assert sum(ns(entry["dur"]) for entry in held) - paused == queued
    assert {entry["args"]["blocker"] for entry in held} >= {"kv_total", "order", "chunk"}


def test_steps_have_their_phases_and_times(whole: tuple[Trace, list[Entry]]) -> None:
    records = list(JournalReader(JOURNAL).records())
    zero = next(record.mono_ns for record in records if record.type == "header")
    done = {record.step: record for record in records if isinstance(record, StepCompletedRecord)}
    steps = [entry for entry in spans_of(whole[1], ENGINE) if entry["name"] == "step"]
    assert len(steps) == whole[0].steps == sum(record.kind != "idle" for record in done.values())
    for entry in steps:
        times = done[int(entry["args"]["step"])].times
        assert ns(entry["ts"]) == times.started_ns - zero
        assert ns(entry["dur"]) == times.applied_ns - times.started_ns
    phases = {entry["name"] for entry in spans_of(whole[1], ENGINE)} - {"step"}
    assert phases == {"step.plan", "step.commit", "step.prepare", "step.forward", "step.apply"}


def test_counters_equal_the_records(whole: tuple[Trace, list[Entry]]) -> None:
    records = list(JournalReader(JOURNAL).records())
    zero = next(record.mono_ns for record in records if record.type == "header")
    shown: dict[str, list[tuple[int, Entry]]] = defaultdict(list)
    for entry in whole[1]:
        if entry["ph"] == "C":
            shown[entry["name"]].append((ns(entry["ts"]), entry["args"]))
    expected: dict[str, list[tuple[int, Entry]]] = defaultdict(list)
    states = ("free", "private", "protected", "evictable")
    for record in records:
        if isinstance(record, StepPlannedRecord | StepCompletedRecord):
            at = record.t_ns - zero
            expected["pages"].append((at, dict(zip(states, record.pages, strict=True))))
            expected["requests"].append((at, {"waiting": record.num_waiting, "running": record.num_running}))
        if isinstance(record, StepPlannedRecord):
            at = record.t_ns - zero
            expected["promised (tokens)"].append((at, {"promised": Decimal(str(record.promised_tokens))}))
            if record.budget_open and record.budget_close:
                before, after = record.budget_open.rem_input, record.budget_close.rem_input
                expected["ledger compute (tokens)"].append((at, {"open": before, "close": after}))
                chunk = {"open": record.budget_open.rem_chunk, "close": record.budget_close.rem_chunk}
                expected["ledger chunk (tokens)"].append((at, chunk))
    for name, values in expected.items():
        assert sorted(shown[name], key=lambda each: each[0]) == sorted(values, key=lambda each: each[0]), name
    assert {"ledger kv_total (tokens)", "ledger kv_now (tokens)", "new_token_ratio"} <= shown.keys()


def test_a_chunk_shows_its_ledgers_and_a_refusal_need_and_have(whole: tuple[Trace, list[Entry]]) -> None:
    chunks = [entry for entry in spans_of(whole[1], REQUESTS) if entry["name"] == "prefill.chunk"]
    assert all("compute.before" in entry["args"] for entry in chunks)
    refusals = [entry for entry in whole[1] if entry["name"] == "admission.refused"]
    assert any("need" in entry["args"] and "have" in entry["args"] for entry in refusals)


# --- windows ----------------------------------------------------------------------------------------------------------


def test_a_window_of_steps_shows_these_steps_and_what_overlaps(tmp_path: Path) -> None:
    trace, entries = exported(tmp_path / "w.json", from_step=200, to_step=230)
    steps = [int(entry["args"]["step"]) for entry in spans_of(entries, ENGINE) if entry["name"] == "step"]
    assert steps == list(range(200, 231))
    found = survey(JOURNAL, from_step=200, to_step=230)
    assert found.cuts is not None
    low, high = (cut - found.start_ns for cut in found.cuts)
    for entry in spans_of(entries, REQUESTS):
        assert low <= ns(entry["ts"]) <= ns(entry["ts"]) + ns(entry["dur"]) <= high
    assert 0 < trace.requests < 110
    assert any("clipped_from_ms" in entry["args"] for entry in spans_of(entries, REQUESTS))


def test_a_window_ends_a_reading_early_and_tells_ends_that_come_later(tmp_path: Path) -> None:
    """What was open at the window's end has its true end: nothing is told to have been shut down."""
    trace, entries = exported(tmp_path / "w.json", from_s=0.5, to_s=0.6)
    full, _ = exported(tmp_path / "f.json")
    assert trace.told.events < full.told.events
    assert not [entry for entry in entries if entry.get("args", {}).get("error") == "shutdown"]


def test_one_request_is_shown_alone(tmp_path: Path) -> None:
    trace, entries = exported(tmp_path / "r.json", rid=("r7", "r8"))
    assert trace.requests == 2
    names = [entry["args"]["name"] for entry in entries if entry["name"] == "thread_name" and entry["pid"] == REQUESTS]
    assert sorted(names) == ["r7", "r7 response", "r8", "r8 response"]


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 700), st.integers(0, 120))
def test_any_window_is_sorted_nested_and_named(tmp_path_factory: pytest.TempPathFactory, first: int, more: int) -> None:
    exported(tmp_path_factory.mktemp("w") / "w.json", from_step=first, to_step=first + more, spill=500)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_runs_put_aside_are_merged_into_the_same_file(tmp_path: Path) -> None:
    _, small = exported(tmp_path / "small.json", spill=100)
    _, large = exported(tmp_path / "large.json")
    assert small == large
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large.json", "small.json"]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=40))
def test_entries_leave_sorted_with_the_longer_one_around(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.mktemp("t") / "t.json"
    with TraceFile(path, {}, spill=7) as file:
        for start, length in spans:
            file.span("s", "c", start, start + length, pid=1, tid=1, args={})
        file.finish()
    entries = json.loads(path.read_text(), parse_float=Decimal)["traceEvents"]
    found = [(ns(entry["ts"]), -ns(entry["dur"])) for entry in entries]
    assert found == sorted((start, -length) for start, length in spans)


def test_a_run_that_was_cut_short_shows_what_was_open(tmp_path: Path, simulated: Any) -> None:
    journal = tmp_path / "run.jsonl"
    run = simulated(journal, 5)
    run.play(40, stop_after=60)
    _, entries = exported(tmp_path / "t.json", journal)
    assert any(entry["args"].get("error") == "shutdown" for entry in spans_of(entries, REQUESTS))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=25))
def test_lanes_never_hold_spans_that_lie_across(pairs: list[tuple[int, int]]) -> None:
    spans = [
        SpanDraft(f"s{at}", 1, at + 1, None, start, start + length, {}) for at, (start, length) in enumerate(pairs)
    ]
    placed = lanes(spans)
    assert len(placed) == len(spans)
    for at, (lane, span) in enumerate(placed):
        for other_lane, other in placed[:at]:
            if lane == other_lane:
                apart = other.end_ns <= span.start_ns or span.end_ns <= other.start_ns
                inside = other.start_ns <= span.start_ns and span.end_ns <= other.end_ns
                assert apart or inside

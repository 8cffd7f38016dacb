"""A journal's inputs, fed to a fresh scheduler, give the same journal again; whatever was altered is found."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import Policy
from engine.events import ResponseSent
from engine.request import Cause
from telemetry.buffered import BufferedSink
from telemetry.check import check
from telemetry.export.source import feed
from telemetry.journal import JournalError, JournalSink, segment_path
from telemetry.replay import render, replay

RUNS = [(2, 16, Policy.LPM), (3, 1, Policy.FCFS), (4, 16, Policy.SHORTEST_PREFILL_FIRST), (5, 4, Policy.FCFS)]


def write(path: Path, events: list[Any], **options: Any) -> Path:
    sink = JournalSink(path, **options)
    for event in events:
        sink.emit(event)
    sink.close()
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, simulated_run: Any) -> Callable[..., tuple[Path, list[Any]]]:
    """(journal, events) of a run, played once for each argument list."""
    kept: dict[Any, tuple[Path, list[Any]]] = {}

    def get(seed: int, page_size: int, policy: Policy) -> tuple[Path, list[Any]]:
        key = (seed, page_size, policy)
        if key not in kept:
            path = tmp_path_factory.mktemp("run") / "run.jsonl"
            run = simulated_run(path, seed, policy=policy, page_size=page_size)
            run.play(50, fail_at_step=100)
            kept[key] = (path, run.recorded.events)
        return kept[key]

    return get


@pytest.mark.parametrize(("seed", "page_size", "policy"), RUNS)
def test_a_recorded_run_replays_to_the_identical_hash(recorded: Any, seed: int, page_size: int, policy: Policy) -> None:
    path, events = recorded(seed, page_size, policy)
    core = [event for event in events if not isinstance(event, ResponseSent)]
    by_hand = blake2b(b"".join(msgspec.json.encode(event) + b"\n" for event in core), digest_size=16).hexdigest()
    report = replay(path)
    assert render(report).startswith(f"identical, {len(core):,} events, ")
    assert (report.verdict, report.exit_code, report.hash, report.events) == ("identical", 0, by_hand, len(core))
    assert report.checkpoints > 1
    assert (report.torn, report.unchecked, report.note, report.divergence) == (None, 0, "", None)


def test_the_recorded_runs_hold_what_makes_replay_hard(recorded: Any) -> None:
    seen: Counter[str] = Counter()
    for run in RUNS:
        for event in recorded(*run)[1]:
            name = type(event).__name__
            if name == "AdmissionDecided":
                seen[event.reason] += 1
            elif name == "RequestTransitioned":
                seen[f"cause {event.cause}"] += 1
            elif name == "StepPlanned":
                seen[event.kind] += 1
    for kind in ("admitted_next_chunk", "kv_total_exhausted", "chunk_below_page", "mixed", "extend", "decode"):
        assert seen[kind], kind
    for cause in (Cause.RETRACT, Cause.ABORT, Cause.ERROR, Cause.LENGTH, Cause.STOP):
        assert seen[f"cause {cause}"], cause


def test_allocation_misses_are_inputs_too(tmp_path: Path, simulated: Any) -> None:
    run = simulated(tmp_path / "run.jsonl", 7)
    run.engine.scheduler.kv.allocation_fault = lambda _phase: run.engine.steps_done % 7 == 3
    run.play(20)
    assert sum(event.claim_failed for event in run.recorded.events if hasattr(event, "claim_failed")) > 3
    assert replay(tmp_path / "run.jsonl").verdict == "identical"


def test_a_journal_written_through_the_buffer_replays(tmp_path: Path, recorded: Any) -> None:
    _, events = recorded(*RUNS[0])
    sink = BufferedSink(JournalSink(tmp_path / "run.jsonl"), "journal", period_s=0.001)
    for event in events:
        sink.emit(event)
    assert sink.close()
    assert replay(tmp_path / "run.jsonl").verdict == "identical"


def test_rotated_and_compressed_segments_replay(tmp_path: Path, recorded: Any) -> None:
    _, events = recorded(*RUNS[0])
    path = write(tmp_path / "run.jsonl", events, rotate_bytes=100_000)
    second = segment_path(path, 1)
    with gzip.open(f"{second}.gz", "wb") as packed:
        packed.write(second.read_bytes())
    second.unlink()
    report = replay(tmp_path)
    assert (report.verdict, report.events) == ("identical", len([e for e in events if not isinstance(e, ResponseSent)]))
    assert replay(segment_path(path, 2)) == report, "any file of a journal names it"


# The folder of a test is used again by all its examples: each writes its file anew.
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(min_value=0))
def test_a_torn_journal_replays_up_to_the_tear(tmp_path: Path, recorded: Any, cut: int) -> None:
    path, events = recorded(*RUNS[2])
    data = path.read_bytes()
    first_events = data.index(b"\n", data.index(b"\n") + 1) + 1
    kept = data[: first_events + cut % (len(data) // 3)]
    (tmp_path / "torn.jsonl").write_bytes(kept)
    report = replay(tmp_path / "torn.jsonl")
    assert report.verdict == "identical"
    assert report.exit_code == 0
    assert report.divergence is None
    assert report.events + report.unchecked <= len(events)
    written = kept[: kept.rindex(b"\n") + 1].count(b'"t_ns"')
    assert report.events + report.unchecked >= written - kept.count(b'"ResponseSent"')
    if not kept.endswith(b"\n") and not kept.endswith(b"}"):
        assert report.torn is not None


def test_a_journal_that_was_cut_at_a_whole_line_has_no_clean_end(tmp_path: Path, recorded: Any) -> None:
    path, _ = recorded(*RUNS[2])
    assert replay(path).open_end is None
    lines = path.read_bytes().splitlines(keepends=True)
    (tmp_path / "cut.jsonl").write_bytes(b"".join(lines[:-1]))
    report = replay(tmp_path / "cut.jsonl")
    assert (report.verdict, report.torn) == ("identical", None)
    assert f"the journal has no clean end: {report.open_end}" in render(report)


def altered(path: Path, target: Path, kind: str, change: dict[str, Any]) -> int:
    """Copy the journal with `change` made to the middle one of its lines of `kind`; returns the line's number."""
    lines = path.read_bytes().splitlines(keepends=True)
    places = [index for index, line in enumerate(lines) if line.startswith(f'{{"type":"{kind}"'.encode())]
    index = places[len(places) // 2]
    lines[index] = msgspec.json.encode(json.loads(lines[index]) | change) + b"\n"
    target.write_bytes(b"".join(lines))
    return index + 1


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("AdmissionDecided", {"remaining_total_after": 1.5}),
        ("AdmissionDecided", {"reason": "delayed"}),
        ("StepPlanned", {"new_token_ratio": 0.25}),
        ("StepPlanned", {"decodes": []}),
        ("PagesMoved", {"cause": "somehow"}),
        ("LockChanged", {"count": 7}),
        ("RequestTransitioned", {"output_len": 99}),
        ("checkpoint", {"hash": "00" * 16}),
        ("checkpoint", {"events": 1}),
    ],
)
def test_an_altered_line_is_the_first_divergence(
    tmp_path: Path, recorded: Any, kind: str, change: dict[str, Any]
) -> None:
    path, _ = recorded(*RUNS[0])
    target = tmp_path / "altered.jsonl"
    number = altered(path, target, kind, change)
    report = replay(target)
    assert (report.verdict, report.exit_code) == ("diverged", 1)
    assert report.divergence is not None
    assert report.divergence.where == f"{target}:{number}"
    [field] = change
    difference = next(d for d in report.divergence.fields if d.field == field)
    assert difference.recorded == change[field]
    assert difference.replayed != change[field]
    text = render(report)
    assert f"diverged at {target}:{number} (step " in text
    assert field in text
    around = report.divergence.around
    assert around is not None
    assert sum(around.pages.values()) == 40
    assert around.step in {report.divergence.step, (report.divergence.step or 0) - 1}
    assert len(around.agreed) == 5
    assert "the scheduler then, in step " in text
    assert f"the last lines that agree:\n  {around.agreed[0]}" in text


def test_a_divergence_tells_the_request_that_it_is_about_as_it_was_then(tmp_path: Path, recorded: Any) -> None:
    path, events = recorded(*RUNS[0])
    number = altered(path, tmp_path / "altered.jsonl", "RequestTransitioned", {"cause": "stop"})
    line = json.loads(path.read_bytes().splitlines()[number - 1])
    report = replay(tmp_path / "altered.jsonl")
    assert report.divergence is not None
    assert report.divergence.around is not None
    request = report.divergence.around.request
    assert request is not None
    assert (request.rid, request.state) == (line["rid"], line["target"])
    assert (request.prompt_len, request.output_len) == (line["prompt_len"], line["output_len"])
    before = [event for event in events if event.seq < line["seq"] and type(event).__name__ != "ResponseSent"]
    assert f"seq {before[-1].seq} {type(before[-1]).__name__}" in report.divergence.around.agreed[-1]
    assert f"  {request.rid} is {request.state}: prompt {request.prompt_len}" in render(report)


def test_an_altered_input_is_found_by_what_follows_from_it(tmp_path: Path, recorded: Any) -> None:
    path, _ = recorded(*RUNS[0])
    target = tmp_path / "altered.jsonl"
    for kind, change in (
        ("RequestArrived", {"prompt_len": 5000}),
        ("StepCompleted", {"rows": []}),
        ("StepCompleted", {"failed": True}),
        ("AbortRequested", {"rid": "nobody"}),
    ):
        number = altered(path, target, kind, change)
        report = replay(target)
        assert report.verdict == "diverged", kind
        assert report.divergence is not None
        assert int(report.divergence.where.rpartition(":")[2]) >= number - 30


def test_bytes_that_are_no_text_are_a_divergence_too(tmp_path: Path, recorded: Any) -> None:
    path = write(tmp_path / "run.jsonl", recorded(*RUNS[0])[1])
    lines = path.read_bytes().splitlines(keepends=True)
    at = next(index for index, line in enumerate(lines) if b'"type":"RequestTransitioned"' in line)
    lines[at] = lines[at].replace(b'"detail"', b'"det\xffil"', 1)  # names of unknown fields are passed over unread
    path.write_bytes(b"".join(lines))
    report = replay(path)
    assert report.verdict == "diverged"
    assert report.divergence is not None
    assert report.divergence.where.endswith(f":{at + 1}")


def test_a_line_too_few_is_a_gap_and_one_too_many_a_divergence(tmp_path: Path, recorded: Any) -> None:
    path, _ = recorded(*RUNS[0])
    lines = path.read_bytes().splitlines(keepends=True)
    where = next(i for i in range(len(lines) // 2, len(lines)) if b'"LockChanged"' in lines[i])
    target = tmp_path / "altered.jsonl"
    target.write_bytes(b"".join([*lines[:where], *lines[where + 1 :]]))
    cut = replay(target)
    assert (cut.verdict, cut.exit_code, cut.divergence) == ("incomplete", 2, None)
    assert cut.gap is not None
    assert (cut.gap.missing, cut.gap.after_seq + 1) == (1, json.loads(lines[where])["seq"])
    target.write_bytes(b"".join([*lines[:where], lines[where], *lines[where:]]))
    report = replay(target)
    assert report.divergence is not None
    assert report.divergence.where == f"{target}:{where + 2}"


def test_an_altered_fold_is_a_divergence(tmp_path: Path, simulated: Any) -> None:
    path = a_folding_run(tmp_path, simulated)
    target = tmp_path / "altered.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    where = next(i for i, line in enumerate(lines) if b'"refusals_folded"' in line)
    content = json.loads(lines[where])
    assert replay(path).verdict == "identical"
    for change in ({"count": content["count"] + 1}, {"need": 1.0}, {"last_step": content["last_step"] - 1}):
        target.write_bytes(
            b"".join([*lines[:where], msgspec.json.encode(content | change) + b"\n", *lines[where + 1 :]])
        )
        report = replay(target)
        assert report.divergence is not None, change
        assert report.divergence.where == f"{target}:{where + 1}"
    target.write_bytes(b"".join([*lines[:where], *lines[where + 1 :]]))
    report = replay(target)
    assert (report.verdict, report.divergence) == ("incomplete", None), "a count that is gone is no other decision"
    assert report.gap is not None
    assert report.gap.missing == content["count"]


def a_folding_run(folder: Path, simulated: Any) -> Path:
    """While allocations miss nothing moves: the same request is refused with the same numbers, step after step."""
    run = simulated(folder / "folding.jsonl", 1, policy=Policy.FCFS)
    run.engine.scheduler.kv.allocation_fault = lambda _phase: run.engine.steps_done < 6
    run.add("first", tuple(range(100, 150)), 100)
    run.add("second", tuple(range(500)), 4)
    run.play(0)
    assert b"refusals_folded" in (folder / "folding.jsonl").read_bytes()
    return folder / "folding.jsonl"


def test_a_fold_too_many_in_front_of_a_checkpoint_is_found_there(tmp_path: Path, simulated: Any) -> None:
    path = a_folding_run(tmp_path, simulated)
    lines = path.read_bytes().splitlines(keepends=True)
    fold = next(line for line in lines if b'"refusals_folded"' in line)
    target = tmp_path / "altered.jsonl"
    target.write_bytes(b"".join([*lines[:-1], fold, lines[-1]]))
    report = replay(target)
    assert report.divergence is not None
    assert report.divergence.where == f"{target}:{len(lines)}"
    assert "counts refusals that the replay does not make" in report.divergence.why


def test_a_clamped_request_is_clamped_again(tmp_path: Path, simulated: Any) -> None:
    run = simulated(tmp_path / "run.jsonl", 1)
    run.add("greedy", tuple(range(100, 150)), 5000)
    run.play(0, stop_after=20)
    arrived = next(event for event in run.recorded.events if type(event).__name__ == "RequestArrived")
    assert arrived.max_new_tokens < arrived.requested_new_tokens == 5000
    assert replay(tmp_path / "run.jsonl").verdict == "identical"


def test_a_hole_makes_the_replay_incomplete(tmp_path: Path, recorded: Any) -> None:
    _, events = recorded(*RUNS[0])
    cut = next(i for i in range(len(events) // 2, len(events)) if type(events[i]).__name__ == "StepCompleted")
    path = write(tmp_path / "run.jsonl", [*events[:cut], *events[cut + 20 :]])
    report = replay(path)
    assert (report.verdict, report.exit_code) == ("incomplete", 2)
    assert report.note == f"20 events after seq {events[cut - 1].seq} never reached the journal"
    before = len([e for e in events[:cut] if not isinstance(e, ResponseSent)])
    assert report.events + report.unchecked == before, "the half step in front of the hole has lost its input"
    assert report.unchecked < 10
    assert "not replayed further: 20 events" in render(report)


def test_what_cannot_be_replayed_is_said(tmp_path: Path, recorded: Any, numbered: Any) -> None:
    path, _ = recorded(*RUNS[0])
    lines = path.read_bytes().splitlines(keepends=True)
    target = tmp_path / "late.jsonl"
    target.write_bytes(b"".join([lines[0], *lines[2:]]))
    with pytest.raises(JournalError, match="needs the engine's first event"):
        replay(target)
    for config, wrong in (('{"cache":{}}', "no section 'scheduler'"), ('{"scheduler":{"x":1},"cache":{}}', "x")):
        numbered.seq = 0
        other = write(tmp_path / f"{wrong}.jsonl", [numbered.started(config)])
        with pytest.raises(JournalError, match=wrong):
            replay(other)
    for field, value, wrong in (
        ("config", "{", "cannot be read: Input data was truncated"),
        ("config", "null", "cannot be read: Expected `object`, got `null`"),
        ("config", '{"scheduler":5}', "cannot be read: Expected `object`, got `int`"),
        ("num_pages", -5, "num_pages is -5; 1 to 16777216"),
        ("num_pages", 10**12, "num_pages is 1000000000000; 1 to 16777216"),
    ):
        started = msgspec.json.encode(msgspec.json.decode(lines[1]) | {field: value})
        target.write_bytes(b"".join([lines[0], started + b"\n", *lines[2:40]]))
        for command in (replay, check, lambda journal: feed(journal, lambda _: None)):
            with pytest.raises(JournalError, match=re.escape(wrong)):
                command(target)
    target.write_bytes(b"".join([*lines[:40], b"{nonsense\n", *lines[40:]]))
    with pytest.raises(JournalError, match=r"late\.jsonl:41"):
        replay(target)


def test_a_journal_of_the_first_version_still_replays(tmp_path: Path) -> None:
    """Recorded before fields were added: what it lacks has its default, what it has must still come out."""
    journal = Path(__file__).parent / "data" / "explained.jsonl.gz"
    report = replay(journal)
    assert (report.verdict, report.divergence) == ("identical", None)
    assert report.events > 1_000
    lines = gzip.decompress(journal.read_bytes()).splitlines()
    at = next(
        number for number, line in enumerate(lines) if b'"type":"StepPlanned"' in line and b'"evicted_pages":0' in line
    )
    lines[at] = lines[at].replace(b'"evicted_pages":0', b'"evicted_pages":1')
    altered = tmp_path / "altered.jsonl"
    altered.write_bytes(b"\n".join(lines) + b"\n")
    assert replay(altered).verdict == "diverged", "defaults excuse nothing else"

"""Facts that SGLang's own scheduler gave, recorded: what journals, laws, explanations and dashboards make of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.events import (
    AbortRequested,
    AdmissionDecided,
    AnyEvent,
    EngineStarted,
    RequestArrived,
    RequestTransitioned,
    StepCompleted,
    StepPlanned,
)
from engine.request import RequestState
from invariants.catalog import LAWS
from telemetry.check import check
from telemetry.explain import explain
from telemetry.export.source import feed
from telemetry.journal import JournalError
from telemetry.journal_reader import JournalReader
from telemetry.recorded import RecordedSource, Recording
from telemetry.replay import replay
from telemetry.schema import LineUnion
from telemetry.sglang.facts import AbortAsked, AnyFact, Arrived, Done, Planned
from telemetry.sglang.support import NOT_JUDGED, NOT_JUDGED_OVERLAPPED
from tests.sglang_plugin import recorded
from tests.sglang_plugin.scenarios import SCENARIOS, Scenario

NAMES = [scenario.name for scenario in SCENARIOS]


def events_of(path: Path) -> list[AnyEvent]:
    """Every event of a journal, as readers hear it."""
    found: list[AnyEvent] = []
    feed(path, lambda event: None if isinstance(event, LineUnion) else found.append(event))
    return found


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sglang")
    for name in NAMES:
        described, facts = recorded.read(name)
        target = recorded.journal(folder / f"{name}.jsonl", described, facts)
        assert not target.mapper.unmapped
        assert not target.mapper.lost
    return {name: folder / f"{name}.jsonl" for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_sglang_keeps_every_law_that_it_can_be_held_to(journals: dict[str, Path], name: str) -> None:
    report = check(journals[name])
    assert report.violations == ()
    assert report.verdict == "held"
    assert report.checks["chunk"] > 50
    assert report.checks["budget"] > 50
    overlaps = "overlapped" in name
    unjudged = set(NOT_JUDGED) | (set(NOT_JUDGED_OVERLAPPED) if overlaps else set())
    for law in unjudged:
        assert any(note.startswith("not judged: ") and law in note for note in report.notes), law


@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_each_scenario_holds_what_it_is_for(journals: dict[str, Path], scenario: Scenario) -> None:
    seen: Counter[str] = Counter()
    for event in events_of(journals[scenario.name]):
        if isinstance(event, AdmissionDecided):
            seen[event.reason] += 1
        elif isinstance(event, RequestTransitioned):
            seen[event.cause] += 1
        elif isinstance(event, StepPlanned) and event.pass_end is not None:
            seen[event.pass_end.stopped_by] += 1
    for word in scenario.holds:
        assert seen[word], f"{word} does not occur: {seen}"


@pytest.mark.parametrize("name", NAMES)
def test_every_request_has_one_end_and_every_token_is_told(journals: dict[str, Path], name: str) -> None:
    arrived, ends, rows = set(), Counter[str](), Counter[str]()
    last: dict[str, int] = {}
    for event in events_of(journals[name]):
        if isinstance(event, RequestArrived):
            arrived.add(event.rid)
        elif isinstance(event, RequestTransitioned) and event.target is RequestState.FINISHED:
            ends[event.rid] += 1
            last[event.rid] = event.output_len
        elif isinstance(event, StepCompleted):
            rows.update(row.rid for row in event.rows)
    assert set(ends) == arrived
    assert set(ends.values()) == {1}
    assert {rid: rows[rid] for rid in arrived} == last


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_events_have_no_holes_and_times_do_not_fall(journals: dict[str, Path], name: str) -> None:
    found = events_of(journals[name])
    assert isinstance(found[0], EngineStarted)
    assert [event.seq for event in found] == list(range(len(found)))
    times = [event.t_ns for event in found]
    assert times == sorted(times)


@pytest.mark.parametrize("name", ["retracted", "overlapped"])
def test_each_request_can_be_explained(journals: dict[str, Path], name: str) -> None:
    for number in range(24):
        life = explain(journals[name], f"r{number}").life
        assert life.end is not None
        assert life.chunks
        assert all(chunk.step_ns is not None for chunk in life.chunks), "each piece has its own step"
        assert life.first_token_ns is not None
        assert life.accepted_ns <= life.first_token_ns <= life.end.at_ns


@pytest.mark.parametrize("name", ["mixed", "retracted-overlapped"])
def test_the_dashboard_shows_it_and_says_whose_it_is(journals: dict[str, Path], name: str) -> None:
    recording = Recording(journals[name], in_background=False)
    progress = recording.progress()
    assert progress.error is None
    assert any("sglang 0.5.23 decided this" in note for note in progress.notes)
    source = RecordedSource(recording)
    source.seek(recording.moment(progress.moments // 2))
    assert source.status().model == "virtual"
    passes = source.passes(512).passes
    assert any(candidate.admitted for row in passes for candidate in row.candidates)
    source.seek(recording.moment(progress.moments))
    assert source.status().requests["waiting"] == 0
    assert source.latency().model_dump_json()


def test_a_journal_says_who_decided_and_what_it_lacks(journals: dict[str, Path]) -> None:
    source = JournalReader(journals["overlapped"]).header.source
    assert source is not None
    assert (source.name, source.version, source.overlaps) == ("sglang", "sglang 0.5.23", True)
    assert "PagesMoved" in source.absent
    assert not JournalReader(journals["plain"]).header.source.overlaps
    with pytest.raises(JournalError, match=r"sglang 0\.5\.23 decided this.*page keys"):
        replay(journals["plain"])
    with pytest.raises(JournalError, match="no snapshot"):
        check(journals["plain"], snapshot=Path("any"))


def test_no_refusal_is_folded_since_nobody_could_unfold_it(journals: dict[str, Path]) -> None:
    assert b"refusals_folded" not in journals["mixed"].read_bytes()


def test_with_overlap_an_outcome_comes_after_the_next_plan_and_keeps_its_step(journals: dict[str, Path]) -> None:
    planned, late = -1, 0
    for event in events_of(journals["overlapped"]):
        if isinstance(event, StepPlanned):
            planned = event.step
        elif isinstance(event, StepCompleted):
            late += event.step == planned - 1
            assert event.step in (planned, planned - 1)
    assert late > 50


def altered(facts: list[AnyFact], index: int, **changes: Any) -> list[AnyFact]:
    """The facts with one of them changed."""
    return [*facts[:index], msgspec.structs.replace(facts[index], **changes), *facts[index + 1 :]]


def first(facts: list[AnyFact], kind: type, wanted: Any) -> int:
    """Place of the first fact of a kind that `wanted` accepts."""
    return next(at for at, fact in enumerate(facts) if isinstance(fact, kind) and wanted(fact))


def admits(fact: Planned) -> bool:
    return fact.pass_ is not None and any(tried.is_admitted for tried in fact.pass_.tried)


def with_tried(fact: Planned, **changes: Any) -> Any:
    """The pass of a plan, its first admitted request changed."""
    assert fact.pass_ is not None
    tried = list(fact.pass_.tried)
    at = next(at for at, each in enumerate(tried) if each.is_admitted)
    tried[at] = msgspec.structs.replace(tried[at], **changes)
    return msgspec.structs.replace(fact.pass_, tried=tuple(tried))


def test_a_ledger_that_was_charged_too_little_is_found(tmp_path: Path) -> None:
    described, facts = recorded.read("plain")
    at = first(facts, Planned, admits)
    plan = facts[at]
    assert isinstance(plan, Planned)
    assert plan.pass_ is not None
    after = next(tried for tried in plan.pass_.tried if tried.is_admitted).after
    cheaper = msgspec.structs.replace(after, rem_input=after.rem_input + 16)
    recorded.journal(tmp_path / "j.jsonl", described, altered(facts, at, pass_=with_tried(plan, after=cheaper)))
    assert "INV-BUDGET-03" in check(tmp_path / "j.jsonl").counts


def test_a_piece_that_does_not_begin_where_the_last_one_ended_is_found(tmp_path: Path) -> None:
    described, facts = recorded.read("plain")
    at = first(facts, Planned, lambda fact: any(row.prefix_len and row.is_last for row in fact.rows))
    rows = tuple(msgspec.structs.replace(row, prefix_len=row.prefix_len - 1) for row in facts[at].rows)
    recorded.journal(tmp_path / "j.jsonl", described, altered(facts, at, rows=rows))
    assert "INV-CHUNK-02" in check(tmp_path / "j.jsonl").counts


def test_a_decode_that_left_somebody_out_is_found(tmp_path: Path) -> None:
    described, facts = recorded.read("plain")
    at = first(facts, Planned, lambda fact: len(fact.decodes) > 1)
    recorded.journal(tmp_path / "j.jsonl", described, altered(facts, at, decodes=facts[at].decodes[1:]))
    assert "INV-STEP-03" in check(tmp_path / "j.jsonl").counts


def test_two_requests_on_one_row_are_found(tmp_path: Path) -> None:
    described, facts = recorded.read("plain")
    changed = [
        msgspec.structs.replace(fact, rows=tuple(msgspec.structs.replace(row, row=3) for row in fact.rows))
        if isinstance(fact, Planned)
        else fact
        for fact in facts
    ]
    recorded.journal(tmp_path / "j.jsonl", described, changed)
    assert "INV-LOCK-02" in check(tmp_path / "j.jsonl").counts


def test_dropped_facts_leave_a_hole_that_the_journal_and_the_check_tell(tmp_path: Path) -> None:
    described, facts = recorded.read("plain")
    at = len(facts) // 2
    target = recorded.journal(tmp_path / "j.jsonl", described, facts[:at] + facts[at + 3 :])
    assert target.mapper.lost == 3
    assert b'"type":"events_missing"' in (tmp_path / "j.jsonl").read_bytes()
    report = check(tmp_path / "j.jsonl")
    assert report.verdict == "incomplete"


def test_an_id_that_is_used_again_while_it_lives_ends_the_first(tmp_path: Path) -> None:
    described, facts = recorded.read("plain")
    at = first(facts, Arrived, lambda fact: True)
    again = msgspec.structs.replace(facts[at], t_ns=facts[at].t_ns + 1)
    facts = [*facts[: at + 1], again, *facts[at + 1 :]]
    numbered = [msgspec.structs.replace(fact, number=number) for number, fact in enumerate(facts)]
    target = recorded.journal(tmp_path / "j.jsonl", described, numbered)
    assert target.mapper.unmapped == {"id used twice": 1}
    assert check(tmp_path / "j.jsonl").verdict == "held"


@pytest.mark.parametrize("many", [False, True])
def test_an_abort_of_a_batch_or_of_nobody_names_whom_it_asks_for(tmp_path: Path, many: bool) -> None:
    described, facts = recorded.read("plain")
    at = first(facts, Arrived, lambda fact: True)
    arrived = facts[at]
    assert isinstance(arrived, Arrived)
    asked = AbortAsked(0, arrived.t_ns, [arrived.rid, "nobody"] if many else None, "abort")
    numbered = [
        msgspec.structs.replace(fact, number=number)
        for number, fact in enumerate([*facts[: at + 1], asked, *facts[at + 1 :]])
    ]
    recorded.journal(tmp_path / "j.jsonl", described, numbered)
    asks = [event.rid for event in events_of(tmp_path / "j.jsonl") if isinstance(event, AbortRequested)]
    assert asks == ([arrived.rid] if many else [])


def test_a_result_without_a_plan_is_counted_and_passed_over(tmp_path: Path) -> None:
    described, facts = recorded.read("plain")
    at = first(facts, Done, lambda fact: True)
    target = recorded.journal(tmp_path / "j.jsonl", described, altered(facts, at, step=99_999))
    assert target.mapper.unmapped == {"done, not planned": 1}


def test_no_token_and_no_text_is_in_a_fact() -> None:
    from telemetry.sglang import facts

    kinds = [each for each in vars(facts).values() if isinstance(each, type) and issubclass(each, msgspec.Struct)]
    for kind in kinds:
        for field in msgspec.structs.fields(kind):
            assert not any(word in field.name for word in ("ids", "text", "token_id", "message")), (kind, field.name)


def test_the_page_lists_the_laws_as_they_are_judged() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text(encoding="utf-8")
    overlapped = set(NOT_JUDGED_OVERLAPPED) - set(NOT_JUDGED)
    always = set(LAWS) - set(NOT_JUDGED) - overlapped
    assert f"| always | {', '.join(sorted(always))} |" in page
    assert f"| with `--disable-overlap-schedule` also | {', '.join(sorted(overlapped))} |" in page
    for law, why in NOT_JUDGED.items():
        assert any(law in line and line.endswith(f"| {why} |") for line in page.splitlines()), law

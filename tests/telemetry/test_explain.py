"""The sentences about a request agree with the record, do not depend on folding, and never change by themselves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from engine.config import Policy
from engine.events import AdmissionDecided, RequestTransitioned, StepPlanned
from engine.request import Cause, RequestState
from engine.scheduler.decision import Reason
from telemetry.explain import AmbiguousRequest, Explanation, UnknownRequest, explain, explain_records
from telemetry.explain_ids import abbreviated
from telemetry.explain_life import told
from telemetry.explain_wait import wait_told
from telemetry.explain_words import REASON_WORDS, amount, need_have, span, times, wall
from telemetry.journal import JournalSink
from telemetry.life import LifeBuilder
from telemetry.life_facts import HeldShare
from telemetry.schema import record_of

DATA = Path(__file__).parent / "data"
#: Recorded once by `SimulatedRun(path, 12, policy=fcfs).play(24, fail_at_step=200)`; only its readers may change.
JOURNAL = DATA / "explained.jsonl.gz"
#: Seven shares of one wait, of which five are told.
SHARES_NS = (40_000_000, 20_000_000, 12_000_000, 10_000_000, 6_000_000, 5_000_000, 1_000_000)
RUNS = [(2, 16, Policy.LPM), (3, 1, Policy.FCFS), (4, 16, Policy.SHORTEST_PREFILL_FIRST), (5, 4, Policy.FCFS)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, simulated_run: Any) -> list[tuple[Path, list[Any]]]:
    played = []
    for seed, page_size, policy in RUNS:
        path = tmp_path_factory.mktemp("run") / "run.jsonl"
        run = simulated_run(path, seed, policy=policy, page_size=page_size)
        run.play(50, fail_at_step=100)
        played.append((path, run.recorded.events))
    return played


def rids_of(events: list[Any]) -> list[str]:
    return [event.rid for event in events if type(event).__name__ == "RequestArrived"]


@pytest.mark.parametrize("rid", ["r0", "r9", "r14", "r18", "r20", "r23"])
def test_the_recorded_journal_tells_the_recorded_story(rid: str) -> None:
    """After a wanted change of wording: ADMITSCOPE_REWRITE=1 pytest, then read the difference."""
    text, file = explain(JOURNAL, rid).text() + "\n", DATA / f"explained.{rid}.txt"
    if os.environ.get("ADMITSCOPE_REWRITE"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def test_facts_agree_with_the_events_for_every_request(runs: list[tuple[Path, list[Any]]]) -> None:
    for path, events in runs:
        for rid in rids_of(events)[::5]:
            life = explain(path, rid).life
            own = [event for event in events if getattr(event, "rid", None) == rid]
            decisions = [event for event in own if isinstance(event, AdmissionDecided)]
            admitted = [d for d in decisions if d.selected_extend > 0]
            assert [c.step for c in life.chunks] == [d.step for d in admitted]
            assert sum(c.extend_len for c in life.chunks) == sum(d.selected_extend for d in admitted)
            refused = len(decisions) - len(admitted)
            told_refused = sum(r.count for w in life.waits for r in w.refusals) + sum(r.count for r in life.parked)
            assert told_refused >= refused
            moves = [event for event in own if isinstance(event, RequestTransitioned)]
            assert len(life.retractions) == sum(move.cause is Cause.RETRACT for move in moves)
            assert len(life.waits) == sum(move.target is RequestState.WAITING for move in moves)
            assert life.end is not None
            assert (life.end.cause, life.output_len) == (moves[-1].cause, moves[-1].output_len)
            starts = [i for i, move in enumerate(moves) if move.target is RequestState.WAITING]
            for wait, start in zip(life.waits, starts, strict=True):
                closing = moves[start + 1]
                assert (wait.from_ns, wait.to_ns) == (moves[start].t_ns, closing.t_ns)
                passes = [
                    event
                    for event in events
                    if isinstance(event, StepPlanned)
                    and event.seq > moves[start].seq
                    and event.step > moves[start].step
                    and event.step
                    <= closing.step - (closing.cause is not Cause.ADMIT and _ends_before(closing, events))
                    and event.pass_end.stop != "skipped"
                ]
                counted = sum(r.count for r in wait.refusals) + sum(n.count for n in wait.not_reached)
                assert wait.passes == len(passes) == counted + (wait.end == "admitted")
                assert sum(share.ns for share in wait.held) == wait.to_ns - wait.from_ns
                for fact in (*wait.refusals, *wait.not_reached, *wait.no_pass):
                    planned = next(e for e in events if isinstance(e, StepPlanned) and e.step == fact.first_step)
                    assert fact.first_ns == planned.t_ns


def _ends_before(closing: RequestTransitioned, events: list[Any]) -> bool:
    """Whether a request left the queue in a step before that step's plan was published."""
    return any(
        isinstance(event, StepPlanned) and event.step == closing.step and event.seq > closing.seq for event in events
    )


def test_folding_loses_nothing_of_a_story(tmp_path: Path, simulated: Any) -> None:
    path = tmp_path / "run.jsonl"
    run = simulated(path, 1, policy=Policy.FCFS)
    run.engine.scheduler.kv.allocation_fault = lambda _phase: run.engine.steps_done % 9 < 6
    run.add("first", tuple(range(100, 150)), 100)
    run.add("second", tuple(range(500)), 4)
    run.play(20)
    assert path.read_bytes().count(b'"refusals_folded"') > 1
    records = [record_of(event) for event in run.recorded.events]
    for rid in rids_of(run.recorded.events):
        assert explain(path, rid).life == explain_records(records, rid).life


def test_each_sentence_about_a_wait_is_dated_when_what_it_tells_began() -> None:
    """Dated at the end of the wait, all of them had one time, and none said when a cause came and another went."""
    story = explain(JOURNAL, "r9")
    [wait] = story.life.waits
    began = {line.text.strip().split(" by ")[0]: line for line in story.sentences}
    refused, full = began["Refused in 3 steps (34 to 36)"], began["No prefill pass in 24 steps (8 to 44)"]
    assert (refused.step, full.step) == (34, 8)
    assert began["Waited 234.0 ms, steps 7 to 45, 15 prefill passes."].at_ns == wait.from_ns - story.life.accepted_ns
    assert wait.from_ns < full.at_ns + story.life.accepted_ns < refused.at_ns + story.life.accepted_ns < wait.to_ns
    assert " time" not in refused.text + full.text, "steps are counted, and are called steps"


def test_a_wait_is_told_by_what_held_it() -> None:
    story = explain(JOURNAL, "r9")
    shares = next(line.text for line in story.sentences if "By what held it" in line.text)
    assert "kv_total_exhausted ahead of it 121.9 ms (52 %), kv_total_exhausted 70.9 ms (30 %)" in shares


def test_the_shares_of_a_wait_add_up_to_it() -> None:
    [wait] = explain(JOURNAL, "r9").life.waits
    held = tuple(HeldShare(reason=reason, is_own=True, ns=ns) for reason, ns in zip(Reason, SHARES_NS, strict=False))
    lines = [line.text for line in wait_told(wait.model_copy(update={"held": held}))]
    [shares] = [line for line in lines if "By what held it" in line]
    assert shares.endswith(f"{span(SHARES_NS[4])} (6 %), other {span(sum(SHARES_NS[5:]))} (6 %)."), shares


def test_a_long_id_is_whole_once_and_then_short_but_for_the_json(tmp_path: Path, simulated: Any) -> None:
    long, later = "chatcmpl-0123456789abcdef-first", "chatcmpl-0123456789abcdef-later"
    run = simulated(tmp_path / "run.jsonl", 3, policy=Policy.SHORTEST_PREFILL_FIRST)
    run.add("ahead", tuple(range(100, 120)), 4)
    run.add(long, tuple(range(500)), 4)
    for number in range(6):
        run.add(f"{later}{number}", tuple(range(200 + number, 260 + number)), 4)
    run.play(0)
    story = explain(tmp_path / "run.jsonl", long)
    named = [rid for wait in story.life.waits for rid in wait.overtaken_by]
    assert named
    for rid in {long, *named}:
        assert story.text().count(rid) == 1, rid
    assert any(json.loads(story.model_dump_json())["sentences"][at]["text"].count(named[0]) for at in range(9))
    text = [f"a {long}", f"b {long}，and {long}x, not x{later}"]
    assert abbreviated(text, [long, later]) == [f"a {long}", f"b chatcmpl-01…-first，and {long}x, not x{later}"]
    twins = [f"{'t' * 20}1{'t' * 20}", f"{'t' * 20}2{'t' * 20}"]
    assert abbreviated([" ".join(twins)] * 2, twins) == [" ".join(twins)] * 2, "one short form would mean both"


def test_a_fold_is_matched_with_the_passes_that_ended_at_the_request(tmp_path: Path, numbered: Any) -> None:
    sink = JournalSink(tmp_path / "run.jsonl")
    numbered.started()
    numbered.arrived("a")
    numbered.transition("a", 0, RequestState.WAITING, Cause.ARRIVE)
    for step, ended_at in enumerate("aababba", 1):
        if ended_at == "a":
            numbered.refused("a", step)
        numbered.planned(step, ended_at=ended_at)
    for event in numbered.events:
        sink.emit(event)
    sink.close()
    [wait] = explain(tmp_path / "run.jsonl", "a").life.waits
    assert [(r.count, r.first_step, r.last_step) for r in wait.refusals] == [(4, 1, 7)]
    assert [(n.rid, n.count, n.first_step, n.last_step) for n in wait.not_reached] == [("b", 3, 3, 6)]
    assert wait.passes == 7


def test_a_request_that_still_waits_is_told_up_to_the_end_of_the_record(tmp_path: Path, simulated: Any) -> None:
    run = simulated(tmp_path / "run.jsonl", 1, policy=Policy.FCFS)
    run.add("first", tuple(range(100, 150)), 400, ignore_eos=True)
    run.add("second", tuple(range(500)), 40)
    run.add("third", tuple(range(100, 140)), 4)
    run.play(0, stop_after=30)
    second, third = (explain(tmp_path / "run.jsonl", rid) for rid in ("second", "third"))
    assert second.life.state is RequestState.WAITING
    [wait] = second.life.waits
    assert wait.end == "waiting"
    [refusals] = wait.refusals
    assert refusals.reason is Reason.KV_TOTAL_EXHAUSTED
    assert "Still waiting when the record ends" in second.text()
    assert f"need {amount(refusals.need or 0)}, have {amount(refusals.have or 0)} tokens" in second.text()
    assert "the pass ended ahead of it, at second (" in third.text()
    assert "second in step" in third.text()
    assert "with the request in state waiting, 0 tokens out." in third.text()


def test_the_story_of_a_torn_journal_says_so(tmp_path: Path, runs: list[tuple[Path, list[Any]]]) -> None:
    path, events = runs[0]
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(path.read_bytes()[: path.stat().st_size // 2 + 7])
    story = explain(torn, rids_of(events)[0])
    assert story.torn is not None
    assert story.text().endswith(story.torn)


def test_an_unknown_id_lists_the_nearest(runs: list[tuple[Path, list[Any]]]) -> None:
    path, events = runs[0]
    with pytest.raises(
        UnknownRequest, match=rf"no request 'r1O'.*it has {len(rids_of(events))} requests.*r1"
    ) as caught:
        explain(path, "r1O")
    assert "r1" in caught.value.nearest
    with pytest.raises(UnknownRequest, match="it has no request at all"):
        explain_records([], "r1")


def test_a_shortened_id_will_do_where_one_request_fits_it(runs: list[tuple[Path, list[Any]]]) -> None:
    path, events = runs[0]
    ids = rids_of(events)
    assert explain(path, "r1...7").rid == explain(path, "r1…7").rid == "r17"
    with pytest.raises(AmbiguousRequest, match=f"may be {len(ids)} requests: {ids[0]}"):
        explain(path, "r")
    with pytest.raises(UnknownRequest):
        explain(path, "…")


def test_a_reused_id_is_told_by_its_last_life(tmp_path: Path, simulated: Any) -> None:
    run = simulated(tmp_path / "run.jsonl", 1)
    for length in (40, 70):
        run.add("again", tuple(range(100, 100 + length)), 4)
        while run.engine.has_work:
            run.step()
    run.journal.close()
    story = explain(tmp_path / "run.jsonl", "again")
    assert (story.life.times_used, story.life.prompt_len) == (2, 70)
    assert "used 2 times; this is the last" in story.text()


def test_overtakers_and_those_ahead_are_told_apart(tmp_path: Path, simulated: Any) -> None:
    run = simulated(tmp_path / "run.jsonl", 3, policy=Policy.SHORTEST_PREFILL_FIRST)
    run.add("ahead", tuple(range(100, 120)), 4)
    run.add("long", tuple(range(500)), 4)
    for number in range(6):
        run.add(f"short{number}", tuple(range(200 + number, 260 + number)), 4)
    run.play(0)
    life = explain(tmp_path / "run.jsonl", "long").life
    [wait] = life.waits
    assert (wait.ahead, wait.ahead_admitted) == (1, 1)
    assert wait.overtaken_by
    assert set(wait.overtaken_by) <= {f"short{number}" for number in range(6)}
    text = explain(tmp_path / "run.jsonl", "long").text()
    assert f"Passed over by {wait.overtaken_by[0]}" in text


def test_who_got_the_slice_that_it_waited_for_is_named(tmp_path: Path, simulated: Any) -> None:
    """The refusals name only those that were refused; the prompt that takes every slice is none of them."""
    run = simulated(tmp_path / "run.jsonl", 3, policy=Policy.FCFS)
    run.add("long", tuple(range(500)), 4)
    run.add("short", tuple(range(40, 100)), 4)
    run.play(0)
    story = explain(tmp_path / "run.jsonl", "short")
    [wait] = story.life.waits
    pieces = explain(tmp_path / "run.jsonl", "long").life.chunks
    before = [piece.extend_len for piece in pieces if piece.step < wait.to_step]
    assert len(before) > 1
    assert [(share.rid, share.tokens) for share in wait.slices_taken] == [("long", sum(before))]
    assert f"computed prompts of long ({sum(before)} tokens)" in story.text()


def test_json_holds_facts_and_sentences(runs: list[tuple[Path, list[Any]]]) -> None:
    path, events = runs[1]
    story = explain(path, rids_of(events)[3])
    again = Explanation.model_validate_json(story.model_dump_json())
    assert again == story
    assert told(again.life) == story.sentences


def test_sentences_are_in_order_of_time(runs: list[tuple[Path, list[Any]]]) -> None:
    for path, events in runs:
        for rid in rids_of(events)[::9]:
            at = [sentence.at_ns for sentence in explain(path, rid).sentences]
            assert at == sorted(at)
            assert at[0] == 0


def test_the_parts_of_ttft_leave_nothing_negative_between_two_pieces(runs: list[tuple[Path, list[Any]]]) -> None:
    cut = 0
    for path, events in runs:
        for rid in rids_of(events)[::9]:
            told_ = [sentence.text for sentence in explain(path, rid).sentences if "TTFT" in sentence.text]
            assert not any("-" in text.partition("TTFT")[2] for text in told_)
            cut += any("between these steps" in text for text in told_)
    assert cut, "no prompt of these runs was computed in pieces"


def test_time_before_the_queue_is_told_when_it_is_long() -> None:
    life = explain(JOURNAL, "r0").life
    early = life.model_copy(update={"accepted_ns": life.waits[0].from_ns - 1_324_000_000})
    (line,) = [sentence.text for sentence in told(early) if "first token" in sentence.text]
    assert "TTFT 1.327 s: 1.324 s (100 %) before the queue, until the engine took it in, 3.4 ms (0 %) in the" in line
    assert "before the queue" not in explain(JOURNAL, "r0").text()
    lost = early.model_copy(update={"waits": ()})
    assert not any("before the queue" in sentence.text for sentence in told(lost)), (
        "nor when its entry is not on record"
    )


def test_every_reason_has_words() -> None:
    assert set(REASON_WORDS) == set(Reason)


def test_numbers_are_written_for_people() -> None:
    assert [span(ns) for ns in (0, 345_000, 12_345_678, 1_234_567_890)] == ["0 s", "345 µs", "12.3 ms", "1.235 s"]
    assert wall(1_700_000_000_123_000_000) == "2023-11-14 22:13:20.123 UTC"
    assert (times(1, "token"), times(1234, "token")) == ("1 token", "1,234 tokens")
    assert (amount(90.5), amount(4096.0), amount(1.0 / 3)) == ("90.50", "4,096", "0.33")
    assert need_have(Reason.ROWS_EXHAUSTED, 3, 2) == (
        "it needed 3 rows with those admitted before it in the pass, and max_running_requests left 2"
    )
    assert need_have(Reason.FULL_FLAG_SET, 1, 0) == ""


def test_a_story_without_its_entry_to_the_queue_is_still_told(numbered: Any) -> None:
    """A journal that lost a line: what is left is told."""
    events = [numbered.started(), numbered.arrived("r")]
    (sentence,) = explain_records(map(record_of, events), "r").sentences[:1]
    assert sentence.text.startswith("Request r arrived")
    assert "waiting" not in sentence.text


def test_the_builder_knows_nothing_before_the_arrival(numbered: Any) -> None:
    builder = LifeBuilder("a")
    builder.feed(record_of(numbered.started()))
    builder.feed(record_of(numbered.planned(1)))
    assert builder.life() is None


def test_a_journal_folder_is_as_good_as_its_file(tmp_path: Path, numbered: Any, simulated: Any) -> None:
    run = simulated(tmp_path / "admitscope-2.jsonl", 1)
    run.add("a", tuple(range(100, 140)), 4)
    run.play(0)
    older = JournalSink(tmp_path / "admitscope-1.jsonl")
    older.emit(numbered.started())
    older.close()
    assert explain(tmp_path, "a") == explain(tmp_path / "admitscope-2.jsonl", "a")

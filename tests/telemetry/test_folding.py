"""Repeated refusals fold, nothing else does, and nothing is lost in the count."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.request import Cause, RequestState
from engine.scheduler.decision import Reason, Result
from telemetry.folding import EventHash, RefusalFolder, fold_key


def folded(events: list[Any]) -> list[Any]:
    """What a journal would write for `events`."""
    folder, out = RefusalFolder(), []
    for event in events:
        line, written = folder.push(event)
        out += [line] if line else []
        out += [event] if written else []
    return [*out, *folder.flush()]


def test_equal_refusals_fold_into_one_line_before_the_admission(numbered: Any) -> None:
    first = numbered.refused("a", 1)
    for step in (2, 3, 5):
        numbered.refused("a", step, times_passed_over=step)
    admission = numbered.admitted("a", 6)
    out = folded(numbered.events)
    assert out[0] is first
    assert out[2] is admission
    line = out[1]
    assert (line.rid, line.count, line.first_step, line.last_step) == ("a", 3, 2, 5)
    assert (line.first_seq, line.last_seq, line.times_passed_over, line.stopped_passes) == (1, 3, 5, 3)
    assert (line.reason, line.need, line.have) == (Reason.KV_TOTAL_EXHAUSTED, 132.0, 90.5)


def test_a_change_of_any_key_field_starts_a_new_run(numbered: Any) -> None:
    changes: list[dict[str, Any]] = [
        {"have": 80.0},
        {"need": 140.0},
        {"reason": Reason.KV_NOW_EXHAUSTED},
        {"result": Result.OTHER},
        {"prefix_len": 32},
        {"candidate_extend": 84},
    ]
    for change in changes:
        numbered.refused("a", 1)
        numbered.refused("a", 2, **change)
    out = folded(numbered.events)
    assert out == numbered.events


def test_other_requests_in_between_do_not_break_a_run(numbered: Any) -> None:
    for step in range(4):
        numbered.refused("a", step)
        numbered.refused("b", step, reason=Reason.CHUNK_BELOW_PAGE)
    out = folded(numbered.events)
    assert out[:2] == numbered.events[:2]
    assert [(line.rid, line.count) for line in out[2:]] == [("a", 3), ("b", 3)]


def test_the_end_of_a_request_flushes_its_run(numbered: Any) -> None:
    numbered.refused("a", 1)
    numbered.refused("a", 2)
    end = numbered.transition("a", 3, RequestState.FINISHED, Cause.ABORT)
    assert folded(numbered.events)[1].count == 1
    assert folded(numbered.events)[2] is end


def test_a_reused_id_starts_with_a_written_refusal(numbered: Any) -> None:
    numbered.refused("a", 1)
    numbered.transition("a", 2, RequestState.FINISHED, Cause.ABORT)
    numbered.refused("a", 3)
    assert folded(numbered.events) == numbered.events


def test_after_a_flush_the_run_goes_on_without_writing_the_refusal_again(numbered: Any) -> None:
    folder = RefusalFolder()
    folder.push(numbered.refused("a", 1))
    folder.push(numbered.refused("a", 2))
    assert [line.count for line in folder.flush()] == [1]
    assert list(folder.flush()) == []
    assert folder.push(numbered.refused("a", 3)) == (None, False)
    assert [(line.first_step, line.count, line.stopped_passes) for line in folder.flush()] == [(3, 1, 1)]


def test_admissions_and_final_refusals_never_fold(numbered: Any) -> None:
    assert fold_key(numbered.admitted("a", 1)) is None
    assert fold_key(numbered.refused("a", 1, reason=Reason.NEVER_FITS)) is None
    assert fold_key(numbered.completed(1)) is None


_STEPS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["r1", "r2", "admit", "end", "flush"])), max_size=60
)


@given(script=_STEPS)
def test_written_and_folded_refusals_add_up_to_all_of_them(maker: Any, script: list[tuple[str, str]]) -> None:
    numbered, flush_after = maker(), set()
    for step, (rid, what) in enumerate(script):
        match what:
            case "r1":
                numbered.refused(rid, step)
            case "r2":
                numbered.refused(rid, step, have=1.0)
            case "admit":
                numbered.admitted(rid, step)
            case "end":
                numbered.transition(rid, step, RequestState.FINISHED, Cause.ABORT)
            case _:
                flush_after.add(numbered.seq - 1)
    events = numbered.events
    folder, written, lines = RefusalFolder(), [], []
    for event in events:
        line, is_written = folder.push(event)
        lines += [line] if line else []
        written += [event] if is_written else []
        lines += list(folder.flush()) if event.seq in flush_after else []
    lines += list(folder.flush())
    assert len(written) + sum(line.count for line in lines) == len(events)
    hidden = {event.seq for event in events} - {event.seq for event in written}
    for line in lines:
        covered = [e for e in events if e.rid == line.rid and line.first_seq <= e.seq <= line.last_seq]
        assert len(covered) == line.count, "a folded line spans its own refusals only"
        assert {event.seq for event in covered} <= hidden
        assert {fold_key(event) for event in covered} == {
            (line.reason, line.result, line.prefix_len, line.candidate_extend, line.need, line.have)
        }


def test_the_hash_tells_order_content_and_count_apart(numbered: Any) -> None:
    one, two = (msgspec.json.encode(numbered.refused(rid, 1)) for rid in "ab")
    digests = set()
    for order in ((one,), (two,), (one, two), (two, one), (one, one)):
        running = EventHash()
        for encoded in order:
            running.add(encoded)
        assert running.events == len(order)
        digests.add(running.hexdigest())
    assert len(digests) == 5

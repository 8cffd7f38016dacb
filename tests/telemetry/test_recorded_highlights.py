"""What is worth a look in a recording is what its own records say: the fullest step, and the slowest first token."""

from __future__ import annotations

from telemetry.recorded import RecordedSource, Recording
from tests.telemetry.recorded_run import JOURNAL


def test_the_fullest_step_and_the_slowest_request_are_those_of_the_answers() -> None:
    recording = Recording(JOURNAL, in_background=False)
    source = RecordedSource(recording)
    fullest, slowest = recording.highlights.fullest, recording.highlights.slowest
    assert fullest is not None
    assert slowest is not None
    source.seek(recording.at_step(fullest.step))
    assert source.status().waiting == fullest.waiting
    source.seek(recording.moment(recording.progress().moments - 1))
    told = {row.rid: row.ttft_s for row in source.requests().finished if row.ttft_s is not None}
    assert max(told, key=told.__getitem__) == slowest.rid
    detail = source.request(slowest.rid)
    assert detail is not None
    first_ns, accepted_ns = detail.timeline.first_token_ns, detail.timeline.accepted_ns
    assert first_ns is not None
    assert (first_ns - accepted_ns) / 1e9 == slowest.ttft_s
    source.seek(recording.at_step(slowest.step))
    there = source.request(slowest.rid)
    assert there is not None
    assert there.timeline.first_token_ns == first_ns, "the step of its first token, not one before"

"""What held requests, how long their pieces took, and why tokens were late: `/metrics` equals the events' own sums."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.clock import VirtualClock
from engine.events import AdmissionDecided, StepCompleted, StepPlanned
from engine.scheduler.decision import Reason
from telemetry.metric_catalog import CATALOG, POSITION_OF
from telemetry.metrics import MetricsSink
from telemetry.observe import BLOCKERS
from telemetry.stalls import STALL_CAUSES
from tests.builders import engine_config
from tests.telemetry.live_run import MS, TimedRun, busy, play

WIDTH = {metric.name: metric.width for metric in CATALOG}


def counted(sink: MetricsSink, name: str, value: str = "") -> int:
    return sink.snapshot()[sink.at[name, value]]


def observed(sink: MetricsSink, name: str, value: str = "") -> tuple[int, int]:
    """(count, sum) of a histogram."""
    at, width = sink.at[name, value], WIDTH[name]
    cells = sink.snapshot()[at : at + width]
    return sum(cells[:-1]), cells[-1]


@pytest.mark.parametrize("seed", range(12))
def test_chunk_times_and_blocked_times_equal_the_records(seed: int) -> None:
    config, program = busy(seed)
    sink = MetricsSink(clock=VirtualClock())
    run = TimedRun(config, sink)
    play(run, program)
    plans = {event.step: event for event in run.recorded.events if isinstance(event, StepPlanned)}
    forward: Counter[str] = Counter()
    pieces: Counter[str] = Counter()
    reasons: dict[tuple[int, str], Reason] = {
        (event.step, event.rid): event.reason
        for event in run.recorded.events
        if isinstance(event, AdmissionDecided) and event.selected_extend > 0
    }
    for event in run.recorded.events:
        if isinstance(event, StepCompleted) and not event.failed:
            for row in plans[event.step].prefills:
                position = POSITION_OF[reasons[event.step, row.rid]]
                pieces[position] += 1
                forward[position] += event.times.ready_ns - event.times.launched_ns
    for position in POSITION_OF.values():
        assert observed(sink, "chunk_forward_seconds", position) == (pieces[position], forward[position])
    blocked = sum(observed(sink, "queue_blocked_seconds", blocker)[1] for blocker in BLOCKERS)
    assert blocked == observed(sink, "queue_time_seconds")[1], "what held the admitted adds up to their queue time"


def test_a_late_token_has_one_cause() -> None:
    sink = MetricsSink(clock=VirtualClock(), late_ns=5 * MS)
    run = TimedRun(engine_config(chunked_prefill_size=64, enable_mixed_chunk=True), sink)
    run.add("r1", 8, 9, ignore_eos=True)
    run.timed_step()
    run.timed_step()
    late = (0, 0, 0, 0, 0, 9 * MS, 0)
    run.timed_step(late)  # decode alone
    run.add("r2", 40, 2, ignore_eos=True)
    run.timed_step(late)  # a long piece rides along
    run.add("r3", 20, 2, ignore_eos=True)
    run.timed_step(late)  # a short one
    seen = {cause: counted(sink, "token_stalls_total", cause) for cause in STALL_CAUSES}
    assert seen == {"queue_position": 0, "chunk_overhead": 2, "long_prefill": 1, "mixed_sat_out": 0, "kernel": 1}
    run.finish_all()
    assert {cause: counted(sink, "token_stalls_total", cause) for cause in STALL_CAUSES} == seen, "the rest was in time"


def test_tokens_that_waited_for_anothers_prompt_sat_out() -> None:
    sink = MetricsSink(clock=VirtualClock(), late_ns=5 * MS)
    run = TimedRun(engine_config(chunked_prefill_size=64, enable_mixed_chunk=False), sink)
    run.add("r1", 8, 4, ignore_eos=True)
    run.timed_step()
    run.timed_step()
    run.add("r2", 60, 1, ignore_eos=True)
    run.timed_step((0, 0, 0, 0, 0, 9 * MS, 0))
    run.finish_all()
    assert counted(sink, "token_stalls_total", "mixed_sat_out") == 1


def test_a_token_after_a_push_back_waited_in_the_queue() -> None:
    sink = MetricsSink(clock=VirtualClock(), late_ns=5 * MS)
    run = TimedRun(engine_config(num_pages=16, schedule_conservativeness=0.05), sink)
    for number in range(4):
        run.add(f"r{number}", 40, 60)
        run.timed_step()
    run.finish_all()
    assert counted(sink, "retractions_total", "kv_now") > 0
    assert counted(sink, "token_stalls_total", "queue_position") > 0


def test_the_unluckiest_is_told_while_it_waits() -> None:
    sink = MetricsSink(clock=VirtualClock())
    run = TimedRun(
        engine_config(num_pages=20, page_size=4, schedule_policy="shortest-prefill-first", max_overtakes=50), sink
    )
    run.add("holds", 20, 30, ignore_eos=True)
    run.timed_step()
    run.add("long", 48, 8, ignore_eos=True)
    worst = 0
    for number in range(6):
        run.add(f"short{number}", 4, 1, ignore_eos=True)
        run.timed_step()
        worst = max(worst, counted(sink, "times_passed_over_max"))
    told = [event for event in run.recorded.events if isinstance(event, AdmissionDecided)]
    assert worst == max(event.times_passed_over for event in told if event.selected_extend <= 0) > 0
    run.finish_all()
    assert counted(sink, "times_passed_over_max") == 0

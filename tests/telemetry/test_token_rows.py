"""Who got a token: the answer is that of a comparison name by name, whoever asked before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.events import StepCompleted
from engine.request import FinishReason
from engine.scheduler.plan import OutcomeRow, StepKind, StepTimes
from telemetry.request_timeline import RequestTimeline
from telemetry.timeline import TimelineTracker
from telemetry.token_rows import change_of
from tests.builders import engine_config
from tests.telemetry.live_run import MS, TimedRun

_steps = st.lists(st.lists(st.sampled_from("abcdefghij"), unique=True, min_size=1), min_size=1, max_size=12)


@given(_steps, st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_the_change_is_that_of_a_comparison_by_name(steps: list[list[str]], askers: list[int]) -> None:
    """Several ask, each with its own step before."""
    rows = [tuple(OutcomeRow(rid) for rid in step) for step in steps]
    before: list[tuple[str, ...]] = [(), (), ()]
    at = [0, 0, 0]
    for asker in askers:
        now = rows[at[asker] % len(rows)]
        change = change_of(before[asker], now)
        rids = tuple(row.rid for row in now)
        assert change.rids == rids
        assert change.came == tuple(rid for rid in rids if rid not in before[asker])
        assert set(change.gone) == set(before[asker]) - set(rids)
        before[asker], at[asker] = change.rids, at[asker] + 1


def test_rows_that_stay_have_the_names_they_had() -> None:
    first = change_of((), (OutcomeRow("a"), OutcomeRow("b")))
    again = change_of(first.rids, (OutcomeRow("a"), OutcomeRow("b", finish=FinishReason.STOP)))
    assert again.rids is first.rids
    assert (again.came, again.gone) == ((), ())


class Gaps:
    """Notes gaps and first tokens."""

    def __init__(self) -> None:
        self.gaps: list[tuple[int, int]] = []
        self.firsts: list[str] = []

    def on_admitted(self, request: RequestTimeline) -> None:
        """Nothing."""

    def on_first_token(self, request: RequestTimeline) -> None:
        self.firsts.append(request.rid)

    def on_ttft(self, request: RequestTimeline) -> None:
        """Nothing."""

    def on_gaps(self, gap_ns: int, count: int, *, queued: bool = False) -> None:
        self.gaps.append((gap_ns, count))

    def on_finished(self, request: RequestTimeline) -> None:
        """Nothing."""


def test_an_id_used_again_at_once_begins_with_a_first_token_of_its_own() -> None:
    """It got a token in the step before, and so did the request whose id it took: they share no gap."""
    heard = Gaps()
    tracker = TimelineTracker(heard, expects_responses=False)
    run = TimedRun(engine_config())
    run.add("other", 4, 20, ignore_eos=True)
    run.add("again", 4, 3, ignore_eos=True)
    while "again" in run.scheduler.state.requests:
        run.timed_step()
    run.add("again", 4, 3, ignore_eos=True)
    run.finish_all()
    for event in run.recorded.events:
        tracker.apply(event)
    assert heard.firsts == ["other", "again", "again"]
    assert sum(count for _, count in heard.gaps) == 19 + 2 + 2


def test_rows_of_requests_that_nobody_heard_of_share_no_gap() -> None:
    heard = Gaps()
    tracker = TimelineTracker(heard, expects_responses=False)
    run = TimedRun(engine_config())
    run.add("known", 4, 4, ignore_eos=True)
    run.timed_step()
    for event in run.recorded.events:
        tracker.apply(event)
    rows = (OutcomeRow("known"), OutcomeRow("stranger"))
    for step in range(2, 5):
        times = StepTimes(applied_ns=run.now_ns + step * MS)
        tracker.apply(StepCompleted(0, step, 0, StepKind.DECODE, rows, times, False, (0, 0, 0, 0), 0, 2))
    assert [count for _, count in heard.gaps] == [1, 1, 1]

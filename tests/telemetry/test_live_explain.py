"""What a live engine says of one request: what held it, by how much, and by which rule others went first."""

from __future__ import annotations

from engine.clock import VirtualClock
from engine.config import EngineConfig
from telemetry.observe import QueueEntry
from telemetry.read_model import ReadModel
from tests.builders import engine_config
from tests.telemetry.live_run import MS, TimedRun


class Watched:
    """A run with a read model whose clock follows it."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.clock = VirtualClock()
        self.model = ReadModel(clock=self.clock)
        self.run = TimedRun(config or engine_config(), self.model)

    def entry(self, rid: str) -> QueueEntry:
        self.clock.advance_ns(max(self.run.now_ns - self.clock.now_ns(), 0))
        return {entry.rid: entry for entry in self.model.queue(500).entries}[rid]

    def told(self, rid: str) -> tuple[str, ...]:
        found = self.model.explain(rid)
        assert found is not None
        return found.sentences


def _held_by_two() -> Watched:
    """`waits` is held by `order` behind `first`, for long, and then by the pool."""
    watched = Watched(engine_config(num_pages=20, page_size=4, schedule_policy="fcfs"))
    watched.run.add("runs", 30, 20, ignore_eos=True)
    watched.run.timed_step()
    watched.run.add("first", 30, 12, ignore_eos=True)
    watched.run.add("waits", 30, 10)
    while watched.entry("waits").blocker != "kv_total":
        watched.run.timed_step()
    watched.run.timed_step()
    return watched


def test_a_wait_is_told_by_blocker_and_the_shares_add_up_to_its_age() -> None:
    watched = _held_by_two()
    entry = watched.entry("waits")
    assert sum(entry.held_ns.values()) == round(entry.age_s * 1e9)
    assert list(entry.held_ns.values()) == sorted(entry.held_ns.values(), reverse=True)
    assert set(entry.held_ns) == {"order", "kv_total"}
    assert sum(entry.order_ns.values()) == entry.held_ns["order"]
    assert "kv_total_exhausted" in entry.order_ns


def test_what_held_it_most_is_told_where_it_is_not_what_holds_it_now() -> None:
    watched = _held_by_two()
    entry = watched.entry("waits")
    shares = next(line for line in watched.told("waits") if line.startswith("By what held it"))
    assert entry.blocker == "kv_total"
    assert "order, most of it behind KV total exhausted," in shares
    assert shares.index("order") < shares.index(", KV total "), "most first"
    watched.run.finish_all()
    after = next(line for line in watched.told("waits") if line.startswith("By what held it"))
    assert "order, most of it behind KV total exhausted," in after


def test_a_wait_with_one_cause_needs_no_shares() -> None:
    watched = Watched()
    watched.run.add("new", 8, 4)
    watched.run.now_ns += 5 * MS
    assert watched.entry("new").held_ns == {"engine_busy": 5 * MS}
    assert not [line for line in watched.told("new") if line.startswith("By what held it")]

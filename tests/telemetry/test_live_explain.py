"""What a live engine says of one request: what held it, by how much, and by which rule others went first."""

from __future__ import annotations

from engine.clock import VirtualClock
from engine.config import EngineConfig, Policy
from telemetry.explain_words import span
from telemetry.live_explain_wait import partition
from telemetry.observe import BLOCKERS, Overtaker, QueueEntry, Stopper
from telemetry.policy_words import TIES, overtaker_words, rule_and_tie
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


def test_who_waits_behind_another_is_told_what_that_one_lacks() -> None:
    """As a journal tells it, the marked batch included: the refusal may be many steps ago."""
    watched = Watched(engine_config(num_pages=320, page_size=4, schedule_policy="fcfs", max_running_requests=9))
    watched.run.add("runs", 30, 60, ignore_eos=True)
    watched.run.timed_step()
    for rid in ("first", "waits"):
        watched.run.add(rid, 30, 1200, ignore_eos=True)
    for _ in range(3):
        watched.run.timed_step()
    first, entry = watched.entry("first"), watched.entry("waits")
    assert (entry.blocker, entry.need, entry.have, entry.who_stopped) == ("order", None, None, "first")
    assert entry.stopper == Stopper(
        rid="first", reason="kv_total_exhausted", blocker="kv_total", need=first.need, have=first.have, step=2
    )
    assert (
        "Step 2 refused first because its whole future did not fit the K/V pool beside what running requests are "
        "promised (remaining_total): need 1,234, have 1,188 tokens." in watched.told("waits")
    )
    assert not [line for line in watched.told("first") if "refused" in line]
    answer = watched.model.explain("waits")
    assert answer is not None
    assert answer.queue is not None
    assert answer.queue.stopper == entry.stopper
    watched.run.finish_all()
    over = watched.model.explain("waits")
    assert over is not None
    assert over.queue is None


def test_one_that_took_the_last_of_a_budget_lacks_nothing() -> None:
    watched = Watched(engine_config(num_pages=100, page_size=4, max_prefill_tokens=32, schedule_policy="fcfs"))
    watched.run.add("fills", 32, 4)
    watched.run.add("waits", 32, 4)
    watched.run.timed_step()
    stopper = watched.entry("waits").stopper
    assert stopper is not None
    assert (stopper.rid, stopper.blocker, stopper.need, stopper.have) == ("fills", "compute", None, None)
    assert not [line for line in watched.told("waits") if "refused" in line]


def test_numbers_have_their_thousands_apart_as_in_a_journal() -> None:
    watched = Watched(engine_config(num_pages=4000, page_size=4, max_prefill_tokens=4096, chunked_prefill_size=2048))
    watched.run.add("long", 3000, 1500, ignore_eos=True)
    watched.run.finish_all()
    said = watched.told("long")
    assert said[0] == "Request long arrived with a prompt of 3,000 tokens, asking for at most 1,500 new ones."
    assert any(
        "computed 2,048 of its prompt tokens of 3,000, cut to fit, up to position 2,048" in line for line in said
    )
    assert any("up to position 3,000, with 2,048 before them already there" in line for line in said)
    assert any(line.startswith("1,500 tokens in all") for line in said)
    assert said[-1].endswith("with 1,500 tokens: length.")


def test_two_ends_are_named_where_neither_had_most() -> None:
    ends = {"kv_total_exhausted": 49 * MS, "rows_exhausted": 48 * MS, "chunk_exhausted": 3 * MS}
    told = partition({"order": 100 * MS, "rows": 20 * MS}, ends)
    assert "order, 49 % of it behind KV total exhausted and 48 % behind rows exhausted, 100.0 ms (83 %)" in told
    assert "most" not in told


def test_the_shares_told_add_up_to_the_wait() -> None:
    held = dict(zip(BLOCKERS, (60 * MS, 20 * MS, 10 * MS, 5 * MS, 3 * MS, MS, MS), strict=False))
    assert partition(held, {}).endswith(", other 2.0 ms (2 %).")
    assert "other" not in partition(dict(zip(BLOCKERS, (60 * MS, 40 * MS, 1000), strict=False)), {})


def test_one_answer_has_one_wait() -> None:
    """The stretch that is not over was told twice, once up to the last event and once up to now."""
    watched = Watched(engine_config(max_running_requests=1))
    watched.run.add("runs", 8, 50, ignore_eos=True)
    watched.run.timed_step()
    watched.run.add("waits", 8, 4)
    watched.run.timed_step()
    watched.run.now_ns += 700 * MS
    age = span(round(watched.entry("waits").age_s * 1e9))
    said = watched.told("waits")
    assert [line for line in said if line.startswith("It waited")] == []
    assert next(line for line in said if line.startswith("It is waiting now")).count(f"for {age}:") == 1
    assert next(line for line in said if line.startswith("That has held it")).startswith(f"That has held it for {age}")


def test_a_wait_with_one_cause_needs_no_shares() -> None:
    watched = Watched()
    watched.run.add("new", 8, 4)
    watched.run.now_ns += 5 * MS
    assert watched.entry("new").held_ns == {"engine_busy": 5 * MS}
    assert not [line for line in watched.told("new") if line.startswith("By what held it")]


def test_a_slice_with_less_than_a_page_left_is_not_called_used_up() -> None:
    """Slice 24, page 16: `first` takes 16 and leaves 8; the piece of `waits` would need a page."""
    watched = Watched(
        engine_config(
            page_size=16, num_pages=100, chunked_prefill_size=24, truncation_align_size=16, schedule_policy="fcfs"
        )
    )
    watched.run.add("first", 16, 4)
    watched.run.add("waits", 40, 4)
    watched.run.timed_step()
    entry = watched.entry("waits")
    assert (entry.blocker, entry.reason, entry.need, entry.have) == ("chunk", "chunk_below_page", 16, 8)
    now = next(line for line in watched.told("waits") if line.startswith("It is waiting now"))
    assert "less than one page was left of the step's prefill slice (rem_chunk); it needs 16 and there are 8" in now
    assert not [line for line in watched.told("waits") if "used up" in line]


def test_a_share_of_nought_is_not_told() -> None:
    most = {"order": 999 * MS, "engine_busy": 1 * MS}
    assert partition(most, {}, "order") == "", "the sentence about what holds it now says all of it"
    assert partition(most, {}, "engine_busy") == "By what held it, its wait of 1.000 s was: order 999.0 ms (100 %)."
    assert partition({"order": 90 * MS, "chunk": 10 * MS}, {}).endswith("order 90.0 ms (90 %), chunk 10.0 ms (10 %).")
    assert partition({}, {}) == ""


# -- who went first, and by which rule ---------------------------------------------------------------------------------


def _last(policy: str = "lpm", order_key: str = "cached_tokens", **more: object) -> str:
    both = {"key": 96.0, "own_key": 96.0, **more}
    return overtaker_words(Overtaker(rid="r9", step=7, policy=policy, order_key=order_key, **both))


def test_equal_numbers_are_not_what_put_a_later_one_first() -> None:
    said = _last()
    assert "its cached prefix and that of r9 were 96 tokens each; between equals, who stood first" in said
    assert _last("shortest-prefill-first", "uncached_tokens").count("who came first goes first") == 1
    assert "between equals" not in _last(own_key=0.0), "there the numbers decided"
    assert "between equals" in _last(own_key=128.0), "and here they say the contrary"
    assert _last(own_key=None).endswith("its own is not known before a pass looks at it.")


def test_a_policy_without_a_recorded_number_tells_its_tie_break() -> None:
    said = _last("hrrn", "", key=None, own_key=None)
    assert said.endswith("r9 went first; " + TIES[Policy.HRRN] + ".")
    assert _last("random", "", key=None, own_key=None).endswith("ordered by random: r9 went first.")


def test_a_policy_is_told_with_its_tie_break_where_a_journal_names_no_numbers() -> None:
    assert rule_and_tie("lof") == "lof, which puts the largest max_tokens first (" + TIES[Policy.LOF] + ")"
    assert set(Policy) - set(TIES) == {Policy.RANDOM}


def test_an_equal_prompt_that_the_in_batch_rule_put_back_is_told_that_rule() -> None:
    """Nothing of `twin` and of `other` is cached; `twin` shares its head with `first`, so `other` goes before it."""
    watched = Watched(engine_config(page_size=4, num_pages=400, schedule_policy="lpm", max_running_requests=3))
    watched.run.add("runs", 8, 6, ignore_eos=True)
    watched.run.timed_step()
    head = tuple(range(100, 140))
    for rid, prompt in (("first", (*head, 1)), ("twin", (*head, 2)), ("other", range(300, 341))):
        watched.run.add(rid, tuple(prompt), 30)
    watched.run.timed_step()
    last = watched.entry("twin").overtaker
    assert last is not None
    assert (last.rid, last.key, last.own_key) == ("other", 0, 0)
    said = next(line for line in watched.told("twin") if line.startswith("Step 2 ordered by lpm"))
    assert "its cached prefix and that of other were 0 tokens each; between equals" in said
    assert "shares its first 32 tokens, not cached yet, with one ahead goes last" in said

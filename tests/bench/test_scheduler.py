"""The scheduler bench says what it promises: its keys, its load, its curves. No time is asserted."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from bench.scheduler import json_line, machine
from bench.scheduler_load import ALL, NONE, Prompts, Rig, Watch
from bench.scheduler_plot import Line, chart
from bench.scheduler_runs import Row, admission, long_run, order, radix, rekey, waiting_bytes

KEYS = {
    "bench", "policy", "waiting", "page_size", "first_ms", "steady_ms", "admit_us", "pass_us", "insert_us", "match_us",
    "evict_us", "records", "checker",
}  # fmt: skip


def _parsed(row: Row) -> dict[str, object]:
    found = json.loads(json_line(row))
    assert isinstance(found, dict)
    assert found.keys() <= KEYS
    assert None not in found.values()
    return found


@pytest.mark.parametrize("watch", [ALL, NONE])
@pytest.mark.parametrize("policy", ["lpm", "shortest-prefill-first", "dfs-weight"])
def test_an_order_runs_under_the_checker_and_reports_both_times(policy: str, watch: Watch) -> None:
    found = _parsed(order(policy, 40, 16, watch, steps=3))
    assert found.keys() == {"bench", "policy", "waiting", "page_size", "first_ms", "steady_ms", "records", "checker"}
    assert (found["waiting"], found["records"], found["checker"]) == (40, watch.records, watch.checker)


def test_the_other_measurements_fill_their_keys_and_no_others() -> None:
    shared = {"bench", "page_size", "records", "checker"}
    assert _parsed(rekey("lpm", 40, 16, ALL, repeats=1)).keys() == shared | {"policy", "waiting", "first_ms"}
    passed = _parsed(admission(16, ALL, candidates=8, repeats=1))
    assert passed.keys() == shared | {"policy", "waiting", "admit_us", "pass_us"}
    assert _parsed(radix(1, NONE, tokens=256, cached=4, repeats=2)).keys() == shared | {
        "insert_us",
        "match_us",
        "evict_us",
    }


def test_a_rekey_is_one() -> None:
    """Nobody's prefix is cached at first, everybody's is afterwards."""
    rig = Rig(policy="lpm", page_size=16, num_pages=4096, watch=ALL, prefill_max_requests=1)
    prompts = Prompts(16)
    for number in range(20):
        rig.add(f"r{number}", prompts.prompt(0))
    rig.step()
    before = {request.matched_len for request in rig.scheduler.state.waiting}
    rig.order_and_plan()
    after = {request.matched_len for request in rig.scheduler.state.waiting}
    assert (before, after) == ({0}, {512})


def test_a_steady_step_evicts_and_admits_one() -> None:
    rig = Rig(policy="lpm", page_size=16, num_pages=4096, watch=ALL, prefill_max_requests=1)
    prompts = Prompts(16)
    for number in range(8):
        rig.add(f"old-{number}", prompts.fresh(64))
        rig.step()
    for number in range(5):
        rig.add(f"r{number}", prompts.prompt(number))
    free = rig.scheduler.kv.free_pages
    plan = rig.step(evict_pages=8 * 4)
    assert len(plan.prefills) == 1
    assert plan.prefills[0].extend_len == 1024
    assert rig.scheduler.kv.free_pages == free + 8 * 4 - 1024 // 16


def test_memory_is_counted_per_prompt_and_the_long_run_ends_empty() -> None:
    assert 0 < waiting_bytes(NONE, prompts=32, tokens=1024) < 64 * 1024
    slices = list(long_run(40, ALL, slices=2))
    assert [part.requests for part in slices] == [20, 40]


def test_a_chart_is_svg_with_every_line() -> None:
    drawn = chart("t <&>", "x", "y", [Line("one", [(1, 1), (1000, 10)]), Line("two", [(10, 0.5)], dashed=True)])
    root = ElementTree.fromstring(drawn)
    curves = [element for element in root if element.tag.endswith("polyline")]
    assert len(curves) == 2
    assert "stroke-dasharray" in curves[1].attrib
    assert "1k" in "".join(root.itertext())


def test_the_machine_is_named() -> None:
    assert "cores" in machine()
    assert "Python" in machine()

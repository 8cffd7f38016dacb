"""The plugin on the published SGLang's own classes, on a CPU. Run by `make test-sglang`, in an environment of its own.

Not collected by `make test`, which has no SGLang; there `test_mapping` uses what was recorded here.
"""

# ruff: noqa: E402 - stand-ins answer imports that SGLang makes, so they come before it
from __future__ import annotations

import importlib.metadata
import logging
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.sglang_plugin import stand_ins

warnings.simplefilter("ignore")
stand_ins.install()
pytest.importorskip("sglang", reason="the package sglang is not installed: `make test-sglang` installs it")

from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins.hook_registry import HookRegistry

from telemetry import sglang_plugin
from telemetry.check import check
from telemetry.explain import explain
from telemetry.sglang.hooks import MOST_FAULTS, Hooks
from telemetry.sglang.seams import SEAMS, TESTED, differences
from tests.sglang_plugin import harness
from tests.sglang_plugin.hooked import hooked
from tests.sglang_plugin.scenarios import SCENARIOS, Scenario

NAMES = [scenario.name for scenario in SCENARIOS]
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


def run(scenario: Scenario) -> list[tuple[Any, ...]]:
    return harness.play(harness.scheduler(**scenario.settings), scenario)


def test_the_tested_version_has_all_that_is_read_of_it() -> None:
    assert importlib.metadata.version("sglang") == TESTED
    assert differences() == ()


def test_a_version_that_lacks_something_is_refused_before_anything_is_wrapped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(sglang_plugin.FOLDER_NAME, str(tmp_path))
    monkeypatch.delattr(Scheduler, "get_num_allocatable_reqs")
    HookRegistry.reset()
    assert sglang_plugin.register() is None
    assert "get_num_allocatable_reqs is no function" in caplog.text
    assert not HookRegistry._hooks


def test_sglang_finds_the_entry_point_and_applies_the_hooks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt import plugins

    before = [(vars(Scheduler)["get_next_batch_to_run"], "get_next_batch_to_run")]
    monkeypatch.setenv(sglang_plugin.FOLDER_NAME, str(tmp_path))
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    caplog.set_level(logging.INFO)
    HookRegistry.reset()
    originals = {seam.target: vars(_owner(seam))[seam.name] for seam in SEAMS}
    try:
        plugins.load_plugins()
        assert "Executed general plugin: admitscope" in caplog.text
        for seam in SEAMS:
            assert vars(_owner(seam))[seam.name] is not originals[seam.target], seam.target
        harness.play(harness.scheduler(), BY_NAME["plain"])
    finally:
        for seam in SEAMS:
            setattr(_owner(seam), seam.name, originals[seam.target])
        HookRegistry.reset()
    assert before[0][0] is vars(Scheduler)[before[0][1]]
    assert list(tmp_path.glob("admitscope-*.jsonl")), "a journal was begun"


def _owner(seam: Any) -> Any:
    return getattr(importlib.import_module(seam.module), seam.owner)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_sglang_decides_the_same_with_the_hooks_and_without(scenario: Scenario, tmp_path: Path) -> None:
    bare = run(scenario)
    recorder = sglang_plugin.Recorder(tmp_path)
    with hooked(Hooks(recorder)) as hooks:
        wrapped = run(scenario)
    assert recorder.worker is not None
    assert recorder.worker.close()
    assert wrapped == bare
    assert (hooks.faults, hooks.off, recorder.worker.dropped, recorder.worker.errors) == (0, None, 0, 0)
    report = check(tmp_path)
    assert (report.verdict, report.violations) == ("held", ())
    assert explain(tmp_path, "r3").life.end is not None


@pytest.mark.parametrize("name", ["mixed", "retracted-overlapped", "preempted"])
def test_a_recorder_that_fails_everywhere_changes_nothing_and_switches_itself_off(name: str) -> None:
    class Broken:
        def begin(self, scheduler: Any) -> bool:
            return True

        def put(self, fact: Any) -> None:
            raise RuntimeError("no room")

    bare = run(BY_NAME[name])
    with hooked(Hooks(Broken())) as hooks:
        assert run(BY_NAME[name]) == bare
    assert hooks.faults == MOST_FAULTS
    assert hooks.off is not None


def test_a_folder_that_cannot_be_written_costs_the_record_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    recorder = sglang_plugin.Recorder(tmp_path / "file")
    bare = run(BY_NAME["plain"])
    with hooked(Hooks(recorder)):
        assert run(BY_NAME["plain"]) == bare
    assert recorder.worker is not None
    assert recorder.worker.errors == 1
    assert recorder.worker.dropped


def test_a_scheduler_that_cannot_be_told_rightly_is_not_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = harness.scheduler()
    made.is_hybrid_swa = True
    recorder = sglang_plugin.Recorder(tmp_path)
    with hooked(Hooks(recorder)) as hooks:
        harness.request(made, "r0", [1, 2, 3], 4)
    assert hooks.off is not None
    assert recorder.worker is None
    assert "sliding windows have a second pool" in caplog.text


@pytest.mark.parametrize("name", ["mixed", "overlapped"])
def test_what_the_hooks_cost_is_printed(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bare and wrapped in turns, so that both meet the same machine. A scenario decides the same each time, so each of
    its turns has a shortest time under either; what is printed is the sum of these, by kind of turn."""
    scenario, best = BY_NAME[name], {}
    for round_ in range(ROUNDS):
        recorder = sglang_plugin.Recorder(tmp_path / f"{round_}")
        bare, decided = _timed(scenario)
        with hooked(Hooks(recorder)):
            wrapped, again = _timed(scenario)
        assert recorder.worker is not None
        recorder.worker.close()
        assert again == decided
        for kind, found in (("bare", bare), ("wrapped", wrapped)):
            best[kind] = [min(pair) for pair in zip(best.get(kind, found), found, strict=True)]
    rows = [len(batch or ()) for batch, *_ in decided]
    more = [wrapped - bare for bare, wrapped in zip(best["bare"], best["wrapped"], strict=True)]
    with capsys.disabled():
        print(f"\n{name}: {len(rows)} turns with {sum(rows) / len(rows):.1f} rows on average, best of {ROUNDS}")
        print(f"  bare {sum(best['bare']) / len(rows) / 1e3:.0f} us a turn (planning, the virtual model, results)")
        print(f"  hooks {sum(more) / len(rows) / 1e3:.1f} us a turn, {statistics.median(more) / 1e3:.1f} in the median")
        bare_us, wrapped_us = _look_us()
        print(f"  a look at one request: bare {bare_us:.1f} us, with hooks {wrapped_us:.1f} us")


ROUNDS = 4


def _timed(scenario: Scenario) -> tuple[list[int], list[tuple[Any, ...]]]:
    """Processor time of each turn, in nanoseconds, and what was decided."""
    made, took = harness.scheduler(**scenario.settings), []

    def timed(turn: Any) -> Any:
        began = time.thread_time_ns()
        found = harness.turn(turn)
        took.append(time.thread_time_ns() - began)
        return found

    decided = harness.play(made, scenario, turn_of=timed)
    return took[: len(decided)], decided


def _look_us() -> tuple[float, float]:
    """`PrefillAdder.add_one_req`, bare and with hooks: a refusal, which is the same each time. Microseconds."""
    found = {}
    for kind in ("bare", "wrapped"):
        made = harness.scheduler(prefill_max=None, pool=256)
        req = harness.request(made, "r", list(range(1, 200)), 200)
        hooks = Hooks(Silent())
        if kind == "bare":
            found[kind] = _looks(made, req)
            continue
        with hooked(hooks):
            hooks._backs = []
            hooks._pass_begins(made) if hooks._is_ours(made) else None
            found[kind] = _looks(made, req)
    return found["bare"] / 1e3, found["wrapped"] / 1e3


class Silent:
    """An outlet that keeps nothing."""

    def begin(self, scheduler: Any) -> bool:
        return True

    def put(self, fact: Any) -> None:
        """Drop it."""


def _looks(made: Any, req: Any) -> float:
    """One look at a request that is refused for memory, in nanoseconds: of 400 times 20, the shortest."""
    adder = PrefillAdder(
        made.page_size, made.tree_cache, made.token_to_kv_pool_allocator, made.running_batch, 0.7, 8192, 4096
    )
    req.init_next_round_input(made.tree_cache)
    shortest = float("inf")
    for _ in range(400):
        began = time.perf_counter_ns()
        for _ in range(20):
            adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
        shortest = min(shortest, (time.perf_counter_ns() - began) / 20)
    return shortest

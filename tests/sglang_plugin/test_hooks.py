"""Hooks, seams, worker and entry point: nothing of theirs reaches SGLang, and what they cannot read they refuse."""

from __future__ import annotations

import logging
import os
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

from telemetry import sglang_plugin
from telemetry.sglang import seams
from telemetry.sglang.facts import AbortAsked
from telemetry.sglang.hooks import MOST_FAULTS, Hooks
from telemetry.sglang.support import NOT_JUDGED, NOT_JUDGED_OVERLAPPED
from telemetry.sglang.worker import Worker


class Outlet:
    def begin(self, scheduler: Any) -> bool:
        return True

    def put(self, fact: Any) -> None:
        raise OSError("full")


@pytest.mark.parametrize("name", sorted(Hooks(Outlet()).around()))
def test_each_hook_delegates_once_and_gives_back_what_came_whatever_it_is_given(name: str) -> None:
    hooks = Hooks(Outlet())
    calls: list[tuple[Any, ...]] = []
    result = object()

    def function(*args: Any, **kwargs: Any) -> object:
        calls.append((args, kwargs))
        return result

    hook = hooks.around()[name]
    strange = object()
    assert hook(function, strange, strange, strange, odd=strange) is result
    assert calls == [((strange, strange, strange), {"odd": strange})]


@pytest.mark.parametrize("name", sorted(Hooks(Outlet()).around()))
def test_what_sglang_raises_goes_through_untouched(name: str) -> None:
    error = MemoryError("SGLang's own")

    def function(*args: Any, **kwargs: Any) -> object:
        raise error

    with pytest.raises(MemoryError) as caught:
        Hooks(Outlet()).around()[name](function, object())
    assert caught.value is error


def test_after_many_faults_the_hooks_only_delegate_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    hooks = Hooks(Outlet())
    hook = hooks.around()["Scheduler.abort_request"]
    scheduler = object()
    for _ in range(MOST_FAULTS + 20):
        hook(lambda *args: None, scheduler, types.SimpleNamespace(abort_all=True, abort_message=None))
    assert hooks.faults == MOST_FAULTS
    assert hooks.off is not None
    assert caplog.text.count("recording ends") == 1


def test_every_seam_has_a_hook_and_no_hook_is_without_one() -> None:
    assert {f"{seam.owner}.{seam.name}" for seam in seams.SEAMS} == set(Hooks(Outlet()).around())


def test_laws_that_are_off_are_laws_of_the_catalogue() -> None:
    from invariants.catalog import LAWS

    assert set(NOT_JUDGED) | set(NOT_JUDGED_OVERLAPPED) <= set(LAWS)
    judged = set(LAWS) - set(NOT_JUDGED)
    assert {"INV-CHUNK-01", "INV-CHUNK-02", "INV-BUDGET-01", "INV-BUDGET-03", "INV-EXIT-01", "INV-PROG-01"} <= (
        judged - set(NOT_JUDGED_OVERLAPPED)
    )


# -- seams -----------------------------------------------------------------------------------------------------------


def built(*, drop: str = "", rename: str = "") -> dict[str, types.ModuleType]:
    """Modules with all that is read, made of the seams themselves; less one thing."""
    modules: dict[str, types.ModuleType] = {}
    owners: dict[tuple[str, str], dict[str, Any]] = {}
    for seam in seams.SEAMS:
        parameters = ["self", *seam.parameters]
        if seam.name == rename:
            parameters[1] = "renamed"
        if seam.name != drop:
            scope: dict[str, Any] = {}
            exec(f"def {seam.name}({', '.join(parameters)}): pass", scope)
            owners.setdefault((seam.module, seam.owner), {})[seam.name] = scope[seam.name]
    for module, owner, names in seams._READ:
        owners.setdefault((module, owner), {}).update(
            {name: None for name in names.split() if name != drop and name not in owners.get((module, owner), {})}
        )
    for (module, owner), body in owners.items():
        setattr(modules.setdefault(module, types.ModuleType(module)), owner, type(owner, (), body))
    return modules


def test_a_version_that_has_everything_is_taken() -> None:
    assert seams.differences(built().__getitem__) == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"drop": "calc_priority"}, "SchedulePolicy.calc_priority is no function"),
        ({"rename": "add_one_req"}, "PrefillAdder.add_one_req takes ('renamed', 'has_chunked_req'"),
        ({"drop": "can_run_list"}, "PrefillAdder has no can_run_list"),
        ({"drop": "total_offset"}, "PrefillBudget has no total_offset"),
    ],
)
def test_a_version_that_differs_is_named_with_what_differs(change: dict[str, str], said: str) -> None:
    found = seams.differences(built(**change).__getitem__)
    assert len(found) == 1
    assert said in found[0]


def test_a_module_that_cannot_be_imported_is_a_difference() -> None:
    def look(name: str) -> Any:
        raise ImportError("no such module")

    assert all("cannot be imported" in found for found in seams.differences(look))


# -- entry point -----------------------------------------------------------------------------------------------------


def test_without_a_folder_or_a_scheduler_nothing_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(sglang_plugin.FOLDER_NAME, raising=False)
    assert sglang_plugin.register() is None
    monkeypatch.setenv(sglang_plugin.FOLDER_NAME, str(tmp_path / "journals"))
    assert "sglang.srt.managers.scheduler" not in sys.modules
    assert sglang_plugin.register() is None
    assert not (tmp_path / "journals").exists()


def test_a_size_that_is_none_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", types.ModuleType("scheduler"))
    monkeypatch.setenv(sglang_plugin.FOLDER_NAME, str(tmp_path))
    monkeypatch.setenv(sglang_plugin.SIZE_NAME, "0")
    assert sglang_plugin.register() is None
    assert "SGLANG_ADMITSCOPE_MAX_MIB is '0'" in caplog.text


# -- worker ----------------------------------------------------------------------------------------------------------


class Target:
    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.closed = 0
        self.hold = threading.Event()
        self.hold.set()

    def take(self, fact: Any) -> None:
        self.hold.wait(5)
        if fact.prefix == "bad":
            raise ValueError("cannot be mapped")
        self.taken.append(fact.number)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self.closed += 1


def fact(number: int, prefix: str = "") -> AbortAsked:
    return AbortAsked(number, 0, prefix, "abort")


def test_facts_come_in_order_and_a_close_waits_for_them() -> None:
    target = Target()
    worker = Worker(lambda: target, period_s=0.001, at_exit=False)
    for number in range(500):
        worker.put(fact(number))
    assert worker.close()
    assert target.taken == list(range(500))
    assert target.closed == 1
    assert (worker.taken, worker.delivered, worker.dropped, worker.errors) == (500, 500, 0, 0)


def test_a_full_queue_drops_the_newest_counts_them_and_waits_for_nobody() -> None:
    target = Target()
    target.hold.clear()
    worker = Worker(lambda: target, capacity=10, period_s=0.001, at_exit=False)
    for number in range(100):
        worker.put(fact(number))
    assert worker.dropped >= 89
    target.hold.set()
    assert worker.close()
    assert worker.taken + worker.dropped == 100
    assert target.taken == list(range(worker.taken)), "the oldest are kept"


def test_a_fact_that_cannot_be_mapped_costs_itself_alone(caplog: pytest.LogCaptureFixture) -> None:
    target = Target()
    worker = Worker(lambda: target, period_s=0.001, at_exit=False)
    for number, prefix in enumerate(("", "bad", "")):
        worker.put(fact(number, prefix))
    assert worker.close()
    assert target.taken == [0, 2]
    assert worker.errors == 1
    assert "taking a AbortAsked" in caplog.text or "cannot be mapped" in caplog.text


def test_a_journal_that_cannot_be_opened_ends_the_recording_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    def make() -> Target:
        raise PermissionError("no folder")

    worker = Worker(make, period_s=0.001, at_exit=False)
    worker._thread.join(5)
    worker.put(fact(0))
    assert worker.dropped == 1
    assert worker.close()
    assert "nothing is recorded" in caplog.text


def test_an_exit_that_is_asked_for_ends_the_recording_aloud(caplog: pytest.LogCaptureFixture) -> None:
    class Exiting(Target):
        def take(self, fact: Any) -> None:
            raise SystemExit

    worker = Worker(Exiting, period_s=0.001, at_exit=False)
    worker.put(fact(0))
    worker._thread.join(5)
    worker.put(fact(1))
    assert (worker.taken, worker.dropped, worker.errors) == (1, 1, 1)
    assert worker.close()
    assert "its thread has ended" in caplog.text


def test_a_forked_process_records_nothing_and_its_parent_goes_on() -> None:
    target = Target()
    worker = Worker(lambda: target, period_s=0.001, at_exit=False)
    worker.put(fact(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads is what this is about
        child = os.fork()
    if child == 0:
        worker.put(fact(1))
        os._exit(0 if (worker.dropped, len(worker._queue), worker.close()) == (1, 0, True) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    worker.put(fact(2))
    assert worker.close()
    assert target.taken == [0, 2]


def test_a_worker_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity is 0"):
        Worker(Target, capacity=0)

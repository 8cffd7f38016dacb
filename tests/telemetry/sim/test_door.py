"""The door for pages: one child at a time, with its progress, its answer, its bounds, and its end at any moment."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from telemetry.errands import Busy
from telemetry.launch import build_instance
from telemetry.settings import ServeCommand, parse
from telemetry.sim.door import Ask, Door, is_journal_of
from tests.telemetry.sim.recordings import config_of, record

PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("door"), config_of())


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that never ends by itself."""
    monkeypatch.setattr(
        "telemetry.sim.door._words",
        lambda *_: ["serve", "--server.port", "0", "--journal", "none", "--executor.kind", "simulated"],
    )


def test_it_answers_and_leaves_both_journals(tmp_path: Path, journal: Path) -> None:
    door = Door(tmp_path)
    found = door.start(Ask.of(journal, {"scheduler.chunked_prefill_size": "32"}, limit=20)).wait(PATIENCE_S)
    assert found.state == "done", found.error
    assert found.result is not None
    assert found.result.requests == 20
    for path in (found.result.journal_before, found.result.journal_after):
        assert path is not None
        assert Path(path).is_file()
    door.close()


def test_what_is_wrong_comes_back_in_its_own_words(tmp_path: Path, journal: Path) -> None:
    door = Door(tmp_path)
    found = door.start(Ask.of(journal, {"cache.page_size": "0"})).wait(PATIENCE_S)
    assert found.state == "failed"
    assert found.error == "--set cache.page_size: Input should be greater than or equal to 1; got '0'"


def gone(pid: int) -> bool:
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.usefixtures("slow")
def test_one_at_a_time_and_stopped_when_asked(tmp_path: Path, journal: Path) -> None:
    door = Door(tmp_path)
    run = door.start(Ask.of(journal, {}))
    with pytest.raises(Busy, match="another comparison runs"):
        door.start(Ask.of(journal, {}))
    run.cancel()
    assert run.wait(PATIENCE_S).state == "cancelled"
    assert gone(run.pid)
    door.close()


@pytest.mark.usefixtures("slow")
def test_its_time_is_bounded(tmp_path: Path, journal: Path) -> None:
    run = Door(tmp_path, time_limit_s=0.5).start(Ask.of(journal, {}))
    found = run.wait(PATIENCE_S)
    assert found.state == "failed"
    assert "ended after 0.5 s, its limit" in found.error
    assert gone(run.pid)


def test_a_child_that_is_killed_is_no_answer(tmp_path: Path, journal: Path) -> None:
    run = Door(tmp_path).start(Ask.of(journal, {"cache.page_size": "32"}))
    os.kill(run.pid, signal.SIGKILL)
    found = run.wait(PATIENCE_S)
    assert (found.state, found.error) == ("failed", "it ended with status -9 and said nothing")


def test_a_live_engine_names_its_own_journal(tmp_path: Path) -> None:
    command = parse(["serve", "--executor.kind", "simulated", "--journal", str(tmp_path / "journals")])
    assert isinstance(command, ServeCommand)
    instance = build_instance(command)
    try:
        status = instance.listeners.read_model.status()
        instance.listeners.close()
        assert is_journal_of(status.journal, status.engine_id)
    finally:
        instance.close()


def test_a_journal_belongs_to_the_engine_that_wrote_it(journal: Path, tmp_path: Path) -> None:
    assert is_journal_of(str(journal), "test")
    assert not is_journal_of(str(journal), "another")
    assert not is_journal_of(str(tmp_path / "none.jsonl"), "test")
    assert not is_journal_of(None, "test")

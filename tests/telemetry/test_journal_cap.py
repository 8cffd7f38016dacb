"""A journal with a limit keeps its start, which replays, and says where it stopped."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.clock import MonotonicClock
from engine.config import CacheConfig, EngineConfig, ExecutorConfig
from engine.executor.simulated import SimulatedExecutor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams
from telemetry import journal_cap
from telemetry.journal_cap import CappedJournal
from telemetry.replay import replay


def record(journal: CappedJournal, requests: int) -> None:
    """Run `requests` requests of a simulated engine into `journal`."""
    config = EngineConfig(executor=ExecutorConfig(kind="simulated"), cache=CacheConfig(num_pages=64))
    engine = LLMEngine(config, executor=SimulatedExecutor(config), clock=MonotonicClock(), sink=journal)
    for number in range(requests):
        params = SamplingParams(max_new_tokens=4, ignore_eos=True)
        engine.add_request(EngineRequest(rid=f"r{number}", prompt_ids=tuple(range(number, number + 40)), params=params))
        while engine.has_work:
            engine.step()
    journal.close()


def test_a_full_journal_stops_says_so_and_still_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_cap, "_MIB", 64 * 1024)  # a small "MiB" instead of a large journal
    journal = CappedJournal(tmp_path / "run.jsonl", max_mib=4)
    with caplog.at_level(logging.WARNING):
        record(journal, 400)
    assert journal.is_full
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 256 * 1024 <= size <= 2 * 256 * 1024, "whole batches are written, so it ends somewhat beyond its limit"
    assert "its limit" in caplog.text
    report = replay(journal.path)
    assert report.verdict == "identical"
    assert report.steps > 10


def test_below_its_limit_a_journal_is_whole(tmp_path: Path) -> None:
    journal = CappedJournal(tmp_path / "run.jsonl", max_mib=4)
    record(journal, 5)
    assert not journal.is_full
    assert '"r4"' in journal.path.read_text("utf-8")
    assert replay(journal.path).verdict == "identical"


def test_a_limit_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_mib is 0"):
        CappedJournal(tmp_path / "run.jsonl", max_mib=0)

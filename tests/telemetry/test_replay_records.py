"""Which records replay: of the CPU engine under load with everything that goes wrong, and of every older version."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.tiny_model import write_tiny_model
from engine.clock import VirtualClock
from engine.config import CacheConfig, EngineConfig, ExecutorConfig, ModelConfig, SchedulerConfig
from engine.events import (
    SCHEMA_VERSION,
    FanOut,
    RecordingSink,
    RequestTransitioned,
    ResponseSent,
    StepCompleted,
    StepPlanned,
)
from engine.executor.base import ForwardBatch, StepResult
from engine.executor.factory import build_torch_executor
from engine.executor.torch_executor import TorchExecutor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams
from telemetry.check import check
from telemetry.journal import JournalSink, segment_path
from telemetry.replay import replay
from telemetry.sim.journal_workload import JournalWorkload

DATA = Path(__file__).parent / "data"
#: A journal of each older version, recorded by the last engine that wrote it.
OLDER = {1: "explained.jsonl.gz", 2: "version-2.jsonl.gz"}
FAILS_AT = 40


class FailsOnce:
    """The CPU executor, whose device is gone in one step."""

    def __init__(self, executor: TorchExecutor) -> None:
        self._executor = executor
        self.executed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute(self, batch: ForwardBatch) -> StepResult:
        self.executed += 1
        if self.executed == FAILS_AT:
            raise RuntimeError("the device is gone")
        return self._executor.execute(batch)


class Recorded:
    """A run of the CPU engine, short of pages: its journal in small segments, and its events."""

    def __init__(self, folder: Path, model: Path) -> None:
        rng = random.Random(11)
        config = EngineConfig(
            scheduler=SchedulerConfig(
                chunked_prefill_size=48,
                max_prefill_tokens=96,
                max_running_requests=8,
                enable_mixed_chunk=True,
                schedule_conservativeness=0.05,
            ),
            cache=CacheConfig(page_size=4, num_pages=48),
            model=ModelConfig(path=model, name="tiny"),
            executor=ExecutorConfig(threads=1),
        )
        sink, clock = RecordingSink(), VirtualClock(5_000_000_000)
        self.path = folder / "run.jsonl"
        journal = JournalSink(self.path, rotate_bytes=60_000, checkpoint_steps=32)
        engine = LLMEngine(
            config,
            executor=FailsOnce(build_torch_executor(config)),
            clock=clock,
            sink=FanOut((sink, journal)),
            key_secret=b"a secret of the test",
        )
        engine.scheduler.kv.allocation_fault = lambda _phase: engine.steps_done % 29 == 7
        head = [rng.randrange(3, 200) for _ in range(16)]
        waiting = [self._request(number, head, rng) for number in range(36)]
        while waiting or engine.has_work:
            for _ in range(min(rng.choice((0, 1, 2)), len(waiting))):
                engine.add_request(waiting.pop(0))
            clock.advance_ns(rng.randint(1_000_000, 9_000_000))
            live = [request for request in engine.scheduler.state.requests if request.endswith("0")]
            if live and rng.random() < 0.15:
                engine.abort_request(rng.choice(live), "client_disconnected")
            engine.step()
        journal.close()
        self.events = [event for event in sink.events if not isinstance(event, ResponseSent)]

    @staticmethod
    def _request(number: int, head: list[int], rng: random.Random) -> EngineRequest:
        own = [rng.randrange(3, 200) for _ in range(rng.randint(3, 60 if number < 12 else 20))]
        # Who ignores the end token has all of its answer reserved, and nobody is ever pushed back.
        length = rng.randint(10, 90)
        params = SamplingParams(max_new_tokens=length, min_new_tokens=length // 2)
        return EngineRequest(rid=f"r{number}", prompt_ids=(*(head if number % 3 == 0 else ()), *own), params=params)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("cpu")
    return Recorded(folder, write_tiny_model(folder / "tiny"))


def segments(path: Path) -> list[Path]:
    files = [segment_path(path, number) for number in range(100)]
    return [file for file in files if file.exists()]


def copied(recorded: Recorded, folder: Path) -> list[Path]:
    """The journal's files, copied."""
    for file in segments(recorded.path):
        (folder / file.name).write_bytes(file.read_bytes())
    return segments(folder / recorded.path.name)


def test_a_journal_of_the_cpu_engine_replays_with_all_that_went_wrong(recorded: Recorded) -> None:
    seen: Counter[str] = Counter()
    for event in recorded.events:
        if isinstance(event, RequestTransitioned):
            seen[f"cause {event.cause}"] += 1
        elif isinstance(event, StepPlanned):
            seen["claim failed"] += event.claim_failed
            seen["mixed"] += event.kind == "mixed"
        elif isinstance(event, StepCompleted):
            seen["failed"] += event.failed
    for what in ("cause abort", "cause retract", "cause error", "cause length", "claim failed", "failed", "mixed"):
        assert seen[what], what
    report = replay(recorded.path)
    assert (report.verdict, report.events, report.torn) == ("identical", len(recorded.events), None)
    assert report.checkpoints > 3
    assert len(segments(recorded.path)) > 2
    assert check(recorded.path).verdict == "held"


def test_a_rotated_journal_that_is_torn_replays_up_to_the_tear(recorded: Recorded, tmp_path: Path) -> None:
    files = copied(recorded, tmp_path)
    last = files[-1].read_bytes()
    files[-1].write_bytes(last[: len(last) * 2 // 3])
    for file in files[:-1]:
        with gzip.open(f"{file}.gz", "wb") as packed:
            packed.write(file.read_bytes())
        file.unlink()
    report = replay(tmp_path)
    assert (report.verdict, report.divergence) == ("identical", None)
    assert report.torn is not None
    assert str(files[-1]) in report.torn
    written = sum(len(file.read_bytes().splitlines()) for file in segments(recorded.path)[:-1])
    assert len(recorded.events) > report.events > written * 0.8


def test_an_altered_segment_in_the_middle_is_named_by_file_and_line(recorded: Recorded, tmp_path: Path) -> None:
    files = copied(recorded, tmp_path)
    lines = files[1].read_bytes().splitlines(keepends=True)
    at = next(index for index, line in enumerate(lines) if b'"type":"StepPlanned"' in line)
    changed = json.loads(lines[at])
    lines[at] = json.dumps(changed | {"evicted_pages": 999}, separators=(",", ":")).encode() + b"\n"
    files[1].write_bytes(b"".join(lines))
    report = replay(tmp_path)
    assert report.divergence is not None
    assert report.divergence.where == f"{files[1]}:{at + 1}"
    assert [field.field for field in report.divergence.fields] == ["evicted_pages"]
    around = report.divergence.around
    assert around is not None
    assert around.step == changed["step"]
    assert around.waiting == changed["num_waiting"]
    assert tuple(around.pages.values()) == tuple(changed["pages"])


def test_every_older_version_has_a_journal() -> None:
    """Raising the version asks for one more, made by the engine of the version before it was raised."""
    assert set(OLDER) >= set(range(1, SCHEMA_VERSION))


@pytest.mark.parametrize("version", sorted(OLDER))
def test_a_journal_of_an_older_version_replays_and_is_a_workload(version: int) -> None:
    path = DATA / OLDER[version]
    header = json.loads(gzip.decompress(path.read_bytes()).splitlines()[0])
    assert header["schema_version"] == version
    report = replay(path)
    assert (report.verdict, report.divergence, report.torn) == ("identical", None, None)
    assert report.events > 1_000
    asks = list(JournalWorkload(path).asks())
    assert len(asks) > 20
    assert any(ask.abort_ns is not None for ask in asks)

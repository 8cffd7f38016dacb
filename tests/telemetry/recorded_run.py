"""The run behind docs/cookbook.md. Owns: a seeded engine under load, and the journal of it in data/cookbook.jsonl.gz.

`python -m tests.telemetry.recorded_run` records it anew; `make docs` then writes the page. A small pool, long prompts
with a shared head beside short ones, and promises that are too low: prompts are cut, requests wait and are overtaken,
decoding runs out of pages. The clock is virtual: a step takes 6 ms and 45 µs for each token of a prompt.
"""

from __future__ import annotations

import gzip
import random
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from engine.clock import VirtualClock
from engine.config import CacheConfig, EngineConfig, ExecutorConfig, ModelConfig, Policy, SchedulerConfig
from engine.executor.base import ForwardBatch, StepResult
from engine.executor.simulated import SimulatedExecutor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams
from telemetry.journal import JournalSink

JOURNAL = Path(__file__).parent / "data" / "cookbook.jsonl.gz"
STARTED = datetime(2026, 11, 28, 9, 59, 58, tzinfo=UTC)
REQUESTS = 110
_MS = 1_000_000


class TimedExecutor(SimulatedExecutor):
    """Moves the clock as a small GPU would."""

    def __init__(self, config: EngineConfig, clock: VirtualClock) -> None:
        super().__init__(config)
        self._clock = clock

    def execute(self, batch: ForwardBatch) -> StepResult:
        self._clock.advance_ns(6 * _MS + 45_000 * (len(batch.token_ids) - len(batch.rids)))
        return super().execute(batch)


def record(path: Path, *, requests: int = REQUESTS, seed: int = 11, rows: int = 32) -> None:
    """Run it, and write its journal to `path`; `rows` requests run at most."""
    rng = random.Random(seed)
    config = EngineConfig(
        scheduler=SchedulerConfig(
            max_prefill_tokens=384,
            chunked_prefill_size=192,
            max_running_requests=rows,
            clip_max_new_tokens=32,
            schedule_policy=Policy.LPM,
            schedule_conservativeness=0.02,
            enable_mixed_chunk=True,
        ),
        cache=CacheConfig(page_size=16, num_pages=84),
        model=ModelConfig(name="recorded"),
        executor=ExecutorConfig(kind="simulated"),
    )
    clock = VirtualClock(1_000_000_000)
    journal = JournalSink(path, clock=clock)
    engine = LLMEngine(
        config,
        executor=TimedExecutor(config, clock),
        clock=clock,
        sink=journal,
        key_secret=b"the run of the cookbook",
        version="0.1.0",
        engine_id="cookbook",
        wall_ns=int(STARTED.timestamp()) * 1_000_000_000,
    )
    heads = [tuple(rng.randrange(100, 500) for _ in range(160)) for _ in range(2)]
    due = clock.now_ns()
    arrived, first_byte_ns = 0, dict[str, int]()
    while arrived < requests or engine.has_work:
        while arrived < requests and clock.now_ns() >= due:
            _arrive(engine, rng, heads, arrived, accepted_ns=due)
            arrived += 1
            due += round(rng.expovariate(30.0) * 1e9)
        if not engine.has_work:
            clock.advance_ns(max(0, due - clock.now_ns()))
            continue
        for output in engine.step():
            now = clock.now_ns() + 150_000
            first_byte_ns.setdefault(output.rid, now)
            if output.finish is not None:
                engine.record_response(output.rid, first_byte_ns.pop(output.rid), now, 100, 20_000, False)
        clock.advance_ns(rng.randint(200_000, 600_000))
    journal.close()


def _arrive(engine: LLMEngine, rng: random.Random, heads: list[tuple[int, ...]], number: int, accepted_ns: int) -> None:
    is_long = number % 4 == 0
    if number < REQUESTS * 2 // 3:
        shared = heads[number % 5 // 3] if rng.random() < 0.5 else ()
        own = rng.randint(120, 420) if is_long else rng.randint(8, 60)
        new_tokens = rng.randint(20, 50) if is_long else rng.randint(30, 90)
    else:  # short questions with long answers
        shared, own, new_tokens = (), rng.randint(4, 24), rng.randint(60, 150)
    prompt = (*shared, *(rng.randrange(100, 500) for _ in range(own)))
    params = SamplingParams(max_new_tokens=new_tokens, min_new_tokens=2 * new_tokens // 3)
    engine.add_request(EngineRequest(rid=f"r{number}", prompt_ids=prompt, params=params, accepted_ns=accepted_ns))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        record(path)
        with JOURNAL.open("wb") as raw, gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as out:
            out.write(path.read_bytes())


if __name__ == "__main__":
    main()

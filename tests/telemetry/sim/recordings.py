"""Recorded runs for tests of the simulator: the real `LLMEngine` over made-up tokens, with steps of a known cost."""

from __future__ import annotations

import random
from pathlib import Path

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.executor.base import ForwardBatch, StepResult
from engine.executor.simulated import SimulatedExecutor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams
from telemetry.journal import JournalSink
from telemetry.sim.cost_model import CostModel, save_cost

MS = 1_000_000
#: 4 ms a step, 50 µs a prompt token, 0.3 ms a decoding request.
COST = CostModel(
    name="planted",
    source="a test",
    forward={"step": 4.0 * MS, "prefill_tokens": 50_000.0, "decode_rows": 300_000.0},
    host={},
)


class PlantedExecutor(SimulatedExecutor):
    """Takes exactly as long as COST says."""

    def __init__(self, config: EngineConfig, clock: VirtualClock) -> None:
        super().__init__(config)
        self._clock = clock

    def execute(self, batch: ForwardBatch) -> StepResult:
        lengths = [
            int(end - start)
            for start, end in zip(batch.metadata.qo_indptr[:-1], batch.metadata.qo_indptr[1:], strict=True)
        ]
        # A decode row is a query of length one; no prompt piece of these runs is so short.
        decodes = sum(length == 1 for length in lengths)
        self._clock.advance_ns(4 * MS + 50_000 * (sum(lengths) - decodes) + 300_000 * decodes)
        return super().execute(batch)


def config_of(*, num_pages: int = 200, page_size: int = 16, **scheduler: object) -> EngineConfig:
    """A small engine that cuts prompts and runs short of memory."""
    sections = {"chunked_prefill_size": 96, "max_running_requests": 16, "schedule_policy": "lpm", **scheduler}
    return EngineConfig.model_validate(
        {
            "scheduler": sections,
            "cache": {"page_size": page_size, "num_pages": num_pages},
            "executor": {"kind": "simulated"},
        }
    )


def record(
    folder: Path,
    config: EngineConfig,
    *,
    requests: int = 40,
    gap_ms: float = 12.0,
    seed: int = 3,
    prompts: tuple[int, int] = (20, 300),
    outputs: tuple[int, int] = (4, 40),
    ends_early: bool = True,
    leaves_after_ms: float | None = None,
) -> Path:
    """Run it and return the journal. A third of the prompts begin alike; with `ends_early` some answers end by EOS.

    leaves_after_ms  every fourth client leaves so long after it came
    """
    rng = random.Random(seed)
    clock = VirtualClock(7 * MS)
    path = folder / "run.jsonl"
    journal = JournalSink(path, clock=VirtualClock())
    engine = LLMEngine(config, executor=PlantedExecutor(config, clock), clock=clock, sink=journal, engine_id="test")
    head = [rng.randrange(32, 127) for _ in range(64)]
    due, waiting = clock.now_ns(), []
    for number in range(requests):
        length = rng.randint(*prompts)
        own = [rng.randrange(32, 127) for _ in range(length)]
        ids = tuple((head + own)[:length] if number % 3 == 0 else own)
        params = SamplingParams(max_new_tokens=rng.randint(*outputs), ignore_eos=not ends_early)
        waiting.append((due, EngineRequest(rid=f"r{number}", prompt_ids=ids, params=params)))
        due += round(rng.expovariate(1 / max(gap_ms, 1e-9)) * MS) if gap_ms else 0
    leaving: list[tuple[int, str]] = []
    while waiting or engine.has_work:
        if not engine.has_work and waiting[0][0] > clock.now_ns():
            clock.advance_ns(waiting[0][0] - clock.now_ns())
        while waiting and waiting[0][0] <= clock.now_ns():
            came, request = waiting.pop(0)
            engine.add_request(request)
            if leaves_after_ms is not None and int(request.rid[1:]) % 4 == 0:
                leaving.append((came + round(leaves_after_ms * MS), request.rid))
        while leaving and leaving[0][0] <= clock.now_ns():
            engine.abort_request(leaving.pop(0)[1])
        engine.step()
    journal.close()
    return path


def cost_file(folder: Path) -> str:
    """COST as a file for --cost."""
    save_cost(COST, folder / "cost.json")
    return str(folder / "cost.json")

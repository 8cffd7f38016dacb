"""A prompt of 10,000 tokens, walked from its page keys to its first token; `walk_10000.json` holds every number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.events import PagesMoved, RecordingSink, StepPlanned
from engine.executor.base import ExecutorInfo, ForwardBatch, StepResult
from engine.executor.simulated import SimulatedExecutor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams

WALK: dict[str, Any] = json.loads(Path(__file__).with_name("walk_10000.json").read_text("utf-8"))


class KeepingExecutor:
    """The simulated executor, keeping the last batch that it was handed."""

    def __init__(self, config: EngineConfig) -> None:
        self._inner = SimulatedExecutor(config)
        self.batch: ForwardBatch | None = None

    def info(self) -> ExecutorInfo:
        return self._inner.info()

    def execute(self, batch: ForwardBatch) -> StepResult:
        self.batch = batch
        return self._inner.execute(batch)

    def close(self) -> None:
        self._inner.close()


class Walk:
    """The engine of the walk, with what it recorded."""

    def __init__(self) -> None:
        config = EngineConfig.model_validate(WALK["config"])
        self.executor = KeepingExecutor(config)
        self.sink = RecordingSink()
        self.engine = LLMEngine(config, executor=self.executor, clock=VirtualClock(), sink=self.sink)
        self._prompts = np.random.default_rng(0).integers(32, 127, size=(10, 10_000)).tolist()

    def add(self, rid: str, row: int, tokens: int, max_new_tokens: int) -> None:
        params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        self.engine.add_request(EngineRequest(rid=rid, prompt_ids=tuple(self._prompts[row][:tokens]), params=params))

    def prepare(self) -> None:
        """3,000 tokens of the prefix in the tree, eight requests decoding, the long prompt and a short one waiting."""
        self.add("warm", 8, 3_000, 1)
        while self.engine.has_work:
            self.engine.step()
        for number in range(8):
            self.add(f"d{number}", number, 20, 64)
        self.engine.step()
        self.add("long", 8, 10_000, 500)
        self.add("next", 9, 200, 10)

    def step(self) -> dict[str, Any]:
        """One step in the layout of the file."""
        seen = len(self.sink.events)
        outputs = self.engine.step()
        events = self.sink.events[seen:]
        planned = next(event for event in events if isinstance(event, StepPlanned))
        moves: dict[str, int] = {}
        for event in events:
            if isinstance(event, PagesMoved) and event.cause != "split":
                name = f"{event.cause}: {event.source} -> {event.target}"
                moves[name] = moves.get(name, 0) + len(event.pages) // 4
        batch, pool = self.executor.batch, self.engine.scheduler.kv.pool
        assert batch is not None
        assert planned.budget_open is not None
        return {
            "kind": planned.kind.value,
            "opens": _ledgers(planned.budget_open),
            "decisions": [_decision(event) for event in events if type(event).__name__ == "AdmissionDecided"],
            "prefills": [[row.rid, row.prefix_len, row.extend_len, row.is_last] for row in planned.prefills],
            "continuation": planned.continuation,
            "query_rows": batch.metadata.qo_indptr.tolist(),
            "pages_of_row_0": int(batch.metadata.kv_indptr[1]),
            "last_page_len_of_row_0": int(batch.metadata.last_page_len[0]),
            "sampled": [row.rid for row in batch.sampling],
            "pages_moved": moves,
            "tokens_out": [output.rid for output in outputs],
            "pool_after": list(pool.counts),
        }


def _ledgers(view: Any) -> list[float]:
    return [view.rem_input, view.rem_chunk, view.remaining_total, view.remaining_current]


def _decision(event: Any) -> dict[str, Any]:
    return {
        "rid": event.rid,
        "reason": event.reason.value,
        "prefix_len": event.prefix_len,
        "candidate_extend": event.candidate_extend,
        "selected_extend": event.selected_extend,
        "extend_end": event.extend_end,
        "reserved_new_tokens": event.reserved_new_tokens,
        "need_have": [event.need, event.have],
        "rem_input": [event.rem_input_before, event.rem_input_after],
        "rem_chunk": [event.rem_chunk_before, event.rem_chunk_after],
        "remaining_total": [event.remaining_total_before, event.remaining_total_after],
        "remaining_current": [event.remaining_current_before, event.remaining_current_after],
    }


def test_the_walk_of_a_long_prompt() -> None:
    walk = Walk()
    walk.prepare()
    request = walk.engine.scheduler.state.requests["long"]
    cached = walk.engine.scheduler.kv.match(request.keys.first(len(request.keys))).pages
    assert {"full_pages": len(request.keys), "cached_pages": cached} == WALK["keys"]
    for expected in WALK["steps"]:
        played = walk.step()
        wanted = {name: value for name, value in expected.items() if name != "why"}
        assert played == wanted, expected["why"][0]
    assert walk.engine.scheduler.state.requests["long"].output_len == 1

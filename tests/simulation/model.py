"""The simulation's executor and clock. Owns: the stub model at the speed of a simulation, and time by order.

Same paged memory, same tokens and same complaints as the stub model it derives from; but the whole batch is looked up
at once, and the description of the batch is validated in every 16th step only: what a wrong one leads to, the check of
the memory finds in each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.config import EngineConfig
from engine.events import AnyEvent, EventSink, PagesMoved
from engine.executor.base import ForwardBatch, SampledToken, StepResult
from tests.engine.stub_model import POISON, LateModel, StubFailure, StubModel, mix, next_token, wrong_successors

VALIDATE_EVERY = 16


class SimClock:
    """A clock that moves by `tick_ns` with each look, and otherwise when told; told so, it may even fall."""

    def __init__(self, tick_ns: int) -> None:
        self._now_ns = 1_000_000_000
        self._tick_ns = tick_ns

    def now_ns(self) -> int:
        self._now_ns += self._tick_ns
        return self._now_ns

    def move(self, delta_ns: int) -> None:
        self._now_ns += delta_ns


class SimModel(StubModel):
    """The stub model, a batch at a time.

    spoil     percent of the slots that the next, failing, step overwrites before it raises; None: it does not fail
    slow_ns   what the next batch takes
    """

    def __init__(self, config: EngineConfig, clock: SimClock) -> None:
        super().__init__(config)
        self._clock = clock
        self._calls = 0
        self.spoil: int | None = None
        self.slow_ns = 0

    def execute(self, batch: ForwardBatch) -> StepResult:
        during, self.during = self.during, None
        if during is not None:
            during()
        self._clock.move(self.slow_ns)
        self.slow_ns = 0
        if self.spoil is not None:
            share, self.spoil = self.spoil, None
            spoiled = batch.metadata.out_slots[: len(batch.metadata.out_slots) * share // 100]
            self._value[spoiled], self._token[spoiled] = 1, 1
            raise StubFailure("ordered")
        self._calls += 1
        if self._calls % VALIDATE_EVERY == 0:
            batch.metadata.validate(self._info.num_pages)
        values = self._compute_all(batch)
        return StepResult(
            batch.step,
            tuple(
                SampledToken(row.rid, next_token(values[row.row], row.output_index, row.params))
                for row in batch.sampling
            ),
        )

    def _compute_all(self, batch: ForwardBatch) -> list[int]:
        """Write every row's K/V and check every context; returns the rows' values."""
        meta, size = batch.metadata, self._size
        lengths = meta.seq_lens.astype(np.int64)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        place = np.arange(int(ends[-1])) - np.repeat(starts, lengths)
        pages = meta.kv_indices[np.repeat(meta.kv_indptr[:-1], lengths) + place // size].astype(np.int64)
        slots = pages * size + place % size
        queries = np.diff(meta.qo_indptr)
        assert queries.min() > 0, f"step {batch.step}: a request computes nothing"
        first = ends - queries
        before = np.where(first > starts, self._value[slots[first - 1]], 0).tolist()
        values: list[int] = []
        tokens, rows = batch.token_ids.tolist(), meta.qo_indptr.tolist()
        for index, start in enumerate(before):
            value = start
            for token in tokens[rows[index] : rows[index + 1]]:
                value = mix(value, token)
                values.append(value)
        self._value[meta.out_slots], self._token[meta.out_slots] = values, batch.token_ids
        self._check(batch, slots, starts)
        return values

    def _check(self, batch: ForwardBatch, slots: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        values, tokens = self._value[slots], self._token[slots]
        wrong = (values == POISON) | wrong_successors(values, tokens, starts)
        if self.excused:
            ends = np.append(starts[1:], len(slots))
            for rid, start, end in zip(batch.rids, starts, ends, strict=True):
                wrong[start:end] &= rid not in self.excused
        if wrong.any():
            rid = batch.rids[int(np.searchsorted(starts, int(wrong.argmax()), side="right")) - 1]
            raise AssertionError(f"step {batch.step}: {rid} reads K/V that is not written, or of another prefix")


class Poisoner:
    """Spoils freed pages in the model's memory, then hands the event on."""

    def __init__(self, model: StubModel | LateModel, sink: EventSink) -> None:
        self._model = model
        self._sink = sink

    def emit(self, event: AnyEvent) -> None:
        if type(event) is PagesMoved and event.target == "free":
            self._model.poison(np.frombuffer(event.pages, dtype=np.int32).tolist())
        self._sink.emit(event)

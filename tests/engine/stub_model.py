"""A stub model that depends on all it should, and on nothing else. Owns: paged memory with poison, made-up tokens.

The "K/V" of a token is a number mixed from the token and the K/V of the token before it, so it stands for the whole
prefix. It is written to, and read from, the slots that the batch names. A page table that points at a freed page, at
another request's page or at a slot not written yet therefore gives either an error here or another output token, and
`expected_tokens` says what the right ones are without any cache, chunk, batch or retraction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.events import AnyEvent, EventSink, PagesMoved
from engine.executor.background import with_carried
from engine.executor.base import ExecutorInfo, ForwardBatch, SampledToken, SamplingRow, StepResult
from engine.llm_engine import EngineRequest, LLMEngine, TokenOutput
from engine.sampling_params import SamplingParams

EOS: Final = 0
VOCABULARY: Final = 512
POISON: Final = -1
_FACTOR, _MODULUS = 48271, 2**31 - 1


def mix(before: int, token: int) -> int:
    """The K/V of a token after the K/V of what stands before it; 0 stands before the first."""
    return (before * _FACTOR + token + 1) % _MODULUS


def wrong_successors(values: np.ndarray, tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Which K/V do not follow from the one before them; contexts begin at `starts`."""
    before = np.empty_like(values)
    before[1:] = values[:-1]
    before[starts] = 0
    wrong: np.ndarray = (before * _FACTOR + tokens + 1) % _MODULUS != values
    return wrong


def next_token(value: int, output_index: int, params: SamplingParams) -> int:
    """The token that a context with this K/V at its end yields."""
    if not params.ignore_eos and output_index + 1 > params.min_new_tokens and value % 29 == 0:
        return EOS
    return 32 + value % 95


def expected_tokens(prompt: Sequence[int], params: SamplingParams, *, limit: int | None = None) -> list[int]:
    """The outputs of a request that runs alone in one piece. `limit`: the engine's clamp of max_new_tokens."""
    value = 0
    for token in prompt:
        value = mix(value, token)
    tokens: list[int] = []
    while len(tokens) < min(params.max_new_tokens, limit or params.max_new_tokens):
        tokens.append(next_token(value, len(tokens), params))
        if len(tokens) >= params.min_new_tokens and (
            (tokens[-1] == EOS and not params.ignore_eos) or tokens[-1] in params.stop_token_ids
        ):
            break
        value = mix(value, tokens[-1])
    return tokens


class StubFailure(Exception):
    """The failure that a test ordered."""


class StubModel:
    """An executor. Also a sink that poisons pages when they are freed; put it in front of the real sink.

    fail_next   raise in the next execute
    during      called in the next execute, once: what happens while a step is in flight
    """

    def __init__(self, config: EngineConfig, *, max_context_tokens: int = 1 << 20) -> None:
        num_pages = config.cache.num_pages
        assert num_pages is not None
        self._size = config.cache.page_size
        self._value = np.full(num_pages * self._size, POISON, dtype=np.int64)
        self._token = np.full(num_pages * self._size, POISON, dtype=np.int64)
        self._info = ExecutorInfo(
            model="stub",
            vocab_size=VOCABULARY,
            max_context_tokens=config.model.max_context_tokens or max_context_tokens,
            page_size=self._size,
            num_pages=num_pages,
            attention_backend="none",
            device="none",
            dtype="int64",
            eos_token_ids=(EOS,),
        )
        self.fail_next = False
        self.during: Callable[[], None] | None = None
        self.batches: list[ForwardBatch] = []
        #: Whose memory may hold anything: rows of those that the step before, which failed, ended.
        self.excused: frozenset[str] = frozenset()

    def info(self) -> ExecutorInfo:
        return self._info

    def execute(self, batch: ForwardBatch) -> StepResult:
        during, self.during = self.during, None
        if during is not None:
            during()
        if self.fail_next:
            self.fail_next = False
            raise StubFailure("ordered")
        batch.metadata.validate(self._info.num_pages)
        self.batches.append(batch)
        for index in range(batch.metadata.batch_size):
            self._compute(batch, index)
        return StepResult(batch.step, tuple(self._sample(batch, row) for row in batch.sampling))

    def close(self) -> None:
        """Holds nothing."""

    def poison(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._value[page * self._size : (page + 1) * self._size] = POISON
            self._token[page * self._size : (page + 1) * self._size] = POISON

    def _slots(self, batch: ForwardBatch, index: int) -> np.ndarray:
        """Slots of the whole context of request `index`, in order of position."""
        meta = batch.metadata
        pages = meta.kv_indices[meta.kv_indptr[index] : meta.kv_indptr[index + 1]].astype(np.int64)
        place = np.arange(int(meta.seq_lens[index]))
        return pages[place // self._size] * self._size + place % self._size

    def _compute(self, batch: ForwardBatch, index: int) -> None:
        meta = batch.metadata
        start, end = int(meta.qo_indptr[index]), int(meta.qo_indptr[index + 1])
        assert end > start, f"step {batch.step}: {batch.rids[index]} computes nothing"
        slots = self._slots(batch, index)
        first = len(slots) - (end - start)
        value = int(self._value[slots[first - 1]]) if first else 0
        for row in range(start, end):
            token = int(batch.token_ids[row])
            value = mix(value, token)
            slot = int(meta.out_slots[row])
            self._value[slot], self._token[slot] = value, token
        if batch.rids[index] in self.excused:
            return
        values, tokens = self._value[slots], self._token[slots]
        assert (values != POISON).all(), f"step {batch.step}: {batch.rids[index]} reads slots that are not written"
        wrong = wrong_successors(values, tokens, np.zeros(1, dtype=np.int64))
        assert not wrong.any(), f"step {batch.step}: {batch.rids[index]} reads K/V of another prefix"

    def _sample(self, batch: ForwardBatch, row: SamplingRow) -> SampledToken:
        value = int(self._value[int(batch.metadata.out_slots[row.row])])
        return SampledToken(row.rid, next_token(value, row.output_index, row.params))


class LateModel:
    """The stub model behind an engine that overlaps: as late as can be, a batch is computed when it is collected.

    Freed pages are poisoned as whoever gets them next would write them: after the batches launched before that.
    """

    def __init__(self, model: StubModel) -> None:
        self._model = model
        self._freed: list[int] = []
        self._launched: deque[tuple[list[int], ForwardBatch]] = deque()
        self._last: tuple[int, ...] = ()
        self.fail_next_launch = False

    def info(self) -> ExecutorInfo:
        return self._model.info()

    def execute(self, batch: ForwardBatch) -> StepResult:
        raise AssertionError("an engine that overlaps launches and collects")

    def allows_next(self, batch: ForwardBatch) -> bool:
        return True

    def launch(self, batch: ForwardBatch) -> None:
        if self.fail_next_launch:
            self.fail_next_launch = False
            raise StubFailure("ordered")
        self._launched.append((self._freed, batch))
        assert len(self._launched) <= 2, "at most one step lags"
        self._freed = []

    def collect(self) -> StepResult:
        freed, batch = self._launched.popleft()
        self._model.poison(freed)
        last, self._last = self._last, ()
        try:
            result = self._model.execute(with_carried(batch, last))
        except StubFailure:
            self._model.excused = frozenset(batch.rids)
            raise
        self._model.excused = frozenset()
        self._last = tuple(token.token_id for token in result.tokens)
        return result

    def close(self) -> None:
        """Holds nothing."""

    def poison(self, pages: Sequence[int]) -> None:
        self._freed.extend(pages)


class _Poisoner:
    def __init__(self, model: StubModel | LateModel, sinks: Sequence[EventSink]) -> None:
        self._model = model
        self._sinks = sinks

    def emit(self, event: AnyEvent) -> None:
        if isinstance(event, PagesMoved) and event.target == "free":
            self._model.poison(np.frombuffer(event.pages, dtype=np.int32).tolist())
        for sink in self._sinks:
            sink.emit(event)


def assert_nothing_held(engine: LLMEngine) -> None:
    """No lease, lock, row, page, map entry or token is left in an engine without requests."""
    kv, state = engine.scheduler.kv, engine.scheduler.state
    free, private, protected, evictable = kv.pool.counts
    assert (private, protected, free + evictable) == (0, 0, kv.num_pages)
    assert kv.leases == {}
    assert kv.free_rows == engine.config.scheduler.max_running_requests
    assert (state.requests, list(state.waiting), state.running, state.last_prefill) == ({}, [], [], [])
    assert state.continuation is None
    assert (state.leaving, list(state.flights)) == ({}, [])
    assert state.waiting_tokens == 0
    assert len(engine.tokens) == 0


class StubRun:
    """A whole engine over the stub model, with what came out of it by request."""

    def __init__(self, config: EngineConfig, *sinks: EventSink) -> None:
        self.config = config
        self.model = StubModel(config)
        self.clock = VirtualClock()
        self.late = LateModel(self.model)
        model = self.late if config.executor.overlap else self.model
        self.engine = LLMEngine(
            config, executor=model, clock=self.clock, sink=_Poisoner(model, sinks), key_secret=b"test"
        )
        self.requests: dict[str, EngineRequest] = {}
        self.limits: dict[str, int] = {}
        self.outputs: dict[str, list[TokenOutput]] = {}

    @property
    def state(self) -> Any:
        return self.engine.scheduler.state

    @property
    def kv(self) -> Any:
        return self.engine.scheduler.kv

    def add(self, rid: str, prompt: Sequence[int], max_new_tokens: int = 4, **params: Any) -> None:
        """Queue a request; ignores EOS unless told otherwise."""
        priority = params.pop("priority", None)
        settings = SamplingParams(max_new_tokens=max_new_tokens, **{"ignore_eos": True, **params})
        request = EngineRequest(rid=rid, prompt_ids=tuple(prompt), params=settings, priority=priority)
        self.engine.add_request(request)
        self.requests[rid] = request
        self.limits[rid] = self.state.requests[rid].max_new_tokens
        self.outputs.setdefault(rid, [])

    def step(self) -> list[TokenOutput]:
        self.clock.advance_ns(1_000_000)
        outputs = self.engine.step()
        failure = self.engine.last_failure
        if failure is not None and not isinstance(failure, StubFailure):
            raise failure  # a complaint of the model or of a sink, which the engine took for a failing executor
        for output in outputs:
            earlier = self.outputs[output.rid]
            assert not earlier or earlier[-1].finish is None, f"{output.rid} speaks after its end"
            assert output.output_index == len(earlier)
            earlier.append(output)
        return outputs

    def run(self, max_steps: int = 2_000) -> int:
        """Step until nothing is left; returns the steps taken."""
        for count in range(max_steps):
            if not self.engine.has_work:
                return count
            self.step()
        raise AssertionError(f"unfinished after {max_steps} steps: {sorted(self.state.requests)}")

    def tokens(self, rid: str) -> list[int]:
        return [output.token_id for output in self.outputs[rid] if output.token_id is not None]

    def end(self, rid: str) -> tuple[str, str] | None:
        """(finish reason, detail) of a request, None while it lives."""
        last = self.outputs[rid][-1] if self.outputs[rid] else None
        return None if last is None or last.finish is None else (last.finish.value, last.detail)

    def assert_right_tokens(self, rid: str) -> None:
        """What came out is what the request alone would give, as far as it got."""
        request, tokens = self.requests[rid], self.tokens(rid)
        expected = expected_tokens(request.prompt_ids, request.params, limit=self.limits[rid])
        assert tokens == expected[: len(tokens)], rid
        end = self.end(rid)
        if end is not None and end[0] in {"stop", "length"} and end != ("length", "kv_pool_exhausted"):
            assert tokens == expected, rid

    def assert_nothing_held(self) -> None:
        """After the last end: nothing is left in the engine, and everyone has an end."""
        assert_nothing_held(self.engine)
        assert all(self.end(rid) is not None for rid in self.requests)

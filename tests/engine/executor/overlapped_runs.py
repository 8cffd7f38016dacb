"""Whole engines over an executor, with overlap and without. Owns: what requests are answered, and how far plans ran
ahead; and a model small enough for a device whose operators are late."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.events import AnyEvent, EventSink, RecordingSink, StepCompleted, StepPlanned
from engine.executor.base import Executor, ForwardBatch, StepResult
from engine.executor.overlapped_torch import OverlappedTorchExecutor
from engine.executor.torch_executor import Gpu, TorchExecutor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.models.llama_config import LlamaConfig
from invariants import InvariantChecker
from tests.engine.executor.late_operators import LateOperators, LateStream
from tests.engine.executor.tiny import CONFIG

PAGE_SIZE = 4


class Said(NamedTuple):
    """tokens by request; log-probabilities as they came; why each ended; plans made before the outcome of the last."""

    tokens: dict[str, list[int]]
    logprobs: dict[str, list[Any]]
    ends: dict[str, str]
    ahead: int
    plans: list[StepPlanned]


class OddGrammar:
    """Odd tokens only, six of them."""

    def __init__(self) -> None:
        self._taken = 0

    def allowed(self) -> np.ndarray:
        bits = np.arange(-(-CONFIG.vocab_size // 32) * 32) % 2 == 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def push(self, token_id: int) -> bool:
        self._taken += 1
        return token_id % 2 == 1

    @property
    def is_complete(self) -> bool:
        return self._taken >= 6


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length).tolist())


def run(
    executor: Executor,
    requests: Sequence[EngineRequest],
    *,
    overlap: bool,
    num_pages: int = 64,
    aborts: Mapping[int, str] | None = None,
    sinks: Callable[[VirtualClock], Sequence[EventSink]] = lambda _: (),
    may_fail: bool = False,
    **scheduler: Any,
) -> Said:
    """One request comes in every second turn. `aborts`: turn -> who is given up then. Every law is checked, and that no
    step failed unless it `may_fail`."""
    settings = {"max_running_requests": 4, "chunked_prefill_size": 16, "schedule_conservativeness": 0.05}
    config = EngineConfig.model_validate(
        {
            "scheduler": settings | scheduler,
            "cache": {"page_size": PAGE_SIZE, "num_pages": num_pages},
            "executor": {"kind": "simulated", "overlap": overlap},
        }
    )
    clock, sink, checker = VirtualClock(), RecordingSink(), InvariantChecker()
    heard: list[EventSink] = [sink, checker, *sinks(clock)]

    class All:
        def emit(self, event: AnyEvent) -> None:
            for one in heard:
                one.emit(event)

    engine = LLMEngine(config, executor=executor, clock=clock, sink=All(), grammars=lambda _spec: OddGrammar())
    tokens: dict[str, list[int]] = {}
    logprobs: dict[str, list[Any]] = {}
    ends: dict[str, str] = {}
    waiting = list(requests)
    turn = 0
    while waiting or engine.has_work:
        if waiting and turn % 2 == 0:
            request = waiting.pop(0)
            tokens[request.rid], logprobs[request.rid] = [], []
            engine.add_request(request)
        if (given_up := (aborts or {}).get(turn)) in tokens:
            engine.abort_request(str(given_up))
        turn += 1
        for output in engine.step():
            if output.token_id is not None:
                tokens[output.rid].append(output.token_id)
                logprobs[output.rid].append(output.logprobs)
            if output.finish is not None:
                ends[output.rid] = output.finish.value
        assert checker.audit(engine.snapshot())
        assert may_fail or engine.last_failure is None, engine.last_failure
    engine.close()
    ahead = last = 0
    for event in sink.events:
        if isinstance(event, StepCompleted):
            last = event.step
        ahead += isinstance(event, StepPlanned) and event.step > last + 1
    plans = [event for event in sink.events if isinstance(event, StepPlanned)]
    return Said(tokens, logprobs, ends, ahead, plans)


class Successors:
    """A model whose next token hangs on the token and its position, so that a wrong one is seen in the next."""

    config: LlamaConfig = CONFIG
    dtype = torch.float32
    device = torch.device("cpu")
    quantization = "none"
    kernels = "none"

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        # Eighths: ties, and nuclei from one token to nearly all.
        spread = torch.randint(-24, 25, (CONFIG.vocab_size, CONFIG.vocab_size), generator=generator) / 8
        self._after = spread * torch.rand(CONFIG.vocab_size, 1, generator=generator)
        self._at = torch.randint(-8, 9, (CONFIG.max_context_tokens, CONFIG.vocab_size), generator=generator) / 8

    def reserve_positions(self, count: int) -> None:
        """Has all."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, out_slots: torch.Tensor, *, rows: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        tokens, places = token_ids.index_select(0, rows), positions.index_select(0, rows)
        return self._after.index_select(0, tokens) + self._at.index_select(0, places)


class NoAttention:
    """Nothing is attended to."""

    name = "none"

    def prepare(self, metadata: Any) -> None: ...

    def run(self, *_: Any) -> torch.Tensor:
        raise AssertionError("the model attends to nothing")


def successors(num_pages: int = 64) -> TorchExecutor:
    """The model on the CPU."""
    return TorchExecutor(Successors(), **_settings(num_pages))


def _settings(num_pages: int) -> dict[str, Any]:
    return {
        "name": "successors", "page_size": PAGE_SIZE, "num_pages": num_pages, "attention": NoAttention(),
        "secret": b"fixed for tests",
    }  # fmt: skip


class LateLaunches(OverlappedTorchExecutor):
    """Launches while torch's operators are held back. Who is one makes both, once nothing is computed at once."""

    stream: LateStream
    _operators: LateOperators

    def launch(self, batch: ForwardBatch) -> None:
        with self._operators:
            super().launch(batch)

    def collect(self) -> StepResult:
        if self._launched[0].coming is None:
            self.stream.synchronize()  # as reading a value of the device does
        return super().collect()


class LateExecutor(LateLaunches):
    """The same on a device that computes nothing before it is waited for."""

    def __init__(self, *, num_pages: int = 64, deaf: bool = False, **settings: Any) -> None:
        self.stream = LateStream(late=True, deaf=deaf)
        super().__init__(Successors(), gpu=Gpu(self.stream), **_settings(num_pages), **settings)
        self._operators = LateOperators(self.stream)

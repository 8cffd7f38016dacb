"""Section 13. Owns: the whole engine over a model of random weights, without HTTP: what overlap hides of the host's
time, how long the GPU idles between two steps, and what watching costs.

One executor does all of it, in one order of steps or the other, so that nothing else differs. Half of the rows are
drawn, with top_p and a seed. On: records to a journal, metrics, read model, checker and spans, as a server has them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol

import torch

from bench.gpu_check.random_model import EIGHT_BILLION, SMALL, random_model
from bench.gpu_check.report import Finding
from bench.gpu_check.rig import Rig
from bench.watched_load import everything, receiver
from engine.attention.flashinfer import HeadShape
from engine.clock import MonotonicClock
from engine.config import EngineConfig
from engine.events import EventSink, NullSink
from engine.executor.base import ForwardBatch
from engine.executor.overlapped_torch import OverlappedTorchExecutor
from engine.executor.torch_executor import Gpu
from engine.llm_engine import EngineRequest, LLMEngine
from engine.models.llama_config import LlamaConfig
from engine.sampling_params import SamplingParams

#: Part of the time in which the GPU may wait for the host, with overlap.
IDLE_AIM: Final = 0.03
#: What watching may add to a step.
WATCHING_AIM: Final = 0.01
PAGE: Final = 16


class Marks(Protocol):
    """Places in the stream of the device, and the time between two that it has passed."""

    def mark(self) -> Any: ...

    def seconds(self, first: Any, last: Any) -> float: ...


class _Load(NamedTuple):
    """`rows` requests of `context` tokens, all decoding; `warm` steps that are not timed, then `steps` that are."""

    config: LlamaConfig
    rows: int
    context: int
    warm: int
    steps: int

    @property
    def most_tokens(self) -> int:
        """Of an answer: nobody ends while it is timed, also who began some steps earlier."""
        return 2 * (self.warm + self.steps)

    @property
    def pages(self) -> int:
        return self.rows * (2 + (self.context + self.most_tokens) // PAGE)


FULL: Final = _Load(EIGHT_BILLION, rows=64, context=512, warm=20, steps=150)


class _Run(NamedTuple):
    """step_s: median, on the host's clock. computing_s: mean, on the device's. idle: part of the device's time."""

    step_s: float
    tokens_s: float
    computing_s: float
    idle: float
    broken: int


class _Timed(OverlappedTorchExecutor):
    """Marks where the kernels of each step begin and end."""

    def __init__(self, marks: Marks, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.marks = marks
        self.begun: list[Any] = []
        self.ended: list[Any] = []

    def launch(self, batch: ForwardBatch) -> None:
        super().launch(batch)
        self.ended.append(self.marks.mark())

    def _take_over(self, batch: ForwardBatch, token_ids: torch.Tensor) -> None:
        super()._take_over(batch, token_ids)
        # What was sent for the step lies before this; its first kernel comes next.
        self.begun.append(self.marks.mark())


def whole_engine(rig: Rig, marks: Marks) -> Iterator[Finding]:
    """Each of the four, then what they say together."""
    small = _Load(SMALL, rows=4, context=9, warm=2, steps=6)
    load = small if rig.sizes.shrink > 1 else FULL
    executor = _executor(rig, load, marks)
    runs: dict[tuple[bool, bool], _Run] = {}
    with receiver() as traces:
        for overlap in (False, True):
            for watched in (False, True):
                runs[overlap, watched] = run = _run(rig, executor, load, overlap, traces if watched else None)
                yield _told(load, run, overlap=overlap, watched=watched)
    executor.close()
    serial, ahead = runs[False, False], runs[True, False]
    hidden = (serial.step_s - ahead.step_s) / max(serial.step_s - serial.computing_s, 1e-9)
    yield Finding("what overlap hides", None, hidden, "of the time that is not computing")
    for overlap in (False, True):
        off, on = runs[overlap, False], runs[overlap, True]
        name = f"telemetry on against off, overlap {_word(overlap)}"
        yield Finding(name, None, on.step_s / off.step_s - 1, "of a step", WATCHING_AIM)
    broken = sum(run.broken for run in runs.values())
    yield Finding("every law holds", not broken, broken, "violations", 0)


def _told(load: _Load, run: _Run, *, overlap: bool, watched: bool) -> Finding:
    """One line of figures; idling has an aim where steps overlap."""
    name = f"{load.rows} rows, overlap {_word(overlap)}, telemetry {_word(watched)}: the GPU idles"
    note = f"{run.step_s * 1e3:.2f} ms a step, {run.computing_s * 1e3:.2f} ms computing, {run.tokens_s:,.0f} tokens/s"
    return Finding(name, None, run.idle, "of the time", IDLE_AIM if overlap else None, note)


def _word(is_on: bool) -> str:
    return "on" if is_on else "off"


def _executor(rig: Rig, load: _Load, marks: Marks) -> _Timed:
    facts = load.config
    return _Timed(
        marks,
        random_model(rig, facts),
        name="random",
        page_size=PAGE,
        num_pages=load.pages,
        attention=rig.backend(HeadShape(facts.num_heads, facts.num_kv_heads, facts.head_dim)),
        secret=b"gpu_check",
        gpu=Gpu(rig.runtime, graph_rows=load.rows),
    )


def _run(rig: Rig, executor: _Timed, load: _Load, overlap: bool, traces: str | None) -> _Run:
    """`traces`: where spans go, if everything listens; None: nobody listens."""
    with ExitStack() as stack:
        listeners = None if traces is None else stack.enter_context(everything(traces))
        sink: EventSink = NullSink() if listeners is None else listeners.hears
        engine = _engine(rig, executor, load, overlap, sink)
        run = _timed(rig, executor, engine, load)
        for row in range(load.rows):
            engine.abort_request(_rid(row))
        while engine.has_work:
            engine.step()
        if listeners is None:
            return run
        listeners.settle()
        return run._replace(broken=listeners.checking.checker.total_violations)


def _engine(rig: Rig, executor: _Timed, load: _Load, overlap: bool, sink: EventSink) -> LLMEngine:
    """All rows decode when it comes back, and the warm steps are done."""
    config = EngineConfig.model_validate(
        {
            "scheduler": {"max_running_requests": load.rows},
            "cache": {"page_size": PAGE, "num_pages": load.pages},
            "executor": {
                "device": "cuda", "attention_backend": "flashinfer", "dtype": "bfloat16", "overlap": overlap,
                "cuda_graph_rows": load.rows,
            },
        }
    )  # fmt: skip
    engine = LLMEngine(config, executor=executor, clock=MonotonicClock(), sink=sink)
    drawn = SamplingParams(max_new_tokens=load.most_tokens, ignore_eos=True, temperature=0.8, top_p=0.9, seed=1)
    greedy = SamplingParams(max_new_tokens=load.most_tokens, ignore_eos=True, temperature=0.0)
    for row in range(load.rows):
        prompt = tuple(rig.rng.integers(0, load.config.vocab_size, load.context).tolist())
        engine.add_request(EngineRequest(rid=_rid(row), prompt_ids=prompt, params=drawn if row % 2 else greedy))
    begun: set[str] = set()
    while len(begun) < load.rows:
        begun |= {output.rid for output in engine.step()}
    for _ in range(load.warm):
        engine.step()
    return engine


def _timed(rig: Rig, executor: _Timed, engine: LLMEngine, load: _Load) -> _Run:
    """Steps in which every row decodes."""
    executor.begun.clear()
    executor.ended.clear()
    tokens, times = 0, [time.perf_counter()]
    for _ in range(load.steps):
        tokens += len(engine.step())
        times.append(time.perf_counter())
    assert engine.last_failure is None, engine.last_failure
    rig.runtime.synchronize()
    seconds = executor.marks.seconds
    computing = sum(seconds(begun, ended) for begun, ended in zip(executor.begun, executor.ended, strict=True))
    idle = sum(seconds(ended, begun) for ended, begun in zip(executor.ended, executor.begun[1:], strict=False))
    return _Run(
        step_s=statistics.median(after - before for before, after in pairwise(times)),
        tokens_s=tokens / (times[-1] - times[0]),
        computing_s=computing / load.steps,
        idle=idle / (computing + idle),
        broken=0,
    )


def _rid(row: int) -> str:
    return f"cmpl-{row:032x}"

"""What tests of records share. Owns: hand-built events, numbered without holes, and seeded runs of a real engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engine.clock import VirtualClock
from engine.config import CacheConfig, EngineConfig, ExecutorConfig, Policy, SchedulerConfig
from engine.events import (
    SCHEMA_VERSION,
    AdmissionDecided,
    AnyEvent,
    EngineStarted,
    EventSink,
    FanOut,
    RecordingSink,
    RequestArrived,
    RequestTransitioned,
    ResponseSent,
    StepCompleted,
    StepPlanned,
)
from engine.executor.base import ForwardBatch, StepResult
from engine.executor.simulated import SimulatedExecutor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.request import Cause, RequestState
from engine.sampling_params import SamplingParams
from engine.scheduler.decision import Reason, Result
from engine.scheduler.plan import PassEnd, StepKind, StepTimes
from telemetry.journal import JournalSink


class Numbered:
    """Makes events in order; each takes the next `seq`."""

    def __init__(self) -> None:
        self.seq = 0
        self.events: list[AnyEvent] = []

    def _add(self, struct: type[Any], step: int, /, **fields: Any) -> Any:
        event = struct(seq=self.seq, step=step, t_ns=self.seq * 1000, **fields)
        self.seq += 1
        self.events.append(event)
        return event

    def started(self, config: str = '{"cache":{"page_size":16}}') -> EngineStarted:
        return self._add(
            EngineStarted,
            0,
            schema_version=SCHEMA_VERSION,
            version="0.1.0",
            config=config,
            model="none",
            attention_backend="cpu",
            page_size=16,
            num_pages=64,
            max_running_requests=8,
            wall_ns=1_700_000_000_000_000_000,
            engine_id="engine-1",
        )

    def refused(self, rid: str, step: int, **changes: Any) -> AdmissionDecided:
        fields: dict[str, Any] = {
            "order": 0,
            "is_continuation": False,
            "prefix_len": 16,
            "candidate_extend": 100,
            "selected_extend": 0,
            "extend_end": 16,
            "rem_input_before": 128,
            "rem_input_after": 128,
            "rem_chunk_before": 96,
            "rem_chunk_after": 96,
            "remaining_total_before": 90.5,
            "remaining_total_after": 90.5,
            "remaining_current_before": 200,
            "remaining_current_after": 200,
            "reserved_new_tokens": 0,
            "is_chunked": False,
            "result": Result.NO_TOKEN,
            "reason": Reason.KV_TOTAL_EXHAUSTED,
            "need": 132.0,
            "have": 90.5,
            "stopped_pass": True,
            "times_passed_over": 0,
        }
        return self._add(AdmissionDecided, step, rid=rid, **(fields | changes))

    def admitted(self, rid: str, step: int) -> AdmissionDecided:
        return self.refused(
            rid,
            step,
            selected_extend=100,
            extend_end=116,
            reason=Reason.ADMITTED_WHOLE,
            result=Result.CONTINUE,
            stopped_pass=False,
        )

    def transition(self, rid: str, step: int, target: RequestState, cause: Cause) -> RequestTransitioned:
        return self._add(
            RequestTransitioned,
            step,
            rid=rid,
            source=RequestState.WAITING,
            target=target,
            cause=cause,
            prompt_len=116,
            output_len=0,
            computed_len=0,
            row=None,
        )

    def arrived(self, rid: str) -> RequestArrived:
        return self._add(
            RequestArrived,
            0,
            rid=rid,
            prompt_len=116,
            max_new_tokens=16,
            requested_new_tokens=16,
            page_keys=b"",
            head32_key=None,
            ignore_eos=False,
            priority=None,
            routing_key=None,
            accepted_ns=0,
        )

    def planned(self, step: int, *, ended_at: str | None = None) -> StepPlanned:
        """An idle step. `ended_at`: its pass ended at that request, for want of KV memory."""
        return self._add(
            StepPlanned,
            step,
            kind=StepKind.IDLE,
            active_policy="fcfs",
            prefills=(),
            decodes=(),
            sampling=(),
            retractions=(),
            preempted=(),
            mixed_rows=0,
            budget_open=None,
            budget_close=None,
            pass_end=PassEnd("result", Reason.KV_TOTAL_EXHAUSTED, ended_at) if ended_at is not None else None,
            chunk_limit=None,
            continuation=None,
            batch_is_full=False,
            new_token_ratio=0.7,
            num_waiting=1,
            num_running=0,
            waiting_tokens=116,
            promised_tokens=0.0,
            evicted_pages=0,
            pages=(64, 0, 0, 0),
        )

    def completed(self, step: int) -> StepCompleted:
        return self._add(
            StepCompleted,
            step,
            kind=StepKind.IDLE,
            rows=(),
            times=StepTimes(),
            failed=False,
            pages=(64, 0, 0, 0),
            num_waiting=1,
            num_running=0,
        )

    def sent(self, rid: str, step: int) -> ResponseSent:
        return self._add(
            ResponseSent,
            step,
            rid=rid,
            first_byte_ns=1,
            last_byte_ns=2,
            bytes_sent=3,
            worst_send_ns=1,
            disconnected=False,
        )


@pytest.fixture
def numbered() -> Numbered:
    return Numbered()


@pytest.fixture(scope="session")
def maker() -> type[Numbered]:
    """For properties, which run one test function many times."""
    return Numbered


class SimulatedRun:
    """A real engine over the simulated executor, driven by a seed: shared prefixes, aborts, cuts and retractions.

    Everything that happens is written to a journal at `path`. The first half of the requests has long prompts, the
    second short ones with long outputs, so that decoding runs out of pages.
    """

    def __init__(
        self,
        path: Path,
        seed: int,
        *,
        policy: Policy = Policy.LPM,
        page_size: int = 16,
        listeners: tuple[EventSink, ...] = (),
    ) -> None:
        self.random = random.Random(seed)
        self.config = EngineConfig(
            scheduler=SchedulerConfig(
                max_prefill_tokens=256,
                chunked_prefill_size=96,
                max_running_requests=12,
                schedule_policy=policy,
                schedule_conservativeness=0.05,
            ),
            cache=CacheConfig(page_size=page_size, num_pages=640 // page_size),
            executor=ExecutorConfig(kind="simulated"),
        )
        self.clock = VirtualClock(5_000_000_000)
        self.recorded = RecordingSink()
        self.journal = JournalSink(path, clock=self.clock, checkpoint_steps=64)
        self.executor = FailingOnce(self.config)
        self.engine = LLMEngine(
            self.config,
            executor=self.executor,
            clock=self.clock,
            sink=FanOut((*listeners, self.recorded, self.journal)),
            key_secret=b"a secret of the test",
            version="0.1.0",
            engine_id="simulated-run",
            wall_ns=1_700_000_000_000_000_000,
        )
        self.shared = tuple(self.random.randrange(100, 500) for _ in range(64))
        self.live: list[str] = []

    def add(self, rid: str, prompt: tuple[int, ...], new_tokens: int, *, ignore_eos: bool | None = None) -> None:
        params = SamplingParams(
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens // 2,
            ignore_eos=self.random.random() < 0.1 if ignore_eos is None else ignore_eos,
        )
        accepted = self.clock.now_ns()
        self.clock.advance_ns(50_000)
        self.engine.add_request(EngineRequest(rid=rid, prompt_ids=prompt, params=params, accepted_ns=accepted))
        self.live.append(rid)

    def arrive(self, number: int) -> None:
        """The next random request."""
        is_long = number % 30 < 15
        tail = self.random.randint(60, 200) if is_long else self.random.randint(2, 20)
        head = self.shared if self.random.random() < 0.4 else ()
        prompt = (*head, *(self.random.randrange(100, 500) for _ in range(tail)))
        self.add(f"r{number}", prompt, self.random.randint(4, 30) if is_long else self.random.randint(100, 200))

    def step(self) -> None:
        """One step; whoever ends has its response reported."""
        self.clock.advance_ns(self.random.randint(1_000_000, 9_000_000))
        for output in self.engine.step():
            if output.finish is not None and output.rid in self.live:
                self.live.remove(output.rid)
                now = self.clock.now_ns()
                self.engine.record_response(output.rid, now - 1_000_000, now, 100, 20_000, False)

    def play(self, requests: int, *, fail_at_step: int | None = None, stop_after: int | None = None) -> None:
        """Until all are done, or `stop_after` steps."""
        arrived = 0
        while arrived < requests or self.engine.has_work:
            while arrived < requests and self.random.random() < 0.5:
                self.arrive(arrived)
                arrived += 1
            if self.live and self.random.random() < 0.02:
                self.engine.abort_request(self.random.choice(self.live), "client_disconnected")
            self.executor.fails = self.engine.steps_done == fail_at_step
            self.step()
            if stop_after is not None and self.engine.steps_done >= stop_after:
                break
        self.journal.close()


class FailingOnce(SimulatedExecutor):
    """Raises while `fails` is set."""

    fails = False

    def execute(self, batch: ForwardBatch) -> StepResult:
        if self.fails:
            raise RuntimeError("the device is gone")
        return super().execute(batch)


@pytest.fixture
def simulated() -> type[SimulatedRun]:
    return SimulatedRun


@pytest.fixture(scope="session")
def simulated_run() -> type[SimulatedRun]:
    """For fixtures that keep a run."""
    return SimulatedRun

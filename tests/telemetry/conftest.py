"""Hand-built events for tests of the records. Owns: short makers with defaults, always numbered without holes."""

from __future__ import annotations

from typing import Any

import pytest

from engine.events import (
    AdmissionDecided,
    AnyEvent,
    EngineStarted,
    RequestTransitioned,
    ResponseSent,
    StepCompleted,
    StepPlanned,
)
from engine.request import Cause, RequestState
from engine.scheduler.decision import Reason, Result
from engine.scheduler.plan import StepKind, StepTimes


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
            schema_version=1,
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

    def planned(self, step: int) -> StepPlanned:
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
            pass_end=None,
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

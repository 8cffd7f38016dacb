"""What metrics must add up to. Owns: sums over the records of a journal, written without any of the code that counts.

Numbers are whole: tokens, pages, requests, nanoseconds. Keys are (family, label value); of a histogram, `_sum` and
`_count`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Final

from engine.request import Cause, FinishReason, RequestState
from telemetry.schema_events import (
    AdmissionDecidedRecord,
    EngineStartedRecord,
    RequestArrivedRecord,
    RequestTransitionedRecord,
    ResponseSentRecord,
    StepCompletedRecord,
    StepPlannedRecord,
)
from telemetry.schema_journal import RefusalsFoldedRecord

Sums = Counter[tuple[str, str]]
TTFT: Final = "time_to_first_token_seconds"

#: Which `finish_reason` each cause of an end is told as.
FINISH: Final = {
    Cause.STOP: FinishReason.STOP,
    Cause.LENGTH: FinishReason.LENGTH,
    Cause.KV_POOL_EXHAUSTED: FinishReason.LENGTH,
    Cause.ABORT: FinishReason.ABORT,
    Cause.ERROR: FinishReason.ERROR,
    Cause.NEVER_FITS: FinishReason.REFUSED,
    Cause.QUEUE_TIMEOUT: FinishReason.REFUSED,
    Cause.DISPLACED: FinishReason.REFUSED,
}


class Journal:
    """Sums over a whole run in which no step failed."""

    def __init__(self, records: Iterable[Any]) -> None:
        self.sums: Sums = Counter()
        self.arrived: dict[str, RequestArrivedRecord] = {}
        self.admitted_ns: dict[str, int] = {}
        self.ends: dict[str, RequestTransitionedRecord] = {}
        self.responses: dict[str, ResponseSentRecord] = {}
        self.tokens_ns: defaultdict[str, list[int]] = defaultdict(list)
        self._queued_ns: dict[str, int] = {}
        self._pieces: Counter[str] = Counter()
        self._plan: StepPlannedRecord | None = None
        self._outside = ("idle", 0)
        for record in records:
            match record:
                case EngineStartedRecord():
                    self._outside = ("idle", record.t_ns)
                case RequestArrivedRecord():
                    self.arrived[record.rid] = record
                    self._queued_ns[record.rid] = record.t_ns
                case RequestTransitionedRecord():
                    self._transitioned(record)
                case AdmissionDecidedRecord():
                    self._decided(record)
                case RefusalsFoldedRecord():
                    self._add("admissions_total", record.reason, record.count)
                case StepPlannedRecord():
                    self._planned(record)
                case StepCompletedRecord():
                    self._completed(record)
                case ResponseSentRecord():
                    self.responses[record.rid] = record
                    self._add("client_disconnects_total", "", record.disconnected)
                case _:
                    pass
        for rid in self.arrived:
            self._life(rid)

    def _add(self, name: str, label: str = "", amount: int = 1) -> None:
        if amount:
            self.sums[name, str(label)] += amount

    def _observe(self, name: str, value: int, label: str = "", count: int = 1) -> None:
        self._add(f"{name}_sum", label, value)
        self._add(f"{name}_count", label, count)

    def _transitioned(self, record: RequestTransitionedRecord) -> None:
        rid = record.rid
        if record.target is RequestState.WAITING:
            self._queued_ns[rid] = record.t_ns
        elif rid in self._queued_ns:
            self._add("waiting_request_seconds_total", "", record.t_ns - self._queued_ns.pop(rid))
        if record.cause is Cause.ADMIT and rid not in self.admitted_ns:
            self.admitted_ns[rid] = record.t_ns
            self._observe("queue_time_seconds", record.t_ns - self.arrived[rid].t_ns)
            self._add("prompt_tokens_total", "cached", record.cached_len)
            self._add("prompt_tokens_total", "computed", record.prompt_len - record.cached_len)
        if record.target is RequestState.FINISHED:
            self.ends[rid] = record
            self._add("request_ends_total", record.cause)
            self._add("requests_finished_total", FINISH[record.cause])
            self._observe("request_retractions", record.num_retractions)

    def _decided(self, record: AdmissionDecidedRecord) -> None:
        self._add("admissions_total", record.reason)
        for overdraft in record.overdrafts:
            self._add("overdrafts_total", overdraft)
        if record.is_admitted:
            self._add("selected_tokens_total", "computed", record.selected_extend)
            self._add("clipped_tokens_total", "chunk", record.candidate_extend - record.selected_extend)
            self._observe("chunk_tokens", record.selected_extend)
            if not record.is_continuation:
                self._add("selected_tokens_total", "cached", record.prefix_len)

    def _planned(self, record: StepPlannedRecord) -> None:
        assert not record.claim_failed
        self._plan = record
        if record.pass_end is not None:
            self._add("pass_ends_total", record.pass_end.stopped_by)
            self._add("not_considered_total", "", record.pass_end.not_considered)
        for retraction in record.retractions:
            if not retraction.aborted:
                self._add("retractions_total", retraction.cause)
                self._add("retracted_tokens_total", "output", retraction.output_len)
                self._add("retracted_tokens_total", "prompt", max(retraction.lost_tokens - retraction.output_len, 0))
        self._add("retractions_total", "priority", len(record.preempted))
        for guard in record.guards:
            self._add("guard_activations_total", guard)
        self._add("kv_pages_evicted_total", "", record.evicted_pages)
        self._pieces.update(row.rid for row in record.prefills)

    def _completed(self, record: StepCompletedRecord) -> None:
        assert not record.failed
        times, plan = record.times, self._plan
        assert plan is not None
        assert plan.step == record.step
        self._add("steps_total", record.kind)
        self._observe("step_seconds", times.applied_ns - times.started_ns, record.kind)
        self._observe("plan_seconds", times.planned_ns - times.plan_from_ns)
        self._observe("step_tokens", sum(row.extend_len for row in plan.prefills) + len(plan.decodes), record.kind)
        self._observe("step_requests", len(plan.prefills) + len(plan.decodes), record.kind)
        outside, since = self._outside
        self._outside = ("publish" if record.num_waiting or record.num_running else "idle", times.applied_ns)
        for phase, start, end in (
            (outside, since, times.started_ns),
            ("drain", times.started_ns, times.plan_from_ns),
            ("plan", times.plan_from_ns, times.planned_ns),
            ("commit", times.planned_ns, times.committed_ns),
            ("prepare", times.committed_ns, times.launched_ns),
            ("forward_wait", times.launched_ns, times.ready_ns),
            ("apply", times.ready_ns, times.applied_ns),
        ):
            self._add("step_phase_seconds_total", phase, end - start)
        self._add("generation_tokens_total", "", len(record.rows))
        for row in record.rows:
            if not self.tokens_ns[row.rid]:
                self._observe("request_chunks", self._pieces[row.rid])
            self.tokens_ns[row.rid].append(times.applied_ns)

    def _life(self, rid: str) -> None:
        """What is known once a request has ended."""
        end, tokens = self.ends[rid], self.tokens_ns[rid]
        accepted = self.arrived[rid].accepted_ns
        finished = max(end.t_ns, *tokens) if tokens else end.t_ns
        self._observe("request_duration_seconds", finished - accepted, FINISH[end.cause])
        if len(tokens) > 1:
            self._observe("inter_token_latency_seconds", tokens[-1] - tokens[0], count=len(tokens) - 1)
            self._observe("time_per_output_token_seconds", (tokens[-1] - tokens[0]) // (len(tokens) - 1))
        ttft = self.ttft_ns(rid)
        if ttft is not None:
            self._observe(TTFT, ttft)

    def ttft_ns(self, rid: str) -> int | None:
        """From acceptance to the first byte of a stream, or to the first token where the answer came at the end."""
        response, tokens = self.responses.get(rid), self.tokens_ns[rid]
        if response is None or response.first_byte_ns is None or not tokens:
            return None
        finished = max(self.ends[rid].t_ns, tokens[-1])
        streamed = response.first_byte_ns < finished or len(tokens) <= 1
        return (max(response.first_byte_ns, tokens[0]) if streamed else tokens[0]) - self.arrived[rid].accepted_ns

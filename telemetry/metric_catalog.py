"""The metric catalogue. Owns: every name, type, unit, label value and bucket bound of `/metrics`, as data.

Rules. At most one label, with values from a closed set; every combination exists from the start; no id, path, or text
of a user or an exception is ever a label. Times are counted in integer nanoseconds and shown in seconds. Each `help` is
the question that the metric answers; panels, alerts and the table of the docs are generated from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, Literal, NamedTuple

from engine.errors import RefusalCause
from engine.request import END_CAUSES, FinishReason
from engine.scheduler.decision import Guard, Overdraft, Reason
from engine.scheduler.plan import StepKind
from engine.server.observer import CutCause
from invariants.audit import AuditPart
from invariants.catalog import CATALOG as LAWS
from invariants.catalog import Group
from invariants.modes import MODES
from telemetry.metric_bounds import (
    CNT,
    GENAI_DURATION,
    GENAI_TOKEN,
    GENAI_TTFT,
    RETR,
    SEC_PLAN,
    SEC_REQ,
    SEC_STEP,
    SGLANG_E2E,
    SGLANG_QUEUE,
    SGLANG_TOKEN,
    SGLANG_TTFT,
    TOK_LAT,
    TOKS,
)
from telemetry.observe import BLOCKERS, TTFT_PARTS
from telemetry.stalls import STALL_CAUSES

PREFIX: Final = "admitscope_"
#: Raised when a name stops meaning what it meant; `tests/golden/metrics-v<N>.txt` holds what version N promises.
METRICS_VERSION: Final = 1
NS: Final = 1_000_000_000


class LiveState(StrEnum):
    """Where live requests are. `retracted`: waiting again; `emitting`: finished, response not yet flushed."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    RETRACTED = "retracted"
    EMITTING = "emitting"


LEDGERS: Final = ("compute", "chunk", "kv_now", "kv_total", "rows")
PHASES: Final = ("drain", "plan", "commit", "prepare", "forward_wait", "apply", "check", "publish", "idle")
KV_STATES: Final = ("free", "private", "protected", "evictable")
SINKS: Final = ("journal", "spans", "metrics", "read_model", "checker", "parquet")
COMPONENTS: Final = SINKS
CHECK_GROUPS: Final = tuple(group.value for group in Group)
#: What listeners do: hand over, and judge where a law is to raise, on the engine thread; all else on threads beside
#: it, where metrics are counted too now, so that `metric` is a value that only dashboards of before ask for. The
#: collector of Python's reference cycles stops all threads.
PARTS: Final = ("check", "collector", "lent", "metric", "publish", "worker")
#: Where in its prompt an admitted piece lies.
POSITION_OF: Final = {
    Reason.ADMITTED_WHOLE: "whole",
    Reason.ADMITTED_FIRST_CHUNK: "first",
    Reason.ADMITTED_NEXT_CHUNK: "middle",
    Reason.ADMITTED_LAST_CHUNK: "last",
}
TIERS: Final = ("0", "1", "2")
AUDIT_PARTS: Final = tuple(AuditPart)
#: Written; left out by the rate, or for the size of all bundles of the run; failed, such as for a full disk.
EVIDENCE_OUTCOMES: Final = ("written", "limited", "full", "failed")
#: What a request asks for, as OpenTelemetry names it; ids of chat completions have a prefix of their own.
OPERATIONS: Final = ("chat", "text_completion")
#: In place of the operation where only successful requests are wanted apart.
FAILED: Final = "failed"
PASS_ENDS: Final = tuple(reason.value for reason in Reason)
EXAMINED: Final = tuple(reason.value for reason in Reason if reason is not Reason.QUEUE_END)


def operation_of(rid: str) -> int:
    """Index into OPERATIONS."""
    return 0 if rid.startswith("chatcmpl-") else 1


class Metric(NamedTuple):
    """One family, as it is kept and as `/metrics` shows it.

    scale    divides the stored integer on exposition
    bounds   shown, in exposed units
    fine     bounds that are kept: a superset of `bounds` and of those of other views; empty when there are none
    parts    what is kept apart within one label value, for other views; shown summed
    seldom   changes with requests, not with steps
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: str | None = None
    values: tuple[str, ...] = ("",)
    bounds: tuple[float, ...] = ()
    scale: int = 1
    fine: tuple[float, ...] = ()
    parts: tuple[str, ...] = ("",)
    seldom: bool = False

    @property
    def kept(self) -> tuple[float, ...]:
        """Bounds of the cells."""
        return self.fine or self.bounds

    @property
    def child(self) -> int:
        """Cells per part: one, or one per bucket, overflow and sum."""
        return len(self.kept) + 2 if self.kind == "histogram" else 1

    @property
    def width(self) -> int:
        """Cells per label value."""
        return self.child * len(self.parts)

    def observations(self, cells: Sequence[int], cell: int) -> int:
        """How much the histogram that begins at `cell` has observed."""
        starts = range(cell, cell + self.width, self.child)
        return sum(sum(cells[start : start + self.child - 1]) for start in starts)


_SELDOM: Final = frozenset(
    {
        *("queue_time_seconds", "queue_blocked_seconds", "request_chunks", "chunk_tokens", "chunk_forward_seconds"),
        *("time_to_first_token_seconds", "ttft_component_seconds", "time_per_output_token_seconds"),
        *("request_duration_seconds", "request_retractions"),
    }
)


def _counter(name: str, text: str, label: str | None = None, values: tuple[str, ...] = ("",), scale: int = 1) -> Metric:
    return Metric(name, "counter", text, label, tuple(map(str, values)), (), scale)


def _gauge(name: str, text: str, label: str | None = None, values: tuple[str, ...] = ("",), scale: int = 1) -> Metric:
    return Metric(name, "gauge", text, label, tuple(map(str, values)), (), scale)


def _histogram(
    name: str,
    text: str,
    bounds: tuple[float, ...],
    label: str | None = None,
    values: tuple[str, ...] = ("",),
    *,
    scale: int = NS,
    also: tuple[float, ...] = (),
    parts: tuple[str, ...] = ("",),
) -> Metric:
    fine = tuple(sorted({*bounds, *also})) if also else ()
    return Metric(name, "histogram", text, label, tuple(map(str, values)), bounds, scale, fine, parts, name in _SELDOM)


_QUEUE: Final = (
    _counter("requests_received_total", "What is the offered load?"),
    _counter(
        "requests_finished_total",
        "How do requests end (aborts, refusals and errors included)?",
        "finish_reason",
        tuple(FinishReason),
    ),
    _counter("request_ends_total", "The same ends, by what caused each.", "cause", tuple(sorted(END_CAUSES))),
    _counter("requests_rejected_total", "What is turned away at the door, and why?", "cause", tuple(RefusalCause)),
    _gauge("requests", "Where is every live request now?", "state", tuple(LiveState)),
    _gauge(
        "waiting_by_blocker",
        "Why is each waiting request waiting? Sum = requests in states waiting and retracted.",
        "blocker",
        BLOCKERS,
    ),
    _counter(
        "waiting_request_seconds_total",
        "Who costs waiting time, also while nobody is admitted? Integral of waiting_by_blocker.",
        "blocker",
        BLOCKERS,
        NS,
    ),
    _gauge("waiting_tokens", "How much prefill work is queued, in tokens?"),
    _gauge("waiting_oldest_seconds", "Is someone starving?", scale=NS),
    _gauge(
        "times_passed_over_max",
        "How many passes went by the unluckiest request that the last pass looked at and refused?",
    ),
    _histogram("queue_time_seconds", "How long until first admission?", SEC_REQ, also=SGLANG_QUEUE),
    _histogram(
        "queue_blocked_seconds",
        "For an admitted request: how long did each blocker hold it? One observation per blocker that did.",
        SEC_REQ,
        "blocker",
        BLOCKERS,
    ),
)

_ADMISSION: Final = (
    _counter("admissions_total", "What did each examination decide?", "reason", EXAMINED),
    _counter("pass_ends_total", "What ends admission passes: an empty queue, or which limit?", "reason", PASS_ENDS),
    _counter(
        "not_considered_total", "How many waiting requests were not looked at because the pass ended before them?"
    ),
    _counter(
        "selected_tokens_total",
        "Of admitted prompt tokens, how many are computed and how many come from cache?",
        "kind",
        ("computed", "cached"),
    ),
    _counter(
        "clipped_tokens_total",
        "Which ledger cuts chunks short (candidate minus selected, tokens)?",
        "ledger",
        LEDGERS,
    ),
    _gauge("ledger_remaining_tokens", "How much room was left when the last pass ended?", "ledger", LEDGERS),
    _gauge("ledger_limit_tokens", "Denominator of ledger_remaining_tokens.", "ledger", LEDGERS),
    _counter("overdrafts_total", "How often did an explicit exception to a ledger fire?", "kind", tuple(Overdraft)),
    _histogram("request_chunks", "Into how many chunks are prompts cut?", CNT, scale=1),
    _histogram("chunk_tokens", "How large are the chunks really?", TOKS, scale=1),
    _histogram(
        "chunk_forward_seconds",
        "How long does a chunk occupy the executor? The whole step counts, decode rows in it included.",
        SEC_REQ,
        "position",
        tuple(POSITION_OF.values()),
    ),
)

_LATENCY: Final = (
    _histogram(
        "time_to_first_token_seconds",
        "TTFT as the server sees it: from acceptance to the first byte of a stream, or to the first token otherwise.",
        SEC_REQ,
        also=GENAI_TTFT + SGLANG_TTFT,
        parts=OPERATIONS,
    ),
    _histogram(
        "ttft_component_seconds",
        "Which part of TTFT is it? One observation per request and component; components partition TTFT.",
        SEC_REQ,
        "component",
        TTFT_PARTS,
    ),
    _counter("ttft_residual_seconds_total", "Does the partition add up? Must stay near 0.", scale=NS),
    _histogram(
        "inter_token_latency_seconds",
        "TBT: gap between consecutive tokens of one request, one observation per token after the first.",
        TOK_LAT,
        also=SGLANG_TOKEN,
    ),
    _counter("token_stalls_total", "Why was a token late?", "cause", STALL_CAUSES),
    _histogram(
        "time_per_output_token_seconds",
        "Mean gap per finished request.",
        TOK_LAT,
        also=GENAI_TOKEN + SGLANG_TOKEN,
        parts=(*OPERATIONS, FAILED),
    ),
    _histogram(
        "request_duration_seconds",
        "From acceptance to the end of the request.",
        SEC_REQ,
        "finish_reason",
        tuple(FinishReason),
        also=GENAI_DURATION + SGLANG_E2E,
        parts=OPERATIONS,
    ),
    _counter(
        "prompt_tokens_total",
        "Prompt tokens once per request, at its first admission, by where their K/V came from.",
        "source",
        ("computed", "cached"),
    ),
    _counter("generation_tokens_total", "Output throughput."),
)

_STEP: Final = (
    _counter("steps_total", "How many steps of each kind?", "kind", tuple(StepKind)),
    _histogram(
        "step_seconds",
        "How long is a step, from its plan on? Where steps overlap, two count at a time.",
        SEC_STEP,
        "kind",
        tuple(StepKind),
    ),
    _histogram("plan_seconds", "How long does it take to decide a step?", SEC_PLAN),
    _counter("step_phase_seconds_total", "Where does loop time go? Phases partition the loop.", "phase", PHASES, NS),
    _histogram("step_tokens", "How full are batches in tokens?", TOKS, "kind", tuple(StepKind), scale=1),
    _histogram("step_requests", "How full are batches in requests?", CNT, "kind", tuple(StepKind), scale=1),
    _counter("idle_seconds_total", "How long had the engine nothing to do?", scale=NS),
)

_MEMORY: Final = (
    _gauge("kv_pages", "Who owns the pool? Sum = kv_pages_capacity.", "state", KV_STATES),
    _gauge("kv_pages_capacity", "Pool size in pages."),
    _gauge("kv_pages_unaccounted", "Leak: how many pages did the last audit find nowhere?"),
    _counter("kv_pages_evicted_total", "How much cache is lost to pressure?"),
    _counter(
        "kv_claim_failures_total",
        "Did an allocation fail after admission promised room? Should be 0.",
        "caller",
        ("prefill", "decode"),
    ),
    _gauge("promised_pages", "How much is reserved for the future of running requests?", scale=1000),
    _gauge("new_token_ratio", "How pessimistic is the reservation now?", scale=NS),
    _counter(
        "retractions_total", "How often is a running request pushed back?", "cause", ("kv_now", "priority", "manual")
    ),
    _counter("retracted_tokens_total", "How much work is thrown away by it?", "kind", ("prompt", "output")),
    _histogram("request_retractions", "Is it the same request again and again?", RETR, scale=1),
    _counter(
        "guard_activations_total", "Where did we depart from the reference, and how often?", "guard", tuple(Guard)
    ),
)

_OBSERVER: Final = (
    _counter("telemetry_errors_total", "Which listener failed?", "component", COMPONENTS),
    _counter("telemetry_events_total", "How much does each sink receive?", "sink", SINKS),
    _counter("telemetry_dropped_total", "What evidence is missing?", "sink", SINKS),
    _gauge("telemetry_queue_depth", "Is a sink falling behind?", "sink", SINKS),
    _counter("spans_exported_total", "Do traces arrive?", "outcome", ("ok", "failed", "dropped")),
    _counter(
        "telemetry_seconds_total",
        "What does observability cost? Check and publish on the engine thread, estimated from one step in 16; worker: "
        "processor time of the threads beside it; lent: wall time in which the model left them a processor; collector: "
        "wall time in which Python looked for reference cycles.",
        "part",
        PARTS,
        NS,
    ),
    _counter("invariant_checks_total", "Is the checker running at all?", "group", CHECK_GROUPS),
    _counter("violations_total", "Which law broke?", "id", tuple(law.id for law in LAWS)),
    _counter("invariant_check_seconds_total", "What does checking cost?", "tier", TIERS, NS),
    _gauge("invariant_laws", "How many laws are judged, and what does a broken one do?", "mode", MODES),
    _gauge("invariant_audit_period_seconds", "How often is the whole state recounted? 0: never.", scale=NS),
    _counter("invariant_audits_total", "Which parts of the state were recounted, how often?", "part", AUDIT_PARTS),
    _counter("evidence_bundles_total", "What became of the evidence of violations?", "outcome", EVIDENCE_OUTCOMES),
    _counter("client_disconnects_total", "Are clients giving up?"),
    _counter("connections_cut_total", "Which connections does the server end or refuse?", "cause", tuple(CutCause)),
    _histogram("stream_send_seconds", "Is the client or the server slow to take tokens?", SEC_STEP),
    _gauge("heartbeat_timestamp_seconds", "When did the loop last turn?", scale=NS),
)

#: Families filled by threads of the front end instead of the engine thread.
FRONT_END: Final = frozenset(
    {
        "requests_received_total",
        "requests_rejected_total",
        "client_disconnects_total",
        "connections_cut_total",
        "stream_send_seconds",
    }
)

#: By what they are about.
GROUPS: Final[dict[str, tuple[Metric, ...]]] = {
    "Requests and the queue": _QUEUE,
    "Admission": _ADMISSION,
    "Latency and tokens": _LATENCY,
    "Steps": _STEP,
    "K/V memory": _MEMORY,
    "The observer itself": _OBSERVER,
}
#: All families of numbers. `build_info`, which has four labels with one value each, is made apart.
CATALOG: Final[tuple[Metric, ...]] = tuple(metric for group in GROUPS.values() for metric in group)

BUILD_INFO: Final = Metric("build_info", "gauge", "What is running?")
BUILD_LABELS: Final = ("version", "model", "attention_backend", "page_size")

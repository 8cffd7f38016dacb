"""The metric catalogue. Owns: every name, type, unit, label value and bucket bound of `/metrics`, as data.

Rules. At most one label, with values from a closed set; every combination exists from the start; no id, path, or text
of a user or an exception is ever a label. Times are counted in integer nanoseconds and shown in seconds. Each `help` is
the question that the metric answers; panels, alerts and the table of the docs are generated from here.
"""

from __future__ import annotations

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
from telemetry.observe import BLOCKERS, TTFT_PARTS
from telemetry.stalls import STALL_CAUSES

PREFIX: Final = "admitscope_"
NS: Final = 1_000_000_000

SEC_REQ: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 200.0, 320.0, 640.0, 900.0),
)
SEC_STEP: Final = (
    *(5e-05, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01),
    *(0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)
#: Deciding a step takes microseconds.
SEC_PLAN: Final = (1e-05, 2.5e-05, 5e-05, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.01, 0.1)
TOK_LAT: Final = (
    *(0.002, 0.003, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0),
)
TOKS: Final = (
    *(1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0),
    *(1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 114688.0, 131072.0),
)
CNT: Final = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 128.0, 256.0)
RETR: Final = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0)


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
SINKS: Final = ("journal", "spans", "read_model", "parquet")
COMPONENTS: Final = ("journal", "spans", "metrics", "read_model", "checker", "parquet")
CHECK_GROUPS: Final = tuple(group.value for group in Group)
#: What listeners do on the engine thread: judge, count, and hand over to threads of their own.
PARTS: Final = ("check", "metric", "publish")
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
PASS_ENDS: Final = tuple(reason.value for reason in Reason)
EXAMINED: Final = tuple(reason.value for reason in Reason if reason is not Reason.QUEUE_END)


class Metric(NamedTuple):
    """One family. `scale` divides the stored integer on exposition; `bounds` are in exposed units."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: str | None = None
    values: tuple[str, ...] = ("",)
    bounds: tuple[float, ...] = ()
    scale: int = 1

    @property
    def width(self) -> int:
        """Cells per label value: one, or one per bucket, overflow and sum."""
        return len(self.bounds) + 2 if self.kind == "histogram" else 1


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
    scale: int = NS,
) -> Metric:
    return Metric(name, "histogram", text, label, tuple(map(str, values)), bounds, scale)


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
        "How often was the unluckiest request that the last pass refused overtaken by later ones?",
    ),
    _histogram("queue_time_seconds", "How long until first admission?", SEC_REQ),
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
    ),
    _counter("token_stalls_total", "Why was a token late?", "cause", STALL_CAUSES),
    _histogram("time_per_output_token_seconds", "Mean gap per finished request.", TOK_LAT),
    _histogram(
        "request_duration_seconds",
        "From acceptance to the end of the request.",
        SEC_REQ,
        "finish_reason",
        tuple(FinishReason),
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
    _histogram("step_seconds", "How long is a step?", SEC_STEP, "kind", tuple(StepKind)),
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
        "What does observability cost on the engine thread? Estimated from one step in 16.",
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

#: All families of numbers. `build_info`, which has four labels with one value each, is made apart.
CATALOG: Final[tuple[Metric, ...]] = (*_QUEUE, *_ADMISSION, *_LATENCY, *_STEP, *_MEMORY, *_OBSERVER)

BUILD_INFO: Final = Metric("build_info", "gauge", "What is running?")
BUILD_LABELS: Final = ("version", "model", "attention_backend", "page_size")


def count_samples() -> int:
    """Samples that one scrape shows; constant for the life of a process. Histograms show bounds, +Inf, sum, count."""
    each = (len(m.values) * (len(m.bounds) + 3 if m.kind == "histogram" else 1) for m in CATALOG)
    return sum(each) + 1

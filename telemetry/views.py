"""Views. Owns: which families each exposition shows, and of which kept numbers each sample is the sum.

Three views of one set of books: the native names, the three server histograms of OpenTelemetry's conventions for
generative AI (both on `/metrics`), and names, labels and bounds of an SGLang server (`/metrics/sglang`, for boards and
routers that read one). None counts anything itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple

from telemetry.metric_bounds import (
    GENAI_DURATION,
    GENAI_TOKEN,
    GENAI_TTFT,
    SGLANG_E2E,
    SGLANG_QUEUE,
    SGLANG_TOKEN,
    SGLANG_TTFT,
)
from telemetry.metric_catalog import (
    BUILD_INFO,
    BUILD_LABELS,
    CATALOG,
    NS,
    OPERATIONS,
    PREFIX,
    Metric,
)

BY_NAME: Final[Mapping[str, Metric]] = {metric.name: metric for metric in CATALOG}
#: Native histograms whose buckets carry exemplars.
WITH_EXEMPLARS: Final = frozenset({"time_to_first_token_seconds", "queue_time_seconds", "inter_token_latency_seconds"})
PROVIDER: Final = "admitscope"
ENGINE_TYPE: Final = "unified"


class Source(NamedTuple):
    """One label value of one family of the catalogue; of one part, or of all."""

    family: str
    value: str = ""
    part: str | None = None


class Readout(NamedTuple):
    """What a derived gauge is made from. `of` sums sources, in stored units.

    page_size   tokens
    throughput  tokens a second since a scrape at least a second ago
    hit_rate    cached share of the prompt tokens admitted in that time; of the last time in which there were some
    """

    of: Callable[[Source], int]
    page_size: int
    throughput: float
    hit_rate: float


class Series(NamedTuple):
    """One child: its labels, and the sources whose sum it is, or how it is made from others."""

    labels: tuple[tuple[str, str], ...]
    sources: tuple[Source, ...]
    made: Callable[[Readout], float] | None = None


class View(NamedTuple):
    """One family as it is shown."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    series: tuple[Series, ...]
    bounds: tuple[float, ...] = ()
    scale: int = 1
    exemplars: bool = False


def native() -> tuple[View, ...]:
    """The catalogue, one view per family."""
    return tuple(
        View(
            PREFIX + metric.name,
            metric.kind,
            metric.help,
            tuple(
                Series(((metric.label, value),) if metric.label else (), (Source(metric.name, value),))
                for value in metric.values
            ),
            metric.bounds,
            metric.scale,
            exemplars=metric.name in WITH_EXEMPLARS,
        )
        for metric in CATALOG
    )


def build_info(build: Mapping[str, str]) -> View:
    """The one family with several labels; its value is always 1."""
    labels = tuple((label, build.get(label, "")) for label in BUILD_LABELS)
    return View(PREFIX + BUILD_INFO.name, "gauge", BUILD_INFO.help, (Series(labels, (), lambda _: 1.0),))


_ENDS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("", ("stop", "length")),
    *((reason, (reason,)) for reason in ("abort", "error", "refused")),
)


def gen_ai(model: str) -> tuple[View, ...]:
    """Server histograms of OpenTelemetry, with dots and unit as Prometheus writes them."""

    def labels(operation: str, error: str = "") -> tuple[tuple[str, str], ...]:
        own = (
            ("gen_ai_operation_name", operation),
            ("gen_ai_provider_name", PROVIDER),
            ("gen_ai_request_model", model),
            ("gen_ai_response_model", model),
        )
        return (*own, ("error_type", error)) if error else own

    def by_operation(family: str) -> tuple[Series, ...]:
        return tuple(Series(labels(name), (Source(family, "", name),)) for name in OPERATIONS)

    durations = tuple(
        Series(labels(name, error), tuple(Source("request_duration_seconds", reason, name) for reason in reasons))
        for name in OPERATIONS
        for error, reasons in _ENDS
    )
    return (
        View(
            "gen_ai_server_request_duration_seconds",
            "histogram",
            "From acceptance to the end of the request; error_type where it failed.",
            durations,
            GENAI_DURATION,
            NS,
        ),
        View(
            "gen_ai_server_time_to_first_token_seconds",
            "histogram",
            "TTFT of every request that got a first token, whatever became of it later.",
            by_operation("time_to_first_token_seconds"),
            GENAI_TTFT,
            NS,
        ),
        View(
            "gen_ai_server_time_per_output_token_seconds",
            "histogram",
            "Mean gap between tokens of each request that ended well.",
            by_operation("time_per_output_token_seconds"),
            GENAI_TOKEN,
            NS,
        ),
    )


_RUNNING: Final = (Source("requests", "prefill"), Source("requests", "decode"))
_QUEUED: Final = (Source("requests", "waiting"), Source("requests", "retracted"))
_USED: Final = (Source("kv_pages", "private"), Source("kv_pages", "protected"))
_CAPACITY: Final = Source("kv_pages_capacity")
_ENDED: Final = tuple(Source("requests_finished_total", value) for value in BY_NAME["requests_finished_total"].values)


def _total(read: Readout, sources: tuple[Source, ...]) -> int:
    return sum(map(read.of, sources))


def _tokens(*sources: Source) -> Callable[[Readout], float]:
    return lambda read: _total(read, sources) * read.page_size


def _usage(read: Readout) -> float:
    capacity = read.of(_CAPACITY)
    return _total(read, _USED) / capacity if capacity else 0.0


def sglang(model: str) -> tuple[View, ...]:
    """What SGLang's own board and common routers read. `is_streaming`, which splits some of its families, is left out:
    this engine does not keep streams apart, and sums over it are the same."""
    front = (("model_name", model), ("engine_type", ENGINE_TYPE))
    scheduler = (*front, ("tp_rank", "0"), ("pp_rank", "0"), ("moe_ep_rank", "0"))

    def gauge(name: str, text: str, made: Callable[[Readout], float]) -> View:
        return View(f"sglang:{name}", "gauge", text, (Series(scheduler, (), made),))

    def now(name: str, text: str, sources: tuple[Source, ...]) -> View:
        return View(f"sglang:{name}", "gauge", text, (Series(scheduler, sources),))

    def count(name: str, text: str, sources: tuple[Source, ...], labels: tuple[tuple[str, str], ...] = front) -> View:
        return View(f"sglang:{name}", "counter", text, (Series(labels, sources),))

    def histogram(
        name: str,
        text: str,
        sources: tuple[Source, ...],
        bounds: tuple[float, ...],
        labels: tuple[tuple[str, str], ...] = front,
    ) -> View:
        return View(f"sglang:{name}", "histogram", text, (Series(labels, sources),), bounds, NS)

    durations = tuple(Source("request_duration_seconds", value) for value in BY_NAME["request_duration_seconds"].values)
    prompts = tuple(Source("prompt_tokens_total", value) for value in ("computed", "cached"))
    retracted = tuple(Source("retractions_total", value) for value in ("kv_now", "manual"))
    return (
        now("num_running_reqs", "Requests in prefill or decode.", _RUNNING),
        now("num_queue_reqs", "Requests that wait, retracted ones too.", _QUEUED),
        gauge("gen_throughput", "Output tokens a second, between scrapes.", lambda read: read.throughput),
        gauge("cache_hit_rate", "Cached share of prompt tokens admitted, between scrapes.", lambda read: read.hit_rate),
        gauge("token_usage", "Share of the pool that running requests hold.", _usage),
        gauge("full_token_usage", "The same: there is one pool.", _usage),
        gauge("kv_available_tokens", "Free room in the pool, in tokens.", _tokens(Source("kv_pages", "free"))),
        gauge("kv_evictable_tokens", "Cache that nobody holds, in tokens.", _tokens(Source("kv_pages", "evictable"))),
        gauge("kv_used_tokens", "What running requests hold, in tokens.", _tokens(*_USED)),
        gauge("num_used_tokens", "The same: there is one pool.", _tokens(*_USED)),
        gauge("max_total_num_tokens", "Size of the pool, in tokens.", _tokens(_CAPACITY)),
        gauge(
            "new_token_ratio",
            "Share of promised tokens that is reserved.",
            lambda read: read.of(Source("new_token_ratio")) / NS,
        ),
        count("num_retracted_requests_total", "Requests pushed back for want of pages.", retracted, scheduler),
        histogram(
            "queue_time_seconds", "Until first admission.", (Source("queue_time_seconds"),), SGLANG_QUEUE, scheduler
        ),
        count("prompt_tokens_total", "Prompt tokens of admitted requests.", prompts),
        count("generation_tokens_total", "Output tokens.", (Source("generation_tokens_total"),)),
        count(
            "cached_tokens_total",
            "Prompt tokens found in the cache.",
            (Source("prompt_tokens_total", "cached"),),
            (*front, ("cache_source", "device")),
        ),
        count("num_requests_total", "Requests that ended.", _ENDED),
        count("num_aborted_requests_total", "Requests aborted.", (Source("requests_finished_total", "abort"),)),
        histogram("time_to_first_token_seconds", "TTFT.", (Source("time_to_first_token_seconds"),), SGLANG_TTFT),
        histogram("inter_token_latency_seconds", "TBT.", (Source("inter_token_latency_seconds"),), SGLANG_TOKEN),
        histogram(
            "request_time_per_output_token_seconds",
            "Mean gap per finished request.",
            (Source("time_per_output_token_seconds"),),
            SGLANG_TOKEN,
        ),
        histogram("e2e_request_latency_seconds", "From acceptance to the end.", durations, SGLANG_E2E),
    )


def count_samples(views: tuple[View, ...] | None = None) -> int:
    """Samples that one scrape of `views` shows; None: of `/metrics`. Constant for the life of a process."""
    if views is None:
        views = (build_info({}), *native(), *gen_ai(""))
    # A histogram shows its bounds, +Inf, sum and count.
    return sum(len(view.series) * (len(view.bounds) + 3 if view.kind == "histogram" else 1) for view in views)

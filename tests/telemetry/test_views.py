"""Every view shows the same books: coarser bounds are exact sums, and SGLang's and OpenTelemetry's numbers are ours."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from engine.clock import VirtualClock
from telemetry.exposition import OPENMETRICS, Exposition
from telemetry.metric_books import Books
from telemetry.metric_catalog import CATALOG, NS, OPERATIONS, PREFIX, Metric
from telemetry.metrics import MetricsSink
from telemetry.read_api import create_router
from telemetry.read_model import ReadModel
from telemetry.rendering import compile_views, render
from telemetry.views import BY_NAME, Readout, Series, Source, View, count_samples, gen_ai, native, sglang
from tests.builders import engine_config
from tests.telemetry.live_run import MS, TimedRun, busy, play

HISTOGRAMS = [view for view in (*native(), *gen_ai("m"), *sglang("m")) if view.kind == "histogram"]
#: What SGLang's own Grafana board reads.
BOARD = {
    *("e2e_request_latency_seconds", "time_to_first_token_seconds", "num_running_reqs", "gen_throughput"),
    *("cache_hit_rate", "num_queue_reqs"),
}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Rig:
    """A busy run, and both views of it."""

    def __init__(self, seed: int = 3) -> None:
        config, operations = busy(seed)
        self.clock = VirtualClock()
        self.sink = MetricsSink(clock=self.clock)
        self.run = TimedRun(config, self.sink)
        self.exposition = Exposition(self.sink)
        self.exposition.text(as_sglang=True)
        play(self.run, operations)
        for at, rid in enumerate(("chatcmpl-1", "cmpl-2", "chatcmpl-3")):
            self.run.add(rid, 10 + at, 4, ignore_eos=True)
            self.run.finish_all((0, 0, 0, 0, 0, (at + 1) * 7 * MS, 0))
        self.run.add("cmpl-4", 9, 40, ignore_eos=True)
        for _ in range(4):
            self.run.timed_step((0, 0, 0, 0, 0, 30 * MS, 0))
        self.clock.advance_ns(self.run.now_ns + 5 * NS)

    def both(self) -> tuple[Samples, Samples]:
        return parsed(self.exposition.text()), parsed(self.exposition.text(as_sglang=True))


def total(samples: Samples, name: str, **labels: str) -> float:
    wanted = set(labels.items())
    found = [value for (metric, has), value in samples.items() if metric == name and wanted <= set(has)]
    assert found, (name, labels)
    return sum(found)


# -- record fine, expose coarse ------------------------------------------------------------------------------------


@given(
    fine=st.sets(st.integers(1, 400), min_size=1, max_size=40),
    picks=st.integers(min_value=0),
    values=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 2)), max_size=80),
)
def test_summing_neighbouring_cells_equals_observing_with_the_coarse_bounds(
    fine: set[int], picks: int, values: list[tuple[int, int]]
) -> None:
    bounds = sorted(fine)
    coarse = [float(bound) for at, bound in enumerate(bounds) if picks >> at & 1]
    parts = ("a", "b", "c")
    metric = Metric("made", "histogram", "?", None, ("",), tuple(coarse), 1, tuple(map(float, bounds)), parts)
    books = Books((metric,))
    for value, part in values:
        books.observe(part * metric.child, value)
    cells = books.copy()[0]
    BY_NAME["made"] = metric
    try:
        for shown in (None, "b"):
            view = View("made", "histogram", "?", (Series((), (Source("made", "", shown),)),), tuple(coarse))
            text = render(compile_views((view,), lambda _: 0), cells, Readout(lambda _: 0, 1, 0.0, 0.0))
            direct: Counter[int] = Counter()
            mine = [value for value, part in values if shown is None or parts[part] == shown]
            for value in mine:
                direct[bisect_left(coarse, value)] += 1
            counts = list(itertools.accumulate(direct[at] for at in range(len(coarse) + 1)))
            lines = [float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"]
            assert lines == [*counts, sum(mine), len(mine)]
    finally:
        del BY_NAME["made"]


@pytest.mark.parametrize("view", HISTOGRAMS, ids=[view.name for view in HISTOGRAMS])
def test_every_bound_of_every_view_is_kept(view: View) -> None:
    for series in view.series:
        for source in series.sources:
            assert set(view.bounds) <= set(BY_NAME[source.family].kept)
    assert all(low < high for low, high in itertools.pairwise(view.bounds))


def test_a_view_with_a_bound_that_is_not_kept_is_refused() -> None:
    view = View("x", "histogram", "?", (Series((), (Source("queue_time_seconds"),)),), (0.0123,))
    with pytest.raises(ValueError, match=r"x: bounds \[0.0123\] are not kept"):
        compile_views((view,), lambda _: 0)


def test_bounds_are_whole_nanoseconds_in_the_books() -> None:
    books = Books(CATALOG)
    for metric in CATALOG:
        for value in metric.values if metric.kind == "histogram" else ():
            stored = books.bounds[books.at[metric.name, value]]
            assert [bound / metric.scale for bound in stored] == list(metric.kept), metric.name


# -- the views agree -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_sglang_names_show_the_native_numbers(seed: int) -> None:
    ours, theirs = Rig(seed).both()
    page = float(next(dict(labels)["page_size"] for name, labels in ours if name == "admitscope_build_info"))

    def native_total(name: str, **labels: str) -> float:
        return total(ours, PREFIX + name, **labels)

    used = sum(native_total("kv_pages", state=state) for state in ("private", "protected"))
    pages = native_total("kv_pages_capacity")
    expected = {
        "num_running_reqs": sum(native_total("requests", state=state) for state in ("prefill", "decode")),
        "num_queue_reqs": sum(native_total("requests", state=state) for state in ("waiting", "retracted")),
        "token_usage": used / pages,
        "full_token_usage": used / pages,
        "kv_available_tokens": native_total("kv_pages", state="free") * page,
        "kv_evictable_tokens": native_total("kv_pages", state="evictable") * page,
        "kv_used_tokens": used * page,
        "num_used_tokens": used * page,
        "max_total_num_tokens": pages * page,
        "new_token_ratio": native_total("new_token_ratio"),
        "num_retracted_requests_total": native_total("retractions_total", cause="kv_now"),
        "prompt_tokens_total": native_total("prompt_tokens_total"),
        "generation_tokens_total": native_total("generation_tokens_total"),
        "cached_tokens_total": native_total("prompt_tokens_total", source="cached"),
        "num_requests_total": native_total("requests_finished_total"),
        "num_aborted_requests_total": native_total("requests_finished_total", finish_reason="abort"),
    }
    for name, number in expected.items():
        assert total(theirs, f"sglang:{name}") == pytest.approx(number), name
    same = {
        "queue_time_seconds": "queue_time_seconds",
        "time_to_first_token_seconds": "time_to_first_token_seconds",
        "inter_token_latency_seconds": "inter_token_latency_seconds",
        "request_time_per_output_token_seconds": "time_per_output_token_seconds",
        "e2e_request_latency_seconds": "request_duration_seconds",
    }
    for name, family in same.items():
        for part in ("_sum", "_count"):
            assert total(theirs, f"sglang:{name}{part}") == pytest.approx(native_total(family + part)), name
        shared = 0
        for bound in (str(float(one)) for one in BY_NAME[family].bounds):
            if any(metric == f"sglang:{name}_bucket" and ("le", bound) in labels for metric, labels in theirs):
                shared += 1
                buckets = total(theirs, f"sglang:{name}_bucket", le=bound), native_total(f"{family}_bucket", le=bound)
                assert buckets[0] == buckets[1], (name, bound)
        assert shared >= 3, name
    left = {name.removeprefix("sglang:") for name, _ in theirs} - set(expected)
    suffixes = ("_sum", "_count", "_bucket")
    assert left == {f"{name}{suffix}" for name in same for suffix in suffixes} | {"gen_throughput", "cache_hit_rate"}
    assert {name for name in BOARD if any(f"sglang:{name}" in key[0] for key in theirs)} == BOARD


def test_sglang_labels_are_those_of_its_scheduler_and_of_its_front_end() -> None:
    front = {"model_name", "engine_type"}
    scheduler = front | {"tp_rank", "pp_rank", "moe_ep_rank"}
    found = {view.name: {name for series in view.series for name, _ in series.labels} for view in sglang("m")}
    assert found["sglang:num_running_reqs"] == found["sglang:queue_time_seconds"] == scheduler
    assert found["sglang:e2e_request_latency_seconds"] == found["sglang:num_requests_total"] == front
    assert found["sglang:cached_tokens_total"] == front | {"cache_source"}


def test_rates_are_those_since_a_scrape_a_second_ago_and_keep_the_last_hit_rate() -> None:
    clock = VirtualClock()
    sink = MetricsSink(clock=clock)
    run = TimedRun(engine_config(num_pages=60, page_size=4), sink)
    exposition = Exposition(sink)

    def shown() -> tuple[float, float]:
        samples = parsed(exposition.text(as_sglang=True))
        return total(samples, "sglang:gen_throughput"), total(samples, "sglang:cache_hit_rate")

    assert shown() == (0.0, 0.0)
    run.add("a", range(40), 10, ignore_eos=True)
    run.finish_all()
    clock.advance_ns(2 * NS)
    assert shown() == (5.0, 0.0)
    run.add("b", range(40), 6, ignore_eos=True)
    run.finish_all()
    clock.advance_ns(NS // 2)
    assert shown() == (16 / 2.5, 36 / 80)
    clock.advance_ns(NS // 2)
    assert shown() == (6.0, 36 / 40)
    clock.advance_ns(3 * NS)
    throughput, hits = shown()
    assert (throughput, hits) == (0.0, 36 / 40)


@pytest.mark.parametrize("seed", range(3))
def test_gen_ai_histograms_split_the_native_ones_by_operation_and_error(seed: int) -> None:
    ours, _ = Rig(seed).both()
    for name, family in (
        ("gen_ai_server_time_to_first_token_seconds", "time_to_first_token_seconds"),
        ("gen_ai_server_request_duration_seconds", "request_duration_seconds"),
    ):
        assert total(ours, f"{name}_count") == total(ours, f"{PREFIX}{family}_count")
        assert total(ours, f"{name}_sum") == pytest.approx(total(ours, f"{PREFIX}{family}_sum"))
        assert {dict(labels)["gen_ai_operation_name"] for metric, labels in ours if metric == f"{name}_count"} == {
            *OPERATIONS
        }
    chats = total(ours, "gen_ai_server_request_duration_seconds_count", gen_ai_operation_name="chat")
    assert chats == total(ours, "gen_ai_server_time_to_first_token_seconds_count", gen_ai_operation_name="chat") == 2
    aborted = total(ours, "gen_ai_server_request_duration_seconds_count", error_type="abort")
    assert aborted == total(ours, "admitscope_requests_finished_total", finish_reason="abort")
    gaps = "gen_ai_server_time_per_output_token_seconds_count"
    assert total(ours, gaps, gen_ai_operation_name="chat") == 2
    assert total(ours, gaps) <= total(ours, "admitscope_time_per_output_token_seconds_count")
    model = {dict(labels).get("gen_ai_request_model") for metric, labels in ours if metric.startswith("gen_ai")}
    assert model == {"made-up"}


def test_samples_stay_below_the_limit_in_every_view() -> None:
    ours, theirs = Rig().both()
    assert len(ours) == count_samples() < 2_000
    assert len(theirs) == count_samples(sglang("m")) < 300


# -- the route -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_on", [True, False])
def test_the_sglang_view_is_a_route_of_its_own_and_off_by_default(is_on: bool) -> None:
    rig = Rig()
    app = FastAPI()
    app.include_router(create_router(ReadModel(clock=rig.clock), rig.exposition, sglang=is_on))
    with TestClient(app) as client:
        reply = client.get("/metrics/sglang")
        assert reply.status_code == (200 if is_on else 404)
        native_text = client.get("/metrics").text
        assert "sglang:" not in native_text
        if is_on:
            assert "admitscope_" not in reply.text
            asked = client.get("/metrics/sglang", headers={"accept": "application/openmetrics-text"})
            assert asked.headers["content-type"] == OPENMETRICS
            found = list(openmetrics.text_string_to_metric_families(asked.text))
            assert {family.name for family in found} >= {"sglang:num_running_reqs", "sglang:num_requests"}

"""Boards and rules against two engines under load: nothing is empty, nothing ill, and every number is the journal's.

A real Prometheus scrapes once a second; when both engines have gone idle, what it last saw is compared with sums over
the records, number for number.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from grafana.boards import BOARDS
from grafana.panel import Panel, Target
from grafana.queries import INTERVAL
from grafana.rules import ALERTS, RECORDINGS
from telemetry.journal_reader import JournalReader
from telemetry.metric_catalog import CATALOG, PREFIX
from tests.grafana.mixed_load import FLAGS, REFUSED, MixedLoad, Told
from tests.grafana.needs import needs
from tests.grafana.stack import Prometheus, stack, wait_for
from tests.grafana.sums import TTFT, Journal
from tests.telemetry.otlp import Receiver, attributes
from tests.telemetry.test_launch import Served, serving

pytestmark = needs("prometheus", "prometheus-alertmanager")

LOAD_S = 12.0
SCALES = {metric.name: metric.scale for metric in CATALOG}
#: The second serves the more important first, and pushes others back for them.
ENGINES = {
    "reference": FLAGS,
    "priorities": (
        *FLAGS,
        *("--scheduler.schedule-policy", "fcfs"),
        *("--scheduler.enable-priority-scheduling", "--scheduler.enable-priority-preemption"),
    ),
}

Values = dict[tuple[str, str], float]


class Engine(NamedTuple):
    """One engine after the run. `values`: (family, label value) -> what Prometheus saw last."""

    told: Told
    values: Values
    journal: Journal


class Run(NamedTuple):
    """The run, over; its Prometheus still answers."""

    prometheus: Prometheus
    start_s: float
    end_s: float
    engines: dict[str, Engine]
    spans: list[Span]


def _values(prometheus: Prometheus, target: str) -> Values:
    """Every series of one engine at its last scrape, without buckets."""
    values: Values = {}
    for sample in prometheus.query(f'{{job="admitscope",instance="{target}",le=""}}'):
        labels = sample["metric"]
        name = labels["__name__"].removeprefix(PREFIX)
        if not labels["__name__"].startswith(PREFIX) or name == "build_info":
            continue
        own = [value for label, value in labels.items() if label not in {"__name__", "instance", "job"}]
        key = (name, own[0] if own else "")
        assert key not in values
        values[key] = float(sample["value"][1])
    return values


def _is_idle(values: Values) -> bool:
    return sum(value for (name, _), value in values.items() if name == "requests") == 0


def _journal_of(served: Served, folder: Path) -> Journal:
    code, _, err = served.end(signal.SIGINT)
    assert code == 0, err
    return Journal(JournalReader(folder / "journals").records(without=("PagesMoved", "LockChanged")))


async def _loaded(loads: list[MixedLoad]) -> None:
    await asyncio.gather(*(load.run(LOAD_S) for load in loads))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("live")
    homes = {name: folder / name for name in ENGINES}
    for home in homes.values():
        home.mkdir()
    traces = ("--traces.sample-ratio", "1", "--traces.max-traces-per-s", "10000")
    with (
        Receiver() as receiver,
        serving(homes["reference"], *ENGINES["reference"], "--traces.endpoint", receiver.url, *traces) as one,
        serving(homes["priorities"], *ENGINES["priorities"]) as other,
    ):
        served = {"reference": one, "priorities": other}
        targets = {name: each.url.removeprefix("http://") for name, each in served.items()}
        with stack(folder, list(targets.values())) as (prometheus, _):
            wait_for(lambda: len(prometheus.query('up{job="admitscope"} == 1')) == 2, lambda: "engines are not scraped")
            loads = {name: MixedLoad(each.url, seed) for seed, (name, each) in enumerate(served.items())}
            start_s = time.time()
            asyncio.run(_loaded(list(loads.values())))
            end_s = time.time()
            values: dict[str, Values] = {}

            def settled() -> bool:
                """Idle, and seen so by a scrape that began after the last answer."""
                fresh = prometheus.query(f'min(timestamp(up{{job="admitscope"}})) > {end_s + 1:.3f}')
                for name, target in targets.items():
                    values[name] = _values(prometheus, target)
                return bool(fresh) and all(map(_is_idle, values.values()))

            wait_for(settled, lambda: "the engines do not go idle")
            with httpx.Client(trust_env=False) as client:
                assert all(client.get(f"{each.url}/ready").status_code == httpx.codes.OK for each in served.values())
            journals = {name: _journal_of(each, homes[name]) for name, each in served.items()}
            engines = {name: Engine(loads[name].told, values[name], journals[name]) for name in ENGINES}
            yield Run(prometheus, start_s, end_s, engines, list(receiver.spans))


def _has_number(points: list[Any]) -> bool:
    return any(math.isfinite(float(value)) for _, value in points)


def _answers(run: Run, panel: Panel, target: Target) -> bool:
    expr = target.expr.replace(INTERVAL, "10s").replace("$instance", ".*")
    if panel.kind in {"stat", "table"}:
        return _has_number([sample["value"] for sample in run.prometheus.query(expr, run.end_s - 2)])
    series = run.prometheus.ranged(expr, run.start_s + 3, run.end_s)
    return _has_number([point for one in series for point in one["values"]])


PANELS = [
    pytest.param(panel, id=f"{board.uid}: {panel.title}")
    for board in BOARDS
    for row in board.rows
    for panel in row.panels
]


@pytest.mark.parametrize("panel", PANELS)
def test_every_query_of_the_panel_gives_a_number(run: Run, panel: Panel) -> None:
    empty = [target.expr for target in panel.targets if not _answers(run, panel, target)]
    assert not empty


def test_every_rule_is_evaluated_and_healthy(run: Run) -> None:
    rules = {rule["name"]: rule for rule in run.prometheus.rules()}
    assert set(rules) == {rule.name for rule in RECORDINGS} | {alert.name for alert in ALERTS}
    assert {name: rule["lastError"] for name, rule in rules.items() if rule["health"] != "ok"} == {}
    for rule in RECORDINGS:
        recorded = run.prometheus.query(rule.name, run.end_s)
        assert len(recorded) == len(ENGINES), rule.name
        assert all(0 <= float(sample["value"][1]) <= 1 for sample in recorded)


@pytest.fixture(params=ENGINES)
def engine(run: Run, request: pytest.FixtureRequest) -> Engine:
    return run.engines[request.param]


def test_counters_are_the_sums_of_the_journal(engine: Engine) -> None:
    sums = dict(engine.journal.sums)
    waited = sums.pop(("waiting_request_seconds_total", ""))
    families = {name for name, _ in sums}
    assert len(families) >= 35
    shown: dict[tuple[str, str], int] = {}
    for (name, label), value in engine.values.items():
        if name in families:
            scale = SCALES.get(name) or SCALES[name.rpartition("_")[0]] if not name.endswith("_count") else 1
            shown[name, label] = round(value * scale)
    assert {key: value for key, value in shown.items() if value} == {key: value for key, value in sums.items() if value}
    # Waiting is told apart by blocker in the metric, which no single record does; together they are the whole.
    by_blocker = [value for (name, _), value in engine.values.items() if name == "waiting_request_seconds_total"]
    assert sum(round(value * 10**9) for value in by_blocker) == waited


def test_first_tokens_are_the_sum_of_their_parts(engine: Engine) -> None:
    parts = [value for (name, _), value in engine.values.items() if name == "ttft_component_seconds_sum"]
    assert sum(round(value * 10**9) for value in parts) == engine.journal.sums[f"{TTFT}_sum", ""]
    assert engine.values["ttft_residual_seconds_total", ""] == 0
    assert engine.values[f"{TTFT}_count", ""] > 50


def test_the_front_end_counts_what_its_clients_saw(engine: Engine) -> None:
    told, values = engine.told, engine.values
    rejected = {label: value for (name, label), value in values.items() if name == "requests_rejected_total"}
    # Turned away from the queue for a more important one: accepted before, so no refusal at the door.
    displaced = told.refusals["displaced"]
    at_the_door = told.refusals.total() - displaced
    assert values["requests_received_total", ""] == told.asked
    assert sum(rejected.values()) == at_the_door
    assert values["request_ends_total", "displaced"] == displaced
    assert told.asked - at_the_door == len(engine.journal.arrived)
    for cause, code in (*REFUSED, ("queue_full", "queue_full")):
        assert rejected[cause] == told.refusals[code] > 0
    # Whoever hangs up on a busy machine may have been sent everything by then.
    assert 0 < values["client_disconnects_total", ""] <= told.hung_up
    finished = {label: value for (name, label), value in values.items() if name == "requests_finished_total"}
    assert told.finishes["stop"] <= finished["stop"]
    assert told.finishes["length"] <= finished["length"]
    assert finished["stop"] + finished["length"] - told.finishes["stop"] - told.finishes["length"] <= told.hung_up


def test_the_load_met_what_it_was_made_for(run: Run) -> None:
    """Else equal numbers would be equal zeros."""
    sums = run.engines["reference"].journal.sums
    assert sums["retractions_total", "kv_now"] > 0
    assert sums["kv_pages_evicted_total", ""] > 0
    assert sums["prompt_tokens_total", "cached"] > 0
    assert sums["clipped_tokens_total", "chunk"] > 0
    assert sums["request_ends_total", "abort"] > 0
    assert run.engines["priorities"].journal.sums["retractions_total", "priority"] > 0


def test_nothing_broke_and_nothing_was_lost(engine: Engine) -> None:
    for name in ("violations_total", "telemetry_dropped_total", "telemetry_errors_total", "kv_claim_failures_total"):
        found = {label: value for (family, label), value in engine.values.items() if family == name}
        assert found
        assert not any(found.values()), name
    assert engine.values["kv_pages_unaccounted", ""] == 0
    assert engine.values["kv_pages", "private"] == engine.values["kv_pages", "protected"] == 0


def test_spans_last_as_long_as_the_records_say(run: Run) -> None:
    journal = run.engines["reference"].journal
    roots = {
        str(attributes(span)["gen_ai.response.id"]): span for span in run.spans if span.kind == Span.SPAN_KIND_SERVER
    }
    assert set(roots) == set(journal.arrived)
    children: dict[tuple[bytes, str], list[int]] = {}
    for span in sorted(run.spans, key=lambda span: span.start_time_unix_nano):
        took = span.end_time_unix_nano - span.start_time_unix_nano
        children.setdefault((span.parent_span_id, span.name), []).append(took)
    for rid, root in roots.items():
        arrived, response = journal.arrived[rid], journal.responses[rid]
        assert children[root.span_id, "engine.intake"] == [arrived.t_ns - arrived.accepted_ns]
        if rid in journal.admitted_ns:
            assert children[root.span_id, "engine.queue"][0] == journal.admitted_ns[rid] - arrived.t_ns
        if response.first_byte_ns is not None and response.last_byte_ns is not None:
            assert children[root.span_id, "engine.stream"] == [response.last_byte_ns - response.first_byte_ns]
        if (ttft := journal.ttft_ns(rid)) is not None:
            assert attributes(root)["admitscope.ttft_ms"] == ttft / 1e6


def test_an_exemplar_leads_to_a_trace_that_was_kept(run: Run) -> None:
    kept = {span.trace_id.hex() for span in run.spans}
    found = run.prometheus.ask(
        "/api/v1/query_exemplars",
        query=f"{PREFIX}{TTFT}_bucket",
        start=f"{run.start_s:.3f}",
        end=f"{run.end_s + 60:.3f}",
    )
    named = {exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]}
    assert named
    assert named <= kept

"""The five incidents of docs/debugging.md are what the page says: made, found by the product's own tools, cured."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from bench.incidents import page, plot
from bench.incidents.cases import INCIDENTS, named
from bench.incidents.diagnosis import STAGES, Diagnosis, diagnose
from bench.incidents.numbers import Numbers
from bench.incidents.receiver import Receiver
from bench.incidents.world import World, said
from engine.scheduler.decision import Reason
from grafana.rules import ALERTS
from grafana.runbook import WALKS
from telemetry.check import check
from telemetry.client import LiveSource
from telemetry.explain import explain
from tests.telemetry.served import served

NAMES = [incident.name for incident in INCIDENTS]
TOLD: dict[str, Diagnosis] = {}


@pytest.fixture
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    """Each is played once, in full: the page holds the full figures."""
    name = str(request.param)
    if name not in TOLD:
        TOLD[name] = diagnose(named(name), tmp_path_factory.mktemp(name))
    return TOLD[name]


every = pytest.mark.parametrize("told", NAMES, indirect=True)


@every
def test_the_page_is_current(told: Diagnosis) -> None:
    """`python -m bench.incidents all --docs` writes it; then read the words around what changed."""
    name, text = told.incident.name, page.PAGE.read_text(encoding="utf-8")
    assert page.with_blocks(text, name, told.stages) == text
    assert page.image(name).read_text(encoding="utf-8") == plot.drawn(told)
    assert f"## {told.incident.title}\n" in text
    assert f"(img/{page.image(name).name})" in text


@every
def test_no_law_breaks_and_nobody_is_left_out(told: Diagnosis) -> None:
    for run in (told.before, told.after):
        assert run.violations == 0
        assert all(client.token_ns for client in run.clients.values())
        assert run.scrapes[-1][1].total("requests") == 0
        assert run.scrapes[-1][1].total("telemetry_dropped_total") == 0


@every
def test_each_stage_names_the_cause(told: Diagnosis) -> None:
    expected, stages = told.incident.expected, {stage: "\n".join(told.stages[stage]) for stage in STAGES}
    assert told.rid in "\n".join(stages["explain"].splitlines()[:2])
    if told.incident.subject == "gap":
        assert expected in stages["metrics"]
        assert told.worst_gap_cause == expected
        assert told.life.life.worst_gap is not None
        assert told.life.life.worst_gap.prefill_tokens > 7_000
    else:
        assert expected in stages["record"]
        assert expected in stages["explain"]


def _rids(told: Diagnosis) -> set[str]:
    return {share.rid for wait in told.life.life.waits for share in wait.slices_taken}


@pytest.mark.parametrize("told", ["starvation"], indirect=True)
def test_starvation_is_a_short_prompt_behind_documents_and_not_a_want_of_memory(told: Diagnosis) -> None:
    assert told.rid.startswith("chat-")
    assert {rid for rid in _rids(told) if rid.startswith("doc-")} >= {"doc-16", "doc-18", "doc-22"}
    assert re.search(r"The last pass gave doc-\d+ \d+ of the [\d,]+ tokens it lacked", told.before.live)
    assert min(share for _, share in Numbers(told.before.scrapes).to_be_had()) > 0.75
    before, after = told.table["chat TTFT p99, ms"]
    assert after < before / 50
    documents = told.table["doc TTFT p99, ms"]
    assert documents[0] < documents[1] < 1.1 * documents[0]


@pytest.mark.parametrize("told", ["over-reservation"], indirect=True)
def test_over_reservation_waits_beside_a_pool_that_nobody_uses(told: Diagnosis) -> None:
    assert min(share for _, share in Numbers(told.before.scrapes).to_be_had()) > 0.8
    refusals = [each for wait in told.life.life.waits for each in wait.refusals]
    assert {each.reason for each in refusals} == {Reason.KV_TOTAL_EXHAUSTED}
    assert all(each.need is not None and each.need > 4_000 for each in refusals)
    before, after = told.table["chat TTFT p99, ms"]
    assert after < before / 100
    assert told.table["retractions"] == (0, 0)


@pytest.mark.parametrize("told", ["retract-storm"], indirect=True)
def test_the_storm_ends_and_the_wait_moves_to_the_front(told: Diagnosis) -> None:
    assert told.kept == "retracted"
    assert told.life.life.retractions
    assert all(chunk.reserved_new_tokens == 16 for chunk in told.life.life.chunks)
    before, after = told.table["retractions"]
    assert (before > 20, after) == (True, 0)
    gaps, firsts = told.table["longest gap of a request, median, ms"], told.table["chat TTFT p50, ms"]
    assert gaps[1] < gaps[0] / 20
    assert firsts[1] > 2 * firsts[0]


@pytest.mark.parametrize("told", ["retract-storm"], indirect=True)
def test_conservativeness_alone_does_not_end_a_storm_that_a_clip_made(told: Diagnosis, tmp_path: Path) -> None:
    flags = {**told.incident.flags, "scheduler.schedule-conservativeness": "1.4"}
    with Receiver() as receiver:
        run = World(flags, tmp_path, receiver.url).play(told.incident.load(1.0))
    assert Numbers(run.scrapes).increase("retractions_total") == told.table["retractions"][0]


@pytest.mark.parametrize("told", ["chunk-too-small"], indirect=True)
def test_a_small_chunk_costs_first_tokens_and_a_larger_one_the_gaps(told: Diagnosis) -> None:
    assert len(told.life.life.chunks) > 15
    firsts, gaps = told.table["chat TTFT p99, ms"], told.table["TBT p99, ms"]
    assert firsts[1] < firsts[0] / 10
    assert gaps[0] < 10 < gaps[1]


@pytest.mark.parametrize("told", ["chunk-too-large"], indirect=True)
def test_a_large_chunk_costs_the_gaps_and_a_smaller_one_first_tokens(told: Diagnosis) -> None:
    assert told.kept == "gap"
    firsts, gaps = told.table["doc TTFT p50, ms"], told.table["TBT p99, ms"]
    assert gaps[1] < gaps[0] / 10
    assert 1.25 < firsts[1] / firsts[0] < 1.33


@pytest.mark.parametrize("told", ["starvation"], indirect=True)
def test_what_is_read_of_a_run_agrees_with_its_journal(told: Diagnosis) -> None:
    assert check(told.before.journal).exit_code == 0
    life, client = told.life.life, told.before.clients[told.rid]
    assert life.ttft_ns == client.ttft_ns
    numbers = Numbers(told.before.scrapes)
    ttfts = sorted((each.ttft_ns or 0) / 1e9 for each in told.before.clients.values())
    late = sum(ttft > 1.0 for ttft in ttfts) / len(ttfts)
    assert numbers.above("time_to_first_token_seconds", 1.0) == pytest.approx(late)
    # A quantile of buckets lies in the bucket of the true one.
    assert 2.5 <= numbers.quantile(0.99, "time_to_first_token_seconds") <= 5.0
    assert 2.5 <= ttfts[-2] <= 5.0


def test_alerts_link_headings_that_there_are() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert set(WALKS) <= {alert.name for alert in ALERTS}
    assert set(WALKS.values()) <= {line.removeprefix("## ") for line in text.splitlines()}


def test_an_unknown_incident_is_answered_with_those_there_are() -> None:
    with pytest.raises(LookupError, match="starvation, over-reservation, retract-storm"):
        named("deadlock")


def test_a_page_without_its_marker_is_not_written() -> None:
    with pytest.raises(LookupError, match="starvation metrics"):
        page.with_blocks("no block", "starvation", {stage: [] for stage in STAGES})


@contextmanager
def crowded(folder: Path) -> Iterator[str]:
    """A server of its own process, in which one answer of 2,000 tokens holds what a second would be promised."""
    flags = ["--executor.kind", "simulated", "--executor.simulated-step-ms", "5", "--cache.num-pages", "160"]
    with served(folder, *flags, "--server.drain-timeout-s", "0.2") as url:
        body = {"model": "simulated", "prompt": [7] * 100, "max_tokens": 2_000, "ignore_eos": True, "stream": True}

        def ask() -> None:
            with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
                client.post("/v1/completions", json=body)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        yield url
    for thread in threads:
        thread.join(20)


def test_a_real_server_under_real_time_explains_over_reservation(tmp_path: Path) -> None:
    """The same answer without a virtual clock: over HTTP while it waits, then from the journal it left."""
    with crowded(tmp_path) as url:
        with LiveSource(url, timeout_s=20) as source:
            deadline = time.monotonic() + 20
            while not (entries := source.queue().entries) or entries[0].blocker != "kv_total":
                assert time.monotonic() < deadline, entries
                time.sleep(0.05)
            free = source.status().kv_pages.free
        live = said("explain", url, entries[0].rid)
    assert "its whole future did not fit the K/V pool" in live
    assert "clip_max_new_tokens" in live
    assert free > 80
    [wait] = explain(tmp_path, entries[0].rid).life.waits
    assert Reason.KV_TOTAL_EXHAUSTED in {refusals.reason for refusals in wait.refusals}

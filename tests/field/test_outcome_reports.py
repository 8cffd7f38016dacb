"""Reported faults of a served engine seen from outside: FR-19, 28, 30, 37, on /metrics and the journal."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from telemetry.journal_reader import JournalReader
from telemetry.replay import replay
from telemetry.schema_events import RequestArrivedRecord, RequestTransitionedRecord
from tests.engine.server.live import until
from tests.field.whole import Whole, whole

LONG = {"max_tokens": 60, "ignore_eos": True}


def _hang_up(live: Whole, when: str) -> None:
    """A streamed request whose client leaves while it is `waiting` or `running`."""
    before = live.by_label("request_ends_total").get("abort", 0)
    with httpx.Client(base_url=live.url, timeout=0.15 if when == "waiting" else 5, trust_env=False) as client:
        if when == "waiting":
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=live.body(**LONG))
        else:
            with client.stream("POST", "/v1/completions", json=live.body(stream=True, **LONG)) as stream:
                next(stream.iter_lines())
    until(lambda: live.by_label("request_ends_total").get("abort", 0) == before + 1, "the hang-up is counted")


def test_fr_30_each_outcome_is_counted_once_with_its_reason(tmp_path: Path) -> None:
    """Twelve ways to end: received = accepted + rejected, accepted = sum over causes, tokens = sum over outcomes."""
    sections = {
        "scheduler": {"max_running_requests": 1},
        "server": {"max_queued_requests": 2, "queue_timeout_s": 2.0},
        "cache": {"num_pages": 8, "page_size": 16},
        "model": {"max_context_tokens": 512},
    }
    with whole(tmp_path, **sections) as live:
        assert live.post().json()["choices"][0]["finish_reason"] == "stop"
        assert live.post(max_tokens=2).json()["choices"][0]["finish_reason"] == "length"
        assert live.post(stop=["cd"]).json()["choices"][0]["text"] == "ab"
        pool = live.post(prompt="p" * 60, max_tokens=400, ignore_eos=True).json()
        assert pool["choices"][0]["finish_reason"] == "length", "the pool ends it early"
        assert pool["usage"]["completion_tokens"] < 400
        assert live.post(prompt="x" * 600).status_code == 400
        live.executor.fail_next = True
        assert live.post().status_code == 503
        live.executor._step_s = 0.05
        _hang_up(live, "running")
        live.executor.gate.clear()
        with ThreadPoolExecutor(8) as threads:
            runs = threads.submit(live.post, **LONG)
            until(lambda: live.status.in_step, "a request runs")
            _queued = threads.submit(live.post, **LONG)
            until(lambda: live.instance.engine_thread.open_replies == 2, "one waits")
            live.executor.gate.set()
            until(lambda: live.status.waiting == 1, "it waits in the engine")
            _hang_up(live, "waiting")
            late = threads.submit(live.post, **LONG)
            until(lambda: live.status.waiting == 2, "the queue is full")
            assert live.post().status_code == 429
            assert late.result(30).status_code in {200, 503}
            assert runs.result(30).status_code == 200
            assert _queued.result(30).status_code in {200, 503}
        until(lambda: live.status.running == live.status.waiting == 0, "idle")
        shown = live.metrics()
        causes = live.by_label("request_ends_total")
        reasons = live.by_label("requests_finished_total")
        rejected = live.by_label("requests_rejected_total")
    assert rejected == {"queue_full": 1, "too_long": 1}
    assert causes["abort"] == 2
    assert causes["error"] == 1
    assert causes["stop"] == 2
    assert causes.get("queue_timeout", 0) >= 1
    assert sum(causes.values()) == sum(reasons.values())
    assert shown["requests_received_total"] == sum(causes.values()) + sum(rejected.values())
    assert shown["client_disconnects_total"] == 2
    _record_agrees(tmp_path, shown, causes)
    assert replay(next(tmp_path.glob("*.jsonl"))).verdict == "identical"


def _record_agrees(folder: Path, shown: dict[str, float], causes: dict[str, float]) -> None:
    records = list(JournalReader(folder).records())
    arrived = [record for record in records if isinstance(record, RequestArrivedRecord)]
    ends = [r for r in records if isinstance(r, RequestTransitionedRecord) and r.target == "finished"]
    assert Counter(end.rid for end in ends) == dict.fromkeys((record.rid for record in arrived), 1)
    assert Counter(str(end.cause.value) for end in ends) == causes
    duration = [n for key, n in shown.items() if key.startswith("request_duration_seconds_count")]
    assert sum(duration) == len(ends), "histograms leave no outcome out: they are split by it"
    prompts = sum(n for key, n in shown.items() if key.startswith("prompt_tokens_total"))
    admitted = {r.rid for r in records if isinstance(r, RequestTransitionedRecord) and r.cause == "admit"}
    assert prompts == sum(record.prompt_len for record in arrived if record.rid in admitted)


def test_fr_30_a_shutdown_is_an_outcome_too(tmp_path: Path) -> None:
    with whole(tmp_path, step_ms=10, server={"drain_timeout_s": 0.0}) as live:
        asked = threading.Thread(target=lambda: live.post(max_tokens=400, ignore_eos=True))
        asked.start()
        until(lambda: live.status.running == 1, "it runs")
    asked.join(30)
    ends = [
        r
        for r in JournalReader(tmp_path).records()
        if isinstance(r, RequestTransitionedRecord) and r.target == "finished"
    ]
    assert [(end.cause, end.detail) for end in ends] == [("abort", "shutting_down")]


@pytest.mark.parametrize("pieces", [1, 3])
def test_fr_19_a_shutdown_between_two_pieces_ends_the_request_once(tmp_path: Path, pieces: int) -> None:
    """A prompt in pieces of 64 is half computed when the server stops: one end, nothing held, no token sent."""
    answers: list[httpx.Response] = []
    chunked = {"chunked_prefill_size": 64}
    with whole(tmp_path, step_ms=30, scheduler=chunked, server={"drain_timeout_s": 0.0}) as live:
        asked = threading.Thread(target=lambda: answers.append(live.post(prompt="p" * 900)))
        asked.start()
        until(lambda: live.status.steps >= pieces, "so many pieces are computed")
    asked.join(30)
    assert [answer.status_code for answer in answers] == [503]
    assert live.instance.engine.snapshot().requests == ()
    assert live.instance.engine.snapshot().kv.leases == ()
    ends = [
        r
        for r in JournalReader(tmp_path).records()
        if isinstance(r, RequestTransitionedRecord) and r.target == "finished"
    ]
    assert [end.cause for end in ends] == ["abort"]
    assert ends[0].output_len == 0


def test_fr_28_the_scrape_after_the_last_end_shows_nothing_running() -> None:
    """24 clients at once, then none: the next scrape has no one in any state, and no page held."""
    with whole(step_ms=2, scheduler={"max_running_requests": 24}) as live:
        with ThreadPoolExecutor(24) as threads:
            answers = list(
                threads.map(lambda n: live.post(prompt=f"p{n}" * 8, max_tokens=6, ignore_eos=True), range(24))
            )
        assert {answer.status_code for answer in answers} == {200}
        until(lambda: live.instance.engine_thread.open_replies == 0, "every reply ended")
        until(lambda: not live.by_label("requests"), "no request in any state")
        assert not live.by_label("waiting_by_blocker")
        assert set(live.by_label("kv_pages")) <= {"free", "evictable"}
        assert live.metrics()["promised_pages"] == 0


def test_fr_37_nothing_that_a_client_chooses_becomes_a_series() -> None:
    """Ids, users, priorities, models and paths of every kind: the same series as before; health answers meanwhile."""
    with whole(scheduler={"enable_priority_scheduling": True}) as live:
        live.post()
        before = set(live.metrics())
        slow: list[int] = []
        with ThreadPoolExecutor(8) as threads:
            for number in range(200):
                word = uuid.uuid4().hex
                fields = {"priority": number % 101 - 50, "user": f"user-{word}", "max_tokens": 1}
                threads.submit(live.post, **fields)
                threads.submit(live.post, model=f"model-{word}")
                threads.submit(live.http.get, f"/path/{word}?q={word}")
            for _ in range(20):
                assert live.http.get("/metrics").status_code == 200
                slow.append(live.http.get("/health").status_code)
        text = live.http.get("/metrics").text
        assert set(live.metrics()) == before
    assert set(slow) == {200}
    assert len(text.encode()) < 1_000_000
    assert "user-" not in text
    assert "model-" not in text
    assert "/path/" not in text

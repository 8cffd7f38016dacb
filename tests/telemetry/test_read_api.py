"""The routes answer what they promise, refuse what is out of bounds by name, and stay read-only."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from engine.clock import VirtualClock
from telemetry import observe
from telemetry.exposition import Exposition
from telemetry.metrics import MetricsSink
from telemetry.read_api import create_router
from telemetry.read_model import ReadModel
from tests.builders import engine_config
from tests.telemetry.live_run import TimedRun


def _client(model: ReadModel, exposition: Exposition | None = None) -> TestClient:
    app = FastAPI()
    app.include_router(create_router(model, exposition))
    return TestClient(app)


@pytest.fixture
def running() -> Iterator[tuple[TestClient, TimedRun]]:
    clock = VirtualClock()
    model, sink = ReadModel(clock=clock), MetricsSink(clock=clock)
    run = TimedRun(engine_config(num_pages=20, page_size=4), model, sink)
    run.add("runs", 30, 30, ignore_eos=True)
    run.timed_step()
    run.add("cmpl/a b-1", 30, 10)
    run.timed_step()
    clock.advance_ns(run.now_ns)
    with _client(model, Exposition(sink)) as client:
        yield client, run


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/observe/status", observe.EngineStatus),
        ("/observe/queue", observe.QueueAnswer),
        ("/observe/queue?limit=1", observe.QueueAnswer),
        ("/observe/passes?n=512", observe.PassesAnswer),
        ("/observe/latency", observe.LatencyAnswer),
        ("/observe/requests", observe.RequestsAnswer),
        ("/observe/requests/runs", observe.RequestDetail),
        ("/observe/requests/cmpl%2Fa%20b-1", observe.RequestDetail),
        ("/observe/pages", observe.PageMap),
        ("/observe/explain/runs", observe.Explanation),
        ("/observe/explain/runs?lang=zh-CN", observe.Explanation),
    ],
)
def test_each_route_answers_its_value(
    running: tuple[TestClient, TimedRun], path: str, model: type[observe.Head]
) -> None:
    reply = running[0].get(path)
    assert reply.status_code == 200
    assert reply.headers["cache-control"] == "no-store"
    answer = model.model_validate_json(reply.content)
    assert set(json.loads(reply.content)) == set(model.model_fields)
    assert answer.engine_id == "test"
    assert answer.observe_version == observe.OBSERVE_VERSION


@pytest.mark.parametrize(
    ("path", "field", "limit"),
    [
        ("/observe/passes?n=0", "n", "an integer from 1 to 512"),
        ("/observe/passes?n=513", "n", "an integer from 1 to 512"),
        ("/observe/passes?n=-1", "n", "an integer from 1 to 512"),
        ("/observe/passes?n=1e2", "n", "an integer from 1 to 512"),
        ("/observe/passes?n=", "n", "an integer from 1 to 512"),
        ("/observe/passes?n=%D9%A3", "n", "an integer from 1 to 512"),
        ("/observe/queue?limit=9999999999999999999999", "limit", "an integer from 1 to 5000"),
        ("/observe/requests?limit=many", "limit", "an integer from 1 to 5000"),
        ("/observe/requests?page=2", "page", "only limit"),
        ("/observe/explain/runs?lang=fr", "lang", "en or zh-CN"),
        ("/observe/explain/runs?lang=", "lang", "en or zh-CN"),
        ("/observe/explain/runs?lang=zh-CN&n=1", "n", "only lang"),
        ("/observe/requests/runs?lang=zh-CN", "lang", "none"),
        (f"/observe/requests/{'x' * 201}", "rid", "at most 200 characters"),
    ],
)
def test_a_question_out_of_bounds_is_refused_by_name(
    running: tuple[TestClient, TimedRun], path: str, field: str, limit: str
) -> None:
    reply = running[0].get(path)
    assert reply.status_code == 400
    error = observe.ObserveError.model_validate_json(reply.content)
    assert (error.field, error.limit) == (field, limit)


def test_every_route_refuses_a_parameter_that_it_does_not_know(running: tuple[TestClient, TimedRun]) -> None:
    client, _ = running
    paths = [path for path in client.get("/openapi.json").json()["paths"] if path.startswith("/observe/")]
    assert len(paths) >= 16
    for path in paths:
        asked = path.format(rid="runs", page=0, bundle="b")
        reply = client.get(asked, params={"x": "1"})
        assert reply.status_code == 400, path
        error = observe.ObserveError.model_validate_json(reply.content)
        assert (error.field, error.error) == ("x", "unknown parameter 'x'"), path
        assert error.limit, path


def test_an_explanation_is_in_the_language_asked_for_each_time(running: tuple[TestClient, TimedRun]) -> None:
    client, _ = running

    def said(query: str) -> tuple[str, ...]:
        reply = client.get(f"/observe/explain/cmpl%2Fa%20b-1{query}")
        return observe.Explanation.model_validate_json(reply.content).sentences

    english, chinese = said(""), said("?lang=zh-CN")
    assert english[0].startswith("Request cmpl/a b-1 arrived with a prompt of 30 tokens")
    assert chinese[0] == "请求 cmpl/a b-1 到达，提示词 30 个词元，至多要求 10 个新词元。"
    assert len(chinese) == len(english)
    assert said("?lang=en") == said("") == english


@pytest.mark.parametrize("path", ["/observe/requests/nobody", "/observe/explain/nobody"])
def test_an_unknown_request_is_not_found(running: tuple[TestClient, TimedRun], path: str) -> None:
    reply = running[0].get(path)
    assert reply.status_code == 404
    assert observe.ObserveError.model_validate_json(reply.content).field == "rid"


def test_nothing_can_be_written(running: tuple[TestClient, TimedRun]) -> None:
    for method in ("post", "put", "delete", "patch"):
        assert getattr(running[0], method)("/observe/status").status_code == 405


def test_before_the_engine_starts_the_answer_is_503() -> None:
    with _client(ReadModel(clock=VirtualClock())) as client:
        assert client.get("/observe/status").status_code == 503
        assert client.get("/metrics").status_code == 404


def test_metrics_are_text_or_openmetrics_as_asked(running: tuple[TestClient, TimedRun]) -> None:
    plain = running[0].get("/metrics")
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'admitscope_waiting_by_blocker{blocker="kv_total"} 1\n' in plain.text
    open_metrics = running[0].get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
    assert open_metrics.text.endswith("# EOF\n")


def test_no_prompt_reaches_an_answer(running: tuple[TestClient, TimedRun]) -> None:
    client, run = running
    tokens = run._tokens["runs"]
    for path in ("requests", "requests/runs", "passes", "queue", "explain/runs", "status"):
        text = client.get(f"/observe/{path}").text
        assert not any(str(token) in text for token in tokens[:20])

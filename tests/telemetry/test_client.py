"""The client returns typed answers, and every way of not getting one is told with the time of the last."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from engine.clock import MonotonicClock
from engine.errors import ConfigError
from telemetry.client import BadQuestion, LiveSource, Source, SourceUnavailable, engine_url, refuse_odd
from telemetry.observe import OBSERVE_VERSION, EngineStatus
from telemetry.read_api import create_router
from telemetry.read_model import ReadModel
from tests.builders import engine_config
from tests.telemetry.live_run import TimedRun


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, TimedRun]]:
    """A real server on a free port, over a real scheduler."""
    model = ReadModel(clock=MonotonicClock())
    run = TimedRun(engine_config(num_pages=20, page_size=4), model)
    run.add("runs/1", 30, 30, ignore_eos=True)
    run.timed_step()
    run.add("waits", 30, 10)
    run.timed_step()
    app = FastAPI()
    app.include_router(create_router(model))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}", run
    server.should_exit = True
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_every_question_gets_its_typed_answer(served: tuple[str, TimedRun]) -> None:
    with LiveSource(served[0] + "/") as live:
        source: Source = live
        status = source.status()
        assert (status.waiting, status.running, status.engine_id) == (1, 1, "test")
        assert source.queue().entries[0].rid == "waits"
        assert len(source.passes(5).passes) == 2
        assert source.latency().points
        assert {row.rid for row in source.requests().live} == {"runs/1", "waits"}
        detail = source.request("runs/1")
        assert detail is not None
        assert detail.request.prompt_len == 30
        assert source.request("nobody") is None
        assert sum(owner.pages for owner in source.pages().owners) == source.pages().num_pages - status.kv_pages.free
        told = source.explain("waits")
        assert told is not None
        assert told.sentences
        assert source.explain("nobody") is None
        chinese = source.explain("waits", "zh-CN")
        assert chinese is not None
        assert chinese.sentences[0].startswith("请求 waits 到达")
        assert live.last_contact_wall_s is not None
        with pytest.raises(BadQuestion, match="n is '513'") as refused:
            source.passes(513)
        assert refused.value.detail.limit == "an integer from 1 to 512"


@pytest.mark.parametrize("end", ["/", "/v1", "/v1/", "//"])
def test_the_openai_base_url_names_the_same_engine(served: tuple[str, TimedRun], end: str) -> None:
    with LiveSource(served[0] + end) as source:
        assert source.url == served[0]
        assert source.status().waiting == 1
    assert engine_url("http://h:1/engines/v1" + end.removeprefix("/v1")) == "http://h:1/engines"
    assert engine_url("http://h:1/av1") == "http://h:1/av1"


def test_nobody_there_is_unavailable_and_was_never_reached() -> None:
    with LiveSource("http://127.0.0.1:9", timeout_s=0.5) as source, pytest.raises(SourceUnavailable) as caught:
        source.status()
    assert caught.value.last_contact_wall_s is None
    assert "127.0.0.1:9" in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["http://", "http://x:abc", "http://x:99999", "http://[::1", "http://...", "http://x?a=1", "http://x#a", "ftp://x",
     "http://x\n", "http://" + "a" * 70_000],
)  # fmt: skip
def test_what_is_no_url_of_an_engine_is_said_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^url='.*': must look like http://host:port, port at most 65535"):
        LiveSource(url)


def _source(answer: Callable[[httpx.Request], httpx.Response]) -> LiveSource:
    return LiveSource("http://engine", "secret-key", transport=httpx.MockTransport(answer))


def _status(**changes: object) -> dict[str, object]:
    model = ReadModel(clock=MonotonicClock())
    TimedRun(engine_config(), model)
    return {**json.loads(model.status().model_dump_json()), **changes}


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (httpx.Response(401, json={"error": "no"}), "answers 401"),
        (httpx.Response(500), "answers 500"),
        (httpx.Response(503, json={"error": "no engine has started yet"}), "answers 503"),
        (httpx.Response(404), "is not there"),
        (httpx.Response(200, text="<html>"), "sent something else"),
        (httpx.Response(200, json={"engine_id": 3}), "wrong at"),
        (httpx.Response(307, headers={"location": "/elsewhere"}), "answers 307"),
    ],
)
def test_anything_but_an_answer_is_unavailable(reply: httpx.Response, says: str) -> None:
    with _source(lambda _: reply) as source, pytest.raises(SourceUnavailable, match=says):
        source.status()


def test_a_newer_protocol_is_refused_and_newer_fields_are_ignored() -> None:
    newer = _status(observe_version=OBSERVE_VERSION + 1)
    says = f"observe version {OBSERVE_VERSION + 1}"
    with _source(lambda _: httpx.Response(200, json=newer)) as source, pytest.raises(SourceUnavailable, match=says):
        source.status()
    with _source(lambda _: httpx.Response(200, json=_status(brand_new=1))) as source:
        assert isinstance(source.status(), EngineStatus)


def test_a_lost_engine_is_told_with_the_last_contact_and_found_again() -> None:
    replies = [httpx.Response(200, json=_status()), None, httpx.Response(200, json=_status())]

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer secret-key"
        reply = replies.pop(0)
        if reply is None:
            raise httpx.ReadTimeout("", request=request)
        return reply

    with _source(answer) as source:
        source.status()
        contact = source.last_contact_wall_s
        with pytest.raises(SourceUnavailable, match="ReadTimeout") as caught:
            source.status()
        assert caught.value.last_contact_wall_s == contact
        assert contact is not None
        source.status()
        assert source.last_contact_wall_s is not None
        assert source.last_contact_wall_s >= contact


def test_an_older_engine_that_knows_no_language_explains_in_english() -> None:
    asked: list[str] = []
    explanation = _status(rid="r", sentences=["Request r arrived."])

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.query.decode())
        if request.url.query:
            refused = {"error": "unknown parameter 'lang'", "field": "lang", "limit": "none"}
            return httpx.Response(400, json=refused)
        return httpx.Response(200, json=explanation)

    with _source(answer) as source:
        told = source.explain("r", "zh-CN")
        assert told is not None
        assert told.sentences == ("Request r arrived.",)
        assert source.explain("r") == told
    assert asked == ["lang=zh-CN", "", ""]


def test_a_bad_question_with_an_odd_body_is_still_a_bad_question() -> None:
    with (
        _source(lambda _: httpx.Response(400, text="?")) as source,
        pytest.raises(BadQuestion, match="refused with 400"),
    ):
        source.queue(limit=0)


def test_a_url_with_a_space_or_with_a_password_is_refused_and_the_password_not_quoted() -> None:
    for odd in ("http://a b", "http://a/ b", "http://a:1/\n"):
        with pytest.raises(ConfigError, match="must look like http"):
            refuse_odd(odd)
    with pytest.raises(ConfigError, match="ADMITSCOPE_API_KEY") as raised:
        refuse_odd("http://user:hidden@127.0.0.1:8000")
    assert "hidden" not in str(raised.value)
    refuse_odd("http://127.0.0.1:8000/")

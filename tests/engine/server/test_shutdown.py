"""Graceful shutdown: drain, else abort; one end per request either way, and nothing new is taken."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import httpx
import openai
import pytest

from engine.clock import MonotonicClock
from engine.config import CacheConfig, EngineConfig, ExecutorConfig
from engine.events import RecordingSink, RequestTransitioned
from engine.llm_engine import EngineRequest, LLMEngine
from engine.request import FinishReason
from engine.sampling_params import SamplingParams
from engine.server.engine_thread import EngineThread
from tests.engine.server.live import DEADLINE_S, GatedExecutor, until

SHORT = {"drain_timeout_s": 0.1}
BODY = {"model": "simulated", "prompt": "p", "ignore_eos": True}


def ask(live: Any, results: list[httpx.Response], **body: Any) -> threading.Thread:
    def run() -> None:
        results.append(httpx.post(f"{live.url}/v1/completions", json=BODY | body, timeout=DEADLINE_S))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("stream", [False, True])
def test_live_requests_are_drained(serve: Any, stream: bool) -> None:
    live = serve(step_ms=5, server={"drain_timeout_s": 20.0})
    results: list[httpx.Response] = []
    thread = ask(live, results, max_tokens=60, stream=stream)
    until(lambda: live.thread.status.running == 1, "decoding")
    live.begin_stop()
    thread.join(DEADLINE_S)
    assert results[0].status_code == 200
    assert '"finish_reason":"length"' in results[0].text
    until(lambda: live.thread.status.stopped, "the end of the thread")


@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_end_in_time_is_aborted_with_one_end(serve: Any, stream: bool) -> None:
    live = serve(step_ms=5, scheduler={"max_running_requests": 1}, server={"drain_timeout_s": 0.1})
    results: list[httpx.Response] = []
    threads = [ask(live, results, max_tokens=2000, stream=stream) for _ in range(2)]  # one decodes, one waits
    until(lambda: live.thread.status.running == 1 and live.thread.status.waiting == 1, "one decodes, one waits")
    live.begin_stop()
    for thread in threads:
        thread.join(DEADLINE_S)
    for response in results:
        if stream:
            events = [json.loads(block[6:]) for block in response.text.split("\n\n") if block.startswith("data: {")]
            assert [event["error"]["code"] for event in events if "error" in event] == ["aborted"]
            assert all(not event["choices"][0]["finish_reason"] for event in events if "choices" in event)
        else:
            assert (response.status_code, response.json()["error"]["code"]) == (503, "aborted")
    until(lambda: live.thread.status.stopped, "the end of the thread")
    assert live.engine.num_running == live.engine.num_waiting == 0


def test_the_official_client_sees_an_aborted_stream_as_an_error(serve: Any) -> None:
    live = serve(step_ms=5, server={"drain_timeout_s": 0.1})
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as client:
        stream = client.completions.create(
            model="simulated", prompt="p", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        live.begin_stop()
        with pytest.raises(openai.APIError, match="aborted: shutting_down"):
            list(stream)


def test_nothing_new_is_taken_while_draining(serve: Any) -> None:
    live = serve(make_executor=GatedExecutor, server={"drain_timeout_s": 20.0})
    live.executor.gate.clear()
    results: list[httpx.Response] = []
    thread = ask(live, results, max_tokens=3)
    until(lambda: live.executor.batches, "a step")
    live.server.servers[0].get_loop().call_soon_threadsafe(live.thread.begin_shutdown, 20.0)
    until(lambda: live.post().status_code == 503, "refusal")
    refused = live.post()
    assert refused.json()["error"]["code"] == "shutting_down"
    assert int(refused.headers["retry-after"]) >= 1
    live.executor.gate.set()
    thread.join(DEADLINE_S)
    assert results[0].status_code == 200
    until(lambda: live.http.get("/ready").json()["status"] == "stopped", "the end of the thread")


def test_a_step_that_outlasts_the_drain_keeps_no_client_waiting_and_no_request_without_an_end(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    live = serve(make_executor=GatedExecutor, scheduler={"max_running_requests": 2}, server=SHORT, step_ms=5)
    results: list[httpx.Response] = []
    threads = [ask(live, results, max_tokens=1900, stream=stream) for stream in (True, True, True, False)]
    until(lambda: live.thread.status.waiting == live.thread.status.running == 2, "two of four are served")
    live.executor.gate.clear()
    until(lambda: live.thread.status.in_step, "a step that lasts")
    live.begin_stop()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert live.thread.status.in_step, "answered while the step goes on"
    streams = [response.text for response in results if response.status_code == 200]
    assert len(streams) == 3
    for text in streams:
        assert '"code":"aborted"' in text
        assert text.endswith("data: [DONE]\n\n")
    assert [r.json()["error"]["code"] for r in results if r.status_code == 503] == ["aborted"]
    live.executor.gate.set()
    until(lambda: live.thread.status.stopped, "the end of the thread")
    ends = [e.rid for e in live.sink.events if isinstance(e, RequestTransitioned) and e.target == "finished"]
    assert len(ends) == len(set(ends)) == 4
    assert live.checker.total_violations == 0
    assert not caplog.records


def test_a_step_that_outlasts_the_grace_too_is_followed_by_the_ends_of_its_requests() -> None:
    """By the engine's clock, which jumps: the thread must not take the time for being over before it has aborted."""

    class Clock(MonotonicClock):
        ahead_ns = 0

        def now_ns(self) -> int:
            return super().now_ns() + self.ahead_ns

    config = EngineConfig(executor=ExecutorConfig(kind="simulated"), cache=CacheConfig(num_pages=64))
    clock, sink, executor = Clock(), RecordingSink(), GatedExecutor(config)
    engine = LLMEngine(config, executor=executor, clock=clock, sink=sink)
    thread = EngineThread(engine, max_queued_requests=4, max_running_requests=2, clock=clock)

    async def scene() -> list[Any]:
        thread.start(asyncio.get_running_loop())
        executor.gate.clear()
        params = SamplingParams(max_new_tokens=50, ignore_eos=True)
        reply = await thread.submit([EngineRequest(rid=f"r{i}", prompt_ids=(40 + i,), params=params) for i in range(3)])
        await asyncio.to_thread(until, lambda: executor.batches, "a step")
        stop = asyncio.ensure_future(thread.stop(0.0))
        await asyncio.sleep(0.01)
        clock.ahead_ns = 60_000_000_000
        executor.gate.set()
        await stop
        outputs = []
        while batch := await reply.batch():
            outputs += batch
        return outputs

    outputs = asyncio.run(scene())
    assert sorted(output.rid for output in outputs if output.finish is FinishReason.ABORT) == ["r0", "r1", "r2"]
    ends = [e.rid for e in sink.events if isinstance(e, RequestTransitioned) and e.target == "finished"]
    assert sorted(ends) == ["r0", "r1", "r2"]


def test_a_client_that_is_still_sending_is_cut_in_order(
    serve: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that left; nothing is cancelled under way."""
    monkeypatch.setattr("engine.server.serve._FLUSH_S", 2)
    live = serve(server=SHORT)
    with socket.create_connection(("127.0.0.1", live.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        client.sendall(b"content-length: 1000\r\n\r\n{")  # a body that does not come
        until(lambda: live.observer.received, "the request")
        live.begin_stop()
        until(lambda: live.thread.status.stopped, "the end of the thread")
        live._runner.join(DEADLINE_S)
    assert not caplog.records

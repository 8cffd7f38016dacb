"""Graceful shutdown: drain, else abort; one end per request either way, and nothing new is taken."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import openai
import pytest

from tests.engine.server.live import DEADLINE_S, GatedExecutor, until

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

"""A queue that is full or too slow, over HTTP: timeout and displacement are answers with a status (FR-45)."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest

from engine.errors import RefusalCause
from engine.events import AdmissionDecided, RequestTransitioned
from engine.request import Cause, FinishReason
from engine.server.streaming import _Wire
from tests.engine.server.live import DEADLINE_S, GatedExecutor, LiveServer, until
from tests.engine.server.raw_http import ASK, all_of, answers, connected, request

ONE_ROW = {"max_running_requests": 1}
#: Long enough for a request to be seen waiting, short enough to wait for.
TIMEOUT_S = 0.3


class Clients:
    """Requests on threads of their own, which wait for their answers."""

    def __init__(self, live: LiveServer, pool: ThreadPoolExecutor) -> None:
        self._live = live
        self._pool = pool

    def ask(self, prompt: str, *, stream: bool = False, **body: Any) -> Future[httpx.Response]:
        body = {"model": "simulated", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "stream": stream} | body
        return self._pool.submit(httpx.post, f"{self._live.url}/v1/completions", json=body, timeout=DEADLINE_S)

    def ask_and_wait(self, waiting: int, prompt: str, **body: Any) -> Future[httpx.Response]:
        """Returns once so many wait in the engine."""
        future = self.ask(prompt, **body)
        until(lambda: self._live.thread.status.waiting == waiting, f"{waiting} waiting")
        return future


@pytest.fixture
def clients() -> Any:
    with ThreadPoolExecutor(16) as pool:
        yield lambda live: Clients(live, pool)


def hurry(live: LiveServer) -> None:
    """From here on steps take no time: what had to run for a while may end."""
    live.executor._step_s = 0.0


def causes(live: LiveServer) -> Counter[Cause]:
    return Counter(e.cause for e in live.sink.events if isinstance(e, RequestTransitioned) and e.target == "finished")


def assert_unavailable(answer: httpx.Response, code: str) -> None:
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/json", "a status, not an event of a stream"
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == code


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_fr_45_a_request_that_waits_too_long_gets_a_503(serve: Any, clients: Any, stream: bool, n: int) -> None:
    live = serve(make_executor=GatedExecutor, scheduler=ONE_ROW, server={"queue_timeout_s": TIMEOUT_S}, step_ms=20)
    ask = clients(live)
    runs = ask.ask("runs", max_tokens=70)
    until(lambda: live.thread.status.running == 1, "the row is taken")
    late = ask.ask("waits", stream=stream, n=n).result(DEADLINE_S)
    assert_unavailable(late, "queue_timeout")
    assert runs.result(DEADLINE_S).status_code == 200
    live.assert_nothing_held()
    assert causes(live) == {Cause.QUEUE_TIMEOUT: n, Cause.LENGTH: 1}
    admitted = {e.rid for e in live.sink.events if isinstance(e, AdmissionDecided) and e.selected_extend}
    assert len(admitted) == 1, "no work for who was refused"
    assert live.post(max_tokens=1).status_code == 200


def test_fr_45_who_is_admitted_in_time_is_answered_however_long_it_runs(serve: Any, clients: Any) -> None:
    live = serve(server={"queue_timeout_s": 0.5}, step_ms=20)
    began = time.monotonic()
    answer = clients(live).ask("runs", stream=True, max_tokens=40).result(DEADLINE_S)
    assert time.monotonic() - began > 0.5
    assert answer.status_code == 200
    assert answer.text.count("data: ") >= 2
    live.assert_nothing_held()


@pytest.mark.parametrize("stream", [False, True])
def test_fr_45_a_full_queue_makes_room_for_the_more_important(serve: Any, clients: Any, stream: bool) -> None:
    """The least important leaves with a 503 of its own; an equal newcomer gets the usual 429."""
    live = serve(
        make_executor=GatedExecutor,
        scheduler=ONE_ROW | {"enable_priority_scheduling": True, "schedule_policy": "fcfs"},
        server={"max_queued_requests": 2},
        step_ms=20,
    )
    ask = clients(live)
    runs = ask.ask("runs", max_tokens=600, priority=5)
    until(lambda: live.thread.status.running == 1, "the row is taken")
    high = ask.ask_and_wait(1, "high", priority=7, stream=stream)
    low = ask.ask_and_wait(2, "low", priority=3, stream=stream)
    equal = ask.ask("equal", priority=3, stream=stream).result(DEADLINE_S)
    assert (equal.status_code, equal.json()["error"]["code"]) == (429, "queue_full")
    mid = ask.ask("mid", priority=4, stream=stream)
    assert_unavailable(low.result(DEADLINE_S), "displaced")
    assert not high.done()
    hurry(live)
    assert [future.result(DEADLINE_S).status_code for future in (runs, high, mid)] == [200, 200, 200]
    live.assert_nothing_held()
    assert causes(live) == {Cause.LENGTH: 3, Cause.DISPLACED: 1}
    assert live.observer.rejected == {RefusalCause.QUEUE_FULL: 1}
    assert live.observer.received == 5


def test_fr_45_who_can_never_be_taken_displaces_nobody(serve: Any, clients: Any) -> None:
    live = serve(
        make_executor=GatedExecutor,
        scheduler=ONE_ROW | {"enable_priority_scheduling": True, "schedule_policy": "fcfs"},
        server={"max_queued_requests": 1},
        cache={"num_pages": 16, "page_size": 16},
        step_ms=20,
    )
    ask = clients(live)
    runs = ask.ask("runs", max_tokens=150)
    until(lambda: live.thread.status.running == 1, "the row is taken")
    low = ask.ask_and_wait(1, "low", priority=1)
    refused = ask.ask("x" * 400, priority=9).result(DEADLINE_S)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "never_fits")
    hurry(live)
    assert [future.result(DEADLINE_S).status_code for future in (runs, low)] == [200, 200]
    live.assert_nothing_held()


def test_fr_45_a_call_of_several_choices_displaces_as_many_or_none(serve: Any, clients: Any) -> None:
    live = serve(
        make_executor=GatedExecutor,
        scheduler=ONE_ROW | {"enable_priority_scheduling": True, "schedule_policy": "fcfs"},
        server={"max_queued_requests": 3},
        step_ms=20,
    )
    ask = clients(live)
    runs = ask.ask("runs", max_tokens=600)
    until(lambda: live.thread.status.running == 1, "the row is taken")
    first = ask.ask_and_wait(1, "a", priority=1)
    second = ask.ask_and_wait(2, "b", priority=5)
    third = ask.ask_and_wait(3, "c", priority=1)
    too_many = ask.ask("many", priority=3, n=3).result(DEADLINE_S)
    assert too_many.status_code == 429, "two places would have to become three"
    fits = ask.ask("pair", priority=3, n=2)
    for gone in (first, third):
        assert_unavailable(gone.result(DEADLINE_S), "displaced")
    hurry(live)
    assert [future.result(DEADLINE_S).status_code for future in (runs, second, fits)] == [200, 200, 200]
    assert len(fits.result().json()["choices"]) == 2
    live.assert_nothing_held()


def test_fr_45_everybody_gets_one_answer_whatever_limit_speaks(serve: Any, clients: Any) -> None:
    """Full queue, timeout and displacement at once, streaming or not: as many answers as clients, and all add up."""
    live = serve(
        make_executor=GatedExecutor,
        scheduler=ONE_ROW | {"enable_priority_scheduling": True, "schedule_policy": "fcfs"},
        server={"max_queued_requests": 2, "queue_timeout_s": TIMEOUT_S},
        step_ms=20,
    )
    ask = clients(live)
    futures = [ask.ask(f"p{i}", stream=i % 2 == 0, priority=i % 3, max_tokens=40) for i in range(12)]
    answers = [future.result(DEADLINE_S) for future in futures]
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) <= {200, 429, 503}
    assert statuses[200] >= 1
    for answer in answers:
        if answer.status_code != 200:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] in {"queue_full", "queue_timeout", "displaced"}
    live.assert_nothing_held()
    ended = causes(live)
    assert sum(ended.values()) + live.observer.rejected.total() == live.observer.received == 12
    assert ended[Cause.LENGTH] == statuses[200]
    assert ended[Cause.QUEUE_TIMEOUT] + ended[Cause.DISPLACED] == statuses[503]


def test_fr_45_a_client_that_leaves_while_its_refusal_is_on_its_way_counts_once(serve: Any) -> None:
    live = serve(make_executor=GatedExecutor, scheduler=ONE_ROW, server={"queue_timeout_s": 0.3}, step_ms=20)
    body = {"model": "simulated", "prompt": "p", "max_tokens": 50, "ignore_eos": True, "stream": True}
    with live.http.stream("POST", "/v1/completions", json=body):
        for wait_s in (0.05, 0.29, 0.3, 0.31):
            with suppress(httpx.TimeoutException):
                httpx.post(f"{live.url}/v1/completions", json=body, timeout=wait_s)
    until(lambda: not live.snapshot().requests, "all gone")
    live.assert_nothing_held()
    ends = Counter(e.rid for e in live.sink.events if isinstance(e, RequestTransitioned) and e.target == "finished")
    assert set(ends.values()) == {1}
    assert len(ends) == 5


def test_a_stream_of_several_choices_goes_on_when_one_is_refused_later(serve: Any, clients: Any) -> None:
    """Something was sent already: the refused choice ends with an error event, the other with its finish reason."""
    live = serve(make_executor=GatedExecutor, scheduler=ONE_ROW, server={"queue_timeout_s": 0.3}, step_ms=20)
    answer = clients(live).ask("two", stream=True, n=2, max_tokens=40).result(DEADLINE_S)
    assert answer.status_code == 200
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert [e["error"]["code"] for e in events if "error" in e] == ["queue_timeout"]
    finishes = [e["choices"][0]["finish_reason"] for e in events if "choices" in e]
    assert finishes[-1] == FinishReason.LENGTH.value
    live.assert_nothing_held()


def test_nothing_is_written_into_a_refusal_that_has_a_length(
    serve: Any, clients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream was asked for; a half-closed client is asked for a sign of life while its refusal is on the way."""
    live = serve(make_executor=GatedExecutor, scheduler=ONE_ROW, server={"queue_timeout_s": TIMEOUT_S}, step_ms=20)
    start = _Wire.start
    probed: list[int] = []

    async def start_and_probe(self: _Wire, status: int, headers: dict[str, str]) -> None:
        await start(self, status, headers)
        if status == 503:
            for connection in live.server.server_state.connections:
                if connection._half_closed:
                    probed.append(status)
                    connection._probe(0)

    monkeypatch.setattr(_Wire, "start", start_and_probe)
    runs = clients(live).ask("runs", max_tokens=70)
    until(lambda: live.thread.status.running == 1, "the row is taken")
    with connected(live) as connection:
        connection.sendall(request(ASK | {"stream": True}))
        connection.shutdown(socket.SHUT_WR)
        data = all_of(connection)
    assert probed == [503]
    status, body = answers(data)[-1]
    assert (status, json.loads(body)["error"]["code"]) == (503, "queue_timeout")
    assert runs.result(DEADLINE_S).status_code == 200
    live.assert_nothing_held()

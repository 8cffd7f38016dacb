"""Clients that have said all they will: the sending side is closed, and the answer is still wanted, or not."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest

from tests.engine.server.live import GatedExecutor, until
from tests.engine.server.raw_http import ASK, all_of, answers, connected, request
from tests.engine.server.test_disconnects import BODY, ends_of


@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_client_gets_its_answer(serve: Any, stream: bool) -> None:
    live = serve(step_ms=2)
    with connected(live) as connection:
        connection.sendall(request(ASK | {"max_tokens": 60, "ignore_eos": True, "stream": stream}))
        connection.shutdown(socket.SHUT_WR)
        data = all_of(connection)
    *interim, (status, body) = answers(data)
    assert {status for status, _ in interim} <= {102}
    assert status == 200
    if stream:
        events = [line for line in body.split(b"\n") if line.startswith(b"data: {")]
        text = "".join(json.loads(line.removeprefix(b"data: "))["choices"][0]["text"] for line in events)
        assert b"data: [DONE]" in body
    else:
        text = json.loads(body)["choices"][0]["text"]
    assert len(text) == 60
    assert live.observer.disconnects == 0
    live.assert_nothing_held()
    until(lambda: len(live.server.server_state.connections) <= 1, "the connection was closed")


def test_a_half_closed_client_in_the_queue_gets_its_answer(serve: Any) -> None:
    live = serve(make_executor=GatedExecutor, scheduler={"max_running_requests": 1})
    live.executor.gate.clear()
    with connected(live) as first, connected(live) as second:
        for connection in (first, second):
            connection.sendall(request(ASK | {"stream": connection is second}))
            connection.shutdown(socket.SHUT_WR)
        until(lambda: live.observer.received == 2, "both arrived")
        time.sleep(0.4)  # several probes fall into this time
        live.executor.gate.set()
        assert answers(all_of(first))[-1][0] == 200
        assert b"data: [DONE]" in all_of(second)
    assert live.observer.disconnects == 0
    live.assert_nothing_held()


def test_requests_in_a_row_before_the_half_close_are_all_answered(serve: Any) -> None:
    live = serve(step_ms=2)
    with connected(live) as connection:
        connection.sendall(request(ASK) + request(ASK) + request(ASK))
        connection.shutdown(socket.SHUT_WR)
        statuses = [status for status, _ in answers(all_of(connection)) if status != 102]
    assert statuses == [200, 200, 200]
    live.assert_nothing_held()


def test_half_a_request_before_the_half_close_is_no_request(serve: Any) -> None:
    live = serve()
    with connected(live) as connection:
        connection.sendall(request(ASK)[:-1])
        connection.shutdown(socket.SHUT_WR)
        assert all_of(connection) == b""
    until(lambda: live.observer.disconnects == 1, "disconnect seen")
    live.assert_nothing_held()


@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_client_that_then_leaves_is_noticed(serve: Any, stream: bool) -> None:
    live = serve(make_executor=GatedExecutor)
    live.executor.gate.clear()
    with connected(live) as connection:
        connection.sendall(request(BODY | {"stream": stream}))
        connection.shutdown(socket.SHUT_WR)
        until(lambda: live.observer.received == 1, "arrival")
        time.sleep(0.1)
    until(lambda: live.observer.disconnects == 1, "the server's notice")
    live.executor.gate.set()
    until(lambda: ends_of(live), "the end of the request")
    assert list(ends_of(live).values()) == [["abort"]]
    live.assert_nothing_held()


def test_a_client_of_http_1_0_that_closes_has_left(serve: Any) -> None:
    live = serve(step_ms=2)
    with connected(live) as connection:
        connection.sendall(request(BODY, version="1.0"))
        connection.shutdown(socket.SHUT_WR)
        assert all_of(connection) == b""
    until(lambda: ends_of(live), "the end of the request")
    assert list(ends_of(live).values()) == [["abort"]]
    live.assert_nothing_held()

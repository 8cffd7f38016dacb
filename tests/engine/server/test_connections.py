"""Connections at their limits, over real sockets: heads, time, places, half-closed and slow clients."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.config import ServerConfig
from engine.server.observer import CutCause
from tests.engine.server.live import DEADLINE_S, GatedExecutor, until
from tests.engine.server.test_disconnects import BODY, ends_of, sent_of

ASK = {"model": "simulated", "prompt": "p", "max_tokens": 5, "temperature": 0}
#: Some 1,500 bytes for each token: more than the kernel buffers for a connection.
WORDY = {
    "model": "simulated",
    "messages": [{"role": "user", "content": "x"}],
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 20,
}


@contextlib.contextmanager
def connected(live: Any, *, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    with socket.socket() as connection:
        connection.settimeout(DEADLINE_S)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(("127.0.0.1", live.port))
        yield connection


def request(body: dict[str, Any], *, version: str = "1.1", extra: str = "") -> bytes:
    content = json.dumps(body).encode()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    head = f"POST {path} HTTP/{version}\r\nhost: localhost\r\n{extra}content-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def all_of(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    parts = []
    while part := connection.recv(65_536):
        parts.append(part)
    return b"".join(parts)


def answers(data: bytes) -> list[tuple[int, bytes]]:
    """(status, what follows its head) of each answer in `data`, the interim ones too."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        length = next(
            (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), 0
        )
        body = data if b"chunked" in head else data[:length]
        found.append((status, body))
        data = data[len(body) :]
    return found


def code_of(data: bytes) -> tuple[int, str]:
    """Status and error code of the one answer in `data`."""
    ((status, body),) = answers(data)
    return status, json.loads(body)["error"]["code"]


def connections_of(live: Any) -> list[Any]:
    return list(live.server.server_state.connections)


# -- heads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 3000 + b"\r\n\r\n",
        b"GET /health?" + b"a" * 3000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"".join(b"h%d: 1\r\n" % i for i in range(2000)) + b"\r\n",
        b"GET /" + b"a" * 3_000_000,
        b"GET / HTTP/1.1\r\nx: " + b"a" * 3_000_000,
    ],
    ids=["one header", "query", "many headers", "endless line", "endless header"],
)
def test_a_head_beyond_the_limit_is_431(serve: Any, head: bytes) -> None:
    live = serve(server={"max_header_bytes": 2048})
    with connected(live) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(head)
        with contextlib.suppress(ConnectionResetError):
            data = all_of(connection)
            assert not data or code_of(data) == (431, "headers_too_large")
    assert live.observer.cuts == {CutCause.HEAD_TOO_LARGE: 1}
    assert live.post(max_tokens=1).status_code == 200


def test_a_head_below_the_limit_is_read(serve: Any) -> None:
    live = serve(server={"max_header_bytes": 2048})
    assert live.http.get("/health", headers={"x": "a" * 1500}).status_code == 200
    refused = live.http.get("/health", headers={"x": "a" * 2100})
    assert (refused.status_code, refused.json()["error"]["code"]) == (431, "headers_too_large")
    assert "2048" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
    ids=["zeros", "words", "TLS"],
)
def test_what_is_no_http_is_told_so_and_cut(serve: Any, data: bytes) -> None:
    live = serve()
    with connected(live) as connection:
        connection.sendall(data)
        assert code_of(all_of(connection)) == (400, "invalid_http")
    assert live.observer.cuts == {CutCause.NO_HTTP: 1}


def test_a_broken_chunk_in_a_body_ends_that_request_only(serve: Any) -> None:
    live = serve()
    with connected(live) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n"
        )
        assert code_of(all_of(connection)) == (400, "invalid_http")
    until(lambda: live.observer.disconnects == 1, "disconnect seen")
    assert live.post(max_tokens=1).status_code == 200
    live.assert_nothing_held()


# -- time --------------------------------------------------------------------------------------------------------------


def test_a_head_that_does_not_come_is_408_and_silence_is_closed(serve: Any) -> None:
    live = serve(server={"receive_timeout_s": 0.2})
    with connected(live) as silent, connected(live) as slow:
        slow.sendall(b"GET /health HT")
        assert code_of(all_of(slow)) == (408, "request_timeout")
        assert all_of(silent) == b""
    assert live.observer.cuts == {CutCause.HEAD_LATE: 2}


def test_the_second_head_of_a_connection_has_its_time_too(serve: Any) -> None:
    live = serve(server={"receive_timeout_s": 0.2})
    with connected(live) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /health HTTP/1.1\r\nhost: local")
        statuses = [status for status, _ in answers(all_of(connection))]
    assert statuses == [200, 408]


def test_a_body_that_does_not_come_is_408(serve: Any) -> None:
    live = serve(server={"receive_timeout_s": 0.2})
    with connected(live) as connection:
        connection.sendall(request(ASK)[:-3])
        assert code_of(all_of(connection)) == (408, "request_timeout")
    assert live.observer.cuts == {CutCause.BODY_LATE: 1}
    assert live.observer.rejected.total() == 1
    live.assert_nothing_held()


def test_time_does_not_run_while_an_answer_is_computed(serve: Any) -> None:
    live = serve(step_ms=20, server={"receive_timeout_s": 0.2})
    assert live.post(max_tokens=40, ignore_eos=True).status_code == 200
    assert not live.observer.cuts


def test_an_idle_connection_outlives_what_clients_keep(serve: Any) -> None:
    """httpx, and with it OpenAI's client, keeps an idle connection for 5 s: a server that does, too, races with it."""
    live = serve(server={"keep_alive_s": 1})
    assert live.server.config.timeout_keep_alive == 1
    with connected(live) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert [status for status, _ in answers(all_of(connection))] == [200]
    assert not live.observer.cuts
    assert ServerConfig().keep_alive_s > 60


# -- places ------------------------------------------------------------------------------------------------------------


def test_one_connection_too_many_is_503_and_places_come_back(serve: Any) -> None:
    live = serve(server={"max_connections": 3})
    with contextlib.ExitStack() as held:
        for _ in range(3):
            held.enter_context(connected(live)).sendall(b"GET / HT")
        until(lambda: not any(c.is_idle for c in connections_of(live)) and len(connections_of(live)) == 3, "all busy")
        with connected(live) as late:
            late.sendall(request(ASK))
            assert code_of(all_of(late)) == (503, "too_many_connections")
        with connected(live) as probe:
            probe.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            ((status, _),) = answers(all_of(probe))
            assert status == 200
    assert live.observer.cuts == {CutCause.TOO_MANY: 2}
    assert live.observer.received == 0
    until(lambda: not live.server.server_state.connections, "places given back")
    assert live.post(max_tokens=1).status_code == 200


def test_an_idle_connection_gives_way_the_one_that_was_idle_for_longest(serve: Any) -> None:
    live = serve(server={"max_connections": 2})
    with connected(live) as old, connected(live) as recent:
        for connection in (old, recent):
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
            data = b""
            while not data.endswith(b"]}"):
                data += connection.recv(4096)
        with connected(live) as new:
            new.sendall(request(ASK, extra="connection: close\r\n"))
            assert [status for status, _ in answers(all_of(new))] == [200]
        assert old.recv(1) == b""
        recent.sendall(request(ASK, extra="connection: close\r\n"))
        assert [status for status, _ in answers(all_of(recent))] == [200]
    assert live.observer.cuts == {CutCause.IDLE: 1}


def test_a_crowd_is_cut_without_a_word(serve: Any) -> None:
    live = serve(server={"max_connections": 1})
    with contextlib.ExitStack() as held:
        held.enter_context(connected(live)).sendall(b"GET / HT")
        until(lambda: [c.is_idle for c in connections_of(live)] == [False], "a busy one")
        crowd = [held.enter_context(connected(live)) for _ in range(90)]
        until(lambda: live.observer.cuts[CutCause.TOO_MANY] == 90, "the crowd was counted")
        closed = 0
        for connection in crowd:
            connection.settimeout(0.01)
            try:
                closed += connection.recv(1) == b""
            except TimeoutError:
                pass
            except ConnectionResetError:
                closed += 1
        assert 20 <= closed <= 26
    until(lambda: not live.server.server_state.connections, "places given back")
    assert live.post(max_tokens=1).status_code == 200


# -- a client that does not read ---------------------------------------------------------------------------------------


def test_a_client_that_reads_a_byte_a_minute_is_cut_counted_and_holds_up_nobody(serve: Any) -> None:
    live = serve(context=8192, cache={"num_pages": 600}, server={"send_timeout_s": 1.0})
    # Left alone, the kernel lets a send buffer grow to megabytes, and may then take the whole answer by itself.
    live.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    body = WORDY | {"max_tokens": 4000, "stream": True}
    with connected(live, receive_buffer=4096) as slow:
        slow.sendall(request(body))
        assert slow.recv(1) == b"H"
        # The engine is not slowed down: all tokens are computed, and their memory is given back.
        until(lambda: ends_of(live), "the end of the request")
        live.assert_nothing_held_by_the_engine()
        # Others are answered meanwhile.
        for _ in range(5):
            assert live.post(max_tokens=3).status_code == 200
        until(lambda: live.observer.cuts[CutCause.NOT_TAKEN] == 1, "the connection was cut")
        until(lambda: any(sent.disconnected for sent in sent_of(live)), "the record of the response")
        record = next(sent for sent in sent_of(live) if sent.disconnected)
    # What was buffered for it is bounded by sockets, not by the length of the answer.
    whole = len(live.post("/v1/chat/completions", **body).content)
    assert record.bytes_sent < whole
    # The time runs from when the buffer was full; the write that then waits begins with the next token, a little later.
    assert record.worst_send_ns >= 500_000_000
    assert live.observer.disconnects == 1
    live.assert_nothing_held()


def test_an_answer_that_is_not_taken_does_not_keep_its_connection(serve: Any) -> None:
    """The last byte is in the buffer, and the client does not read: closing must not wait for ever."""
    live = serve(context=8192, cache={"num_pages": 600}, server={"send_timeout_s": 0.5})
    body = WORDY | {"n": 2, "max_tokens": 2500}
    with connected(live, receive_buffer=4096) as slow:
        slow.sendall(request(body, extra="connection: close\r\n"))
        assert slow.recv(1) == b"H"
        until(lambda: live.observer.cuts[CutCause.NOT_TAKEN] == 1, "the connection was cut")
        until(lambda: not live.server.server_state.connections, "the place was given back")
    live.assert_nothing_held()


# -- a client that has said all it will --------------------------------------------------------------------------------


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


# -- hosts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:8000", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("[::1]", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("localhost:80:80", 403),
    ],
)
def test_without_a_key_only_this_machine_is_answered(serve_module: Any, shared: Any, host: str, status: int) -> None:
    """A page whose author's name points to 127.0.0.1 sends that name as the host."""
    live = shared()
    for path in ("/v1/models", "/openapi.json"):
        answer = httpx.get(live.url + path, headers={"host": host}, trust_env=False)
        assert answer.status_code == status
    assert httpx.get(live.url + "/health", headers={"host": host}, trust_env=False).status_code == 200


def test_with_a_key_any_host_is_answered(serve: Any) -> None:
    live = serve(server={"api_key": "sesame-open"})
    headers = {"host": "models.example", "authorization": "Bearer sesame-open"}
    assert httpx.get(live.url + "/v1/models", headers=headers, trust_env=False).status_code == 200

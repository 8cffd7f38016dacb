"""Connections at their limits, over real sockets: heads, time, places, half-closed and slow clients."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import pytest

from engine.config import ServerConfig
from engine.server.observer import CutCause
from tests.engine.server.live import until
from tests.engine.server.raw_http import ASK, all_of, answers, code_of, connected, request
from tests.engine.server.test_disconnects import ends_of, sent_of

#: Some 1,500 bytes for each token: more than the kernel buffers for a connection.
WORDY = {
    "model": "simulated",
    "messages": [{"role": "user", "content": "x"}],
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 20,
}


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
    # Not a second: the time runs from when the buffer was full, the write that then waits begins with a later token.
    assert record.worst_send_ns >= 1_000_000
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

"""Raw HTTP over sockets, for tests of what no well-behaved client does. Owns: connecting, asking, reading answers."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

from tests.engine.server.live import DEADLINE_S

ASK = {"model": "simulated", "prompt": "p", "max_tokens": 5, "temperature": 0}


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

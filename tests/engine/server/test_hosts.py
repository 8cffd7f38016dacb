"""Which hosts are answered: with no key only this machine's names."""

from __future__ import annotations

from typing import Any

import httpx
import pytest


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

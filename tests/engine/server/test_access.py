"""The API key, request ids, trace context, and extra routes."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import APIRouter

from engine.server.trace_context import parse_traceparent, server_span_id

KEY = "a-long-enough-key"
TRACE = f"00-{'ab' * 16}-{'cd' * 8}-01"


def extra() -> APIRouter:
    router = APIRouter()

    @router.get("/observe/number")
    async def number(n: int) -> dict[str, int]:
        return {"n": n}

    return router


@pytest.fixture(scope="module")
def locked(serve_module: Any) -> Any:
    return serve_module(server={"api_key": KEY}, routers=[extra()])


@pytest.mark.parametrize("path", ["/v1/models", "/openapi.json", "/observe/number?n=1", "/nothing"])
@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", KEY, f"bearer {KEY}x", "Bearer \xff"])
def test_every_route_wants_the_key(locked: Any, path: str, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    response = locked.http.get(path, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_generation_wants_the_key_and_takes_it(locked: Any) -> None:
    body = {"model": "simulated", "prompt": "a", "max_tokens": 1}
    assert locked.http.post("/v1/completions", json=body).status_code == 401
    assert locked.observer.received == 0
    headers = {"authorization": f"Bearer {KEY}"}
    assert locked.http.post("/v1/completions", json=body, headers=headers).status_code == 200


@pytest.mark.parametrize("header", [f"bearer {KEY}", f"BEARER {KEY}", f"Bearer  {KEY}"])
def test_the_scheme_is_read_as_http_reads_it(locked: Any, header: str) -> None:
    assert locked.http.get("/v1/models", headers={"authorization": header}).status_code == 200


@pytest.mark.parametrize("header", [f"Basic {KEY}", f"Bearer {KEY.upper()}", f"Bearer{KEY}"])
def test_another_scheme_or_case_of_the_key_is_refused(locked: Any, header: str) -> None:
    assert locked.http.get("/v1/models", headers={"authorization": header}).status_code == 401


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/docs/oauth2-redirect", "/debug", "/metrics"])
def test_there_are_no_pages_for_developers(locked: Any, path: str) -> None:
    assert locked.http.get(path).status_code == 401
    assert locked.http.get(path, headers={"authorization": f"Bearer {KEY}"}).status_code == 404


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", "Bearer wrong"), ("authorization", f"Bearer {KEY}")],
        [("authorization", f"Bearer {KEY}, Bearer wrong")],
        [("authorization", b"Bearer " + KEY.encode() + b"\xe4")],
        [("authorization", f"Bearer {KEY[:-1]}")],
        [("authorization", "Bearer " + "a" * 10_000)],
        [("x-api-key", KEY)],
        [("cookie", f"authorization=Bearer {KEY}")],
    ],
    ids=["second of two", "two in one", "a byte more", "a byte less", "long", "another header", "cookie"],
)
def test_only_the_one_key_in_its_one_place_opens(locked: Any, headers: list[tuple[str, Any]]) -> None:
    response = locked.http.get("/v1/models", headers=[(name, value) for name, value in headers])
    assert response.status_code == 401
    assert locked.http.get(f"/v1/models?api_key={KEY}").status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_are_open(locked: Any, path: str) -> None:
    assert locked.http.get(path).status_code == 200


def test_extra_routes_are_served_and_refuse_in_the_same_shape(locked: Any) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    assert locked.http.get("/observe/number?n=3", headers=headers).json() == {"n": 3}
    response = locked.http.get("/observe/number?n=x", headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    assert "/observe/number" in locked.http.get("/openapi.json", headers=headers).json()["paths"]


@pytest.fixture(scope="module")
def live(serve_module: Any) -> Any:
    return serve_module()


def ask(live: Any, **headers: str) -> Any:
    body = {"model": "simulated", "prompt": "a", "max_tokens": 1}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return live.http.post("/v1/completions", json=body, headers=named)


def arrival(live: Any, response: Any) -> Any:
    rid = response.json()["id"]
    return next(e for e in live.sink.events if type(e).__name__ == "RequestArrived" and e.rid == rid)


def test_trace_context_is_carried_and_answered(live: Any) -> None:
    response = ask(live, traceparent=TRACE)
    event = arrival(live, response)
    assert (event.trace_id, event.parent_span_id) == ("ab" * 16, "cd" * 8)
    version, trace_id, span_id, flags = response.headers["traceparent"].split("-")
    assert (version, trace_id, flags) == ("00", "ab" * 16, "01")
    assert span_id == server_span_id(event.rid) != "cd" * 8


@pytest.mark.parametrize(
    "value",
    ["", "garbage", TRACE.upper(), f"00-{'0' * 32}-{'cd' * 8}-01", f"ff-{'ab' * 16}-{'cd' * 8}-01", TRACE + "-x"],
)
def test_a_malformed_traceparent_counts_as_absent(live: Any, value: str) -> None:
    response = ask(live, traceparent=value)
    assert response.status_code == 200
    event = arrival(live, response)
    assert event.parent_span_id == ""
    assert len(event.trace_id) == 32
    assert parse_traceparent(response.headers["traceparent"]) == (event.trace_id, server_span_id(event.rid), "00")


def test_a_later_version_of_traceparent_may_say_more() -> None:
    assert parse_traceparent(f"01-{'ab' * 16}-{'cd' * 8}-01-more") == ("ab" * 16, "cd" * 8, "01")


@pytest.mark.parametrize(("sent", "echoed"), [("my-id_1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False)])
def test_request_ids_are_echoed_when_well_formed(live: Any, sent: str, echoed: bool) -> None:
    response = ask(live, x_request_id=sent)
    assert (response.headers["x-request-id"] == sent) == echoed
    assert sent not in response.json()["id"]  # never a key inside


def test_refusals_carry_ids_too(live: Any) -> None:
    response = live.http.post("/v1/completions", content=b"{", headers={"x-request-id": "r1", "traceparent": TRACE})
    assert response.status_code == 400
    assert response.headers["x-request-id"] == "r1"
    assert response.headers["traceparent"].startswith(f"00-{'ab' * 16}-")

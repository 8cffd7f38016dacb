"""Faults seen in public serving engines, on the HTTP side: FR-25, FR-40 to FR-45. Named by their entries."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from engine.errors import RefusalCause
from tests.engine.server.live import DEADLINE_S, GatedExecutor, ScriptedExecutor, until

EOS = 0


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream; asserts its framing."""
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def scripted(shared: Any, script: list[int], **options: Any) -> Any:
    """A server whose model says `script`."""
    live = shared(make_executor=ScriptedExecutor, **options)
    live.executor.script = script
    return live


# --- FR-25 ------------------------------------------------------------------------------------------------------------


def test_fr_25_a_live_duplicate_of_a_client_id_is_served_under_its_own_id(serve: Any) -> None:
    live = serve(make_executor=GatedExecutor)
    live.executor.gate.clear()
    headers = {"x-request-id": "same-id", "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    answers: list[httpx.Response] = []

    def ask(prompt: str) -> None:
        body = {"model": "simulated", "prompt": prompt, "max_tokens": 20, "temperature": 0}
        answers.append(httpx.post(f"{live.url}/v1/completions", json=body, headers=headers, timeout=DEADLINE_S))

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in ("first", "second!")]
    for thread in threads:
        thread.start()
    until(lambda: live.thread.open_replies == 2, "both live at once")
    live.executor.gate.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert {answer.headers["x-request-id"] for answer in answers} == {"same-id"}
    assert len({answer.json()["id"] for answer in answers}) == 2
    # Nothing crosses over: each answer belongs to its prompt.
    by_id = {answer.json()["id"]: answer.json()["usage"]["prompt_tokens"] for answer in answers}
    arrived = [event for event in live.sink.events if type(event).__name__ == "RequestArrived"]
    assert {event.rid: event.prompt_len for event in arrived} == by_id
    assert sorted(by_id.values()) == [5, 7]
    # One trace, two spans of ours.
    assert {event.trace_id for event in arrived} == {"ab" * 16}
    assert {event.parent_span_id for event in arrived} == {"cd" * 8}
    assert len({answer.headers["traceparent"] for answer in answers}) == 2
    live.assert_nothing_held()


def test_fr_25_an_id_is_reused_after_an_end_and_after_a_cancel(serve: Any) -> None:
    live = serve(step_ms=5)
    headers = {"x-request-id": "again"}
    body = {"model": "simulated", "prompt": "p", "max_tokens": 500, "stream": True, "ignore_eos": True}
    with live.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        next(response.iter_raw())
    for _ in range(2):
        answer = live.http.post("/v1/completions", json=body | {"stream": False, "max_tokens": 3}, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == "again"
    live.assert_nothing_held()


# --- FR-40 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "options", ["absent", {}, {"include_usage": False}, {"include_usage": None}, {"include_usage": True}]
)
def test_fr_40_usage_comes_once_at_the_end_and_only_when_asked_for(
    shared: Any, path: str, n: int, options: Any
) -> None:
    live = shared()
    ask = {"max_tokens": 9, "n": n, "seed": 5, "ignore_eos": True}
    whole = live.post(path, **ask).json()
    extra = {} if options == "absent" else {"stream_options": options}
    events = events_of(live.post(path, stream=True, **ask, **extra))
    if options != "absent" and options.get("include_usage"):
        *earlier, last = events
        assert last["choices"] == []
        assert last["usage"] == whole["usage"] | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
        assert all(event["usage"] is None and event["choices"] for event in earlier)
        assert last["usage"]["completion_tokens"] == 9 * n
    else:
        assert all("usage" not in event and event["choices"] for event in events)


def test_fr_40_a_cancelled_stream_sends_no_usage_and_the_record_has_the_bytes(serve: Any) -> None:
    live = serve(step_ms=5)
    body = {"model": "simulated", "prompt": "p", "max_tokens": 900, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with live.http.stream("POST", "/v1/completions", json=body) as response:
        first = next(response.iter_raw())
    assert b'"usage":null' in first
    until(lambda: [e for e in live.sink.events if type(e).__name__ == "ResponseSent"], "record of the response")
    sent = next(event for event in live.sink.events if type(event).__name__ == "ResponseSent")
    assert sent.disconnected
    assert sent.bytes_sent >= len(first)
    live.assert_nothing_held()


# --- FR-41 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "status"),
    [(128, 1, 400), (129, 1, 400), (10_000, 1, 400), (128, None, 400), (127, 1, 200), (120, 8, 200), (120, 9, 400)],
)
def test_fr_41_overflow_is_a_400_before_any_byte(
    serve: Any, prompt_len: int, max_tokens: int | None, status: int, stream: bool
) -> None:
    live = serve(context=128)
    prompt = [33 + i % 90 for i in range(prompt_len)]
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    response = live.post(prompt=prompt, stream=stream, **limit)
    assert response.status_code == status
    if status == 400:
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert str(prompt_len) in error["message"]
        assert "128" in error["message"]
        assert error == live.post(prompt=prompt, stream=not stream, **limit).json()["error"]
        assert live.engine.work_steps == 0
        assert live.observer.rejected == {RefusalCause.TOO_LONG: 2}


def test_fr_41_the_official_client_does_not_retry_an_overflow(serve: Any) -> None:
    live = serve(context=128)
    with (
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=5) as client,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        client.chat.completions.create(model="simulated", messages=[{"role": "user", "content": "x" * 300}])
    assert caught.value.code == "context_length_exceeded"
    assert live.observer.received == 1


def test_fr_41_absent_max_tokens_takes_what_the_context_has(serve: Any) -> None:
    live = serve(context=64)
    completion = live.post(prompt=[40] * 60, ignore_eos=True).json()
    assert completion["usage"]["completion_tokens"] == 4  # 16 by default, clipped to the room
    assert live.post(prompt=[40] * 8, ignore_eos=True).json()["usage"]["completion_tokens"] == 16
    chat = live.post("/v1/chat/completions", ignore_eos=True).json()
    assert chat["usage"]["total_tokens"] == 64
    assert chat["choices"][0]["finish_reason"] == "length"


# --- FR-42 ------------------------------------------------------------------------------------------------------------

A = ord("a")


def combination(chunked: bool, mixed: bool, overlap: bool = False) -> dict[str, Any]:
    return {
        "overlap": overlap,
        "scheduler": {
            "max_running_requests": 2,
            "chunked_prefill_size": 16 if chunked else None,
            "enable_mixed_chunk": mixed,
        },
        "server": {"max_queued_requests": 16},
    }


@pytest.mark.parametrize(("chunked", "mixed"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("script", "ask", "text", "tokens", "finish"),
    [
        pytest.param([A], {"max_tokens": 1}, "a", 1, "length", id="one"),
        pytest.param([A], {"max_tokens": 2}, "aa", 2, "length", id="two"),
        pytest.param([A], {}, "a" * 16, 16, "length", id="absent"),
        pytest.param([EOS], {"max_tokens": 5}, "", 1, "stop", id="EOS first"),
        pytest.param([EOS], {"max_tokens": 1}, "", 1, "stop", id="EOS first and last"),
        pytest.param([EOS, A], {"max_tokens": 3, "ignore_eos": True}, "aa", 3, "length", id="ignore EOS"),
        pytest.param([A, EOS, A, A, A, EOS], {"max_tokens": 9, "min_tokens": 5}, "aaaa", 6, "stop", id="min_tokens"),
        pytest.param([A, 98, 99], {"max_tokens": 9, "stop_token_ids": [98]}, "a", 2, "stop", id="stop token"),
        pytest.param(
            [A, 98, 99],
            {"max_tokens": 9, "stop_token_ids": [98], "include_stop_str_in_output": True},
            "ab",
            2,
            "stop",
            id="stop token included",
        ),
    ],
)
def test_fr_42_max_tokens_at_its_edges(
    shared: Any,
    script: list[int],
    ask: dict[str, Any],
    text: str,
    tokens: int,
    finish: str,
    chunked: bool,
    mixed: bool,
    overlap: bool,
) -> None:
    live = scripted(shared, script, **combination(chunked, mixed, overlap))
    prompt = [50] * 40
    alone = live.post(prompt=prompt, **ask).json()
    # Eight at once, two rows: the paths of a full engine.
    together = live.post(prompt=[[*prompt[:-1], 60 + i] for i in range(8)], **ask).json()
    for choice in [*alone["choices"], *together["choices"]]:
        assert (choice["text"], choice["finish_reason"]) == (text, finish)
    assert alone["usage"]["completion_tokens"] == tokens
    assert together["usage"]["completion_tokens"] == 8 * tokens
    streamed = events_of(live.post(prompt=prompt, stream=True, **ask))
    assert "".join(event["choices"][0]["text"] for event in streamed) == text
    assert streamed[-1]["choices"][0]["finish_reason"] == finish
    live.assert_nothing_held()


@pytest.mark.parametrize("overlap", [False, True])
def test_fr_42_one_token_needs_no_decode_step(serve: Any, overlap: bool) -> None:
    live = serve(overlap=overlap)
    live.post(max_tokens=1)
    assert live.engine.work_steps == 1


def test_fr_42_zero_is_refused(serve: Any) -> None:
    live = serve()
    response = live.post(max_tokens=0)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


# --- FR-43, FR-44 over HTTP -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ask", "expected", "finish"),
    [
        pytest.param("abcSTOPx", {"stop": ["STOP"]}, "abc", "stop", id="base"),
        pytest.param("abcSTay", {"stop": "STOP", "max_tokens": 7}, "abcSTay", "length", id="false start"),
        pytest.param("abcSTOPx", {"stop": ["STOP", "TO"]}, "abcS", "stop", id="completed first"),
        pytest.param("STOP", {"stop": ["STOP"]}, "", "stop", id="at 0"),
        pytest.param("S", {"stop": ["S"]}, "", "stop", id="in the prefill step"),
        pytest.param("abSTO", {"stop": ["STOP"], "max_tokens": 5}, "abSTO", "length", id="released at the end"),
        pytest.param("né日本x", {"stop": ["本"]}, "né日", "stop", id="multi-byte"),
        pytest.param("xSTOPy", {"stop": ["STOP"], "include_stop_str_in_output": True}, "xSTOP", "stop", id="included"),
        pytest.param("aXbXc", {"stop": ["X"], "min_tokens": 3}, "aXb", "stop", id="min_tokens"),
    ],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_fr_43_stop_strings_over_http(
    shared: Any, text: str, ask: dict[str, Any], expected: str, finish: str, overlap: bool
) -> None:
    script = list(text.encode())
    live = scripted(shared, script, overlap=overlap)
    ask = {"max_tokens": 50, "prompt": "the prompt says STOP", **ask}
    whole = live.post(**ask).json()
    assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == (expected, finish)
    events = events_of(live.post(stream=True, **ask))
    assert "".join(event["choices"][0]["text"] for event in events) == expected
    assert all(event["choices"][0]["text"] or event["choices"][0]["finish_reason"] for event in events)
    chat = live.post("/v1/chat/completions", **{key: value for key, value in ask.items() if key != "prompt"}).json()
    assert chat["choices"][0]["message"]["content"] == expected
    # Usage counts what was generated, not what was shown.
    index = len(script[: whole["usage"]["completion_tokens"]])
    assert index == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦 日本語", "مرحبا", "e\u0301\ufffdz"])
@pytest.mark.parametrize("cut", [0, 1])
def test_fr_44_streamed_characters_equal_the_whole_answer(shared: Any, text: str, cut: int) -> None:
    script = list(text.encode())
    count = len(script) - cut
    live = scripted(shared, script)
    expected = bytes(script[:count]).decode("utf-8", "replace")
    whole = live.post(max_tokens=count).json()
    events = events_of(live.post(max_tokens=count, stream=True))
    assert whole["choices"][0]["text"] == expected
    assert "".join(event["choices"][0]["text"] for event in events) == expected


# --- FR-45 ------------------------------------------------------------------------------------------------------------


def test_fr_45_twelve_clients_two_places_twelve_answers(serve: Any) -> None:
    live = serve(make_executor=GatedExecutor, scheduler={"max_running_requests": 1}, server={"max_queued_requests": 1})
    live.executor.gate.clear()

    def ask(index: int) -> httpx.Response:
        body = {"model": "simulated", "prompt": f"p{index}", "max_tokens": 4, "stream": index % 2 == 0}
        return httpx.post(f"{live.url}/v1/completions", json=body | {"ignore_eos": True}, timeout=DEADLINE_S)

    with ThreadPoolExecutor(12) as pool:
        futures = [pool.submit(ask, index) for index in range(12)]
        # The engine is inside its first step until all twelve are either turned away or inside.
        until(lambda: live.observer.rejected.total() + live.thread.open_replies == 12, "twelve at the door")
        live.executor.gate.set()
        answers = [future.result(DEADLINE_S) for future in futures]
    statuses = Counter(answer.status_code for answer in answers)
    assert statuses == {200: 2, 429: 10}
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            error = answer.json()["error"]
            assert error["code"] == "queue_full"
            assert error["max_queued_requests"] == 1
            assert int(answer.headers["x-queue-depth"]) == error["queue_depth"] >= 1
            assert answer.headers["content-type"] == "application/json"  # a status, not an event
    assert live.observer.rejected == {RefusalCause.QUEUE_FULL: 10}
    assert live.observer.received == 12
    live.assert_nothing_held()
    assert live.post(max_tokens=1).status_code == 200


def test_the_first_byte_of_a_stream_is_told_once_per_request(serve: Any) -> None:
    """So that time to first token is known when it happens, not when the response is complete."""
    live = scripted(serve, [*(ord(char) for char in "abcdefgh"), EOS])
    body = {"model": "simulated", "prompt": ["abc", "de"], "max_tokens": 8, "stream": True}
    began = time.monotonic_ns()
    events_of(live.http.post("/v1/completions", json=body))
    assert len(live.observer.first_bytes) == 2
    assert all(began < t_ns < time.monotonic_ns() for t_ns in live.observer.first_bytes.values())
    live.assert_nothing_held()

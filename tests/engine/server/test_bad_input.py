"""Issue 2, acceptance 6: every bad input gets its documented 4xx; nothing is a 500, nothing unsupported is ignored."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from engine.server.unsupported import NEUTRAL

COMPLETION = {"model": "simulated", "prompt": "hello", "max_tokens": 4}
CHAT = {"model": "simulated", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
DOC = Path(__file__).parents[3] / "docs" / "reference" / "http-errors.md"

#: what -> (fields or raw body, status, code, param)
TABLE: dict[str, tuple[dict[str, Any] | bytes, int, str, str | None]] = {
    "empty prompt": ({"prompt": ""}, 400, "invalid_value", "prompt"),
    "empty list of prompts": ({"prompt": []}, 400, "invalid_value", "prompt"),
    "empty prompt in a list": ({"prompt": ["a", ""]}, 400, "invalid_value", "prompt"),
    "empty list of ids": ({"prompt": [[1], []]}, 400, "invalid_value", "prompt"),
    "mixed prompt": ({"prompt": ["a", 1]}, 400, "invalid_value", "prompt"),
    "prompt of booleans": ({"prompt": [True]}, 400, "invalid_value", "prompt"),
    "prompt as number": ({"prompt": 5}, 400, "invalid_value", "prompt"),
    "prompt null": ({"prompt": None}, 400, "invalid_value", "prompt"),
    "token id negative": ({"prompt": [-1]}, 400, "invalid_value", "prompt"),
    "token id above the vocabulary": ({"prompt": [512]}, 400, "invalid_value", "prompt"),
    "token id huge": ({"prompt": [2**70]}, 400, "invalid_value", "prompt"),
    "max_tokens 0": ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    "max_tokens negative": ({"max_tokens": -1}, 400, "invalid_value", "max_tokens"),
    "max_tokens huge": ({"max_tokens": 10**9}, 400, "context_length_exceeded", "prompt"),
    "max_tokens beyond 64 bits": ({"max_tokens": 10**30}, 400, "invalid_value", "max_tokens"),
    "max_tokens as text": ({"max_tokens": "4"}, 400, "invalid_type", "max_tokens"),
    "max_tokens fractional": ({"max_tokens": 4.5}, 400, "invalid_type", "max_tokens"),
    "max_tokens boolean": ({"max_tokens": True}, 400, "invalid_type", "max_tokens"),
    "max_tokens said twice": ({"max_completion_tokens": 5}, 400, "invalid_value", "max_tokens"),
    "min_tokens above max_tokens": ({"min_tokens": 5}, 400, "invalid_value", "min_tokens"),
    "prompt too long": ({"prompt": "x" * 5000}, 400, "context_length_exceeded", "prompt"),
    "temperature NaN": (b'{"model":"simulated","prompt":"a","temperature":NaN}', 400, "invalid_json", None),
    "temperature Infinity": (b'{"model":"simulated","prompt":"a","temperature":-Infinity}', 400, "invalid_json", None),
    "temperature 1e999": (
        b'{"model":"simulated","prompt":"a","temperature":1e999}',
        400,
        "invalid_value",
        "temperature",
    ),
    "temperature negative": ({"temperature": -0.1}, 400, "invalid_value", "temperature"),
    "temperature above 2": ({"temperature": 2.1}, 400, "invalid_value", "temperature"),
    "temperature as text": ({"temperature": "0"}, 400, "invalid_type", "temperature"),
    "top_p 0": ({"top_p": 0}, 400, "invalid_value", "top_p"),
    "top_p above 1": ({"top_p": 1.5}, 400, "invalid_value", "top_p"),
    "top_k below -1": ({"top_k": -2}, 400, "invalid_value", "top_k"),
    "seed beyond 64 bits": ({"seed": 2**63}, 400, "invalid_value", "seed"),
    "n 0": ({"n": 0}, 400, "invalid_value", "n"),
    "n 9": ({"n": 9}, 400, "invalid_value", "n"),
    "100 stop strings": ({"stop": [str(i) for i in range(100)]}, 400, "invalid_value", "stop"),
    "empty stop string": ({"stop": ["a", ""]}, 400, "invalid_value", "stop"),
    "stop string too long": ({"stop": "x" * 1001}, 400, "invalid_value", "stop"),
    "stop of numbers": ({"stop": [1]}, 400, "invalid_type", "stop"),
    "stop token id above the vocabulary": ({"stop_token_ids": [512]}, 400, "invalid_value", "stop_token_ids"),
    "logprobs 21": ({"logprobs": 21}, 400, "invalid_value", "logprobs"),
    "logprobs boolean": ({"logprobs": True}, 400, "invalid_type", "logprobs"),
    "priority as text": ({"priority": "high"}, 400, "invalid_type", "priority"),
    "stream as text": ({"stream": "true"}, 400, "invalid_type", "stream"),
    "stream_options without stream": ({"stream_options": {}}, 400, "invalid_value", "stream_options"),
    "unknown stream option": (
        {"stream": True, "stream_options": {"a": 1}},
        400,
        "unknown_parameter",
        "stream_options.a",
    ),
    "model missing": (b'{"prompt":"a"}', 400, "missing_parameter", "model"),
    "prompt missing": (b'{"model":"simulated"}', 400, "missing_parameter", "prompt"),
    "unknown model": ({"model": "gpt-4"}, 404, "model_not_found", "model"),
    "unknown field": ({"max_token": 4}, 400, "unknown_parameter", "max_token"),
    "input_embeds": ({"input_embeds": [[0.1]]}, 400, "unsupported_parameter", "input_embeds"),
    "lora": ({"lora": "adapter"}, 400, "unsupported_parameter", "lora"),
    "echo": ({"echo": True}, 400, "unsupported_parameter", "echo"),
    "suffix": ({"suffix": "x"}, 400, "unsupported_parameter", "suffix"),
    "best_of": ({"best_of": 2}, 400, "unsupported_parameter", "best_of"),
    "best_of true is not 1": ({"best_of": True}, 400, "unsupported_parameter", "best_of"),
    "min_p above 1": ({"min_p": 1.01}, 400, "invalid_value", "min_p"),
    "min_p negative": ({"min_p": -0.1}, 400, "invalid_value", "min_p"),
    "repetition_penalty 0": ({"repetition_penalty": 0}, 400, "invalid_value", "repetition_penalty"),
    "repetition_penalty above 2": ({"repetition_penalty": 2.5}, 400, "invalid_value", "repetition_penalty"),
    "presence_penalty above 2": ({"presence_penalty": 2.1}, 400, "invalid_value", "presence_penalty"),
    "frequency_penalty below -2": ({"frequency_penalty": -2.1}, 400, "invalid_value", "frequency_penalty"),
    "frequency_penalty as text": ({"frequency_penalty": "1"}, 400, "invalid_type", "frequency_penalty"),
    "logit_bias above 100": ({"logit_bias": {"5": 101}}, 400, "invalid_value", "logit_bias"),
    "logit_bias of a word": ({"logit_bias": {"five": 1}}, 400, "invalid_value", "logit_bias"),
    "logit_bias above the vocabulary": ({"logit_bias": {"512": 1}}, 400, "invalid_value", "logit_bias"),
    "logit_bias as list": ({"logit_bias": [5, 1]}, 400, "invalid_type", "logit_bias"),
    "1025 logit biases": ({"logit_bias": {str(i): 1 for i in range(1025)}}, 400, "invalid_value", "logit_bias"),
    "response_format of made-up tokens": (
        {"response_format": {"type": "json_object"}},
        400,
        "unsupported_parameter",
        "response_format",
    ),
    "regex of made-up tokens": ({"regex": "a+"}, 400, "unsupported_parameter", "regex"),
    "unknown response_format": ({"response_format": {"type": "xml"}}, 400, "invalid_value", "response_format"),
    "response_format without type": ({"response_format": {}}, 400, "missing_parameter", "response_format.type"),
    "json_schema without a schema": (
        {"response_format": {"type": "json_schema"}},
        400,
        "missing_parameter",
        "response_format",
    ),
    "json_schema beside json_object": (
        {"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}},
        400,
        "invalid_value",
        "response_format",
    ),
    "regex and response_format": (
        {"regex": "a+", "response_format": {"type": "json_object"}},
        400,
        "invalid_value",
        "regex",
    ),
    "regex and guided_regex that differ": ({"regex": "a+", "guided_regex": "b+"}, 400, "invalid_value", "guided_regex"),
    "regex empty": ({"regex": ""}, 400, "invalid_value", "regex"),
    "regex too long": ({"regex": "a" * 65_537}, 400, "invalid_value", "regex"),
    "regex and ignore_eos": ({"regex": "a+", "ignore_eos": True}, 400, "invalid_value", "ignore_eos"),
    "regex and min_tokens": ({"regex": "a+", "min_tokens": 2}, 400, "invalid_value", "min_tokens"),
    "tools": ({"tools": [{"type": "function"}]}, 400, "unsupported_parameter", "tools"),
    "invalid JSON": (b'{"model": ', 400, "invalid_json", None),
    "empty body": (b"", 400, "invalid_json", None),
    "JSON that is no object": (b"[1]", 400, "invalid_json", None),
    "JSON nested too deep": (b"[" * 100_000, 400, "invalid_json", None),
    "integer of 5000 digits": (b'{"seed":' + b"9" * 5000 + b"}", 400, "invalid_json", None),
    "not UTF-8": (b'{"model":"simulated","prompt":"\xff"}', 400, "invalid_encoding", None),
    "UTF-16": ('{"model":"simulated"}'.encode("utf-16"), 400, "invalid_encoding", None),
    "lone surrogate": (b'{"model":"simulated","prompt":"\\ud800"}', 400, "invalid_encoding", None),
    "10 MB body": (b'{"prompt":"' + b"x" * 10_000_000 + b'"}', 413, "body_too_large", None),
}
CHAT_TABLE: dict[str, tuple[dict[str, Any], int, str, str | None]] = {
    "messages empty": ({"messages": []}, 400, "invalid_value", "messages"),
    "messages as text": ({"messages": "hello"}, 400, "invalid_type", "messages"),
    "message without content": ({"messages": [{"role": "user"}]}, 400, "missing_parameter", "messages.0.content"),
    "unknown role": ({"messages": [{"role": "pirate", "content": "a"}]}, 400, "invalid_value", "messages"),
    "tool role": ({"messages": [{"role": "tool", "content": "a"}]}, 400, "invalid_value", "messages"),
    "image part": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "invalid_value",
        "messages",
    ),
    "content as number": ({"messages": [{"role": "user", "content": 5}]}, 400, "invalid_value", "messages"),
    "named message": (
        {"messages": [{"role": "user", "content": "a", "name": "b"}]},
        400,
        "unknown_parameter",
        "messages.0.name",
    ),
    "top_logprobs without logprobs": ({"top_logprobs": 2}, 400, "invalid_value", "top_logprobs"),
    "logprobs as number": ({"logprobs": 2}, 400, "invalid_type", "logprobs"),
    "prompt in a chat": ({"prompt": "a"}, 400, "unknown_parameter", "prompt"),
    "messages too long": (
        {"messages": [{"role": "user", "content": "x" * 5000}]},
        400,
        "context_length_exceeded",
        "messages",
    ),
}


@pytest.fixture(scope="module")
def live(serve_module: Any) -> Any:
    return serve_module()


def check(response: Any, status: int, code: str, param: str | None) -> None:
    assert response.status_code == status, response.text[:300]
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    assert error["message"]
    assert len(error["message"]) < 500  # nothing a client wrote is quoted at length


@pytest.mark.parametrize("what", TABLE)
def test_bad_completion(live: Any, what: str) -> None:
    change, status, code, param = TABLE[what]
    content = change if isinstance(change, bytes) else json.dumps(COMPLETION | change).encode()
    rejected = live.observer.rejected.total()
    response = live.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    check(response, status, code, param)
    assert live.observer.rejected.total() == rejected + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("what", CHAT_TABLE)
def test_bad_chat(live: Any, what: str, stream: bool) -> None:
    change, status, code, param = CHAT_TABLE[what]
    check(live.http.post("/v1/chat/completions", json=CHAT | {"stream": stream} | change), status, code, param)


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_unsupported_fields_are_refused_unless_they_ask_for_nothing(live: Any, name: str) -> None:
    check(live.post(**{name: {"asks": "for something"}}), 400, "unsupported_parameter", name)
    for neutral in (None, *NEUTRAL[name]):
        assert live.post(max_tokens=1, **{name: neutral}).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1"]
)
def test_other_media_types_are_refused(live: Any, kind: str) -> None:
    content = json.dumps(COMPLETION).encode()
    check(
        live.http.post("/v1/completions", content=content, headers={"content-type": kind}),
        415,
        "unsupported_media_type",
        "content-type",
    )


def test_a_chunked_body_is_limited_while_it_is_read(live: Any) -> None:
    def pieces() -> Any:
        for _ in range(100):
            yield b"x" * 100_000

    check(live.http.post("/v1/completions", content=pieces()), 413, "body_too_large", None)


def test_a_body_at_the_limit_is_read(live: Any) -> None:
    content = json.dumps(COMPLETION).encode()
    content += b" " * (live.config.server.max_body_bytes - len(content))
    assert live.http.post("/v1/completions", content=content).status_code == 200
    check(live.http.post("/v1/completions", content=content + b" "), 413, "body_too_large", None)


def test_more_choices_than_can_ever_wait_are_refused(serve: Any) -> None:
    live = serve(server={"max_queued_requests": 4})
    check(live.post(prompt=["a"] * 5), 400, "invalid_value", "prompt")


def test_unknown_routes_and_methods_have_the_same_shape(live: Any) -> None:
    check(live.http.get("/v1/nothing"), 404, "not_found", None)
    check(live.http.get("/v1/completions"), 405, "method_not_allowed", None)


def test_refused_requests_did_no_work(serve: Any) -> None:
    live = serve()
    for change, *_ in TABLE.values():
        if isinstance(change, dict):
            live.http.post("/v1/completions", json=COMPLETION | change)
    assert live.engine.work_steps == 0
    assert not [event for event in live.sink.events if type(event).__name__ == "RequestArrived"]
    assert live.observer.received == live.observer.rejected.total()


def test_every_row_of_the_table_is_documented() -> None:
    text = DOC.read_text()
    documented = {tuple(cell.strip(" `") for cell in line.split("|")[1:4]) for line in text.splitlines() if "|" in line}
    for what, (_, status, code, _) in (TABLE | CHAT_TABLE).items():
        assert (what, str(status), code) in documented, what
    missing = {name for name in NEUTRAL if f"`{name}`" not in text}
    assert not missing


def test_too_many_prompts_are_refused_before_they_are_read(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body at the limit holds a million prompts: looking at each would stop every other stream for minutes."""
    live = serve(server={"max_queued_requests": 4})

    def encode(*_: Any) -> list[int]:
        raise AssertionError("tokenized a prompt of a request that can never be taken")

    monkeypatch.setattr(live.tokenizer, "encode", encode)
    check(live.post(prompt=["a"] * 500_000), 400, "invalid_value", "prompt")
    check(live.post(prompt="a", n=5), 400, "invalid_value", "prompt")


def test_many_prompts_that_are_long_together_leave_the_event_loop(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    live = serve()
    threads, encode = [], live.tokenizer.encode

    def watched(*arguments: Any) -> list[int]:
        threads.append(threading.current_thread().name)
        return list(encode(*arguments))

    monkeypatch.setattr(live.tokenizer, "encode", watched)
    assert live.post(prompt=["a" * 100] * 8, max_tokens=1).status_code == 200
    assert set(threads) == {"test-http"}, "short: another thread would only cost time"
    threads.clear()
    assert live.post(prompt=["a" * 1000] * 8, max_tokens=1).status_code == 200
    assert "test-http" not in threads
    live.assert_nothing_held()


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP", "identity, gzip", "nonsense"])
def test_compressed_bodies_are_refused(live: Any, encoding: str) -> None:
    content = json.dumps(COMPLETION).encode()
    headers = {"content-type": "application/json", "content-encoding": encoding}
    response = live.http.post("/v1/completions", content=content, headers=headers)
    check(response, 415, "unsupported_media_type", "content-encoding")
    headers["content-encoding"] = "identity"
    assert live.http.post("/v1/completions", content=content, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "change",
    [
        {"x" * 1_000_000: 1},
        {"logit_bias": {"secret" * 200_000: 1}},
        {"logit_bias": {"secret": "no number"}},
        {"response_format": {"type": "text", "y" * 1_000_000: 1}},
    ],
    ids=["a field", "a key of logit_bias", "a short key of logit_bias", "a field inside"],
)
def test_a_refusal_repeats_little_of_what_was_sent(shared: Any, change: dict[str, Any]) -> None:
    response = shared().http.post("/v1/completions", json=COMPLETION | change)
    assert response.status_code == 400
    assert len(response.content) < 500
    assert "secret" not in response.text
    assert response.json()["error"]["param"]

"""The whole chain with a real model: SmolLM2 through scheduler, executor, tokenizer, HTTP and official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from engine.config import CacheConfig, EngineConfig, ExecutorConfig, ModelConfig, SchedulerConfig, ServerConfig
from engine.executor.factory import build_executor
from engine.models.packaged import packaged_gguf_path
from engine.text.tokenizer import load_tokenizer
from tests.engine.server.live import DEADLINE_S, LiveServer, until

pytestmark = pytest.mark.model
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    config = EngineConfig(
        scheduler=SchedulerConfig(chunked_prefill_size=64, max_running_requests=16),
        cache=CacheConfig(num_pages=160),
        model=ModelConfig(max_context_tokens=1024),
        executor=ExecutorConfig(threads=2),
        server=ServerConfig(port=0, drain_timeout_s=1.0),
    )
    server = LiveServer(
        config, make_executor=build_executor, tokenizer=load_tokenizer(packaged_gguf_path()), with_grammars=True
    )
    yield server
    server.stop()


@pytest.fixture(scope="module")
def model(live: LiveServer) -> str:
    return str(live.http.get("/v1/models").json()["data"][0]["id"])


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_a_question_is_answered_and_its_prompt_is_cached(client: openai.OpenAI, model: str) -> None:
    ask: dict[str, Any] = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    answer = client.chat.completions.create(**ask)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert "<|im_end|>" not in (answer.choices[0].message.content or "")
    again = client.chat.completions.create(**ask)
    assert again.choices[0].message.content == answer.choices[0].message.content
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    cached = again.usage.prompt_tokens_details.cached_tokens or 0
    assert 0 < cached < again.usage.prompt_tokens
    streamed = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **ask)
    events = list(streamed)
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == answer.choices[0].message.content
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == again.usage.completion_tokens


def test_a_stop_inside_a_token_cuts_the_text_there(client: openai.OpenAI, model: str) -> None:
    ask: dict[str, Any] = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**ask).choices[0].message.content or ""
    cut = client.chat.completions.create(stop=["aris", "never"], **ask).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.message.content == whole[: whole.index("aris")]


@pytest.mark.parametrize("seed", range(2))
def test_hot_sampling_streams_what_it_answers(client: openai.OpenAI, model: str, seed: int) -> None:
    # Temperature 2 makes token salad: parts of characters, stray bytes, rare tokens.
    ask: dict[str, Any] = {
        "model": model,
        "prompt": "日本語 👩‍👩‍👧 é:",
        "temperature": 2,
        "seed": seed,
        "max_tokens": 24,
        "logprobs": 2,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**ask).choices[0]
    events = list(client.completions.create(stream=True, **ask))
    assert "".join(event.choices[0].text for event in events) == whole.text
    assert whole.logprobs is not None
    entries = [event.choices[0].logprobs for event in events]
    assert sum(len(entry.tokens or ()) for entry in entries if entry) == len(whole.logprobs.tokens or ()) == 24
    assert all(value <= 0 for value in whole.logprobs.token_logprobs or () if value is not None)


def test_greedy_takes_the_best_token(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    for entry in logprobs.content or ():
        assert entry.token == entry.top_logprobs[0].token
        best = [top.logprob for top in entry.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert entry.bytes == list(entry.token.encode())


def test_company_does_not_change_an_answer(client: openai.OpenAI, model: str) -> None:
    def ask(number: int) -> str:
        answer = client.completions.create(
            model=model, prompt=f"Number {number} is", seed=number, temperature=0.8, max_tokens=12
        )
        return answer.choices[0].text

    alone = [ask(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone


def test_leaving_a_real_generation_frees_everything(live: LiveServer, model: str) -> None:
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 900, "stream": True, "ignore_eos": True}
    with live.http.stream("POST", "/v1/completions", json=body, timeout=DEADLINE_S) as response:
        lines = (line for line in response.iter_lines() if line)
        assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"]
    until(lambda: not live.snapshot().requests, "the end")
    live.assert_nothing_held()


def test_an_answer_in_json_says_what_the_model_knows(client: openai.OpenAI, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"country": {"enum": ["France", "Spain"]}, "capital": {"type": "string", "maxLength": 20}},
        "required": ["country", "capital"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "capital", "schema": schema}},
    )
    assert answer.choices[0].finish_reason == "stop"
    assert json.loads(answer.choices[0].message.content or "") == {"country": "France", "capital": "Paris"}

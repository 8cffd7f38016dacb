"""Completions and chat over HTTP with the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest


@pytest.fixture(scope="module")
def live(serve_module: Any) -> Any:
    return serve_module()


@pytest.fixture(scope="module")
def client(live: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_completion_with_the_official_client(client: openai.OpenAI, live: Any) -> None:
    answer = client.completions.create(model="simulated", prompt="hello", max_tokens=12, temperature=0, seed=1)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == len(answer.choices[0].text) == 12
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("seed", range(4))
def test_streamed_text_equals_whole_text(client: openai.OpenAI, seed: int) -> None:
    ask: dict[str, Any] = {"model": "simulated", "prompt": "hello", "max_tokens": 200, "seed": seed}
    whole = client.completions.create(**ask)
    events = list(client.completions.create(stream=True, **ask))
    assert "".join(event.choices[0].text for event in events) == whole.choices[0].text
    assert events[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(event.choices[0].text or event.choices[0].finish_reason for event in events)
    assert len({event.id for event in events}) == 1


def test_chat_streamed_and_whole(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "simulated",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
        "max_completion_tokens": 30,
        "seed": 7,
    }
    whole = client.chat.completions.create(**ask)
    message = whole.choices[0].message
    assert message.role == "assistant"
    assert whole.object == "chat.completion"
    events = list(client.chat.completions.create(stream=True, **ask))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events) == message.content
    assert events[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    # No empty events beyond the role event.
    assert all(e.choices[0].delta.content or e.choices[0].finish_reason for e in events[1:])


@pytest.mark.parametrize(
    ("prompt", "count", "tokens"),
    [
        ("abc", 1, 3),
        (["abc", "de"], 2, 5),
        ([100, 101, 102, 103], 1, 4),
        ([[100, 101], [102], [103, 104, 105]], 3, 6),
    ],
)
def test_prompt_forms(client: openai.OpenAI, prompt: Any, count: int, tokens: int) -> None:
    answer = client.completions.create(model="simulated", prompt=prompt, max_tokens=3, extra_body={"ignore_eos": True})
    assert [choice.index for choice in answer.choices] == list(range(count))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (tokens, 3 * count)


def test_n_choices_have_seeds_of_their_own(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "simulated", "prompt": "x", "max_tokens": 40, "seed": 3}
    one = client.completions.create(**ask)
    several = client.completions.create(n=4, **ask)
    again = client.completions.create(n=4, **ask)
    texts = [choice.text for choice in several.choices]
    assert texts[0] == one.choices[0].text
    assert len(set(texts)) == 4
    assert texts == [choice.text for choice in again.choices]
    assert several.usage is not None
    assert several.usage.prompt_tokens == 1  # one prompt, counted once


def test_streamed_choices_carry_their_index(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "simulated", "prompt": ["x", "yy"], "n": 2, "max_tokens": 30, "seed": 3}
    whole = client.completions.create(**ask)
    texts = [""] * 4
    for event in client.completions.create(stream=True, **ask):
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    prompt = list(range(33, 33 + 90))
    first = client.completions.create(model="simulated", prompt=prompt, max_tokens=2)
    second = client.completions.create(model="simulated", prompt=prompt, max_tokens=2)
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 80  # the full pages before the last token


def test_completion_logprobs(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "simulated", "prompt": "x", "max_tokens": 5, "extra_body": {"ignore_eos": True}}
    answer = client.completions.create(logprobs=3, **ask)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or ()) == answer.choices[0].text
    assert logprobs.token_logprobs == [-1.0] * 5
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert all(len(top) == 3 for top in logprobs.top_logprobs or ())
    chosen_only = client.completions.create(logprobs=0, **ask).choices[0].logprobs
    assert chosen_only is not None
    assert all(len(top) == 1 for top in chosen_only.top_logprobs or ())
    assert client.completions.create(**ask).choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(client: openai.OpenAI, stream: bool) -> None:
    ask: dict[str, Any] = {
        "model": "simulated",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"ignore_eos": True},
    }
    if stream:
        events = list(client.chat.completions.create(stream=True, **ask))
        text = "".join(event.choices[0].delta.content or "" for event in events)
        entries = [e for event in events if event.choices[0].logprobs for e in event.choices[0].logprobs.content or ()]
    else:
        choice = client.chat.completions.create(**ask).choices[0]
        assert choice.logprobs is not None
        text, entries = choice.message.content or "", choice.logprobs.content or []
    assert "".join(entry.token for entry in entries) == text
    assert all(entry.bytes == list(entry.token.encode()) for entry in entries)
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["simulated"]
    assert client.models.retrieve("simulated").id == "simulated"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other/model")
    assert caught.value.code == "model_not_found"


def test_async_client(live: Any) -> None:
    import asyncio

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="unused") as client:
            answers = await asyncio.gather(
                *(client.completions.create(model="simulated", prompt=f"p{i}", max_tokens=5) for i in range(20))
            )
        return [answer.choices[0].text for answer in answers]

    assert len(asyncio.run(ask())) == 20


def test_openapi_describes_the_bodies(live: Any) -> None:
    document = live.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert "prompt" in schemas["CompletionBody"]["properties"]
    assert "messages" in schemas["ChatCompletionBody"]["properties"]
    for name in ("completions", "chat/completions"):
        body = document["paths"][f"/v1/{name}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["$ref"].rsplit("/", 1)[1] in schemas
    references = {part.split('"')[0] for part in json.dumps(document).split('"#/components/schemas/')[1:]}
    assert references <= set(schemas)


def test_priority_and_routing_key_reach_the_engine(live: Any) -> None:
    answer = live.post(priority=3, routing_key="tenant-a", max_tokens=1)
    arrived = [e for e in live.sink.events if type(e).__name__ == "RequestArrived" and e.rid == answer.json()["id"]]
    assert [(e.priority, e.routing_key, e.prompt_len) for e in arrived] == [(3, "tenant-a", 5)]


def test_nothing_is_held_afterwards(live: Any) -> None:
    live.post(max_tokens=3)
    live.assert_nothing_held()

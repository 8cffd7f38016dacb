"""Sampling over HTTP, with a real model and the official client: what a request asks of its tokens is done to them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.engine.server.live import LiveServer, tiny_server

#: The tiny model's tokens are bytes.
PROMPT = "In the beginning was the word, and the word was with the scheduler."


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    server = tiny_server(tmp_path_factory.mktemp("tiny"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, **change: Any) -> Any:
    ask: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    return client.completions.create(**(ask | change))


def text(client: openai.OpenAI, **change: Any) -> str:
    return str(complete(client, **change).choices[0].text)


def token(live: LiveServer, letter: str) -> str:
    (token_id,) = live.tokenizer.encode(letter, False)
    return str(token_id)


def test_a_bias_decides_and_forbids(live: LiveServer, client: openai.OpenAI) -> None:
    assert text(client, logit_bias={token(live, "w"): 100}) == "w" * 24
    assert text(client, logit_bias={token(live, "w"): 100}, temperature=1, seed=1) == "w" * 24
    both = {token(live, "w"): 100, token(live, "x"): 90}
    assert text(client, logit_bias=both) == "w" * 24
    assert text(client, logit_bias=both | {token(live, "w"): -100}) == "x" * 24


def test_log_probabilities_are_those_of_the_model_before_any_bias(live: LiveServer, client: openai.OpenAI) -> None:
    def best(**change: Any) -> tuple[str, dict[tuple[int, ...], float]]:
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": PROMPT}], temperature=0, max_tokens=1,
            logprobs=True, top_logprobs=3, **change,
        )  # fmt: skip
        (entry,) = answer.choices[0].logprobs.content
        return entry.token, {tuple(top.bytes): top.logprob for top in entry.top_logprobs}

    token_text, forced = best(logit_bias={token(live, "w"): 100})
    assert token_text == "w"
    assert len(forced) == 3
    assert forced == pytest.approx(best()[1], abs=1e-4)


def test_penalties_make_an_answer_repeat_itself_less(client: openai.OpenAI) -> None:
    plain = text(client, max_tokens=60)
    for penalty in (
        {"frequency_penalty": 2},
        {"presence_penalty": 2},
        {"extra_body": {"repetition_penalty": 2}},
    ):
        assert len(set(text(client, max_tokens=60, **penalty))) > len(set(plain)), penalty


def test_min_p_of_1_is_the_greedy_answer(client: openai.OpenAI) -> None:
    assert text(client, temperature=2, seed=1, extra_body={"min_p": 1}) == text(client)
    assert text(client, temperature=2, seed=1) != text(client)


def test_choices_are_reproducible_by_seed_and_share_their_prompt(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"temperature": 1, "seed": 5, "presence_penalty": 0.3}
    several = complete(client, n=4, **ask)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in several.choices}) == 4
    assert several.choices[0].text == text(client, **ask)
    again = complete(client, n=4, **ask)
    assert [choice.text for choice in again.choices] == [choice.text for choice in several.choices]
    assert several.usage.prompt_tokens == len(PROMPT)


def test_an_answer_is_the_same_alone_and_in_any_company(client: openai.OpenAI) -> None:
    asks: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "frequency_penalty": 1.0, "prompt": PROMPT[::-1]},
        {"temperature": 0, "extra_body": {"repetition_penalty": 1.3}},
        {"temperature": 1, "seed": 1, "presence_penalty": 0.5, "extra_body": {"min_p": 0.05, "top_k": 50}},
        {"temperature": 1, "seed": 2, "logit_bias": {"50": 3}, "prompt": PROMPT + " And"},
        {"temperature": 0.7, "seed": 3, "top_p": 0.8, "n": 2},
    ]
    alone = [[choice.text for choice in complete(client, **ask).choices] for ask in asks]
    with ThreadPoolExecutor(len(asks)) as pool:
        together = list(pool.map(lambda ask: [choice.text for choice in complete(client, **ask).choices], asks))
    assert together == alone


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2, not 2.5"),
        ({"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2, not -3"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty", "greater than or equal to 0.01, not 0"),
        ({"extra_body": {"min_p": 1.5}}, "min_p", "less than or equal to 1, not 1.5"),
        ({"logit_bias": {"7": 101}}, "logit_bias", "less than or equal to 100, not 101"),
        ({"logit_bias": {"258": 1}}, "logit_bias", "258 is outside 0..257"),
        ({"n": 9}, "n", "less than or equal to 8, not 9"),
    ],
)
def test_values_out_of_range_are_refused_with_field_value_and_limit(
    client: openai.OpenAI, change: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **change)
    assert caught.value.param == param
    assert words in caught.value.message

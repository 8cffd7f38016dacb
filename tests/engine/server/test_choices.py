"""Choices: text, log-probabilities and ends of one request; streamed and whole are the same thing cut differently."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.executor.base import TokenLogprobs
from engine.llm_engine import TokenOutput
from engine.request import FinishReason
from engine.sampling_params import SamplingParams
from engine.server.choices import Choice, Delta
from engine.text.stops import stop_watchers
from engine.text.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer(300, eos_token_ids=(0,))


def choice_of(params: SamplingParams) -> Choice:
    return Choice(rid="r", index=0, prompt_tokens=4, params=params, tokenizer=TOKENIZER)


def generate(ids: list[int], params: SamplingParams) -> list[TokenOutput]:
    """What an engine would put out: it ends at EOS, at a stop, or with the last token."""
    watcher = stop_watchers(TOKENIZER)(params.stop)
    outputs = []
    for index, token_id in enumerate(ids):
        stopped, finish, detail = watcher.push(token_id), None, ""
        if index + 1 >= params.min_new_tokens and (token_id == 0 or stopped):
            finish, detail = FinishReason.STOP, "eos" if token_id == 0 else "stop_string"
        elif index + 1 == len(ids):
            finish = FinishReason.LENGTH
        logprobs = TokenLogprobs(token_id, -0.25, ((token_id, -0.25),))
        outputs.append(TokenOutput("r", token_id, index, logprobs=logprobs, finish=finish, detail=detail))
        if finish is not None:
            break
    return outputs


def deltas_of(choice: Choice, outputs: list[TokenOutput]) -> list[Delta]:
    return [delta for delta in map(choice.push, outputs) if delta is not None]


@given(
    ids=st.lists(st.sampled_from([0, 97, 98, 0xE6, 0x97, 0xA5, 0xFF, 257, 299]), min_size=1, max_size=30),
    stops=st.lists(st.text("ab日", min_size=1, max_size=3), max_size=3).map(tuple),
    minimum=st.integers(0, 4),
    include=st.booleans(),
)
def test_deltas_join_to_the_cut_text_and_lose_no_token(
    ids: list[int], stops: tuple[str, ...], minimum: int, include: bool
) -> None:
    params = SamplingParams(stop=stops, min_new_tokens=minimum, include_stop=include, logprobs=1)
    outputs = generate(ids, params)
    choice = choice_of(params)
    deltas = deltas_of(choice, outputs)
    text = "".join(delta.text for delta in deltas)
    whole = TOKENIZER.decode([output.token_id or 0 for output in outputs])
    assert whole.startswith(text) or outputs[-1].detail == "stop_string"
    if outputs[-1].detail != "stop_string":
        assert text == whole
    assert choice.completion_tokens == len(outputs)
    entries = [entry for delta in deltas for entry in delta.entries]
    assert b"".join(entry.token.data for entry in entries) == b"".join(
        TOKENIZER.token_bytes(output.token_id or 0) for output in outputs
    )
    assert [entry.offset for entry in entries] == sorted(entry.offset for entry in entries)
    assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish in ("stop", "length")
    assert all(delta.text for delta in deltas[:-1])


@pytest.mark.parametrize("finish", [FinishReason.ABORT, FinishReason.ERROR, FinishReason.REFUSED])
def test_an_end_that_is_not_the_models_is_a_failure(finish: FinishReason) -> None:
    choice = choice_of(SamplingParams())
    assert choice.push(TokenOutput("r", 97, 0)) is not None
    assert choice.push(TokenOutput("r", None, 1, finish=finish, detail="why")) is None
    assert choice.failure == (finish, "why")


def test_an_end_without_a_token_releases_what_was_held() -> None:
    choice = choice_of(SamplingParams(stop=("ab!",)))
    assert choice.push(TokenOutput("r", 97, 0)) is None
    last = choice.push(TokenOutput("r", None, 1, finish=FinishReason.LENGTH, detail="kv_pool_exhausted"))
    assert last is not None
    assert (last.text, last.finish, choice.completion_tokens) == ("a", "length", 1)


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), -1e9])
def test_log_probabilities_that_json_cannot_hold_are_clamped(value: float) -> None:
    choice = choice_of(SamplingParams(logprobs=0))
    delta: Any = choice.push(TokenOutput("r", 97, 0, logprobs=TokenLogprobs(97, value)))
    assert delta.entries[0].token.logprob == -9999.0


@pytest.mark.parametrize(
    ("detail", "include", "text"),
    [("eos", False, ""), ("eos", True, ""), ("stop_token", False, ""), ("stop_token", True, "a")],
)
def test_the_token_that_ends_by_its_id_is_no_text_even_when_it_has_some(detail: str, include: bool, text: str) -> None:
    choice = choice_of(SamplingParams(include_stop=include))
    delta = choice.push(TokenOutput("r", 97, 0, finish=FinishReason.STOP, detail=detail))
    assert delta is not None
    assert (delta.text, delta.finish, choice.completion_tokens) == (text, "stop", 1)

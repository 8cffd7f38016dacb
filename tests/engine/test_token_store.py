"""The token store: keys of pages as they fill, the key of the first 32 tokens, and when a request is finished."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kvcache.page_keys import PageKeyer
from engine.sampling_params import SamplingParams
from engine.token_store import TokenStore

EOS = 2


class StopAt:
    """Completes a stop string at the n-th token."""

    def __init__(self, at: int) -> None:
        self._left = at

    def push(self, token_id: int) -> bool:
        self._left -= 1
        return self._left == 0


def store(page_size: int = 4, stop_at: int = 1) -> TokenStore:
    return TokenStore(
        page_size=page_size, secret=b"s", eos_token_ids=(EOS,), stop_watcher=lambda _stops: StopAt(stop_at)
    )


def outcome(
    tokens: list[int], params: SamplingParams, *, stop_at: int = 1, clamp: int | None = None
) -> tuple[int, str, str]:
    """(tokens taken, finish reason, detail) of a run of output tokens."""
    it = store(stop_at=stop_at)
    it.add("r", [5, 6, 7], params)
    if clamp is not None:
        it.clamp("r", clamp)
    for count, token in enumerate(tokens, 1):
        row = it.settle("r", token).row
        if row.finish is not None:
            return count, row.finish.value, row.detail
    return len(tokens), "", ""


@pytest.mark.parametrize(
    ("tokens", "params", "extra", "expected"),
    [
        ([9, 9, 9, 9], SamplingParams(max_new_tokens=3), {}, (3, "length", "")),
        ([9, EOS], SamplingParams(max_new_tokens=5), {}, (2, "stop", "eos")),
        ([EOS], SamplingParams(max_new_tokens=1), {}, (1, "stop", "eos")),
        ([EOS, 9, 9], SamplingParams(max_new_tokens=3, ignore_eos=True), {}, (3, "length", "")),
        ([9, 8, 9], SamplingParams(max_new_tokens=5, stop_token_ids=(8,)), {}, (2, "stop", "stop_token")),
        ([9, 8], SamplingParams(max_new_tokens=5, stop=("x",)), {"stop_at": 2}, (2, "stop", "stop_string")),
        (
            [EOS, 8, 9],
            SamplingParams(max_new_tokens=9, min_new_tokens=2, stop_token_ids=(8,)),
            {},
            (2, "stop", "stop_token"),
        ),
        ([EOS, 9], SamplingParams(max_new_tokens=9, min_new_tokens=3), {}, (2, "", "")),
        ([9] * 4, SamplingParams(max_new_tokens=9), {"clamp": 3}, (3, "length", "kv_pool_exhausted")),
        # A request that asks for one token and whose first one is EOS stopped; it did not run out.
        ([EOS], SamplingParams(max_new_tokens=1, stop_token_ids=(EOS,)), {}, (1, "stop", "eos")),
    ],
)
def test_when_a_request_is_finished(
    tokens: list[int], params: SamplingParams, extra: dict[str, int], expected: tuple[int, str, str]
) -> None:
    assert outcome(tokens, params, **extra) == expected


@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    outputs=st.lists(st.integers(3, 9), max_size=60),
    page_size=st.sampled_from([1, 4, 16]),
)
def test_pages_are_keyed_when_they_fill(prompt: list[int], outputs: list[int], page_size: int) -> None:
    """Prompt keys and grown keys together are the keys of the whole; the head key comes with the 32nd token."""
    it, keyer = store(page_size), PageKeyer(page_size, b"s")
    first = it.add("r", prompt, SamplingParams(max_new_tokens=1000))
    keys = first.page_keys
    sequence, heads = list(prompt), [first.head32_key]
    for index, token in enumerate(outputs):
        assert it.output_index("r") == index
        settled = it.settle("r", token)
        sequence.append(token)
        assert settled.output_index == index
        assert (settled.row.new_page_key is not None) == (len(sequence) % page_size == 0)
        if settled.row.new_page_key is not None:
            keys += settled.row.new_page_key.to_bytes(8, "little", signed=True)
        assert (settled.row.head32_key is not None) == (len(sequence) == 32)
        heads.append(settled.row.head32_key)
    assert keys == keyer.of(sequence)[0].astype("<i8").tobytes()
    assert [head for head in heads if head is not None] == ([keyer.head32(sequence)] if len(sequence) >= 32 else [])
    assert it.slice("r", 0, it.length("r")).tolist() == sequence


def test_a_dropped_request_is_forgotten() -> None:
    it = store()
    it.add("r", [1, 2, 3], SamplingParams())
    it.drop("r")
    it.drop("r")
    assert len(it) == 0
    with pytest.raises(KeyError):
        it.length("r")


def test_rows_of_tokens_that_change_nothing_are_one_value() -> None:
    """Steps are kept: a row of its own for each token would be new memory for all of them."""
    tokens, params = store(page_size=4), SamplingParams(max_new_tokens=4)
    tokens.add("r", [5, 6, 7, 8], params)
    first, second, third, last = (tokens.settle("r", token).row for token in (9, 10, 11, 12))
    assert first is second is third
    assert (first.rid, first.new_page_key, first.finish) == ("r", None, None)
    assert last.new_page_key is not None
    assert last.finish is not None
    assert last is not first

"""FR-44: streamed characters are those of a full decode, whatever the tokens split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.stops import StoppingText
from engine.text.tokenizer import ByteTokenizer

BYTES = ByteTokenizer(400)

TEXTS = {
    "emoji with joiners": "👩‍👩‍👧‍👦 and 🏳️‍🌈",
    "CJK": "日本語のテキスト",
    "Arabic": "مرحبا بالعالم",
    "accents": "e\u0301 naïve Ünïcode",
    "a real replacement character": "a\ufffdb",
}
RAW = {
    "incomplete last character": "日本".encode()[:-1],
    "CJK, an incomplete byte, then ASCII": "日本".encode()[:-1] + b"abc",
    "stray continuation bytes": b"\x80\x80ok\xff\xfe",
    "surrogate written as bytes": b"\xed\xa0\x80x",
    "overlong and truncated": b"\xc0\xaf\xf0\x9f\x91",
}


def groups(ids: list[int], size: int) -> list[list[int]]:
    return [ids[i : i + size] for i in range(0, len(ids), size)]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("name", [*TEXTS, *RAW])
def test_fr_44_joined_stream_equals_full_decode(name: str, size: int) -> None:
    ids = list(RAW[name] if name in RAW else TEXTS[name].encode())
    detokenizer = IncrementalDetokenizer(BYTES)
    pieces, positions = [], [0]
    for group in groups(ids, size):
        pieces.append(detokenizer.push_all(group))
        positions.append(detokenizer.position)
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == BYTES.decode(ids)
    assert positions == sorted(positions)
    if name in TEXTS:
        assert "".join(pieces) == TEXTS[name]


@given(ids=st.lists(st.integers(0, 399), max_size=60))
def test_fr_44_property_over_random_token_lists(ids: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    sent, last = "", 0
    for token_id in ids:
        sent += detokenizer.push(token_id)
        assert detokenizer.position == len(sent) >= last
        last = detokenizer.position
    assert sent + detokenizer.finish() == BYTES.decode(ids)


@given(text=st.text(st.characters(exclude_categories=("Cs",))), cut=st.integers(0, 8))
def test_fr_44_no_replacement_character_but_those_of_the_full_decode(text: str, cut: int) -> None:
    ids = list(text.encode())
    ids = ids[: max(0, len(ids) - cut)]
    detokenizer = IncrementalDetokenizer(BYTES)
    before_end = detokenizer.push_all(ids)
    assert text.startswith(before_end)  # hence nothing damaged was sent before the end
    assert before_end + detokenizer.finish() == bytes(ids).decode("utf-8", "replace")


@given(ids=st.lists(st.integers(0, 399), max_size=60))
def test_fr_44_a_truncated_last_character_is_the_same_streamed_and_not(ids: list[int]) -> None:
    text = StoppingText(BYTES)
    pieces = [text.push(token_id) for token_id in ids]
    assert "".join([*pieces, text.finish()]) == BYTES.decode(ids)


def test_fr_44_retraction_in_the_middle_of_a_character_changes_nothing() -> None:
    # A retracted request computes its tokens again but yields each of them once, so the text only waits.
    ids = list("né日".encode())
    detokenizer = IncrementalDetokenizer(BYTES)
    first = detokenizer.push_all(ids[:2])
    assert (first, detokenizer.position) == ("n", 1)
    assert first + detokenizer.push_all(ids[2:]) + detokenizer.finish() == "né日"

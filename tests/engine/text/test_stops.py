"""FR-43: stop strings across tokens: nothing of them leaks, nothing of the text is swallowed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.stops import StopMatcher, StoppingText, TokenStopWatcher, stop_watchers
from engine.text.tokenizer import ByteTokenizer


class ScriptedTokenizer(ByteTokenizer):
    """Token i stands for the i-th of the given pieces of text or bytes."""

    def __init__(self, pieces: list[str | bytes]) -> None:
        super().__init__()
        self._pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]


def run(pieces: list[str | bytes], stops: tuple[str, ...], **options: int) -> tuple[list[str], int | None]:
    """What is sent after each token and at the end; and the index of the token the engine would end on."""
    tokenizer = ScriptedTokenizer(pieces)
    text = StoppingText(tokenizer, stops, include_stop=bool(options.get("include_stop")))
    watcher = TokenStopWatcher(tokenizer, stops)
    longest = max(map(len, stops), default=1)
    sent: list[str] = []
    for index in range(len(pieces)):
        ended = watcher.push(index)
        sent.append(text.push(index))
        assert ended == text.stopped  # engine and text agree on the token
        if ended:
            return [*sent, text.finish()], index
        assert text.position - len("".join(sent)) <= longest - 1
    return [*sent, text.finish()], None


@pytest.mark.parametrize(
    ("pieces", "stops", "expected", "ended_at"),
    [
        pytest.param(["ab", "cS", "TO", "P x"], ("STOP",), "abc", 3, id="base case"),
        pytest.param(["ab", "cST", "ay"], ("STOP",), "abcSTay", None, id="false start is released"),
        pytest.param(["abcSTOP"], ("STOP", "TO"), "abcS", 0, id="the stop completed first wins"),
        pytest.param(["ab", "ST", "OP"], ("STOP", "OP"), "ab", 2, id="completed together: the longer one"),
        pytest.param(["STOP", "x"], ("STOP",), "", 0, id="at position 0, in the first token"),
        pytest.param(["S", "STO", "P"], ("STOP",), "S", 2, id="a start inside a false start"),
        pytest.param(["aab", "aab", "aac"], ("aabaac",), "aab", 2, id="self-overlapping"),
        pytest.param(["a", "ST"], ("STOP",), "aST", None, id="held-back text is released at the end"),
        pytest.param(["x", "日本".encode()[:4], "日本".encode()[4:], "!"], ("本",), "x日", 2, id="multi-byte"),
        pytest.param(["x", "é".encode()[:1], "é".encode()[1:] + b"y"], ("y",), "xé", 2, id="after a split character"),
        pytest.param(["a", "\n", "\n", "b"], ("\n\n",), "a", 2, id="newlines"),
    ],
)
def test_fr_43_stop_strings(
    pieces: list[str | bytes], stops: tuple[str, ...], expected: str, ended_at: int | None
) -> None:
    sent, ended = run(pieces, stops)
    assert "".join(sent) == expected
    assert ended == ended_at


def test_fr_43_nothing_of_a_stop_is_sent_before_it_is_known() -> None:
    sent, _ = run(["ab", "cS", "TO", "P x"], ("STOP",))
    assert sent == ["ab", "c", "", "", ""]


def test_fr_43_text_that_begins_no_stop_is_not_held() -> None:
    sent, _ = run(["one ", "two ", "three"], ("STOP", "a much longer stop string"))
    assert sent == ["one ", "two ", "three", ""]


def test_fr_43_include_stop_keeps_the_string_and_cuts_behind_it() -> None:
    sent, ended = run(["ab", "cS", "TO", "P x"], ("STOP",), include_stop=1)
    assert "".join(sent) == "abcSTOP"
    assert ended == 3


def test_fr_43_a_stop_in_the_prompt_only_does_not_end_the_output() -> None:
    # Watchers see output tokens only: the prompt is never pushed.
    watcher = stop_watchers(ScriptedTokenizer(["OP"]))(("STOP",))
    assert not watcher.push(0)


def test_a_stop_before_min_new_tokens_is_text() -> None:
    tokenizer = ScriptedTokenizer(["a", "X", "b", "X", "c"])
    text = StoppingText(tokenizer, ("X",), min_new_tokens=3)
    assert [text.push(index) for index in range(5)] == ["a", "X", "b", "", ""]
    assert text.stopped


def test_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(("",))


def oracle(text: str, stops: tuple[str, ...]) -> tuple[int, int] | None:
    """The first completed stop by looking at every prefix."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


small = st.text("abé", max_size=12)
stop_sets = st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


@given(pieces=st.lists(small, max_size=8), stops=stop_sets, include=st.booleans())
def test_fr_43_property_streamed_text_is_the_whole_text_cut_at_the_first_stop(
    pieces: list[str], stops: tuple[str, ...], include: bool
) -> None:
    sent, _ = run(list(pieces), stops, include_stop=include)
    whole = "".join(pieces)
    match = oracle(whole, stops)
    assert "".join(sent) == (whole if match is None else whole[: match[1] if include else match[0]])


@given(text=small, stops=stop_sets)
def test_hold_back_is_the_longest_beginning_of_a_stop(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops)
    if matcher.feed(text) is not None:
        return
    longest = max(
        (k for stop in stops for k in range(len(stop)) if k <= len(text) and text.endswith(stop[:k])), default=0
    )
    assert matcher.hold_back == longest


@given(data=st.binary(max_size=40), stops=stop_sets, sizes=st.lists(st.integers(1, 4), min_size=40, max_size=40))
def test_fr_43_how_bytes_are_cut_into_tokens_does_not_change_the_text(
    data: bytes, stops: tuple[str, ...], sizes: list[int]
) -> None:
    pieces, rest = [], data
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    whole = data.decode("utf-8", "replace")
    sent, ended = run(list(pieces), stops)
    match = oracle(whole, stops)
    if ended is not None or match is None:
        assert "".join(sent) == (whole if match is None else whole[: match[0]])

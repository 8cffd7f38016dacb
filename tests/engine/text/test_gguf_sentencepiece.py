"""SentencePiece vocabularies in GGUF files: joined by score as their definition says, and refused when malformed."""

from __future__ import annotations

import itertools
import math

import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers

from engine.errors import ModelFormatError
from engine.text.gguf_tokenizer import tokenizer_from_metadata
from engine.text.hf_tokenizer import HfTokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]"]
SPECIAL_KINDS = [2, 3, 3, 3]


def metadata(pieces: dict[str, float], **changes: object) -> dict[str, object]:
    """A file of special tokens, bytes and `pieces` with their scores."""
    base: dict[str, object] = {
        "model": "llama",
        "tokens": [*SPECIAL, *BYTES, *pieces],
        "token_type": [*SPECIAL_KINDS, *[6] * 256, *[1] * len(pieces)],
        "scores": [0.0] * (len(SPECIAL) + 256) + list(pieces.values()),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (base | changes).items()}


def made(pieces: dict[str, float], **changes: object) -> HfTokenizer:
    return tokenizer_from_metadata(metadata(pieces, **changes), source="m")


def joined(text: str, pieces: dict[str, float], *, leftmost: bool) -> list[str]:
    """The definition: join the neighbours whose whole is the piece of the best score, until no whole is a piece."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        wholes = [
            (pieces[left + right], -i if leftmost else i)
            for i, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in pieces
        ]
        if not wholes:
            break
        place = abs(max(wholes)[1])
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    spelled: list[str] = []
    for part in parts:
        spelled += [part] if part in pieces else [f"<0x{byte:02X}>" for byte in part.encode()]
    return spelled


LETTERS = "abü▁"
PIECES = st.dictionaries(
    st.text(LETTERS, min_size=2, max_size=4), st.integers(-50, -1).map(float), min_size=3, max_size=12
)


@given(pieces=PIECES, text=st.text("abüz ", max_size=12))
def test_pieces_are_joined_by_score(pieces: dict[str, float], text: str) -> None:
    assume(len(set(pieces.values())) == len(pieces))
    pieces = dict.fromkeys("abü▁", -100.0) | pieces
    want = joined(text, pieces, leftmost=True)
    # Two ways to cut the same piece, side by side: nobody defines which comes first.
    assume(want == joined(text, pieces, leftmost=False))
    tokenizer = made(pieces)
    names = [*SPECIAL, *BYTES, *pieces]
    assert [names[i] for i in tokenizer.encode(text, False)] == (want if text else [])


def test_a_trained_vocabulary_is_read_as_it_was_trained() -> None:
    """Scores that are minus the rank of a merge, as converters write them, give what the merges gave."""
    text = "the scheduler admits the request, then the request computes the prompt and the prompt is cached " * 3
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=[], show_progress=False)
    backend.train_from_iterator([text], trainer)
    by_id = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    own = made({piece: -float(rank) for piece, rank in by_id})
    offset = len(SPECIAL) + 256
    for sample in (text, "the requester schedules", "cached prompt"):
        assert own.encode(sample, False) == [i + offset for i in backend.encode(sample).ids]


def test_text_special_tokens_and_the_first_space() -> None:
    own = made({"▁": -9.0, "h": -9.0, "i": -9.0, "hi": -1.0, "▁hi": -2.0})
    base = len(SPECIAL) + 256
    assert own.encode("hi") == [1, base + 4]
    assert own.encode("hi hi", False) == [base + 4, base + 4]
    assert own.encode("[INST]hi", False) == [3, base + 4]
    assert own.decode([1, base + 4, base + 4]) == "hi hi"
    assert own.decode([base + 4], continues=True) == " hi"
    assert own.decode(own.encode("é\n")) == "é\n"
    assert own.eos_token_ids == (2,)


def test_no_space_and_no_bos_when_the_file_says_so() -> None:
    own = made({"▁": -9.0, "h": -9.0, "▁h": -1.0}, add_space_prefix=False, add_bos_token=False)
    base = len(SPECIAL) + 256
    assert own.encode("h h") == [base + 1, base + 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "tokenizer.ggml.scores are needed"),
        ({"scores": [0.0]}, "tokenizer.ggml.scores must hold 261 finite numbers"),
        ({"scores": [math.nan] * 261}, "tokenizer.ggml.scores must hold 261 finite numbers"),
        ({"scores": ["0"] * 261}, "tokenizer.ggml.scores are needed"),
        ({"add_space_prefix": "no"}, "tokenizer.ggml.add_space_prefix is 'no'; a bool is needed"),
        ({"tokens": [*SPECIAL, *BYTES, "x" * 513]}, "a token has 513 characters; at most 512"),
        ({"model": "t5"}, "tokenizer.ggml.model='t5' is not supported; supported: 'gpt2', 'llama'"),
    ],
)
def test_metadata_that_cannot_be_used_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        made({"a": -1.0}, **changes)

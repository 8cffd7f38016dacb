"""SentencePiece from GGUF metadata. Owns: tokens with scores (model "llama" of such files) -> a `tokenizers` pipeline.

Such a vocabulary has no merges: neighbours are joined when the whole is a token, best score first. Every way to cut a
token in two tokens is therefore a merge here, in the order of the score of the whole.
"""

from __future__ import annotations

import math
from typing import Final

import tokenizers
from tokenizers import decoders, models, normalizers

from engine.errors import ModelFormatError

#: Kinds of tokens that are never joined from others: unknown, control, unused, byte.
_NEVER_JOINED: Final = frozenset({2, 3, 5, 6})
_UNKNOWN: Final = 2
_SPACE: Final = "\u2581"
#: Longest token in characters; the longest in use are runs of some thirty spaces.
_MAX_CHARS: Final = 512


def sentencepiece_pipeline(
    tokens: list[str], kinds: list[int], scores: list[float], *, adds_space: bool, source: str
) -> tokenizers.Tokenizer:
    """A pipeline for `tokens`; `adds_space`: a text begins as if a space stood before it. Raises ModelFormatError."""
    if len(scores) != len(tokens) or not all(math.isfinite(score) for score in scores):
        raise ModelFormatError(f"{source}: tokenizer.ggml.scores must hold {len(tokens)} finite numbers, one per token")
    if longest := next((token for token in tokens if len(token) > _MAX_CHARS), None):
        raise ModelFormatError(f"{source}: a token has {len(longest)} characters; at most {_MAX_CHARS} are read")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    joined = {
        token: index for token, index in vocabulary.items() if kinds[index] not in _NEVER_JOINED and len(token) > 1
    }
    merges: list[tuple[str, str]] = []
    for token in sorted(joined, key=lambda token: (-scores[joined[token]], joined[token])):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((left, right))
    try:
        model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    except Exception as error:  # the library raises bare Exception for what it does not take
        raise ModelFormatError(f"{source}: tokenizer.ggml.tokens cannot be used: {error}") from error
    backend = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if adds_space else spaces
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend

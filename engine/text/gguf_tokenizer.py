"""Tokenizers from GGUF metadata. Owns: `tokenizer.ggml.*` -> a `tokenizers` pipeline; byte-level BPE itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from engine.errors import ModelFormatError
from engine.models.gguf_file import GgufFile
from engine.text.gguf_sentencepiece import sentencepiece_pipeline
from engine.text.hf_tokenizer import HfTokenizer

_CONTROL, _USER_DEFINED = 3, 4
_LETTERS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Mistral's later vocabularies: words are cut before a capital letter, digits stand alone.
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Pre-tokenizers whose models put BOS before a bare text when the file does not say.
_BOS_BY_DEFAULT: Final = frozenset({"llama-bpe", "llama3", "llama-v3"})


def tokenizer_from_gguf(path: Path) -> HfTokenizer:
    """Tokenizer of a GGUF file; raises ModelFormatError for a missing file or a kind that is not supported."""
    with GgufFile(path) as file:
        return tokenizer_from_metadata(file.metadata, source=str(path))


def tokenizer_from_metadata(metadata: dict[str, Any], *, source: str) -> HfTokenizer:
    """Tokenizer from GGUF keys and values. `source` names the file in errors."""

    def get(name: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}", default)

    if (model := get("model")) not in ("gpt2", "llama"):
        raise ModelFormatError(
            f"{source}: tokenizer.ggml.model={model!r:.80} is not supported; supported: 'gpt2', 'llama'"
        )
    tokens, merges = get("tokens"), get("merges" if model == "gpt2" else "scores")
    if not _is_list_of(tokens, str) or not tokens or not _is_list_of(merges, str if model == "gpt2" else float):
        rest = "tokenizer.ggml.merges are needed, as texts" if model == "gpt2" else "tokenizer.ggml.scores are needed"
        raise ModelFormatError(f"{source}: tokenizer.ggml.tokens and {rest}")
    kinds = get("token_type") or [1] * len(tokens)
    if not _is_list_of(kinds, int) or len(kinds) != len(tokens):
        raise ModelFormatError(f"{source}: tokenizer.ggml.token_type must hold {len(tokens)} integers, one per token")
    pre, adds_bos = get("pre", "gpt-2"), get("add_bos_token")
    if not isinstance(pre, str):
        raise ModelFormatError(f"{source}: tokenizer.ggml.pre is {pre!r:.80}; a text is needed")
    for name in ("add_bos_token", "add_space_prefix"):
        if not isinstance(get(name), bool | None):
            raise ModelFormatError(f"{source}: tokenizer.ggml.{name} is {get(name)!r:.80}; a bool is needed")

    def token_id(name: str) -> int | None:
        value = get(name)
        if value is not None and not (type(value) is int and 0 <= value < len(tokens)):
            raise ModelFormatError(
                f"{source}: tokenizer.ggml.{name} is {value!r:.80}; 0 to {len(tokens) - 1} is needed"
            )
        return value

    bos, ends = token_id("bos_token_id"), (token_id("eos_token_id"), token_id("eot_token_id"))
    if model == "gpt2":
        backend = _pipeline(tokens, merges, pre, source)
    else:
        spaced = get("add_space_prefix", True) is not False
        backend = sentencepiece_pipeline(tokens, kinds, merges, adds_space=spaced, source=source)
    if adds_bos is None:
        adds_bos = model == "llama" or pre in _BOS_BY_DEFAULT
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    template = metadata.get("tokenizer.chat_template")
    return HfTokenizer(
        backend,
        eos_token_ids=[i for i in ends if i is not None],
        bos_token_id=bos,
        prefix_ids=[bos] if bos is not None and adds_bos else [],
        chat_template=template if isinstance(template, str) else None,
        source=source,
    )


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _pipeline(tokens: list[str], merges: list[str], pre: str, source: str) -> tokenizers.Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [_pair(merge) for merge in merges]
    for left, right in pairs:  # the library does not look at these before it cuts them up
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise ModelFormatError(
                f"{source}: tokenizer.ggml.merges do not fit the tokens: {left!r:.80} and {right!r:.80}"
            )
    try:
        # These vocabularies hold whole words that no merge reaches.
        model = models.BPE(vocabulary, pairs, ignore_merges=pre in _BOS_BY_DEFAULT or pre == "tekken")
    except Exception as error:  # the library raises bare Exception when a merge names no token
        raise ModelFormatError(f"{source}: tokenizer.ggml.merges do not fit the tokens: {error}") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = _pre_tokenizer(pre, source)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    """The two sides of "a b"; spaces inside a side do not occur, the byte alphabet has none."""
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer(pre: str, source: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut before merging, by the name that llama.cpp gives it."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in ("gpt-2", "default"):
        return plain
    if pre in ("smollm", "starcoder", "refact", "command-r"):
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    digits = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}", "llama3": r"\p{N}{1,3}", "llama-v3": r"\p{N}{1,3}"}
    if pre not in digits and pre != "tekken":
        raise ModelFormatError(
            f"{source}: tokenizer.ggml.pre={pre!r} is not supported; supported: "
            "gpt-2, default, smollm, starcoder, refact, command-r, qwen2, llama-bpe, tekken"
        )
    pattern = Regex(_TEKKEN if pre == "tekken" else _LETTERS.format(digits=digits[pre]))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )

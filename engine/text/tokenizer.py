"""Tokenizer protocol. Owns: what the server needs from a tokenizer, and the byte-level one that needs no file.

Implementations from model files are in `gguf_tokenizer` and `hf_tokenizer`; `load_tokenizer` picks one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from engine.text.chat_template import PLAIN_TEMPLATE, ChatTemplate

_BYTES: Final = 256


class Tokenizer(Protocol):
    """Text to token ids and back. Safe to call from several threads."""

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to this, exclusive. A model may have more (padding)."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def strips_first_space(self) -> bool:
        """True when a text's first token carries a space that the text does not have."""
        ...

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids; `add_special` adds what the model wants around a bare text (BOS), not around a chat prompt."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one id adds to the text: b"" for special tokens and for ids the tokenizer does not know."""
        ...

    def decode(self, ids: Sequence[int], *, continues: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. `continues`: more text stands before it."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Prompt text for `messages` (`role`, `content`); raises ChatTemplateError."""
        ...


def decode_with(tokenizer: Tokenizer, ids: Sequence[int], continues: bool) -> str:
    """The one definition of a decode: joined bytes, read as UTF-8."""
    data = b"".join(map(tokenizer.token_bytes, ids))
    if tokenizer.strips_first_space and not continues and data.startswith(b" "):
        data = data[1:]
    return data.decode("utf-8", "replace")


class ByteTokenizer:
    """One id per byte, 256 BOS, 257 EOS; ids above stand for " <id>" so that made-up tokens can be read.

    For the simulated executor, whose vocabulary may be of any size from 258.
    """

    def __init__(self, vocab_size: int = _BYTES + 2, *, eos_token_ids: tuple[int, ...] = (_BYTES + 1,)) -> None:
        if vocab_size < _BYTES + 2:
            raise ValueError(f"vocab_size is {vocab_size}; a byte tokenizer needs at least {_BYTES + 2}")
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._template = ChatTemplate(PLAIN_TEMPLATE)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos_token_ids

    @property
    def bos_token_id(self) -> int | None:
        return _BYTES

    @property
    def strips_first_space(self) -> bool:
        return False

    def encode(self, text: str, add_special: bool = True) -> list[int]:  # noqa: ARG002 (no model, so nothing to add)
        return list(text.encode("utf-8"))

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._eos_token_ids or token_id == _BYTES or not 0 <= token_id < self._vocab_size:
            return b""
        return bytes([token_id]) if token_id < _BYTES else b" %d" % token_id

    def decode(self, ids: Sequence[int], *, continues: bool = False) -> str:
        return decode_with(self, ids, continues)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        return self._template.render(messages)


def load_tokenizer(path: Path) -> Tokenizer:
    """Tokenizer of a GGUF file or of a Hugging Face folder; raises ModelFormatError when it has none we can read."""
    if path.is_dir():
        from engine.text.hf_tokenizer import HfTokenizer

        return HfTokenizer.from_folder(path)
    from engine.text.gguf_tokenizer import tokenizer_from_gguf

    return tokenizer_from_gguf(path)

"""Incremental detokenization. Owns: text of a growing list of tokens, sent piece by piece without ever taking back.

The joined pieces equal the decode of all ids at once. That holds because both read the same bytes as UTF-8: Python's
incremental decoder keeps back exactly the bytes that may still become a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Final

from engine.text.tokenizer import Tokenizer

_UTF8: Final = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """One request's text. `position` is the number of characters handed out so far; it never falls."""

    __slots__ = ("_at_start", "_decoder", "_tokenizer", "position")

    def __init__(self, tokenizer: Tokenizer, *, continues: bool = True) -> None:
        """`continues`: text stands before (a prompt), so a first space belongs to the text."""
        self._tokenizer = tokenizer
        self._decoder = _UTF8("replace")
        self._at_start = tokenizer.strips_first_space and not continues
        self.position = 0

    def push(self, token_id: int) -> str:
        """Characters completed by this token: "" while a character is unfinished."""
        data = self._tokenizer.token_bytes(token_id)
        if self._at_start and data:
            data = data.removeprefix(b" ")
            self._at_start = False
        return self._advance(self._decoder.decode(data))

    def push_all(self, token_ids: Iterable[int]) -> str:
        """Characters completed by these tokens."""
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that never came to its end, as a full decode has it."""
        return self._advance(self._decoder.decode(b"", final=True))

    def _advance(self, text: str) -> str:
        self.position += len(text)
        return text

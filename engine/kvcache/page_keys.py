"""Page keys. Owns: how token ids become the keys by which prefixes are compared.

A key stands for a full page *and everything before it* (a keyed hash chain), so equal keys mean equal prefixes and the
scheduler never sees a token. Without a secret, at page size 1, the ids themselves serve as keys: for simulations and
recorded vectors only, since a journal would then hold the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]

#: The in-batch rule of the reference looks at this many leading tokens.
HEAD_TOKENS: Final = 32


def _digest(secret: bytes, previous: bytes, page: bytes) -> bytes:
    return blake2b(previous + page, digest_size=8, key=secret).digest()


class PageKeyer:
    """Turns the token ids of one sequence into keys, page by page.

    `secret` (up to 64 bytes, from outside the core) keeps keys from being reversed; b"" is allowed in tests.
    """

    __slots__ = ("_page_size", "_plain", "_secret")

    def __init__(self, page_size: int, secret: bytes | None) -> None:
        self._page_size = page_size
        self._secret = secret or b""
        self._plain = secret is None and page_size == 1

    @property
    def is_chained(self) -> bool:
        """Whether a key stands for everything before its page too."""
        return not self._plain

    def of(self, tokens: Sequence[int]) -> tuple[Keys, bytes]:
        """Keys of the full pages of `tokens`, and the chain state to go on from."""
        if self._plain:
            return np.asarray(tokens, dtype=np.int64), b""
        size = self._page_size
        packed = np.asarray(tokens, dtype="<i8").tobytes()
        keys = np.empty(len(tokens) // size, dtype=np.int64)
        chain = b""
        for page in range(len(keys)):
            chain = _digest(self._secret, chain, packed[page * size * 8 : (page + 1) * size * 8])
            keys[page] = int.from_bytes(chain, "little", signed=True)
        return keys, chain

    def next(self, chain: bytes, page: Sequence[int]) -> tuple[int, bytes]:
        """Key of one more full page after `chain`, and the new chain state."""
        if self._plain:
            return page[0], b""
        chain = _digest(self._secret, chain, np.asarray(page, dtype="<i8").tobytes())
        return int.from_bytes(chain, "little", signed=True), chain

    def head32(self, tokens: Sequence[int]) -> int | None:
        """One key for the first 32 tokens, None when there are fewer."""
        if len(tokens) < HEAD_TOKENS:
            return None
        packed = np.asarray(tokens[:HEAD_TOKENS], dtype="<i8").tobytes()
        return int.from_bytes(_digest(self._secret, b"head", packed), "little", signed=True)


class PageKeys:
    """The growing keys of one request. Views handed out are read-only by convention and stay valid for their length."""

    __slots__ = ("_keys", "_len")

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._len = len(keys)

    def __len__(self) -> int:
        return self._len

    def append(self, key: int) -> None:
        if self._len == len(self._keys):
            grown = np.empty(max(8, self._len * 2), dtype=np.int64)
            grown[: self._len] = self._keys[: self._len]
            self._keys = grown
        self._keys[self._len] = key
        self._len += 1

    def first(self, pages: int) -> Keys:
        """The first `pages` keys (fewer when fewer exist)."""
        return self._keys[: min(pages, self._len)]

    def at(self, page: int) -> int:
        """The key of one page, which must exist."""
        return self._keys.item(page)

    def after_chain(self, end: int, last: int) -> int | Literal[False] | None:
        """`after` for keys that each stand for all before them too: equal there, they are equal from the start."""
        keys = self._keys
        if self._len < end or keys.item(end - 1) != last:
            return False
        return keys.item(end) if self._len > end else None

    def after(self, start: int, end: int, packed: bytes) -> int | Literal[False] | None:
        """The key that follows if keys [start, end) are `packed`, None if they are and end here, False if not."""
        if self._len < end or self._keys[start:end].tobytes() != packed:
            return False
        return self._keys.item(end) if self._len > end else None

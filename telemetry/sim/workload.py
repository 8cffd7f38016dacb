"""Workload. Owns: one request as the simulator gets it, and its page keys at whatever page size is simulated.

A request's prefix is known by blocks: pages of a journal, blocks of 512 tokens of a Mooncake trace, nothing of an
Azure trace. Keys of blocks are chained (equal keys: everything up to there is equal), so pages of another size get
theirs from the block that holds their last token. Where that block is whole and ends with the page, the key is the
block's own: a simulation with the recorded page size shares exactly what was shared.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.request import Cause

_U64 = NDArray[np.uint64]
_LOW_64: Final = 2**64 - 1
_MOST_SIGNED: Final = 2**63 - 1
_GOLDEN_INT: Final = 0x9E3779B97F4A7C15
_GOLDEN: Final = np.uint64(_GOLDEN_INT)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)


#: So many keys cost less one by one than as an array.
FEW: Final = 8


def mixed(values: _U64) -> _U64:
    """SplitMix64's finaliser, element by element: equal in, equal out; else equal by chance of 2**-64."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def mixed_one(value: int) -> int:
    """`mixed` of one number, 0 to 2**64 - 1. NumPy needs ten times as long for a single one."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _LOW_64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _LOW_64
    return value ^ (value >> 31)


def digest64(text: str) -> int:
    """A 64-bit number of a text; the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class Blocks:
    """Chained keys of a request's sequence, prompt first.

    size    tokens in a block
    keys    [n] uint64, key of each block known, in order
    known   tokens that the keys speak for; a last block may be known in part
    own     a number of this request alone, of which all other keys are made
    """

    __slots__ = ("_keys", "_known", "_own", "_size")

    def __init__(self, *, size: int, keys: _U64, known: int, own: int) -> None:
        self._size = size
        self._keys = keys
        self._known = min(known, len(keys) * size)
        self._own = own

    def pages(self, page_size: int, first: int, count: int) -> NDArray[np.int64]:
        """Keys of pages [first, first + count) of `page_size` tokens."""
        ends = np.arange(first + 1, first + count + 1, dtype=np.int64) * page_size
        shared = int(np.searchsorted(ends, self._known, side="right"))
        keys = np.empty(count, dtype=np.uint64)
        with np.errstate(over="ignore"):
            if shared:
                ahead = ends[:shared]
                blocks = (ahead - 1) // self._size
                offsets = (ahead - blocks * self._size).astype(np.uint64)
                at = self._keys[blocks]
                keys[:shared] = np.where(offsets == np.uint64(self._size), at, mixed(at + offsets * _GOLDEN))
            if shared < count:
                keys[shared:] = mixed(np.uint64(self._own) + ends[shared:].astype(np.uint64) * _GOLDEN)
        return keys.view(np.int64)

    def page(self, page_size: int, index: int) -> int:
        """The key of one page, as `pages` has it."""
        end = (index + 1) * page_size
        if end > self._known:
            key = mixed_one((self._own + end * _GOLDEN_INT) & _LOW_64)
        else:
            block = (end - 1) // self._size
            offset = end - block * self._size
            key = self._keys.item(block)
            if offset != self._size:
                key = mixed_one((key + offset * _GOLDEN_INT) & _LOW_64)
        return key if key <= _MOST_SIGNED else key - _LOW_64 - 1

    def packed(self, page_size: int, count: int) -> bytes:
        """Keys of the first `count` pages as a record has them: little-endian int64."""
        if count <= FEW:
            return struct.pack(f"<{count}q", *[self.page(page_size, index) for index in range(count)])
        return self.pages(page_size, 0, count).astype("<i8", copy=False).tobytes()

    def head(self, tokens: int) -> int:
        """One key of the first `tokens` tokens: of two requests it is equal when they are known to share them."""
        return self.page(tokens, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request.

    arrival_ns      when its client sent it, from the start of the workload
    output_len      tokens after which it ends by itself
    max_new_tokens  what it asked for at most; what the scheduler may know
    head32_key      of the first 32 tokens, as recorded, once there are so many; None: from the blocks
    stops           it ends by its last token (an end token, a stop string), which `stop_detail` tells, not by length
    abort_ns        when its client left; None: never
    """

    rid: str
    arrival_ns: int
    prompt_len: int
    output_len: int
    max_new_tokens: int
    blocks: Blocks
    head32_key: int | None = None
    ignore_eos: bool = False
    priority: int | None = None
    routing_key: str | None = None
    stops: bool = False
    stop_detail: str = ""
    abort_ns: int | None = None
    abort_cause: Cause = Cause.ABORT


class Workload(Protocol):
    """Requests in the order of their arrival, as often as asked for. `name` is for people, `total` for progress."""

    name: str

    def total(self) -> int:
        """How many requests there are; may look through the file."""
        ...

    def asks(self) -> Iterator[Ask]: ...


class Held:
    """A workload whose requests were read once: every run needs them again."""

    def __init__(self, workload: Workload) -> None:
        self.name = workload.name
        self._asks: tuple[Ask, ...] = tuple(workload.asks())

    def total(self) -> int:
        return len(self._asks)

    def asks(self) -> Iterator[Ask]:
        return iter(self._asks)

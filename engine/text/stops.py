"""Stop strings. Owns: when a stop string is complete, and which text may be sent while one might still begin.

Matching runs on characters, never on events or tokens, so a stop may span any number of tokens. Engine and HTTP layer
use the same `StopMatcher` on the same tokens, hence agree on the token that ends a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer


class StopWatcher(Protocol):
    """What the engine asks after each token."""

    def push(self, token_id: int) -> bool:
        """True when this token completed a stop string."""
        ...


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A completed stop: character positions in the whole text."""

    start: int
    end: int


class _Pattern:
    """One stop string as a Knuth-Morris-Pratt automaton; `matched` characters of it end the text so far."""

    __slots__ = ("_failure", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._failure = [0] * len(text)
        length = 0
        for index in range(1, len(text)):
            while length and text[index] != text[length]:
                length = self._failure[length - 1]
            length += text[index] == text[length]
            self._failure[index] = length

    @property
    def pending(self) -> int:
        """Characters at the end of the text that may begin a match yet to come."""
        # A completed match that was passed over may overlap the next one by its tail.
        return self.matched if self.matched < len(self.text) else self._failure[-1]

    def feed(self, char: str) -> bool:
        """Take one character; True when it completes the string."""
        self.matched = self.pending
        while self.matched and char != self.text[self.matched]:
            self.matched = self._failure[self.matched - 1]
        self.matched += char == self.text[self.matched]
        return self.matched == len(self.text)


class StopMatcher:
    """Finds the stop that is completed first; of two completed by the same character, the one that began first."""

    __slots__ = ("_patterns", "_position")

    def __init__(self, stops: tuple[str, ...]) -> None:
        if "" in stops:
            raise ValueError("stop: an empty string would end every text at once")
        self._patterns = [_Pattern(stop) for stop in stops]
        self._position = 0

    @property
    def hold_back(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop: at most longest stop - 1."""
        return max((pattern.pending for pattern in self._patterns), default=0)

    def feed(self, text: str) -> StopMatch | None:
        """Take all of `text`; the first match in it, or None."""
        first: StopMatch | None = None
        for char in text:
            self._position += 1
            done = [len(p.text) for p in self._patterns if p.feed(char)]
            if done and first is None:
                first = StopMatch(self._position - max(done), self._position)
        return first


class TokenStopWatcher:
    """`StopWatcher` on a tokenizer: decodes incrementally and matches."""

    __slots__ = ("_detokenizer", "_matcher")

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = StopMatcher(stops)

    def push(self, token_id: int) -> bool:
        return self._matcher.feed(self._detokenizer.push(token_id)) is not None


def stop_watchers(tokenizer: Tokenizer) -> Callable[[tuple[str, ...]], StopWatcher]:
    """The factory an engine takes: stop strings -> a fresh watcher."""
    return lambda stops: TokenStopWatcher(tokenizer, stops)


class StoppingText:
    """Text of one response: detokenizes, holds back what may be a stop, cuts at the first completed one.

    min_new_tokens  a stop completed by an earlier token than this many is text like any other
    include_stop    keep the stop string in the text
    """

    __slots__ = ("_detokenizer", "_held", "_include", "_matcher", "_min_tokens", "_tokens", "stopped")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: tuple[str, ...] = (),
        *,
        include_stop: bool = False,
        min_new_tokens: int = 0,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = StopMatcher(stops)
        self._include = include_stop
        self._min_tokens = min_new_tokens
        self._tokens = 0
        self._held = ""
        self.stopped = False

    @property
    def position(self) -> int:
        """Characters decoded so far, held ones included: where the next token begins."""
        return self._detokenizer.position

    def push(self, token_id: int) -> str:
        """Text that may be sent now. After a completed stop nothing more comes, whatever is pushed."""
        if self.stopped:
            return ""
        self._tokens += 1
        sent = self._detokenizer.position - len(self._held)
        fresh = self._detokenizer.push(token_id)
        match = self._matcher.feed(fresh)
        text = self._held + fresh
        if match is not None and self._tokens >= self._min_tokens:
            self.stopped = True
            self._held = ""
            return text[: max(0, (match.end if self._include else match.start) - sent)]
        return self._release(text, self._matcher.hold_back)

    def finish(self) -> str:
        """The rest at the end of the tokens: held-back text, and U+FFFD for an unfinished character."""
        if self.stopped:
            return ""
        return self._release(self._held + self._detokenizer.finish(), 0)

    def _release(self, text: str, keep: int) -> str:
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

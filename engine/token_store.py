"""TokenStore. Owns: token ids of live requests, the page keys of pages as they fill, and the stop conditions.

The only place of the core loop that knows tokens. The scheduler gets keys, lengths and outcomes from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.kvcache.page_keys import HEAD_TOKENS, PageKeyer
from engine.request import GRAMMAR_FAILED, FinishReason
from engine.sampling_params import GrammarSpec, SamplingParams
from engine.scheduler.plan import OutcomeRow

Tokens = NDArray[np.int64]


class StopWatcher(Protocol):
    """Watches one request's output for its stop strings."""

    def push(self, token_id: int) -> bool:
        """True when this token completed a stop string."""
        ...


StopWatcherFactory = Callable[[tuple[str, ...]], StopWatcher]


class Grammar(Protocol):
    """Follows one request's output through its grammar."""

    def allowed(self) -> NDArray[np.int32]:
        """One bit for each token of the vocabulary, lowest bit first: may it come next."""
        ...

    def push(self, token_id: int) -> bool:
        """Take a token; False when the grammar did not allow it, or can say no more."""
        ...

    @property
    def is_complete(self) -> bool:
        """Nothing but the end may follow."""
        ...


GrammarFactory = Callable[[GrammarSpec], Grammar]


class PromptKeys(NamedTuple):
    """What the scheduler gets of a prompt: packed little-endian int64 page keys, and the key of the first 32 tokens."""

    page_keys: bytes
    head32_key: int | None


class Settled(NamedTuple):
    """One output token, judged."""

    row: OutcomeRow
    output_index: int


class _Sequence:
    """Token ids of one request, prompt first, and its key chain."""

    __slots__ = (
        *("chain", "count", "grammar", "ids", "max_new_tokens"),
        *("params", "plain", "prompt_len", "shapes_logits", "watcher"),
    )

    def __init__(
        self,
        rid: str,
        prompt: Tokens,
        params: SamplingParams,
        chain: bytes,
        watcher: StopWatcher | None,
        grammar: Grammar | None,
    ) -> None:
        #: Of a token that fills no page and ends nothing: always the same, and immutable, so it is made once. Steps are
        #: kept for a while, and a row of its own for each token would be 16 KiB of new memory in a step of 256.
        self.plain = OutcomeRow(rid)
        self.ids = np.empty(len(prompt) + 64, dtype=np.int64)
        self.ids[: len(prompt)] = prompt
        self.count = len(prompt)
        self.prompt_len = len(prompt)
        self.params = params
        self.chain = chain
        self.watcher = watcher
        self.grammar = grammar
        self.shapes_logits = params.shapes_logits
        self.max_new_tokens = params.max_new_tokens

    def append(self, token_id: int) -> None:
        if self.count == len(self.ids):
            grown = np.empty(self.count * 2, dtype=np.int64)
            grown[: self.count] = self.ids
            self.ids = grown
        self.ids[self.count] = token_id
        self.count += 1


class TokenStore:
    """Sequences by rid. `secret` keys the hash chain of page keys; see PageKeyer."""

    def __init__(
        self,
        *,
        page_size: int,
        secret: bytes | None,
        eos_token_ids: Sequence[int],
        stop_watcher: StopWatcherFactory | None = None,
        grammars: GrammarFactory | None = None,
    ) -> None:
        self._page_size: Final = page_size
        self._keyer: Final = PageKeyer(page_size, secret)
        self._eos: Final = frozenset(eos_token_ids)
        self._stop_watcher: Final = stop_watcher
        self._grammars: Final = grammars
        self._sequences: dict[str, _Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def chained_keys(self) -> bool:
        """Whether a page's key stands for everything before it too."""
        return self._keyer.is_chained

    def add(
        self, rid: str, prompt_ids: Sequence[int], params: SamplingParams, grammar: Grammar | None = None
    ) -> PromptKeys:
        """Keep a prompt; returns its keys. `grammar`: the beginning of the one in `params`; None: it is made here."""
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        keys, chain = self._keyer.of(prompt.tolist())
        watcher = None
        if params.stop and self._stop_watcher is not None:
            watcher = self._stop_watcher(params.stop)
        if grammar is None and params.grammar is not None and self._grammars is not None:
            grammar = self._grammars(params.grammar)
        self._sequences[rid] = _Sequence(rid, prompt, params, chain, watcher, grammar)
        return PromptKeys(keys.astype("<i8").tobytes(), self._keyer.head32(prompt[:HEAD_TOKENS].tolist()))

    def clamp(self, rid: str, max_new_tokens: int) -> None:
        """The scheduler's limit on the output, after its clamp to the pool."""
        self._sequences[rid].max_new_tokens = max_new_tokens

    def drop(self, rid: str) -> None:
        self._sequences.pop(rid, None)

    def row(self, rid: str) -> tuple[int, int, SamplingParams, Tokens | None, Grammar | None]:
        """What the sampler needs of a request: position and index of its next output token, and how to choose it.

        Then all its token ids when its parameters ask for them, a view that is valid until the next append, and what
        follows its grammar when it has one.
        """
        sequence = self._sequences[rid]
        count = sequence.count
        history = sequence.ids[:count] if sequence.shapes_logits else None
        return count, count - sequence.prompt_len, sequence.params, history, sequence.grammar

    def slice(self, rid: str, start: int, end: int) -> Tokens:
        """Token ids at positions [start, end) of prompt + outputs; a view, valid until the next append."""
        sequence = self._sequences[rid]
        assert end <= sequence.count, f"request {rid}: tokens [{start}, {end}) of {sequence.count}"
        return sequence.ids[start:end]

    def length(self, rid: str) -> int:
        """Prompt and outputs, in tokens."""
        return self._sequences[rid].count

    def output_index(self, rid: str) -> int:
        """Index of the next output token."""
        sequence = self._sequences[rid]
        return sequence.count - sequence.prompt_len

    def settle(self, rid: str, token_id: int) -> Settled:
        """Append one output token: key the page if it filled, test the stop conditions.

        An end token counts as an output. `min_new_tokens` is the sampler's business (it masks EOS) and is respected
        here for stop strings and stop token ids too.
        """
        sequence = self._sequences[rid]
        sequence.append(token_id)
        count, size = sequence.count, self._page_size
        outputs = count - sequence.prompt_len
        new_key = None
        if count % size == 0:
            page = sequence.ids[count - size : count].tolist()
            new_key, sequence.chain = self._keyer.next(sequence.chain, page)
        head = self._keyer.head32(sequence.ids[:HEAD_TOKENS].tolist()) if count == HEAD_TOKENS else None
        finish, detail = self._judge(sequence, token_id, outputs)
        if new_key is None and head is None and finish is None:
            return Settled(sequence.plain, outputs - 1)
        return Settled(OutcomeRow(rid, new_key, head, finish, detail), outputs - 1)

    def _judge(self, sequence: _Sequence, token_id: int, outputs: int) -> tuple[FinishReason | None, str]:
        params = sequence.params
        stopped = sequence.watcher is not None and sequence.watcher.push(token_id)
        if sequence.grammar is not None and not sequence.grammar.push(token_id):
            # No fault of a step: nothing but this request has to end.
            return FinishReason.ABORT, GRAMMAR_FAILED
        if outputs >= params.min_new_tokens:
            if token_id in self._eos and not params.ignore_eos:
                return FinishReason.STOP, "eos"
            if token_id in params.stop_token_ids:
                return FinishReason.STOP, "stop_token"
            if stopped:
                return FinishReason.STOP, "stop_string"
        if sequence.grammar is not None and sequence.grammar.is_complete:
            return FinishReason.STOP, "grammar_complete"
        if outputs >= sequence.max_new_tokens:
            clamped = sequence.max_new_tokens < params.max_new_tokens
            return FinishReason.LENGTH, "kv_pool_exhausted" if clamped else ""
        return None, ""

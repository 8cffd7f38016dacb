"""Grammars. Owns: JSON schemas and regular expressions as masks over the vocabulary, through `llguidance`.

The package is the extra `grammar`; without it every use raises GrammarError that says how to get it. A grammar is
compiled once and kept; each request walks a copy, one token at a time. A server compiles on a thread of its own, one
after another: whoever sends the longest makes others wait for their grammar, not for their tokens.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from engine.errors import RefusalCause, RequestRefused
from engine.sampling_params import GrammarSpec
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: In a checkout: the program is on no index.
INSTALL_COMMAND: Final = "pip install -e '.[grammar]'"
#: Longest schema or expression, in characters.
MAX_GRAMMAR_CHARS: Final = 65_536
#: Compiled grammars that are kept, and what they may weigh together. A unit of `_weight` takes up to 500 bytes.
_KEPT: Final = 64
_KEPT_WEIGHT: Final = 2 * MAX_GRAMMAR_CHARS
#: Grammars that may wait for their compilation, the one under way included.
MAX_WAITING: Final = 16
#: Work that a beginning may take: the library's own default lets `a{900000}` have a second and 90 MB.
_MAX_FUEL: Final = 100_000
#: States of one lexer, 1 to 2 kB each: what one grammar may take of the memory.
_MAX_LEXER_STATES: Final = 20_000
#: White space between the parts of a JSON text: enough to indent, too little to go on for ever.
_WHITE_SPACE: Final = r"[ \n\t]{0,40}"
_MAX_WORDS: Final = 200
#: The larger number of a repetition, `{3}` or `{2,3}`.
_REPEATED: Final = re.compile(r"([0-9]+),?\}")


class GrammarError(RequestRefused):
    """A grammar that cannot be used; the message says why. `unavailable`: none can, here."""

    def __init__(self, message: str, *, unavailable: bool = False) -> None:
        super().__init__(RefusalCause.INVALID, message, field="grammar")
        self.unavailable = unavailable


class GrammarBusy(RequestRefused):
    """Too many grammars wait to be compiled."""

    def __init__(self) -> None:
        super().__init__(RefusalCause.QUEUE_FULL, f"{MAX_WAITING} grammars wait to be compiled: try again later")


class GrammarState:
    """Where one output stands in its grammar. Used by one thread at a time."""

    __slots__ = ("_mask", "_matcher")

    def __init__(self, matcher: LLMatcher, mask_words: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros((1, mask_words), dtype=np.int32)

    def allowed(self) -> NDArray[np.int32]:
        """One bit for each token of the vocabulary, lowest bit first: may it come next. Valid until the next call."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._mask)
        if self._matcher.is_error() or not self._mask.any():
            # It ran into a limit of its own, or into a dead end. Any token will do, since `push` refuses it: a row
            # without a choice would end the step of all others.
            self._mask.fill(-1)
        mask: NDArray[np.int32] = self._mask[0]
        return mask

    def push(self, token_id: int) -> bool:
        """Take a token; False when the grammar did not allow it, or ran into a limit of its own."""
        # Asked twice: after an error the end token counts as taken.
        return bool(self._matcher.consume_token(token_id)) and not self._matcher.is_error()

    @property
    def is_complete(self) -> bool:
        """Nothing but the end may follow."""
        return bool(self._matcher.is_stopped())


class Compiled:
    """A grammar at its beginning, for any number of outputs. Calls may come from any thread."""

    def __init__(self, matcher: LLMatcher, mask_words: int) -> None:
        self._matcher = matcher
        self._mask_words = mask_words
        self._copying = threading.Lock()

    def begin(self) -> GrammarState:
        """The state of one new output. Takes microseconds."""
        with self._copying:
            return GrammarState(self._matcher.deep_copy(), self._mask_words)


class Grammars:
    """Compiles grammars for one tokenizer. Calls may come from any thread.

    vocab_size   tokens of the model, which may be more than the tokenizer knows
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._reading = threading.Lock()
        self._kept: OrderedDict[GrammarSpec, Compiled] = OrderedDict()
        self._waiting: dict[GrammarSpec, Future[Compiled]] = {}
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def is_ready(self, spec: GrammarSpec) -> bool:
        """Whether `spec` is kept."""
        return spec in self._kept

    def state_of(self, spec: GrammarSpec) -> GrammarState:
        """The beginning of `spec` for one output, compiled now unless it is kept. Raises GrammarError."""
        return self.compiled(spec).begin()

    def compiled(self, spec: GrammarSpec) -> Compiled:
        """`spec`, compiled now unless it is kept. Raises GrammarError."""
        compiled = self._find(spec)
        if compiled is None:
            # Not under the lock: this may take a second, and others only want what is there.
            compiled = self._compile(spec)
            self._keep(spec, compiled)
        return compiled

    def soon(self, spec: GrammarSpec) -> Compiled | Future[Compiled]:
        """`spec` when it is kept, else the promise of it, or of GrammarError. Raises GrammarBusy."""
        compiled = self._find(spec)
        if compiled is not None:
            return compiled
        with self._lock:
            promise = self._waiting.get(spec)
            if promise is None:
                if len(self._waiting) >= MAX_WAITING:
                    raise GrammarBusy
                promise = self._waiting[spec] = self._thread.submit(self._compile_in_turn, spec)
            return promise

    def _compile_in_turn(self, spec: GrammarSpec) -> Compiled:
        try:
            return self.compiled(spec)
        finally:
            with self._lock:
                self._waiting.pop(spec, None)

    def _find(self, spec: GrammarSpec) -> Compiled | None:
        with self._lock:
            compiled = self._kept.get(spec)
            if compiled is not None:
                self._kept.move_to_end(spec)
            return compiled

    def _keep(self, spec: GrammarSpec, compiled: Compiled) -> None:
        """Put it in the place of those that were used least lately. The largest is kept alone."""
        with self._lock:
            self._kept[spec] = compiled
            self._kept.move_to_end(spec)
            weight = sum(map(_weight, self._kept))
            while len(self._kept) > 1 and (len(self._kept) > _KEPT or weight > _KEPT_WEIGHT):
                weight -= _weight(self._kept.popitem(last=False)[0])

    def _compile(self, spec: GrammarSpec) -> Compiled:
        if len(spec.text) > MAX_GRAMMAR_CHARS:
            raise GrammarError(f"it has {len(spec.text)} characters; at most {MAX_GRAMMAR_CHARS} are read")
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ModuleNotFoundError:
            raise GrammarError(f"this server lacks the extra `grammar`: {INSTALL_COMMAND}", unavailable=True) from None
        try:
            if spec.kind == "regex":
                grammar = LLMatcher.grammar_from_regex(spec.text)
            else:
                grammar = LLMatcher.grammar_from_json_schema(spec.text, overrides={"whitespace_pattern": _WHITE_SPACE})
        except ValueError as error:  # no JSON, or numbers that it does not read
            raise GrammarError(_in_short(str(error))) from None
        # Silent, and without the tokens in its errors: what a request says is nobody's business.
        limits = LLParserLimits(initial_lexer_fuel=_MAX_FUEL, max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self._vocabulary_of_model(), grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            # The first mask builds most of what the others need, and meets the limits if the grammar is for none.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(_in_short(matcher.get_error()))
        compiled = Compiled(matcher, -(-self._vocab_size // 32))
        _try_a_step(compiled.begin())
        return compiled

    def _vocabulary_of_model(self) -> LLTokenizer:
        from llguidance import LLTokenizer
        from llguidance._tokenizer import TokenizerWrapper

        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = LLTokenizer(
                    TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size)),
                    eos_token=list(self._tokenizer.eos_token_ids) or None,
                )
            return self._vocabulary


class _Vocabulary:
    """The tokenizer in the shape that `llguidance` asks for. Tokens without bytes are special: no grammar has them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.tokens: Sequence[bytes] = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [token_id for token_id, data in enumerate(self.tokens) if not data]
        self.eos_token_id = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else None
        self.bos_token_id = tokenizer.bos_token_id

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, False)


def _try_a_step(state: GrammarState) -> None:
    """Raise GrammarError when already the first token would run into a limit: now it is a refusal."""
    tokens = np.flatnonzero(np.unpackbits(state.allowed().view(np.uint8), bitorder="little"))
    if not state.push(int(tokens[0])):
        raise GrammarError("its first token runs into the limits of the grammar library: simplify it")


def _weight(spec: GrammarSpec) -> int:
    """What a compiled grammar takes, roughly: its characters, and each repetition that it counts."""
    return len(spec.text) + sum(min(int(count[-9:]), _MAX_FUEL) for count in _REPEATED.findall(spec.text))


def _in_short(message: str) -> str:
    """An error on one line: what is wrong with an expression without the expression, else the first words."""
    lines = [line.strip() for line in message.splitlines()]
    faults = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    words = f"regular expression: {faults[-1]}" if faults else " ".join(message.split())
    return words if len(words) <= _MAX_WORDS else f"{words[: _MAX_WORDS - 1]}…"

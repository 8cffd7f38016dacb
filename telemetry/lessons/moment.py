"""Moments. Owns: what a lesson shows at one point in time, as immutable values.

Tokens unless a name says pages or steps. Every number comes out of the core's own plans, events and pictures.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec


class Text(NamedTuple):
    """One sentence in both languages of a lesson."""

    en: str
    zh: str

    def say(self, lang: str) -> str:
        return self.zh if lang == "zh-CN" else self.en


Kind = Literal[
    "start",
    "arrive",
    "order",
    "open",
    "skip",
    "look",
    "continuation",
    "admission",
    "refusal",
    "end",
    "growth",
    "eviction",
    "retraction",
    "preemption",
    "commit",
    "result",
    "quiet",
]


class Formula(msgspec.Struct, frozen=True):
    """One line of arithmetic with this step's numbers: "need = extend 64 + max_new 50 + page 16 = 130"."""

    text: str


class Segment(msgspec.Struct, frozen=True):
    """A part of a ledger bar. `kind`: held, decode rows, promised, continuation, admission."""

    kind: str
    label: str
    tokens: float


class LedgerBar(msgspec.Struct, frozen=True):
    """One ledger of the pass. `left` may be below 0: an overdraft.

    limit       what the bar is drawn to; None: there is no such limit in this lesson
    need, have  the two sides of the test that a candidate stands in front of, on the ledger that is tested
    """

    name: str
    limit: float | None
    segments: tuple[Segment, ...]
    left: float | None
    need: float | None = None
    have: float | None = None


class QueueRow(msgspec.Struct, frozen=True):
    """One waiting request. `key`: what the policy ordered it by, in words of the record; `marked`: it is looked at."""

    rid: str
    prompt_len: int
    output_len: int
    matched_len: int
    times_passed_over: int
    num_retractions: int
    key: str = ""


class RunRow(msgspec.Struct, frozen=True):
    """One request that holds K/V: prefill (half computed) or decode."""

    rid: str
    state: str
    prompt_len: int
    computed_len: int
    output_len: int
    max_new_tokens: int


class PageRow(msgspec.Struct, frozen=True):
    """One page: free, private, protected or evictable; `owner` is the prompt or shared prefix whose K/V it holds."""

    state: str
    owner: str


class NodeRow(msgspec.Struct, frozen=True):
    """One node of the prefix tree: tokens [start, end) of `label`. `age_rank` 0: matched or inserted longest ago."""

    label: str
    start: int
    end: int
    pages: int
    lock_count: int
    age_rank: int


class Piece(msgspec.Struct, frozen=True):
    """What one step computed for one request: prompt tokens [start, end), or one decode token. `kind`: prefill, decode.

    steps  number of steps in a row that did the same (quiet decode steps)
    """

    step: int
    rid: str
    kind: str
    start: int
    end: int
    steps: int = 1


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Everything as it is after the moment. Ledgers are empty outside a pass."""

    queue: tuple[QueueRow, ...]
    ledgers: tuple[LedgerBar, ...]
    running: tuple[RunRow, ...]
    pages: tuple[PageRow, ...]
    nodes: tuple[NodeRow, ...]
    pieces: tuple[Piece, ...]
    ratio: float
    is_full: bool


class Option(msgspec.Struct, frozen=True):
    """One possible answer. `key` is stable: a reason code, a request, a number of tokens."""

    key: str
    text: Text


class Question(msgspec.Struct, frozen=True):
    """What the scheduler decides in this moment, asked before it is shown. `answer` is the key of what it did."""

    text: Text
    options: tuple[Option, ...]
    answer: str


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """One decision, or one thing that happened.

    step       of the lesson, 1 first
    rid        the request it is about; None: about the pass or the step
    reason     the core's own code where there is one
    decided    what was decided, for comparing two runs: "admitted_first_chunk 80"; empty where nothing was
    sentences  what happened, with numbers
    formulas   how the numbers came about
    note       what the lesson's author says of it
    question   None where there was nothing to decide
    """

    index: int
    step: int
    time_ms: float
    kind: Kind
    rid: str | None
    reason: str | None
    decided: str
    title: Text
    sentences: tuple[Text, ...]
    formulas: tuple[Formula, ...]
    note: Text | None
    question: Question | None
    state: State

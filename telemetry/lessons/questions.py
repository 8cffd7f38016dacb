"""Questions. Owns: what a class is asked before a decision is shown, with the options the scheduler really had.

The answer is what the core decided; it is never worked out here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final
from zlib import crc32

from engine.scheduler.decision import AdmissionDecision, Reason
from engine.scheduler.plan import StepPlan
from telemetry.lessons.moment import Option, Question, Text
from telemetry.lessons.words import REASONS, say

MAX_OPTIONS: Final = 4

#: What may be decided about a candidate, likeliest first; those of the chunk only where there is one.
_VERDICTS: Final = (
    Reason.ADMITTED_WHOLE,
    Reason.KV_TOTAL_EXHAUSTED,
    Reason.ADMITTED_FIRST_CHUNK,
    Reason.CHUNK_BELOW_PAGE,
    Reason.COMPUTE_EXHAUSTED,
    Reason.ROWS_EXHAUSTED,
)
_OF_CHUNKS: Final = frozenset({Reason.ADMITTED_FIRST_CHUNK, Reason.CHUNK_BELOW_PAGE})


def _reason(reason: Reason) -> Option:
    words = REASONS[reason]
    return Option(reason.value, Text(f"{words.en} ({reason.value})", f"{words.zh}（{reason.value}）"))


def _asked(text: Text, options: Iterable[Option], answer: str) -> Question | None:
    """The question with at most MAX_OPTIONS options, the right one among them; None when there is no choice."""
    by_key = {option.key: option for option in options}
    wrong = [option for key, option in by_key.items() if key != answer][: MAX_OPTIONS - 1]
    if not wrong:
        return None
    # The same order in every run, and the right answer not always first.
    chosen = sorted([by_key[answer], *wrong], key=lambda option: crc32(f"{text.en} {option.key}".encode()))
    return Question(text, tuple(chosen), answer)


def first_of(considered: Sequence[str]) -> Question | None:
    """Who is looked at first."""
    options = [Option(rid, Text(rid, rid)) for rid in considered]
    return _asked(say("ask_order"), options, considered[0])


def verdict(found: AdmissionDecision, *, is_chunking: bool) -> Question | None:
    """What is decided about a candidate."""
    reasons = [reason for reason in _VERDICTS if is_chunking or reason not in _OF_CHUNKS]
    options = [_reason(reason) for reason in [*reasons, found.reason]]
    return _asked(say("ask_candidate", rid=found.rid), options, found.reason.value)


def continuation(found: AdmissionDecision, *, page_size: int) -> Question | None:
    """How much of the continuation is computed: among its rest, what the ledgers leave, and whole pages of that."""
    chunk = found.before.rem_chunk or 0
    numbers = dict.fromkeys(
        [
            found.selected_extend,
            found.candidate_extend,
            chunk,
            chunk // page_size * page_size,
            page_size,
            0,
        ]
    )
    options = [Option(str(value), say("option_tokens", n=value)) for value in sorted(numbers) if value >= 0]
    options.sort(key=lambda option: option.key == "0")
    return _asked(say("ask_continuation", rid=found.rid), options, str(found.selected_extend))


def what_next(plan: StepPlan, place: int) -> Question | None:
    """Who is looked at after `place` decisions, or why the pass ends. None at 0: that is the order's question."""
    if place == 0:
        return None
    end = plan.pass_end
    assert end is not None, f"step {plan.step}: a pass without an end"
    considered = [found.rid for found in plan.decisions]
    waiting = [rid for rid in plan.order or () if rid not in considered[:place]]
    if not waiting:
        return None
    is_chunking = plan.budget_open is not None and plan.budget_open.rem_chunk is not None
    spent = Reason.CHUNK_EXHAUSTED if is_chunking else Reason.COMPUTE_EXHAUSTED
    options = [Option(rid, say("option_look", rid=rid)) for rid in waiting[:2]]
    options += [_reason(reason) for reason in (spent, Reason.KV_TOTAL_EXHAUSTED, end.stopped_by)]
    if place < len(plan.decisions):
        options = [option for option in options if option.key != Reason.QUEUE_END.value]
    answer = end.stopped_by.value if place == len(plan.decisions) else considered[place]
    options += [Option(answer, say("option_look", rid=answer))] if answer in considered else []
    return _asked(say("ask_next"), options, answer)


def growth(*, fits: bool, is_tight: bool) -> Question | None:
    """Whether a decode step fits; not asked where nothing new is needed."""
    if not is_tight:
        return None
    options = [Option("fits", say("option_fits")), Option("retract", say("option_not"))]
    return _asked(say("ask_growth"), options, "fits" if fits else "retract")


def retraction(running: Sequence[str], victim: str) -> Question | None:
    """Who of those that run is pushed back."""
    return _asked(say("ask_retraction"), [Option(rid, Text(rid, rid)) for rid in running], victim)


def eviction(labels: Sequence[str], evicted: str) -> Question | None:
    """Whose pages leave the cache, of all that are in it."""
    return _asked(say("ask_eviction"), [Option(label, Text(label, label)) for label in [*labels, evicted]], evicted)

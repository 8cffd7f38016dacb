"""The span catalogue. Owns: every span, attribute, event and link that leaves, as data, for the page and for tests.

Times in attributes are milliseconds, because that is what somebody reads in a trace viewer; starts and ends of spans
are exact. Names under `gen_ai.` are OpenTelemetry's; `admitscope.` marks what a whole request or step has; what has
neither belongs to its span alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from telemetry.observe import BLOCKERS
from telemetry.spans.request_tree import MAX_EVENTS, MAX_LATE_TOKENS
from telemetry.spans.step_tree import MAX_LINKS

#: Stands for each blocker in the name of an attribute, and for what a long wait had before it was cut to its end.
BLOCKER: Final = "<blocker>"
NOT_KEPT: Final = "not_kept"


class Attribute(NamedTuple):
    """One attribute. `always`: every such span or event has it."""

    name: str
    kind: type[str] | type[int] | type[float] | type[bool] | type[tuple[str, ...]]
    meaning: str
    always: bool = True

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the names it stands for."""
        return re.compile(re.escape(self.name).replace(re.escape(BLOCKER), f"({'|'.join((*BLOCKERS, NOT_KEPT))})"))


class EventKind(NamedTuple):
    """One kind of event on a span. `most` on one span; None: as many as there are."""

    name: str
    when: str
    attributes: tuple[Attribute, ...]
    most: int | None = None


class SpanKind(NamedTuple):
    """One kind of span. `name` may hold words in angle brackets."""

    name: str
    parent: str
    covers: str
    attributes: tuple[Attribute, ...] = ()
    events: tuple[EventKind, ...] = ()
    links: str = ""
    errors: str = ""

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the names it stands for."""
        return re.compile(re.sub(r"<\w+>", r"\\S+", re.escape(self.name).replace(r"\ ", " ")))


def _maybe(*attributes: Attribute) -> tuple[Attribute, ...]:
    return tuple(attribute._replace(always=False) for attribute in attributes)


_LEDGERS: Final = _maybe(
    *(
        Attribute(f"{ledger}.{moment}", kind, f"Tokens left in the {ledger} ledger {moment} the decision.")
        for ledger, kind in (("compute", int), ("chunk", int), ("kv_total", float), ("kv_now", int))
        for moment in ("before", "after")
    )
)
_BLOCKED: Final = _maybe(Attribute(f"blocked_by.{BLOCKER}_ms", float, "Time under that blocker."))
_INDEX: Final = Attribute("index", int, "Which of its kind on this request, from 0.")
_VIOLATION: Final = EventKind(
    "engine.invariant.violation",
    "A law broke here.",
    (
        Attribute("id", str, "The law, as in docs/reference/invariants.md."),
        Attribute("expected", str, "What the checker's books say."),
        Attribute("observed", str, "What the engine said."),
    ),
    MAX_EVENTS,
)

_ROOT: Final = SpanKind(
    "<operation> <model>",
    "the caller's span (traceparent), or none",
    "From acceptance to the last that is known of the request.",
    (
        Attribute("gen_ai.operation.name", str, "`chat` or `text_completion`."),
        Attribute("gen_ai.provider.name", str, "`admitscope`."),
        Attribute("gen_ai.request.model", str, "As served."),
        Attribute("gen_ai.request.max_tokens", int, "Output tokens asked for, after the clamp to the pool."),
        Attribute("gen_ai.response.id", str, "The `id` of the answer, and `rid` of records and logs."),
        Attribute("gen_ai.response.model", str, "As served."),
        Attribute("gen_ai.response.finish_reasons", tuple, "One: how it ended."),
        Attribute("gen_ai.usage.input_tokens", int, "Tokens of the prompt."),
        Attribute("gen_ai.usage.output_tokens", int, "Tokens of the answer."),
        Attribute("gen_ai.usage.cache_read.input_tokens", int, "Of the prompt, found in the cache at first admission."),
        Attribute("admitscope.engine_id", str, "Which run."),
        Attribute("admitscope.chunks", int, "Pieces its prompt was computed in."),
        Attribute("admitscope.retractions", int, "How often it was pushed back."),
        Attribute("admitscope.kept_because", str, "Why this trace was kept."),
        *_maybe(
            Attribute("admitscope.ttft_ms", float, "Time to first token."),
            Attribute("admitscope.queue_ms", float, "Until first admission."),
            Attribute("admitscope.priority", int, "As asked for."),
            Attribute("admitscope.end_cause", str, "What ended it, as in `request_ends_total`."),
        ),
    ),
    (_VIOLATION,),
    errors="the cause of an abort, error or refusal; `shutdown` when the engine stopped before its end",
)

REQUEST: Final[tuple[SpanKind, ...]] = (
    _ROOT,
    SpanKind(
        "engine.intake",
        "the root",
        "From acceptance to the queue: parsing, tokenization, mailbox.",
        (Attribute("prompt_tokens", int, "Tokens of the prompt."),),
    ),
    SpanKind(
        "engine.queue",
        "the root, or an `engine.retracted`",
        "One stay in the queue.",
        (
            _INDEX,
            *_BLOCKED,
            Attribute("times_examined", int, "By an admission pass."),
            Attribute("times_passed_over", int, "By requests behind it."),
        ),
        (
            EventKind(
                "engine.admission.refused",
                "A pass examined it and refused; only when the reason is another one than before.",
                (
                    Attribute("reason", str, "As in docs/reference/reasons.md."),
                    Attribute("step", int, "Of the pass."),
                    Attribute("candidate_extend", int, "Tokens it would have computed."),
                    Attribute("prefix_len", int, "Tokens found in the cache."),
                    *_LEDGERS,
                    *_maybe(
                        Attribute("need", float, "Of the ledger that refused."),
                        Attribute("have", float, "Left in that ledger."),
                    ),
                ),
                MAX_EVENTS,
            ),
        ),
    ),
    SpanKind(
        "engine.prefill.chunk",
        "the root",
        "One piece of the prompt, from its admission to its result.",
        (
            _INDEX,
            Attribute("step", int, "In which it was computed."),
            Attribute("prefix_len", int, "Tokens before it that were there already."),
            Attribute("selected_extend", int, "Tokens computed."),
            Attribute("is_last", bool, "The first output token follows."),
            Attribute("decode_rows", int, "Running requests in the same step."),
            Attribute("pages_claimed", int, "Pages taken for it."),
            *_maybe(
                Attribute("candidate_extend", int, "Tokens that were left to compute."),
                Attribute("is_chunked", bool, "Cut here."),
                Attribute("reason", str, "As in docs/reference/reasons.md."),
                Attribute("forward_ms", float, "On the executor: the whole step."),
            ),
            *_LEDGERS,
        ),
        (
            EventKind(
                "engine.overdraft",
                "An explicit exception to a ledger was used.",
                (Attribute("kind", str, "Which, as in docs/reference/ledgers.md."),),
            ),
        ),
        links="the span of its step, where that was kept",
        errors="`step_failed`",
    ),
    SpanKind(
        "engine.between_chunks",
        "the root",
        "From the result of a piece to the admission of the next.",
        (Attribute("after_chunk", int, "Index of the piece before."), *_BLOCKED),
    ),
    SpanKind(
        "engine.retracted",
        "the root",
        "Pushed back to the queue, until it left that again.",
        (
            Attribute("cause", str, "`retract` or `preempt`."),
            *_maybe(Attribute("tokens_lost", int, "Computed tokens given up.")),
        ),
    ),
    SpanKind(
        "engine.decode",
        "the root",
        "One stretch of decoding, from the first token after a prefill to the push-back or the end.",
        (
            _INDEX,
            Attribute("tokens", int, "Output tokens in it."),
            Attribute("late_tokens", int, "Of these, later after the one before than `traces.gap_objective_s`."),
            *_maybe(
                Attribute("worst_gap_ms", float, "Longest time between two tokens."),
                Attribute("worst_gap_cause", str, "As in `token_stalls_total`."),
            ),
        ),
        (
            EventKind(
                "engine.late_token",
                "A token came late.",
                (
                    Attribute("gap_ms", float, "After the one before."),
                    Attribute("cause", str, "As in `token_stalls_total`."),
                ),
                MAX_LATE_TOKENS,
            ),
        ),
    ),
    SpanKind(
        "engine.emit",
        "the root",
        "From the first token to the first byte of the response: of a whole answer, all of decoding too.",
    ),
    SpanKind("engine.stream", "the root", "From the first byte of the response to the last."),
)

_STEP_LEDGERS: Final = _maybe(
    *(
        Attribute(f"{ledger}.{moment}", kind, f"Tokens left in the {ledger} ledger at the {words} of the pass.")
        for ledger, kind in (("compute", int), ("chunk", int), ("kv_total", float), ("kv_now", int))
        for moment, words in (("open", "start"), ("close", "end"))
    )
)

STEP: Final[tuple[SpanKind, ...]] = (
    SpanKind(
        "engine.step",
        "none: a trace of its own",
        "One step of the engine.",
        (
            Attribute("step", int, "Its number, as in records."),
            Attribute("kind", str, "`extend`, `mixed` or `decode`."),
            Attribute("rows", int, "Requests in it."),
            Attribute("decode_rows", int, "Of these, decoding."),
            Attribute("prefill_tokens", int, "Prompt tokens computed."),
            Attribute("waiting", int, "Requests in the queue."),
            Attribute("running", int, "Requests admitted."),
            Attribute("new_token_ratio", float, "Share of promised tokens that is reserved."),
            Attribute("evicted_pages", int, "Cache given up for it."),
            Attribute("retractions", int, "Requests pushed back for pages."),
            Attribute("links_omitted", int, "Requests beyond those linked."),
            *(Attribute(f"pages.{state}", int, "Pages after the plan.") for state in ("free", "private")),
            *(Attribute(f"pages.{state}", int, "Pages after the plan.") for state in ("protected", "evictable")),
            Attribute("admitscope.engine_id", str, "Which run."),
            Attribute("admitscope.kept_because", str, "Why this trace was kept."),
            *_maybe(
                Attribute("pass_end", str, "What ended the admission pass."),
                Attribute("not_considered", int, "Waiting requests not looked at."),
            ),
            *_STEP_LEDGERS,
        ),
        (_VIOLATION._replace(most=None),),
        links=f"the root span of each request in it, at most {MAX_LINKS}",
        errors="`step_failed`",
    ),
    *(
        SpanKind(f"engine.step.{name}", "`engine.step`", covers)
        for name, covers in (
            ("plan", "Deciding what runs."),
            ("commit", "Claiming pages and rows."),
            ("prepare", "Building the batch."),
            (
                "forward",
                "The executor, from the hand-over on; where steps overlap it ends the step before first.",
            ),
            ("apply", "Tokens, ends and the tree."),
        )
    ),
)


def kind_of(name: str) -> SpanKind:
    """The kind of the span `name`. Raises LookupError when there is none."""
    exact = next((kind for kind in (*REQUEST, *STEP) if kind.name == name), None)
    if exact is not None:
        return exact
    if _ROOT.pattern.fullmatch(name):
        return _ROOT
    raise LookupError(name)


def undeclared(attributes: dict[str, object], kinds: tuple[Attribute, ...]) -> Iterator[str]:
    """What is wrong with `attributes`, in words: unknown, of another type, or missing."""
    for name, value in attributes.items():
        kind = next((kind for kind in kinds if kind.pattern.fullmatch(name)), None)
        if kind is None:
            yield f"{name} is not in the catalogue"
        elif type(value) is not kind.kind and not (kind.kind is float and type(value) is int):
            yield f"{name} is {type(value).__name__}, not {kind.kind.__name__}"
    for kind in kinds:
        if kind.always and kind.name not in attributes:
            yield f"{kind.name} is missing"

"""Second part of the catalogue. Owns: laws about single requests, derived values, times, and what listeners count."""

from __future__ import annotations

from typing import Final

from invariants.law import ALWAYS, Group, Law

_SPAN_READINGS: Final = (
    "whenever whoever builds spans hands over a reading (`audit_spans`), as of the event it has come to; no longer "
    "once events were dropped on their way to it (`telemetry_dropped_total`)"
)
_READINGS: Final = "whenever a listener hands over its numbers (`audit_readings`), between two steps"

WATCH_LAWS: Final[tuple[Law, ...]] = (
    Law(
        "INV-REQ-01",
        "While somebody runs, a step computes tokens for them or prompts; at most N steps in a row do only the latter.",
        1,
        Group.REQUEST,
        "O(1) per step",
        "always, but for a step whose allocation missed; N is given to the checker, 1,024 by default, since prompts "
        "come first and decodes wait for as long as memory takes them in",
        "An idle step beside running requests, or decodes that starve behind prompts: INV-STEP-03 lets all of them run "
        "or none, so one count stands for each.",
        properties=("CHK-PROGRESS", "CHK-BYPASS", "CHK-VICTIM"),
    ),
    Law(
        "INV-REQ-02",
        "With nobody running and no prompt half done, a waiting request is admitted within two steps.",
        1,
        Group.REQUEST,
        "O(1) per step",
        "with guards on; a step whose allocation missed does not count, nor, where steps overlap, one beside somebody "
        "whose last token is under way",
        "A request that was accepted and that nothing is in the way of, refused again and again: a latched flag, or a "
        "need above what the empty pool can offer.",
        properties=("CHK-PROGRESS",),
    ),
    Law(
        "INV-REQ-03",
        "Who was passed over max_overtakes times, or waited starvation_limit_s, is looked at before anyone who entered "
        "after it.",
        1,
        Group.REQUEST,
        "O(decisions) per admitting pass with somebody due; what waits behind is not touched",
        "where one of the two limits is set; under fcfs without priorities for every waiting request, at a limit of 0",
        "A later comer that is admitted in a pass without a decision about one that is due.",
        properties=("CHK-BYPASS",),
    ),
    Law(
        "INV-REQ-04",
        "times_passed_over of a decision is the number of passes since entry that computed prompt of a later comer.",
        1,
        Group.REQUEST,
        "O(log passes) per decision",
        "for requests that wait and were never pushed back; what others were passed over before is not on record",
        "A count that is kept at the attempt instead of at the commit, or forgets.",
        properties=("CHK-BYPASS",),
    ),
    Law(
        "INV-REQ-05",
        "A request is pushed back at most once in a step, by what the plan names, with the tokens that it had.",
        1,
        Group.REQUEST,
        "O(victims)",
        ALWAYS,
        "A victim that the plan does not name or names twice, a wrong cause, or a count of ways back or of lost tokens "
        "that differs.",
        properties=("CHK-VICTIM",),
    ),
    Law(
        "INV-REQ-06",
        "Tokens found cached are told once, at the admission, and with the computed ones they are the prompt.",
        1,
        Group.REQUEST,
        "O(1) per piece and transition",
        "always; after a failed step nothing counts as computed",
        "A hit told again with a later piece, counted at an attempt that was not admitted, or a prefix that is longer "
        "than what is left out.",
        properties=("CHK-HIT",),
    ),
    Law(
        "INV-FLAG-01",
        "The kind of a step says what it computes: prompts, decodes, both or nothing.",
        1,
        Group.FLAG,
        "O(1) per step",
        ALWAYS,
        "A kind that was set for another plan, such as one whose allocation missed.",
        properties=("CHK-FLAG",),
    ),
    Law(
        "INV-FLAG-02",
        "batch_is_full is set by a refusal for want of rows or memory, and cleared when anyone leaves, a prompt moves "
        "on, or nobody runs.",
        2,
        Group.FLAG,
        "O(prefills of the last plan) per step",
        "reference accounting without preemption; elsewhere the flag does not outlive its step",
        "A stale flag: the batch has room and the queue is not looked at, or is looked at although nothing changed.",
        properties=("CHK-FLAG",),
    ),
    Law(
        "INV-FLAG-03",
        "The recorded end of a pass - what stopped it, at whom, how many were not considered - follows from its "
        "decisions.",
        1,
        Group.FLAG,
        "O(decisions)",
        ALWAYS,
        "A reason that no decision has, a stop told twice or not at all, or a number that differs from waiting less "
        "examined.",
        properties=("CHK-FLAG",),
    ),
    Law(
        "INV-FLAG-04",
        "The cap on a continuation is whole pages, leaves at least one to others, and is kept.",
        1,
        Group.FLAG,
        "O(1) per step",
        "shortest-prefill-first with a half-prefilled prompt; which prompts the cap makes room for is not in events",
        "A cap under another policy or without a continuation, a piece above it, or one that fills the slice.",
        properties=("CHK-FLAG",),
    ),
    Law(
        "INV-TIME-01",
        "The cuts of a step do not fall, a step begins when the one before has ended, and nobody is accepted after he "
        "came to the queue.",
        1,
        Group.TIME,
        "O(1) per step and arrival",
        "always; where steps overlap a step begins when the one before was launched, and is ready when that one was "
        "applied",
        "A negative interval: a clock that was read twice, or times of another step.",
        properties=("CHK-TIME",),
    ),
    Law(
        "INV-TIME-02",
        "A listener's times of a request are those of the events and in order; parts add up exactly, to first token "
        "and to the stays in the queue.",
        2,
        Group.TIME,
        "O(parts) for each request that is handed over, 64 live ones in turn",
        _READINGS,
        "A part counted twice or left out, a wait below zero, or an instant taken at another event.",
        properties=("CHK-TIME",),
    ),
    Law(
        "INV-METER-01",
        "Each gauge equals a recount, and waiting requests by blocker sum to those that wait.",
        2,
        Group.METER,
        "O(gauges)",
        _READINGS,
        "A gauge that drifts: an exit that forgot it, or a number taken too early.",
        properties=("CHK-GAUGE",),
    ),
    Law(
        "INV-METER-02",
        "No counter falls, each equals a recount of the events, and arrived = ended + live.",
        2,
        Group.METER,
        "O(counters)",
        _READINGS,
        "A counter that was reset, counted at the attempt, or missed an exit.",
        properties=("CHK-COUNT", "CHK-HIT"),
    ),
    Law(
        "INV-METER-03",
        "Each histogram has as many observations as its definition implies.",
        2,
        Group.METER,
        "O(histograms)",
        _READINGS,
        "A request observed twice or not at all: gaps are tokens less first tokens, durations are ends, waits are "
        "first admissions.",
        properties=("CHK-COUNT",),
    ),
    Law(
        "INV-SPAN-01",
        "Each live request has one open draft of spans, and each end closes one: kept, refused by the rate, or not "
        "chosen, and counted so.",
        2,
        Group.SPAN,
        "O(live + ended since the last reading)",
        _SPAN_READINGS,
        "A draft that stays open after an abort, a trace closed twice or never, or one that left without a decision.",
        properties=("CHK-SPAN", "CHK-EXIT"),
    ),
    Law(
        "INV-SPAN-02",
        "No span ends before it starts, children lie within their parents, and the root covers the request's life.",
        2,
        Group.SPAN,
        "O(spans) of the last 64 kept trees",
        _SPAN_READINGS,
        "An instant of another event, a child under another tree's span, or a root that begins at the admission.",
        properties=("CHK-SPAN", "CHK-TIME"),
    ),
)

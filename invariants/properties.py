"""The properties. Owns: what a user of an engine relies on, by the ids under which public fault reports are sorted.

A law is what one look at events or a snapshot can decide; a property is what people miss when it fails. Each law names
the properties that it guards (`Law.properties`); what no law can see says here how it is held instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Property:
    """One property.

    sentence  what must be so
    beside    how it is held beside the laws; "" when the laws are all there is
    """

    id: str
    sentence: str
    beside: str = ""


PROPERTIES: Final[tuple[Property, ...]] = (
    Property("CHK-OWN", "Every page and every row has exactly one owner; nothing is lost and nothing is held twice."),
    Property("CHK-LOCK", "A prefix is locked by exactly those who run on it, and what is locked is never evicted."),
    Property("CHK-PROMISE", "What was admitted can be allocated, to its last token."),
    Property("CHK-BUDGET", "A pass spends no more than its ledgers hold, and no computation is empty."),
    Property("CHK-CURSOR", "The pieces of a prompt join without gap or overlap, and each token is computed once."),
    Property("CHK-PROGRESS", "While anyone is unfinished, work goes on."),
    Property("CHK-BYPASS", "Nobody who could run is passed over, or left without a next token, for ever."),
    Property("CHK-EXIT", "A request ends once, its client hears it once, and nothing of it stays behind."),
    Property(
        "CHK-SAME",
        "Scheduling changes when tokens come, never which.",
        "Token values are not in events. Tests compare outputs with chunking, cache, mixing and retraction on and off "
        "(`tests/engine/test_llm_engine.py`, `tests/stateful/test_engine.py`, `tests/field/`), and with "
        "transformers (`tests/differential/`).",
    ),
    Property("CHK-HIT", "Prompt tokens found in the cache are counted once per request, and add up with the computed."),
    Property("CHK-FLAG", "A derived flag or total equals its definition."),
    Property("CHK-VICTIM", "A request is scheduled or pushed back in a step, not both, and pushed back once."),
    Property(
        "CHK-PIN",
        "Both ends of a copy in flight stay where they are until it is acknowledged.",
        "There are no copies in flight: K/V has one tier, and a page is written in the step that claimed it.",
    ),
    Property("CHK-GAUGE", "A reported number equals a recount of what it reports."),
    Property(
        "CHK-COUNT",
        "Counters never fall, and what came in is what went out or is still inside.",
        "What the door turned away is counted on other threads and is not compared while requests are on their way; "
        'increments below zero are refused and counted (`telemetry_errors_total{component="metrics"}`).',
    ),
    Property(
        "CHK-TIME",
        "Times of a request are in order, and its waits and its work add up to its life.",
        "The parts of each time to first token are summed in `ttft_residual_seconds_total`.",
    ),
    Property(
        "CHK-SPAN",
        "Each live request has one open span, ended once.",
        "That the caller's trace goes on is not in events; `tests/field/test_span_reports.py` asks a collector.",
    ),
    Property(
        "CHK-ISOLATE",
        "A fault of a listener, of a client or of one request changes nothing for the others.",
        "Listeners run behind a wall that counts their faults (`telemetry_errors_total`), so there is nothing that a "
        "law could see; tests break each of them (`tests/telemetry/test_buffered.py`, `test_process_faults.py`).",
    ),
)

BY_ID: Final[dict[str, Property]] = {entry.id: entry for entry in PROPERTIES}

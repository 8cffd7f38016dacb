"""Numbers of the view "Invariants". Owns: laws and evidence -> tables and sentences, ready to draw. Pure."""

from __future__ import annotations

import shlex
from datetime import datetime
from typing import Final, Literal, TypeVar

from dashboard import formats as f
from dashboard.tables import Table
from dashboard.theme import Palette
from dashboard.words import mark, t
from telemetry.check_report import CheckReport
from telemetry.observe import EvidenceAnswer, EvidenceDetail, LawRow, LawsAnswer

#: What the laws are of: an engine that judges itself or not, a journal that can be judged here, tables that cannot.
Kind = Literal["engine", "journal", "tables"]

_C = TypeVar("_C")

_JUDGED: Final = {
    "each": mark("every event"),
    "recount": mark("every event, and recounted by audits"),
    "audits": mark("audits only: a sample in time"),
    "never": mark("never"),
}


def _column(label: str, kind: str, unit: str = "", help_text: str = "") -> dict[str, str]:
    return {"label": label, "kind": kind, "unit": unit, "help": help_text}


def judged_words(law: LawRow, laws: LawsAnswer, kind: Kind) -> str:
    """When a law is judged; what is only sampled says so. What no engine said of a recording is not said either."""
    if kind != "engine" and not laws.is_checked:
        return t("not judged yet") if kind == "journal" else t("not judged")
    if kind == "journal" and law.judged == "never":
        return t("not by a record")
    said = t(_JUDGED[law.judged]) if law.judged in _JUDGED else law.judged
    if law.audit_every > 1 and law.judged in {"recount", "audits"}:
        said += t(" (its part in every {n}th audit)", n=law.audit_every)
    return said


def per_event_ns(laws: LawsAnswer) -> float | None:
    """What all laws of tier 1 together cost for one event, in nanoseconds; None when nothing is metered."""
    return laws.events_ns / laws.observe_seq if laws.is_checked and laws.observe_seq and laws.events_ns else None


def cost_words(laws: LawsAnswer) -> list[tuple[str, str]]:
    """(what, how much) of the checker's cost, as metered on the engine thread."""
    if not laws.is_checked:
        return []
    each = per_event_ns(laws)
    made = sum({law.group: law.family_checks for law in laws.laws}.values())
    words = [
        (t("Checks done"), f.count(made)),
        (
            t("Laws of tier 1, all together"),
            f.NOTHING if each is None else t("{time} per event", time=f.duration(each / 1e9)),
        ),
        (t("Share of the time since start"), f.share(laws.events_ns + laws.audits_ns, laws.uptime_s * 1e9)),
        (
            t("Audits (tier 2)"),
            t(
                "{n}, {each} each",
                n=f.count(laws.audits),
                each=f.duration(laws.audits_ns / laws.audits / 1e9 if laws.audits else None),
            ),
        ),
        (
            t("Between audits"),
            t("no audits") if laws.audit_period_s is None else f.duration(laws.audit_period_s),
        ),
    ]
    if laws.bundles:
        words.append((t("Evidence bundles written"), f.count(laws.bundles.get("written", 0))))
    return words


def check_command(journal: str) -> str:
    """What judges a journal in a terminal."""
    return f"admitscope check {shlex.quote(journal)}"


def verdict_words(report: CheckReport, elapsed_s: float) -> tuple[str, str]:
    """(the verdict, over what and in how much time) of a recording that was judged."""
    broken = sum(report.counts.values())
    if broken:
        head = t("{n} violations of {laws} laws.", n=f.count(broken), laws=f.count(len(report.counts)))
    else:
        head = t("Every law held.") if report.verdict == "held" else t("No violation as far as the record goes.")
    rest = t(
        "{events} events of {steps} steps, {checks} checks, {audits} audits of the replayed state; judged in {time}.",
        events=f.count(report.events),
        steps=f.count(report.steps),
        checks=f.count(sum(report.checks.values())),
        audits=f.count(report.audits),
        time=f.duration(elapsed_s),
    )
    return head, rest


def violations_table(report: CheckReport, colours: Palette) -> Table:
    """The violations that the report names, in the order of the record; the id of a row is its number."""
    rows = [
        {
            "id": str(number),
            "cells": [
                [found.id, found.id, None, colours.bad, found.law],
                [f.count(found.step), found.step],
                [f.clock(found.t_wall_s), found.t_wall_s],
                [f.short_rid(found.rid) if found.rid else f.NOTHING, found.rid or "", None, None, found.rid or ""],
                [_short(found.expected), found.expected, None, None, found.expected],
                [_short(found.found), found.found, None, None, found.found],
            ],
        }
        for number, found in enumerate(report.violations)
    ]
    total = sum(report.counts.values())
    return Table(
        columns=(
            _column(t("Law"), "pill"),
            _column(t("Step"), "num"),
            _column(t("Time"), "num"),
            _column(t("Request"), "mono"),
            _column(t("Expected"), "text"),
            _column(t("Found"), "text"),
        ),
        rows=rows,
        note=t("{n} of {total} violations, in order of time", n=f.count(len(rows)), total=f.count(total)),
        filter=t("Filter"),
    )


def laws_table(laws: LawsAnswer, colours: Palette, *, kind: Kind = "engine") -> Table:
    """Every law in the order of the catalogue; those that broke first. A recording has neither mode nor, before it was
    judged, any number.
    """
    ordered = sorted(laws.laws, key=lambda law: -law.violations)
    is_told = laws.is_checked or kind == "engine"
    rows = []
    for law in ordered:
        is_never = law.judged == "never"
        colour = colours.bad if law.violations else colours.muted if is_never else colours.good
        last = f.NOTHING if law.last is None else t("step {step}", step=f.count(law.last.step))
        cells: list[object] = [
            [law.id, law.id, None, colour, law.sentence],
            [_short(law.sentence), law.sentence, None, None, law.sentence],
            [str(law.tier), law.tier],
            law.mode,
            [judged_words(law, laws, kind), law.judged, None, None, law.applies],
            [f.count(law.family_checks) if is_told else f.NOTHING, law.family_checks, None, None, law.group],
            [_short(law.cost, 34), law.cost, None, None, law.cost],
            [f.count(law.violations) if laws.is_checked else f.NOTHING, law.violations],
            [last, -1 if law.last is None else law.last.step],
        ]
        rows.append({"id": law.id, "quiet": is_never, "cells": cells if kind == "engine" else _without_mode(cells)})
    broken = sum(law.violations > 0 for law in laws.laws)
    columns = [
        _column(t("Law"), "pill"),
        _column(t("What must hold"), "text"),
        _column(t("Tier"), "num", "", t("1: per event; 2: also recounted by audits of the whole state")),
        _column(t("Mode"), "text", "", t("what a violation does: off, record or raise")),
        _column(t("Judged"), "text"),
        _column(t("Checks"), "num", "", t("of its family: single laws are not counted apart")),
        _column(t("Cost grows with"), "text"),
        _column(t("Violations"), "num"),
        _column(t("Last"), "num"),
    ]
    return Table(
        columns=tuple(columns if kind == "engine" else _without_mode(columns)),
        rows=rows,
        note=_laws_note(laws, broken, kind),
        filter=t("Filter, or an id and Enter"),
    )


def _without_mode(cells: list[_C]) -> list[_C]:
    return [*cells[:3], *cells[4:]]


def _laws_note(laws: LawsAnswer, broken: int, kind: Kind) -> str:
    n = f.count(len(laws.laws))
    if laws.is_checked:
        return t("{n} laws, {broken} broken", n=n, broken=f.count(broken))
    return t("{n} laws, not judged yet", n=n) if kind == "journal" else t("{n} laws, none judged here", n=n)


def sentence(words: str) -> str:
    """An engine's words as a sentence of a page: a capital, a full stop, no backquotes."""
    said = words.replace("`", "").strip().rstrip(".")
    return f"{said[:1].upper()}{said[1:]}." if said else ""


def _short(text: str, limit: int = 78) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1].rstrip()}…"


def evidence_table(evidence: EvidenceAnswer, colours: Palette, *, is_recorded: bool = False) -> Table:
    """Bundles on disk, newest first."""
    none = t("One is written beside the journal when a law breaks.") if evidence.is_kept else evidence.why
    if is_recorded:
        none = t("None lies beside this journal: no law broke while it was written, or its engine kept none.")
    rows = [
        {
            "id": row.id,
            "quiet": not row.is_this_run,
            "cells": [
                [row.law or t("cannot be read"), row.law, None, colours.bad if row.law else colours.muted, row.id],
                [f.count(row.step), row.step],
                [f.short_rid(row.rid) if row.rid else f.NOTHING, row.rid or "", None, None, row.rid or ""],
                [clock_of(row.at), row.at, None, None, row.at],
                [t("this run") if row.is_this_run else t("an earlier run"), row.id],
                [_short(row.error or f"{row.expected} | {row.found}"), row.found, None, None, row.error or row.found],
                [f.count(row.size_bytes / 1024), row.size_bytes],
            ],
        }
        for row in evidence.rows
    ]
    return Table(
        columns=(
            _column(t("Law"), "pill"),
            _column(t("Step"), "num"),
            _column(t("Request"), "mono"),
            _column(t("Time"), "num"),
            _column(t("Run"), "text"),
            _column(t("Expected | found"), "text"),
            _column(t("Size"), "num", "KiB"),
        ),
        rows=rows,
        note=t("{n} of {total} bundles", n=f.count(len(rows)), total=f.count(evidence.total)),
        empty=(t("No evidence bundle"), none),
    )


def clock_of(at: str) -> str:
    """The time of day of an ISO time, in local time; the text itself when it is none."""
    try:
        return f.clock(datetime.fromisoformat(at).timestamp())
    except ValueError:
        return at or f.NOTHING


def differences_table(detail: EvidenceDetail, colours: Palette) -> Table:
    """What should be so against what was found: the violation, then a recount of the bundle's state."""
    rows = [
        {
            "id": str(at),
            "quiet": not row.law,
            "cells": [
                [row.law or t("counter"), row.law, None, colours.bad if row.law else colours.muted],
                [row.expected, row.expected, None, None, row.expected],
                [row.found, row.found, None, None, row.found],
                [f.short_rid(row.rid) if row.rid else f.NOTHING, row.rid or ""],
            ],
        }
        for at, row in enumerate(detail.differences)
    ]
    return Table(
        columns=(
            _column(t("Law"), "pill"),
            _column(t("Expected"), "text"),
            _column(t("Found"), "text"),
            _column(t("Request"), "mono"),
        ),
        rows=rows,
        note=t("{n} differences; state: {taken}", n=f.count(len(rows)), taken=detail.taken or t("none")),
    )


def records_table(detail: EvidenceDetail, colours: Palette) -> Table:
    """The records around the violation, the offending one first."""
    rows = [
        {
            "id": str(record.seq),
            "quiet": not (record.is_evidence or record.is_offending),
            "cells": [
                [f.count(record.seq), record.seq],
                [f.count(record.step), record.step],
                [f.duration(record.before_ms / 1e3), record.before_ms],
                [
                    record.type + (t(" · offending") if record.is_offending else ""),
                    record.type,
                    None,
                    colours.bad if record.is_offending else colours.p99 if record.is_evidence else colours.muted,
                ],
                [_short(record.text, 130), record.text, None, None, record.text],
            ],
        }
        for record in reversed(detail.records)
    ]
    return Table(
        columns=(
            _column(t("Event"), "num", "seq"),
            _column(t("Step"), "num"),
            _column(t("Earlier by"), "num", "", t("before the offending record")),
            _column(t("Record"), "pill"),
            _column(t("Fields"), "mono"),
        ),
        rows=rows,
        note=t("{n} of {total} records in the bundle, newest first", n=len(rows), total=f.count(detail.records_total)),
        filter=t("Filter"),
    )

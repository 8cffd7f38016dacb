"""Pictures of a lesson's moment. Owns: the state as HTML — ledgers as bars, queue, pages, timeline, tree.

Pure functions, no Streamlit. Everything that comes out of a lesson file is escaped. Colours are told apart by a label,
a place or a pattern too; each picture says in words what it shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby
from typing import Final

from dashboard import formats as f
from dashboard.theme import Palette, contrast
from dashboard.words import mark, t
from telemetry.lessons.moment import LedgerBar, NodeRow, PageRow, Piece, QueueRow, RunRow, Segment, State

#: Up to here each page is a square of its own; more are shown as runs.
MAX_SQUARES: Final = 320
#: Steps on the timeline at which a piece is still wide enough to carry its number.
_LABELLED_STEPS: Final = 14


def ledgers(bars: tuple[LedgerBar, ...], owners: dict[str, str], colours: Palette) -> str:
    """Each ledger drawn to its own limit: what was taken off, for whom, and what is left."""
    return f'<div class="cr-ledgers">{"".join(_ledger(bar, owners, colours) for bar in bars)}</div>'


def _ledger(bar: LedgerBar, owners: dict[str, str], colours: Palette) -> str:
    limit = bar.limit or 1.0
    left = bar.left or 0.0
    parts, at = [], 0.0
    for segment in bar.segments:
        width = min(segment.tokens, max(0.0, limit - at))
        if width > 0:
            parts.append(_part(segment, at, width, limit, owners | ledger_colours(colours), colours))
        at += segment.tokens
    asks = ""
    if bar.need is not None and bar.have is not None:
        start = max(0.0, limit - bar.have)
        start, width = min(start, limit), max(0.0, min(bar.need, limit - min(start, limit)))
        kind = "cr-fits" if bar.need < bar.have else "cr-short"
        asks = f'<b class="cr-need {kind}" style="left:{_share(start, limit)};width:{_share(width, limit)}"></b>'
        words = t("need {need}, have {have}", need=f.tokens(bar.need), have=f.tokens(bar.have))
        asks += f'<em class="cr-need-words {kind}">{escape(words)}</em>'
    state = ' class="cr-bar cr-over"' if left < 0 else ' class="cr-bar"'
    figure = t("{left} of {limit} tok left", left=f.tokens(left), limit=f.tokens(bar.limit))
    return (
        f'<div class="cr-ledger" role="img" aria-label="{escape(f"{bar.name}: {figure}")}">'
        f"<code>{escape(bar.name)}</code><div{state}>{''.join(parts)}{asks}</div>"
        f'<span class="cr-left">{escape(figure)}</span></div>'
    )


def ledger_colours(colours: Palette) -> dict[str, str]:
    """Of what is no request's own: parts of a bar that the running requests took before anybody was looked at."""
    return {"held": colours.line, "decode rows": colours.segments["decode rows"], "promised": colours.muted}


def _part(segment: Segment, at: float, width: float, limit: float, marks: dict[str, str], colours: Palette) -> str:
    colour = marks.get(segment.label or segment.kind, colours.segments["admission"])
    ink = max((colours.page, colours.text), key=lambda candidate: contrast(candidate, colour))
    title = f"{segment.label} {t(SEGMENT_WORDS[segment.kind])}: {f.tokens(segment.tokens)} tok".strip()
    label = escape(segment.label) if width / limit > 0.06 else ""
    pattern = " cr-hatched" if segment.kind == "promised" else ""
    return (
        f'<i class="cr-part{pattern}" title="{escape(title)}" style="left:{_share(at, limit)};'
        f'width:{_share(width, limit)};--mark:{colour};color:{ink}">{label}</i>'
    )


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3f}%"


def queue(rows: tuple[QueueRow, ...], owners: dict[str, str], *, looked_at: str | None) -> str:
    """Who waits, in order; the one that is looked at stands out."""
    if not rows:
        return f'<p class="cr-none">{escape(t("Nobody waits."))}</p>'
    chips = []
    for place, row in enumerate(rows, 1):
        marked = ' aria-current="true"' if row.rid == looked_at else ""
        facts = [t("prompt {n} tok", n=f.count(row.prompt_len))]
        if row.output_len:
            facts.append(t("outputs {n} tok", n=f.count(row.output_len)))
        if row.key:
            facts.append(row.key)
        if row.times_passed_over:
            facts.append(t("passed over {n}×", n=row.times_passed_over))
        small = "".join(f"<small>{escape(fact)}</small>" for fact in facts)
        chips.append(
            f'<li style="--mark:{owners.get(row.rid, "inherit")}"{marked}><b>{place}</b>'
            f"<strong>{escape(row.rid)}</strong>{small}</li>"
        )
    return f'<ol class="cr-queue">{"".join(chips)}</ol>'


def running(rows: tuple[RunRow, ...], owners: dict[str, str]) -> str:
    """Who holds K/V: how much of the prompt is computed, and how many outputs there are of those promised."""
    if not rows:
        return f'<p class="cr-none">{escape(t("Nobody runs."))}</p>'
    chips = []
    for row in rows:
        seq = row.prompt_len + (row.output_len if row.state == "prefill" else 0)
        if row.state == "prefill":
            done = row.computed_len / seq if seq else 0.0
            words = t("prefill {done} of {all}", done=f.count(row.computed_len), all=f.count(seq))
        else:
            done = row.output_len / row.max_new_tokens
            words = t("decode {done} of {all}", done=f.count(row.output_len), all=f.count(row.max_new_tokens))
        chips.append(
            f'<li class="cr-{escape(row.state)}" style="--mark:{owners.get(row.rid, "inherit")};--done:{done:.3f}">'
            f"<strong>{escape(row.rid)}</strong><small>{escape(words)}</small><u></u></li>"
        )
    return f'<ul class="cr-running">{"".join(chips)}</ul>'


def pages(rows: tuple[PageRow, ...], owners: dict[str, str]) -> str:
    """The pool: a square a page while they can be told apart, else runs of equal pages."""
    counts = {state: sum(1 for row in rows if row.state == state) for state in PAGE_WORDS}
    said = ", ".join(f"{t(PAGE_WORDS[state])} {count}" for state, count in counts.items())
    if len(rows) <= MAX_SQUARES:
        marks = "".join(
            f'<i class="cr-{row.state}" style="--mark:{owners.get(row.owner, "inherit")}" '
            f'title="{escape(_page_title(place, row))}"></i>'
            for place, row in enumerate(rows)
        )
        body = f'<div class="cr-pages">{marks}</div>'
    else:
        marks = ""
        for (state, owner), run in groupby(rows, key=lambda row: (row.state, row.owner)):
            count = sum(1 for _ in run)
            marks += (
                f'<i class="cr-{state}" style="--mark:{owners.get(owner, "inherit")};flex-grow:{count}" '
                f'title="{escape(f"{owner} {state} {count}".strip())}"></i>'
            )
        body = f'<div class="cr-runs">{marks}</div>'
    legend = "".join(
        f'<span><i class="cr-{state}"></i>{escape(t(PAGE_WORDS[state]))} <b>{f.count(count)}</b></span>'
        for state, count in counts.items()
    )
    held = dict.fromkeys(row.owner for row in rows if row.owner)
    names = "".join(
        f'<span><i class="cr-owner" style="--mark:{owners.get(owner, "inherit")}"></i>{escape(owner)}</span>'
        for owner in held
    )
    return (
        f'<div role="img" aria-label="{escape(said)}">{body}</div>'
        f'<div class="cr-legend">{legend}</div><div class="cr-legend">{names}</div>'
    )


def _page_title(place: int, row: PageRow) -> str:
    owner = f" · {row.owner}" if row.owner else ""
    return f"{t('page {n}', n=place)} · {t(PAGE_WORDS.get(row.state, row.state))}{owner}"


def tree(nodes: tuple[NodeRow, ...], owners: dict[str, str]) -> str:
    """The prefix tree, what was used longest ago first; locked nodes say by how many."""
    rows = "".join(
        f'<li style="--mark:{owners.get(node.label.split("+")[0], "inherit")}"'
        f"{' class=cr-locked' if node.lock_count else ''}><strong>{escape(node.label)}</strong>"
        f"<small>{escape(t('tokens {start} to {end}', start=f.count(node.start), end=f.count(node.end)))}</small>"
        f"<em>{escape(_locks(node))}</em></li>"
        for node in nodes
    )
    return f'<ol class="cr-tree">{rows}</ol>'


def _locks(node: NodeRow) -> str:
    if node.lock_count:
        return t("locked by {n}", n=f.count(node.lock_count))
    return t("evictable")


def timeline(state: State, lanes: dict[str, str], owners: dict[str, str], *, steps: int, step: int) -> str:
    """What each step computed for whom: prompt pieces with their tokens, decode rows as a thin line."""
    shown = list(dict.fromkeys(lanes[piece.rid] for piece in state.pieces if piece.rid in lanes))
    order = [lane for lane in dict.fromkeys(lanes.values()) if lane in shown]
    rows = []
    for lane in order:
        own = [piece for piece in state.pieces if lanes.get(piece.rid) == lane]
        marks = "".join(_piece(piece, owners, steps) for piece in _once(own))
        rows.append(f'<div class="cr-lane"><span>{escape(lane)}</span><div>{marks}</div></div>')
    now = f'<u style="left:{_share(max(step, 1) - 0.5, steps)}">{max(step, 1)}</u>'
    ticks = "".join(f'<em style="left:{_share(tick - 0.5, steps)}">{tick}</em>' for tick in _ticks(steps))
    axis = f'<div class="cr-lane cr-axis"><span>{escape(t("step"))}</span><div>{ticks}{now}</div></div>'
    return f'<div class="cr-timeline">{"".join(rows)}{axis}</div>'


def _once(pieces: list[Piece]) -> Iterable[Piece]:
    """One decode mark per step of a shared lane; prompt pieces stay."""
    seen: set[tuple[int, str]] = set()
    for piece in pieces:
        key = (piece.step, piece.kind if piece.kind == "decode" else piece.rid)
        if key not in seen:
            seen.add(key)
            yield piece


def _piece(piece: Piece, owners: dict[str, str], steps: int) -> str:
    start = piece.step - piece.steps
    tokens = piece.end - piece.start
    if piece.kind == "prefill":
        title = t("step {step}: {rid} tokens {a} to {b}", step=piece.step, rid=piece.rid, a=piece.start, b=piece.end)
        label = f.count(tokens) if steps <= _LABELLED_STEPS else ""
    else:
        title = t("{rid}: {n} decode tokens until step {step}", rid=piece.rid, n=piece.steps, step=piece.step)
        label = ""
    return (
        f'<i class="cr-{piece.kind}-piece" title="{escape(title)}" style="left:{_share(start, steps)};'
        f'width:{_share(piece.steps, steps)};--mark:{owners.get(piece.rid, "inherit")}">{label}</i>'
    )


def _ticks(steps: int) -> list[int]:
    every = next(size for size in (1, 2, 5, 10, 20, 50, 100, 200) if steps / size <= 12 or size == 200)
    return sorted({1, *range(every, steps + 1, every)}) if every > 1 else list(range(1, steps + 1))


def formulas(texts: Iterable[str]) -> str:
    """Lines of arithmetic; the result, or the code after an arrow, stands out."""
    lines = "".join(f"<li>{_formula(text)}</li>" for text in texts)
    return f'<ul class="cr-formulas">{lines}</ul>' if lines else ""


def _formula(text: str) -> str:
    head, arrow, tail = text.rpartition(" -> ")
    if not arrow:
        head, _, tail = text.rpartition(" ")
        if " = " not in text:
            head, tail = text, ""
    shown = f"{head}{' → ' if arrow else ' '}" if head else ""
    for plain, sign in ((" <= ", " ≤ "), (" >= ", " ≥ "), (" - ", " − ")):
        shown = shown.replace(plain, sign)
    return f"{escape(shown)}<b>{escape(tail)}</b>" if tail else escape(shown)


#: English; translated where they are shown.
SEGMENT_WORDS: Final = {
    "held": mark("held by running"),
    "decode rows": mark("decode rows"),
    "promised": mark("promised"),
    "continuation": mark("continuation"),
    "admission": mark("admission"),
}
PAGE_WORDS: Final = {
    "free": mark("free"),
    "private": mark("private"),
    "protected": mark("protected"),
    "evictable": mark("evictable"),
}

"""The view "Invariants": every law with its checks and cost, and evidence bundles opened in place."""

from __future__ import annotations

from html import escape

import streamlit as st

from dashboard import formats as f
from dashboard import frames_laws as frames
from dashboard.components import live_table
from dashboard.feed import Look
from dashboard.session import Viewer
from dashboard.views.judging import can_be_judged, judging, ways_to
from dashboard.views.parts import waiting_for_engine
from dashboard.words import t
from telemetry.observe import EvidenceAnswer, EvidenceDetail, LawRow, LawsAnswer


def show(viewer: Viewer, look: Look) -> None:
    """What checking costs, the laws, the picked one in full, and evidence: the list, or one bundle opened."""
    laws = look.laws
    if laws is None:
        if look.status is None:
            waiting_for_engine(viewer, look.error)
        else:
            st.caption(t("This source does not say: its engine is older than this page."))
        return
    laws = _cost(viewer, laws)
    opened = viewer.selection("bundle")
    if opened is not None:
        _bundle(viewer, opened)
    _laws(viewer, laws)
    if look.evidence is not None and opened is None:
        _evidence(viewer, look.evidence)


def _cost(viewer: Viewer, laws: LawsAnswer) -> LawsAnswer:
    """What checking costs, or why no law is judged; returns the laws, of a recording as they were judged here."""
    st.subheader(t("Laws of the engine"), anchor=False)
    if can_be_judged(viewer):
        return judging(viewer, laws)
    if not laws.is_checked:
        _unjudged(viewer, laws)
        return laws
    cells = "".join(f"<span><em>{escape(what)}</em> {escape(much)}</span>" for what, much in frames.cost_words(laws))
    st.html(f'<div class="amounts" data-testid="checker-cost">{cells}</div>')
    st.caption(laws.words)
    if laws.internal_errors:
        st.html(
            f'<div class="nothing"><strong>{escape(t("The checker itself failed"))}</strong><span>'
            f"{escape(f.count(laws.internal_errors))} × {escape(laws.last_internal_error)}</span></div>"
        )
    return laws


def _unjudged(viewer: Viewer, laws: LawsAnswer) -> None:
    title, more = t("Tables cannot be judged"), ""
    if not viewer.place.is_recorded:
        title = t("No law is judged here")
        more = t("On an engine this is a setting, not a fault: ADMITSCOPE_ON_VIOLATION=record judges them.")
    st.html(
        f'<div class="nothing" data-testid="checker-off"><strong>{escape(title)}</strong>'
        f"<span>{escape(frames.sentence(laws.words))} {escape(more)}</span></div>"
    )


def _laws(viewer: Viewer, laws: LawsAnswer) -> None:
    picked = viewer.selection("law")
    live_table(
        frames.laws_table(laws, viewer.colours, kind=_kind(viewer)),
        viewer.colours,
        key="laws",
        height=430 if picked is None else 260,
        selected=picked,
        on_pick=lambda law: viewer.select("law", law),
    )
    law = next((row for row in laws.laws if row.id == picked), None)
    if law is None:
        st.caption(t("Click a law to read where it holds, and what its failure means."))
        return
    _law(viewer, laws, law)


def _kind(viewer: Viewer) -> frames.Kind:
    return "engine" if not viewer.place.is_recorded else "journal" if can_be_judged(viewer) else "tables"


def _judged(viewer: Viewer, laws: LawsAnswer, law: LawRow) -> str:
    judged = frames.judged_words(law, laws, _kind(viewer))
    if viewer.place.is_recorded:
        return t("Judged: {judged}. One check costs {cost}.", judged=judged, cost=law.cost)
    return t("Judged: {judged}. One check costs {cost}. Mode {mode}.", judged=judged, cost=law.cost, mode=law.mode)


def _law(viewer: Viewer, laws: LawsAnswer, law: LawRow) -> None:
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.html(f'<h3 class="why"><code>{escape(law.id)}</code></h3>', width="content")
        st.button(t("Close"), key="close_law", type="tertiary", on_click=lambda: viewer.select("law", None))
    lines = [
        law.sentence,
        t("Holds: {applies}.", applies=law.applies),
        t("Broken it looks like this: {fails}", fails=law.fails),
        _judged(viewer, laws, law),
    ]
    if law.last is not None:
        lines.append(
            t(
                "Last broken in step {step} at {time}: expected {expected}; found {found}.",
                step=f.count(law.last.step),
                time=f.clock(law.last.t_wall_s),
                expected=law.last.expected,
                found=law.last.found,
            )
        )
    st.html(f'<ol class="explain" data-testid="law">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ol>')
    if law.last is not None:
        ways_to(viewer, law.last.step, law.last.rid, key="law")


def _evidence(viewer: Viewer, evidence: EvidenceAnswer) -> None:
    st.subheader(t("Evidence"), anchor=False)
    live_table(
        frames.evidence_table(evidence, viewer.colours, is_recorded=viewer.place.is_recorded),
        viewer.colours,
        key="evidence",
        height=260,
        on_pick=lambda name: viewer.select("bundle", name),
    )
    if evidence.rows:
        st.caption(t("Click a bundle to open it: what was expected and found, the records before it, and the command."))


def _bundle(viewer: Viewer, name: str) -> None:
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.html(f'<h3 class="why">{escape(t("Evidence"))} <code>{escape(name)}</code></h3>', width="content")
        st.button(t("Close"), key="close_bundle", type="tertiary", on_click=lambda: viewer.select("bundle", None))
    found = viewer.ask("bundle", name, question=lambda source: source.bundle(name))
    if found.value is None:
        st.html(
            f'<div class="nothing"><strong>{escape(t("No such bundle"))}</strong>'
            f"<span>{escape(found.error or t('It is not beside the journal of this source.'))}</span></div>"
        )
        return
    _opened(viewer, found.value)


def _opened(viewer: Viewer, detail: EvidenceDetail) -> None:
    row = detail.row
    lines = [
        *([row.error] if row.error else []),
        f"{row.law}: {detail.sentence}",
        t("Expected {expected}; found {found}.", expected=row.expected, found=row.found),
        t(
            "In step {step} at {time}, shown by an {by}; mode {mode}; version {version}, model {model}.",
            step=f.count(row.step),
            time=frames.clock_of(row.at),
            by=row.found_by or "event",
            mode=row.mode,
            version=detail.version,
            model=detail.model,
        ),
    ]
    st.html(f'<ol class="explain" data-testid="bundle">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ol>')
    if row.is_this_run:  # in another run the same number is another step
        ways_to(viewer, row.step, row.rid, key="bundle")
    st.subheader(t("What differs"), anchor=False)
    live_table(frames.differences_table(detail, viewer.colours), viewer.colours, key="differences", height=210)
    st.subheader(t("Records around it"), anchor=False)
    live_table(frames.records_table(detail, viewer.colours), viewer.colours, key="bundle_records", height=330)
    for why, command in detail.commands:
        st.caption(why)
        st.code(command, language="sh")

"""The view "Invariants": every law with its checks and cost, and evidence bundles opened in place."""

from __future__ import annotations

import shlex
from html import escape

import streamlit as st

from dashboard import formats as f
from dashboard import frames_laws as frames
from dashboard.components import live_table
from dashboard.feed import Look
from dashboard.session import Viewer
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
    _cost(viewer, laws)
    opened = viewer.selection("bundle")
    if opened is not None:
        _bundle(viewer, opened)
    _laws(viewer, laws)
    if look.evidence is not None and opened is None:
        _evidence(viewer, look.evidence)


def _cost(viewer: Viewer, laws: LawsAnswer) -> None:
    st.subheader(t("Laws of the engine"), anchor=False)
    if not laws.is_checked and viewer.place.is_recorded:
        _judge_it(viewer, laws)
        return
    if not laws.is_checked:
        st.html(
            f'<div class="nothing" data-testid="checker-off"><strong>{escape(t("No law is judged here"))}</strong>'
            f"<span>{escape(frames.sentence(laws.words))} "
            f"{escape(t('On an engine this is a setting, not a fault: ADMITSCOPE_ON_VIOLATION=record judges them.'))}"
            "</span></div>"
        )
        return
    cells = "".join(f"<span><em>{escape(what)}</em> {escape(much)}</span>" for what, much in frames.cost_words(laws))
    st.html(f'<div class="amounts" data-testid="checker-cost">{cells}</div>')
    st.caption(laws.words)
    if laws.internal_errors:
        st.html(
            f'<div class="nothing"><strong>{escape(t("The checker itself failed"))}</strong><span>'
            f"{escape(f.count(laws.internal_errors))} × {escape(laws.last_internal_error)}</span></div>"
        )


def _judge_it(viewer: Viewer, laws: LawsAnswer) -> None:
    """A recording holds what the engine did, not what a checker said of it: the command that judges it now."""
    if viewer.recording is not None and viewer.recording.recording.is_tables:
        st.html(
            f'<div class="nothing" data-testid="checker-recorded"><strong>{escape(t("Tables show no judging"))}'
            f"</strong><span>{escape(frames.sentence(laws.words))}</span></div>"
        )
        return
    st.html(
        f'<div class="nothing" data-testid="checker-recorded"><strong>{escape(t("A recording shows no judging"))}'
        f"</strong><span>{escape(t('It holds what happened, not what a checker said of it. To judge all of it now:'))}"
        "</span></div>"
    )
    st.code(f"admitscope check {shlex.quote(viewer.place.where)}", language="sh")


def _laws(viewer: Viewer, laws: LawsAnswer) -> None:
    picked = viewer.selection("law")
    live_table(
        frames.laws_table(laws, viewer.colours),
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
    _law(viewer, law)


def _law(viewer: Viewer, law: LawRow) -> None:
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.html(f'<h3 class="why"><code>{escape(law.id)}</code></h3>', width="content")
        st.button(t("Close"), key="close_law", type="tertiary", on_click=lambda: viewer.select("law", None))
    lines = [
        law.sentence,
        t("Holds: {applies}.", applies=law.applies),
        t("Broken it looks like this: {fails}", fails=law.fails),
        t(
            "Judged: {judged}. One check costs {cost}. Mode {mode}.",
            judged=frames.judged_words(law),
            cost=law.cost,
            mode=law.mode,
        ),
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
        _ways(viewer, law.last.step, law.last.rid, key="law")


def _ways(viewer: Viewer, step: int, rid: str | None, *, key: str) -> None:
    """Buttons to the step and the request that a violation is about."""
    with st.container(horizontal=True, gap="small"):
        st.button(
            t("Admission at step {step}", step=f.count(step)),
            key=f"{key}_to_step",
            on_click=lambda: viewer.select_all({"view": "admission", "step": step}),
            help=t("An engine keeps its last 512 steps; older ones are in the journal."),
        )
        if rid is not None:
            st.button(
                t("Request {rid}", rid=f.short_rid(rid)),
                key=f"{key}_to_request",
                on_click=lambda: viewer.select_all({"view": "requests", "rid": rid}),
            )


def _evidence(viewer: Viewer, evidence: EvidenceAnswer) -> None:
    st.subheader(t("Evidence"), anchor=False)
    live_table(
        frames.evidence_table(evidence, viewer.colours),
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
    _ways(viewer, row.step, row.rid, key="bundle")
    st.subheader(t("What differs"), anchor=False)
    live_table(frames.differences_table(detail, viewer.colours), viewer.colours, key="differences", height=210)
    st.subheader(t("Records around it"), anchor=False)
    live_table(frames.records_table(detail, viewer.colours), viewer.colours, key="bundle_records", height=330)
    for why, command in detail.commands:
        st.caption(why)
        st.code(command, language="sh")

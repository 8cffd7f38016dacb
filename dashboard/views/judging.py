"""Judging a recording: a button, its progress, and what the laws found in the whole of it.

The recording itself says nothing about laws: it holds what happened. `admitscope check` judges it in a process of its
own, which writes nothing.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Final, Literal

import streamlit as st

from dashboard import formats as f
from dashboard import frames_laws as frames
from dashboard.components import live_table
from dashboard.session import Viewer, natural
from dashboard.views.running import running
from dashboard.words import t
from telemetry.check_door import CheckDoor
from telemetry.check_report import CheckReport, Found
from telemetry.errands import Busy, Standing
from telemetry.law_answers import judged_laws
from telemetry.observe import LawsAnswer

_FAULT: Final = "judging_fault"
#: Whether the head of this run knew a verdict.
_HEAD: Final = "judging_in_head"


@st.cache_resource(show_spinner=False, on_release=CheckDoor.close)
def door() -> CheckDoor:
    """The one door of this process: viewers share it, and its reports."""
    return CheckDoor()


def can_be_judged(viewer: Viewer) -> bool:
    """Whether a journal is shown: tables are none."""
    recording = viewer.recording
    return recording is not None and not recording.recording.is_tables


def report_of(viewer: Viewer) -> CheckReport | None:
    """What the laws found in the journal that is shown; None before it was judged. The head of a run asks this once."""
    standing = door().standing(_journal(viewer)) if can_be_judged(viewer) else None
    report = None if standing is None else standing.result
    st.session_state[_HEAD] = report is not None
    return report


def is_outdated(viewer: Viewer) -> bool:
    """Whether the journal was written to since it was judged."""
    return can_be_judged(viewer) and door().has_changed(_journal(viewer))


def judging(viewer: Viewer, laws: LawsAnswer) -> LawsAnswer:
    """Draw how the judging stands; returns the laws as it left them, or `laws` before its end."""
    journal = _journal(viewer)
    standing = door().standing(journal)
    if fault := st.session_state.pop(_FAULT, None):
        st.warning(fault)
    if standing is None or (standing.state != "running" and standing.result is None):
        _offer(viewer, standing)
        return laws
    if standing.result is None:
        running(
            lambda: door().standing(journal),
            {"starting": t("Reading the journal"), "judging": t("Judging the recording")},
            timed="judging",
            key="judging_stop",
            stop=lambda: door().stop(journal),
        )
        return laws
    if st.session_state.get(_HEAD) is False:
        # It ended between the head and here, and nothing draws a recording again: the head would say otherwise.
        st.rerun()
    _verdict(viewer, standing.result, standing)
    return laws.model_copy(update={"is_checked": True, "laws": judged_laws(standing.result)})


def _journal(viewer: Viewer) -> Path:
    return Path(viewer.place.where)


def _offer(viewer: Viewer, standing: Standing[CheckReport] | None) -> None:
    title, what = t("Not judged yet"), t("A recording holds what happened, not what a checker said of it.")
    if standing is not None:
        title = t("Stopped") if standing.state == "cancelled" else t("It did not work")
        what = standing.error
    st.html(
        f'<div class="nothing" data-testid="checker-recorded"><strong>{escape(title)}</strong>'
        f"<span>{escape(what)}</span><span>"
        f"{escape(t('To judge it, every law is run over the whole of it, in a process of its own.'))} "
        f"{escape(t('Nothing is written. In a terminal:'))} "
        f"<code>{escape(frames.check_command(viewer.place.where))}</code></span></div>"
    )
    st.button(t("Judge this recording"), key="judge", type="primary", on_click=_start, args=(_journal(viewer),))


def _start(journal: Path) -> None:
    """In the callback, before the run that shows it."""
    standing = door().standing(journal)
    if standing is not None and standing.state == "running":
        return
    try:
        door().start(journal)
    except Busy:
        st.session_state[_FAULT] = t("Another recording is being judged. Wait for its end, or stop it there.")


def _verdict(viewer: Viewer, report: CheckReport, standing: Standing[CheckReport]) -> None:
    head, rest = frames.verdict_words(report, standing.elapsed_s)
    tone = viewer.colours.bad if report.counts else viewer.colours.good if report.verdict == "held" else ""
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.html(
            f'<p class="verdict" data-testid="verdict"><b{f" style={chr(34)}color:{tone}{chr(34)}" if tone else ""}>'
            f"{escape(head)}</b> {escape(rest)}</p>"
        )
        outdated = is_outdated(viewer)
        kind: Literal["primary", "tertiary"] = "primary" if outdated else "tertiary"
        st.button(t("Judge again"), key="judge", type=kind, on_click=_start, args=(_journal(viewer),))
    if outdated:
        st.warning(
            t(
                "The journal was written to since. This is the verdict on its first {n} events.",
                n=f.count(report.events),
            )
        )
    for note in report.notes:
        st.caption(frames.sentence(note))
    if report.violations:
        _violations(viewer, report)


def _violations(viewer: Viewer, report: CheckReport) -> None:
    st.subheader(t("Violations"), anchor=False)
    at = viewer.selection("broken", natural)
    picked = report.violations[at] if at is not None and at < len(report.violations) else None
    live_table(
        frames.violations_table(report, viewer.colours),
        viewer.colours,
        key="violations",
        height=300 if picked is None else 200,
        selected=None if picked is None else str(at),
        on_pick=lambda number: viewer.select("broken", number),
    )
    if picked is None:
        st.caption(t("Click a violation to read it in full, and to open the step in which it shows."))
        return
    _one(viewer, picked)


def _one(viewer: Viewer, found: Found) -> None:
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.html(f'<h3 class="why"><code>{escape(found.id)}</code></h3>', width="content")
        st.button(t("Close"), key="close_broken", type="tertiary", on_click=lambda: viewer.select("broken", None))
    lines = [
        found.law,
        t("Expected {expected}; found {found}.", expected=found.expected, found=found.found),
        t("In step {step} at {time}.", step=f.count(found.step), time=f.clock(found.t_wall_s)),
    ]
    st.html(f'<ol class="explain" data-testid="broken">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ol>')
    ways_to(viewer, found.step, found.rid, key="broken")


def ways_to(viewer: Viewer, step: int, rid: str | None, *, key: str) -> None:
    """Buttons to the step and the request that a violation is about; a recording is moved to that step."""
    moved = {"at": step} if viewer.place.is_recorded else {}
    with st.container(horizontal=True, gap="small"):
        st.button(
            t("Admission at step {step}", step=f.count(step)),
            key=f"{key}_to_step",
            on_click=lambda: viewer.select_all({"view": "admission", "step": step, **moved}),
            help=None if moved else t("An engine keeps its last 512 steps; older ones are in the journal."),
        )
        if rid is not None:
            st.button(
                t("Request {rid}", rid=f.short_rid(rid)),
                key=f"{key}_to_request",
                on_click=lambda: viewer.select_all({"view": "requests", "rid": rid, **moved}),
            )

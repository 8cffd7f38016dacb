"""The view "Admission": the last passes, how one spent its ledgers, every candidate it looked at, and the queue."""

from __future__ import annotations

from typing import Final

import streamlit as st

from dashboard import charts, frames, frames_pass, tables
from dashboard import formats as f
from dashboard.component_pass import pass_story
from dashboard.components import live_table
from dashboard.feed import Look
from dashboard.session import Viewer, natural
from dashboard.views.parts import fitting, legend, waiting_for_engine
from dashboard.words import t, tn
from telemetry.observe import PassesAnswer, PassRow

#: Steps that an engine remembers.
_REMEMBERED: Final = 512


def show(viewer: Viewer, look: Look) -> None:
    """Passes on the left; the picked one, or the newest, on the right, and its candidates below."""
    if look.passes is None:
        waiting_for_engine(viewer, look.error)
        return
    chosen = _chosen(viewer, look.passes)
    left, right = st.columns([1.3, 1.6], gap="medium")
    with left:
        _steps(viewer, look.passes, chosen)
        _reasons(viewer, look.passes)
    if chosen is None:
        with right:
            st.subheader(t("Ledgers of a pass"), anchor=False)
            st.caption(t("The ledgers appear with the first admission pass, as soon as a request arrives."))
        return
    with right:
        # Title, bars and queue are one value of one pass; the table below names its step itself.
        pass_story(frames_pass.story(chosen, viewer.colours), viewer.colours, key="pass_story")
    st.subheader(t("Candidates"), anchor=False)
    live_table(
        tables.candidates_table(chosen, viewer.colours),
        viewer.colours,
        key="candidates",
        height=330,
        selected=None,
        on_pick=lambda row: viewer.select_all({"view": "requests", "rid": row.split("/", 2)[2]}),
    )


def _chosen(viewer: Viewer, passes: PassesAnswer) -> PassRow | None:
    """The pass that was picked, kept even when it has left the list of the last ones; else the newest with anybody."""
    newest = next((row for row in reversed(passes.passes) if row.candidates), None)
    newest = newest or (passes.passes[-1] if passes.passes else None)
    wanted = viewer.selection("step", natural)
    if wanted is None:
        return newest
    found = next((row for row in passes.passes if row.step == wanted), None)
    kept = st.session_state.get("kept_pass")
    is_kept = isinstance(kept, PassRow) and kept.step == wanted
    sought = (wanted, viewer.at)
    if found is None and not is_kept and st.session_state.get("sought_pass") != sought:
        # Gone from the last ones before the click arrived, or named by a link: the engine remembers more. Asked once:
        # what it has forgotten stays forgotten, and so many passes are no answer for each refresh.
        older = viewer.ask("passes", wanted, question=lambda source: source.passes(_REMEMBERED)).value
        if older is not None:
            found = next((row for row in older.passes if row.step == wanted), None)
            st.session_state["sought_pass"] = sought
    if found is not None:
        st.session_state["kept_pass"] = found
    kept = st.session_state.get("kept_pass")
    if isinstance(kept, PassRow) and kept.step == wanted:
        return kept
    return newest


def _steps(viewer: Viewer, passes: PassesAnswer, chosen: PassRow | None) -> None:
    st.subheader(t("Tokens computed in the last steps"), anchor=False)
    colours = viewer.colours.segments
    legend([(colours[part], t(said), "") for part, said in frames.STEP_PARTS.items()])
    st.altair_chart(
        charts.steps_chart(frames.steps_frame(passes), viewer.colours), width="stretch", key="steps_computed"
    )
    wanted = viewer.selection("step", natural)
    groups = frames_pass.pass_groups(passes)
    shown = next((g.newest.step for g in groups if any(row.step == wanted for row in g.rows)), wanted)
    live_table(
        fitting(viewer, tables.passes_table(groups, len(passes.passes))),
        viewer.colours,
        key="passes",
        height=330,
        selected=str(shown),
        on_pick=lambda step: viewer.select("step", step),
        hold=True,
    )
    if wanted is None:
        st.caption(t("The newest pass is shown. Click a pass to hold it."))
        return
    if chosen is None or chosen.step != wanted:
        step, most = f.count(wanted), f.count(_REMEMBERED)
        st.caption(t("Step {step} is not among the last {n}: the newest is shown.", step=step, n=most))
    st.button(t("Follow the newest pass again"), key="follow_newest", on_click=_follow, args=(viewer,))


def _follow(viewer: Viewer) -> None:
    viewer.select("step", None)
    st.session_state["kept_pass"] = None


def _reasons(viewer: Viewer, passes: PassesAnswer) -> None:
    """How often each reason was given. Another sum than the answer on Now has: one refusal may hold many steps."""
    mix = frames.reason_mix(passes)
    if not mix:
        return
    steps = len(passes.passes)
    heading = tn(steps, "Decisions of the last step", "Decisions of the last {n} steps", n=f.count(steps))
    st.subheader(heading, anchor=False)
    good, bad = viewer.colours.good, viewer.colours.bad
    legend([(good if admitted else bad, f.words(reason), f.count(n)) for reason, n, admitted in mix])

"""The view "Admission": the last passes, how each spent its ledgers, and every candidate it looked at."""

from __future__ import annotations

import streamlit as st

from dashboard import charts, frames, tables
from dashboard import formats as f
from dashboard.components import live_table
from dashboard.feed import Look
from dashboard.session import Viewer, natural
from dashboard.views.parts import legend, waiting_for_engine
from telemetry.observe import PassesAnswer, PassRow


def show(viewer: Viewer, look: Look) -> None:
    """Passes on the left; the picked one, or the newest, on the right and below."""
    if look.passes is None:
        waiting_for_engine(viewer, look.error)
        return
    made = frames.made_passes(look.passes)
    left, right = st.columns([1, 1.35], gap="medium")
    with left:
        _steps(viewer, look.passes, made)
    chosen = _chosen(viewer, made)
    with right:
        if chosen is None:
            st.subheader("Three ledgers of a pass", anchor=False)
            st.caption("The ledgers appear with the first admission pass, as soon as a request arrives.")
        else:
            _ledgers(viewer, chosen)
            _reasons(viewer, look.passes)
    if chosen is not None:
        st.subheader(f"Candidates of step {f.count(chosen.step)}", anchor=False)
        live_table(
            tables.decisions_table(frames.decisions_of(chosen), viewer.colours),
            viewer.colours,
            key="candidates",
            height=330,
        )


def _chosen(viewer: Viewer, made: list[PassRow]) -> PassRow | None:
    """The pass that was picked, kept even when it has left the list of the last ones; else the newest."""
    wanted = viewer.selection("step", natural)
    if wanted is None:
        return made[0] if made else None
    found = next((row for row in made if row.step == wanted), None)
    if found is not None:
        st.session_state["kept_pass"] = found
    kept = st.session_state.get("kept_pass")
    if isinstance(kept, PassRow) and kept.step == wanted:
        return kept
    return made[0] if made else None


def _steps(viewer: Viewer, passes: PassesAnswer, made: list[PassRow]) -> None:
    st.subheader("Tokens computed in the last steps", anchor=False)
    colours = viewer.colours.segments
    legend([(colours[part], part, "") for part in ("admission", "continuation", "decode rows")])
    st.altair_chart(
        charts.steps_chart(frames.steps_frame(passes), viewer.colours), width="stretch", key="steps_computed"
    )
    live_table(
        tables.passes_table(made, len(passes.passes)),
        viewer.colours,
        key="passes",
        height=200,
        selected=str(viewer.selection("step", natural)),
        on_pick=lambda step: viewer.select("step", step),
        hold=True,
    )
    if viewer.selection("step", natural) is None:
        st.caption("The newest pass is shown. Click a pass to hold it.")
    else:
        st.button("Follow the newest pass again", key="follow_newest", on_click=_follow, args=(viewer,))


def _follow(viewer: Viewer) -> None:
    viewer.select("step", None)
    st.session_state["kept_pass"] = None


def _ledgers(viewer: Viewer, row: PassRow) -> None:
    st.subheader(f"Ledgers of step {f.count(row.step)}", anchor=False)
    colours = viewer.colours.segments
    names = ("running", "continuation", "admission", "left", "overdraft")
    with st.container(horizontal=True, gap="small"):
        legend([(colours[name], "running requests" if name == "running" else name, "") for name in names])
        legend([(viewer.colours.bad, "needed by the refused", "")], shape="outline")
    segments, need = frames.ledger_segments(row), frames.ledger_need(row)
    st.altair_chart(charts.ledger_chart(segments, need, viewer.colours), width="stretch", key="ledgers_of_pass")
    amounts = "".join(_amount(row, name) for name in frames.LEDGERS)
    st.html(f'<div class="amounts">{amounts}</div>')
    st.caption(_ending(row))


def _reasons(viewer: Viewer, passes: PassesAnswer) -> None:
    st.subheader(f"Decisions of the last {len(passes.passes)} steps", anchor=False)
    good, bad = viewer.colours.good, viewer.colours.bad
    legend(
        [(good if admitted else bad, f.words(reason), f.count(n)) for reason, n, admitted in frames.reason_mix(passes)]
    )


def _amount(row: PassRow, name: str) -> str:
    limit = getattr(row.limits, name)
    left = None if row.budget_close is None else getattr(row.budget_close, name)
    words = "no limit" if limit is None else f"{f.tokens(left)} of {f.tokens(limit)} tok left"
    return f"<span><em>{f.LEDGER_NAMES[name]}</em> {words}</span>"


def _ending(row: PassRow) -> str:
    refused = frames.refusal_of(row)
    seen = f"{len(row.candidates)} looked at, {row.not_considered} not reached, {row.num_waiting} waiting afterwards."
    if refused is None:
        return f"Nobody was refused. {seen}"
    numbers = "" if refused.need is None else f": it needs {f.tokens(refused.need)}, there is {f.tokens(refused.have)}"
    return f"{f.short_rid(refused.rid)} was refused, {f.words(refused.reason)}{numbers}. {seen}"

"""The view "What if": a recorded run again with other settings, both simulated, compared request by request."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import streamlit as st

from dashboard import charts_whatif as charts
from dashboard import formats as f
from dashboard import frames_whatif as frames
from dashboard import whatif_form as form
from dashboard.components import live_table
from dashboard.feed import Look
from dashboard.session import Viewer, natural
from dashboard.views.parts import choice, legend
from dashboard.views.running import running
from dashboard.whatif_form import OFFERS, Offer, Stretch, seconds
from dashboard.words import mark, t
from telemetry.errands import Busy, Standing
from telemetry.sim.door import Ask, Door, is_journal_of
from telemetry.sim.journal_workload import Recorded
from telemetry.sim.whatif_result import WhatifResult

#: Requests to compare at most; the first means all.
_LIMITS: Final = (0, 100, 500, 2000)
_FAULT: Final = "whatif_fault"


@st.cache_resource(show_spinner=False, on_release=Door.close)
def door() -> Door:
    """The one door of this process: viewers share it, and its answers."""
    return Door()


def show(viewer: Viewer, look: Look) -> None:
    """The form on the left; on the right the answer, or what to do to get one."""
    journal = _journal(viewer, look)
    if journal is None:
        return
    recorded = form.read_start(journal)
    if isinstance(recorded, str):
        _nothing(t("This journal cannot be simulated"), recorded, t("Open another one."))
        return
    settings = viewer.selection("whatif", form.from_address) or {}
    stretch = Stretch(
        viewer.selection("first", natural) or 0, viewer.selection("from", seconds), viewer.selection("to", seconds)
    )
    left, right = st.columns([1, 2.6], gap="large")
    with left:
        _form(viewer, journal, recorded, settings, stretch)
    with right:
        _answer(viewer, Ask.of(journal, settings, stretch.limit or None, stretch.window))


def _journal(viewer: Viewer, look: Look) -> Path | None:
    """The journal of what is shown; None, with advice, when there is none on this machine."""
    if viewer.place.is_recorded:
        return Path(viewer.place.where)
    status = look.status
    if status is None:
        _nothing(t("Waiting for the engine"), viewer.place.where, t("What if needs the journal that it writes."))
        return None
    if status.journal is None:
        _nothing(
            t("This engine writes no journal"),
            t("What if simulates a recorded run again."),
            t("Start it with --journal journals, or open a journal: admitscope dashboard --journal FILE"),
        )
        return None
    if not is_journal_of(status.journal, status.engine_id):
        _nothing(
            t("The journal is on the engine's machine"),
            status.journal,
            t("Copy it here, and open it: admitscope dashboard --journal FILE"),
        )
        return None
    return Path(status.journal)


def _nothing(title: str, what: str, advice: str) -> None:
    st.html(
        f'<div class="nothing"><strong>{escape(title)}</strong><span>{escape(what)}</span>'
        f"<span>{escape(advice)}</span></div>"
    )


# -- the form ------------------------------------------------------------------------------------------------------


def _form(viewer: Viewer, journal: Path, recorded: Recorded, settings: dict[str, str], stretch: Stretch) -> None:
    now = form.present(recorded)
    values = form.values_of(settings, recorded)
    limit = stretch.limit
    # Another journal, or another link, begins with its own values: a widget keeps what it was first told.
    mine = f"{crc32(f'{journal}{sorted(settings.items())}{stretch}'.encode()):08x}"
    st.subheader(t("Other settings"), anchor=False)
    st.caption(
        t("The values are those of the recorded run. Change some, and it is simulated with both."),
    )
    with st.form(f"whatif_{mine}", border=False):
        for offer in OFFERS:
            _field(offer, values[offer.name], f"{mine}_{offer.name}")
        said = {each: t("all") if each == 0 else t("first {n}", n=f.count(each)) for each in (*_LIMITS, limit)}
        options = list(said)
        st.selectbox(
            t("Requests"),
            options,
            index=options.index(limit),
            format_func=said.__getitem__,
            key=f"{mine}_limit",
        )
        begins, ends = st.columns(2)
        at = _standing_at_s(viewer)
        with begins:
            st.number_input(
                t("that came from (s)"),
                min_value=0.0,
                value=stretch.from_s,
                key=f"{mine}_from",
                placeholder=t("start"),
                help=None if at is None else t("The recording stands at {at} s.", at=f"{at:.1f}"),
            )
        with ends:
            st.number_input(t("until (s)"), min_value=0.0, value=stretch.to_s, key=f"{mine}_to", placeholder=t("end"))
        st.form_submit_button(
            t("Compare"),
            key="whatif_compare",
            type="primary",
            on_click=_begin,
            args=(viewer, journal, now, mine),
            width="stretch",
        )


def _standing_at_s(viewer: Viewer) -> float | None:
    """Second of the run at which the bar of a recording stands."""
    moment = None if viewer.recording is None else viewer.recording.moment(viewer.at)
    return None if moment is None else moment.at_s


def _field(offer: Offer, value: Any, key: str) -> None:
    label = t(offer.label) + (f" ({offer.unit})" if offer.unit else "")
    if offer.kind == "choice":
        st.selectbox(label, offer.options, index=offer.options.index(value), key=key)
    elif offer.kind == "switch":
        st.toggle(label, value=value, key=key)
    else:
        empty = t("no limit") if offer.no_limit else None
        st.number_input(label, min_value=1, step=1, value=value, key=key, placeholder=empty)


def _begin(viewer: Viewer, journal: Path, now: dict[str, Any], mine: str) -> None:
    """Select what was chosen, and start. In the callback, before the run that shows it."""
    chosen = {offer.name: st.session_state[f"{mine}_{offer.name}"] for offer in OFFERS}
    for offer in OFFERS:
        if chosen[offer.name] is None and not offer.no_limit:
            chosen[offer.name] = now[offer.name]
    settings = form.differing(now, chosen)
    stretch = Stretch(*(st.session_state[f"{mine}_{name}"] for name in ("limit", "from", "to")))
    viewer.select_all(
        {
            "whatif": form.to_address(settings),
            "first": stretch.limit or None,
            "from": stretch.from_s,
            "to": stretch.to_s,
        }
    )
    fault = None if settings else t("Nothing was changed: both runs would be the same.")
    if stretch.from_s is not None and stretch.to_s is not None and stretch.to_s <= stretch.from_s:
        fault = t("No request comes between these seconds: the end is not after the start.")
    st.session_state[_FAULT] = fault
    if fault is None:
        _start(Ask.of(journal, settings, stretch.limit or None, stretch.window))


def _start(ask: Ask) -> None:
    standing = door().standing(ask)
    if standing is not None and standing.state in {"running", "done"}:
        return
    try:
        door().start(ask)
    except Busy:
        st.session_state[_FAULT] = t("Another comparison runs. Wait for its end, or stop it there.")


# -- the answer ----------------------------------------------------------------------------------------------------


def _answer(viewer: Viewer, ask: Ask) -> None:
    fault = st.session_state.get(_FAULT)
    if fault:
        st.warning(fault)
    if not ask.settings:
        _nothing(
            t("What would have been otherwise?"),
            t("For example: would a smaller chunk have shortened the time between tokens?"),
            t("Change a setting and press Compare."),
        )
        return
    standing = door().standing(ask)
    if standing is None:
        _nothing(
            t("Not compared yet"),
            ", ".join(f"{name}={value}" for name, value in ask.settings),
            t("Press Compare to simulate both."),
        )
        # The form's own button may be below the screen's end.
        st.button(t("Compare"), key="whatif_compare_link", type="primary", on_click=_start, args=(ask,))
    elif standing.state == "running":
        _progress(ask)
    elif standing.result is not None:
        _result(viewer, standing.result, standing)
    else:
        title = t("Stopped") if standing.state == "cancelled" else t("It did not work")
        _nothing(title, standing.error, t("Press Compare to try again."))


def _progress(ask: Ask) -> None:
    phases = {
        "starting": t("Starting"),
        "reading": t("Reading the journal"),
        "simulating": t("Simulating both runs"),
        "comparing": t("Comparing"),
    }
    running(lambda: door().standing(ask), phases, timed="simulating", key="whatif_stop", stop=lambda: door().stop(ask))


def _result(viewer: Viewer, result: WhatifResult, standing: Standing[WhatifResult]) -> None:
    said = escape(frames.sentence(result))
    st.html(f'<p style="font-size:1.2rem;line-height:1.45;margin:0" data-testid="whatif-sentence">{said}</p>')
    st.caption(_worth(result))
    st.caption(t("Intervals are of requests under the simulator: they do not contain its own error."))
    st.caption(
        t(
            "“Before” is simulated too, of all requests that ended by themselves in both runs, and a time to first "
            "token ends when the engine has the token. Other views show what was measured, of the last 60 s or 10 min, "
            "until the first byte is sent: so the two are close, not equal."
        )
    )
    for note in (*frames.cost_notes(result), *result.notes):
        st.caption(note)
    if result.violations:
        st.error(t("{n} laws of the engine broke in a simulated run: a fault of the engine.", n=result.violations))
    live_table(frames.compared_table(result), viewer.colours, key="whatif_compared", height=400)
    if result.model_checks:  # a part of a run has none; a note says why
        st.subheader(t("How far the simulator is from the recorded run"), anchor=False)
        live_table(frames.checks_table(result), viewer.colours, key="whatif_checks", height=280)
    _distributions(viewer, result)
    left, right = st.columns([1.4, 1], gap="large")
    with left:
        st.subheader(t("Fairness by length of prompt"), anchor=False)
        _runs(viewer)
        st.altair_chart(
            charts.fairness_chart(frames.fairness_frame(result), viewer.colours), width="stretch", key="whatif_fairness"
        )
    with right:
        st.subheader(t("Decisions by reason"), anchor=False)
        live_table(frames.reasons_table(result), viewer.colours, key="whatif_reasons", height=280)
    _differences(viewer, result)
    st.download_button(
        t("Download as JSON"),
        result.model_dump_json(indent=1),
        file_name="whatif.json",
        mime="application/json",
        key="whatif_json",
        help=t("Simulated in {time}.", time=f.duration(standing.elapsed_s)),
    )


def _worth(result: WhatifResult) -> str:
    """How many were compared, and how far the simulation of the recorded run is from it."""
    said = t("{n} requests compared, {out} left out.", n=f.count(result.requests), out=f.count(result.left_out))
    if result.model_error is not None:
        error = f"{100 * result.model_error:.1f}\u00a0%"
        said += " " + t("The simulator misses a recorded TTFT by {error} (median).", error=error)
    held = result.cost_before.median_error
    if held is not None:
        said += " " + t("Its cost model misses a step by {error} (median).", error=f"{100 * held:.1f}\u00a0%")
    return said


def _runs(viewer: Viewer) -> None:
    tones = charts.run_colours(viewer.colours)
    legend([(tones["before"], t("before (dashed)"), ""), (tones["after"], t("after"), "")], shape="line")


def _distributions(viewer: Viewer, result: WhatifResult) -> None:
    st.subheader(t("Distribution"), anchor=False)
    measure = choice(viewer, "measure", frames.MEASURES, label=mark("Measure"))
    left, right = st.columns(2, gap="large")
    with left:
        _runs(viewer)
        st.altair_chart(
            charts.curve_chart(frames.curve_frame(result, measure), viewer.colours), width="stretch", key="whatif_curve"
        )
    with right:
        good, bad = viewer.colours.good, viewer.colours.bad
        legend([(good, t("▾ faster after"), ""), (bad, t("▴ slower after"), "")])
        st.altair_chart(
            charts.pair_chart(frames.pair_frame(result, measure), viewer.colours), width="stretch", key="whatif_pairs"
        )
    if measure == "tbt":
        st.caption(t("Left: every gap between two tokens. Right: the longest gap of each request."))


def _differences(viewer: Viewer, result: WhatifResult) -> None:
    st.subheader(t("Decisions that differ first"), anchor=False)
    live_table(frames.differences_table(result), viewer.colours, key="whatif_differences", height=230)
    first = result.first_difference
    if first is None:
        return
    journals = {t("before"): result.journal_before, t("after"): result.journal_after}
    with st.container(horizontal=True):
        for name, path in journals.items():
            if path is not None and Path(path).is_file():
                st.button(
                    t("{run}: step {step} in Admission", run=frames.head(name), step=f.count(first.step)),
                    key=f"whatif_open_{path}",
                    on_click=_open,
                    args=(viewer, Path(path), t("what if, {run}", run=name), first.step),
                )


def _open(viewer: Viewer, journal: Path, name: str, step: int) -> None:
    viewer.open_journal(journal, name)
    viewer.select_all({"view": "admission", "at": step, "step": step})

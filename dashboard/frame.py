"""The frame of the page. Owns: what stands around every view: places, pace, the bar of a recording, keys, downloads.

Callbacks do the work, before the run that follows: a run that is broken off by the next refresh would lose it.
"""

from __future__ import annotations

from typing import Final

import streamlit as st

from dashboard import components, downloads
from dashboard import formats as f
from dashboard.feed import Look
from dashboard.fleet import fleet_table
from dashboard.session import INTERVALS_S, Viewer, box_key, on_box
from dashboard.told import Told, selections_of
from dashboard.views import VIEWS, kv, now
from dashboard.words import LANGUAGES, t
from telemetry.journal_gaps import Gap

#: Times as fast as it was.
SPEEDS: Final = (0.25, 1.0, 4.0, 16.0, 64.0)

#: The head of another engine: enough to compare.
_FLEET_PARTS: Final = ("latency", "requests")


def place_switch(viewer: Viewer) -> None:
    """Choice of the engine or journal, where there are several."""
    names = [place.name for place in viewer.places]
    if len(names) < 2:
        return
    box = box_key("source", viewer.place.name)
    st.selectbox(
        t("Source"),
        names,
        index=names.index(viewer.place.name),
        key=box,
        on_change=on_box("source", box, viewer.show_place),
        label_visibility="collapsed",
        width=200,
    )


def pace(viewer: Viewer, *, moves: bool = True) -> None:
    """Pause and interval of a live engine, or the speed of a recording; and the language.

    moves  False: a view that neither follows an engine nor a recording has the language only
    """
    if not moves:
        pass
    elif viewer.recording is None:
        pause = box_key("pause", viewer.is_paused)
        st.toggle(
            t("Pause"),
            value=viewer.is_paused,
            key=pause,
            on_change=on_box("pause", pause, lambda paused: _set_pause(viewer, paused=paused)),
            help=t("All panels stand at one moment. Key: space."),
        )
        interval = box_key("interval", viewer.interval_s)
        st.selectbox(
            t("Refresh every"),
            INTERVALS_S,
            index=INTERVALS_S.index(viewer.interval_s),
            # Said now: Streamlit reads an answer by its label, before the run that follows has a language.
            format_func={s: t("every {n} s", n=f"{s:g}") for s in INTERVALS_S}.__getitem__,
            key=interval,
            on_change=on_box("interval", interval, viewer.set_interval),
            label_visibility="collapsed",
            width=120,
        )
    else:
        st.selectbox(
            t("Speed"),
            SPEEDS,
            index=SPEEDS.index(_speed()),
            format_func={speed: f"{speed:g} ×" for speed in SPEEDS}.__getitem__,
            key="speed_box",
            on_change=lambda: _change_speed(viewer),
            label_visibility="collapsed",
            width=95,
        )
    lang = box_key("lang", viewer.language)
    st.selectbox(
        t("Language"),
        list(LANGUAGES),
        index=list(LANGUAGES).index(viewer.language),
        format_func=LANGUAGES.__getitem__,
        key=lang,
        on_change=on_box("lang", lang, lambda chosen: viewer.select("lang", chosen)),
        label_visibility="collapsed",
        width=120,
    )


def _speed() -> float:
    return float(st.session_state.get("speed", 1.0))


def _change_speed(viewer: Viewer) -> None:
    st.session_state["speed"] = st.session_state["speed_box"]
    if viewer.is_playing:
        viewer.play(speed=_speed())


def scrub_bar(viewer: Viewer, look: Look) -> None:
    """Where the recording of `look` stands, and how far it is read."""
    recording, moment = viewer.recording, look.moment
    if recording is None or moment is None:
        return
    told = recording.progress()
    if viewer.is_playing and told.is_read and moment.index == told.moments - 1:
        viewer.stop()
    said = t(
        "step {step} of {last} · {at} of {end}",
        step=f.count(moment.step),
        last=f.count(told.steps[1]),
        at=f.duration(moment.at_s),
        end=f.duration(max(told.expected_s, told.times_s[1])),
    )
    notes = [] if told.gap is None else [_of_gap(told.gap, moment.step)]
    notes += [] if told.is_read else [t("Reading: {n} events so far.", n=f.count(told.events))]
    if told.error is not None:
        notes.append(t("Reading ended early: {error}", error=told.error))
    components.scrub(
        {
            "index": moment.index,
            "last": told.moments - 1,
            "playing": viewer.is_playing,
            "said": said,
            "notes": " ".join([*notes, *told.notes]),
            "words": {
                "group": t("Steps of the recording"),
                "place": t("place"),
                "back": t("One step back (key: left)"),
                "forward": t("One step forward (key: right)"),
                "play": t("Play (key: space)"),
                "stop": t("Stop (key: space)"),
            },
        },
        viewer.colours,
        on_index=lambda index: _go_to_index(viewer, index),
        on_play=lambda wanted: viewer.play(speed=_speed()) if wanted else viewer.stop(),
    )


def _of_gap(gap: Gap, step: int) -> str:
    """That the journal has a gap; at a step behind it, also what that means for what is shown."""
    if step <= gap.after_step:
        return gap.text()
    return f"{gap.text()} {t('What is shown behind it may be wrong.')}"


def _go_to_index(viewer: Viewer, index: int) -> None:
    recording = viewer.recording
    if recording is None:
        return
    last = recording.progress().moments - 1
    if last >= 0:
        viewer.go_to(str(recording.recording.moment(min(max(int(index), 0), last)).step))


def open_view(viewer: Viewer) -> str:
    """The name of the open view."""
    chosen = viewer.selection("view")
    return chosen if chosen in VIEWS else "now"


def hear(viewer: Viewer, message: object) -> Told:
    """Do what the page tells and is not done yet; returns how far that is. Before anything is drawn."""
    told = st.session_state.get("told")
    if not isinstance(told, Told):
        told = st.session_state["told"] = Told()
    for kind, value in told.new(message):
        if kind == "key":
            _on_key(viewer, value)
        elif kind == "go":
            viewer.follow(value)
        else:
            viewer.return_to(selections_of(value))
    return told


def _on_key(viewer: Viewer, key: str) -> None:
    """1 to 9: views. Space: pause or play. Left and right: one step of a recording, a paused engine or a lesson.

    What selects comes last in each: a run that is broken off before it does the key again.
    """
    if key.isdigit():
        name = next(iter(list(VIEWS)[int(key) - 1 : int(key)]), None)
        if name is not None:
            viewer.select("view", name)
        return
    view = VIEWS[open_view(viewer)]
    by = {"ArrowLeft": -1, "ArrowRight": 1}.get(key, 0)
    if view.walk is not None:
        if by:
            view.walk(viewer, by)
    elif key == "space":
        _pause_or_play(viewer)
    elif viewer.recording is not None:
        moment = viewer.recording.moment(viewer.at)
        if moment is not None:
            _go_to_index(viewer, moment.index + by)
    elif viewer.is_paused:
        passes = viewer.look("passes").passes
        if passes is not None:
            _step_of_pause(viewer, [row.step for row in passes.passes if row.end is not None], by)


def _pause_or_play(viewer: Viewer) -> None:
    if viewer.recording is None:
        _set_pause(viewer, paused=not viewer.is_paused)
    elif viewer.is_playing:
        viewer.stop()
    else:
        viewer.play(speed=_speed())


def _set_pause(viewer: Viewer, *, paused: bool) -> None:
    viewer.set_pause(paused=paused, questions=kv.questions(viewer))
    if viewer.is_paused:
        now.ask_ahead(viewer)


def begin_pause(viewer: Viewer) -> None:
    """The pause that a link says, before anything is drawn."""
    if viewer.is_paused and not viewer.is_held:
        _set_pause(viewer, paused=True)


def _step_of_pause(viewer: Viewer, steps: list[int], by: int) -> None:
    """The pass before or after the one that is selected, of those that were kept when the pause began."""
    if not steps:
        return
    chosen = viewer.selection("step")
    at = (
        steps.index(int(chosen)) if chosen is not None and chosen.isdigit() and int(chosen) in steps else len(steps) - 1
    )
    if chosen is not None:
        at = min(max(at + by, 0), len(steps) - 1)
    viewer.select_all({"step": steps[at], "view": "admission"})


def fleet(viewer: Viewer) -> None:
    """The head numbers of all engines beside each other, where there are several; a click shows one."""
    engines = [place for place in viewer.places if not place.is_recorded]
    if len(engines) < 2:
        return
    looks = [(place, viewer.look_at(place, *_FLEET_PARTS)) for place in engines]
    st.subheader(t("Engines"), anchor=False)
    components.live_table(
        fleet_table(looks, viewer.colours, now_mono_s=viewer.now_mono_s),
        viewer.colours,
        key="fleet",
        height=220,
        selected=viewer.place.name,
        on_pick=viewer.show_place,
    )


def download_box(view: str) -> None:
    """The tables of the open view as files."""
    tables = {name: table for name, table in downloads.drawn().items() if table.rows}
    why = None if tables else t("This view shows no table with rows now.")
    with st.popover(t("Download"), disabled=not tables, width="content", help=why):
        st.caption(t("Tables as they are shown now, as CSV."))
        for name, table in tables.items():
            st.download_button(
                f"{name.replace('_', ' ')} · {f.count(len(table.rows))}",
                data=lambda table=table: downloads.csv_of(table),  # type: ignore[misc]  # mypy cannot infer a bound default
                file_name=f"admitscope-{view}-{name}.csv",
                mime="text/csv",
                key=f"csv_{name}",
                on_click="ignore",
                width="stretch",
            )

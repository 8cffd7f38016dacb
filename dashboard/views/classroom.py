"""The view "Classroom": lessons that run with no model and no engine, one decision of the real scheduler at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

import streamlit as st

from dashboard import classroom, classroom_picture
from dashboard import formats as f
from dashboard.classroom import Changes, LessonError
from dashboard.feed import Look
from dashboard.session import Viewer, box_key, natural, on_box
from dashboard.words import mark, t
from telemetry.lessons.load import parse_lesson
from telemetry.lessons.model import Lesson
from telemetry.lessons.moment import Moment, Question
from telemetry.lessons.outcome import Comparison
from telemetry.lessons.play import Story

_STYLE: Final = Path(__file__).parent.parent / "assets" / "classroom.css"
_OWN: Final = "own_lesson"

#: Figures of an outcome in words; translated where they are shown.
_FIELDS: Final = {
    "admitted": mark("admitted in step"),
    "first_token": mark("first token in step"),
    "finished": mark("finished in step"),
    "cached": mark("prompt tokens found cached"),
    "computed": mark("prompt tokens computed"),
    "retractions": mark("retractions"),
}


def show(viewer: Viewer, look: Look) -> None:  # noqa: ARG001 - no source is needed here
    """Chooser and steps above, the moment on the left, its picture on the right, settings to change below."""
    st.html(f"<style>{_colours(viewer)}{_STYLE.read_text(encoding='utf-8')}</style>")
    opened = _opened(viewer)
    lesson, story, at = opened.lesson, opened.story, opened.at
    is_large = viewer.selection("text") == "large"
    with st.container(key="classroom_large" if is_large else "classroom"):
        if opened.fault is not None:
            _fault(opened.fault)
        _bar(viewer, opened.lessons, lesson, story, at)
        left, right = st.columns([1, 1.08], gap="large")
        with left:
            _moment(viewer, story, at)
        with right:
            _picture(viewer, story, at)
        _change(viewer, lesson, opened.changes)
        _own_lesson(viewer, opened.faults)


def walk(viewer: Viewer, by: int) -> None:
    """`by` moments further (1) or back (-1), as far as the lesson goes."""
    opened = _opened(viewer)
    _go(viewer, min(max(opened.at + by, 0), len(opened.story.moments) - 1))


class _Opened(NamedTuple):
    """The lesson that is shown: all lessons by id, files that are none, the story as changed, and where it stands.

    fault  why the changes of the address are not shown, if the engine refuses them
    """

    lessons: Mapping[str, Lesson]
    faults: list[str]
    lesson: Lesson
    changes: Changes
    story: Story
    at: int
    fault: str | None


def _opened(viewer: Viewer) -> _Opened:
    own = st.session_state.get(_OWN)
    lessons, faults = classroom.lessons_of(viewer.settings.lessons, [own] if isinstance(own, Lesson) else [])
    chosen = viewer.selection("lesson") or ""
    lesson = lessons.get(chosen) or next(iter(lessons.values()))
    changes = viewer.selection("set", lambda text: classroom.changes_from(text, lesson)) or ()
    fault = None
    try:
        story = classroom.story_of(lesson, changes)
    except LessonError as error:
        fault, changes = str(error), ()
        story = classroom.story_of(lesson, ())
    at = min(viewer.selection("moment", natural) or 0, len(story.moments) - 1)
    return _Opened(lessons, faults, lesson, changes, story, at, fault)


def _colours(viewer: Viewer) -> str:
    colours = viewer.colours
    names = {
        "page": colours.page,
        "surface": colours.surface,
        "accent": colours.accent,
        "accent-soft": colours.accent_soft,
        "good": colours.good,
        "warn": colours.warn,
        "bad": colours.bad,
        "free": colours.states["free"],
    }
    return ":root{" + "".join(f"--cr-{name}:{value};" for name, value in names.items()) + "}"


# -- above ---------------------------------------------------------------------------------------------------------


def _bar(viewer: Viewer, lessons: Mapping[str, Lesson], lesson: Lesson, story: Story, at: int) -> None:
    last = len(story.moments) - 1
    titles = {name: each.title.text.say(viewer.language) for name, each in lessons.items()}
    box = box_key("lesson", lesson.id)
    with st.container(horizontal=True, vertical_alignment="bottom", key="cr_bar"):
        st.selectbox(
            t("Lesson"),
            list(titles),
            index=list(titles).index(lesson.id),
            format_func=titles.__getitem__,
            key=box,
            on_change=on_box("lesson", box, lambda chosen: _open(viewer, chosen)),
            width=340,
        )
        st.button(f"← {t('Back')}", key="cr_back", on_click=_go, args=(viewer, at - 1), disabled=at == 0)
        st.button(
            f"{t('Next')} →", key="cr_next", on_click=_go, args=(viewer, at + 1), disabled=at == last, type="primary"
        )
        _slider(viewer, last, at)
        quiz = box_key("quiz", viewer.selection("quiz") != "off")
        st.toggle(
            t("Predict"),
            value=viewer.selection("quiz") != "off",
            key=quiz,
            on_change=on_box("quiz", quiz, lambda asks: viewer.select("quiz", None if asks else "off")),
            help=t("Ask what the scheduler decides before it is shown."),
        )
        text = box_key("text", viewer.selection("text") == "large")
        st.toggle(
            t("Large text"),
            value=viewer.selection("text") == "large",
            key=text,
            on_change=on_box("text", text, lambda is_large: viewer.select("text", "large" if is_large else None)),
        )


def _slider(viewer: Viewer, last: int, at: int) -> None:
    key = box_key("cr_place", at)
    st.slider(
        t("Moment {at} of {last}", at=at, last=last),
        0,
        max(last, 1),
        value=at,
        key=key,
        on_change=on_box("cr_place", key, lambda moment: _go(viewer, moment)),
        width=320,
    )


def _open(viewer: Viewer, lesson: str) -> None:
    viewer.select_all({"lesson": lesson, "moment": None, "set": None, "answer": None})


def _go(viewer: Viewer, moment: int) -> None:
    viewer.select_all({"moment": moment or None, "answer": None})


# -- the moment ----------------------------------------------------------------------------------------------------


def _moment(viewer: Viewer, story: Story, at: int) -> None:
    moment, lang = story.moments[at], viewer.language
    reason = f" · <code>{escape(moment.reason)}</code>" if moment.reason else ""
    step = t("step {step} of {steps}", step=moment.step, steps=story.moments[-1].step)
    lines = "".join(f"<p>{escape(sentence.say(lang))}</p>" for sentence in moment.sentences)
    note = "" if moment.note is None else f'<p class="cr-note">{escape(moment.note.say(lang))}</p>'
    formulas = classroom_picture.formulas(formula.text for formula in moment.formulas)
    st.html(
        f'<div class="cr" lang="{lang}" data-testid="moment"><p class="cr-kicker">{escape(step)}{reason}</p>'
        f"<h2>{escape(moment.title.say(lang))}</h2>{lines}{formulas}{note}</div>"
    )
    following = story.moments[at + 1] if at + 1 < len(story.moments) else None
    if following is not None and following.question is not None and viewer.selection("quiz") != "off":
        _question(viewer, following, following.question)


def _question(viewer: Viewer, following: Moment, question: Question) -> None:
    lang = viewer.language
    answered = viewer.selection("answer")
    with st.container(key="cr_question"):
        st.html(
            f'<div class="cr"><h4>{escape(t("Predict the next decision"))}</h4>'
            f"<p>{escape(question.text.say(lang))}</p></div>"
        )
        for place, option in enumerate(question.options):
            is_right = option.key == question.answer
            icon = None
            if answered is not None:
                icon = ":material/check:" if is_right else ":material/close:" if option.key == answered else None
            st.button(
                option.text.say(lang),
                key=f"cr_option_{following.index}_{place}",
                on_click=viewer.select,
                args=("answer", option.key),
                icon=icon,
                disabled=answered is not None,
                width="stretch",
            )
        if answered is not None:
            _verdict(viewer, following, question, answered)


def _verdict(viewer: Viewer, following: Moment, question: Question, answered: str) -> None:
    lang = viewer.language
    is_right = answered == question.answer
    right = next(option for option in question.options if option.key == question.answer)
    said = t("Right") if is_right else t("The scheduler decided otherwise")
    why = "".join(f"<p>{escape(sentence.say(lang))}</p>" for sentence in following.sentences)
    formulas = classroom_picture.formulas(formula.text for formula in following.formulas)
    st.html(
        f'<div class="cr" lang="{lang}"><div class="cr-verdict{" cr-right" if is_right else ""}" data-testid="verdict">'
        f"<p><strong>{escape(said)}: {escape(right.text.say(lang))}</strong></p>{why}</div>{formulas}</div>"
    )


# -- the picture ---------------------------------------------------------------------------------------------------


def _picture(viewer: Viewer, story: Story, at: int) -> None:
    moment, colours, lesson = story.moments[at], viewer.colours, story.lesson
    state, owners = moment.state, classroom.owner_colours(story.lesson, viewer.colours)
    parts = []
    if state.ledgers:
        parts.append(
            _panel(t("Ledgers of the pass, in tokens"), classroom_picture.ledgers(state.ledgers, owners, colours))
        )
        parts.append(_segments(viewer))
    waiting = classroom_picture.queue(state.queue, owners, looked_at=moment.rid)
    parts.append(_panel(t("Waiting queue"), waiting))
    runs = t("Running · new-token ratio {ratio}", ratio=f"{state.ratio:.3g}")
    if state.is_full:
        runs = f"{runs} · {t('full flag set')}"
    parts.append(_panel(runs, classroom_picture.running(state.running, owners)))
    pages = classroom_picture.pages(state.pages, owners)
    parts.append(_panel(t("K/V pages of {n} tokens", n=lesson.engine.page_size), pages))
    if state.nodes:
        parts.append(_panel(t("Prefix tree, unused for longest first"), classroom_picture.tree(state.nodes, owners)))
    if state.pieces:
        steps = max(story.moments[-1].step, 1)
        lanes = classroom.lanes_of(lesson)
        drawn = classroom_picture.timeline(state, lanes, owners, steps=steps, step=moment.step)
        parts.append(_panel(t("Computed so far, tokens by step"), drawn))
    st.html(f'<div class="cr" lang="{viewer.language}" data-testid="picture">{"".join(parts)}</div>')


def _panel(title: str, body: str) -> str:
    return f"<h4>{escape(title)}</h4>{body}"


def _segments(viewer: Viewer) -> str:
    """What the parts of a bar are that carry no request's name."""
    spans = "".join(
        f'<span><i class="{"cr-hatched" if kind == "promised" else "cr-owner"}" style="--mark:{colour}"></i>'
        f"{escape(t(classroom_picture.SEGMENT_WORDS[kind]))}</span>"
        for kind, colour in classroom_picture.ledger_colours(viewer.colours).items()
    )
    return f'<div class="cr-legend">{spans}</div>'


# -- below ---------------------------------------------------------------------------------------------------------


def _change(viewer: Viewer, lesson: Lesson, changes: Changes) -> None:
    if not lesson.parameter:
        return
    st.subheader(t("Change a setting and see"), anchor=False)
    now = dict(changes)
    with st.container(horizontal=True, key="cr_settings"):
        for parameter in lesson.parameter:
            own = getattr(lesson.engine, parameter.name)
            values = [own, *(value for value in parameter.values if value != own)]
            value = now.get(parameter.name, own)
            name = f"set_{lesson.id}_{parameter.name}"
            key = box_key(name, value)
            told = {value: classroom.value_text(value) for value in values}
            st.selectbox(
                parameter.name,
                values,
                index=values.index(value),
                format_func=told.__getitem__,
                key=key,
                help=None if parameter.look_for is None else parameter.look_for.text.say(viewer.language),
                on_change=on_box(name, key, _set(viewer, now, parameter.name, own)),
                width=230,
            )
    if changes:
        _difference(viewer, lesson, changes)
        st.button(t("The lesson's own settings again"), key="cr_reset", on_click=_reset(viewer))
    else:
        st.caption(t("The real scheduler runs again with the new setting; what changed is shown here."))


def _set(viewer: Viewer, now: Mapping[str, object], name: str, own: object) -> Callable[[object], None]:
    def act(value: object) -> None:
        kept = {other: setting for other, setting in now.items() if other != name}
        if value != own:
            kept[name] = value
        viewer.select_all({"set": classroom.changes_text(kept), "moment": None, "answer": None})

    return act


def _reset(viewer: Viewer) -> Callable[[], None]:
    return lambda: viewer.select_all({"set": None, "moment": None, "answer": None})


def _difference(viewer: Viewer, lesson: Lesson, changes: Changes) -> None:
    found = classroom.difference_of(lesson, changes)
    looks = [
        parameter.look_for.text.say(viewer.language)
        for parameter in lesson.parameter
        if parameter.look_for is not None and parameter.name in dict(changes)
    ]
    hint = "".join(f'<p class="cr-note">{escape(text)}</p>' for text in looks)
    if found.is_same:
        st.html(f'<div class="cr" data-testid="difference">{hint}<p>{escape(t("Nothing changed."))}</p></div>')
        return
    st.html(f'<div class="cr" data-testid="difference">{hint}{_first(viewer, found)}{_table(found)}</div>')


def _first(viewer: Viewer, found: Comparison) -> str:
    sides = []
    for title, moment in zip((t("before"), t("now")), found.first, strict=True):
        if moment is None:
            continue
        said = "".join(f"<p>{escape(sentence.say(viewer.language))}</p>" for sentence in moment.sentences)
        place = t("moment {n}", n=moment.index)
        heading = f"{title} · {place} · {moment.title.say(viewer.language)}"
        sides.append(f"<div><h4>{escape(heading)}</h4>{said}</div>")
    if not sides:
        return ""
    return f'<h4>{escape(t("The first decision that differs"))}</h4><div class="cr-two">{"".join(sides)}</div>'


def _table(found: Comparison) -> str:
    if not found.changes:
        return ""
    rows = "".join(
        f"<tr><td>{escape(change.rid)}</td><td>{escape(t(_FIELDS[change.field]))}</td>"
        f'<td class="n">{f.count(change.before)}</td><td class="n">{f.count(change.after)}</td></tr>'
        for change in found.changes
    )
    heads = "".join(f"<th>{escape(head)}</th>" for head in (t("request"), "", t("before"), t("now")))
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _own_lesson(viewer: Viewer, faults: list[str]) -> None:
    for fault in faults:
        _fault(fault)
    with st.expander(t("Open a lesson of your own")):
        st.caption(t("A TOML file; docs/teaching.md says how to write one. It stays on this page."))
        st.file_uploader(
            t("Lesson file"), type="toml", key="lesson_file", label_visibility="collapsed", on_change=_take_own(viewer)
        )
        refused: str | None = st.session_state.get("lesson_fault")
        if refused:
            _fault(refused)


def _take_own(viewer: Viewer) -> Callable[[], None]:
    def act() -> None:
        found = st.session_state.get("lesson_file")
        st.session_state["lesson_fault"] = None
        if found is None:
            return
        try:
            lesson = parse_lesson(found.getvalue(), source=found.name)
            classroom.story_of(lesson, ())
        except LessonError as error:
            st.session_state["lesson_fault"] = str(error)
            return
        st.session_state[_OWN] = lesson
        _open(viewer, lesson.id)

    return act


def _fault(text: str) -> None:
    lines = "".join(f"<span><code>{escape(line)}</code></span>" for line in text.splitlines())
    said = escape(t("This lesson cannot be played as it is."))
    st.html(f'<div class="nothing" role="alert"><strong>{said}</strong>{lines}</div>')

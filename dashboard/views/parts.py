"""Small parts that several views use: headings, legends, the story of one request."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from html import escape
from typing import Final

import streamlit as st

from dashboard import formats as f
from dashboard.feed import Asked
from dashboard.session import Viewer, box_key, on_box
from dashboard.tables import Table
from dashboard.troubles import Trouble, trouble
from dashboard.words import t
from telemetry.client import Source
from telemetry.explain_ids import abbreviated
from telemetry.observe import Explanation, Head, PageFact

_MARKED: Final = re.compile("\0(.*?)\1(.*?)\2")


def legend(items: list[tuple[str, str, str]], *, shape: str = "box") -> None:
    """A legend of (colour, label, amount) in one row. `shape` is box, line or outline."""
    spans = "".join(
        f'<span><i class="legend-{shape}" style="--mark:{escape(colour)}"></i>{escape(label)}'
        f"{f' <b>{escape(amount)}</b>' if amount else ''}</span>"
        for colour, label, amount in items
    )
    st.html(f'<div class="legend-row">{spans}</div>')


def choice(
    viewer: Viewer, name: str, options: Mapping[str, str], *, label: str, unless_chosen: str | None = None
) -> str:
    """One of a few, kept in the address as the selection `name`.

    options        value to English text; the text is shown in the reader's language
    label          what is chosen, for readers who do not see the page
    unless_chosen  one of `options`; None: the first
    """
    value = choice_of(viewer, name, options, unless_chosen=unless_chosen)
    box = box_key(name, value)
    # Said now: Streamlit reads an answer by its label, before the run that follows has a language.
    said = {option: t(text) for option, text in options.items()}
    st.segmented_control(
        t(label),
        list(options),
        format_func=said.__getitem__,
        default=value,
        key=box,
        label_visibility="collapsed",
        # The control lets its choice be taken back; here something is always chosen.
        on_change=on_box(name, box, lambda chosen: viewer.select(name, chosen or value)),
    )
    return value


def choice_of(viewer: Viewer, name: str, options: Mapping[str, str], *, unless_chosen: str | None = None) -> str:
    """What `choice` of the same words stands at, without drawing it."""
    chosen = viewer.selection(name)
    return chosen if chosen is not None and chosen in options else unless_chosen or next(iter(options))


def page_fact(viewer: Viewer, page: int) -> Asked[PageFact]:
    """Who holds one page; the same question wherever it is asked."""
    key, question = page_question(page)
    return viewer.ask(*key, question=question)


def page_question(page: int) -> tuple[tuple[object, ...], Callable[[Source], PageFact | None]]:
    """Its key, and the question itself."""
    return ("page", page), lambda source: source.page(page)


def read_later(viewer: Viewer, answer: Head) -> None:
    """Says by how much `answer` is younger than a paused page: it may not fit what else is shown."""
    status = viewer.look().status if viewer.is_paused else None
    if status is not None and answer.step > status.step:
        st.caption(
            t(
                "Read at step {step}, {time} later; the rest stands at step {paused}.",
                step=f.count(answer.step),
                time=f.duration(max(answer.t_ns - status.t_ns, 0) / 1e9),
                paused=f.count(status.step),
            )
        )


def fitting(viewer: Viewer, table: Table) -> Table:
    """`table` with advice that fits what is shown: nobody sends requests to a recording."""
    return table if table.rows else replace(table, empty=(table.empty[0], advice_here(viewer, table.empty[1])))


def advice_here(viewer: Viewer, advice: str) -> str:
    """`advice` for who runs an engine; of a recording another moment is what can be asked for."""
    return t("Move the slider above to another moment of the recording.") if viewer.place.is_recorded else advice


def waiting_for_engine(viewer: Viewer, error: str | None) -> None:
    """What a panel shows before the first answer ever came. `error` says why it did not, None while it is awaited."""
    wrong = trouble(viewer.look(), viewer.place) if error else None
    if wrong is None:
        what = t("Reading the journal.") if viewer.place.is_recorded else t("Waiting for the first answer.")
        wrong = Trouble(what, viewer.place.where, t("This page fills by itself."))
    st.html(
        f'<div class="nothing"><strong>{escape(wrong.title)}</strong><span>{escape(wrong.what)}</span>'
        f"<span>{_with_code(wrong.advice)}</span></div>"
    )


def _with_code(text: str) -> str:
    """HTML of a text in which `backquotes` mark what is typed."""
    parts = text.split("`")
    return "".join(f"<code>{escape(part)}</code>" if at % 2 else escape(part) for at, part in enumerate(parts))


def explained(told: Explanation | None) -> str:
    """HTML of the sentences. A long id is whole where it is first met; after that, short, and whole as a hint."""
    sentences, ids = (told.sentences, told.named) if told is not None else ((), ())
    # Marked first and escaped after: a short form of what is escaped might end within an entity.
    marked = abbreviated(sentences, ids, "\0{}\1{}\2".format)
    lines = (_MARKED.sub(r'<span title="\1">\2</span>', escape(line)) for line in marked)
    return f'<ol class="explain" data-testid="explain">{"".join(f"<li>{line}</li>" for line in lines)}</ol>'


def no_story(viewer: Viewer, rid: str, error: str | None) -> None:
    """What stands where the story of `rid` would: it is not known, or, with `error`, nobody could be asked."""
    if error:
        title, rest = t("No answer about {rid}", rid=rid), error
    elif viewer.place.is_recorded:
        title = t("This recording has no request {rid}", rid=rid)
        rest = t("None came up to this moment, or it ended long before. Move the slider above, or pick another one.")
    else:
        title = t("The engine does not know {rid}", rid=rid)
        rest = t("It keeps the latest requests only. Pick another one.")
    st.html(f'<div class="nothing"><strong>{escape(title)}</strong><span>{escape(rest)}</span></div>')


def request_story(viewer: Viewer, rid: str) -> None:
    """Why a request waits, was late or ended, in sentences. The view "Requests" tells the rest."""
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        why = escape(t("Why {rid}")).replace("{rid}", f"<code>{escape(rid)}</code>")
        st.html(f'<h3 class="why">{why}</h3>', width="content")
        with st.container(horizontal=True, width="content"):
            st.button(t("All about it"), key="whole_story", on_click=viewer.select, args=("view", "requests"))
            st.button(t("Close"), key="close_story", on_click=viewer.close_story, type="tertiary")
    found = viewer.detail(rid)
    if found.explanation is None:
        no_story(viewer, rid, found.error)
        return
    st.html(explained(found.explanation))
    read_later(viewer, found.explanation)

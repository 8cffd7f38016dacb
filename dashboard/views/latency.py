"""The view "Latency": what TTFT is made of, how late tokens come and why, and how much meets the objectives."""

from __future__ import annotations

from html import escape

import pandas as pd
import streamlit as st

from dashboard import charts_latency as charts
from dashboard import formats as f
from dashboard import frames_latency as frames
from dashboard.feed import Look
from dashboard.session import Viewer
from dashboard.theme import cause_colour
from dashboard.views.parts import advice_here, legend, waiting_for_engine
from dashboard.words import t
from telemetry.observe import LatencyBreakdown

#: Causes below this share of the mean are told in the legend's tooltip only.
_SHOWN_SHARE = 0.002


def show(viewer: Viewer, look: Look) -> None:
    """The two answers in words first, then the charts that they are read from."""
    told = look.breakdown
    if told is None:
        if look.status is None:
            waiting_for_engine(viewer, look.error)
        else:
            _nothing(t("This source does not say"), t("Its engine is older than this page and has no breakdown."))
        return
    if not told.firsts_total and not told.gaps:
        _nothing(
            t("No token in the last {window}", window=frames.plain(told.window_s)),
            advice_here(
                viewer,
                t("Send requests, or run bench/serve.py against the engine: the parts appear with the first token."),
            ),
        )
        return
    _headline(told)
    left, right = st.columns([1.25, 1], gap="medium")
    with left:
        _stack(viewer, told)
        _gaps(viewer, told)
    with right:
        _firsts(viewer, told)
        _deciles(viewer, told)


def _nothing(title: str, advice: str) -> None:
    st.html(f'<div class="nothing"><strong>{escape(title)}</strong><span>{escape(advice)}</span></div>')


def _headline(told: LatencyBreakdown) -> None:
    said = frames.queue_sentence(told)
    tail = frames.tail_of(told, 0.99)
    beyond = tail.waiting_longer if tail is not None else None
    lines = frames.objective_lines(told)
    cards = []
    if said is not None:
        numbers = said[1]
        if beyond:
            numbers += " " + t(
                "{n} requests that still wait for their first token have waited longer than that, and are not in it.",
                n=f.count(beyond),
            )
        cards.append(f"<p data-testid='p99-queueing'><b>{escape(said[0])}</b><span>{escape(numbers)}</span></p>")
    objectives = "".join(f"<li><b>{escape(share)}</b> {escape(words)}</li>" for share, words in lines)
    cards.append(f"<ul data-testid='objectives'>{objectives}</ul>")
    st.html(f'<div class="headline">{"".join(cards)}</div>')


def _stack(viewer: Viewer, told: LatencyBreakdown) -> None:
    st.subheader(t("Parts of TTFT over time"), anchor=False)
    whole = frames.tail_of(told, 0.0)
    if whole is None:
        st.caption(t("No first token in the last {window}.", window=frames.plain(told.window_s)))
        return
    legend(
        [
            (cause_colour(viewer.colours, cause), frames.with_order(cause, whole.order_ns), f.share(share, 1.0))
            for cause, _, share in frames.shares(whole)
            if share >= _SHOWN_SHARE
        ]
    )
    st.altair_chart(charts.stack_chart(frames.stack_frame(told), viewer.colours), width="stretch", key="ttft_stack")
    st.caption(
        t(
            "Means of {slot}; slots without a first token are empty. Waiting is told by blocker. Shares are of all "
            "{n} first tokens of the last {window}.",
            slot=frames.plain(told.slot_s),
            window=frames.plain(told.window_s),
            n=f.count(whole.count),
        )
    )


def _firsts(viewer: Viewer, told: LatencyBreakdown) -> None:
    st.subheader(t("Prompt length and TTFT"), anchor=False)
    firsts = frames.first_frame(told)
    if firsts.empty:
        st.caption(t("No first token in the last {window}.", window=frames.plain(told.window_s)))
        return
    legend(
        [
            (cause_colour(viewer.colours, cause), f.cause_name(cause), f.count(n))
            for cause, n in frames.cause_mix(firsts)
        ]
    )
    objective = _objective(told.ttft_objective_s)
    st.altair_chart(charts.first_chart(firsts, objective, viewer.colours), width="stretch", key="first_tokens")
    shown = t("{n} of {all} first tokens", n=f.count(len(firsts)), all=f.count(told.firsts_total))
    st.caption(t("{shown}, coloured by what took longest: circles waited, squares were worked on.", shown=shown))


def _gaps(viewer: Viewer, told: LatencyBreakdown) -> None:
    st.subheader(t("Gaps between tokens (TBT)"), anchor=False)
    gaps = frames.gap_frame(told)
    if gaps.empty:
        st.caption(t("No second token in the last {window}.", window=frames.plain(told.window_s)))
        return
    st.altair_chart(
        charts.gap_chart(gaps, _objective(told.gap_objective_s), viewer.colours), width="stretch", key="gap_histogram"
    )
    late = frames.stall_frame(told)
    total = sum(told.late.values())
    st.subheader(
        t("Why {n} of {all} tokens came late", n=f.count(total), all=f.count(told.gaps))
        if total
        else t("No token came late"),
        anchor=False,
    )
    if late.empty:
        st.caption(
            t("Late is more than {objective} after the one before.", objective=frames.plain(told.gap_objective_s))
        )
        return
    st.altair_chart(
        charts.stall_chart(late, viewer.colours, height=38 * len(late) + 8), width="stretch", key="late_causes"
    )


def _deciles(viewer: Viewer, told: LatencyBreakdown) -> None:
    if not told.deciles:
        return
    st.subheader(
        t("First tokens within {objective}, by prompt length", objective=frames.plain(told.ttft_objective_s)),
        anchor=False,
    )
    st.altair_chart(charts.decile_chart(frames.decile_frame(told), viewer.colours), width="stretch", key="slo_deciles")
    st.caption(t("Each bar is about a tenth of the first tokens, by the length of their prompts."))


def _objective(seconds: float) -> pd.DataFrame:
    words = t("objective {objective}", objective=frames.plain(seconds))
    return pd.DataFrame([(seconds, words)], columns=["seconds", "words"])

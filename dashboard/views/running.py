"""A child of the page at work: how far it is, how long it took, and the button that ends it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import streamlit as st

from dashboard import formats as f
from dashboard.words import t
from telemetry.errands import Standing


@st.fragment(run_every=0.5)
def running(
    standing_now: Callable[[], Standing[Any] | None],
    phases: Mapping[str, str],
    *,
    timed: str,
    key: str,
    stop: Callable[[], None],
) -> None:
    """Reruns by itself, also where the page stands still; the page follows when it is over.

    phases  what each phase is called, in the reader's language
    timed   the phase whose share tells how much time is left
    """
    standing = standing_now()
    if standing is None or standing.state != "running":
        st.rerun()
    said = phases.get(standing.phase, standing.phase)
    left = ""
    if standing.phase == timed and standing.share >= 0.05:
        left_s = standing.elapsed_s * (1 - standing.share) / standing.share
        left = " · " + t("about {time} left", time=f.duration(left_s))
    st.progress(standing.share, text=f"{said} · {f.duration(standing.elapsed_s)}{left}")
    st.button(t("Stop"), key=key, on_click=stop)

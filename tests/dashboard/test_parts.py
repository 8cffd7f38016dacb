"""Parts that several views share."""

from __future__ import annotations

from dashboard.views.parts import explained
from telemetry.observe import Explanation


def test_a_long_id_is_whole_once_in_the_sentences_and_then_short_with_a_hint() -> None:
    long = "chatcmpl-0123456789<abc>def-first"
    head = {"engine_id": "e", "observe_seq": 1, "step": 9, "t_ns": 9, "t_wall_s": 1.0}
    said = (f"Request {long} arrived.", f"Ahead of it: {long}, r7.")
    shown = explained(Explanation(**head, rid="r7", sentences=said, named=("r7", long)))
    whole = "chatcmpl-0123456789&lt;abc&gt;def-first"
    assert f"<li>Request {whole} arrived.</li>" in shown
    assert f'<li>Ahead of it: <span title="{whole}">chatcmpl-01…-first</span>, r7.</li>' in shown

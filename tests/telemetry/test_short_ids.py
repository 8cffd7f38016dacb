"""Shortened ids: what a page shows leads back to the request, and never to another one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dashboard.formats import short_rid
from telemetry.short_ids import meant, shortened

RIDS = st.text(alphabet="ab1-", min_size=1, max_size=40)


@given(rid=RIDS, others=st.lists(RIDS))
def test_a_shortened_id_means_its_request_and_only_such_as_fit_it(rid: str, others: list[str]) -> None:
    for asked in (shortened(rid), shortened(rid).replace("…", "...")):
        found = meant(asked, [*others, rid])
        assert rid in found
        assert all(shortened(each) == shortened(rid) or "…" not in shortened(rid) for each in found)


@given(rid=RIDS, limit=st.integers(8, 30))
def test_command_line_and_page_shorten_alike(rid: str, limit: int) -> None:
    assert shortened(rid, limit) == short_rid(rid, limit)


def test_an_id_itself_comes_first_and_a_beginning_lists_all_that_it_begins() -> None:
    known = ["r1", "r10", "r11", "x", "r1"]
    assert meant("r1", known) == ("r1",)
    assert meant("r", known) == ("r1", "r10", "r11")
    assert meant("r…1", known) == ("r1", "r11")
    assert meant("1", known) == meant("…", known) == meant("", known) == ()

"""A page move is judged and followed the same accepted as a whole, judged page by page, or among others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine.events import SCHEMA_VERSION, EngineStarted, PagesMoved
from invariants import page_laws
from invariants.page_book import PageBook
from invariants.page_laws import LEGAL
from invariants.shadow import Shadow
from tests.builders import engine_config

PAGES, ROWS = 12, 4
CAUSES = sorted(LEGAL)


def books(states: list[int], owners: list[int]) -> Shadow:
    """Second books of a pool whose pages are in the given states."""
    config = engine_config(num_pages=PAGES).model_dump_json()
    shadow = Shadow(EngineStarted(0, 0, 0, SCHEMA_VERSION, "", config, "", "", 16, PAGES, ROWS, 0, ""))
    whose = [-1 if state == 0 else owner for state, owner in zip(states, owners, strict=True)]
    shadow.pool.set_all(np.array(states), np.array(whose))
    shadow.in_commit = True
    return shadow


def picture(shadow: Shadow) -> tuple[Any, ...]:
    """Everything that the books say of pages."""
    private = [shadow.pool.private_pages(row) for row in range(-1, ROWS + 2)]
    return shadow.pool.tags.tolist(), shadow.pool.counts, private, shadow.claimed_rows


def follow(shadow: Shadow, events: list[PagesMoved]) -> list[str]:
    """Take moves one by one; the laws that they break."""
    told: list[str] = []
    for event in events:
        page_laws.on_pages(shadow, event, lambda law, *_, **__: told.append(law))
    return sorted(set(told))


pool_states = st.lists(st.integers(0, 3), min_size=PAGES, max_size=PAGES)
pool_owners = st.lists(st.integers(0, 2), min_size=PAGES, max_size=PAGES)
#: Any pages, or a run of them, which is followed as bytes.
moved_pages = st.one_of(
    st.lists(st.integers(-1, PAGES), min_size=1, max_size=5),
    st.builds(lambda first, count: list(range(first, first + count)), st.integers(0, PAGES - 3), st.integers(1, 5)),
)


def moved(pages: list[int], move: tuple[str, str, str], owner: int) -> PagesMoved:
    source, target, cause = move
    prefix = {"free": "", "private": "r:", "protected": "n:", "evictable": "n:"}[target]
    label = f"{prefix}{owner}" if prefix else ""
    return PagesMoved(1, 7, 0, np.array(pages, "<i4").tobytes(), source, target, label, cause)


@settings(max_examples=600, deadline=None)
@given(
    states=pool_states,
    owners=pool_owners,
    uniform=st.booleans(),
    pages=moved_pages,
    move=st.sampled_from(CAUSES),
    owner=st.integers(0, 2),
    claimed=st.lists(st.integers(0, PAGES - 1), max_size=1),
)
def test_accepted_and_judged_moves_agree(
    states: list[int],
    owners: list[int],
    uniform: bool,
    pages: list[int],
    move: tuple[str, str, str],
    owner: int,
    claimed: list[int],
) -> None:
    if uniform:  # else hardly a move is right
        states, owners = [states[0]] * PAGES, [owners[0]] * PAGES
    outcomes = []
    for judged in (False, True):
        shadow = books(states, owners)
        for page in claimed:
            shadow.pool.remember_claim(np.array([page], "<i4").tobytes())
        with pytest.MonkeyPatch.context() as patch:
            if judged:
                patch.setattr(PageBook, "follow", lambda *_: None)
            outcomes.append((follow(shadow, [moved(pages, move, owner)]), picture(shadow)))
    assert outcomes[0] == outcomes[1]


@settings(max_examples=400, deadline=None)
@given(
    states=st.one_of(pool_states, st.just([0] * PAGES)),
    claims=st.lists(st.tuples(moved_pages, st.integers(0, ROWS + 1)), min_size=1, max_size=4),
    shift=st.booleans(),
)
def test_claims_together_are_claims_one_by_one(
    states: list[int], claims: list[tuple[list[int], int]], shift: bool
) -> None:
    if shift:  # one run, as a pool gives pages out while nothing came back
        first = 0
        for index, (pages, row) in enumerate(claims):
            claims[index] = (list(range(first, first + len(pages))), row)
            first += len(pages)
    events = [moved(pages, ("free", "private", "claim"), row) for pages, row in claims]
    alone, together = books(states, [1] * PAGES), books(states, [1] * PAGES)
    before = picture(together)
    told = follow(alone, events)
    if page_laws.follow_claims(together, events):
        assert (told, picture(together)) == ([], picture(alone))
    else:
        assert picture(together) == before, "refused claims changed something"
        rows = [row for _, row in claims]
        assert told or len(set(rows)) < len(rows) or max(rows) >= ROWS, "refused for nothing"


@settings(max_examples=400, deadline=None)
@given(
    states=st.one_of(pool_states, st.just([0] * PAGES)),
    pages=st.lists(st.integers(-1, PAGES), min_size=1, max_size=6),
    rows=st.lists(st.integers(-1, ROWS + 1), min_size=6, max_size=6),
    is_run=st.booleans(),
)
def test_a_claim_of_several_rows_is_their_claims_one_by_one(
    states: list[int], pages: list[int], rows: list[int], is_run: bool
) -> None:
    if is_run:
        pages = list(range(len(pages)))
    rows = rows[: len(pages)]
    shared = structs.replace(
        moved(pages, ("free", "private", "claim"), 0), owner="", owners=np.array(rows, "<i4").tobytes()
    )
    alone, together, judged = (books(states, [1] * PAGES) for _ in range(3))
    before = picture(together)
    apart = [structs.replace(shared, owner=owner, pages=part, owners=b"") for owner, part in shared.parts()]
    assert b"".join(each.pages for each in apart) == shared.pages
    told = follow(alone, apart)
    assert follow(judged, [shared]) == told
    if not told:
        assert picture(judged) == picture(alone)
    if page_laws.follow_growth(together, shared):
        assert (told, picture(together)) == ([], picture(alone))
    else:
        assert picture(together) == before, "a refused claim changed something"
        assert told or max(rows) >= ROWS, "refused for nothing"


@pytest.mark.parametrize(
    "change",
    [{"owner": "r:1"}, {"owners": b""}, {"owners": b"\1\0\0\0"}, {"owners": b"\1\0\0\0\2"}, {"cause": "insert"}],
)
def test_rows_that_do_not_fit_the_pages_are_reported(change: dict[str, Any]) -> None:
    shadow = books([0] * PAGES, [0] * PAGES)
    claim = structs.replace(
        moved([3, 4], ("free", "private", "claim"), 1), owner="", owners=bytes((1, 0, 0, 0, 2, 0, 0, 0))
    )
    assert not page_laws.follow_growth(shadow, structs.replace(claim, **change)) or "cause" in change
    assert "INV-PAGE-02" in follow(books([0] * PAGES, [0] * PAGES), [structs.replace(claim, **change)])


def test_a_claimed_page_may_not_be_evicted_in_the_same_commit() -> None:
    shadow = books([0] * PAGES, [0] * PAGES)
    claim = moved([3, 4], ("free", "private", "claim"), 1)
    assert page_laws.follow_claims(shadow, [claim])
    insert = moved([4], ("private", "evictable", "insert"), 9)
    assert follow(shadow, [insert]) == ["INV-PAGE-03"]
    shadow.close_plan(1.0)
    shadow.in_commit = True
    assert follow(shadow, [moved([3], ("private", "evictable", "insert"), 9)]) == []
